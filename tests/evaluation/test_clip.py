"""Zero-shot accuracy, retrieval and ScienceQA against brute force and open_clip's own code."""

import io
import json
import string

import datasets
import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from frugalvit_cli import main
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from tokenizers import normalizers
from transformers import (
    AutoModel,
    AutoTokenizer,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Siglip2Config,
    Siglip2ImageProcessor,
    Siglip2Model,
    Siglip2Processor,
    Siglip2Tokenizer,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    SiglipProcessor,
)

from drawn import encode
from frugalvit import SparseFormerSiglipModel, SparseFormerVisionModel, SparseFormerVisionModelWithProjection
from frugalvit.common.prompts import SCIENCEQA_PROMPT
from frugalvit.evaluation.retrieval import retrieval_recall
from frugalvit.evaluation.scienceqa import format_question, read_answer
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
    """Function that saves a model with other weights than it has at first, and its processor."""
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
    clip = CLIPModel.from_pretrained(clip_folder)
    return save("student", SparseFormerVisionModelWithProjection.from_teacher(clip, 4, **STUDENT))


SIGLIP_TEXT = {
    **TOWER,
    **{"vocab_size": 40, "max_position_embeddings": 24},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0},
}


def siglip_tokenizer():
    """Lower case and without a mask, as SigLIP's; like SigLIP 2's it does not know how long texts are."""
    words = [word for word in WORDS if word not in ("[BOS]", "[EOS]")]
    tokenizer = word_tokenizer(words, model_input_names=["input_ids"])
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


@pytest.fixture(scope="module")
def siglip_folder(save):
    vision = {**TOWER, "image_size": 32, "patch_size": 8}
    processor = SiglipProcessor(SiglipImageProcessor(size={"height": 32, "width": 32}), siglip_tokenizer())
    return save("siglip", SiglipModel(SiglipConfig(text_config=SIGLIP_TEXT, vision_config=vision)), processor)


@pytest.fixture(scope="module")
def naflex_folder(save):
    vision = {**TOWER, "num_patches": 16, "patch_size": 8}
    letters = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *string.ascii_lowercase]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Siglip2Tokenizer(vocabulary, padding_side="right", model_input_names=["input_ids"])
    processor = Siglip2Processor(Siglip2ImageProcessor(patch_size=8, max_num_patches=16), tokenizer)
    return save("naflex", Siglip2Model(Siglip2Config(text_config=SIGLIP_TEXT, vision_config=vision)), processor)


@pytest.fixture(scope="module")
def siglip_student_folder(siglip_folder, save):
    siglip = SiglipModel.from_pretrained(siglip_folder)
    return save("siglip-student", SparseFormerVisionModel.from_teacher(siglip, 4, **STUDENT))


@pytest.fixture(scope="module")
def siglip_pair_folder(siglip_folder, siglip_student_folder, tmp_path_factory):
    student, folder = SparseFormerVisionModel.from_pretrained(siglip_student_folder), tmp_path_factory.mktemp("pair")
    SparseFormerSiglipModel.from_siglip(SiglipModel.from_pretrained(siglip_folder), student).save_pretrained(folder)
    SiglipProcessor.from_pretrained(siglip_folder).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def open_clip_folder(tmp_path_factory):
    """Weights of a random open_clip model with its own tokenizer."""
    vision = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16}
    text = {"context_length": 24, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
    model_config = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}
    folder = tmp_path_factory.mktemp("models") / "open_clip"
    folder.mkdir()
    save_file(randomize(open_clip.CLIP(**model_config), 0.2).state_dict(), folder / "open_clip_model.safetensors")
    normalization = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}
    config = {"model_cfg": model_config, "preprocess_cfg": normalization}
    (folder / "open_clip_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def encoded(seed: int) -> bytes:
    return encode(np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8))


def picture(seed: int) -> Image.Image:
    return Image.open(io.BytesIO(encoded(seed))).convert("RGB")


def pixels() -> torch.Tensor:
    """The 20 images as a SparseFormer takes them."""
    images = torch.stack([torch.tensor(np.array(picture(seed))) for seed in range(20)])
    return (images.permute(0, 3, 1, 2) / 255 - 0.5) / 0.5


@pytest.fixture(scope="module")
def labeled(tmp_path_factory):
    """20 images with labels."""
    path = tmp_path_factory.mktemp("data") / "images.parquet"
    labels = np.random.default_rng(1).integers(0, len(NAMES), 20).tolist()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
    rows = {"image": [{"bytes": encoded(seed), "path": None} for seed in range(20)], "label": labels}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    return path, labels


def evaluate(tmp_path, *arguments) -> dict:
    assert main(["evaluate", *map(str, arguments), "--output", str(tmp_path / "out.json")]) == 0
    return json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))


def accuracy_of(scores: torch.Tensor, labels: list[int], k: int) -> float:
    best = scores.topk(k).indices
    return sum(label in row for label, row in zip(labels, best.tolist(), strict=True)) / len(labels)


@torch.no_grad()
def test_zero_shot_accuracy_of_a_transformers_clip(clip_folder, labeled, tmp_path):
    path, labels = labeled
    (tmp_path / "templates.txt").write_text("a photo of a {} .\n\nthe {}\n", encoding="utf-8")
    results = evaluate(
        *(tmp_path, "zero-shot", "--model", clip_folder, "--dataset", path),
        *("--templates", tmp_path / "templates.txt", "--batch-size", 3),
    )
    model, processor = CLIPModel.from_pretrained(clip_folder), CLIPProcessor.from_pretrained(clip_folder)
    classes = []
    for name in NAMES:
        sentences = []
        for sentence in (f"a photo of a {name} .", f"the {name}"):
            inputs = processor(text=sentence, return_tensors="pt")
            sentences.append(F.normalize(model.get_text_features(**inputs).pooler_output, dim=-1))
        classes.append(F.normalize(torch.cat(sentences).mean(0), dim=-1))
    pixel_values = processor(images=[picture(seed) for seed in range(20)], return_tensors="pt")["pixel_values"]
    scores = model.get_image_features(pixel_values).pooler_output @ torch.stack(classes).T
    assert results["accuracy"] == accuracy_of(scores, labels, 1)
    assert results["top5_accuracy"] == 1
    assert (results["images"], results["classes"], results["templates"]) == (20, 4, 2)


@torch.no_grad()
def test_zero_shot_accuracy_is_that_of_open_clips_own_code(open_clip_folder, labeled, tmp_path):
    path, labels = labeled
    name = f"local-dir:{open_clip_folder}"
    results = evaluate(tmp_path, "zero-shot", "--model", f"open_clip:{name}", "--dataset", path)
    model, _, preprocess = open_clip.create_model_and_transforms(name)
    model.eval()
    weights = open_clip.build_zero_shot_classifier(
        model, open_clip.get_tokenizer(name), NAMES, open_clip.OPENAI_IMAGENET_TEMPLATES
    )
    scores = (
        model.encode_image(torch.stack([preprocess(picture(seed)) for seed in range(20)]), normalize=True) @ weights
    )
    assert results["templates"] == 80
    assert results["accuracy"] == accuracy_of(scores, labels, 1)


@pytest.mark.parametrize("library", ["transformers", "open_clip"])
@torch.no_grad()
def test_a_sparseformer_takes_the_place_of_the_image_side(
    library, clip_folder, open_clip_folder, student_folder, labeled, tmp_path
):
    path, labels = labeled
    texts = [f"a {name}" for name in NAMES]
    if library == "open_clip":
        source = f"local-dir:{open_clip_folder}"
        model = open_clip.create_model(source).eval()
        classes = model.encode_text(open_clip.get_tokenizer(source)(texts), normalize=True)
        source = f"open_clip:{source}"
    else:
        source, model = clip_folder, CLIPModel.from_pretrained(clip_folder)
        inputs = CLIPProcessor.from_pretrained(clip_folder)(text=texts, return_tensors="pt", padding=True)
        classes = F.normalize(model.get_text_features(**inputs).pooler_output, dim=-1)
    (tmp_path / "templates.txt").write_text("a {}", encoding="utf-8")
    results = evaluate(
        *(tmp_path, "zero-shot", "--model", source, "--vision-model", student_folder),
        *("--dataset", path, "--templates", tmp_path / "templates.txt"),
    )
    student = SparseFormerVisionModelWithProjection.from_pretrained(student_folder)
    # Its own preprocessing counts.
    scores = student(pixels()).image_embeds @ classes.T
    assert results["accuracy"] == accuracy_of(scores, labels, 1)


SIGLIPS = {
    "its own side": ("siglip_folder", "siglip_folder", False),
    "a pair": ("siglip_pair_folder", "siglip_folder", False),
    "a student of NaFlex": ("naflex_folder", "naflex_folder", True),
}


@pytest.mark.parametrize("name", SIGLIPS)
@torch.no_grad()
def test_zero_shot_accuracy_of_a_siglip(name, siglip_student_folder, request, labeled, tmp_path):
    (path, labels), (model, teacher, has_student) = labeled, SIGLIPS[name]
    model, teacher = request.getfixturevalue(model), request.getfixturevalue(teacher)
    (tmp_path / "templates.txt").write_text("The {}", encoding="utf-8")
    results = evaluate(
        *(tmp_path, "zero-shot", "--model", model, "--dataset", path, "--batch-size", 3),
        *("--templates", tmp_path / "templates.txt", *["--vision-model", siglip_student_folder] * has_student),
    )
    siglip, tokenizer = AutoModel.from_pretrained(teacher), AutoTokenizer.from_pretrained(teacher)
    texts = [f"the {name}" for name in NAMES]
    # Of one length, as SigLIP was trained on.
    ids = tokenizer(texts, padding="max_length", max_length=24, return_tensors="pt")["input_ids"]
    classes = F.normalize(siglip.get_text_features(ids).pooler_output, dim=-1)
    student = SparseFormerVisionModel.from_pretrained(siglip_student_folder)
    image_side = siglip.vision_model if name == "its own side" else student
    images = F.normalize(image_side(pixel_values=pixels()).pooler_output, dim=-1)
    assert results["accuracy"] == accuracy_of(images @ classes.T, labels, 1)
    towers = load_two_towers(str(model), siglip_student_folder if has_student else None, device="cpu")
    torch.testing.assert_close(towers.embed_texts([f"The {name}" for name in NAMES]), classes)
    torch.testing.assert_close(towers.embed_images(pixels()), images)
    assert (classes[0] - classes[1]).abs().max() > 0.01


def test_a_tokenizer_that_knows_no_words_is_refused(tmp_path):
    """Without its files, Transformers makes one to which all texts are the same."""
    text = {**TOWER, "vocab_size": 1000, "max_position_embeddings": 16}
    config = CLIPConfig(text_config=text, vision_config={**TOWER, "image_size": 32, "patch_size": 8})
    CLIPModel(config).save_pretrained(tmp_path)
    CLIPImageProcessor(**IMAGES).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has 2 tokens and its model 1,000|as a CLIP with a tokenizer"):
        load_two_towers(str(tmp_path), device="cpu")


# Retrieval


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 30), st.integers(0, 1000))
def test_recall_is_that_of_sorting_everything(num_images, captions, chunk, seed):
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
    assert retrieval_recall(images, texts, owners, chunk=chunk) == pytest.approx(expected)


CAPTIONS = [["a cat .", "the cat"], ["a dog"], ["a bird .", "the bird", "a photo of a bird ."], ["the airplane"]]


@pytest.mark.parametrize("name", ["clip_folder", "siglip_pair_folder"])
def test_retrieval_reads_karpathys_splits(name, request, tmp_path):
    folder = tmp_path / "images" / "val2014"
    folder.mkdir(parents=True)
    entries = []
    for seed, captions in enumerate(CAPTIONS):
        picture(seed).save(folder / f"{seed}.png")
        sentences = [{"raw": caption} for caption in captions]
        entries.append({"filepath": "val2014", "filename": f"{seed}.png", "split": "test", "sentences": sentences})
    entries.append({"filename": "other.png", "split": "train", "sentences": [{"raw": "a dog"}]})
    (tmp_path / "coco.json").write_text(json.dumps({"images": entries}), encoding="utf-8")
    model = ("--model", request.getfixturevalue(name), "--batch-size", "2")
    files = ("--dataset", tmp_path / "coco.json", "--image-folder", tmp_path / "images")
    coco = evaluate(tmp_path, "retrieval", *model, *files)
    assert (coco["images"], coco["captions"]) == (4, 7)
    assert coco["image_to_text@10"] == coco["text_to_image@5"] == 100


def test_embeddings_that_are_all_alike_find_nothing():
    embeddings = torch.ones(100, 4) / 2
    assert set(retrieval_recall(embeddings, embeddings, torch.arange(100)).values()) == {0}


# ScienceQA


@pytest.mark.parametrize(
    ("text", "choices", "answer"),
    [
        ("B", 3, 1),
        (" A. because", 3, 0),
        ("(C) it is", 3, 2),
        ("The answer is B.", 4, 1),
        ("D", 3, None),
        ("A dog", 3, None),
        ("B\nbecause", 3, 1),
        ("", 3, None),
    ],
)
def test_answers_are_read_out_of_texts(text, choices, answer):
    assert read_answer(text, choices) == answer


def test_questions_are_written_with_their_options():
    assert format_question("Which?", ["cat", "dog"], "Look.") == "Context: Look.\nWhich?\nA. cat\nB. dog"
    assert format_question("Which?", ["cat"]) == "Which?\nA. cat"


@pytest.fixture(scope="module")
def llava_folder(save):
    vision = CLIPVisionConfig(image_size=32, patch_size=16, **TOWER)
    text = LlamaConfig(vocab_size=len(WORDS), **TOWER, pad_token_id=0, eos_token_id=WORDS.index("[EOS]"))
    image = WORDS.index("<image>")
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=image))
    words = word_tokenizer(WORDS, extra_special_tokens={"image_token": "<image>"})
    sizes = {"patch_size": 16, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    return save("llava", model, LlavaProcessor(CLIPImageProcessor(**IMAGES), words, **sizes))


def test_scienceqa_counts_questions_with_and_without_images(llava_folder, tmp_path):
    generator = np.random.default_rng(0)
    rows = {
        "image": [{"bytes": encoded(seed), "path": None} if seed % 3 else None for seed in range(11)],
        "question": [f"{NAMES[seed % 4]} is ?" for seed in range(11)],
        "choices": [NAMES[: 2 + seed % 2] for seed in range(11)],
        "answer": generator.integers(0, 2, 11).tolist(),
        "hint": ["" if seed % 2 else "a photo" for seed in range(11)],
    }
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "question": datasets.Value("string"),
            "choices": datasets.List(datasets.Value("string")),
            "answer": datasets.Value("int8"),
            "hint": datasets.Value("string"),
        }
    )
    path = tmp_path / "scienceqa.parquet"
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    results = evaluate(tmp_path, "scienceqa", "--model", llava_folder, "--dataset", path, "--batch-size", "3")
    model = LlavaForConditionalGeneration.from_pretrained(llava_folder)
    processor = LlavaProcessor.from_pretrained(llava_folder)
    right, unanswered = {True: [], False: []}, 0
    for seed in range(11):
        has_image = seed % 3 != 0
        question = format_question(rows["question"][seed], rows["choices"][seed], rows["hint"][seed])
        text = SCIENCEQA_PROMPT.format(image="<image>\n" if has_image else "", question=question)
        inputs = processor(text=text, images=picture(seed) if has_image else None, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        answer = read_answer(processor.batch_decode(ids, skip_special_tokens=True)[0], len(rows["choices"][seed]))
        unanswered += answer is None
        right[has_image].append(answer == rows["answer"][seed])
    assert results["questions"] == 11
    assert results["image_accuracy"] == pytest.approx(np.mean(right[True]))
    assert results["text_accuracy"] == pytest.approx(np.mean(right[False]))
    assert results["accuracy"] == pytest.approx(np.mean(right[True] + right[False]))
    assert results["unanswered"] == unanswered


# Errors


def parquet_without(path, column):
    rows = {"image": [{"bytes": encoded(0), "path": None}], "question": ["cat ?"], "choices": [["cat"]], "answer": [0]}
    rows.pop(column)
    table = datasets.Dataset.from_dict(rows)
    if "image" in rows:
        table = table.cast_column("image", datasets.Image())
    table.to_parquet(path)
    return path


ERRORS = {
    "zero-shot with one side": (
        lambda f: ["zero-shot", "--model", f["student"], "--dataset", f["labeled"]],
        "expected a CLIP or SigLIP, with both sides",
    ),
    "fewer names than labels": (
        lambda f: ["zero-shot", "--model", f["clip"], "--dataset", f["labeled"], "--classes", f["two"]],
        "names 2 classes, the data set has 4",
    ),
    "a template without a place": (
        lambda f: ["zero-shot", "--model", f["clip"], "--dataset", f["labeled"], "--templates", f["two"]],
        "has the line 'cat', expected one {} in it",
    ),
    "a vision model that does not fit": (
        lambda f: ["zero-shot", "--model", f["clip"], "--vision-model", f["clip"], "--dataset", f["labeled"]],
        "Got a CLIPModel as vision model",
    ),
    "a SigLIP that takes patches": (
        lambda f: ["zero-shot", "--model", f["naflex"], "--dataset", f["labeled"]],
        "NaFlex, which takes patches; expected a model that takes images of one size",
    ),
    "no list of images": (
        lambda f: ["retrieval", "--model", f["clip"], "--dataset", f["json"], "--image-folder", f["tmp"]],
        "is no list of images as in Karpathy's splits",
    ),
    "no answers": (
        lambda f: [
            *("scienceqa", "--model", f["llava"]),
            *("--dataset", parquet_without(f["tmp"] / "a.parquet", "answer")),
        ],
        r"has no columns ['answer']",
    ),
    "a prompt without a question": (
        lambda f: [
            *("scienceqa", "--model", f["llava"], "--prompt", "{image}"),
            *("--dataset", f["questions"]),
        ],
        "expected {image} and {question} in it",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_clear_line(name, request, labeled, tmp_path, capsys):
    (tmp_path / "two.txt").write_text("cat\ndog\n", encoding="utf-8")
    (tmp_path / "list.json").write_text("[1]", encoding="utf-8")
    rows = {"image": [None], "question": ["cat ?"], "choices": [["cat"]], "answer": [0]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "questions.parquet")
    models = ("clip", "student", "llava", "naflex")
    found = {
        **{model: request.getfixturevalue(f"{model}_folder") for model in models},
        "labeled": labeled[0],
        "tmp": tmp_path,
        "two": tmp_path / "two.txt",
        "json": tmp_path / "list.json",
        "questions": tmp_path / "questions.parquet",
    }
    arguments, message = ERRORS[name]
    assert main(["evaluate", *map(str, arguments(found)), "--output", str(tmp_path / "out.json")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("frugalvit evaluate: error: ") and message in error
    assert not (tmp_path / "out.json").exists()
