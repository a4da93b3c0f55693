"""`frugalvit evaluate knn` and `linear`: the numbers of a brute-force loop, whatever way the images are given."""

import io
import json
import math
import shutil

import datasets
import pytest
import torch
import torch.nn.functional as F
from frugalvit_cli import main
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, PerceiverImageProcessor
from vision_transformers import KINDS

from frugalvit import checkpoint_path, extract_features
from frugalvit.common.choices import SUBSET
from frugalvit.common.data import load_images
from frugalvit.common.views import ImageFormat
from frugalvit.contenders import load_students, load_teachers
from frugalvit.evaluation.embeddings import image_embedder, image_maker
from frugalvit.evaluation.features import LabeledFeatures
from frugalvit.evaluation.knn import neighbor_scores
from frugalvit.evaluation.linear import PENALTIES, LinearProbe, choose_held_back, fit_probe


VIT = str(checkpoint_path("cifar10-vit"))


def evaluate(task, *arguments, tmp_path) -> dict:
    file = tmp_path / "results.json"
    assert main(["evaluate", task, "--device", "cpu", "--output", str(file), *map(str, arguments)]) == 0
    return json.loads(file.read_text())


def fails(task, *arguments, capsys) -> str:
    assert main(["evaluate", task, "--device", "cpu", *map(str, arguments)]) == 1
    return capsys.readouterr().err


def decode(images: datasets.Dataset) -> list[Image.Image]:
    return [Image.open(io.BytesIO(record["bytes"])).convert("RGB") for record in images["image"]]


def pooled(images: datasets.Dataset) -> torch.Tensor:
    """The embeddings that the ViT's classifier reads, computed one image at a time."""
    model = AutoModelForImageClassification.from_pretrained(VIT)
    processor = AutoImageProcessor.from_pretrained(VIT)
    with torch.no_grad():
        pixels = [processor(image, return_tensors="pt").pixel_values for image in decode(images)]
        return torch.cat([model.vit(one).last_hidden_state[:, 0] for one in pixels])


def vote(features, labels, asked, neighbors) -> list[int]:
    """The class of the neighbors with the largest sum of exp(cosine / 0.07)."""
    best = []
    for one in asked:
        cosines = [F.cosine_similarity(one, other, dim=0).item() for other in features]
        votes = dict.fromkeys(labels, 0.0)
        for index in sorted(range(len(cosines)), key=lambda index: -cosines[index])[:neighbors]:
            votes[labels[index]] += math.exp(cosines[index] / 0.07)
        best.append(max(votes, key=votes.get))
    return best


def test_neighbors_equal_brute_force(tmp_path, capsys):
    train, test = load_images(SUBSET, "train[:40]"), load_images(SUBSET, "test[:30]")
    arguments = ["--model", VIT, "--train-split", "train[:40]", "--limit", 30, "--batch-size", 32]
    results = evaluate("knn", *arguments, "--neighbors", 7, tmp_path=tmp_path)
    best = vote(pooled(train), train["label"], pooled(test), 7)
    right = sum(a == b for a, b in zip(best, test["label"], strict=True))
    assert results["accuracy"] == right / 30 and 0.3 < results["accuracy"] <= results["top5_accuracy"]
    assert (results["train_images"], results["images"], results["classes"]) == (40, 30, 10)
    assert (results["neighbors"], results["split"], results["embedding_size"]) == (7, "test", 192)
    assert "train_images" in capsys.readouterr().out


def test_neighbors_weigh_by_similarity():
    """One that is much nearer outvotes two others."""
    train = LabeledFeatures(torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, 0.8]]), torch.tensor([0, 1, 1]))
    asked = torch.tensor([[2.0, 0.1], [1.2, 1.6]])
    scores = neighbor_scores(train, asked, 3)
    assert scores.argmax(1).tolist() == [0, 1] and torch.allclose(scores.sum(1), torch.ones(2))
    cosines = F.cosine_similarity(asked[:1], train.features)
    expected = (cosines / 0.07).exp()
    assert scores[0, 0].item() == pytest.approx((expected[0] / expected.sum()).item(), rel=1e-5)


def test_linear_probe(tmp_path):
    arguments = ["--model", VIT, "--train-split", "train[:150]", "--limit", 40]
    results = evaluate("linear", *arguments, tmp_path=tmp_path)
    assert results["accuracy"] > 0.5 and results["top5_accuracy"] >= results["accuracy"]
    assert results["penalty"] in PENALTIES
    train, test = load_images(SUBSET, "train[:150]"), load_images(SUBSET, "test[:40]")
    probe = fit_probe(LabeledFeatures(pooled(train), torch.tensor(train["label"])))
    right = probe(pooled(test)).argmax(1) == torch.tensor(test["label"])
    assert results["accuracy"] == pytest.approx(right.double().mean().item())


def noise(images: int = 60, size: int = 8, classes: int = 3) -> LabeledFeatures:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (images,), generator=generator)
    features = torch.randn(images, size, generator=generator) + torch.eye(classes, size)[labels]
    return LabeledFeatures(features, labels)


def test_linear_probe_is_the_minimum():
    """The gradient of the penalized mean cross-entropy is zero there, and features' scales do not matter."""
    train, penalty = noise(), 0.01
    probe = LinearProbe(train, 3, penalty)
    inputs = (train.features - train.features.mean(0)) / train.features.std(0, correction=0)
    weight, bias = probe.linear.weight, probe.linear.bias
    loss = F.cross_entropy(inputs @ weight.T + bias, train.labels) + penalty / 2 * weight.square().sum()
    gradients = torch.autograd.grad(loss, [weight, bias])
    assert max(gradient.abs().max() for gradient in gradients) < 1e-4
    scale = torch.logspace(-2, 2, 8)
    scaled = LinearProbe(LabeledFeatures(scale * train.features + 5, train.labels), 3, penalty)
    assert torch.allclose(scaled(scale * train.features + 5), probe(train.features), atol=0.01)


def test_penalty_is_chosen_by_images_that_are_held_back():
    """The one of which a probe of the others is right most often, the strongest of equals."""
    train = noise(images=60, size=20)
    held_back = choose_held_back(train.labels, seed=3)
    sizes = train.labels.bincount()
    assert train.labels[held_back].bincount().tolist() == [size // 5 for size in sizes.tolist()]
    known, asked = (LabeledFeatures(train.features[part], train.labels[part]) for part in (~held_back, held_back))
    right = [
        (LinearProbe(known, 3, penalty)(asked.features).argmax(1) == asked.labels).sum().item()
        for penalty in PENALTIES
    ]
    assert len(set(right)) > 1
    assert fit_probe(train, seed=3).penalty == PENALTIES[right.index(max(right))]
    # The only image of a class stays, of two one goes.
    assert choose_held_back(torch.tensor([0, 1, 1, 2]), seed=0).tolist()[::3] == [False, False]
    assert choose_held_back(torch.tensor([0, 1, 1, 2]), seed=0).sum() == 1


@pytest.fixture
def picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("parts", [{"train": 6, "test": 3}, {"": 10}], ids=["parts", "one part"])
def test_layouts(parts, picture, tmp_path):
    """Folders a class, and images of one part, of which some are held back."""
    for part, count in parts.items():
        for label in ("red", "blue"):
            (tmp_path / "images" / part / label).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                (tmp_path / "images" / part / label / f"{number}.png").write_bytes(picture)
    arguments = ["--model", checkpoint_path("cifar10-sparseformer"), "--dataset", tmp_path / "images"]
    results = evaluate("knn", *arguments, "--neighbors", 3, tmp_path=tmp_path)
    expected = (12, 6) if "test" in parts else (18, 2)
    assert (results["train_images"], results["images"]) == expected and results["classes"] == 2
    assert ("held back" in results["split"]) == ("test" not in parts)


def test_extract_features():
    """Features of any number of images are computed in batches."""
    images = decode(load_images(SUBSET, "test[:5]"))
    model, processor = (auto.from_pretrained(VIT) for auto in (AutoModelForImageClassification, AutoImageProcessor))
    features = extract_features(model, processor, images, batch_size=2)
    assert torch.allclose(features, pooled(load_images(SUBSET, "test[:5]")), atol=1e-5)
    folder = checkpoint_path("cifar10-sparseformer")
    student = AutoModelForImageClassification.from_pretrained(folder)
    features = extract_features(student, AutoImageProcessor.from_pretrained(folder), images)
    with torch.no_grad():
        logits = student(AutoImageProcessor.from_pretrained(folder)(images, return_tensors="pt").pixel_values).logits
    assert torch.allclose(student.classifier(features), logits, atol=1e-5)
    with pytest.raises(ValueError, match="at least one"):
        extract_features(model, processor, [])


@pytest.mark.parametrize("name", ["cifar10-agent-cnn", "cifar10-convmixer", "cifar10-vit-bootstrapped"])
def test_other_models_have_embeddings_that_their_classifiers_read(name):
    from frugalvit.common.loading import load_vision_model

    model, _ = load_vision_model(checkpoint_path(name), "cpu")
    pixel_values = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    classifier = model.vit.classifier if name.endswith("bootstrapped") else model.classifier
    with torch.no_grad():
        embedding = image_embedder(model)(pixel_values)
        assert torch.allclose(classifier(embedding), model(pixel_values).logits, atol=1e-5)


def test_image_processors_that_return_patches():
    """SigLIP 2's for any shape gives way to square images."""
    from transformers import Siglip2ImageProcessor

    processor = Siglip2ImageProcessor(patch_size=4, max_num_patches=64)
    pixel_values = image_maker(processor)([Image.new("RGB", (50, 40), "red")], return_tensors="pt")["pixel_values"]
    assert pixel_values.shape == (1, 3, 32, 32)
    embedding = image_embedder(KINDS["siglip2-vision"].make(), (32, 32))(pixel_values)
    assert embedding.shape == (1, 48)


def test_image_processors_that_training_cannot_follow(tmp_path):
    """Crop before they resize, for example: embeddings are of what they make, in every command that takes some."""
    folder = tmp_path / "model"
    shutil.copytree(VIT, folder)
    (folder / "preprocessor_config.json").unlink()
    sizes = ({"height": side, "width": side} for side in (40, 32))
    processor = PerceiverImageProcessor(**dict(zip(("crop_size", "size"), sizes, strict=True)))
    processor.save_pretrained(folder)
    with pytest.raises(ValueError):
        ImageFormat.from_processor(AutoImageProcessor.from_pretrained(folder))
    images = ["--model", folder, "--train-split", "train[:40]", "--limit", 30, "--neighbors", 7]
    assert evaluate("knn", *images, tmp_path=tmp_path)["accuracy"] > 0.2
    model = AutoModelForImageClassification.from_pretrained(folder)
    picture = decode(load_images(SUBSET, "test[:1]"))[0].resize((80, 50))
    with torch.no_grad():
        expected = model.vit(processor(picture, return_tensors="pt").pixel_values).last_hidden_state[:, 0]
    torch.testing.assert_close(extract_features(model, processor, [picture]), expected)
    [teacher, *_], [student] = load_teachers(str(folder), device="cpu"), load_students(str(folder), device="cpu")
    assert teacher.image_size == student.image_size == (32, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train-split", "train[:5]"], "--neighbors is 20, expected at most the 5 labeled images"),
        (["--model", "no/such/folder"], "Cannot load 'no/such/folder'"),
        (["--eval-dataset", "OTHER"], "expected the same"),
        (["--dataset", "UNLABELED", "--train-split", "train"], "no labels"),
    ],
)
def test_bad_input(arguments, message, picture, tmp_path, capsys):
    for part, label in (("OTHER", "red"), ("OTHER", "blue"), ("UNLABELED", "")):
        (tmp_path / part / label).mkdir(parents=True, exist_ok=True)
        (tmp_path / part / label / "image.png").write_bytes(picture)
        (tmp_path / part / label / "other.png").write_bytes(picture)
    arguments = [str(tmp_path / one) if one in ("OTHER", "UNLABELED") else one for one in arguments]
    defaults = ["--model", VIT, "--train-split", "train[:50]", "--limit", "5"]
    error = fails("knn", *defaults, *arguments, capsys=capsys)
    assert message in error.splitlines()[-1]
