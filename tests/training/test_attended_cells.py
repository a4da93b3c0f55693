"""A teacher's attention to cells, compared with the attention that Transformers returns."""

import pytest
import torch
from vision_transformers import KINDS, of_transformers

from frugalvit.modeling.hosts import read_anatomy
from frugalvit.training.components.attended_cells import attended_cells, attention_to_patches


@pytest.mark.parametrize("name", ["vit-classifier", "deit", "dinov2-registers", "dinov3", "ijepa", "siglip-vision"])
def test_attention_is_what_the_model_computes(name):
    model = KINDS[name].make()
    model.set_attn_implementation("eager")
    anatomy = read_anatomy(model)
    images = anatomy.example()
    with torch.no_grad():
        states = anatomy.states(images)
        expected = model(images, output_attentions=True).attentions
    front = anatomy.num_prefix_tokens
    for block, tokens, weights in zip(anatomy.blocks, states, expected, strict=False):
        asking = slice(0, anatomy.num_class_tokens) if anatomy.num_class_tokens else slice(front, None)
        weights = weights[:, :, asking, front:]
        weights = (weights / weights.sum(-1, keepdim=True)).mean((1, 2))
        torch.testing.assert_close(attention_to_patches(anatomy, block, tokens), weights, atol=1e-5, rtol=1e-3)


def test_cells_are_attended_in_the_last_third_of_the_blocks():
    anatomy = read_anatomy(of_transformers("ViT", num_hidden_layers=6)())
    with torch.no_grad():
        states = anatomy.states(anatomy.example())
        expected = [attention_to_patches(anatomy, anatomy.blocks[index], states[index]) for index in (4, 5)]
    found = attended_cells(anatomy, states)
    torch.testing.assert_close(found, torch.stack(expected).mean(0))
    torch.testing.assert_close(found.sum(1), torch.ones(len(found)))
