"""benchmarks/small_clip.py: a CLIP that learns from labels, on a few embedded images."""

import importlib
import json
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from frugalvit_cli import main
from transformers import AutoModel, AutoProcessor, CLIPModel, CLIPProcessor

from frugalvit.common.data import load_images


with patch.object(sys, "path", [str(Path(__file__).resolve().parents[2] / "benchmarks"), *sys.path]):
    small_clip = importlib.import_module("small_clip")


TINY = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}


@pytest.mark.nightly
def test_a_clip_learns_from_labels(tmp_path):
    images = load_images("cifar10-subset", "train[:512]")
    vision = TINY | {"image_size": 32, "patch_size": 8}
    small_clip.train_clip(images, tmp_path / "out", epochs=16, seed=0, vision=vision, text=TINY)
    model = AutoModel.from_pretrained(tmp_path / "out")
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    assert isinstance(model, CLIPModel) and isinstance(processor, CLIPProcessor)
    ids = processor(text=["A photo of a frog."], return_tensors="pt")["input_ids"][0].tolist()
    words = processor.tokenizer.convert_ids_to_tokens(ids)
    assert words == ["<start>", "a", "photo", "of", "a", "frog", ".", "<end>"]
    (tmp_path / "sentences.txt").write_text("\n".join(small_clip.SENTENCES), encoding="utf-8")
    arguments = ["--templates", str(tmp_path / "sentences.txt"), "--output", str(tmp_path / "out.json")]
    assert main(["evaluate", "zero-shot", "--model", str(tmp_path / "out"), "--limit", "500", *arguments]) == 0
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["accuracy"] > 0.15


def test_images_of_a_class_are_not_pushed_from_its_sentences():
    """The loss is each image's mean surprise at the sentences of its class, and each sentence's at the images."""
    logits, labels = torch.randn(6, 6), torch.tensor([0, 1, 0, 2, 1, 0])

    def model(input_ids, pixel_values):
        return type("Outputs", (), {"logits_per_image": logits})

    trainer = small_clip.ContrastiveTrainer.__new__(small_clip.ContrastiveTrainer)
    trainer.tokens = torch.zeros(3, 2, 4)
    loss = trainer.compute_loss(model, {"labels": labels, "pixel_values": None})
    same = labels[:, None] == labels
    surprises = [-scores.log_softmax(-1)[row, same[row]].mean() for scores in (logits, logits.T) for row in range(6)]
    assert loss.item() == pytest.approx(torch.stack(surprises).mean().item(), rel=1e-5)
