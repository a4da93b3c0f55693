"""LLaVA's files of conversations, and conversations as tokens."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from frugalvit.common.conversations import NO_ANSWER, encode, hold_back_conversations, read_conversations
from tiny import IMAGE, WORDS, make_llava, make_processor, word_tokenizer


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
    images, conversations = read_conversations(write(records, name))
    assert conversations == [[("what is this ?", "cat"), ("and this ?", "dog")], [("what ?", "ship")]]
    assert [record["image"]["path"] for record in images] == [str(write(records).parent / "a.png")] * 2


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ({}, r"holds no list of records"),
        ([1], r"holds no list of records"),
        ([{"image": "b.png"}], "Record 0 .* has the image 'b.png', which is not in"),
        ([{"conversations": said("a", "b")}], "has no conversation about an image"),
        ([{"image": "a.png", "conversations": said("a", "b")[::-1]}], r"in turns, got \['gpt', 'human'\]"),
        ([{"image": "a.png", "conversations": ["a", "b"]}], r"in turns, got \[None, None\]"),
        ([{"image": "a.png", "conversations": said("a", None)}], "says None, expected a text"),
        ([{"image": "a.png", "conversations": said("a", " ")}], "Record 0 .* has an answer without words"),
        ([{"image": "a.png", "conversations": said("<image> <image>", "a")}], "expected one image a conversation"),
    ],
)
def test_what_is_no_conversation_is_refused(write, records, message):
    with pytest.raises(ValueError, match=message):
        read_conversations(write(records))


def test_files_that_are_none(tmp_path):
    (tmp_path / "x.json").write_text("{", encoding="utf-8")
    for name in ("x.json", "y.json"):
        with pytest.raises(ValueError, match=f"Cannot read conversations from .*{name}"):
            read_conversations(tmp_path / name)


def test_a_tenth_is_held_back(write):
    records = [{"image": "a.png", "conversations": said(f"{number} ?", "cat")} for number in range(30)]
    read = read_conversations(write(records))
    (images, train), (held_images, held) = hold_back_conversations(*read, seed=0)
    assert len(train) == len(images) == 27 and len(held) == len(held_images) == 3
    assert sorted(train + held) == sorted(read[1])
    assert hold_back_conversations(*read, seed=0)[1][1] == held != hold_back_conversations(*read, seed=1)[1][1]
    with pytest.raises(ValueError, match="one conversation; expected more"):
        hold_back_conversations(read[0].select([0]), read[1][:1], seed=0)


@given(st.lists(st.tuples(st.sampled_from(WORDS[2:10]), st.sampled_from(WORDS[7:10])), min_size=1), st.integers(0, 9))
def test_answers_are_what_is_learned(turns, image_tokens):
    ids, labels = encode(PROCESSOR, image_tokens, turns, " {image}{question} ?")
    expected = [IMAGE] * image_tokens
    answers = []
    for question, answer in turns:
        expected += [WORDS.index(question), WORDS.index("?"), WORDS.index(answer)]
        answers.append(len(expected) - 1)
    assert ids == expected
    assert labels == [token if place in answers else NO_ANSWER for place, token in enumerate(ids)]


def test_a_text_begins_once_and_answers_end_it():
    processor = make_processor(make_llava())
    processor.tokenizer = word_tokenizer(
        [*WORDS, "[BOS]", "[EOS]"],
        extra_special_tokens={"image_token": "<image>"},
        additional_special_tokens=["[EOS]"],
    )
    begin, end = len(WORDS), len(WORDS) + 1
    what, cat, dog = (WORDS.index(word) for word in ("what", "cat", "dog"))
    ids, labels = encode(processor, 1, [("what", "cat"), ("what", "dog")], "{image}{question}")
    assert ids == [begin, IMAGE, what, cat, end, what, dog, end]
    assert labels == [NO_ANSWER] * 3 + [cat, end, NO_ANSWER, dog, end]
    asked, nothing = encode(processor, 1, [("what", "cat"), ("what", None)], "{image}{question}")
    assert asked == ids[:-2] and nothing == [NO_ANSWER] * 3 + [cat, end, NO_ANSWER]
