"""Tests of benchmarks/shared.py."""

import argparse

import pytest

import shared
from frugalvit.training import bootstrap, train


@pytest.mark.parametrize(
    ("training", "model"),
    [(bootstrap, "--teacher"), (train, "--model")],
)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_trainings_have_the_precision_of_the_command(training, model, precision, monkeypatch):
    monkeypatch.setattr("frugalvit.training.bootstrap.bfloat16_is_fast", lambda: precision == "no")
    options = shared.precision_arguments(argparse.Namespace(mixed_precision=precision))
    *_, args = training.make_parser().parse([model, "unused", "--output_dir", "unused", *options])
    assert args.bf16 is (precision == "bf16")


def test_results_of_other_options_are_not_reused(tmp_path):
    rows = [{"accuracy": 0.5}]
    assert shared.measured_once(tmp_path, lambda folder: rows, "test=a") == rows
    assert shared.measured_once(tmp_path, None, "test=a") == rows
    with pytest.raises(SystemExit, match="measured.json is the result of another command; remove it .*: test=a"):
        shared.measured_once(tmp_path, None, "test=b")
