"""The number of tokens, chosen on the command line of `frugalvit predict` and `frugalvit evaluate`."""

import json

import pytest

from frugalvit.cli import main
from frugalvit.training.files import shipped_images


MODEL, IMAGES = "caltech101-sparseformer", str(shipped_images("caltech101") / "test.parquet")
COUNTS = (9, 64)


def run(command: str, *arguments, capsys) -> list[dict] | dict:
    assert main([*command.split(), "--model", MODEL, "--limit", "12", "--json", *map(str, arguments)]) in (0, None)
    return json.loads(capsys.readouterr().out)


def test_sure_images_take_few_tokens(capsys):
    predict = f"predict {IMAGES} --top 1"
    by_count = {count: run(predict, "--num-tokens", count, capsys=capsys) for count in COUNTS}
    assert by_count[9][0]["num_tokens"] is None and by_count[64] == run(predict, capsys=capsys)
    confidence = sorted(image["labels"][0]["score"] for image in by_count[9])[6]
    found = run(predict, "--confidence", confidence, capsys=capsys)
    assert {image["num_tokens"] for image in found} == {*COUNTS}
    for index, image in enumerate(found):
        expected = by_count[image["num_tokens"]][index]["labels"][0]
        assert image["labels"][0] == {"label": expected["label"], "score": pytest.approx(expected["score"], rel=1e-4)}
