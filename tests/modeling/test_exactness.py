"""Comparison of SparseFormers with the reference implementation: outputs, precisions, RoIs, initialization.

The fixture files contain checkpoints of the reference implementation with their inputs and outputs. The files'
metadata contains the sizes of the models.
"""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from frugalvit import SparseFormerConfig, SparseFormerForImageClassification, convert
from frugalvit.modeling.focusing import (
    adjust_rois,
    encode_rois,
    initial_rois,
    initial_sampling_offsets,
    locate_sampling_points,
    sample_features,
)


FIXTURES = Path(__file__).parents[1] / "fixtures"
VARIANTS = ("v1", "bootstrapped")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Convert the checkpoints of the fixture files, and return the folders of the converted models."""
    root = tmp_path_factory.mktemp("converted")
    for variant in VARIANTS:
        fixture = load_file(FIXTURES / f"sparseformer_{variant}.safetensors")
        state = {name.removeprefix("state."): fixture[name] for name in fixture if name.startswith("state.")}
        source = str(root / f"{variant}.safetensors")
        save_file(state, source)
        convert.main([source, "--output", str(root / variant)])
    return {variant: root / variant for variant in VARIANTS}


@pytest.fixture(params=VARIANTS)
def case(request, folders):
    """Return a converted checkpoint's folder and the tensors of its fixture file."""
    return folders[request.param], load_file(FIXTURES / f"sparseformer_{request.param}.safetensors")


def load(folder: Path, **kwargs) -> SparseFormerForImageClassification:
    return SparseFormerForImageClassification.from_pretrained(folder, **kwargs).eval()


class TestReference:
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    @torch.no_grad()
    def test_float32(self, case, attention):
        folder, reference = case
        model = load(folder, attn_implementation=attention)
        outputs = model(reference["input"], output_rois=True)
        tokens = model.base_model(reference["input"]).last_hidden_state
        after_first_unit = model.config.num_focusing_iterations - 1
        for name, actual in {
            "logits": outputs.logits,
            "token_embedding": tokens,
            "token_roi": outputs.rois[-1],
            "roi_after_unit_0": outputs.rois[after_first_unit],
            "roi_after_unit_1": outputs.rois[-1],
        }.items():
            torch.testing.assert_close(actual, reference[name], atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        adjusts_at_full_width = model.config.generation == "v1"
        assert len(outputs.rois) == model.config.num_focusing_iterations + adjusts_at_full_width

    # Tolerances are about three times the measured differences. The differences of logits, tokens and RoIs are 0.003,
    # 0.043 and 0.0007 in bfloat16, and 0.0005, 0.005 and 0.0001 in float16. Logits reach 0.9, and tokens reach 3.9.
    @pytest.mark.parametrize("autocast", [False, True], ids=["cast", "autocast"])
    @pytest.mark.parametrize(
        ("dtype", "logits_within", "tokens_within", "rois_within"),
        [(torch.bfloat16, 0.01, 0.15, 2e-3), (torch.float16, 0.002, 0.02, 3e-4)],
        ids=["bfloat16", "float16"],
    )
    @torch.no_grad()
    def test_half_precision(self, case, dtype, logits_within, tokens_within, rois_within, autocast):
        folder, reference = case
        model = load(folder) if autocast else load(folder, dtype=dtype)
        with torch.autocast("cpu", dtype, enabled=autocast):
            outputs = model(reference["input"], output_rois=True)
            tokens = model.base_model(reference["input"]).last_hidden_state
        assert outputs.logits.dtype == dtype
        assert all(rois.dtype == torch.float32 for rois in outputs.rois)
        assert all(points.dtype == torch.float32 for points in outputs.sampling_points)
        torch.testing.assert_close(outputs.logits.float(), reference["logits"], atol=logits_within, rtol=0)
        torch.testing.assert_close(tokens.float(), reference["token_embedding"], atol=tokens_within, rtol=0)
        torch.testing.assert_close(outputs.rois[-1], reference["token_roi"], atol=rois_within, rtol=0)

    def test_initial_rois_stay_float32(self, case):
        folder, reference = case
        for model in (load(folder, dtype=torch.bfloat16), load(folder).to(torch.float16)):
            assert model.classifier.weight.dtype != torch.float32
            assert torch.equal(model.base_model.latents.initial_rois, reference["state.initial_roi.weight"])

    def test_any_image_size(self, case):
        model = load(case[0])
        for size in ((4, 4), (7, 9), (31, 96), (65, 63)):
            logits = model(torch.randn(2, 3, *size)).logits
            assert logits.shape == (2, 10) and logits.isfinite().all()
            logits.sum().backward()
            assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


DEGENERATE_ROIS = {
    "point": [0.5, 0.5, 0.5, 0.5],
    "no width": [0.5, 0.2, 0.5, 0.8],
    "negative sides": [0.8, 0.9, 0.2, 0.1],
    "far away": [1e8, 1e8, 2e8, 2e8],
    "very large": [-1e4, -1e4, 1e4, 1e4],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_degenerate_rois_and_deltas_are_finite(case, dtype):
    """Outputs and gradients are finite for degenerate initial RoIs, and for weights of +-10,000 in RoI adjustments."""
    folder, reference = case
    for roi, delta in [*((roi, None) for roi in DEGENERATE_ROIS.values()), (None, -1e4), (None, 1e4)]:
        model = load(folder, dtype=dtype).train()
        if roi is not None:
            model.base_model.latents.initial_rois.data[:] = torch.tensor(roi)
        for module in model.modules():
            if delta is not None and hasattr(module, "roi_deltas"):
                nn.init.constant_(module.roi_deltas.out_proj.weight, delta)
        outputs = model(reference["input"], output_rois=True)
        assert outputs.logits.isfinite().all() and all(rois.isfinite().all() for rois in outputs.rois)
        outputs.logits.float().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def tensors(*shape: int, low: float, high: float):
    """Return a Hypothesis strategy for float32 tensors of a shape, with values from `low` to `high`."""
    values = st.floats(low, high, width=32)
    return st.lists(values, min_size=math.prod(shape), max_size=math.prod(shape)).map(
        lambda numbers: torch.tensor(numbers).reshape(shape)
    )


def boxes(count: int):
    """Return a Hypothesis strategy for RoIs, `(1, count, 4)`, in and around the image. Sides are at least 0.0625."""
    corners, sizes = tensors(1, count, 2, low=-1, high=1), tensors(1, count, 2, low=0.0625, high=2)
    return st.builds(lambda corner, size: torch.cat([corner, corner + size], dim=-1), corners, sizes)


def deltas(count: int):
    return tensors(1, count, 4, low=-1, high=1)


properties = settings(max_examples=40, deadline=None, derandomize=True, database=None)


class TestGeometry:
    @properties
    @given(boxes(2), deltas(2), deltas(2))
    def test_adjustments_compose(self, rois, first, second):
        shift = first[..., :2] + second[..., :2] * first[..., 2:].exp()
        both = torch.cat([shift, first[..., 2:] + second[..., 2:]], dim=-1)
        torch.testing.assert_close(
            adjust_rois(adjust_rois(rois, first), second), adjust_rois(rois, both), atol=2e-5, rtol=1e-5
        )

    def test_deltas_are_in_units_of_the_roi(self):
        rois = torch.tensor([[[0.0, 0.2, 0.5, 0.4]]])
        delta = torch.tensor([[[1.0, -0.5, math.log(2), 0.0]]])
        expected = torch.tensor([[[0.25, 0.1, 1.25, 0.3]]])
        torch.testing.assert_close(adjust_rois(rois, delta), expected)

    @properties
    @given(boxes(2), st.integers(2, 40), st.integers(0, 1000))
    def test_points_have_the_mean_and_spread_of_the_roi(self, rois, num_points, seed):
        offsets = torch.randn(1, 2, num_points, 2, generator=torch.Generator().manual_seed(seed)) * 3 + 5
        points = locate_sampling_points(rois, offsets)
        left_top, right_bottom = rois.chunk(2, dim=-1)
        torch.testing.assert_close(points.mean(2), (left_top + right_bottom) / 2, atol=1e-5, rtol=0)
        torch.testing.assert_close(points.std(2), (right_bottom - left_top) / 3, atol=1e-5, rtol=1e-3)

    @properties
    @given(st.integers(2, 20), st.integers(2, 20), st.integers(0, 1000), st.sampled_from(["zeros", "border"]))
    def test_sampling_a_ramp_returns_the_coordinates(self, height, width, seed, padding_mode):
        y = ((torch.arange(height) + 0.5) / height).view(-1, 1).expand(height, width)
        x = ((torch.arange(width) + 0.5) / width).expand(height, width)
        features = torch.stack([x, y]).unsqueeze(0)
        margin = torch.tensor([0.5 / width, 0.5 / height])
        points = torch.rand(1, 3, 5, 2, generator=torch.Generator().manual_seed(seed)) * (1 - 2 * margin) + margin
        torch.testing.assert_close(sample_features(features, points, padding_mode), points, atol=1e-5, rtol=0)

    def test_sampling_outside(self):
        features = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
        for far, border in ((1.5, [2, 4, 4]), (math.inf, [2, 4, 4]), (-0.5, [1, 2, 1]), (-1e30, [1, 2, 1])):
            points = torch.tensor([[[[far, 0.25], [0.75, far], [far, far]]]])
            assert sample_features(features, points, "border").flatten().tolist() == border
            assert not sample_features(features, points, "zeros").any()

    @properties
    @given(boxes(2), st.sampled_from([16, 64]), st.sampled_from(["reference", "paper"]))
    def test_position_encoding(self, rois, hidden_size, kind):
        """The reference implementation and the paper order sines and cosines differently."""
        count = hidden_size // (4 if kind == "reference" else 8)
        frequencies = [128 ** (k / (count - 1)) * math.pi for k in range(count)]
        expected = []
        for coordinate in rois.flatten().tolist():
            if kind == "reference":
                expected += [math.sin(coordinate * frequency) for frequency in frequencies[0::2]]
                expected += [math.cos(coordinate * frequency) for frequency in frequencies[1::2]]
            else:
                expected += [each(coordinate * f) for f in frequencies for each in (math.sin, math.cos)]
        # Angles reach 128 * 3 pi. For angles of this size, the rounding error of float32 is about 1e-4.
        encoded = encode_rois(rois, hidden_size, kind)
        torch.testing.assert_close(encoded, torch.tensor(expected).view(1, 2, hidden_size), atol=5e-4, rtol=0)

    def test_initial_rois(self):
        for count in (4, 9, 12, 48, 63, 195):
            root = int(count**0.5)
            expected = [[0.0, 0.0, 1.0, 1.0] for _ in range(count)]
            for i in range(root):
                for j in range(root):
                    x, y = 0.5 * i / (root - 1), 0.5 * j / (root - 1)
                    expected[i * root + j] = [x, y, x + 0.5, y + 0.5]
            torch.testing.assert_close(initial_rois(count), torch.tensor(expected), atol=1e-6, rtol=0)
        for count in (1, 2, 3):
            assert initial_rois(count).tolist() == [[0.0, 0.0, 1.0, 1.0]] * count

    def test_initial_sampling_offsets(self):
        """Offsets form a grid if the number of points is a square number. Otherwise, offsets are random."""
        for count in (4, 9, 36):
            root = int(count**0.5)
            expected = [[(j + 0.5) / root - 0.5, (i + 0.5) / root - 0.5] for i in range(root) for j in range(root)]
            torch.testing.assert_close(initial_sampling_offsets(count), torch.tensor(expected))
        for count in (2, 7, 40):
            offsets = initial_sampling_offsets(count)
            assert offsets.abs().max() <= 0.5 and len(offsets.unique(dim=0)) == count


@pytest.mark.parametrize("count", [20, 9, 5])
@torch.no_grad()
def test_resizing_keeps_the_first_tokens(case, count, tmp_path):
    folder, reference = case
    model = load(folder)
    latents = model.base_model.latents
    kept = min(count, 9)
    rois = latents.initial_rois.clone()
    embedding = latents.token_embedding.clone()
    model.resize_tokens(count)
    assert torch.equal(latents.initial_rois[:kept], rois[:kept])
    # New tokens have the initial RoIs of a new model, except that equal RoIs are moved apart.
    starts, new = initial_rois(count - kept), latents.initial_rois[kept:]
    alone = (starts[:, None] == starts).all(dim=-1).sum(dim=1) == 1
    assert torch.equal(new[alone], starts[alone]) and len(new.unique(dim=0)) == count - kept
    assert torch.equal(latents.token_embedding[:kept], embedding[:kept])
    outputs = model(reference["input"], output_rois=True)
    assert outputs.rois[-1].shape == (2, count, 4) and outputs.logits.isfinite().all()
    if count == 9:
        torch.testing.assert_close(outputs.logits, reference["logits"], atol=1e-5, rtol=0)
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)(reference["input"]).logits, outputs.logits)


@pytest.fixture(
    scope="module",
    params=[("v1-tiny", 36), ("augreg-base-49-224", 16), ("augreg-base-49-224", 7)],
    ids=["v1", "bootstrapped", "7 points"],
)
def new_model(request) -> SparseFormerForImageClassification:
    torch.manual_seed(0)
    variant, points = request.param
    sizes = {"focusing_hidden_size": 128, "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 2}
    sizes |= {"stem_channels": 64, "num_mixed_points": None, "num_labels": 100}
    config = SparseFormerConfig.from_variant(variant, num_sampling_points=points, **sizes)
    return SparseFormerForImageClassification(config)


class TestInitialization:
    """New models have the initial weights of the reference implementation. Bootstrapping depends on these weights."""

    def test_linear_layers_and_norms(self, new_model):
        special = ("sampling.offset_proj", "mixing.generator", "roi_deltas.out_proj")
        small = ("sampling.offset_layernorm", "sampling.mixing.layernorm", "roi_deltas.layernorm")
        for name, module in new_model.named_modules():
            if isinstance(module, nn.Linear) and not name.endswith(special):
                assert module.weight.std().item() == pytest.approx(0.02, rel=0.1), name
                assert abs(module.weight.mean().item()) < 1e-3, name
                assert module.bias is None or not module.bias.any(), name
            if isinstance(module, nn.LayerNorm):
                (width,) = module.normalized_shape
                weight = width**-0.5 if name.endswith(small) else 1.0
                torch.testing.assert_close(module.weight.data, torch.full((width,), weight))
                assert not module.bias.any()

    def test_rois_and_points_start_the_same_for_every_image(self, new_model):
        for name, module in new_model.named_modules():
            if name.endswith("roi_deltas"):
                assert not module.out_proj.weight.any()
            if name.endswith("sampling"):
                assert not module.offset_proj.weight.any()
                offsets = module.offset_bias.view(-1, 2)
                assert offsets.abs().max() <= 0.5
                if len(offsets) != 7:
                    torch.testing.assert_close(offsets.data, initial_sampling_offsets(len(offsets)))
        count = new_model.config.num_latent_tokens
        with torch.no_grad():
            rois = new_model(torch.randn(2, 3, 32, 32), output_rois=True).rois
        for after in rois:
            torch.testing.assert_close(after, initial_rois(count).expand(2, -1, -1), atol=1e-6, rtol=0)

    def test_mixing(self, new_model):
        mixings = [module for name, module in new_model.named_modules() if name.endswith("sampling.mixing")]
        assert len(mixings) == 2
        for mixing in mixings:
            assert not mixing.generator.weight.any()
            sizes = [rows * columns for rows, columns in mixing.shapes]
            for (rows, columns), values in zip(mixing.shapes, mixing.generator.bias.split(sizes), strict=True):
                bound = math.sqrt(6 / (rows + columns))
                assert values.abs().max() <= bound
                assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)
            if new_model.config.is_v1:
                assert not mixing.channel_bias.any()
                assert not mixing.point_bias.any()

    def test_embeddings(self, new_model):
        latents, config = new_model.base_model.latents, new_model.config
        count = config.num_latent_tokens if config.is_v1 else 1
        assert latents.token_embedding.shape == (count, 128)
        assert latents.token_embedding.abs().max() <= 2
        assert latents.token_embedding.std().item() == pytest.approx(0.88, abs=0.15)
        torch.testing.assert_close(latents.initial_rois.data, initial_rois(config.num_latent_tokens))
        if config.num_class_tokens:
            assert latents.cls_token.std().item() == pytest.approx(1, abs=0.2)
        if not config.is_v1:
            assert new_model.base_model.focusing_layer.stage_embedding.std().item() == pytest.approx(1, abs=0.2)
