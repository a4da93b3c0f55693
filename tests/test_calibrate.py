"""`frugalvit calibrate`: the promise holds, stays with the model, is used and said; and what ends it."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassClassValidationError

from frugalvit import Embedder, PatchSparseFormerConfig, SparseFormerForImageClassification, checkpoint_path
from frugalvit.calibrate import MARK, CosinePromise, LabelPromise
from frugalvit.cli import main
from frugalvit.common.choices import SUBSET
from frugalvit.common.data import load_images
from frugalvit.common.decoding import decode_image
from frugalvit.common.labels import class_names
from frugalvit.common.risk import choose_confidence, most_wrong, stop_when_sure


# Of few images, much can be promised at most.
PROMISE = ["--disagreement", "0.1", "--certainty", "0.8"]
FOUND = {"confidence": 0.5, "disagreement": 0.02, "certainty": 0.95, "images": 500, "reference": "16 tokens"}


def config(**fields) -> PatchSparseFormerConfig:
    names = class_names(load_images(SUBSET, "test[:1]"))
    options = {
        **{"image_size": 32, "patch_size": 4, "num_latent_tokens": 16, "elastic_token_counts": [4, 9, 16]},
        **{"hidden_size": 32, "focusing_hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}},
    }
    return PatchSparseFormerConfig(**{**options, **fields})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model that is more or less sure."""
    torch.manual_seed(0)
    model = SparseFormerForImageClassification(config()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        model.classifier.weight *= 20
        # Numbers of tokens differ in what they see more than in what they are.
        model.base_model.latents.token_embedding *= 0.3
    output = tmp_path_factory.mktemp("elastic") / "model"
    model.save_pretrained(output)
    return output


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("images")
    for index, record in enumerate(load_images(SUBSET, "test[:48]")):
        decode_image(record["image"], index).save(output / f"{index:02}.png")
    return output


def calibrate(folder, images, *arguments, capsys) -> dict:
    command = ["calibrate", str(folder), "--dataset", str(images), "--device", "cpu", "--json"]
    assert main([*command, *PROMISE, *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("images", "risk", "certainty"),
    [(500, 0.02, 0.95), (148, 0.02, 0.95), (149, 0.02, 0.95), (40, 0.3, 0.9), (9, 0.5, 0.5)],
)
def test_as_many_may_be_wrong_as_would_be_chance(images, risk, certainty):
    def tail(most: int) -> float:
        return sum(math.comb(images, k) * risk**k * (1 - risk) ** (images - k) for k in range(most + 1))

    most = most_wrong(images, risk, certainty)
    assert tail(most) <= 1 - certainty < tail(most + 1)


def test_the_promise_is_broken_seldom():
    """Promises from small samples are kept in a population whose every label is known, and images do stop early."""
    generator = torch.Generator().manual_seed(0)
    strong = 4 * torch.randn(20_000, 5, generator=generator)
    weak = strong + 1.5 * torch.randn(20_000, 5, generator=generator)
    logits, labels = {4: weak, 16: strong}, strong.argmax(1)
    broken, early, chosen = 0, 0.0, {}
    for _ in range(100):
        sample = torch.randperm(len(labels), generator=generator)[:200]
        confidence = choose_confidence(
            {count: each[sample] for count, each in logits.items()},
            labels[sample],
            0.05,
            0.9,
            [1, 0.95, 0.9, 0.8, 0.6, 0.4],
        )
        if confidence not in chosen:
            found, looks = stop_when_sure(logits, confidence)
            chosen[confidence] = (found != labels).float().mean().item(), (looks == 1).float().mean().item()
        broken += chosen[confidence][0] > 0.05
        early += chosen[confidence][1] / 100
    assert len(chosen) > 1 and any(risk > 0.05 for risk, _ in chosen.values())
    assert 0 < broken <= 10 and early > 0.3
    # With none that is safe, nothing is promised.
    assert choose_confidence(logits, (labels + 1) % 5, 0.05, 0.9) is None


@pytest.mark.parametrize("looks", [[4, 16], [4, 9, 16]])
def test_looks_are_those_of_the_model(looks, folder):
    model = SparseFormerForImageClassification.from_pretrained(folder).eval()
    pixel_values = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = {count: model(pixel_values, num_tokens=count).logits for count in looks}
    confidence = logits[4].softmax(-1).amax(-1).median().item()
    expected = model.classify_adaptively(pixel_values, confidence, looks)
    labels, numbers = stop_when_sure(logits, confidence)
    assert labels.tolist() == expected.logits.argmax(-1).tolist()
    assert [looks[number - 1] for number in numbers] == expected.num_tokens.tolist()
    assert len({*numbers.tolist()}) > 1


def test_what_is_found_stays_with_the_model(folder, images, tmp_path, capsys):
    output = tmp_path / "calibrated"
    found = calibrate(folder, images, "--output", output, capsys=capsys)
    calibration = found["calibration"]
    assert calibration["token_counts"] == [4, 16] and calibration["images"] == 48
    assert 0 < calibration["confidence"] < 1 and 0 < found["shares"]["4"] < 1
    model = SparseFormerForImageClassification.from_pretrained(output)
    assert model.config.calibration == calibration
    pixel_values = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    own, given = (
        model.classify_adaptively(pixel_values),
        model.classify_adaptively(pixel_values, calibration["confidence"]),
    )
    assert (own.confidence, own.disagreement) == (calibration["confidence"], 0.1) and given.disagreement is None
    assert torch.equal(own.logits, given.logits)
    # So few images got another label than from all tokens.
    command = ["predict", str(images), "--device", "cpu", "--json", "--top", "1", "--model"]
    labels = []
    for arguments in ([str(output), "--confidence", "calibrated"], [str(folder)]):
        assert main([*command, *arguments]) in (0, None)
        labels.append(
            [(image["labels"][0]["label"], image.get("num_tokens")) for image in json.loads(capsys.readouterr().out)]
        )
    wrong = sum(few[0] != most[0] for few, most in zip(*labels, strict=True))
    assert wrong <= most_wrong(48, 0.1, 0.8)
    assert sum(few[1] == 4 for few in labels[0]) / 48 == pytest.approx(found["shares"]["4"])
    # The card says it, once, also where the model's own folder is written again.
    again = calibrate(output, images, "--token-counts", 4, 9, 16, "--output", output, "--overwrite", capsys=capsys)
    card = (output / "README.md").read_text()
    assert card.count(MARK) == 1 and "looks with 4 tokens first, and with 9, then 16" in card
    assert "At most 10.0% of images get another label than from 16 tokens, with a certainty of 80%" in card
    assert card.startswith("---\n") and card.startswith((folder / "README.md").read_text().rstrip())
    assert json.loads((output / "config.json").read_text())["calibration"] == again["calibration"]


def test_a_teacher_has_the_labels_that_count(folder, images, tmp_path, capsys):
    """The teacher's classes may have another order. Its labels differ from those of all tokens where the weights
    do."""
    teacher = SparseFormerForImageClassification.from_pretrained(folder)
    names = teacher.config.id2label
    teacher.config.id2label = {index: names[9 - index] for index in range(10)}
    teacher.config.label2id = {name: index for index, name in teacher.config.id2label.items()}
    with torch.no_grad():
        for parameter in teacher.classifier.parameters():
            parameter.copy_(parameter.flip(0))
    teacher.save_pretrained(tmp_path / "teacher")
    alone = calibrate(folder, images, capsys=capsys)["calibration"]
    taught = calibrate(folder, images, "--teacher", tmp_path / "teacher", capsys=capsys)["calibration"]
    assert taught == {**alone, "reference": "its teacher"}
    with torch.no_grad():
        teacher.classifier.bias += torch.linspace(-50, 50, 10)
    teacher.save_pretrained(tmp_path / "teacher")
    command = ["calibrate", str(folder), "--dataset", str(images), "--teacher", str(tmp_path / "teacher"), *PROMISE]
    assert main([*command, "--device", "cpu"]) == 1
    assert "of the images get another label than from its teacher" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [lambda model: model.train(), lambda model: model.resize_tokens(9), lambda model: model.set_num_tokens(9)],
    ids=["trained", "resized", "fewer tokens"],
)
def test_what_ends_a_calibration(change):
    model = SparseFormerForImageClassification(config(calibration={**FOUND, "token_counts": [4, 16]})).eval()
    pixel_values = torch.randn(2, 3, 32, 32)
    assert model.classify_adaptively(pixel_values).disagreement == 0.02
    assert model.classify_adaptively(pixel_values, token_counts=[9, 16]).disagreement is None
    change(model)
    found = model.eval().classify_adaptively(pixel_values)
    assert (found.confidence, found.disagreement) == (0.9, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"confidence": None}, "confidence=None, expected a float"),
        ({"disagreement": 2}, "disagreement=2, expected a number from 0 to 1"),
        ({"token_counts": [16]}, "expected two or more increasing counts"),
        ({"token_counts": [4, 25]}, "up to `num_latent_tokens`=16"),
    ],
)
def test_calibrations_that_make_no_sense(fields, message):
    with pytest.raises(StrictDataclassClassValidationError, match=message):
        config(calibration={**FOUND, "token_counts": [4, 16], **fields})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--disagreement", "0.001"], "48 images are too few for a disagreement of 0.001"),
        (["--disagreement", "2"], "got '2', expected a number above 0 and below 1"),
        (["--token-counts", "16", "4"], "expected two or more, each larger than the one before"),
        (["--token-counts", "4", "9"], "--token-counts ends with 9, expected 16"),
        (["--cosine", "1"], "got '1', expected a number above 0 and below 1"),
        (["--cosine", "0.9", "--teacher", str(checkpoint_path("cifar10-vit"))], "--teacher: its embeddings have"),
        (["--token-counts", "4", "17"], "`num_tokens` is 17, expected 1 to 16"),
        (["--model", "cifar10-sparseformer"], "needs a model for several counts"),
        (["--model", "cifar10-vit"], "is for SparseFormers"),
        (["--teacher", str(checkpoint_path("caltech101-sparseformer"))], "--teacher: "),
    ],
)
def test_what_cannot_be_calibrated(arguments, message, folder, images, tmp_path, capsys):
    model = [] if "--model" in arguments else ["--model", str(folder)]
    command = ["calibrate", *model, "--dataset", str(images), "--device", "cpu", "--output", str(tmp_path / "output")]
    try:
        code = main([*command, *PROMISE, *arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code in (1, 2) and message in captured.err and "Traceback" not in captured.err
    assert not (tmp_path / "output").exists()


def test_a_calibration_that_saves_nothing_is_refused(folder):
    """Where few tokens give other labels with any confidence, nearly all images need both looks."""
    model = SparseFormerForImageClassification.from_pretrained(folder).eval()
    logits = {count: torch.randn(200, 10, generator=torch.Generator().manual_seed(count)) for count in (4, 16)}
    with pytest.raises(ValueError, match="would cost 1.* times as much as 16 tokens"):
        LabelPromise(0.02, 0.95).find(model, logits, logits[16].argmax(1), "16 tokens")


def test_the_fewest_tokens_embed_nearly_as_all_do(folder, images, tmp_path, capsys):
    """The promise holds on the images that it was found on, and would not hold for fewer tokens. The folder computes
    with the number of tokens that was found, and its card says so."""
    paths = sorted(images.iterdir())
    found = {count: np.stack([*Embedder(folder, num_tokens=count, device="cpu")(paths)]) for count in (4, 9, 16)}
    cosines = {count: F.cosine_similarity(*map(torch.from_numpy, (each, found[16]))) for count, each in found.items()}
    # So many images may be farther: of 9 tokens, no more are.
    allowed = most_wrong(48, 0.1, 0.8)
    least = cosines[9].sort().values[allowed].item() - 1e-4
    assert (cosines[9] < least).sum() <= allowed < (cosines[4] < least).sum()
    output = tmp_path / "calibrated"
    report = calibrate(folder, images, "--cosine", least, "--output", output, capsys=capsys)
    assert report["num_tokens"] == 9 and report["saved"] > 1.2
    for count, mean in report["cosines"].items():
        assert mean == pytest.approx(cosines[int(count)].mean().item(), abs=1e-4)
    model = SparseFormerForImageClassification.from_pretrained(output)
    assert model.config.default_num_tokens == 9 and model.config.calibration is None
    embeddings = np.stack([*Embedder(output, device="cpu")(paths)])
    np.testing.assert_allclose(embeddings, found[9], rtol=1e-4, atol=1e-5)
    card = (output / "README.md").read_text()
    assert f"{MARK} With 9 tokens" in card and f"whose cosine with that of 16 tokens is below {least:g}" in card
    # Its teacher's embeddings count, which are its own here.
    again = calibrate(folder, images, "--cosine", least, "--teacher", folder, capsys=capsys)
    assert again["calibration"]["reference"] == "its teacher" and again["cosines"] == report["cosines"]


def test_not_even_all_tokens_may_be_enough(folder):
    model = SparseFormerForImageClassification.from_pretrained(folder).eval()
    embeddings = {count: torch.randn(200, 8, generator=torch.Generator().manual_seed(count)) for count in (4, 16)}
    with pytest.raises(ValueError, match="all tokens, .* a cosine below 0.9"):
        CosinePromise(0.02, 0.95, 0.9).find(model, embeddings, torch.ones(200, 8), "its teacher")


def test_an_uncalibrated_model_says_so(folder, images, capsys):
    assert main(["predict", str(images), "--model", str(folder), "--confidence", "calibrated", "--device", "cpu"]) == 1
    assert "the model was not calibrated for 16 tokens" in capsys.readouterr().err
