"""What is done to a ViT's weights in place: attention that starts with structure, positions for other sizes."""

import pytest
import timm
import torch
from transformers import DeiTConfig, DeiTForImageClassification, ViTConfig, ViTForImageClassification, ViTModel

from frugalvit.modeling.initialization import mimetic_init_, resize_positions_, sincos_position_encoding


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 1, "hidden_size": 96, "intermediate_size": 64}


def vit(model_class=ViTForImageClassification, config_class=ViTConfig, **fields):
    torch.manual_seed(0)
    return model_class(config_class(image_size=32, patch_size=4, **{**SIZES, **fields})).eval()


def test_mimetic_initialization_puts_the_identity_into_attention():
    model = vit()
    mimetic_init_(model, torch.Generator().manual_seed(0))
    attention = model.vit.layers[0].attention
    with torch.no_grad():
        queries_keys = attention.q_proj.weight.T @ attention.k_proj.weight
        values_outputs = attention.v_proj.weight.T @ attention.o_proj.weight.T
    # 0.7 I + 0.7 Z and -0.4 I + 0.4 Z with Z of variance 1 / 96: the means of the diagonals show the identity.
    assert queries_keys.diagonal().mean().item() == pytest.approx(0.7, abs=0.05)
    assert values_outputs.diagonal().mean().item() == pytest.approx(-0.4, abs=0.05)
    off_diagonal = queries_keys - queries_keys.diagonal().diag()
    assert off_diagonal.std().item() == pytest.approx(0.7 / 96**0.5, rel=0.1)
    positions = model.vit.embeddings.position_embeddings[0]
    torch.testing.assert_close(positions[1:], sincos_position_encoding(8, 8, 96), rtol=0, atol=0)
    with pytest.raises(ValueError, match="expected a Transformers ViT"):
        mimetic_init_(timm.create_model("resnet10t"))


def test_sincos_positions_follow_the_formula():
    encoding = sincos_position_encoding(2, 3, 8)
    x, y, omega = 2, 1, 10000 ** -(1 / 1)
    expected = torch.tensor([x, x * omega]), torch.tensor([y, y * omega])
    row = torch.cat([expected[0].sin(), expected[0].cos(), expected[1].sin(), expected[1].cos()])
    torch.testing.assert_close(encoding[y * 3 + x], row)
    with pytest.raises(ValueError, match="multiple of 4"):
        sincos_position_encoding(2, 2, 6)


@pytest.mark.parametrize("size", [16, 24, 48])
@pytest.mark.parametrize(
    "model", [vit(), vit(DeiTForImageClassification, DeiTConfig), vit(ViTModel)], ids=["vit", "deit", "headless"]
)
def test_resized_positions_are_those_of_interpolation_at_run_time(model, size, tmp_path):
    model = type(model).from_pretrained(saved(model, tmp_path / "before"))
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(pixels, interpolate_pos_encoding=True)[0]
        assert resize_positions_(model, size) is model
        torch.testing.assert_close(model(pixels)[0], expected)
        loaded = type(model).from_pretrained(saved(model, tmp_path / "after"))
        torch.testing.assert_close(loaded(pixels)[0], expected)


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


def test_positions_that_cannot_be_resized_are_refused():
    with pytest.raises(ValueError, match=r"30 pixels do not divide into patches of \(4, 4\)"):
        resize_positions_(vit(), 30)
    with pytest.raises(ValueError, match="positions of ResNet; expected a Transformers ViT or DeiT"):
        resize_positions_(timm.create_model("resnet10t"), 32)
