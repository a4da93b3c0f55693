"""Tests of `frugalvit evaluate segmentation`."""

from types import SimpleNamespace

import pytest
import torch
from torchvision.transforms import InterpolationMode
from transformers import SegformerConfig, SegformerForSemanticSegmentation, SegformerImageProcessor

from frugalvit.cli import main
from frugalvit.evaluation.segmentation import segmentation_scores
from frugalvit.modeling.image_format import ImageFormat
from frugalvit.training.masks import MaskReader, load_masked_images


class ByColor(torch.nn.Module):
    """Segmentation model whose logits at a pixel depend only on the pixel's color."""

    config = SimpleNamespace(num_labels=4)
    device = torch.device("cpu")

    def forward(self, pixel_values):
        return SimpleNamespace(logits=-(pixel_values[:, :1] - 60 * torch.arange(4).view(1, 4, 1, 1)).abs())


@pytest.mark.parametrize("window", [None, 40, 24, 64], ids=["whole", "two", "smaller", "larger"])
def test_windows_keep_the_positions_of_pixels(window, scenes):
    images = load_masked_images(scenes, "train")
    image_format = ImageFormat((40, 52), (0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255), InterpolationMode.NEAREST_EXACT)
    results = segmentation_scores(ByColor(), image_format, images, MaskReader(4), batch_size=5, window=window)
    assert results["images"] == 12 and results["skipped"] == 0
    assert results["pixel_accuracy"] == 1 if window in (None, 40) else results["pixel_accuracy"] > 0.8


def test_the_command(scenes, tmp_path, capsys):
    config = SegformerConfig(depths=[1] * 4, hidden_sizes=[8] * 4, num_attention_heads=[1] * 4, num_labels=4)
    SegformerForSemanticSegmentation(config).save_pretrained(tmp_path / "model")
    SegformerImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "model")
    command = ["evaluate", "segmentation", "--model", str(tmp_path / "model"), "--dataset", scenes]
    assert main([*command, "--window", "32", "--limit", "3"]) == 0
    assert "mean_iou" in capsys.readouterr().out
    assert main([*command, "--mask-column", "no"]) == 1
    assert "give image_column and mask_column" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, "--ignored-labels", "256"])
    assert "ignored_labels is [256], expected class numbers from 0 to 255" in capsys.readouterr().err
