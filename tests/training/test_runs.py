"""Starts of runs."""

import pytest

from frugalvit.training.components.runs import trackers


def test_trackers_are_installed_or_none():
    assert trackers([]) == trackers(["none"]) == []
    assert trackers(["tensorboard"]) == ["tensorboard"]
    with pytest.raises(ValueError, match="--report-to nothing .* these are: .*tensorb"):
        trackers(["tensorboard", "nothing"])


def test_a_run_does_not_begin_without_its_tracker(tiny_run, tmp_path):
    with pytest.raises(ValueError, match="--report-to nothing"):
        tiny_run("--report-to", "nothing")
    assert not (tmp_path / "out").exists()
