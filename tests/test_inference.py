"""Tests of `Embedder` and `Classifier`."""

import itertools
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from processes import answers_of_threads, first_answers
from torchvision.transforms.v2.functional import pil_to_tensor
from transformers import AutoImageProcessor, ViTImageProcessor

import frugalvit
from drawn import encode
from frugalvit import (
    PatchSparseFormerForImageClassification,
    SparseFormerForImageClassification,
    checkpoint_path,
    extract_features,
)
from frugalvit.reading import count_threads, read_ahead
from frugalvit.training.choices import SUBSET
from frugalvit.training.data import load_images
from frugalvit.training.preprocessing import CorruptImageError, decode_image, prepare_images
from tiny import PATCHES


MODEL = checkpoint_path("cifar10-sparseformer")


@pytest.fixture(scope="module")
def images() -> list[Image.Image]:
    return [decode_image(record["image"], index) for index, record in enumerate(load_images(SUBSET, "test[:12]"))]


def elastic(**fields) -> PatchSparseFormerForImageClassification:
    torch.manual_seed(0)
    config = frugalvit.PatchSparseFormerConfig(**PATCHES, elastic_token_counts=[4, 9, 16], **fields)
    return PatchSparseFormerForImageClassification(config).eval()


def test_embeddings_are_those_of_the_model(images, tmp_path):
    """A generator may mix paths, bytes, images, records, arrays and tensors. The last batch may be incomplete."""
    model = SparseFormerForImageClassification.from_pretrained(MODEL).eval()
    expected = extract_features(model, AutoImageProcessor.from_pretrained(MODEL), images)
    images[0].save(tmp_path / "0.png")
    given = [str(tmp_path / "0.png"), Path(tmp_path / "0.png"), encode(np.asarray(images[0])), images[0]]
    given += [{"bytes": encode(np.asarray(images[0])), "path": None}, np.asarray(images[1]), pil_to_tensor(images[2])]
    given += images[3:]
    embed = frugalvit.Embedder("cifar10-sparseformer", batch_size=5, num_workers=2, device="cpu")
    found = list(embed(image for image in given))
    assert all(isinstance(each, np.ndarray) and each.dtype == np.float32 for each in found)
    assert np.allclose(found, expected[[0, 0, 0, 0, *range(12)]], rtol=1e-3, atol=1e-3)
    assert not np.allclose(found[4], found[5], rtol=1e-2)
    assert list(embed([])) == []


def test_scores_are_those_of_the_model(images):
    """The argument `num_tokens` of `Classifier` and `Embedder` does not change the model's configuration."""
    model, processor = elastic(num_labels=3), ViTImageProcessor(size={"height": 32, "width": 32})
    classify = frugalvit.Classifier(model, processor, num_tokens=4)
    with torch.no_grad():
        pixel_values = prepare_images(processor, images)
        expected = model(pixel_values, num_tokens=4).logits.softmax(-1)
        assert not torch.allclose(expected, model(pixel_values).logits.softmax(-1), atol=1e-5)
    assert np.allclose(list(classify(images)), expected, atol=1e-5)
    assert classify.labels == ["LABEL_0", "LABEL_1", "LABEL_2"] and model.config.num_tokens is None
    embeddings = [np.stack([*frugalvit.Embedder(model, processor, num_tokens=n)(images)]) for n in (4, None)]
    assert not np.allclose(*embeddings, atol=1e-3) and model.config.num_tokens is None
    model.set_num_tokens(4)
    assert np.allclose(embeddings[0], extract_features(model, processor, images), atol=1e-3)


@pytest.mark.parametrize("kind", [frugalvit.Classifier, frugalvit.Embedder])
def test_threads_and_processes_share_a_model(kind, images):
    """Each thread gets the output for its own image. A pickled `Classifier` or `Embedder` gives equal outputs."""
    model, processor = elastic(num_labels=3), ViTImageProcessor(size={"height": 32, "width": 32})
    applications = [kind(model, processor, num_tokens=count) for count in (4, 9, None)]
    images = images[:7]
    alone = [list(application(images)) for application in applications]
    assert not np.allclose(alone[0], alone[2], atol=1e-4)
    for which, index, answer in answers_of_threads(applications, images):
        np.testing.assert_allclose(answer, alone[which][index], atol=1e-5)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        answers = pool.submit(first_answers, applications[1], images).result()
    np.testing.assert_allclose(answers, alone[1], atol=1e-5)


def test_errors_belong_to_their_image(images, tmp_path):
    (tmp_path / "broken.jpg").write_bytes(encode(np.asarray(images[0]))[:100])
    given = [images[0], tmp_path / "broken.jpg", b"no image", images[1], tmp_path / "missing.png", 5]
    given.append(np.ones((8, 8, 3)))
    embed = frugalvit.Embedder("cifar10-sparseformer", return_errors=True, device="cpu")
    found = list(embed(given))
    assert [isinstance(each, CorruptImageError) for each in found] == [False, True, True, False, True, True, True]
    assert "Image 5 cannot be read (an int, expected" in str(found[5]) and "a float64 array" in str(found[6])
    assert "Image 1 '" in str(found[1]) and "broken.jpg' cannot be read" in str(found[1])
    assert np.allclose([found[0], found[3]], list(embed(images[:2])), atol=1e-4)
    strict = frugalvit.Embedder("cifar10-sparseformer", batch_size=1, device="cpu")(given)
    assert np.allclose(next(strict), found[0], atol=1e-4)
    with pytest.raises(CorruptImageError, match="Image 1 "):
        next(strict)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("cifar10-sparseformer", {"num_tokens": 17}, r"`num_tokens` is 17, expected 1 to 15, .* \(without \[CLS\]\)"),
        ("caltech101-sparseformer", {"num_tokens": 10}, "`num_tokens` is 10, which makes no grid"),
        ("cifar10-sparseformer-clip", {"num_tokens": 65}, "`num_tokens` is 65, expected 1 to "),
        ("cifar10-vit", {"num_tokens": 16}, "`num_tokens` is 16; a ViT.* has no choice of tokens"),
        (elastic, {}, "needs its image processor"),
    ],
)
def test_wrong_arguments_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        frugalvit.Embedder(model() if callable(model) else model, device="cpu", **options)


def test_reading_ahead_keeps_the_order():
    """Results come in the order of the items. `result()` raises the error of `read`. Few items are read ahead."""
    started = []

    def read(item: int) -> int:
        started.append(item)
        if item == 3:
            raise ValueError("three")
        return item * item

    found = read_ahead(read, range(100), ahead=4, num_workers=3)
    first = list(itertools.islice(found, 5))
    assert [item for item, _ in first] == [0, 1, 2, 3, 4]
    assert [future.result() for item, future in first if item != 3] == [0, 1, 4, 16]
    with pytest.raises(ValueError, match="three"):
        first[3][1].result()
    found.close()
    assert max(started) <= 9
    assert count_threads(3) == 3 and 1 <= count_threads() <= 8
