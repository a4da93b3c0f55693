"""The README's Python runs as it stands there, and its commands exist."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from frugalvit.cli import COMMANDS
from frugalvit.registry import public_names


README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^\*\*(\w+).*?^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_every_use_has_a_few_lines_of_python():
    assert [title for title, _ in BLOCKS] == ["Load", "Bootstrap", "Fine", "Export", "Start"]
    for _, code in BLOCKS:
        statements = [line for line in code.splitlines() if line and not line.startswith(("from", "import"))]
        assert len(statements) <= 5


# What PyTorch's exporter and Trainer warn about is theirs; the reader of the README sees it too.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("title", "code"), BLOCKS, ids=[title for title, _ in BLOCKS])
def test_python_runs_as_it_stands(title, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.zeros((40, 50, 3), dtype=np.uint8)).save("image.png")
    dataset = [{"pixel_values": torch.randn(3, 32, 32), "labels": label} for label in (0, 1)]
    exec(compile(code, f"README.md: {title}", "exec"), {"dataset": dataset})


def test_names_and_commands_in_the_readme_exist():
    for name in re.findall(r"\b(?:SparseFormer|ViTImpulseInit|ConvMixer)[A-Z]\w+", README):
        assert name in public_names()
    for command in re.findall(r"(?:^|`|&& )frugalvit ([a-z]+)", README, re.MULTILINE):
        assert command in COMMANDS
