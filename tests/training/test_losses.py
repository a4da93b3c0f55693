"""The alignment of a feature map with a teacher's."""

import pytest
import torch
import torch.nn.functional as F
from vision_transformers import of_transformers

from frugalvit import MapAlignmentLoss, SparseFormerBackbone, SparseFormerModel
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.training.losses import MapsOfBackbone, MapsOfTokens


ASKED = {"output_hidden_states": True, "output_rois": True}


def maps(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*(shape or (2, 8, 3, 4)), generator=torch.Generator().manual_seed(seed))


def test_cosine_and_length_of_what_distinguishes_each_cell():
    found, target = maps(), maps(seed=1)
    shared = torch.randn(2, 8, 1, 1, generator=torch.Generator().manual_seed(2))
    loss = MapAlignmentLoss(0.5)([found + shared], [target + shared])
    torch.testing.assert_close(loss, MapAlignmentLoss(0.5)([found], [target]))
    common, expected = target.mean((2, 3), keepdim=True), 0.0
    found, target = found - common, target - common
    for image in range(2):
        for row in range(3):
            for column in range(4):
                one, other = found[image, :, row, column], target[image, :, row, column]
                cosine = one @ other / one.norm() / other.norm()
                expected += (1 - cosine + 0.5 * (one.norm() / other.norm()).log() ** 2) / 24
    torch.testing.assert_close(loss, expected)
    both = MapAlignmentLoss(0.5)([found, target], [target, target])
    torch.testing.assert_close(both, expected / 2)


def test_is_zero_where_they_agree_and_length_alone_is_told_apart():
    target = maps()
    assert MapAlignmentLoss()([target], [target]).abs() < 1e-6
    target = target - target.mean((2, 3), keepdim=True)
    assert MapAlignmentLoss(0.0)([3 * target], [target]).abs() < 1e-6
    torch.testing.assert_close(MapAlignmentLoss(1.0)([3 * target], [target]), torch.tensor(3.0).log() ** 2)


def test_images_of_one_color_do_not_outweigh_others():
    target = maps(2, 8, 1, 1).expand(2, 8, 3, 4)
    found = target + 1e-4 * maps()
    assert MapAlignmentLoss()([found], [target + 1e-6 * maps(seed=1)]) < 1.2


def test_larger_maps_are_interpolated_to():
    found, target = maps(2, 8, 3, 4), maps(2, 8, 6, 8, seed=1)
    expected = MapAlignmentLoss()([F.interpolate(found, (6, 8), mode="bilinear")], [target])
    torch.testing.assert_close(MapAlignmentLoss()([found], [target]), expected)


def test_half_precision_and_vectors_of_zeros_have_gradients():
    found = torch.zeros(1, 8, 2, 2, dtype=torch.bfloat16, requires_grad=True)
    loss = MapAlignmentLoss()([found], [maps(1, 8, 2, 2)])
    loss.backward()
    assert loss.dtype == torch.float32 and found.grad.isfinite().all()


@pytest.mark.parametrize("found", [[], [maps(2, 7, 3, 4)], [maps(1, 8, 3, 4)], [maps(), maps()]])
def test_other_layers_channels_or_images_are_refused(found):
    with pytest.raises(ValueError, match="Got maps of batch and channels"):
        MapAlignmentLoss()(found, [maps()])


def test_maps_of_tokens_are_the_teachers_where_tokens_are_its_patches():
    torch.manual_seed(0)
    teacher = of_transformers("ViT", image_size=32, patch_size=8, num_hidden_layers=3)()
    anatomy = read_anatomy(teacher)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        states = anatomy.states(images)
    for placement in ("grid", "content"):
        student = SparseFormerModel.from_teacher(anatomy, 16, focusing="inherited", placement=placement)
        losses = []
        for count, layers in ((16, [-1, -2]), (4, [-1, -2]), (4, [-1])):
            align = MapsOfTokens(student, anatomy, layers)
            outputs = student(images, num_tokens=count, **ASKED)
            losses.append(align(outputs, align.of_teacher(states)).item())
        assert losses[0] < 1e-6 < 0.01 < losses[1] and losses[1] != losses[2]
    for layers in ([0], [-5]):
        with pytest.raises(ValueError, match=f"--dense-layers has {layers[0]}, expected -1, the last, to -4"):
            MapsOfTokens(student, anatomy, layers)


def test_maps_of_a_backbone_are_the_teachers_where_tokens_are_its_patches():
    torch.manual_seed(0)
    anatomy = read_anatomy(of_transformers("ViT", image_size=32, patch_size=8, num_hidden_layers=3)())
    images, fields = torch.randn(2, 3, 32, 32), {"focusing": "inherited", "out_indices": [1, 3]}
    student = SparseFormerBackbone.from_teacher(anatomy, 16, upsampler_hidden_size=8, **fields)
    align = MapsOfBackbone(student, anatomy)
    with torch.no_grad():
        targets = align.of_teacher(anatomy.states(images))
        assert align(student(images), targets) < 1e-6 < align(student(images, num_tokens=4), targets)
    with pytest.raises(ValueError, match=r"--dense-layers are \[-1\], and the backbone has maps of \[-3, -1\]"):
        MapsOfBackbone(student, anatomy, [-1])
    for name in ("apply_layernorm", "reshape_hidden_states"):
        other = SparseFormerBackbone.from_teacher(anatomy, 16, **fields, **{name: False})
        with pytest.raises(ValueError, match=name):
            MapsOfBackbone(other, anatomy)
