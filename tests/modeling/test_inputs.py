"""All families with numbers of 64 bits, and on another device."""

import pytest
import torch

from frugalvit.modeling.focusing import SparseFormerPositionEncoding
from kinds import KINDS


@pytest.mark.parametrize("name", list(KINDS))
def test_float64_stays_float64(name, monkeypatch):
    """The gradient in a direction is that of differences, as exactly as 64 bits allow."""
    kind = KINDS[name]
    torch.manual_seed(0)
    config = kind.config()
    if config.model_type == "sparseformer":
        # No gradient flows into what encodes positions, on purpose.
        monkeypatch.setattr(SparseFormerPositionEncoding, "forward", lambda self, rois: 0.0)
    model = kind.classifier(config).double().eval()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in parameters:
            parameter += 0.05 * torch.randn_like(parameter)
    pixel_values, labels = torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.tensor([0, 1])
    outputs = model(pixel_values, labels=labels)
    assert outputs.logits.dtype == outputs.loss.dtype == torch.float64
    gradients = torch.autograd.grad(outputs.loss, parameters, allow_unused=True)
    direction, losses, step = [torch.randn_like(parameter) for parameter in parameters], [], 1e-6
    slope = sum((one * other).sum() for one, other in zip(gradients, direction, strict=True) if one is not None)
    with torch.no_grad():
        for sign in (1, -2):
            torch._foreach_add_(parameters, direction, alpha=sign * step)
            losses.append(model(pixel_values, labels=labels).loss)
    # RoIs that are cut at the border pass their gradient on, on purpose.
    if name != "patches":
        torch.testing.assert_close(slope, (losses[0] - losses[1]) / (2 * step), rtol=1e-5, atol=1e-8)
    # A cast there and back leaves nothing behind.
    assert {parameter.dtype for parameter in model.float().parameters()} == {torch.float32}


@pytest.mark.parametrize("name", list(KINDS))
def test_no_tensor_of_the_cpu_meets_one_of_the_device(name):
    """`meta` stands for an accelerator: operations on both fail."""
    for model_class in KINDS[name].classes:
        model = model_class(KINDS[name].config(model_class)).eval().to("meta")
        assert next(iter(model(torch.empty(2, 3, 32, 32, device="meta")).values())) is not None
        with pytest.raises(RuntimeError, match="device"):
            model(torch.zeros(2, 3, 32, 32))
