"""Speeds of models, side by side."""

import torch

from frugalvit import speed


def test_first_rounds_do_not_count(monkeypatch):
    now, seconds = [0.0], iter([90.0, 90.0, 1.0, 2.0, 30.0])
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])

    def model(_):
        now[0] += next(seconds)

    assert speed.images_per_second({"": model}, torch.zeros(8, 1), rounds=3) == {"": 4.0}
