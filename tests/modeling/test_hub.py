"""Tests of saved folders as hub repositories: loading without frugalvit, model card, fine-tuning and upload."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from PIL import Image
from processes import run_without_frugalvit
from safetensors.torch import load_file, save, save_file
from transformers import dynamic_module_utils

from frugalvit.modeling.hub import source_files
from kinds import KINDS, main_output


TASKS = {
    "ForImageClassification": "AutoModelForImageClassification",
    "ForSemanticSegmentation": "AutoModelForSemanticSegmentation",
}
# Files of a saved folder that are not code.
OTHER_FILES = {"README.md", "config.json", "model.safetensors", "preprocessor_config.json"}
OTHER_FILES |= {"modules.json", "sentence_bert_config.json"}


def assert_same(output: torch.Tensor, expected: torch.Tensor, name: str):
    # A segmentation head multiplies a matrix by a vector. The rounding depends on the vector's memory address.
    tolerance = 2e-7 if "Segmentation" in name else 0
    torch.testing.assert_close(
        output, expected, atol=tolerance, rtol=tolerance, msg=lambda message: f"{name}: {message}"
    )


def code_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).glob("*.py")}


def folder_name(kind: str, model_class=None) -> str:
    """Return the name of the folder that has the model of a kind and a class. The default class is the classifier."""
    return f"{kind}-{(model_class or KINDS[kind].classifier).__name__}"


def auto_class(model_class) -> str:
    return next((TASKS[task] for task in TASKS if model_class.__name__.endswith(task)), "AutoModel")


# Loading is slow, so tests load the classifier of each kind, and other classes only for two kinds.
FEW = [(kind, KINDS[kind].classifier, "AutoModelForImageClassification") for kind in KINDS]
FEW += [(kind, each, auto_class(each)) for kind in ("bootstrapped", "patches") for each in KINDS[kind].classes[3:]]


@pytest.fixture(scope="module")
@torch.no_grad()
def saved(tmp_path_factory, make_model, pixel_values) -> tuple[Path, dict[str, torch.Tensor]]:
    """Save a model of each class of each kind. Return the parent folder and the output of each model by name."""
    root, outputs = tmp_path_factory.mktemp("saved"), {}
    for kind in KINDS:
        for model_class in KINDS[kind].classes:
            name = folder_name(kind, model_class)
            model = make_model(model_class, kind)
            model.save_pretrained(root / name)
            outputs[name] = main_output(model(pixel_values))
            outputs[f"{name}/AutoModel"] = main_output(model.base_model(pixel_values))
    return root, outputs


def test_loads_and_computes_the_same_without_the_package(saved, pixel_values, tmp_path):
    root, expected = saved
    save_file({"pixel_values": pixel_values}, tmp_path / "inputs.safetensors")
    jobs = {}
    for kind, model_class, loader in FEW:
        name = folder_name(kind, model_class)
        inputs = {"source": str(root / name), "inputs": str(tmp_path / "inputs.safetensors")}
        jobs[f"{name}/{loader}"] = inputs | {"loader": loader}
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    run_without_frugalvit(tmp_path, "load", tmp_path / "jobs.json", tmp_path / "results")
    report = json.loads((tmp_path / "results" / "report.json").read_text())
    outputs = load_file(tmp_path / "results" / "outputs.safetensors")
    for kind, model_class, loader in FEW:
        name = folder_name(kind, model_class)
        found = report[f"{name}/{loader}"]
        whole = loader != "AutoModel" or name.endswith("WithProjection")
        expected_class = model_class if whole else KINDS[kind].base
        assert found["class"] == expected_class.__name__ and found["module"].startswith("transformers_modules.")
        assert found["config_class_is_the_models"] and found["dtype"] == "torch.float32"
        segments = name.endswith("ForSemanticSegmentation")
        assert found["processor"].startswith("SegformerImageProcessor" if segments else "ViTImageProcessor")
        assert_same(outputs[f"{name}/{loader}"], expected[name if whole else f"{name}/AutoModel"], name)


@pytest.mark.parametrize("kinds", [["patches"], pytest.param(list(KINDS), marks=pytest.mark.nightly)])
@torch.no_grad()
def test_fine_tuned_remote_code(kinds, saved, tmp_path):
    """`Trainer` fine-tunes a saved model in a process that cannot import frugalvit. The checkpoints contain the
    model's code. A resumed run gives the same logits as an uninterrupted run. The result also loads with frugalvit."""
    run_without_frugalvit(tmp_path, "fine_tune", tmp_path, *(saved[0] / folder_name(kind) for kind in kinds))
    for kind in kinds:
        folder = tmp_path / folder_name(kind)
        logits = load_file(folder / "logits.safetensors")
        for each in (folder / "saved", *(folder / "checkpoints").iterdir()):
            assert code_of(each) == code_of(saved[0] / folder_name(kind))
            assert {*os.listdir(each)} >= {*os.listdir(saved[0] / folder_name(kind))}
        assert not torch.equal(logits["trained"], logits["trained from"])
        for name in ("resumed", "saved", "checkpoints/checkpoint-4"):
            assert torch.equal(logits[name], logits["trained"]), name
        model = transformers.AutoModelForImageClassification.from_pretrained(folder / "saved")
        assert type(model) is KINDS[kind].classifier
        assert torch.equal(main_output(model(logits["pixel_values"])), logits["trained"])


# Users of a hub repository have to trust its code, so a classifier is saved without the code of other tasks.
CLASSIFIER_FILES = {
    "patches": "configuration_base configuration_patch_sparseformer modeling_patch_sparseformer hub layers placement",
    "bootstrapped": "configuration_base configuration_sparseformer modeling_sparseformer focusing hub layers",
}


@pytest.mark.parametrize("kind", CLASSIFIER_FILES)
def test_a_saved_classifier_has_only_the_code_that_it_runs(kind, saved):
    assert sorted(code_of(saved[0] / folder_name(kind))) == sorted(
        f"{name}.py" for name in CLASSIFIER_FILES[kind].split()
    )


class TestFolder:
    def test_a_folder_has_all_source_files_and_no_others(self, kind, saved):
        """Relative imports reach every source file. The code needs only torch, transformers and huggingface_hub."""
        for model_class in KINDS[kind].classes:
            folder = saved[0] / folder_name(kind, model_class)
            entry = f"{model_class.__module__.rpartition('.')[2]}.py"
            reached = dynamic_module_utils.get_relative_import_files(folder / entry)
            assert {*os.listdir(folder)} == {*OTHER_FILES, entry, *(Path(path).name for path in reached)}
            for path in folder.glob("*.py"):
                # Transformers requires all packages that remote code imports, except imports inside `try`.
                needed = {*dynamic_module_utils.get_imports(path)} - {*sys.stdlib_module_names}
                assert needed <= {"torch", "transformers", "huggingface_hub"}

    @torch.no_grad()
    def test_the_code_of_the_card_loads_the_model(self, kind, saved, pixel_values):
        for model_class in KINDS[kind].classes:
            folder = saved[0] / folder_name(kind, model_class)
            card = ModelCard.load(folder / "README.md")
            assert card.data.library_name == "transformers"
            code = card.text.split("```python\n")[1].split("```")[0].replace("path/or/id", str(folder))
            names = {"image": Image.new("RGB", (48, 40), "red")}
            exec(code, names)
            # `AutoModel` loads a saved vision model as the family's base model.
            as_base = model_class.__name__.endswith("SparseFormerVisionModel")
            assert type(names["model"]).__name__ == (KINDS[kind].base if as_base else model_class).__name__
            assert_same(main_output(names["model"](pixel_values)), saved[1][folder.name], folder.name)


def test_an_upload_has_all_files_but_keeps_a_card_on_the_hub(make_model, hub, tmp_path):
    """An upload contains the saved files and no other files of the folder. It does not overwrite a model card."""
    kind, model = KINDS["bootstrapped"], make_model("classifier", "bootstrapped")
    assert model.push_to_hub("someone/model", commit_message="Mine", private=True, revision="dev").oid == "0"
    assert hub.created[0]["name"] == "model" and hub.branches == ["dev"]
    # Newer versions of huggingface_hub send `visibility` instead of `private`.
    assert hub.created[0].get("visibility") == "private" or hub.created[0].get("private")
    hub.files.append("README.md")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("private")
    model.save_pretrained(tmp_path / "model", push_to_hub=True, repo_id="someone/other")
    (path, commit, files), (other_path, _, other_files) = hub.commits
    assert path == "/api/models/someone/model/commit/dev" and commit["summary"] == "Mine"
    assert {*files} == OTHER_FILES | source_files(kind.classifier.__module__).keys() | {"notebook.ipynb"}
    assert {*other_files} == {*files} - {"README.md"}
    assert b'from_pretrained(\\"someone/model\\"' in files["notebook.ipynb"]
    assert f"# {kind.classifier.__name__}" in ModelCard(files["README.md"].decode()).text
    assert files["model.safetensors"] == save(model.state_dict(), {"format": "pt"})
    assert other_path == "/api/models/someone/other/commit/main"
