"""Tests of feature maps: assignment of tokens to cells, equality with the teacher's maps, upsamplers and heads."""

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.backbone_utils import load_backbone
from vision_transformers import KINDS, of_transformers

from frugalvit import (
    PatchSparseFormerBackbone,
    PatchSparseFormerConfig,
    PatchSparseFormerForImageClassification,
    PatchSparseFormerForSemanticSegmentation,
    SparseFormerBackbone,
    swap_backbone,
)
from frugalvit.modeling.dense import assignment_weights, scatter_to_grid
from frugalvit.modeling.placement import grid_rois


FIELDS = {
    "image_size": 64,
    "num_latent_tokens": 16,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_labels": 3,
}
PATCHES = FIELDS | {"patch_size": 8}


def make(model_class=PatchSparseFormerBackbone, **fields):
    """Return a small model in evaluation mode, with noise added to its initial weights."""
    torch.manual_seed(0)
    sizes = FIELDS if model_class is SparseFormerBackbone else PATCHES
    model = model_class(model_class.config_class(**sizes | fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("initial_rois"):
                parameter += 0.05 * torch.randn_like(parameter)
    return model


def images(*size: int) -> torch.Tensor:
    return torch.randn(2, 3, *(size or (64, 64)), generator=torch.Generator().manual_seed(0))


class TestAssignmentWeights:
    @given(st.tuples(st.integers(1, 5), st.integers(1, 5)), st.tuples(st.integers(1, 4), st.integers(1, 4)))
    def test_cells_inside_a_grid_cell_belong_to_its_token(self, grid, cells):
        """Each cell of the feature map belongs to exactly one token, although RoI edges have rounding errors."""
        size = tuple(count * each for count, each in zip(grid, cells, strict=True))
        weights = assignment_weights(grid_rois(grid).unsqueeze(0), *size)
        owner = torch.arange(grid[0] * grid[1]).view(grid).repeat_interleave(cells[0], 0)
        expected = nn.functional.one_hot(owner.repeat_interleave(cells[1], 1)).permute(2, 0, 1).float()
        torch.testing.assert_close(weights[0], expected, atol=1e-5, rtol=0)

    def test_of_two_tokens_the_smaller_has_the_larger_weight(self):
        rois = torch.tensor([[[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.5, 0.5]]])
        weights = assignment_weights(rois, 4, 4)[0]
        torch.testing.assert_close(weights[:, 0, 0], torch.tensor([0.2, 0.8]))
        torch.testing.assert_close(weights[:, 3, 3], torch.tensor([1.0, 0.0]))

    def test_a_cell_outside_all_rois_belongs_to_the_nearest_token(self):
        rois = torch.tensor([[[0.0, 0.0, 0.25, 0.25], [0.75, 0.0, 1.0, 0.25]]])
        weights = assignment_weights(rois, 8, 8)[0]
        assert weights[0, 7, 0] > 0.99 and weights[1, 7, 7] > 0.99
        torch.testing.assert_close(weights.sum(0), torch.ones(8, 8))

    def test_rois_get_no_gradient(self):
        rois = torch.rand(1, 3, 4, requires_grad=True)
        assert not scatter_to_grid(torch.rand(1, 3, 2), assignment_weights(rois, 4, 4)).requires_grad


class TestMaps:
    @pytest.mark.parametrize(
        ("name", "backbone_class"),
        [("dinov2-registers", "Dinov2WithRegistersBackbone"), ("dinov3", "DINOv3ViTBackbone")],
    )
    @torch.no_grad()
    def test_with_a_token_for_each_patch_they_equal_those_of_transformers(self, name, backbone_class):
        teacher = KINDS[name].make()
        teacher.config.out_indices = [0, 2, 3]
        reference = getattr(transformers, backbone_class)(teacher.config).eval()
        reference.load_state_dict(teacher.state_dict())
        student = PatchSparseFormerBackbone.from_teacher(teacher, 64, out_indices=[0, 2, 3], upsampler_hidden_size=8)
        pixel_values = images(32, 32)
        expected = reference(pixel_values).feature_maps
        torch.testing.assert_close(student(pixel_values).feature_maps, expected, atol=1e-4, rtol=1e-4)
        student.set_placement("content")
        torch.testing.assert_close(student(pixel_values).feature_maps, expected, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize(
        "fields",
        [{}, {"placement": "content"}, {"model_class": SparseFormerBackbone, "feature_stride": 8}],
        ids=["grid", "content", "paper"],
    )
    @torch.no_grad()
    def test_images_of_any_size_have_maps_at_the_teachers_grid(self, fields):
        model = make(out_indices=[1, -1], **fields)
        for size in ((64, 64), (47, 35), (8, 8)):
            for count in (4, None):
                maps = model(images(*size), num_tokens=count).feature_maps
                assert [each.shape for each in maps] == [(2, 32, size[0] // 8, size[1] // 8)] * 2
                assert all(each.isfinite().all() for each in maps)
        with pytest.raises(ValueError, match="pixels, expected at least 8 x 8, a cell of the feature map"):
            model(images(7, 64))


class TestUpsampler:
    @torch.no_grad()
    def test_adds_nothing_at_first_and_details_of_the_image_later(self):
        plain = make(out_indices=[2, 4])
        torch.manual_seed(1)
        model = PatchSparseFormerBackbone(
            plain.config.from_dict(plain.config.to_dict() | {"upsampler_hidden_size": 8})
        ).eval()
        model.sparseformer.load_state_dict(plain.sparseformer.state_dict())
        expected = plain(images()).feature_maps
        for found, before in zip(model(images()).feature_maps, expected, strict=True):
            torch.testing.assert_close(found, before, atol=0, rtol=0)
        for upsampler in model.feature_maps.upsamplers.values():
            nn.init.normal_(upsampler.out_proj.weight)
        found = model(images()).feature_maps[0]
        inside = found.unflatten(-1, (4, 2)).unflatten(-3, (4, 2))
        before = expected[0].unflatten(-1, (4, 2)).unflatten(-3, (4, 2))
        assert inside.std((-1, -3)).min() > 0.01 > before.std((-1, -3)).median()


class TestLoading:
    @torch.no_grad()
    def test_a_saved_classifier_loads_as_a_backbone_and_a_backbone_as_a_segmentation_model(self, tmp_path):
        classifier = make(PatchSparseFormerForImageClassification)
        classifier.save_pretrained(tmp_path)
        backbone, report = PatchSparseFormerBackbone.from_pretrained(
            tmp_path, out_features=["stage2", "stage4"], upsampler_hidden_size=4, output_loading_info=True
        )
        assert not report["unexpected_keys"] and all("upsamplers" in key for key in report["missing_keys"])
        maps = backbone(images()).feature_maps
        states = classifier(images(), output_hidden_states=True, output_tokens=True, output_rois=True)
        for found, index in zip(maps, (2, 4), strict=True):
            tokens = classifier.base_model.layernorm(states.hidden_states[index][:, 1:])
            torch.testing.assert_close(found, scatter_to_grid(tokens, assignment_weights(states.rois[-1], 8, 8)))
        # A backbone and a segmentation model load the upsamplers of a saved backbone.
        for parameter in backbone.feature_maps.parameters():
            nn.init.normal_(parameter)
        backbone.save_pretrained(tmp_path / "backbone")
        again = PatchSparseFormerBackbone.from_pretrained(tmp_path / "backbone")
        assert again.out_features == ["stage2", "stage4"]
        segmenter = PatchSparseFormerForSemanticSegmentation.from_pretrained(tmp_path / "backbone")
        expected = backbone(images()).feature_maps
        torch.testing.assert_close(again(images()).feature_maps, expected)
        decoded = segmenter.decode_head(expected)
        outputs = segmenter(images(), output_token_maps=True)
        torch.testing.assert_close(outputs.logits, decoded)
        assert decoded.shape == (2, 3, 8, 8) and outputs.hidden_states is None
        torch.testing.assert_close(outputs.token_maps.sum(1), torch.ones(2, 8, 8))


def make_upernet(backbone_config) -> transformers.UperNetForSemanticSegmentation:
    torch.manual_seed(0)
    fields = {"hidden_size": 16, "pool_scales": [1, 2], "use_auxiliary_head": False, "num_labels": 3}
    config = transformers.UperNetConfig(backbone_config=backbone_config, **fields)
    return transformers.UperNetForSemanticSegmentation(config).eval()


PYRAMID = {"feature_scales": [4, 2, 1, 0.5], "upsampler_hidden_size": 4}


def test_a_head_of_transformers_is_trained_saved_and_loaded_with_a_backbone(tmp_path):
    head = make_upernet(PatchSparseFormerConfig(**PATCHES | PYRAMID))
    labels = torch.ones(2, 64, 64, dtype=torch.long)
    assert type(load_backbone(head.config)) is PatchSparseFormerBackbone
    head.train()(images(), labels=labels).loss.backward()
    assert all(any(p.grad.any() for p in layer.parameters()) for layer in head.backbone.sparseformer.layers)
    head.eval().save_pretrained(tmp_path)
    loaded, report = type(head).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(images()).logits, head(images()).logits, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_a_teachers_head_reads_the_maps_of_its_student(tmp_path):
    teacher = of_transformers("Dinov2", mlp_ratio=2)()
    teacher.config.out_indices = [1, 3]
    head = make_upernet(teacher.config)
    head.backbone.load_state_dict(teacher.state_dict())
    expected = head(images(32, 32)).logits
    student = PatchSparseFormerBackbone.from_teacher(teacher, 64, out_indices=[1, 3])
    swapped = swap_backbone(head, student)
    torch.testing.assert_close(swapped(images(32, 32)).logits, expected, atol=1e-4, rtol=1e-3)
    swapped.save_pretrained(tmp_path)
    loaded = transformers.UperNetForSemanticSegmentation.from_pretrained(tmp_path).eval()
    assert type(loaded.backbone) is PatchSparseFormerBackbone
    torch.testing.assert_close(loaded(images(32, 32)).logits, expected, atol=1e-4, rtol=1e-3)
