"""Tests of `images_per_second`."""

import torch

from frugalvit import speed


def test_speed_is_the_median_after_the_warmup(monkeypatch):
    now, seconds = [0.0], iter([90.0, 90.0, 1.0, 2.0, 30.0])
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])

    def model(_):
        now[0] += next(seconds)

    assert speed.images_per_second({"": model}, torch.zeros(8, 1), rounds=3) == {"": 4.0}


def test_a_round_runs_all_batches_of_a_model(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])

    def model(batch):
        now[0] += len(batch)

    batches = {"one": torch.zeros(8, 1), "many": torch.zeros(8, 1).split(3)}
    assert speed.images_per_second({"one": model, "many": model}, batches, rounds=1) == {"one": 1.0, "many": 1.0}
