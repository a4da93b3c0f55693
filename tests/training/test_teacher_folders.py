"""Every kind of vision transformer as people have it, as a folder of its own library's, is a teacher on the command
line, and what comes out predicts where frugalvit is not installed."""

import json
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from PIL import Image
from processes import run_without_frugalvit
from safetensors.torch import load_file, save_file
from timm.models._hub import save_for_hf
from torch import nn
from transformers import AutoImageProcessor
from vision_transformers import KINDS, in_timm

import frugalvit
from frugalvit import (
    SparseFormerForImageClassification,
    SparseFormerVisionModel,
    SparseFormerVisionModelWithProjection,
    cli,
)
from frugalvit.common.views import EvalView
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.training import bootstrap
from frugalvit.training.components import students


# Of a student, where its teacher does not say.
SMALL = "stem_channels=8,num_sampling_points=4,num_mixed_points=4,num_focusing_iterations=1,mixing_hidden_size=8"


def square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


# What the families' published folders have for an image processor, at their size: by the beginning of a kind's name,
# the longest counts.
SHORTER_SIDE = {"size": {"shortest_edge": 36}, "crop_size": square(32)}
AS_THEY_ARE = {"size": {"shortest_edge": 32}, "do_resize": False, "do_center_crop": False}
PROCESSORS = {
    "vit": ("ViTImageProcessor", {"size": square(32)}),
    "vit-rectangle": ("ViTImageProcessor", {"size": {"height": 24, "width": 32}}),
    "deit": ("DeiTImageProcessor", {"size": square(36), "crop_size": square(32)}),
    "dinov2": ("BitImageProcessor", SHORTER_SIDE),
    "dinov3": ("DINOv3ViTImageProcessor", {"size": square(32)}),
    "clip": ("CLIPImageProcessor", SHORTER_SIDE | {"size": {"shortest_edge": 32}}),
    "siglip": ("SiglipImageProcessor", {"size": square(32)}),
    "siglip2": ("Siglip2ImageProcessor", {"patch_size": 4, "max_num_patches": 64}),
    "aimv2": ("CLIPImageProcessor", SHORTER_SIDE),
    "aimv2-native": ("CLIPImageProcessor", AS_THEY_ARE),
    "ijepa": ("ViTImageProcessor", {"size": square(32)}),
    "pixio": ("BitImageProcessor", {"size": square(32), "do_center_crop": False}),
    "radio": ("CLIPImageProcessor", AS_THEY_ARE | {"do_normalize": False}),
    "internvl": ("CLIPImageProcessor", SHORTER_SIDE | {"size": {"shortest_edge": 32}}),
    # Towers that are published in models alone, whose tiles are made so.
    "idefics3": ("ViTImageProcessor", {"size": square(32)}),
    "smolvlm": ("ViTImageProcessor", {"size": square(32)}),
}


def save_transformers(kind: str, folder: Path) -> str:
    KINDS[kind].make().save_pretrained(folder)
    name, options = PROCESSORS[max((key for key in PROCESSORS if kind.startswith(key)), key=len)]
    getattr(transformers, name)(**options).save_pretrained(folder)
    return str(folder)


def save_timm(kind: str, folder: Path) -> str:
    """Save a model as timm saves and pushes its models."""
    of = KINDS[kind].build
    if kind == "timm-mobileclip-b":
        # Its convolutions have one width.
        of = in_timm("vit_base_mci_224", img_size=64, patch_size=1, embed_dim=768, num_heads=12, depth=2)
    size = of.arguments["img_size"]
    images = {"input_size": (3, size, size), "interpolation": "bicubic", "crop_pct": 0.9}
    save_for_hf(of(), folder, model_args=of.arguments, data_config=images, safe_serialization=True)
    return str(folder)


def write_open_clip(folder: Path, model_config: dict, model: nn.Module) -> str:
    folder.mkdir()
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    preprocessing = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "interpolation": "bicubic"}
    config = json.dumps({"model_cfg": model_config, "preprocess_cfg": preprocessing})
    (folder / "open_clip_config.json").write_text(config, encoding="utf-8")
    return f"open_clip:local-dir:{folder}"


def save_open_clip(kind: str, folder: Path) -> str:
    of = KINDS[kind].build
    return write_open_clip(folder, of.config | {"custom_text": bool(of.trunk)}, KINDS[kind].make())


def save(kind: str, folder: Path) -> str:
    """Save a small model as its own library does; returns what --teacher is to be given."""
    writers: dict[str, Callable[[str, Path], str]] = {"timm": save_timm, "open_clip": save_open_clip}
    return writers.get(kind.partition("-")[0], save_transformers)(kind, folder)


# A tower alone has no folder.
FOLDERS = [kind for kind in KINDS if kind != "open_clip-tower"]


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> str:
    """A data set of eight unlabelled images of smooth colors, wider than high."""
    y, x = np.mgrid[0:40, 0:48]
    images = []
    for number in range(1, 9):
        waves = [128 + 100 * np.sin(number * (x + 2 * channel * y) / 30) for channel in range(3)]
        images.append(Image.fromarray(np.stack(waves, axis=2).astype(np.uint8)))
    file = tmp_path_factory.mktemp("photographs") / "images.parquet"
    features = datasets.Features({"image": datasets.Image()})
    datasets.Dataset.from_dict({"image": images}, features).to_parquet(file)
    return str(file)


def arguments_for(teacher: str, photographs: str, output_dir: Path) -> list[str]:
    """Two steps of bootstrapping."""
    paths = ["--teacher", teacher, "--dataset", photographs, "--output", str(output_dir)]
    return [
        *paths,
        *("--eval-dataset", photographs, "--batch-size", "4", "--epochs", "1", "--warmup-epochs", "0"),
        *("--learning-rate", "1e-3", "--config-overrides", SMALL, "--recipe", "paper", "--no-compare"),
    ]


@pytest.fixture(scope="module")
def student_of(tmp_path_factory, photographs) -> Callable[[str], tuple[Path, dict]]:
    """Saves a student of a kind's folder, once, and what its trainer says of it before it begins."""
    root, students = tmp_path_factory.mktemp("folders"), {}

    def find(kind: str) -> tuple[Path, dict]:
        if kind not in students:
            (root / kind).mkdir()
            # All have one name: Transformers imports the code of folders by name and content, here once.
            folder = root / kind / "student"
            argv = arguments_for(save(kind, root / kind / "teacher"), photographs, folder)
            trainer = bootstrap.make_trainer(bootstrap.parse(argv), argv)
            batch = next(trainer.loader.epoch(0))
            said = trainer.evaluate() | {"loss": trainer.compute_loss(trainer.model, batch)}
            said["teacher_format"] = trainer.teacher_format
            said["loss"].backward()
            trainer.student.save_pretrained(folder)
            students[kind] = folder, said
            AcceleratorState._reset_state(True)
        return students[kind]

    return find


def load_student(folder: Path):
    [architecture] = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    return getattr(frugalvit, architecture).from_pretrained(folder).eval()


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_is_a_teacher(kind, student_of, photographs):
    folder, said = student_of(kind)
    assert 0 < said["loss"].item() < 2 and -1 < said["eval_alignment"] < 1
    student, anatomy = load_student(folder), read_anatomy(KINDS[kind].make())
    # Of the class that continues what the teacher is used for.
    if anatomy.classifier is not None:
        assert type(student) is SparseFormerForImageClassification
    elif anatomy.projection is not None:
        assert type(student) is SparseFormerVisionModelWithProjection
    else:
        assert type(student) is SparseFormerVisionModel
    assert student.config.num_register_tokens == anatomy.num_register_tokens
    assert student.config.pooling == anatomy.pooling
    # Its own image processor prepares what it was trained on.
    [image, *_] = datasets.Dataset.from_parquet(photographs)["image"]
    student_format = students.format_of(student.config)
    pixels = student_format.normalize(EvalView(student_format)(image)["pixel_values"][None])
    expected = AutoImageProcessor.from_pretrained(folder)(image, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(pixels, expected, rtol=0, atol=1e-5)
    assert student_format.size == ((24, 32) if kind == "vit-rectangle" else anatomy.image_size)
    for field in ("resize", "mean", "std", "resample"):
        assert getattr(student_format, field) == getattr(said["teacher_format"], field), field


def test_students_predict_where_frugalvit_is_not_installed(student_of, tmp_path):
    """One of each class: the code that they carry is the same."""
    jobs, expected, classes = {}, {}, set()
    for kind in FOLDERS:
        folder, _ = student_of(kind)
        student = load_student(folder)
        if type(student) in classes:
            continue
        classes.add(type(student))
        inputs = torch.randn(2, 3, *students.format_of(student.config).size)
        with torch.no_grad():
            outputs = student(inputs)
        name = next(name for name in ("logits", "image_embeds", "last_hidden_state") if name in outputs)
        expected[kind] = outputs[name]
        save_file({"pixel_values": inputs}, tmp_path / f"{kind}.safetensors")
        classifies = isinstance(student, SparseFormerForImageClassification)
        loader = "AutoModelForImageClassification" if classifies else f"modeling_sparseformer.{type(student).__name__}"
        jobs[kind] = {"source": str(folder), "loader": loader, "inputs": str(tmp_path / f"{kind}.safetensors")}
    (tmp_path / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    run_without_frugalvit(tmp_path, "load", tmp_path / "jobs.json", tmp_path / "results")
    found = load_file(tmp_path / "results" / "outputs.safetensors")
    report = json.loads((tmp_path / "results" / "report.json").read_text(encoding="utf-8"))
    assert len(classes) == 3
    for kind in jobs:
        assert report[kind]["module"].startswith("transformers_modules."), kind
        assert report[kind]["pipeline_computes_the_same"], kind
        within = 1e-5 * expected[kind].abs().max().item()
        torch.testing.assert_close(found[kind], expected[kind], rtol=0, atol=within, msg=lambda m, k=kind: f"{k}: {m}")


def test_a_folder_that_is_no_teacher_is_refused_in_one_line(photographs, tmp_path, capsys):
    sizes = {"depths": [1, 1], "num_heads": [1, 2], "embed_dim": 16, "patch_size": 2, "window_size": 2}
    swin = transformers.SwinForImageClassification(transformers.SwinConfig(image_size=32, **sizes))
    swin.save_pretrained(tmp_path / "teacher")
    transformers.ViTImageProcessor(size=square(32)).save_pretrained(tmp_path / "teacher")
    capsys.readouterr()
    assert cli.main(["bootstrap", *arguments_for(str(tmp_path / "teacher"), photographs, tmp_path / "out")]) == 1
    # `datasets` may have drawn its progress before.
    *before, error = capsys.readouterr().err.splitlines()
    assert error.startswith("frugalvit bootstrap: error: Cannot bootstrap from SwinModel: it is hierarchical"), error
    assert all("Generating" in line or not line for line in before)
    assert not (tmp_path / "out").exists()
