"""Files of conversations, conversations as tokens, and a LLaVA of which a part learns."""

import functools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from frugalvit.training.llava import NO_ANSWER, Learner, answer, default_prompt, encode, pad, read_conversations
from tiny import IMAGE, WORDS, make_llava, make_paligemma, make_paligemma_processor, make_processor, word_tokenizer


PROCESSOR = make_processor(make_llava())


def said(*texts):
    return [{"from": "gpt" if number % 2 else "human", "value": text} for number, text in enumerate(texts)]


@pytest.fixture
def write(tmp_path):
    """Writes records beside the image `a.png`, as JSON or JSON lines."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")

    def write_records(records, name="conversations.json"):
        lines = name.endswith("l")
        text = "\n".join(map(json.dumps, records)) + "\n" if lines else json.dumps(records)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write_records


@pytest.mark.parametrize("name", ["conversations.json", "conversations.jsonl"])
def test_reads_what_is_said_about_images(write, name):
    records = [
        {"id": "0", "image": "a.png", "conversations": said("<image>\nwhat is this ?", "cat", "and this ?", " dog ")},
        {"id": "1", "conversations": said("what ?", "nothing")},
        {"id": "2", "image": "a.png", "conversations": said("what ?\n<image>", "ship")},
    ]
    read = read_conversations(write(records, name))
    assert read["turns"][:] == [[["what is this ?", "cat"], ["and this ?", "dog"]], [["what ?", "ship"]]]
    assert [record["image"]["path"] for record in read] == [str(write(records).parent / "a.png")] * 2


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([1], "Cannot read LLaVA's conversations from"),
        ([{"image": "b.png"}], "has the image 'b.png', which is not in"),
        ([{"conversations": said("a", "b")}], "has no conversation about an image"),
        (
            [{"image": "a.png", "conversations": said("a", "b")[::-1]}],
            'expected texts from "human" and "gpt" in turns',
        ),
        ([{"image": "a.png", "conversations": ["a", "b"]}], "expected texts"),
        ([{"image": "a.png", "conversations": said("a", None)}], "expected texts"),
        ([{"image": "a.png", "conversations": said("a", " ")}], "no empty answer"),
        ([{"image": "a.png", "conversations": said("<image> <image>", "a")}], "one <image> at most"),
    ],
)
def test_what_is_no_conversation_is_refused(write, records, message):
    with pytest.raises(ValueError, match=message):
        read_conversations(write(records))


@given(st.lists(st.tuples(st.sampled_from(WORDS[2:10]), st.sampled_from(WORDS[7:10])), min_size=1), st.integers(0, 9))
def test_answers_are_what_is_learned(turns, image_tokens):
    ids, labels = encode(PROCESSOR, image_tokens, turns, " {image}{question} ?")
    expected, answers = [IMAGE] * image_tokens, []
    for question, given_answer in turns:
        expected += [WORDS.index(question), WORDS.index("?"), WORDS.index(given_answer)]
        answers.append(len(expected) - 1)
    assert ids == expected
    assert labels == [token if place in answers else NO_ANSWER for place, token in enumerate(ids)]


def test_a_text_begins_once_and_answers_end_it():
    processor = make_processor(make_llava())
    special = {"extra_special_tokens": {"image_token": "<image>"}, "additional_special_tokens": ["[EOS]"]}
    processor.tokenizer = word_tokenizer([*WORDS, "[BOS]", "[EOS]"], **special)
    begin, end = len(WORDS), len(WORDS) + 1
    what, cat, dog = (WORDS.index(word) for word in ("what", "cat", "dog"))
    ids, labels = encode(processor, 1, [("what", "cat"), ("what", "dog")], "{image}{question}")
    assert ids == [begin, IMAGE, what, cat, end, what, dog, end]
    assert labels == [NO_ANSWER] * 3 + [cat, end, NO_ANSWER, dog, end]
    asked, nothing = encode(processor, 1, [("what", "cat"), ("what", None)], "{image}{question}")
    assert asked == ids[:-2] and nothing == [NO_ANSWER] * 3 + [cat, end, NO_ANSWER]


def test_answers_are_those_that_generate_gives():
    llava, processor = make_llava(), make_processor(make_llava())
    images = [Image.effect_noise((32, 32), 60 + seed).convert("RGB") for seed in range(6)]
    pixel_values = processor.image_processor(images, return_tensors="pt")["pixel_values"]
    questions = ["what is this ?", "what ?", "is this cat and dog ?"] * 2
    ask = functools.partial(answer, llava, processor, pixel_values, questions, "{image}{question}", 4)
    unended = ask()
    # What ends one of them before its last token.
    llava.generation_config.eos_token_id = end = unended.tokens[0][1]
    answers = ask()
    assert len(answers.logits) < len(unended.logits)
    for tokens, question, image in zip(answers.tokens, questions, images, strict=True):
        inputs = processor(images=image, text=f"<image>{question}", return_tensors="pt")
        whole = llava.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert tokens == whole[0, inputs["input_ids"].shape[1] :].tolist() and end not in tokens[:-1]
    flat = [token for tokens in answers.tokens for token in tokens]
    assert answers.logits.argmax(-1).tolist() == flat
    features = llava.get_image_features(pixel_values).pooler_output
    torch.testing.assert_close(answers.seen, torch.stack([each.mean(0) for each in features]))
    # As a student is asked for them: all end together, and labels are the answers alone.
    asked = [encode(processor, 64, [(question, None)], "{image}{question}") for question in questions]
    rows = [(ids + tokens, labels + tokens) for (ids, labels), tokens in zip(asked, answers.tokens, strict=True)]
    inputs, labels = pad(rows, processor)
    assert (inputs["attention_mask"][:, -1] == 1).all() and (inputs["attention_mask"] == 0).any()
    assert labels[labels != NO_ANSWER].tolist() == flat


@torch.no_grad()
def test_a_paligemma_is_asked_as_its_processor_does():
    """The tokens that a PaliGemma is given are its processor's, and so are the types of tokens, which say that those
    of a question look at each other."""
    paligemma, processor = make_paligemma(), make_paligemma_processor()
    prompt = default_prompt(processor)
    turns = [[("what is this ?", "cat")], [("is this cat and dog ?", "ship")]]
    inputs, labels = pad([encode(processor, 64, each, prompt) for each in turns], processor)
    pictures = [[Image.new("RGB", (32, 32), color)] for color in ("red", "blue")]
    texts = ["<image>what is this ?", "<image>is this cat and dog ?"]
    expected = processor(images=pictures, text=texts, suffix=["cat", "ship"], padding=True, return_tensors="pt")
    mask = inputs["attention_mask"].bool()
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(inputs[name][mask], expected[name][mask]), name
    assert torch.equal(labels, expected["labels"].where(mask, NO_ANSWER))
    answers = answer(paligemma, processor, expected["pixel_values"], ["what is this ?"] * 2, prompt, 3)
    prompts = processor(images=pictures, text=["<image>what is this ?"] * 2, return_tensors="pt")
    prompts.pop("labels")
    assert paligemma.generate(**prompts, max_new_tokens=3, do_sample=False)[:, -3:].tolist() == answers.tokens


@torch.no_grad()
def test_what_was_learned_of_the_language_model_is_added_to_it():
    llava, processor = make_llava(), make_processor(make_llava())
    inputs = processor(images=Image.new("RGB", (32, 32), "red"), text="<image> what ?", return_tensors="pt")
    before = llava(**inputs).logits
    learner = Learner(llava)
    learner.add_lora(4)
    for layer in learner.lora_layers.values():
        layer.lora_B["default"].weight.normal_(std=0.3)
    learned = llava(**inputs).logits
    assert (learned - before).abs().max() > 0.1
    with learner.as_it_was():
        assert torch.equal(llava(**inputs).logits, before)
    plain = make_llava()
    plain.load_state_dict(learner.whole_state())
    torch.testing.assert_close(plain(**inputs).logits, learned, rtol=1e-4, atol=1e-4)
