"""Run the notebooks of published model folders and of docs/."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image

import frugalvit
from frugalvit.modeling.notebook import PICTURE, write_notebook
from tiny import randomize


ROOT = Path(__file__).parents[1]
DOG = str(ROOT / "docs" / "dog.png")
SIZES = {
    **{"image_size": 32, "num_latent_tokens": 16, "elastic_token_counts": [4, 16], "num_hidden_layers": 1},
    **{"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64},
}


def execute(file: Path, replaced: dict[str, str], folder: Path) -> list[str]:
    """Replace texts in a notebook's cells, run the notebook in a folder, and return the output of each cell."""
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        for old, new in replaced.items():
            cell.source = cell.source.replace(old, new)
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(folder)}}).execute()
    return [str(cell.get("outputs", "")) for cell in notebook.cells]


@pytest.mark.parametrize(
    "model_class, config",
    [
        (frugalvit.PatchSparseFormerForImageClassification, frugalvit.PatchSparseFormerConfig(patch_size=4, **SIZES)),
        (frugalvit.SparseFormerModel, frugalvit.SparseFormerConfig(stem_channels=8, **SIZES)),
    ],
)
def test_the_notebook_of_a_folder_runs_there(model_class, config, tmp_path):
    model = randomize(model_class(config))
    model.save_pretrained(tmp_path)
    write_notebook(model, tmp_path, ".")
    shown = execute(tmp_path / "notebook.ipynb", {PICTURE: DOG}, tmp_path)
    assert len(shown) == 6
    assert ("LABEL_1" if "Classification" in model_class.__name__ else "(1, 17, 32)") in shown[3]
    assert "   4 tokens" in shown[4] and "  16 tokens" in shown[4]
    assert "image/png" in shown[5]


@pytest.mark.nightly
def test_ten_photographs_make_a_student(tmp_path):
    for number in range(10):
        Image.open(DOG).rotate(9 * number).save(tmp_path / f"{number}.png")
    replaced = {"facebook/dinov2-small-imagenet1k-1-layer": str(frugalvit.checkpoint_path("cifar10-vit"))}
    replaced |= {'"photographs"': repr(str(tmp_path)), '"student"': repr(str(tmp_path / "student"))}
    shown = execute(ROOT / "docs" / "ten_photographs.ipynb", replaced, tmp_path)
    assert "64 tokens: the teacher's label on" in shown[3] and "image/png" in shown[4]
