"""Test that incomplete models are refused, and that images are prepared as image processors prepare them."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from trainings import save_timm

import frugalvit.architectures
from drawn import noise
from frugalvit.info import describe
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.modeling.image_format import ImageFormat
from frugalvit.training.loading import load_model
from frugalvit.training.preprocessing import restore_images
from frugalvit.training.views import EvalView
from tiny import make_vit, save_vit


# Commits of the model that the fixture `cached` saves.
COMMITS = {"main": "0" * 40, "v1": "1" * 40}


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Local hub cache with two revisions of a model: branch main has 3 classes, and tag v1 has 2."""
    repository = tmp_path / "models--someone--model"
    for count, (name, commit) in zip((3, 2), COMMITS.items(), strict=True):
        folder = repository / "snapshots" / commit
        make_vit(num_labels=count).save_pretrained(folder)
        transformers.ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.1 * count] * 3).save_pretrained(
            folder
        )
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(("revision", "count"), [("", 3), ("@main", 3), ("@v1", 2), (f"@{COMMITS['v1']}", 2)])
def test_a_revision_is_pinned(cached, revision, count):
    for task in ("image-classification", "image-feature-extraction"):
        model, processor = load_model(f"someone/model{revision}", task, "cpu")
        assert model.config.num_labels == count and processor.image_mean[0] == pytest.approx(0.1 * count)
    assert describe(f"someone/model{revision}")["parameters"] == model.num_parameters()


TINY = {"num_hidden_layers": 2, "image_size": 32, "patch_size": 8, "hidden_size": 32, "num_attention_heads": 2}


def make(model_class: type[transformers.PreTrainedModel], **options) -> transformers.PreTrainedModel:
    fields = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    fields = TINY | (fields if model_class is transformers.ViTMAEForPreTraining else {"encoder_stride": 8})
    torch.manual_seed(0)
    return model_class(model_class.config_class(**fields), **options).eval()


def write(model: transformers.PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (make(transformers.ViTModel), transformers.ViTModel),
        (make(transformers.ViTModel, add_pooling_layer=False), transformers.ViTModel),
        (make(transformers.DeiTForMaskedImageModeling), transformers.DeiTModel),
        (make(transformers.ViTMAEForPreTraining), transformers.ViTMAEModel),
    ],
    ids=["with pooler", "without pooler", "masked images", "MAE"],
)
def test_weights_that_the_embedding_does_not_read_may_be_missing(saved, loaded, tmp_path):
    model, _ = load_model(write(saved, tmp_path / "model"), "image-feature-extraction", "cpu")
    assert type(model) is loaded
    assert not any(part in name for name, _ in model.named_parameters() for part in ("pooler", "decoder"))
    with torch.no_grad():
        found, expected = (read_anatomy(source).embed(PIXELS) for source in (model, saved.base_model))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_weights_that_the_embedding_reads_must_be_there(tmp_path):
    folder = write(make(transformers.ViTModel), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["layernorm.bias"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="is no complete ViTModel: its .*checkpoint lacks layernorm.bias"):
        load_model(folder, "image-feature-extraction", "cpu")


def test_adapters_pipes_and_models_of_other_images_are_refused(tmp_path):
    os.mkfifo(tmp_path / "open_clip_model.safetensors")
    with pytest.raises(ValueError, match="open_clip_model.safetensors' is a pipe"):
        load_model(f"open_clip:local-dir:{tmp_path}", "image-feature-extraction", "cpu")
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(ValueError, match="is an adapter of peft; merge it first: merge_and_unload"):
        load_model(tmp_path, "image-classification")
    with pytest.raises(ValueError, match="takes images of 4 channels; files are read as RGB"):
        load_model(save_vit(tmp_path / "vit", num_channels=4), "image-classification")


def test_defects_keep_their_traceback(tmp_path, monkeypatch):
    """Errors that a user can cause become a `ValueError`. Programming errors keep their type and traceback."""
    folder = write(make(transformers.ViTModel), tmp_path / "model")
    for error, expected in (
        (TypeError("3"), TypeError),
        (AttributeError("x"), AttributeError),
        (OSError("torn"), ValueError),
    ):

        def fail(*_, error=error, **options):
            raise error

        monkeypatch.setattr(transformers.ViTModel, "__init__", fail)
        with pytest.raises(expected) as raised:
            load_model(folder, "image-feature-extraction", "cpu")
        assert type(raised.value) is expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("caltech101-sparsefomer", "no model .* did you mean caltech101-sparseformer"),
        ("sparseformer-v1-tiny", "a recipe without weights; train it by `frugalvit train --config sparseformer-v1"),
        ("./nowhere", "There is no folder './nowhere'"),
        ("vit", "no model 'vit', expected a folder, a hub id, owner/name, or one that ships; these"),
        ("someone/model@", "names no revision"),
    ],
)
def test_a_wrong_name_is_refused_before_the_hub_is_asked(name, message, monkeypatch):
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("it is asked for"))
    for load in (frugalvit.Classifier, frugalvit.Embedder, frugalvit.architectures.load_saved_model):
        with pytest.raises(ValueError, match=message):
            load(name)


@pytest.mark.parametrize("num_classes", [0, 3])
def test_timms_folders(num_classes, tmp_path):
    name = tmp_path / "model"
    expected = save_timm(name, num_classes=num_classes)
    model, processor = load_model(name, "image-feature-extraction", "cpu")
    assert type(model) is (
        transformers.TimmWrapperForImageClassification if num_classes else transformers.TimmWrapperModel
    )
    with torch.no_grad():
        torch.testing.assert_close(model.timm_model(PIXELS), expected(PIXELS), rtol=0, atol=0)
    image_format = ImageFormat.from_processor(processor)
    assert (image_format.size, image_format.resize, image_format.mean) == ((32, 32), 40, (0.5, 0.4, 0.3))
    if num_classes:
        classifier, _ = load_model(name, "image-classification", "cpu")
        with torch.no_grad():
            torch.testing.assert_close(classifier(PIXELS).logits, expected(PIXELS), rtol=0, atol=0)


def photograph(width: int, height: int) -> Image.Image:
    """Draw an image with smooth colors and edges."""
    return noise((width // 8, height // 8)).resize((width, height), Image.Resampling.BICUBIC)


def square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def timm_processor(**settings) -> transformers.TimmWrapperImageProcessor:
    return transformers.TimmWrapperImageProcessor(
        {"input_size": [3, 64, 64], "mean": [0.5, 0.4, 0.3], "std": [0.2] * 3, **settings}
    )


C_RADIO = {"do_center_crop": False, "do_normalize": False}
PROCESSORS = {
    "cropped": (transformers.BitImageProcessor(size={"shortest_edge": 72}, crop_size=square(64)), 0),
    "C-RADIO, with a size": (transformers.CLIPImageProcessor(size=square(64), **C_RADIO), 0),
    # timm resizes with PIL, so pixels may differ by one color level.
    "timm": (timm_processor(interpolation="bicubic", crop_pct=64 / 72), 1),
    "factor": (transformers.ViTImageProcessor(size=square(64), rescale_factor=1 / 127.5, image_mean=[1.0] * 3), 0),
    "no factor": (transformers.ViTImageProcessor(size=square(64), do_rescale=False, image_mean=[120.0, 110, 90]), 0),
    "padded": (transformers.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=square(64)), 0),
    # For these processors, `EvalView` gives the same pixels as the processor only if images are square.
    "DeiT": (transformers.DeiTImageProcessor(size=square(72), crop_size=square(64)), 0),
    "NaFlex": (transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=70), 0),
}


def assert_prepared_alike(processor, image: Image.Image, levels: float = 0):
    """Check that pixels of `EvalView` and of the image processor differ by at most `levels` of 255 color levels."""
    image_format = ImageFormat.from_processor(processor)
    pixels = image_format.normalize(EvalView(image_format)(image)["pixel_values"][None])
    expected = processor(image, return_tensors="pt")["pixel_values"].float()
    if expected.ndim == 3:
        # The NaFlex processor returns flattened patches, row by row, with channels last. Padding patches follow.
        rows, size = image_format.size[0] // processor.patch_size, processor.patch_size
        expected = expected[:, : rows * rows].view(1, rows, rows, size, size, 3)
        expected = expected.permute(0, 5, 1, 3, 2, 4).reshape(pixels.shape)
    within = levels / 255 / min(map(abs, image_format.std)) + 1e-5 * max(1, expected.abs().max().item())
    torch.testing.assert_close(pixels, expected, rtol=0, atol=within)


@pytest.mark.parametrize("name", PROCESSORS)
def test_each_processor_is_followed_and_undone(name):
    """`EvalView` prepares images as the processor does. `restore_images` inverts the processor."""
    processor, levels = PROCESSORS[name]
    on_squares = name in ("DeiT", "NaFlex")
    assert_prepared_alike(processor, photograph(120 if on_squares else 160, 120), levels)
    if name == "NaFlex":
        return
    image = photograph(64, 64)
    expected = EvalView(ImageFormat.from_processor(processor))(image)["pixel_values"]
    seen = restore_images(processor, processor([image], return_tensors="pt")["pixel_values"])
    assert seen.min() >= 0 and seen.max() <= 1 and seen.dtype == torch.float32
    # Restored pixels have rounding errors. They also differ where resizing gives values below 0 or above 255.
    assert (255 * seen[0] - expected).abs().mean() < 1


def test_formats_convert_into_each_other():
    image = photograph(64, 64)
    formats = [ImageFormat.from_processor(PROCESSORS[name][0]) for name in ("cropped", "factor", "no factor")]
    formats = [replace(each, size=(64, 64), resize=None) for each in formats]
    pixels = EvalView(formats[0])(image)["pixel_values"][None]
    for source, target in itertools.product(formats, formats):
        torch.testing.assert_close(target.convert(source.normalize(pixels), source), target.normalize(pixels))
        torch.testing.assert_close(source.denormalize(source.normalize(pixels)), pixels / 255)
        assert all(0 <= value <= 255 for value in source.fill)
    assert replace(target, size=(4, 6)).convert(source.normalize(pixels), source).shape == (1, 3, 4, 6)


def test_processors_that_cannot_be_followed():
    with pytest.raises(ValueError, match="is a LevitImageProcessor, which trainings cannot reproduce"):
        ImageFormat.from_processor(transformers.LevitImageProcessor())
    with pytest.raises(ValueError, match="resized by 'lanczos'"):
        ImageFormat.from_processor(timm_processor(interpolation="lanczos"))
