"""Small CLIPs of benchmarks/, on a few embedded images."""

import importlib
import json
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModel, AutoProcessor, CLIPModel, CLIPProcessor

from frugalvit.cli import main


with patch.object(sys, "path", [str(Path(__file__).resolve().parents[2] / "benchmarks"), *sys.path]):
    small_clip = importlib.import_module("small_clip")


TINY = "num_hidden_layers=2,num_attention_heads=2,hidden_size=32,intermediate_size=64"


def run(output_dir, *arguments):
    small_clip.main(
        [
            *("--output", str(output_dir), "--train-split", "train[:512]", "--eval-split", "test[:128]"),
            *("--vision", f"{TINY},image_size=32,patch_size=8", "--text", TINY, "--projection-dim", "16"),
            *("--batch-size", "64", "--learning-rate", "3e-3", "--warmup-epochs", "0", *arguments),
        ]
    )
    return json.loads((output_dir / "results.json").read_text(encoding="utf-8"))


def test_trains_a_clip_that_evaluates_alike_everywhere(tmp_path):
    results = run(tmp_path / "out", "--epochs", "12")
    assert results["epochs"][-1]["train_loss"] < results["epochs"][0]["train_loss"]
    assert results["best"]["accuracy"] > 0.15
    model = AutoModel.from_pretrained(tmp_path / "out")
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    assert isinstance(model, CLIPModel) and isinstance(processor, CLIPProcessor)
    ids = processor(text=["A photo of a frog."], return_tensors="pt")["input_ids"][0].tolist()
    words = processor.tokenizer.convert_ids_to_tokens(ids)
    assert words == ["<start>", "a", "photo", "of", "a", "frog", ".", "<end>"]
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.pipeline_tag == "zero-shot-image-classification"
    assert f"{results['best']['accuracy']:.2%}" in card.text

    (tmp_path / "sentences.txt").write_text("\n".join(small_clip.SENTENCES), encoding="utf-8")
    arguments = ["--templates", str(tmp_path / "sentences.txt"), "--output", str(tmp_path / "out.json")]
    assert main(["evaluate", "zero-shot", "--model", str(tmp_path / "out"), "--limit", "128", *arguments]) == 0
    evaluated = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert evaluated["accuracy"] == results["best"]["accuracy"]


def test_images_of_a_class_are_not_pushed_from_its_sentences(tmp_path, monkeypatch):
    compute_loss, pairs = small_clip.ContrastiveTrainer.compute_loss, []

    def watch(self, model, inputs, **options):
        loss = compute_loss(self, model, inputs, **options)
        if not pairs:
            # With one sentence a class, texts are as different as labels are.
            pairs.append((loss.item(), expected_loss(model, inputs)))
        return loss

    monkeypatch.setattr(small_clip.ContrastiveTrainer, "compute_loss", watch)
    run(tmp_path / "out", "--epochs", "1", "--sentences", "a {}")
    assert pairs[0][0] == pytest.approx(pairs[0][1], rel=1e-4)


@torch.no_grad()
def expected_loss(model, batch) -> float:
    """Every image's mean surprise at the sentences of its class, and every sentence's at the images."""
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    ids = small_clip.word_tokenizer([f"a {name}" for name in names])([f"a {name}" for name in names])["input_ids"]
    texts = torch.tensor(ids)[batch["labels"]]
    logits = model(input_ids=texts, pixel_values=batch["pixel_values"]).logits_per_image
    same = batch["labels"][:, None] == batch["labels"]
    surprises = [
        -scores.log_softmax(-1)[row, same[row]].mean() for scores in (logits, logits.T) for row in range(len(same))
    ]
    return torch.stack(surprises).mean().item()


def test_sentences_need_a_place_for_the_name(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path / "out", "--sentences", "a photo")
    assert "--sentences is 'a photo', expected sentences with one {} in each" in capsys.readouterr().err
