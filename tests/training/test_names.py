"""Test that commands on model cards contain no local paths."""

import pytest

from frugalvit.training.cards import portable_command


@pytest.mark.parametrize(
    ("given", "portable"),
    [
        ("--dataset /data/a /data/b --output /data/runs/out", "--dataset path/to/images path/to/images --output out"),
        ("--dataset=/data/a", "--dataset=path/to/images"),
        ("--teacher open_clip:local-dir:/models/clip", "--teacher open_clip:local-dir:clip"),
        ("--teacher ~/models/vit --config ../c.yaml", "--teacher vit --config c.yaml"),
        ("--prompt 'USER: {image}\n{question} yes/no'", "--prompt 'USER: {image}\n{question} yes/no'"),
    ],
)
def test_commands_that_others_can_give(given, portable):
    assert portable_command(f"frugalvit train {given}", ["/data/a", "/data/b"]) == f"frugalvit train {portable}"
