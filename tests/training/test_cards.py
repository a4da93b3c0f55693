"""Cards of recipes: what the hub reads of them, and what of this machine it must not."""

import pytest
from huggingface_hub import ModelCard, ModelCardData

from frugalvit.training import bootstrap
from frugalvit.training.components.cards import add_table, hub_ids, license_of
from frugalvit.validation import check_card


def save_card(folder, **data):
    folder.mkdir(exist_ok=True)
    ModelCard(f"---\n{ModelCardData(**data).to_yaml()}\n---\n\n# Title\n").save(folder / "README.md")


def test_a_bootstrapped_model_can_be_published_as_it_is(teacher, tmp_path):
    """With the license of its teacher, the score on what it was evaluated on, and a table of both."""
    save_card(teacher, license="mit")
    argv = ["--teacher", teacher, "--output", tmp_path / "out", "--train-split", "train[:32]", "--batch-size", "16"]
    small = "stem_channels=8,num_mixed_points=4,mixing_hidden_size=8,focusing_hidden_size=16"
    argv += ["--eval-split", "test[:16]", "--epochs", "1", "--config-overrides", small]
    bootstrap.main([str(text) for text in argv])
    assert not check_card(tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license, card.data.datasets) == ("mit", ["uoft-cs/cifar10"])
    [result] = card.data.eval_results
    assert (result.dataset_type, result.dataset_split) == ("uoft-cs/cifar10", "test[:16]")
    assert f"bootstrapped from {teacher.name} " in card.text
    assert card.text.count("## Beside the teacher") == 1 and "| student |" in card.text


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
