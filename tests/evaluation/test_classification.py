"""`frugalvit evaluate`: the numbers of a brute-force loop, labels matched by name, errors of one line."""

import io
import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm.data
import torch
from frugalvit_cli import main
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    ViTImageProcessor,
)

from drawn import encode
from frugalvit.common.data import load_images
from frugalvit.evaluation.classification import classification_accuracy
from frugalvit.evaluation.imagenet import match_labels
from frugalvit.evaluation.robustness import occlude_center
from tiny import make_vit


LABELS = ["airplane", "bird", "cat", "dog", "frog", "horse", "ship"]
COUNT = 23


def random_vit(folder: Path, labels: list[str]) -> Path:
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    model = make_vit(**names)
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random ViT for 7 classes."""
    return random_vit(tmp_path_factory.mktemp("models") / "vit", LABELS)


def write_images(path, names=LABELS, broken=()):
    """A data set as `datasets` writes them; the images at `broken` are cut short."""
    generator = np.random.default_rng(0)
    encoded = [encode(generator.integers(0, 256, (24, 40, 3), dtype=np.uint8)) for _ in range(COUNT)]
    encoded = [data[:50] if i in broken else data for i, data in enumerate(encoded)]
    labels = generator.integers(0, len(names), COUNT).tolist()
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    values = {"img": [{"bytes": data, "path": None} for data in encoded], "label": labels}
    datasets.Dataset.from_dict(values, features=features).to_parquet(str(path))
    return encoded, labels


@pytest.fixture
def images(tmp_path):
    write_images(tmp_path / "images.parquet")
    return tmp_path / "images.parquet"


def brute_force(folder, encoded, labels) -> dict[str, float]:
    """One image at a time."""
    model = AutoModelForImageClassification.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder)
    top1, top5, loss = 0, 0, 0.0
    for data, label in zip(encoded, labels, strict=True):
        with torch.no_grad():
            pixel_values = processor(Image.open(io.BytesIO(data)), return_tensors="pt").pixel_values
            probabilities = model(pixel_values).logits[0].softmax(-1)
        ranking = sorted(range(len(LABELS)), key=lambda i: -probabilities[i])
        top1 += ranking[0] == label
        top5 += label in ranking[:5]
        loss -= probabilities[label].log().item()
    return {"accuracy": top1 / len(labels), "top5_accuracy": top5 / len(labels), "loss": loss / len(labels)}


def run(*arguments, capsys) -> tuple[int, str, str]:
    try:
        code = main(["evaluate", *map(str, arguments)])
    except SystemExit as stop:
        code = stop.code
    output = capsys.readouterr()
    return code, output.out, output.err


def fails(*arguments, capsys) -> str:
    """The line of error that a failing command prints last."""
    code, output, error = run(*arguments, capsys=capsys)
    assert code == 1 and not output
    return next(line for line in error.splitlines() if line.startswith("frugalvit evaluate: error: "))


def evaluated(folder, path, *more, capsys) -> dict:
    """The results that the command writes."""
    output = path.parent / "results.json"
    code, _, error = run(
        *("classification", "--model", folder, "--dataset", path, "--output", output, *more), capsys=capsys
    )
    assert code == 0, error
    return json.loads(output.read_text())


def test_equals_brute_force(folder, tmp_path, capsys):
    encoded, labels = write_images(tmp_path / "images.parquet")
    arguments = ["--model", folder, "--dataset", tmp_path / "images.parquet", "--batch-size", 5]
    code, output, _ = run("classification", *arguments, "--output", tmp_path / "results.json", capsys=capsys)
    results = json.loads((tmp_path / "results.json").read_text())
    assert code == 0
    expected = brute_force(folder, encoded, labels)
    assert {name: results[name] for name in expected} == pytest.approx(expected)
    assert 0 < results["accuracy"] < results["top5_accuracy"] < 1
    assert (results["images"], results["skipped"], results["split"]) == (COUNT, 0, "train")
    assert f"{results['accuracy']:.4g}" in output and "top5_accuracy" in output
    assert {file.name for file in tmp_path.iterdir()} == {"images.parquet", "results.json"}


def test_labels_are_matched_by_name(folder, tmp_path):
    names = [name.upper() for name in reversed(LABELS)]
    encoded, labels = write_images(tmp_path / "images.parquet", names)
    model = AutoModelForImageClassification.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder)
    results = classification_accuracy(model, processor, load_images(str(tmp_path / "images.parquet")))
    expected = brute_force(folder, encoded, [len(LABELS) - 1 - label for label in labels])
    assert {name: results[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("names", "labels", "expected"),
    [
        (["frog", "Cat"], ["cat", "dog", "frog"], [2, 0]),
        (["polar_bear", "Sea lion"], ["Polar Bear", "sea-lion"], [0, 1]),
        (["1", "2", "0"], ["a", "a", "b"], [1, 2, 0]),
        (["tabby", "dog"], ["LABEL_0", "LABEL_1", "LABEL_2"], [0, 1]),
        # Those that are not asked for may be called alike.
        (["dog", "cat"], ["crane", "crane", "cat", "dog"], [3, 2]),
        (["crane", "Crane"], ["Crane", "crane"], [1, 0]),
        (["CAF\u00c9"], ["dog", "cafe\u0301"], [1]),
    ],
)
def test_classes_are_matched_by_name(names, labels, expected):
    assert match_labels(names, dict(enumerate(labels))) == expected


@pytest.mark.parametrize(
    ("names", "labels", "message"),
    [
        (["tabby", "dog"], ["cat", "dog", "frog"], r"does not know the classes tabby \(1\), .*cat"),
        (["oak", "elm"], ["cat", "dog"], "does not know the classes oak, elm .*--class-names"),
        (["0", "1", "2", "3"], ["cat", "dog", "frog"], r"does not know the classes 0, 1, 2, … \(4\)"),
        # Two classes of one name are told apart by nothing.
        (["cat", "dog"], ["cat", "cat", "dog"], "has classes 0, 1 called 'cat'; .*--class-names"),
    ],
)
def test_classes_that_a_model_does_not_know_are_refused(names, labels, message):
    with pytest.raises(ValueError, match=message):
        match_labels(names, dict(enumerate(labels)))


def test_corrupt_images(folder, tmp_path, capsys):
    encoded, labels = write_images(tmp_path / "images.parquet", broken=(3, 4, 22))
    arguments = ["--model", folder, "--dataset", tmp_path / "images.parquet", "--num-workers", 1]
    arguments += ["--batch-size", 2, "--output", tmp_path / "results.json"]
    assert "Image 3 of the data set cannot be read" in fails("classification", *arguments, capsys=capsys)
    assert not (tmp_path / "results.json").exists()
    code, _, _ = run("classification", *arguments, "--skip-corrupt", capsys=capsys)
    results = json.loads((tmp_path / "results.json").read_text())
    kept = [i for i in range(COUNT) if i not in (3, 4, 22)]
    expected = brute_force(folder, [encoded[i] for i in kept], [labels[i] for i in kept])
    assert code == 0 and (results["images"], results["skipped"]) == (COUNT - 3, 3)
    assert {name: results[name] for name in expected} == pytest.approx(expected)


def test_nothing_readable(folder, tmp_path, capsys):
    write_images(tmp_path / "images.parquet", broken=range(COUNT))
    arguments = ["--model", folder, "--dataset", tmp_path / "images.parquet", "--skip-corrupt"]
    assert "None of the 23 images" in fails("classification", *arguments, capsys=capsys)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (None, "no labels"),
        ([0, 1, -1] + [2] * (COUNT - 3), "of the split 'train' have no label, the first is image 2"),
        ([7] * COUNT, "does not know the classes 0, 1, 2, … (8)"),
    ],
)
def test_labels_that_do_not_fit(labels, message, folder, images, tmp_path, capsys):
    table = pq.read_table(images).drop_columns(["label"]).replace_schema_metadata()
    pq.write_table(table if labels is None else table.append_column("label", pa.array(labels)), tmp_path / "x.parquet")
    arguments = ["--model", folder, "--dataset", tmp_path / "x.parquet"]
    assert message in fails("classification", *arguments, capsys=capsys)


def test_wrong_arguments(folder, images, tmp_path, capsys):
    arguments = ["classification", "--model", folder, "--dataset", images]
    assert "test" in fails(*arguments, "--split", "test", capsys=capsys)
    output = tmp_path / "no" / "results.json"
    assert "there is no folder" in fails(*arguments, "--output", output, capsys=capsys)
    code, _, error = run(*arguments, "--limit", 0, capsys=capsys)
    assert code == 2 and "argument --limit: " in error


IMAGENET = [f"class {index}" for index in range(1000)]


@pytest.fixture(scope="module")
def imagenet_folder(tmp_path_factory):
    """A random ViT for 1,000 classes."""
    return random_vit(tmp_path_factory.mktemp("models") / "imagenet", IMAGENET)


def write_folder(path, names):
    """Images of noise in a folder a class; `names` are "class/file" paths without a suffix."""
    generator = np.random.default_rng(1)
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / f"{name}.JPEG").write_bytes(encode(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)))


def logits_of(folder, path, names) -> torch.Tensor:
    model = AutoModelForImageClassification.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder)
    images = [Image.open(path / f"{name}.JPEG").convert("RGB") for name in names]
    with torch.no_grad():
        return model(**processor(images, return_tensors="pt")).logits


def timm_table(name: str) -> list[str]:
    return (Path(timm.data.__file__).parent / "_info" / name).read_text().split()


REAL = json.loads((Path(timm.data.__file__).parent / "_info" / "imagenet_real_labels.json").read_text())
NO_LABEL = next(index for index, labels in enumerate(REAL) if not labels)
SEVERAL = next(index for index, labels in enumerate(REAL) if len(labels) > 2)
SYNSETS, A_SYNSETS = timm_table("imagenet_synsets.txt"), timm_table("imagenet_a_synsets.txt")
A_CLASSES = list(map(int, timm_table("imagenet_a_indices.txt")))


class TestImageNet:
    @pytest.mark.parametrize(
        ("protocol", "right", "names"),
        [
            ("labels", [[7], [999], [3]], [f"{SYNSETS[index]}/image" for index in (7, 999, 3)]),
            # Sorted by number: as text, 10 comes before 2.
            ("imagenet-v2", [[10], [2], [100]], ["10/image", "2/image", "100/image"]),
            (
                "imagenet-real",
                [REAL[NO_LABEL], REAL[SEVERAL], REAL[49_999]],
                [f"any/ILSVRC2012_val_{index + 1:08d}" for index in (NO_LABEL, SEVERAL, 49_999)],
            ),
            ("imagenet-a", [[0], [199], [17]], [f"{A_SYNSETS[place]}/image" for place in (0, 199, 17)]),
        ],
    )
    def test_equals_brute_force(self, protocol, right, names, imagenet_folder, tmp_path, capsys):
        """Several labels may be right; images without any do not count; ImageNet-A compares its 200 classes alone."""
        write_folder(tmp_path / "images" / "train", names)
        logits = logits_of(imagenet_folder, tmp_path / "images" / "train", names)
        logits = logits[:, A_CLASSES] if protocol == "imagenet-a" else logits
        counting = [(row, labels) for row, labels in zip(logits, right, strict=True) if labels]
        loss = -sum(row.softmax(0)[labels].sum().log().item() for row, labels in counting) / len(counting)
        top5 = np.mean([bool({*row.topk(5).indices.tolist()} & {*labels}) for row, labels in counting])
        options = ("--split", "train", "--protocol", protocol, "--batch-size", 2)
        results = evaluated(imagenet_folder, tmp_path / "images", *options, capsys=capsys)
        assert results["loss"] == pytest.approx(loss, rel=1e-5) and results["top5_accuracy"] == pytest.approx(top5)
        assert (results["images"], results["skipped"]) == (len(counting), len(names) - len(counting))

    def test_wrong_data(self, imagenet_folder, folder, images, tmp_path, capsys):
        def error(model, *more):
            return fails("classification", "--model", model, "--dataset", images, *more, capsys=capsys)

        assert "is for models with ImageNet's 1,000 classes; this has 7" in error(folder, "--protocol", "imagenet-a")
        assert "'airplane' is none of them" in error(imagenet_folder, "--protocol", "imagenet-a")
        assert "are named 0 to 999; this data set's airplane" in error(imagenet_folder, "--protocol", "imagenet-v2")
        assert "image 0 of the data set is without a name" in error(imagenet_folder, "--protocol", "imagenet-real")


class TestRobustness:
    def test_fgsm_equals_brute_force(self, folder, tmp_path, capsys):
        encoded, labels = write_images(tmp_path / "images.parquet")
        model = AutoModelForImageClassification.from_pretrained(folder).eval()
        processor = AutoImageProcessor.from_pretrained(folder)
        attacked, eps = [], 1 / 255
        for data, label in zip(encoded, labels, strict=True):
            pixels = processor(Image.open(io.BytesIO(data)), return_tensors="pt").pixel_values.requires_grad_()
            torch.nn.functional.cross_entropy(model(pixels).logits, torch.tensor([label])).backward()
            colors = (pixels.detach() * 0.5 + 0.5 + eps * pixels.grad.sign()).clamp(0, 1)
            attacked.append((colors - 0.5) / 0.5)
        with torch.no_grad():
            logits = model(torch.cat(attacked)).logits
        expected = torch.nn.functional.cross_entropy(logits, torch.tensor(labels)).item()
        clean = evaluated(folder, tmp_path / "images.parquet", capsys=capsys)
        results = evaluated(folder, tmp_path / "images.parquet", "--attack", "fgsm", capsys=capsys)
        assert results["loss"] == pytest.approx(expected, rel=1e-5) and results["loss"] > clean["loss"]
        assert results["fgsm_eps"] == pytest.approx(1 / 255) and "fgsm_eps" not in clean

    def test_occlusion_hides_the_middle(self, folder, tmp_path, capsys):
        pixel_values = torch.ones(1, 3, 8, 12)
        occluded = occlude_center(pixel_values, 0.25)
        assert occluded.sum() == 3 * (96 - 4 * 6) and not occluded[..., 2:6, 3:9].any() and pixel_values.all()
        encoded, labels = write_images(tmp_path / "images.parquet")
        model = AutoModelForImageClassification.from_pretrained(folder)
        processor = AutoImageProcessor.from_pretrained(folder)
        pixel_values = processor([Image.open(io.BytesIO(data)) for data in encoded], return_tensors="pt").pixel_values
        pixel_values[..., 8:24, 8:24] = 0
        with torch.no_grad():
            expected = torch.nn.functional.cross_entropy(model(pixel_values).logits, torch.tensor(labels)).item()
        options = ("--occlude", "center")
        results = evaluated(folder, tmp_path / "images.parquet", *options, capsys=capsys)
        assert results["loss"] == pytest.approx(expected, rel=1e-5) and results["occluded_share"] == 0.25
