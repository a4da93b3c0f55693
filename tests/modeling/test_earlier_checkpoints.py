"""Folders that earlier versions saved load, with the logits that the models had then."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import frugalvit
from frugalvit.modeling.context_broadcast import has_context_broadcast


FOLDER = Path(__file__).parents[1] / "fixtures" / "earlier_checkpoints"
RECORDED = load_file(FOLDER / "logits.safetensors")


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(RECORDED.keys() - {"pixel_values"}))
def test_logits_are_those_of_the_version_that_saved_it(name):
    own = FOLDER / name
    folder = own if own.is_dir() else frugalvit.checkpoint_path(name)
    is_clip = name.endswith("-clip")
    auto_class = transformers.AutoModel if is_clip else transformers.AutoModelForImageClassification
    model, report = auto_class.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    pixel_values = RECORDED["pixel_values"]
    output = model.get_image_features(pixel_values).pooler_output if is_clip else model(pixel_values).logits
    torch.testing.assert_close(output, RECORDED[name], rtol=1e-5, atol=1e-5)
    assert has_context_broadcast(model) == ("context" in name or name == "sparseformer_mean")
