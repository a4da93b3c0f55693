"""Tests of all families' inputs: float64, other devices, empty batches, and numbers of tokens."""

import pytest
import torch

from frugalvit.configuration.configuration_base import SparseFormerBaseConfig
from frugalvit.modeling import layers
from frugalvit.modeling.focusing import SparseFormerPositionEncoding
from kinds import KINDS


SPARSEFORMERS = ["bootstrapped", "patches", "content", "v1"]


@pytest.mark.parametrize("name", list(KINDS))
def test_float64_stays_float64(name, monkeypatch):
    """The directional derivative of the loss equals a finite difference, up to a tolerance that needs float64."""
    kind = KINDS[name]
    torch.manual_seed(0)
    config = kind.config()
    if config.model_type == "sparseformer":
        # The position encoding detaches RoIs, so the derivative would differ from the finite difference. The test
        # replaces this encoding by 0.
        monkeypatch.setattr(SparseFormerPositionEncoding, "forward", lambda self, rois: 0.0)
    model = kind.classifier(config).double().eval()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in parameters:
            parameter += 0.05 * torch.randn_like(parameter)
    pixel_values = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    labels = torch.tensor([0, 1])
    outputs = model(pixel_values, labels=labels)
    assert outputs.logits.dtype == outputs.loss.dtype == torch.float64
    gradients = torch.autograd.grad(outputs.loss, parameters, allow_unused=True)
    direction = [torch.randn_like(parameter) for parameter in parameters]
    slope = sum((one * other).sum() for one, other in zip(gradients, direction, strict=True) if one is not None)
    losses = []
    step = 1e-6
    with torch.no_grad():
        for sign in (1, -2):
            torch._foreach_add_(parameters, direction, alpha=sign * step)
            losses.append(model(pixel_values, labels=labels).loss)
    torch.testing.assert_close(slope, (losses[0] - losses[1]) / (2 * step), rtol=1e-5, atol=1e-8)
    assert {parameter.dtype for parameter in model.float().parameters()} == {torch.float32}


@pytest.mark.parametrize("name", list(KINDS))
def test_all_tensors_are_on_the_model_s_device(name):
    """`meta` replaces an accelerator: an operation on tensors of `meta` and of the CPU is an error."""
    for model_class in KINDS[name].classes:
        model = model_class(KINDS[name].config(model_class)).eval().to("meta")
        assert next(iter(model(torch.empty(2, 3, 32, 32, device="meta")).values())) is not None


@pytest.mark.parametrize("name", list(KINDS))
@torch.no_grad()
def test_a_batch_without_images_has_an_empty_output(name):
    choices = [{}]
    if name in SPARSEFORMERS:
        choices.append({"num_tokens": 4})
    if name in ("patches", "content"):
        choices.append({"num_tokens": torch.empty(0, dtype=torch.long)})
    for model_class in KINDS[name].classes:
        model = model_class(KINDS[name].config(model_class)).eval()
        for arguments in choices:
            expected = next(iter(model(torch.zeros(1, 3, 32, 32)).values()))
            found = next(iter(model(torch.zeros(0, 3, 32, 32), **arguments).values()))
            if isinstance(expected, tuple):
                expected = expected[-1]
                found = found[-1]
            assert found.shape[0] == 0 and found.ndim == expected.ndim and found.dtype == expected.dtype


@pytest.mark.parametrize(
    "num_tokens",
    [
        torch.tensor([4]),
        torch.tensor([4, 4, 4]),
        torch.tensor([4.0, 4.0]),
        torch.tensor([4.0 + 0j, 4.0]),
        torch.tensor([True, True]),
        torch.tensor(4),
        torch.tensor([[4], [4]]),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.dtype}",
)
def test_a_tensor_of_counts_has_one_integer_for_each_image(num_tokens, make_model, pixel_values):
    model = make_model("classifier", "patches", elastic_token_counts=[4, 6])
    with pytest.raises(ValueError, match=r"`num_tokens` is a tensor of shape .* expected one integer .* shape \(2,\)"):
        model(pixel_values, num_tokens=num_tokens)
    with pytest.raises(ValueError, match=r"`num_tokens` is 7, expected 1 to 6"):
        model(pixel_values, num_tokens=torch.tensor([4, 7]))
    # The papers' SparseFormer accepts `num_tokens` only as one integer for all images.
    with pytest.raises(ValueError, match=r"(?s)`num_tokens` is tensor.* expected 1 to 5"):
        make_model("classifier", "bootstrapped")(pixel_values, num_tokens=num_tokens)


# Transformers creates block masks with an option that is deprecated in PyTorch.
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.parametrize("pooling", ["mean", "attention"])
@torch.no_grad()
def test_counts_of_each_image_work_with_flex_attention(pooling, make_model, pixel_values):
    model = make_model("classifier", "patches", elastic_token_counts=[4, 6], pooling=pooling)
    num_tokens = torch.tensor([4, 6])
    expected = model(pixel_values, num_tokens=num_tokens).logits
    model.set_attn_implementation("flex_attention")
    torch.testing.assert_close(model(pixel_values, num_tokens=num_tokens).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["patches", "content"])
def test_a_count_without_a_grid_is_an_error_without_a_warning(kind, make_model, pixel_values, monkeypatch):
    model = make_model("classifier", kind, num_latent_tokens=16)
    warned = []
    monkeypatch.setattr(layers.logger, "warning_once", warned.append)
    message = r"`num_tokens` is 11, which makes no grid .* choose 8, 9, 12"
    for call in (model.set_num_tokens, lambda count: model(pixel_values, num_tokens=count)):
        with pytest.raises(ValueError, match=message):
            call(11)
    assert not warned
    model(pixel_values, num_tokens=12)
    assert len(warned) == 1 and warned[0].startswith("`num_tokens` is 12, but this model was trained with 16")


@pytest.mark.parametrize("name", SPARSEFORMERS)
@torch.no_grad()
def test_a_call_reads_the_number_of_tokens_once(name, make_model, pixel_values, monkeypatch):
    """`set_num_tokens` in another thread does not change a running call."""
    model = make_model("classifier", name, num_latent_tokens=9, elastic_token_counts=[4, 9])
    expected = model(pixel_values).logits
    default = SparseFormerBaseConfig.default_num_tokens
    reads = []

    def read(config):
        count = default.fget(config)
        reads.append(count)
        config.num_tokens = 4
        return count

    monkeypatch.setattr(SparseFormerBaseConfig, "default_num_tokens", property(read))
    assert torch.equal(model(pixel_values).logits, expected) and len(reads) == 1
