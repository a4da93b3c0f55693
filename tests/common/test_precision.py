"""The arithmetic that teachers are held in."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from frugalvit.common import precision


MEASURE = precision.bfloat16_is_fast.__wrapped__


def test_where_bfloat16_is_emulated_no_large_product_is_tried(monkeypatch):
    measured = []
    monkeypatch.setattr(precision, "_speed_of_bfloat16", lambda size: measured.append(size) or 0.01)
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
