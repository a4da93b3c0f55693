"""`frugalvit publish`: half the bytes, the same model."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForImageClassification

import frugalvit
from frugalvit import publish


CARDS = Path(__file__).parents[1] / "model_cards"


@pytest.fixture
def trained(tmp_path):
    torch.manual_seed(0)
    config = frugalvit.SparseFormerConfig(
        image_size=32,
        num_latent_tokens=4,
        stem_channels=8,
        focusing_hidden_size=16,
        hidden_size=32,
        num_hidden_layers=1,
    )
    frugalvit.SparseFormerForImageClassification(config).save_pretrained(tmp_path / "trained")
    (tmp_path / "trained" / "README.md").write_text("A card with results.", encoding="utf-8")
    return tmp_path / "trained"


def test_stores_half_precision_that_loads_as_float32(trained, tmp_path):
    publish.main([str(trained), str(tmp_path / "out")])
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as weights:
        dtypes = {name: weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert {name for name, dtype in dtypes.items() if dtype == "F32"} == {"sparseformer.latents.initial_rois"}
    assert set(dtypes.values()) == {"F16", "F32"}
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    original = AutoModelForImageClassification.from_pretrained(trained)
    for name, parameter in original.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-3, atol=1e-6)
    assert (tmp_path / "out" / "README.md").read_text(encoding="utf-8") == "A card with results."
    assert (tmp_path / "out" / "modeling_sparseformer.py").is_file()


def test_uploads_once(trained, tmp_path, monkeypatch):
    uploads = []

    class Hub:
        def __init__(self, token=None):
            pass

        def create_repo(self, repo_id, private=None, exist_ok=False):
            return SimpleNamespace(repo_id=f"someone/{repo_id}")

        def upload_folder(self, **arguments):
            uploads.append(arguments)

    monkeypatch.setattr("frugalvit.modeling.hub.HfApi", Hub)
    publish.main([str(trained), str(tmp_path / "out"), "--repo-id", "model"])
    assert [(upload["repo_id"], upload["folder_path"]) for upload in uploads] == [
        ("someone/model", str(tmp_path / "out"))
    ]


def test_refuses_a_folder_with_something_in_it(trained, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="not empty"):
        publish.main([str(trained), str(tmp_path / "out")])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("card", sorted(CARDS.glob("*.md")), ids=lambda card: card.stem)
def test_shipped_models_carry_their_cards_and_fit_into_the_repository(card):
    folder = frugalvit.checkpoint_path(card.stem)
    assert (folder / "README.md").read_text(encoding="utf-8") == card.read_text(encoding="utf-8")
    assert sum(path.stat().st_size for path in folder.iterdir()) < 8e6
