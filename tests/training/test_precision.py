"""The arithmetic that runs choose, keep and hold teachers in."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from frugalvit.common import precision


MEASURE = precision.bfloat16_is_fast.__wrapped__


@pytest.mark.parametrize("fast", [False, True])
def test_a_run_takes_what_the_machine_is_fast_at(fast, tiny_run, monkeypatch, capsys):
    monkeypatch.setattr(precision, "bfloat16_is_fast", lambda: fast)
    results = tiny_run(epochs=1, steps_per_epoch=1)
    assert results["arguments"]["mixed_precision"] == ("bf16" if fast else "no")
    assert capsys.readouterr().out.startswith(
        f"frugalvit train on CPU, {'bf16 and float32' if fast else 'float32'}, 1 process of "
    )


def test_where_bfloat16_is_emulated_no_large_product_is_tried(monkeypatch):
    measured = []

    def speed(size):
        measured.append(size)
        return 0.01

    monkeypatch.setattr(precision, "_speed_of_bfloat16", speed)
    assert not MEASURE() and max(measured) < 256
    for ratio, fast in ((2.3, False), (8.0, True)):
        monkeypatch.setattr(precision, "_speed_of_bfloat16", lambda size, ratio=ratio: ratio)
        assert MEASURE() is fast


@pytest.mark.parametrize(
    ("mixed_precision", "fast", "dtype"),
    [("no", True, torch.float32), ("bf16", False, torch.float32), ("bf16", True, torch.bfloat16)],
)
def test_teachers_are_held_in_what_the_machine_is_fast_at(mixed_precision, fast, dtype, monkeypatch):
    monkeypatch.setattr(precision, "bfloat16_is_fast", lambda: fast)
    teacher = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).train()
    precision.hold_teacher(Accelerator(mixed_precision=mixed_precision), teacher, teacher[1])
    assert [layer.weight.dtype for layer in teacher] == [dtype, torch.float32]
    assert not teacher.training and not any(parameter.requires_grad for parameter in teacher.parameters())
