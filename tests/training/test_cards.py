"""Cards of trainings: the fields that the hub reads, and the names of this machine that it must not."""

import json

import pytest
from huggingface_hub import ModelCard, ModelCardData
from PIL import Image

from frugalvit import publish
from frugalvit.common.names import portable_command
from frugalvit.training import bootstrap, train
from frugalvit.training.components.arguments import DataArguments, RunArguments
from frugalvit.training.components.cards import add_table, choice_of_epoch, hub_ids, license_of, say_license
from frugalvit.training.components.checkpoints import TrainingState


def save_card(folder, **data):
    folder.mkdir(exist_ok=True)
    ModelCard(f"---\n{ModelCardData(**data).to_yaml()}\n---\n\n# Title\n").save(folder / "README.md")


def test_a_bootstrapped_model_can_be_published_as_it_is(teacher, tmp_path):
    """The model's card has its teacher's license, the score on the evaluation images, and a table of both models."""
    save_card(teacher, license="mit")
    argv = ["--teacher", teacher, "--output", tmp_path / "out", "--train-split", "train[:32]", "--batch-size", "16"]
    small = "stem_channels=8,num_mixed_points=4,mixing_hidden_size=8,focusing_hidden_size=16"
    argv += ["--eval-split", "test[:16]", "--epochs", "1", "--config-overrides", small]
    bootstrap.main([str(text) for text in argv])
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license, card.data.datasets) == ("mit", ["uoft-cs/cifar10"])
    [result] = card.data.eval_results
    assert (result.dataset_type, result.dataset_split) == ("uoft-cs/cifar10", "test[:16]")
    best = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))["best"]
    assert result.metric_value == round(best["accuracy"], 4) != 0.5
    assert f"bootstrapped from {teacher.name} " in card.text
    assert card.text.count("## Beside the teacher") == 1 and "| student |" in card.text


def test_nothing_of_this_machine_is_in_what_is_published(teacher, imported_once, tmp_path, capsys):
    """Neither card nor configuration names a place, whatever the command named."""
    images = tmp_path / "my photographs"
    for part, count in (("train", 12), ("val", 4), ("test", 6)):
        for index in range(count):
            (images / part / "ab"[index % 2]).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (20 * index, 0, 0)).save(images / part / "ab"[index % 2] / f"{index}.png")
    run = ["--model", teacher, "--dataset", images, "--output", tmp_path / "out", "--license", "mit"]
    run += ["--epochs", "2", "--batch-size", "6", "--crop", "resized", "--num-workers", "0"]
    train.main([str(text) for text in run])
    # Chosen on the one, measured on the other.
    line = "epoch 1 of 2, chosen on validation (4 images), measured on test (6 images)"
    card = ModelCard.load(tmp_path / "out" / "README.md")
    best = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))["best"]
    line = line.replace("epoch 1", f"epoch {best['epoch']}")
    assert line in card.text and line in capsys.readouterr().out
    assert f"accuracy {best['test_accuracy']:.2%} of 6 images" in card.text
    [result] = card.data.eval_results
    assert (result.dataset_type, result.dataset_name, result.dataset_split) == ("images", "images", "test")
    assert result.metric_value == round(best["test_accuracy"], 4) and card.data.base_model is None
    assert f"--model {teacher.name} --dataset path/to/images --output out" in card.text
    publish.main([str(tmp_path / "out"), "--output", str(tmp_path / "published")])
    for file in (tmp_path / "published").iterdir():
        content = file.read_bytes()
        assert not [each for each in (str(tmp_path), "my photographs", str(teacher)) if each.encode() in content]


@pytest.mark.parametrize(
    ("given", "portable"),
    [
        ("--dataset /data/a /data/b --output /data/runs/out", "--dataset path/to/images path/to/images --output out"),
        ("--dataset=/data/a", "--dataset=path/to/images"),
        ("--teacher open_clip:local-dir:/models/clip", "--teacher open_clip:local-dir:clip"),
        ("--teacher ~/models/vit --config ../c.yaml", "--teacher vit --config c.yaml"),
        ("--prompt 'USER: {image}\n{question} yes/no'", "--prompt 'USER: {image}\n{question} yes/no'"),
        ("--model owner/name --epochs 3", "--model owner/name --epochs 3"),
    ],
)
def test_commands_that_others_can_give(given, portable):
    assert portable_command(f"frugalvit train {given}", ["/data/a", "/data/b"]) == f"frugalvit train {portable}"


def test_a_missing_license_is_said_when_training_begins(tmp_path, capsys):
    run = RunArguments(output_dir="out")
    save_card(tmp_path, license="mit")
    save_card(tmp_path / "none")
    for license, base, said in (
        *((None, None, True), (None, str(tmp_path / "none"), True)),
        *(("mit", None, False), (None, str(tmp_path), False)),
    ):
        run.license = license
        say_license(run, base)
        assert ("The card will name no license" in capsys.readouterr().out) == said


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (["owner/name@main"], ["owner/name"]),
        (["cifar10-subset"], ["uoft-cs/cifar10"]),
        (["photographs/train.parquet"], []),
        (["/data/photographs", "owner/name"], ["owner/name"]),
    ],
)
def test_ids_of_data_sets(given, ids, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photographs").mkdir()
    (tmp_path / "photographs" / "train.parquet").touch()
    assert hub_ids(given) == ids


def test_licenses(tmp_path):
    assert license_of(None) is license_of("owner/never-loaded") is license_of("open_clip:ViT-B-16:openai") is None
    assert license_of(str(tmp_path)) is None
    save_card(tmp_path, license="mit")
    assert license_of(str(tmp_path)) == "mit"
    (tmp_path / "README.md").write_text("---\n: [\n---\n", encoding="utf-8")
    assert license_of(str(tmp_path)) is None


def test_a_table_takes_the_place_of_its_earlier_one(tmp_path):
    save_card(tmp_path)
    for accuracy in (0.25, 0.5):
        add_table(tmp_path, "Beside the teacher", [{"model": "student", "accuracy": accuracy}])
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert text.count("## Beside the teacher") == 1 and "0.5" in text and "0.25" not in text and "# Title" in text


@pytest.mark.parametrize(
    ("options", "split", "said"),
    [
        # The one split of a file to evaluate on is not taken for the training images.
        ({"eval_dataset": ["test.parquet"]}, "train", "train of --eval-dataset"),
        ({}, "train, held back", "train, held back"),
    ],
)
def test_the_images_are_named_on_which_an_epoch_was_chosen(options, split, said):
    data = DataArguments(**options)
    data.evaluated = split
    run = RunArguments(output_dir="out", epochs=1)
    run.record = {"images": {"evaluation images": 60}}
    chosen = choice_of_epoch(data, run, TrainingState(1, 4, best={"epoch": 1}))
    assert chosen == f"epoch 1 of 1, chosen and measured on {said} (60 images)"
