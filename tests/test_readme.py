"""The README's Python runs as it stands there, and its commands exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from frugalvit import SparseFormerVisionModelWithProjection
from frugalvit.cli import COMMANDS
from frugalvit.registry import public_names
from frugalvit.resources import shipped_checkpoints


ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^\*\*(\w+).*?^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_every_use_has_a_few_lines_of_python():
    assert [title for title, _ in BLOCKS] == [
        "Load",
        "Bootstrap",
        "Choose",
        "Fine",
        "Export",
        "Swap",
        "Segment",
        "Start",
        "Broadcast",
        "Teach",
    ]
    for _, code in BLOCKS:
        statements = [line for line in code.splitlines() if line and not line.startswith(("from", "import"))]
        assert len(statements) <= 5


# What PyTorch's exporter and Trainer warn about is theirs; the reader of the README sees it too.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("title", "code"), BLOCKS, ids=[title for title, _ in BLOCKS])
def test_python_runs_as_it_stands(title, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.zeros((40, 50, 3), dtype=np.uint8)).save("image.png")
    given = {"dataset": [{"pixel_values": torch.randn(3, 32, 32), "labels": label} for label in (0, 1)]}
    if title == "Swap":
        given |= own_clip_and_llava()
    exec(compile(code, f"README.md: {title}", "exec"), given)


def own_clip_and_llava() -> dict:
    """What someone has who swaps vision encoders, in small; the SparseFormer lies where the README puts it."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    clip = CLIPModel(CLIPConfig(text_config={**sizes, "vocab_size": 20}, vision_config=vision, projection_dim=16))
    student = SparseFormerVisionModelWithProjection.from_teacher(clip, stem_channels=8, num_sampling_points=4)
    student.save_pretrained("sparseformer-clip")
    words = Tokenizer(WordLevel({"<image>": 0, "?": 1}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, extra_special_tokens={"image_token": "<image>"})
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision), text_config=LlamaConfig(**sizes, vocab_size=2), image_token_index=0
    )
    return {
        "clip": clip,
        "llava": LlavaForConditionalGeneration(config),
        "processor": LlavaProcessor(CLIPImageProcessor(), tokenizer, patch_size=8, num_additional_image_tokens=1),
    }


def test_names_and_commands_in_the_readme_exist():
    for name in re.findall(
        r"\b(?:SparseFormer|ViTImpulseInit|ViTContextBroadcast|ConvMixer|AgentCNN|BootstrappedViT)[A-Z]\w+", README
    ):
        assert name in public_names()
    for command in re.findall(r"(?:^|`|&& )frugalvit ([a-z]+)", README, re.MULTILINE):
        assert command in COMMANDS


def test_every_shipped_model_loads_by_the_command(tmp_path):
    """The table has all of them; its class and name in the place of the command's."""
    rows = dict(
        re.findall(r"^\| `((?:cifar10|caltech101)-[\w-]+)` \| .*? \| `(AutoModel\w+)` \|", README, re.MULTILINE)
    )
    assert sorted(rows) == sorted(shipped_checkpoints())
    (code,) = re.findall(r'^python -c "(.*)"$', README, re.MULTILINE)
    assert code.count("AutoModelForImageClassification") == code.count("cifar10-convmixer") == 1
    program = ["import sys"]
    for name, class_name in rows.items():
        program.append(code.replace("AutoModelForImageClassification", class_name).replace("cifar10-convmixer", name))
    program.append("assert 'frugalvit' not in sys.modules")
    printed = subprocess.run(
        [sys.executable, "-c", "\n".join(program)],
        cwd=ROOT,
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for class_name in ("AgentCNN", "ConvMixer", "SparseFormerCLIPModel", "SparseFormerLlava", "BootstrappedViT"):
        assert f"\n{class_name}" in f"\n{printed}"
