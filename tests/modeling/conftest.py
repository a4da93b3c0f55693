"""Fixtures: tiny models of every family, and photographs."""

import io
import sys
from importlib import resources

import pyarrow.parquet
import pytest
import torch
from PIL import Image

from kinds import KINDS


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Reset `torch.compile` before each test, because PyTorch limits how often a process compiles a function."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture(scope="session")
def make_model():
    """Return a function that makes a tiny model in evaluation mode. `model_class` is a class, `"base"` or
    `"classifier"`. Noise is added to every parameter, so that outputs differ between images."""

    def make(model_class, kind: str, seed: int = 0, **fields):
        if isinstance(model_class, str):
            model_class = getattr(KINDS[kind], model_class)
        torch.manual_seed(seed)
        model = model_class(KINDS[kind].config(model_class, **fields)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        return model

    return make


@pytest.fixture(params=list(KINDS))
def kind(request) -> str:
    """Return the name of each kind in turn. A test of selected kinds parametrizes `kind` itself."""
    return request.param


@pytest.fixture(params=["bootstrapped", "v1"])
def generation(request) -> str:
    """Return the name of each generation of SparseFormer in turn."""
    return request.param


@pytest.fixture(scope="session")
def pixel_values() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def photographs() -> tuple[list[Image.Image], list[int]]:
    """Return 32 of the package's CIFAR-10 test images, and their labels."""
    table = pyarrow.parquet.read_table(resources.files("frugalvit.training") / "cifar10" / "test.parquet")
    rows = table.slice(0, 32).to_pylist()
    return [Image.open(io.BytesIO(row["img"]["bytes"])).convert("RGB") for row in rows], [row["label"] for row in rows]
