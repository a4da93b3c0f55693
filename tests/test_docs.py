"""Run the code blocks of README and docs with few images and tiny models."""

import importlib
import json
import re
import shlex
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import transformers
from pages import PAGES, ROOT, steps
from PIL import Image
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from drawn import noise
from frugalvit.cli import main
from tiny import make_llava, make_processor, word_tokenizer


# Commands that start with a key of this dict are skipped. The value is the reason.
NOT_HERE = {
    "pip install": "tests do not change the environment; .ci/run installs",
    "pytest": "this test is part of it",
    "python -c": "tests/test_readme.py runs it for every shipped model",
    "torchrun": "tests/training/test_processes.py",
    "python -m http.server": "it never ends",
    "frugalvit quickstart": "tests/test_quickstart.py and .ci/run",
    "frugalvit export": "tests/test_export.py exports in each format; int8 takes longer than the rest of the page",
    "frugalvit predict image.png --model exported": "tests/test_export.py; the export above is skipped",
    "frugalvit bootstrap --teacher google/gemma-3-4b-it": "tests/modeling/test_vlm.py has a tiny one",
    "frugalvit swap --model google/gemma-3-4b-it": "tests/modeling/test_vlm.py has a tiny one",
    "frugalvit bootstrap --teacher facebook/dinov2-small --dataset path/to/images --output_dir dinov2-tower": (
        "tests/training/test_align_llava.py has a tower of another width"
    ),
    "frugalvit align-llava --model LLAVA --vision_model dinov2-tower": "tests/training/test_align_llava.py",
    "frugalvit compare": "tests/test_compare.py",
}
# Texts in the pages (keys) and their replacements in the tests (values): tiny models and small data.
STAND_INS = {
    "facebook/dinov2-small": "dinov2",
    "path/to/teacher": "teacher",
    "TEACHER": "teacher",
    "google/vit-base-patch16-224": "vit",
    "openai/clip-vit-base-patch16": "clip",
    "llava-hf/llava-1.5-7b-hf": "llava",
    "path/to/image.png": "image.png",
    "uoft-cs/cifar10": "cifar10-subset",
    "PHOTOGRAPHS": "photographs",
    "FOLDER": "sparseformer",
    "OTHER": "checkpoints/cifar10-vit",
    'num_train_epochs=1, output="student"': 'num_train_epochs=1, output="student", per_device_train_batch_size=8',
}
# These options are appended to commands to shorten their runs.
TRAINS = ["--num_train_epochs", "1", "--per_device_train_batch_size", "8"]
NARROW = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=32"
NARROW_AGENT = "hidden_size=32,num_hidden_layers=2,intermediate_size=32"
SHORT = {
    "bootstrap": TRAINS,
    "train": TRAINS,
    "joint": [*TRAINS, "--vit", f"image_size=32,patch_size=8,{NARROW}", "--agent", f"patch_size=8,{NARROW_AGENT}"],
    "segment": [
        *TRAINS,
        *(["--warmup_steps", "0", "--image_size", "32", "--num_latent_tokens", "16", "--num_labels", "3"]),
    ],
    "align-llava": [*TRAINS, "--answer_tokens", "2"],
    "swap": ["--images", "8"],
}
SUBSET = ["--train_split", "train[:64]", "--eval_split", "test[:8]", "--per_device_train_batch_size", "32"]


def draw(path: Path, number: int):
    path.parent.mkdir(parents=True, exist_ok=True)
    noise(seed=number).save(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Write tiny models, images, questions and captions to a folder, and return the folder."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    vit = {**sizes, "image_size": 32, "patch_size": 8, "intermediate_size": 32}
    dinov2 = Dinov2Config(**sizes, mlp_ratio=1, image_size=112, patch_size=14, num_labels=2)
    for name, model, pixels in (
        ("vit", ViTForImageClassification(ViTConfig(**vit, num_labels=2)), 32),
        ("dinov2", Dinov2Model(dinov2), 112),
        ("dinov2-classifier", Dinov2ForImageClassification(dinov2), 112),
    ):
        model.save_pretrained(folder / name)
        ViTImageProcessor(size={"height": pixels, "width": pixels}).save_pretrained(folder / name)
        (folder / name / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    words = word_tokenizer(["[PAD]", "[UNK]", "[BOS]", "[EOS]", "a", "photo", "of", "ship"])
    crop = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    text = {**sizes, "intermediate_size": 32, "vocab_size": 8, "max_position_embeddings": 16, "eos_token_id": 3}
    clip = CLIPModel(CLIPConfig(text_config=text, vision_config=vit, projection_dim=16))
    clip.save_pretrained(folder / "clip")
    CLIPProcessor(crop, words).save_pretrained(folder / "clip")
    llava = make_llava()
    for part in (llava, make_processor(llava)):
        part.save_pretrained(folder / "llava")
    for number in range(20):
        draw(folder / "path" / "to" / "images" / ("cat", "dog")[number % 2] / f"{number}.jpg", number)
        part = ("train", "train", "train", "test")[number % 4]
        draw(folder / "photographs" / part / ("cat", "dog")[number // 4 % 2] / f"{number}.png", number)
    for part in ("training", "validation"):
        for number in range(8):
            draw(folder / "path" / "to" / "ade20k" / "images" / part / f"{number}.jpg", number)
            mask = np.random.default_rng(number).integers(0, 4, (40, 48), dtype=np.uint8)
            (folder / "path" / "to" / "ade20k" / "annotations" / part).mkdir(parents=True, exist_ok=True)
            Image.fromarray(mask).save(folder / "path" / "to" / "ade20k" / "annotations" / part / f"{number}.png")
    draw(folder / "image.png", 0)
    write_questions(folder)
    return folder


def write_questions(folder: Path):
    """Write captions in the format of Karpathy's splits, and questions in the format of ScienceQA."""
    images = sorted((folder / "path" / "to" / "images").rglob("*.jpg"))[:4]
    captions = [
        {
            "filename": str(file.relative_to(folder / "path" / "to" / "images")),
            "split": "test",
            "sentences": [{"raw": "a photo of a ship"}],
        }
        for file in images
    ]
    (folder / "captions.json").write_text(json.dumps({"images": captions}))
    questions = {
        "image": [str(file) for file in images],
        "question": ["what is this ?"] * len(images),
        "choices": [["cat", "dog"]] * len(images),
        "answer": [0, 1, 0, 1],
    }
    questions = datasets.Dataset.from_dict(questions).cast_column("image", datasets.Image())
    questions.to_parquet(folder / "questions.parquet")


def stand_in(text: str) -> str:
    """Replace each key of `STAND_INS` in a text by its value."""
    for name, own in STAND_INS.items():
        text = re.sub(rf"(?<![\w/.-]){re.escape(name)}(?![\w/.-])", own, text)
    return text


def run(line: str, monkeypatch):
    """Run a command of a page in this process, with options that shorten the run."""
    program, *arguments = shlex.split(stand_in(line), comments=True)
    if program == "python":
        script, *arguments = arguments
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
        importlib.import_module(Path(script).stem).main([*arguments, "--steps", "2", "--images", "8"])
        return
    assert program == "frugalvit", line
    name, *arguments = arguments
    arguments += SHORT.get(name, [])
    if "cifar10-subset" in arguments:
        arguments += SUBSET
    if name == "train" and not {"--model", "--config"} & set(arguments):
        arguments += ["--config-overrides", f"image_size=32,patch_size=8,{NARROW}"]
    assert main([name, *arguments]) == 0, line


# PyTorch and `Trainer` may warn when the code of a page runs. These warnings are not errors of this library.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "teacher"),
    [("docs/training.md", "vit"), *((name, "dinov2-classifier") for name, page in PAGES.items() if steps(page))],
)
def test_pages_run_from_top_to_bottom(name, teacher, models, hub, imported_once, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Each page runs in its own copy of the folder, because the page's code writes files.
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    # The folder `teacher` must not exist if the page itself trains this model.
    if "--output_dir teacher" not in PAGES[name]:
        Path("teacher").symlink_to(teacher)
    for folder in ("checkpoints", "docs"):
        Path(folder).symlink_to(ROOT / folder)
    Path("sparseformer").symlink_to(ROOT / "checkpoints" / "cifar10-sparseformer")
    for language, step in steps(PAGES[name]):
        if language == "python":
            exec(compile(stand_in(step), name, "exec"), {"__name__": name})
        elif not any(step.startswith(start) for start in NOT_HERE):
            run(step, monkeypatch)
    transformers.logging.enable_progress_bar()
