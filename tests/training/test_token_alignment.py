"""Tokens are compared with what the teacher holds where they look."""

from types import SimpleNamespace

import pytest
import timm
import torch

from frugalvit import SparseFormerForImageClassification
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.training.components.token_alignment import TokenAlignment, distance_from_largest
from tiny import make_vit


SMALL = {
    "stem_channels": 8,
    "num_sampling_points": 4,
    "num_mixed_points": 4,
    "num_focusing_iterations": 2,
    "mixing_hidden_size": 8,
}


def transformers_vit(image_size):
    return make_vit(image_size=image_size, num_hidden_layers=3, num_labels=5)


def timm_vit(image_size):
    arguments = {"patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
    return timm.models.vision_transformer.VisionTransformer(img_size=image_size, global_pool="avg", **arguments)


def make_pair(make_teacher, image_size=(32, 48), truncate=1):
    torch.manual_seed(0)
    teacher = make_teacher(image_size).eval().requires_grad_(False)
    student = SparseFormerForImageClassification.from_teacher(teacher, num_latent_tokens=5, truncate=truncate, **SMALL)
    return student.eval(), teacher


@pytest.mark.parametrize("make_teacher", [transformers_vit, timm_vit])
def test_reads_the_teachers_tokens_within_the_rois(make_teacher):
    student, teacher = make_pair(make_teacher)
    alignment = TokenAlignment(student, read_anatomy(teacher))
    # A teacher whose tokens tell their position: rows and columns of the centers of its 4 x 6 patches.
    y, x = torch.meshgrid((torch.arange(4) + 0.5) / 4, (torch.arange(6) + 0.5) / 6, indexing="ij")
    tokens = torch.stack([y.flatten(), x.flatten()], dim=-1)[None]
    rois = torch.tensor([[[0.25, 0.25, 0.75, 0.5], [0.5, 0.5, 0.5, 0.5], [-5.0, -5.0, -4.0, -4.0], [0.0, 0.0, 1, 1]]])
    read = alignment._shares(rois) @ tokens
    corner = [0.125, 1 / 12]  # of the first patch
    torch.testing.assert_close(read, torch.tensor([[[0.375, 0.5], [0.5, 0.5], corner, [0.5, 0.5]]]))


def test_reads_the_tokens_of_the_largest_count_within_the_rois():
    """Each token counts by its share of a box; [CLS] takes no part."""
    quarters = [[0, 0, 0.5, 0.5], [0.5, 0, 1, 0.5], [0, 0.5, 0.5, 1], [0.5, 0.5, 1, 1]]
    boxes = [[0, 0, 1, 1], [0, 0, 1, 0.5], [0, 0, 0.75, 0.25]]
    many = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
    first, second, third, fourth = many[0, 1:]
    held = [many[0, 1:].mean(0), (first + second) / 2, (2 * first + second) / 3]
    few = torch.stack([fourth, *(3 * tokens + 1 for tokens in held)])[None].requires_grad_()

    def outputs(rois, states):
        return SimpleNamespace(rois=[torch.tensor([rois])], hidden_states=[states])

    assert distance_from_largest(outputs(boxes, few), outputs(quarters, many), 1).item() == pytest.approx(0, abs=1e-4)
    distance = distance_from_largest(outputs(boxes[::-1], few), outputs(quarters, many.requires_grad_()), 1)
    distance.backward()
    assert distance > 0.1 and few.grad.any() and many.grad is None


@pytest.mark.parametrize("truncate", [0, 1])
@pytest.mark.parametrize("make_teacher", [transformers_vit, timm_vit])
def test_compares_every_depth_with_the_teachers(make_teacher, truncate):
    student, teacher = make_pair(make_teacher, truncate=truncate)
    anatomy = read_anatomy(teacher)
    alignment = TokenAlignment(student, anatomy)
    images = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    outputs = student.base_model(images, **alignment.arguments)
    held = anatomy.states(images)
    assert len(held) == 4 and len(outputs.hidden_states) == 4 - truncate
    loss = alignment(outputs, held)
    loss.backward()
    assert loss > 0 and student.base_model.stem.convolution.weight.grad.any()
    # Tokens that hold exactly what is asked for, at another scale, have no distance left.
    shares = alignment._shares(outputs.rois[-1])
    outputs.hidden_states = [
        torch.cat([states[:, : alignment.skipped], 3 * shares @ expected[:, -shares.shape[-1] :] + 1], dim=1)
        for states, expected in zip(outputs.hidden_states, held[truncate:], strict=True)
    ]
    assert alignment(outputs, held).item() == pytest.approx(0, abs=1e-4)


def test_a_layer_as_it_is():
    """A LLaVA reads scale and mean of the states, too."""
    student, teacher = make_pair(transformers_vit)
    anatomy = read_anatomy(teacher)
    alignment = TokenAlignment(student, anatomy, layers=[-2], distance="raw")
    images = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    outputs, held = student.base_model(images, **alignment.arguments), anatomy.states(images)
    shares, states = alignment._shares(outputs.rois[-1]), outputs.hidden_states[-2]
    patches = held[-2][:, -shares.shape[-1] :]
    expected = (states[:, alignment.skipped :] - shares @ patches).square().mean() / patches.var((0, 1)).mean()
    torch.testing.assert_close(alignment(outputs, held), expected)
    for scale, shift, far in ((1, 0, False), (3, 0, True), (1, 1, True)):
        tokens = scale * shares @ patches + shift
        outputs.hidden_states = [*outputs.hidden_states[:-2], torch.cat([states[:, :1], tokens], 1), None]
        assert (alignment(outputs, held) > 0.1) == far
    with pytest.raises(ValueError, match="--token-layers has 3, .* -3 to 2"):
        TokenAlignment(student, anatomy, layers=[3])


def test_a_student_deeper_than_its_teacher():
    student, _ = make_pair(transformers_vit, truncate=0)
    with pytest.raises(ValueError, match="3 blocks and the teacher 2; .* --token-loss-weight"):
        TokenAlignment(student, read_anatomy(make_vit(num_hidden_layers=2)))


def test_rois_that_are_no_numbers_hold_nothing():
    student, teacher = make_pair(transformers_vit)
    rois = torch.rand(2, 5, 4)
    rois[1, 3, 0] = torch.nan
    shares = TokenAlignment(student, read_anatomy(teacher))._shares(rois)
    assert shares.isnan().any(-1).nonzero().tolist() == [[1, 3]]
