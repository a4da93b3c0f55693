"""Tests of the commands `frugalvit evaluate zero-shot`, `retrieval` and `scienceqa`."""

import io
import json

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import normalizers
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    SiglipProcessor,
)

from drawn import encode
from frugalvit import SparseFormerVisionModelWithProjection
from frugalvit.cli import main
from frugalvit.evaluation import retrieval
from frugalvit.evaluation.scienceqa import PROMPT, format_question, read_answer
from frugalvit.evaluation.two_towers import load_two_towers
from tiny import randomize, word_tokenizer


NAMES = ["airplane", "bird", "cat", "dog"]
SPECIAL = ["[PAD]", "[UNK]", "[BOS]", "[EOS]", "<image>"]
WORDS = [*SPECIAL, "a", "photo", "of", "the", "is", ".", "?", "A", "B", "C", *NAMES]
IMAGES = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
STUDENT = {"stem_channels": 8, "num_sampling_points": 4, "num_mixed_points": 4, "num_focusing_iterations": 2}


@pytest.fixture(scope="module")
def save(tmp_path_factory):
    """Return a function that gives a model random weights, and saves the model and its processor."""
    root = tmp_path_factory.mktemp("models")

    def write(name, model, processor=None):
        randomize(model, 0.2).save_pretrained(root / name)
        if processor is not None:
            processor.save_pretrained(root / name)
        return root / name

    return write


@pytest.fixture(scope="module")
def clip_folder(save):
    text = {**TOWER, "vocab_size": len(WORDS), "max_position_embeddings": 16, "eos_token_id": WORDS.index("[EOS]")}
    vision = {**TOWER, "image_size": 32, "patch_size": 8}
    processor = CLIPProcessor(CLIPImageProcessor(**IMAGES), word_tokenizer(WORDS, model_max_length=16))
    return save("clip", CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)), processor)


@pytest.fixture(scope="module")
def student_folder(clip_folder, save):
    clip, halves = CLIPModel.from_pretrained(clip_folder), {"image_mean": 0.5, "image_std": 0.5}
    return save("student", SparseFormerVisionModelWithProjection.from_teacher(clip, 4, **STUDENT, **halves))


@pytest.fixture(scope="module")
def siglip_folder(save):
    """Save a SigLIP whose tokenizer, like SigLIP 2's, lowercases texts and returns no attention mask."""
    text = TOWER | {"vocab_size": 40, "max_position_embeddings": 24, "pad_token_id": 0}
    text |= {"bos_token_id": None, "eos_token_id": None}
    vision = {**TOWER, "image_size": 32, "patch_size": 8}
    tokenizer = word_tokenizer([WORDS[0], WORDS[1], *WORDS[5:]], model_input_names=["input_ids"])
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    processor = SiglipProcessor(SiglipImageProcessor(size={"height": 32, "width": 32}), tokenizer)
    return save("siglip", SiglipModel(SiglipConfig(text_config=text, vision_config=vision)), processor)


def encoded(seed: int) -> bytes:
    return encode(np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8))


def picture(seed: int) -> Image.Image:
    return Image.open(io.BytesIO(encoded(seed))).convert("RGB")


def pixels() -> torch.Tensor:
    """Return 20 random images, normalized with a mean and std of 0.5."""
    images = torch.stack([torch.tensor(np.array(picture(seed))) for seed in range(20)])
    return (images.permute(0, 3, 1, 2) / 255 - 0.5) / 0.5


@pytest.fixture(scope="module")
def labeled(tmp_path_factory):
    """Write 20 images with labels to a parquet file, and return its path and the labels."""
    path = tmp_path_factory.mktemp("data") / "images.parquet"
    labels = np.random.default_rng(1).integers(0, len(NAMES), 20).tolist()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
    rows = {"image": [{"bytes": encoded(seed), "path": None} for seed in range(20)], "label": labels}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    return path, labels


def evaluate(tmp_path, *arguments) -> dict:
    assert main(["evaluate", *map(str, arguments), "--output", str(tmp_path / "out.json")]) == 0
    return json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("has_student", [False, True])
@torch.no_grad()
def test_zero_shot_accuracy(has_student, clip_folder, student_folder, labeled, tmp_path):
    path, labels = labeled
    (tmp_path / "templates.txt").write_text("a photo of a {} .\n\nthe {}\n", encoding="utf-8")
    options = ["--model", clip_folder, "--dataset", path, "--batch-size", 3, "--templates", tmp_path / "templates.txt"]
    if has_student:
        options += ["--vision-model", student_folder]
    results = evaluate(tmp_path, "zero-shot", *options)
    model, processor = CLIPModel.from_pretrained(clip_folder), CLIPProcessor.from_pretrained(clip_folder)
    classes = []
    for name in NAMES:
        inputs = processor(text=[f"a photo of a {name} .", f"the {name}"], return_tensors="pt", padding=True)
        sentences = F.normalize(model.get_text_features(**inputs).pooler_output, dim=-1)
        classes.append(F.normalize(sentences.mean(0), dim=-1))
    if has_student:
        # The student's images are normalized with a mean and std of 0.5, unlike the CLIP's images.
        embeddings = SparseFormerVisionModelWithProjection.from_pretrained(student_folder)(pixels()).image_embeds
    else:
        pixel_values = processor(images=[picture(seed) for seed in range(20)], return_tensors="pt")["pixel_values"]
        embeddings = model.get_image_features(pixel_values).pooler_output
    scores = embeddings @ torch.stack(classes).T
    right = scores.argmax(1) == torch.tensor(labels)
    assert results["accuracy"] == pytest.approx(right.double().mean().item()) and results["top5_accuracy"] == 1
    assert (results["images"], results["classes"], results["templates"]) == (20, 4, 2)


@torch.no_grad()
def test_a_siglip(siglip_folder):
    """The embeddings equal those of `SiglipModel`. Texts are padded to the model's maximum length."""
    towers, siglip = load_two_towers(str(siglip_folder), device="cpu"), SiglipModel.from_pretrained(siglip_folder)
    texts = [f"the {name}" for name in NAMES]
    ids = towers.tokenizer(texts, padding="max_length", max_length=24, return_tensors="pt")["input_ids"]
    expected = F.normalize(siglip.get_text_features(ids).pooler_output, dim=-1)
    torch.testing.assert_close(towers.embed_texts([f"The {name}" for name in NAMES]), expected)
    expected = F.normalize(siglip.vision_model(pixel_values=pixels()).pooler_output, dim=-1)
    torch.testing.assert_close(towers.embed_images(pixels()), expected)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 30), st.integers(0, 1000))
def test_recall_equals_that_of_a_full_sort(num_images, captions, chunk, seed):
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, captions + 1, (num_images,), generator=generator)
    owners = torch.repeat_interleave(torch.arange(num_images), counts)
    images = F.normalize(torch.randn(num_images, 5, generator=generator), dim=-1)
    texts = F.normalize(torch.randn(len(owners), 5, generator=generator), dim=-1)
    expected = {}
    order = (images @ texts.T).argsort(dim=1, descending=True)
    for k in (1, 5, 10):
        found = [any(owners[text] == image for text in order[image, :k]) for image in range(num_images)]
        expected[f"image_to_text@{k}"] = 100 * sum(found) / num_images
    order = (texts @ images.T).argsort(dim=1, descending=True)
    for k in (1, 5, 10):
        found = [owners[text] in order[text, :k] for text in range(len(owners))]
        expected[f"text_to_image@{k}"] = 100 * sum(found) / len(owners)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, "CHUNK", chunk)
        assert retrieval.retrieval_recall(images, texts, owners) == pytest.approx(expected)


def test_equal_embeddings_have_the_recall_of_chance():
    embeddings = torch.ones(100, 8) / 8**0.5
    expected = {f"{direction}@{k}": k for direction in ("image_to_text", "text_to_image") for k in (1, 5, 10)}
    assert retrieval.retrieval_recall(embeddings, embeddings, torch.arange(100)) == pytest.approx(expected)


CAPTIONS = [["a cat .", "the cat"], ["a dog"], ["a bird .", "the bird", "a photo of a bird ."], ["the airplane"]]


def test_retrieval_reads_karpathys_splits(clip_folder, tmp_path):
    folder = tmp_path / "images" / "val2014"
    folder.mkdir(parents=True)
    entries = []
    for seed, captions in enumerate(CAPTIONS):
        picture(seed).save(folder / f"{seed}.png")
        sentences = [{"raw": caption} for caption in captions]
        entries.append({"filepath": "val2014", "filename": f"{seed}.png", "split": "test", "sentences": sentences})
    entries.append({"filename": "other.png", "split": "train", "sentences": [{"raw": "a dog"}]})
    (tmp_path / "coco.json").write_text(json.dumps({"images": entries}), encoding="utf-8")
    model = ("--model", clip_folder, "--batch-size", "2")
    files = ("--dataset", tmp_path / "coco.json", "--image-folder", tmp_path / "images")
    coco = evaluate(tmp_path, "retrieval", *model, *files)
    assert (coco["images"], coco["captions"]) == (4, 7)
    assert coco["image_to_text@10"] == coco["text_to_image@5"] == 100


def test_format_of_questions_and_answers():
    assert format_question("Which?", ["cat", "dog"], "Look.") == "Context: Look.\nWhich?\nA. cat\nB. dog"
    assert format_question("Which?", ["cat"]) == "Which?\nA. cat"
    answers = {"B": 1, " A. because": 0, "(C) it is": 2, "The answer is B.": 1, "B\nbecause": 1}
    answers |= {"D": None, "A dog": None, "": None}
    assert {text: read_answer(text, 3) for text in answers} == answers


def test_scienceqa_counts_questions_with_and_without_images(save, tmp_path):
    vision = CLIPVisionConfig(image_size=32, patch_size=16, **TOWER)
    text = LlamaConfig(vocab_size=len(WORDS), **TOWER, pad_token_id=0, eos_token_id=WORDS.index("[EOS]"))
    llava = LlavaConfig(vision_config=vision, text_config=text, image_token_index=WORDS.index("<image>"))
    words = word_tokenizer(WORDS, extra_special_tokens={"image_token": "<image>"})
    sizes = {"patch_size": 16, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    processor = LlavaProcessor(CLIPImageProcessor(**IMAGES), words, **sizes)
    folder = save("llava", LlavaForConditionalGeneration(llava), processor)
    rows = {
        "image": [{"bytes": encoded(seed), "path": None} if seed % 3 else None for seed in range(11)],
        "question": [f"{NAMES[seed % 4]} is ?" for seed in range(11)],
        "choices": [NAMES[: 2 + seed % 2] for seed in range(11)],
        "answer": np.random.default_rng(0).integers(0, 2, 11).tolist(),
        "hint": ["" if seed % 2 else "a photo" for seed in range(11)],
    }
    path = tmp_path / "scienceqa.parquet"
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).to_parquet(path)
    results = evaluate(tmp_path, "scienceqa", "--model", folder, "--dataset", path, "--batch-size", "3")
    model, right, unanswered = LlavaForConditionalGeneration.from_pretrained(folder), {True: [], False: []}, 0
    for seed in range(11):
        has_image = seed % 3 != 0
        question = format_question(rows["question"][seed], rows["choices"][seed], rows["hint"][seed])
        text = PROMPT.format(image="<image>\n" if has_image else "", question=question)
        inputs = processor(text=text, images=picture(seed) if has_image else None, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        answer = read_answer(processor.batch_decode(ids, skip_special_tokens=True)[0], len(rows["choices"][seed]))
        unanswered += answer is None
        right[has_image].append(answer == rows["answer"][seed])
    expected = {"questions": 11, "accuracy": np.mean(right[True] + right[False]), "unanswered": unanswered}
    expected |= {"image_accuracy": np.mean(right[True]), "text_accuracy": np.mean(right[False])}
    assert {name: results[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("zero-shot --model STUDENT --dataset LABELED", "expected a CLIP or SigLIP, with both sides"),
        ("retrieval --model CLIP --dataset LABELED --image-folder .", "is no list of images as in Karpathy's splits"),
        ("scienceqa --model CLIP --dataset LABELED", "has no columns ['question', 'choices', 'answer']"),
    ],
)
def test_errors_are_one_line(command, message, clip_folder, student_folder, labeled, tmp_path, capsys):
    found = {"CLIP": clip_folder, "STUDENT": student_folder, "LABELED": labeled[0]}
    arguments = [str(found.get(word, word)) for word in command.split()]
    assert main(["evaluate", *arguments, "--output", str(tmp_path / "out.json")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("frugalvit evaluate: error: ") and message in error
    assert not (tmp_path / "out.json").exists()
