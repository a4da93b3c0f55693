"""`frugalvit benchmark`: real models, measured side by side."""

import json
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from frugalvit import SparseFormerConfig, SparseFormerModel, count_macs
from frugalvit.benchmark import build_model, measure_all
from frugalvit.cli import main
from frugalvit.common.speed import MatrixProduct, OwnProducts, measure


@pytest.fixture
def small_products(monkeypatch):
    """Make the matrix product small that is timed beside models to tell what the machine can do; it takes long."""
    monkeypatch.setattr("frugalvit.common.speed.MatrixProduct", lambda size, *rest: MatrixProduct(64, *rest))


def test_rows(small_products, capsys, tmp_path):
    """Every model at every batch size, the first one as the measure, and a file of the same rows."""
    output = tmp_path / "speed.json"
    names = ["cifar10-vit", "cifar10-sparseformer"]
    arguments = ["--batch-size", "1", "4", "--rounds", "3", "--device", "cpu", "--json", "--output", str(output)]
    assert main(["benchmark", *names, *arguments]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["row"], row["batch_size"]) for row in rows] == [(name, size) for size in (1, 4) for name in names]
    assert all(row["images_per_second"] > 0 for row in rows)
    assert rows[0]["times_first"] == rows[2]["times_first"] == 1
    assert rows[1]["times_first"] == rows[1]["images_per_second"] / rows[0]["images_per_second"]
    written = json.loads(output.read_text())
    assert written["rows"] == rows
    assert written["settings"]["rounds"] == 3


def test_compiled_and_cast(small_products, capsys):
    """A compiled model has a row of its own; so has a dtype."""
    name = "cifar10-convmixer"
    arguments = ["--compile", "--batch-size", "2", "--rounds", "1", "--device", "cpu", "--json"]
    assert main(["benchmark", name, *arguments]) == 0
    assert [row["row"] for row in json.loads(capsys.readouterr().out)] == [name, f"{name}, compiled"]
    # Double precision stands for bfloat16, which some CPUs multiply very slowly.
    rows = measure_all({name: build_model(name)}, (3, 32, 32), [2], [torch.float64, torch.float32], "cpu", rounds=1)
    assert [row["dtype"] for row in rows] == ["float64", "float32"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["cifar10-vit", "vit-base"], "different sizes"),
        (["timm:nonsense"], "no model of timm"),
        (["augreg-bose-49-224"], "augreg-base-49-224"),
        (["--rounds", "0"], "expected at least 1"),
        (["--device", "gpu"], "gpu"),
        (["--output", "none/speed.json"], "the folder 'none' does not exist"),
    ],
)
def test_bad_input(arguments, message, capsys):
    """One line that says what was expected."""
    try:
        assert main(["benchmark", *arguments]) == 1
    except SystemExit as stop:
        assert stop.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_own_products_are_those_that_are_counted(attention):
    """For one image, they have as many multiply-accumulates."""
    config = SparseFormerConfig(image_size=32, num_latent_tokens=5, hidden_size=64, num_hidden_layers=2)
    model = SparseFormerModel(config).eval()
    model.set_attn_implementation(attention)
    products = OwnProducts(model, torch.zeros(1, 3, 32, 32)).products
    macs = sum(left.numel() * right.shape[1] for left, right in products)
    assert macs == count_macs(model, 32).macs_with_attention


def test_small_batches_pass_more_often(small_products):
    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.passes = nn.Linear(12, 2), Counter()

        def forward(self, pixel_values):
            self.passes[len(pixel_values), pixel_values.device.type] += 1
            return self.linear(pixel_values.flatten(1))

    model = Counted()
    measure_all({"counted": model}, (3, 2, 2), [1, 4, 64], [torch.float32], "cpu", rounds=2)
    # Besides, two that do not count and one that its products are read from.
    passes = {size: model.passes[size, "cpu"] - 3 for size in (1, 4, 64)}
    assert passes == {1: 20, 4: 20, 64: 2}


@pytest.fixture
def clock_of_work(monkeypatch):
    """Time passes while matrices are multiplied, two ticks for a multiply-accumulate, and only then."""
    with FlopCounterMode(display=False) as counter:
        monkeypatch.setattr("frugalvit.common.speed.time.perf_counter", counter.get_total_flops)
        yield


def test_shares_of_what_the_machine_can_do(clock_of_work):
    """A model that spends its time on products reaches all of the rate; one that does each twice, half."""

    class Products(nn.Module):
        def __init__(self, times: int):
            super().__init__()
            self.linear, self.times = nn.Linear(8, 16), times

        def forward(self, pixel_values):
            for _ in range(self.times):
                logits = self.linear(pixel_values.flatten(1))
            return logits

    models = {"once": Products(1), "twice": Products(2)}
    rows = measure(models, {"once": 8 * 16, "twice": 8 * 16}, torch.zeros(5, 2, 2, 2), rounds=3)
    assert [row["images_per_second"] for row in rows] == [1 / (2 * 8 * 16), 1 / (2 * 2 * 8 * 16)]
    assert [row["times_first"] for row in rows] == [row["of_matrix_rate"] for row in rows] == [1, 0.5]
    assert [row["of_own_products"] for row in rows] == [1, 1]
