"""Students whose tokens are placed by content, from the command on."""

import json

import pytest
import torch
from transformers import AutoModelForImageClassification

from frugalvit.training import bootstrap


def run(teacher, output_dir, *arguments) -> dict:
    bootstrap.main(
        [
            *("--teacher", str(teacher), "--output", str(output_dir), "--focusing", "inherited", "--no-compare"),
            *("--train-split", "train[:64]", "--eval-split", "test[:32]", "--batch-size", "16", "--epochs", "1"),
            *arguments,
        ]
    )
    return json.loads((output_dir / "results.json").read_text())


@pytest.fixture(scope="module")
def trained(teacher, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trees") / "out"
    run(
        teacher,
        folder,
        *("--placement", "content", "--placement-rule", "contrast", "--elastic-token-counts", "5", "9"),
    )
    return folder


def test_trees_are_trained_and_loaded_again(trained):
    results = json.loads((trained / "results.json").read_text())
    student = AutoModelForImageClassification.from_pretrained(trained)
    config = student.config
    assert (config.placement, config.placement_rule) == ("content", "contrast")
    assert config.elastic_token_counts == [4, 7] and {"accuracy_4", "accuracy_7"} <= results["epochs"][-1].keys()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    rois = student(images, output_rois=True).rois[-1]
    assert rois.shape == (2, 7, 4)
    assert "4, 7 latent tokens" in (trained / "README.md").read_text(encoding="utf-8")


def test_a_trained_grid_goes_on_as_trees(teacher, tmp_path):
    run(teacher, tmp_path / "grid", "--num-latent-tokens", "16")
    options = ("--placement", "content", "--elastic-token-counts", "7", "16")
    run(teacher, tmp_path / "trees", "--student", str(tmp_path / "grid"), *options)
    config = AutoModelForImageClassification.from_pretrained(tmp_path / "trees").config
    assert (config.placement, config.elastic_token_counts) == ("content", [7, 16])


@pytest.mark.parametrize("arguments", [("--focusing", "paper"), ("--focusing", "inherited", "--glance", "4")])
def test_trees_belong_to_an_inherited_start(arguments, teacher, tmp_path, capsys):
    with pytest.raises(SystemExit):
        bootstrap.main(
            ["--teacher", str(teacher), "--output", str(tmp_path / "out"), "--placement", "content", *arguments]
        )
    assert "--placement is 'content', expected grid without" in capsys.readouterr().err
