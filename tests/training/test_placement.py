"""Students whose tokens are placed by content, from the command on."""

import json

import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image
from transformers import AutoModelForImageClassification

import frugalvit
from frugalvit.common.choices import SUBSET
from frugalvit.common.data import load_images
from frugalvit.common.decoding import decode_image
from frugalvit.common.loading import load_image_classifier
from frugalvit.common.views import ImageFormat, seeded
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.training import bootstrap
from frugalvit.training.components.attended_cells import attended_cells
from frugalvit.training.components.augmentation import BootstrapView
from frugalvit.training.losses import forecast_loss


def run(teacher, output_dir, *arguments) -> dict:
    bootstrap.main(
        [
            *("--teacher", str(teacher), "--output", str(output_dir), "--focusing", "inherited", "--no-compare"),
            *("--train-split", "train[:64]", "--eval-split", "test[:32]", "--batch-size", "16", "--epochs", "1"),
            *arguments,
        ]
    )
    return json.loads((output_dir / "results.json").read_text())


@pytest.fixture(scope="module")
def trained(teacher, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trees") / "out"
    run(
        teacher,
        folder,
        *("--placement", "content", "--placement-rule", "contrast", "--elastic-token-counts", "5", "9"),
    )
    return folder


def test_trees_are_trained_and_loaded_again(trained):
    results = json.loads((trained / "results.json").read_text())
    student = AutoModelForImageClassification.from_pretrained(trained)
    config = student.config
    assert (config.placement, config.placement_rule) == ("content", "contrast")
    assert config.elastic_token_counts == [4, 7] and {"accuracy_4", "accuracy_7"} <= results["epochs"][-1].keys()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    rois = student(images, output_rois=True).rois[-1]
    assert rois.shape == (2, 7, 4)
    assert "4, 7 latent tokens" in (trained / "README.md").read_text(encoding="utf-8")


def test_a_trained_grid_goes_on_as_trees(teacher, tmp_path):
    run(teacher, tmp_path / "grid", "--num-latent-tokens", "16")
    options = ("--placement", "content", "--elastic-token-counts", "7", "16")
    run(teacher, tmp_path / "trees", "--student", str(tmp_path / "grid"), *options)
    config = AutoModelForImageClassification.from_pretrained(tmp_path / "trees").config
    assert (config.placement, config.elastic_token_counts) == ("content", [7, 16])


def test_a_forecast_learns_where_the_teacher_attends(tmp_path):
    """Nearer to its attention than an even one."""
    teacher = frugalvit.checkpoint_path("cifar10-vit")
    options = ("--placement", "content", "--placement-rule", "learned", "--num-latent-tokens", "7")
    options += ("--epochs", "3", "--learning-rate", "5e-3", "--train-split", "train[:128]")
    run(teacher, tmp_path / "out", *options)
    student = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    model, processor = load_image_classifier(teacher, "cpu")
    anatomy = read_anatomy(model, (32, 32))
    images = [decode_image(record["image"], index) for index, record in enumerate(load_images([SUBSET], "test[:64]"))]
    pixels = processor(images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        attention = attended_cells(anatomy, anatomy.states(pixels)).unflatten(1, anatomy.grid)
        forecast = student.base_model(pixels, output_attention_forecast=True).attention_forecast
    assert forecast.shape == (64, *anatomy.grid)
    even = forecast_loss(torch.zeros_like(forecast), attention)
    assert forecast_loss(forecast, attention) < 0.9 * even


def test_the_forecast_of_other_grids_is_compared_by_area():
    attention = torch.tensor([[[0.5, 0.1], [0.25, 0.15]]])
    spread = attention.repeat_interleave(2, 1).repeat_interleave(2, 2) / 4
    logits = torch.randn(1, 2, 2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(forecast_loss(logits, spread), forecast_loss(logits, attention))


def test_canvases_show_other_images():
    image_format = ImageFormat((8, 8))
    red, blue = (Image.new("RGB", (8, 8), color) for color in ("red", "blue"))
    view = BootstrapView(
        image_format, scale=(1.0, 1.0), flip=0.0, zoom_out=4.0, canvas_images=0.5, draw_image=lambda: blue
    )
    seen = set()
    for seed in range(40):
        with seeded(seed):
            pixels = view(red)["pixel_values"]
        seen.add((bool((pixels[2] > 200).any()), bool(((pixels[0] > 100) & (pixels[0] < 150)).any())))
    # Alone, on another image, and on plain gray.
    assert {(False, False), (True, False), (False, True)} <= seen


def test_a_stream_has_no_other_images(teacher, tmp_path):
    arguments = ["--teacher", str(teacher), "--output", str(tmp_path / "out"), "--streaming", "--eval-split", "none"]
    arguments += ["--steps-per-epoch", "1", "--zoom-out", "2", "--canvas-images", "0.5"]
    with pytest.raises(ValueError, match="--canvas-images chooses images by their numbers"):
        bootstrap.main(arguments)
    AcceleratorState._reset_state(True)
