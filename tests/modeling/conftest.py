"""Tiny SparseFormers of both generations, and real images."""

import io
from importlib import resources

import pyarrow.parquet
import pytest
import torch
from PIL import Image

from frugalvit import SparseFormerConfig


# A variant of each generation, made small; what tells the generations apart is left as it is.
SMALL = {
    "image_size": 32,
    "resize_size": None,
    "num_latent_tokens": 5,
    "num_sampling_points": 4,
    "num_mixed_points": 8,
    "stem_channels": 8,
    "focusing_hidden_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "drop_path_rate": 0.0,
    "num_labels": 3,
    "projection_dim": 16,
}
VARIANTS = {
    # Heads of 16 channels in the focusing layer, the fewest that flex attention takes.
    "bootstrapped": ("augreg-base-49-224", {"mixing_hidden_size": 16, "focusing_num_attention_heads": 2}),
    "v1": ("v1-tiny", {"focusing_num_attention_heads": 16, "num_attention_heads": 16}),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny models run fastest so, and tests that run side by side do not disturb each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_config():
    """Function that makes a tiny configuration of a generation."""

    def make(generation: str, **fields) -> SparseFormerConfig:
        variant, own = VARIANTS[generation]
        return SparseFormerConfig.from_variant(variant, **{**SMALL, **own, **fields})

    return make


@pytest.fixture(scope="session")
def make_model(make_config):
    """Function that makes a tiny model in evaluation mode, with every weight moved off its initial value, so that
    tokens and RoIs differ between images."""

    def make(model_class, generation: str, seed: int = 0, **fields):
        torch.manual_seed(seed)
        model = model_class(make_config(generation, **fields)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        return model

    return make


@pytest.fixture(params=list(VARIANTS))
def generation(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def pixel_values() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def photographs() -> tuple[list[Image.Image], list[int]]:
    """Images and labels of CIFAR-10's embedded test images."""
    table = pyarrow.parquet.read_table(resources.files("frugalvit.training") / "cifar10" / "test.parquet")
    rows = table.slice(0, 32).to_pylist()
    return [Image.open(io.BytesIO(row["img"]["bytes"])).convert("RGB") for row in rows], [row["label"] for row in rows]
