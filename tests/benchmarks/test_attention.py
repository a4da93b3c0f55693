"""benchmarks/attention.py: pictures show what was measured, and a run's start is drawn again."""

import pytest
import torch
from transformers import AutoModelForImageClassification

import attention
from frugalvit.training import joint, train


SIZES = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.mark.parametrize("command", ["train", "joint"])
def test_a_start_is_drawn_again(command, tmp_path):
    """A run that learned nothing has saved its start."""
    sizes = "patch_size=8,hidden_size=36,num_hidden_layers=2,intermediate_size=48"
    run = ["--train_split", "train[:64]", "--eval_split", "test[:8]", "--per_device_train_batch_size", "8"]
    run += ["--max_steps", "1", "--learning_rate", "1e-12", "--seed", "3", "--output_dir", str(tmp_path / "run")]
    if command == "joint":
        joint.main([*run, "--vit", f"image_size=32,{sizes}", "--agent", sizes])
    else:
        overrides = f"image_size=32,{sizes},num_attention_heads=4"
        train.main([*run, "--config_overrides", overrides, "--initialization", "mimetic"])
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "run")
    start = attention.own_start(tmp_path / "run", model).state_dict()
    assert start.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        # Statistics of batches are no weights.
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(start[name], tensor, rtol=0, atol=1e-6)
