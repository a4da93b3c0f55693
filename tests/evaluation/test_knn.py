"""`frugalvit evaluate knn`: the numbers of a brute-force loop, whatever way the images are given."""

import io
import json
import math

import pytest
import torch
import torch.nn.functional as F
from frugalvit_cli import main
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, Siglip2ImageProcessor
from vision_transformers import KINDS

from frugalvit import checkpoint_path, extract_features
from frugalvit.common.choices import SUBSET
from frugalvit.common.data import load_images
from frugalvit.common.loading import load_vision_model
from frugalvit.evaluation.embeddings import image_embedder, image_maker
from frugalvit.evaluation.knn import neighbor_scores


VIT = str(checkpoint_path("cifar10-vit"))


def evaluate(*arguments, tmp_path) -> dict:
    file = tmp_path / "results.json"
    assert main(["evaluate", "knn", "--device", "cpu", "--output", str(file), *map(str, arguments)]) == 0
    return json.loads(file.read_text())


def decode(split: str) -> list[Image.Image]:
    return [Image.open(io.BytesIO(each["bytes"])).convert("RGB") for each in load_images(SUBSET, split)["image"]]


def pooled(split: str) -> torch.Tensor:
    """The embeddings that the ViT's classifier reads, computed one image at a time."""
    model = AutoModelForImageClassification.from_pretrained(VIT)
    processor = AutoImageProcessor.from_pretrained(VIT)
    with torch.no_grad():
        pixels = [processor(image, return_tensors="pt").pixel_values for image in decode(split)]
        return torch.cat([model.vit(one).last_hidden_state[:, 0] for one in pixels])


def labels_of(split: str) -> torch.Tensor:
    return torch.tensor(load_images(SUBSET, split)["label"])


def vote(features, labels, asked, neighbors) -> list[int]:
    """The class of the neighbors with the largest sum of exp(cosine / 0.07)."""
    best = []
    for one in asked:
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
    """One that is much nearer outvotes two others."""
    known, labels = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, 0.8]]), torch.tensor([0, 1, 1])
    asked = torch.tensor([[2.0, 0.1], [1.2, 1.6]])
    scores = neighbor_scores(known, labels, asked, 3)
    assert scores.argmax(1).tolist() == [0, 1] and torch.allclose(scores.sum(1), torch.ones(2))
    expected = (F.cosine_similarity(asked[:1], known) / 0.07).exp()
    assert scores[0, 0].item() == pytest.approx((expected[0] / expected.sum()).item(), rel=1e-5)


def write_pictures(folder, count: int):
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (40, 30), "red").save(folder / f"{number}.png")


def test_extract_features():
    """Features of any number of images are computed in batches."""
    model, processor = load_vision_model(VIT, "cpu")
    features = extract_features(model, processor, decode("test[:5]"), batch_size=2)
    assert torch.allclose(features, pooled("test[:5]"), atol=1e-5)
    with pytest.raises(ValueError, match="at least one"):
        extract_features(model, processor, [])


@pytest.mark.parametrize(
    "name", ["cifar10-sparseformer", "cifar10-agent-cnn", "cifar10-convmixer", "cifar10-vit-bootstrapped"]
)
def test_other_models_have_embeddings_that_their_classifiers_read(name):
    model, _ = load_vision_model(checkpoint_path(name), "cpu")
    pixel_values = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    classifier = model.vit.classifier if name.endswith("bootstrapped") else model.classifier
    with torch.no_grad():
        assert torch.allclose(classifier(image_embedder(model)(pixel_values)), model(pixel_values).logits, atol=1e-5)


def test_image_processors_that_return_patches():
    """SigLIP 2's for any shape gives way to square images."""
    processor = image_maker(Siglip2ImageProcessor(patch_size=4, max_num_patches=64))
    pixel_values = processor([Image.new("RGB", (50, 40), "red")], return_tensors="pt")["pixel_values"]
    assert pixel_values.shape == (1, 3, 32, 32)
    assert image_embedder(KINDS["siglip2-vision"].make(), (32, 32))(pixel_values).shape == (1, 48)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train-split", "train[:5]"], "--neighbors is 20, expected at most the 5 labeled images"),
        (["--model", "no/such/folder"], "Cannot load"),
        (["--eval-dataset", "OTHER"], "expected the same"),
        (["--dataset", "UNLABELED", "--train-split", "train"], "no labels"),
    ],
)
def test_bad_input(arguments, message, tmp_path, capsys):
    for folder in ("OTHER/red", "OTHER/blue", "UNLABELED"):
        write_pictures(tmp_path / folder, 2)
    arguments = [str(tmp_path / one) if one in ("OTHER", "UNLABELED") else one for one in arguments]
    defaults = ["--model", VIT, "--train-split", "train[:50]", "--limit", "5"]
    assert main(["evaluate", "knn", "--device", "cpu", *defaults, *arguments]) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]
