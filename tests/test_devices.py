"""Commands on an accelerator, which none of the machines that run the tests needs to have: no tensor of the CPU meets
one of the device."""

import shlex

import pytest
import torch
from PIL import Image
from torch._subclasses import fake_tensor

from fake_cuda import fake_cuda
from frugalvit import checkpoint_path, cli


if not hasattr(fake_tensor, "FakeTensorDeviceMismatchError"):
    pytest.skip("what stands in for a device needs a newer PyTorch than 2.11", allow_module_level=True)


def test_what_a_device_refuses():
    """Tensors of the CPU, also as gradients; and that reading is seen."""

    class Leaves(torch.autograd.Function):
        forward = staticmethod(lambda ctx, tensor: tensor * 2)
        backward = staticmethod(lambda ctx, gradient: gradient.cpu())

    with fake_cuda() as device:
        own, other = torch.ones(2, device="cuda", requires_grad=True), torch.ones(2)
        with pytest.raises(fake_tensor.FakeTensorDeviceMismatchError):
            own + other
        (own * other.to("cuda") * torch.tensor(3.0)).sum().backward()
        assert own.grad.device == own.device and not device.waits
        with pytest.raises(AssertionError, match="cpu"):
            Leaves.apply(own).sum().backward()
        assert device.waits.total() == 1 and own.sum().item() == 0 and device.waits.total() == 2


@pytest.mark.parametrize(
    "command",
    [
        "predict {image} --model {cifar10-sparseformer} --rois {out}/rois.png",
        "info {cifar10-sparseformer}",
        "evaluate classification --model {cifar10-sparseformer} --limit 4",
        "evaluate zero-shot --model {cifar10-sparseformer-clip} --limit 4",
    ],
    ids=lambda command: " ".join(command.split()[:2]),
)
def test_command(command, tmp_path):
    folders = {folder.name: folder for folder in checkpoint_path("cifar10-vit").parent.iterdir()}
    Image.new("RGB", (32, 32), (90, 60, 30)).save(tmp_path / "image.png")
    folders |= {"image": tmp_path / "image.png", "out": tmp_path}
    with fake_cuda():
        assert not cli.main(shlex.split(command.format(**folders)))
