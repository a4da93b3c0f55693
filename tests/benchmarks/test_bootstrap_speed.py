"""Tests of benchmarks/bootstrap_speed.py."""

import argparse
import itertools

import bootstrap_speed
from tiny import save_vit


def test_parts_of_a_step_are_measured_on_few_images(tmp_path, write_parquet, monkeypatch):
    monkeypatch.setattr(bootstrap_speed, "COUNTS", [4, 16])
    # A clock that counts the steps in place of seconds.
    monkeypatch.setattr("time.perf_counter", itertools.count().__next__)
    teacher, images = save_vit(tmp_path / "teacher", num_labels=3), write_parquet(count=3, size=32)
    arguments = argparse.Namespace(teacher=str(teacher), dataset=images, steps=2, batch_size=2)
    parts = bootstrap_speed.step_parts(arguments, bf16=False)
    # Three images are repeated until the last step. The products are those of three numbers of tokens a step.
    assert parts["loop"] == dict.fromkeys(("images", "teacher", "forward", "backward", "optimizer"), 2)
    assert parts["products"] == {"teacher": 2, "forward": 4, "backward": 4}
