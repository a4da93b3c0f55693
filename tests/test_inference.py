"""`Embedder` and `Classifier`: images of any kind to arrays, in order; and what they share with the commands, the
decoding that does no more than a model needs."""

import io
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from transformers import AutoImageProcessor, CLIPImageProcessor, ViTImageProcessor

import frugalvit
from frugalvit import SparseFormerForImageClassification, checkpoint_path, extract_features
from frugalvit.common.choices import SUBSET
from frugalvit.common.data import load_images
from frugalvit.common.decoding import ORIENTATION, CorruptImageError, decode_image, read_image
from frugalvit.common.reading import Reader, count_threads, read_ahead, share_read
from frugalvit.common.views import prepare_images


MODEL = checkpoint_path("cifar10-sparseformer")


@pytest.fixture(scope="module")
def images() -> list[Image.Image]:
    return [decode_image(record["image"], index) for index, record in enumerate(load_images(SUBSET, "test[:12]"))]


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    """480 x 320 pixels, smooth and with edges, not the same upside down or mirrored."""
    y, x = np.mgrid[0:320, 0:480]
    waves = np.stack([128 + 100 * np.sin(x / 37 + y / 91), 255 * y / 320, 255 * x / 480], axis=2)
    waves[40:120, 60:200] = (220, 30, 60)
    return Image.fromarray(waves.astype(np.uint8))


def as_jpeg(image: Image.Image, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95, **options)
    return file.getvalue()


def encoded(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def elastic(**fields) -> SparseFormerForImageClassification:
    torch.manual_seed(0)
    config = frugalvit.PatchSparseFormerConfig(
        **{"image_size": 32, "patch_size": 4, "num_latent_tokens": 16, "elastic_token_counts": [4, 9, 16]},
        **{"hidden_size": 32, "focusing_hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        **fields,
    )
    return SparseFormerForImageClassification(config).eval()


@pytest.mark.parametrize("exact", [False, True])
def test_embeddings_are_those_of_the_model(exact, images, tmp_path):
    """Paths, bytes, images and records, mixed, of a generator; batches that do not divide them."""
    model = SparseFormerForImageClassification.from_pretrained(MODEL).eval()
    expected = extract_features(model, AutoImageProcessor.from_pretrained(MODEL), images)
    images[0].save(tmp_path / "0.png")
    given = [str(tmp_path / "0.png"), Path(tmp_path / "0.png"), encoded(images[0]), images[0]]
    given += [{"bytes": encoded(images[0]), "path": None}, *images[1:]]
    embed = frugalvit.Embedder("cifar10-sparseformer", batch_size=5, num_workers=2, exact=exact, device="cpu")
    found = list(embed(image for image in given))
    assert all(isinstance(each, np.ndarray) and each.dtype == np.float32 for each in found)
    assert np.allclose(found, expected[[0, 0, 0, 0, *range(12)]], rtol=1e-3, atol=1e-3)
    assert not np.allclose(found[4], found[5], rtol=1e-2)
    assert list(embed([])) == []


def test_scores_are_those_of_the_model(images):
    """The model is loaded already, and computes with a number of tokens that this classifier alone chooses."""
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


def test_sure_images_have_few_tokens(images):
    model, processor = elastic(num_labels=3), ViTImageProcessor(size={"height": 32, "width": 32})
    with torch.no_grad():
        model.classifier.weight *= 20
        pixel_values = prepare_images(processor, images)
        confidence = model(pixel_values, num_tokens=4).logits.softmax(-1).amax(-1).median().item()
        found = model.classify_adaptively(pixel_values, confidence)
    assert {*found.num_tokens.tolist()} == {4, 16}
    expected = found.logits.softmax(-1)
    assert np.allclose(
        list(frugalvit.Classifier(model, processor, confidence=confidence)(images)), expected, atol=1e-4
    )
    with pytest.raises(ValueError, match="give one of both"):
        frugalvit.Classifier(model, processor, confidence=0.5, num_tokens=4)


def test_half_precision(images):
    """A model that is loaded here has half precision; one that is given stays as it is."""
    whole, half = (
        np.stack(list(frugalvit.Embedder("cifar10-sparseformer", dtype=dtype, device="cpu")(images)))
        for dtype in ("float32", "bfloat16")
    )
    cosines = (whole * half).sum(1) / np.linalg.norm(whole, axis=1) / np.linalg.norm(half, axis=1)
    assert half.dtype == np.float32 and cosines.min() > 0.99 and not np.allclose(whole, half, rtol=1e-4)
    model, processor = elastic(), ViTImageProcessor(size={"height": 32, "width": 32})
    assert frugalvit.Classifier(model, processor, dtype="bfloat16").dtype == model.dtype == torch.float32


def test_each_image_has_its_own_error(images, tmp_path):
    (tmp_path / "broken.jpg").write_bytes(as_jpeg(images[0])[:100])
    given = [images[0], tmp_path / "broken.jpg", b"no image", images[1], tmp_path / "missing.png"]
    embed = frugalvit.Embedder("cifar10-sparseformer", return_errors=True, device="cpu")
    found = list(embed(given))
    assert [isinstance(each, CorruptImageError) for each in found] == [False, True, True, False, True]
    assert "Image 1 '" in str(found[1]) and "broken.jpg' cannot be read" in str(found[1])
    assert np.allclose([found[0], found[3]], list(embed(images[:2])), atol=1e-4)
    strict = frugalvit.Embedder("cifar10-sparseformer", batch_size=1, device="cpu")(given)
    assert np.allclose(next(strict), found[0], atol=1e-4)
    with pytest.raises(CorruptImageError, match="Image 1 "):
        next(strict)


def test_images_without_end(images):
    """No more is taken than two batches ahead."""
    taken = []
    endless = (taken.append(index) or images[index % 12] for index in itertools.count())
    found = frugalvit.Embedder("cifar10-sparseformer", batch_size=4, device="cpu")(endless)
    next(found)
    assert len(taken) <= 13
    found.close()


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ("photograph.jpg", {}, "Got a str, expected an iterable of images; of one image, a list"),
        ([3], {}, "Image 0 is a int, expected a path, bytes, a PIL image or a record"),
        ([], {"batch_size": 0}, "batch_size=0"),
        ([], {"dtype": "int8"}, "`dtype` is 'int8'"),
        ([], {"num_tokens": 17}, "`num_tokens` is 17, expected 1 to 15"),
        ([], {"model": "cifar10-vit", "num_tokens": 4}, "has no choice of tokens"),
        ([], {"model": elastic}, "needs its image processor"),
    ],
)
def test_what_makes_no_sense(given, options, message):
    model = options.pop("model", "cifar10-sparseformer")
    with pytest.raises(ValueError, match=message):
        list(frugalvit.Classifier(model() if callable(model) else model, device="cpu", **options)(given))


@pytest.mark.parametrize("kept", [30, None], ids=["the middle", "as it is"])
def test_fractions_of_pixels_are_left_out(kept, photograph):
    """477 x 315 pixels are 59.6 x 39.4 at 1/8. If all 60 x 40 decoded pixels were used, they would be squeezed."""
    size = {"shortest_edge": kept} if kept else {"height": 30, "width": 30}
    crop = {"do_center_crop": bool(kept), "crop_size": {"height": 24, "width": 24}}
    image = photograph.crop((3, 5, 480, 320)).filter(ImageFilter.GaussianBlur(8))
    file, reader = as_jpeg(image), Reader(CLIPImageProcessor(size=size, **crop), share=0.5)
    whole, small = (read_image(io.BytesIO(file), at_least=at_least) for at_least in (None, (32, 32)))
    assert small.size == (60, 40) and small.info["extent"] == (477 / 8, 315 / 8)
    expected, found = (reader.pixels(each).float() for each in (whole, small))
    small.info.pop("extent")
    assert found.shape == expected.shape and (found - expected).abs().mean() < 0.7
    assert (reader.pixels(small).float() - expected).abs().mean() > 1.5 * (found - expected).abs().mean()
    # Turned, the fractions would lie elsewhere: they are decoded whole.
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    assert read_image(io.BytesIO(as_jpeg(image, exif=exif)), at_least=(32, 32)).size == (315, 477)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_small_decoding_keeps_the_orientation(orientation, photograph):
    """Also where width and height change places: 240 x 160 pixels of what is seen suffice, or they do not."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    file = as_jpeg(photograph, exif=exif)
    whole = read_image(io.BytesIO(file))
    width, height = whole.size
    found = read_image(io.BytesIO(file), at_least=(width // 2, height // 2))
    assert found.size == (width // 2, height // 2)
    reduced = np.asarray(whole.reduce(2)).astype(float)
    assert np.abs(np.asarray(found) - reduced).mean() < 2
    assert read_image(io.BytesIO(file), at_least=(width // 2 + 1, height // 2)).size == whole.size


@pytest.mark.parametrize(
    ("processor", "at_least"),
    [
        (ViTImageProcessor(size={"height": 24, "width": 40}), (80, 48)),
        (CLIPImageProcessor(size={"shortest_edge": 30}, crop_size={"height": 24, "width": 24}), (60, 60)),
    ],
    ids=["as it is", "the middle"],
)
def test_readers_make_what_the_image_processor_makes(processor, at_least, photograph):
    """Whole images have the same pixels, to rounding; JPEGs at a lower resolution have nearly the same."""
    expected = processor([photograph], return_tensors="pt")["pixel_values"]
    fast, exact = Reader(processor), Reader(processor, exact=True)
    assert fast.format is not None and exact.format is None and exact.at_least is None
    for reader in (fast, exact):
        assert torch.allclose(reader.batch([reader.pixels(photograph)]), expected, atol=0.02)
    assert fast.at_least == at_least
    small = read_image(io.BytesIO(as_jpeg(photograph)), at_least=fast.at_least)
    assert small.size == (120, 80)
    assert (fast.batch([fast.pixels(small)]) - expected).abs().mean() < 0.05


def test_what_is_read_of_an_image():
    model = elastic()
    assert share_read(model) == 16 / 32 and share_read(model, 4) == 8 / 32
    model.set_num_tokens(9)
    assert share_read(model) == 12 / 32
    assert share_read(elastic(placement="content")) == 1
    assert share_read(SparseFormerForImageClassification.from_pretrained(MODEL)) == 1
    assert share_read(torch.nn.Identity()) == 1
    processor = ViTImageProcessor(size={"height": 32, "width": 32})
    assert Reader(processor, 0.25).at_least == (16, 16)


def test_reading_ahead_keeps_the_order():
    """The order does not depend on who is done first. An error belongs to its item; the rest is not read."""
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
