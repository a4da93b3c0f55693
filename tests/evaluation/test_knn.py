"""Tests of `frugalvit evaluate knn`."""

import io
import json
import math

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

from frugalvit import checkpoint_path
from frugalvit.cli import main
from frugalvit.evaluation.embeddings import image_embedder
from frugalvit.evaluation.knn import neighbor_scores
from frugalvit.training.choices import SUBSET
from frugalvit.training.data import load_images
from frugalvit.training.loading import load_model


VIT = str(checkpoint_path("cifar10-vit"))


def evaluate(*arguments, tmp_path) -> dict:
    file = tmp_path / "results.json"
    assert main(["evaluate", "knn", "--device", "cpu", "--output", str(file), *map(str, arguments)]) == 0
    return json.loads(file.read_text())


def decode(split: str) -> list[Image.Image]:
    return [Image.open(io.BytesIO(each["bytes"])).convert("RGB") for each in load_images(SUBSET, split)["image"]]


def pooled(split: str) -> torch.Tensor:
    """Compute the inputs of the ViT's classifier, one image at a time."""
    model = AutoModelForImageClassification.from_pretrained(VIT)
    processor = AutoImageProcessor.from_pretrained(VIT)
    with torch.no_grad():
        pixels = [processor(image, return_tensors="pt").pixel_values for image in decode(split)]
        return torch.cat([model.vit(one).last_hidden_state[:, 0] for one in pixels])


def labels_of(split: str) -> torch.Tensor:
    return torch.tensor(load_images(SUBSET, split)["label"])


def vote(features, labels, queries, neighbors) -> list[int]:
    """Return the class of each query. Each neighbor votes for its own class with the weight exp(cosine / 0.07)."""
    best = []
    for one in queries:
        cosines = [F.cosine_similarity(one, other, dim=0).item() for other in features]
        votes = dict.fromkeys(labels.tolist(), 0.0)
        for index in sorted(range(len(cosines)), key=lambda index: -cosines[index])[:neighbors]:
            votes[labels[index].item()] += math.exp(cosines[index] / 0.07)
        best.append(max(votes, key=votes.get))
    return best


def test_neighbors_equal_brute_force(tmp_path):
    arguments = ["--model", VIT, "--train-split", "train[:40]", "--limit", 30, "--batch-size", 32]
    results = evaluate(*arguments, "--neighbors", 7, tmp_path=tmp_path)
    best = vote(pooled("train[:40]"), labels_of("train[:40]"), pooled("test[:30]"), 7)
    right = (torch.tensor(best) == labels_of("test[:30]")).double().mean().item()
    assert results["accuracy"] == pytest.approx(right) and 0.3 < right <= results["top5_accuracy"]
    assert (results["train_images"], results["images"], results["classes"]) == (40, 30, 10)
    assert (results["neighbors"], results["split"], results["embedding_size"]) == (7, "test", 192)


def test_neighbors_weigh_by_similarity():
    """One neighbor that is near the query has more weight than two neighbors that are farther from it."""
    known, labels = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, 0.8]]), torch.tensor([0, 1, 1])
    queries = torch.tensor([[2.0, 0.1], [1.2, 1.6]])
    scores = neighbor_scores(known, labels, queries, 3)
    assert scores.argmax(1).tolist() == [0, 1] and torch.allclose(scores.sum(1), torch.ones(2))
    expected = (F.cosine_similarity(queries[:1], known) / 0.07).exp()
    assert scores[0, 0].item() == pytest.approx((expected[0] / expected.sum()).item(), rel=1e-5)


@pytest.mark.parametrize("name", ["cifar10-sparseformer", "cifar10-agent-cnn", "cifar10-vit-bootstrapped"])
def test_embeddings_are_the_inputs_of_classifiers(name):
    model, _ = load_model(checkpoint_path(name), "image-feature-extraction", "cpu")
    pixel_values = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    classifier = model.vit.classifier if name.endswith("bootstrapped") else model.classifier
    with torch.no_grad():
        assert torch.allclose(classifier(image_embedder(model)(pixel_values)), model(pixel_values).logits, atol=1e-5)


def test_more_neighbors_than_images_are_refused(capsys):
    assert main(["evaluate", "knn", "--model", VIT, "--train-split", "train[:5]"]) == 1
    assert "neighbors is 20, expected at most the 5 labeled images" in capsys.readouterr().err
