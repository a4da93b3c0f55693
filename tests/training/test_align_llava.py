"""Test that a LLaVA with a SparseFormer as its vision tower learns from answers of the original LLaVA."""

import re

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file
from trainings import logged, run_command
from transformers import AutoModelForImageTextToText, AutoProcessor

from frugalvit.training.align_llava import NO_ANSWER, PALIGEMMA_PROMPT, answer, encode, pad
from runs import check_resumes, error_of
from tiny import (
    IMAGE,
    WORDS,
    make_llava,
    make_paligemma,
    make_paligemma_processor,
    make_processor,
    save_to_swap,
    word_tokenizer,
)


PROCESSOR = make_processor(make_llava())


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Save a LLaVA and a SparseFormer in one folder, and return this folder. The SparseFormer can replace the LLaVA's
    vision tower."""
    folder = tmp_path_factory.mktemp("pair")
    save_to_swap(folder, make_llava(), elastic_token_counts=[4, 7])
    return folder


@pytest.fixture(scope="module")
def options(pair) -> dict:
    return {
        "model": pair / "llava",
        "vision_model": pair / "tower",
        "learning_rate": 3e-3,
        "prompt": "{image}{question}",
        "questions": ["what is this ?", "is dog and cat ?"],
        "answer_tokens": 2,
    }


def load(folder):
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    return model.eval()


def changed(model, original) -> set[str]:
    """Return the names of the weights that differ between two models."""
    old = original.state_dict()
    return {name for name, value in model.state_dict().items() if not torch.equal(value, old.get(name, value))}


@pytest.mark.parametrize("make", [make_llava, make_paligemma])
def test_the_projector_alone_learns_to_give_the_same_answers(make, options, tmp_path, capsys):
    original = make()
    kind, out = original.config.model_type, tmp_path / "out"
    save_to_swap(tmp_path, original)
    models = {"model": tmp_path / kind, "vision_model": tmp_path / "tower", "train_split": "train[:128]"}
    # The command has a default prompt for PaliGemma, so the test gives no prompt.
    models |= {"prompt": None} if make is make_paligemma else {}
    own = run_command("align_llava", out, **options | models | {"num_train_epochs": 3})
    agreements, losses = logged(own, "eval_agreement"), logged(own, "loss")
    assert len(agreements) == 3 and own.metrics["agreement"] == max(agreements)
    assert sum(losses[-8:]) < 0.6 * sum(losses[:8])
    model = load(out)
    assert changed(model, original) == {name for name in original.state_dict() if "projector" in name}
    card = ModelCard.load(out / "README.md")
    assert f"{kind} with 7 tokens an image, those of tower; the projector learned from answers" in card.text
    assert f"{max(agreements):.2%} of the answers' tokens agree with the original's" in card.text
    assert str(tmp_path) not in card.text and f"\n{model.num_parameters():,} parameters" in card.text
    checkpoint, *_ = out.glob("checkpoint-*")
    assert all("projector" in name for name in load_file(checkpoint / "model.safetensors"))
    capsys.readouterr()
    [code] = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    exec(code.replace("path/or/id", str(out)), {"image": Image.effect_noise((48, 40), 90).convert("RGB")})
    assert capsys.readouterr().out.strip()
    if make is make_llava:
        assert AutoProcessor.from_pretrained(out).num_additional_image_tokens == 7 + 1


def test_a_stopped_run_continues(options, tmp_path):
    check_resumes("align_llava", tmp_path, 5, **options)


def test_a_wrong_prompt_is_one_line(options, tmp_path, capsys):
    wrong = options | {"prompt": "{question}"}
    assert "prompt is '{question}', expected" in error_of("align_llava", tmp_path / "out", capsys, **wrong)


def test_a_text_has_one_bos_token():
    processor = make_processor(make_llava())
    special = {"extra_special_tokens": {"image_token": "<image>"}, "additional_special_tokens": ["[EOS]"]}
    processor.tokenizer = word_tokenizer([*WORDS, "[BOS]", "[EOS]"], **special)
    assert encode(processor, 2, "what", "{image}{question}") == [len(WORDS), IMAGE, IMAGE, WORDS.index("what")]


def test_answers_equal_those_of_generate():
    llava, prompt = make_llava(), "{image}{question}"
    images = [Image.effect_noise((32, 32), 60 + seed).convert("RGB") for seed in range(6)]
    pixel_values = PROCESSOR.image_processor(images, return_tensors="pt")["pixel_values"]
    questions = ["what is this ?", "what ?", "is this cat and dog ?"] * 2
    unended, every, _ = answer(llava, PROCESSOR, pixel_values, questions, prompt, 4)
    # The second token of an answer becomes the end-of-sequence token, so this answer must end there.
    llava.generation_config.eos_token_id = end = unended[0][1]
    answers, logits, seen = answer(llava, PROCESSOR, pixel_values, questions, prompt, 4)
    assert len(logits) < len(every)
    for tokens, question, image in zip(answers, questions, images, strict=True):
        inputs = PROCESSOR(images=image, text=f"<image>{question}", return_tensors="pt")
        whole = llava.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert tokens == whole[0, inputs["input_ids"].shape[1] :].tolist() and end not in tokens[:-1]
    assert logits.argmax(-1).tolist() == [token for tokens in answers for token in tokens]
    features = llava.get_image_features(pixel_values).pooler_output
    torch.testing.assert_close(seen, torch.stack([each.mean(0) for each in features]))


@torch.no_grad()
def test_inputs_of_a_paligemma_equal_those_of_its_processor():
    """The `token_type_ids` must be equal, because they let the tokens of a question attend to each other."""
    paligemma, processor = make_paligemma(), make_paligemma_processor()
    questions = ["what is this ?", "is this cat and dog ?"]
    end = processor.tokenizer.eos_token_id
    answers = [[WORDS.index(word)] + ([] if end is None else [end]) for word in ("cat", "ship")]
    inputs, labels = pad([encode(processor, 64, each, PALIGEMMA_PROMPT) for each in questions], answers, processor)
    pictures = [[Image.new("RGB", (32, 32), color)] for color in ("red", "blue")]
    texts = ["<image>what is this ?", "<image>is this cat and dog ?"]
    expected = processor(images=pictures, text=texts, suffix=["cat", "ship"], padding=True, return_tensors="pt")
    mask = inputs["attention_mask"].bool()
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(inputs[name][mask], expected[name][mask]), name
    assert torch.equal(labels, expected["labels"].where(mask, NO_ANSWER))
    answers, *_ = answer(paligemma, processor, expected["pixel_values"], ["what is this ?"] * 2, PALIGEMMA_PROMPT, 3)
    prompts = processor(images=pictures, text=["<image>what is this ?"] * 2, return_tensors="pt")
    prompts.pop("labels")
    assert paligemma.generate(**prompts, max_new_tokens=3, do_sample=False)[:, -3:].tolist() == answers
