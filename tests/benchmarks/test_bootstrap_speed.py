"""Tests of benchmarks/bootstrap_speed.py."""

import argparse

import bootstrap_speed
from tiny import save_vit


def test_few_images_are_repeated_until_the_last_step(tmp_path, write_parquet, monkeypatch):
    monkeypatch.setattr(bootstrap_speed, "COUNTS", [4, 16])
    stopped = []
    monkeypatch.setattr(bootstrap_speed.Clock, "stop", lambda clock, part: stopped.append(part))
    teacher, images = save_vit(tmp_path / "teacher", num_labels=3), write_parquet(count=3, size=32)
    arguments = argparse.Namespace(teacher=str(teacher), dataset=images, steps=2, batch_size=2)
    bootstrap_speed.step_parts(arguments, bf16=False, products=False)
    assert stopped.count("optimizer") == 2 * arguments.steps
