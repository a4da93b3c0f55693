"""Saved folders are complete hub repositories: they load where frugalvit is not installed."""

import functools
import json
import os
import shutil
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from packaging import version
from PIL import Image
from processes import run_without_frugalvit
from safetensors.torch import load_file, save, save_file
from transformers.integrations.peft import MIN_PEFT_VERSION

import frugalvit
from frugalvit.modeling import hub
from frugalvit.modeling.hub import HubModel, flatten_imports, source_files
from kinds import KINDS


# Other models that ship, pairs and those with texts, are looked at by test_publish.py.
CHECKPOINTS = sorted(
    path.parent
    for path in Path(__file__).parents[2].glob("checkpoints/*/config.json")
    if json.loads(path.read_text())["model_type"]
    in {"vit", *(kind.config_class.model_type for kind in KINDS.values())}
)
MAIN_OUTPUTS = ("logits", "image_embeds", "last_hidden_state", "feature_maps")


@torch.no_grad()
def main_output(model, pixel_values: torch.Tensor) -> torch.Tensor:
    outputs = model.eval()(pixel_values)
    output = next(outputs[name] for name in MAIN_OUTPUTS if getattr(outputs, name, None) is not None)
    return output[-1] if isinstance(output, tuple) else output


def assert_same(output: torch.Tensor, expected: torch.Tensor, exactly: bool):
    """A segmentation head's product with a single vector rounds by where the vector lies in memory, as a map's do."""
    within = 0 if exactly else 2e-7
    torch.testing.assert_close(output, expected, atol=within, rtol=within)


def code_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).glob("*.py")}


def loaders(kind: str, model_class) -> list[str]:
    """Ways to load what a class saved; `AutoModel` reads the base model out of every folder, but of a projection's."""
    by_name = f"modeling_{KINDS[kind].config_class.model_type}.{model_class.__name__}"
    tasks = {
        "ForImageClassification": "AutoModelForImageClassification",
        "ForSemanticSegmentation": "AutoModelForSemanticSegmentation",
    }
    return [by_name, *(tasks[task] for task in tasks if model_class.__name__.endswith(task)), "AutoModel"]


def folder_name(kind: str, model_class=None) -> str:
    """The name of a saved model's folder; the classifier's if no class is given."""
    return f"{kind}-{(model_class or KINDS[kind].classifier).__name__}"


# The classes of two kinds are those of another one, whose code writes their folders.
CLASSES = {name: kind.classes[:2] if name in ("content", "v1") else kind.classes for name, kind in KINDS.items()}
# Out of the hub's cache, classifiers stand for the other classes, and each way to load them is tried with some.
CASES = [
    *(
        f"local/{folder_name(kind, model_class)}/{loader}"
        for kind in KINDS
        for model_class in CLASSES[kind]
        for loader in loaders(kind, model_class)
    ),
    *(
        f"cached/{folder_name(kind)}/{loaders(kind, KINDS[kind].classifier)[number % 3]}"
        for number, kind in enumerate(KINDS)
    ),
]


@functools.cache
def sum_of_new_weights(kind: str, class_name: str) -> float:
    """As without_frugalvit.py computes it."""
    torch.manual_seed(0)
    weights = getattr(frugalvit, class_name)(KINDS[kind].config()).state_dict().values()
    return sum(weight.double().abs().sum().item() for weight in weights if weight.is_floating_point())


@pytest.fixture(scope="module")
def saved(tmp_path_factory, make_model, pixel_values) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder of saved models of every class and kind, and what each computed before it was saved."""
    root, outputs = tmp_path_factory.mktemp("saved"), {}
    for kind in KINDS:
        for model_class in KINDS[kind].classes:
            name = folder_name(kind, model_class)
            model = make_model(model_class, kind)
            model.save_pretrained(root / name)
            outputs[name] = main_output(model, pixel_values)
            if not name.endswith("WithProjection"):
                outputs[f"{name}/AutoModel"] = main_output(model.base_model, pixel_values)
    return root, outputs


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, saved, pixel_values):
    """Every folder, loaded without frugalvit from the disk and from a cache of the hub: report and outputs."""
    root, _ = saved
    home = tmp_path_factory.mktemp("hub")
    save_file({"pixel_values": pixel_values}, home / "inputs.safetensors")
    for folder in root.iterdir():
        cached = home / "hub" / f"models--tests--{folder.name}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text("0123456789abcdef" * 2 + "01234567")
        shutil.copytree(folder, cached / "snapshots" / ("0123456789abcdef" * 2 + "01234567"))
    jobs = {}
    for case in CASES:
        where, name, loader = case.split("/")
        source = str(root / name) if where == "local" else f"tests/{name}"
        jobs[case] = {"source": source, "loader": loader, "inputs": str(home / "inputs.safetensors")}
    for folder in CHECKPOINTS:
        model = transformers.AutoModelForImageClassification.from_pretrained(folder)
        if isinstance(model, HubModel):
            model.save_pretrained(home / folder.name)
            jobs[folder.name] = {
                "source": str(home / folder.name),
                "loader": "AutoModelForImageClassification",
                "inputs": str(home / "inputs.safetensors"),
            }
    (home / "jobs.json").write_text(json.dumps(jobs))
    run_without_frugalvit(home, "load", home / "jobs.json", home / "results", own_cache=True)
    report = json.loads((home / "results" / "report.json").read_text())
    return report, load_file(home / "results" / "outputs.safetensors")


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory, saved) -> dict[str, Path]:
    """The folders that two rounds of fine-tuning without frugalvit wrote, one for each kind."""
    root, _ = saved
    home = tmp_path_factory.mktemp("fine-tuned")
    run_without_frugalvit(home, "fine_tune", home, *(root / folder_name(kind) for kind in KINDS))
    return {kind: home / folder_name(kind) for kind in KINDS}


class TestWithoutThePackage:
    @pytest.mark.parametrize("case", CASES, ids=CASES)
    def test_loads_and_computes_the_same(self, case, saved, loaded):
        where, name, loader = case.split("/")
        report, outputs = loaded[0][case], loaded[1][case]
        kind = KINDS[name.partition("-")[0]]
        model_class = name.partition("-")[2] if loader.startswith("AutoModelFor") else loader.rpartition(".")[2]
        if loader == "AutoModel":
            saved_class = name.partition("-")[2]
            model_class = saved_class if saved_class.endswith("WithProjection") else kind.base.__name__
        assert report["class"] == model_class
        assert report["module"].startswith("transformers_modules.")
        assert report["config_class_is_the_models"]
        assert report["dtype"] == "torch.float32"
        segments = name.endswith("ForSemanticSegmentation")
        assert report["processor"].startswith("SegformerImageProcessor" if segments else "ViTImageProcessor")
        assert report["pipeline_computes_the_same"]
        new = sum_of_new_weights(name.partition("-")[0], report["class"])
        assert report["sum_of_new_weights"] == pytest.approx(new, rel=1e-5)
        assert_same(outputs, saved[1].get(f"{name}/{loader}", saved[1][name]), exactly=not segments)

    def test_class_names_are_the_same_with_the_package(self, saved, loaded):
        for case, report in loaded[0].items():
            where, _, rest = case.partition("/")
            name, _, loader = rest.partition("/")
            if where == "local" and loader.startswith("Auto"):
                for trust in (True, None):
                    model = getattr(transformers, loader).from_pretrained(saved[0] / name, trust_remote_code=trust)
                    assert type(model).__name__ == report["class"]
                    assert type(model).__module__.startswith("frugalvit.modeling.modeling_")

    def test_fine_tuned_remote_code_keeps_its_files(self, kind, saved, fine_tuned):
        original = code_of(saved[0] / folder_name(kind))
        assert set(original) == KINDS[kind].code
        for name in ("first", "second"):
            for folder in (
                fine_tuned[kind] / name,
                *sorted((fine_tuned[kind] / f"{name}-checkpoints").iterdir()),
            ):
                assert code_of(folder) == original
                assert set(os.listdir(folder)) >= KINDS[kind].complete

    def test_fine_tuned_remote_code_computes_the_same_when_loaded_again(self, kind, fine_tuned):
        logits = load_file(fine_tuned[kind] / "logits.safetensors")
        for name, after in (("first", "second"), ("second", "third")):
            assert torch.equal(logits[name], logits[f"{name} checkpoint"])
            assert torch.equal(logits[name], logits[f"{after} loaded"])
            assert not torch.equal(logits[name], logits[f"{name} loaded"])
        assert torch.equal(logits["second"], logits["resumed"])

    def test_the_package_loads_what_remote_code_saved(self, kind, fine_tuned):
        model = transformers.AutoModelForImageClassification.from_pretrained(fine_tuned[kind] / "second")
        assert type(model) is KINDS[kind].classifier
        torch.manual_seed(0)
        pixel_values = torch.stack([torch.randn(3, 32, 32) for _ in range(2)])
        logits = load_file(fine_tuned[kind] / "logits.safetensors")
        assert torch.equal(main_output(model, pixel_values), logits["second"])

    @pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda folder: folder.name)
    def test_shipped_models_compute_the_same_in_float32(self, folder, loaded, pixel_values):
        model, info = transformers.AutoModelForImageClassification.from_pretrained(folder, output_loading_info=True)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        assert transformers.AutoImageProcessor.from_pretrained(folder) is not None
        if isinstance(model, HubModel):
            assert loaded[0][folder.name]["dtype"] == "torch.float32"
            torch.testing.assert_close(loaded[1][folder.name], main_output(model, pixel_values))


class TestFolder:
    def test_files(self, kind, saved):
        for model_class in KINDS[kind].classes:
            folder = saved[0] / folder_name(kind, model_class)
            assert set(os.listdir(folder)) == KINDS[kind].complete

    def test_code_is_the_flattened_repository(self, kind, saved):
        root = Path(frugalvit.__file__).parents[1]
        sources = {
            path.name: path for folder in ("configuration", "modeling") for path in (root / folder).glob("*.py")
        }
        for name, shipped in code_of(saved[0] / folder_name(kind)).items():
            text = shipped.decode()
            assert text == flatten_imports(sources[name].read_text(encoding="utf-8"))
            assert flatten_imports(text) == text

    def test_code_needs_nothing_but_the_libraries_of_transformers(self, kind, saved):
        # On the hub, Transformers wants every import of every file; it looks into functions, but not into `try`.
        for path in (saved[0] / folder_name(kind)).glob("*.py"):
            needed = set(transformers.dynamic_module_utils.get_imports(path)) - set(sys.stdlib_module_names)
            assert needed <= {"torch", "transformers", "huggingface_hub"}

    def test_classes_derived_elsewhere_ship_the_family(self, kind, make_model, pixel_values, tmp_path):
        class Derived(KINDS[kind].classifier):
            """A class that was derived in a notebook, whose `__main__` has no file."""

        Derived.__module__ = "__main__"
        model = make_model(Derived, kind)
        model.save_pretrained(tmp_path)
        assert set(code_of(tmp_path)) == KINDS[kind].code
        loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
        assert torch.equal(main_output(model, pixel_values), main_output(loaded, pixel_values))

    def test_code_is_the_one_that_was_imported(self, kind, saved, make_model, monkeypatch, tmp_path):
        assert source_files(KINDS[kind].base).keys() == KINDS[kind].code
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: "an edit while the model was training")
        make_model("base", kind).save_pretrained(tmp_path)
        assert code_of(tmp_path) == code_of(saved[0] / folder_name(kind))

    def test_image_processor_is_written_once(self, make_model, tmp_path):
        model = make_model("base", "bootstrapped", resize_size=40)
        model.save_pretrained(tmp_path)
        file = tmp_path / "preprocessor_config.json"
        processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
        assert processor.size["shortest_edge"] == 40
        assert dict(processor.crop_size) == {"height": 32, "width": 32}
        assert tuple(processor.image_mean) == model.config.image_mean
        file.write_text(file.read_text().replace("40", "48"))
        model.save_pretrained(tmp_path)
        assert transformers.AutoImageProcessor.from_pretrained(tmp_path).size["shortest_edge"] == 48

    def test_image_processor_of_rectangular_images_and_one_mean(self, kind, make_model, tmp_path):
        model = make_model("base", kind, image_size=[32, 48], image_mean=0.5, image_std=0.25)
        model.save_pretrained(tmp_path)
        processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
        for mode, white in (("RGB", (255, 255, 255)), ("L", 255), ("RGBA", (255, 255, 255, 255)), ("1", 1)):
            pixel_values = processor(Image.new(mode, (10, 12), white), return_tensors="pt")["pixel_values"]
            assert pixel_values.shape == (1, 3, 32, 48) and pixel_values.unique().tolist() == [2.0]
        assert type(model).from_pretrained(tmp_path).config.image_std == 0.25

    def test_card_says_how_to_load(self, kind, saved, pixel_values):
        for model_class in KINDS[kind].classes:
            folder = saved[0] / folder_name(kind, model_class)
            card = ModelCard.load(folder / "README.md")
            assert card.data.library_name == "transformers"
            code = card.text.split("```python\n")[1].split("```")[0].replace("path/or/id", str(folder))
            names = {"image": Image.new("RGB", (48, 40), "red")}
            exec(code, names)
            # A tower loads by AutoModel, which gives the family's class for it.
            as_base = model_class.__name__.endswith("SparseFormerVisionModel")
            assert type(names["model"]).__name__ == (KINDS[kind].base if as_base else model_class).__name__
            output = main_output(names["model"], pixel_values)
            assert_same(output, saved[1][folder.name], exactly="Segmentation" not in model_class.__name__)

    def test_card_of_a_model_that_fsdp_shares_out(self, make_model):
        model = make_model("classifier", "bootstrapped")
        card = hub.model_card(model)
        model.__class__ = type(f"FSDP{type(model).__name__}", (type(model),), {})
        assert hub.model_card(model).data == card.data and "FSDP" not in hub.model_card(model).text

    @pytest.mark.parametrize("is_main_process", [True, False])
    def test_only_the_main_process_writes_and_keeps_a_card(self, is_main_process, make_model, tmp_path):
        (tmp_path / "README.md").write_text("# Mine\n")
        make_model("base", "bootstrapped").save_pretrained(tmp_path, is_main_process=is_main_process)
        assert ("hub.py" in os.listdir(tmp_path)) == is_main_process
        assert (tmp_path / "README.md").read_text() == "# Mine\n"

    def test_a_file_in_the_place_of_the_folder(self, make_model, tmp_path):
        (tmp_path / "file").write_text("mine")
        make_model("base", "bootstrapped").save_pretrained(tmp_path / "file")
        assert (tmp_path / "file").read_text() == "mine"

    def test_half_precision(self, kind, make_model, pixel_values, tmp_path):
        model, dtype = make_model("classifier", kind), torch.bfloat16
        expected = main_output(model, pixel_values)
        model.to(dtype).save_pretrained(tmp_path)
        half = KINDS[kind].classifier.from_pretrained(tmp_path)
        assert half.dtype == dtype
        if kind in ("bootstrapped", "v1"):
            assert half.base_model.latents.initial_rois.dtype == torch.float32
        assert torch.equal(main_output(half, pixel_values), main_output(model, pixel_values))
        full = KINDS[kind].classifier.from_pretrained(tmp_path, dtype=torch.float32)
        assert full.dtype == torch.float32
        torch.testing.assert_close(main_output(full, pixel_values), expected, atol=0.05, rtol=0.05)


# Transformers may ask for a version of peft that is not out yet.
@pytest.mark.skipif(
    version.parse(peft.__version__) < version.parse(MIN_PEFT_VERSION),
    reason=f"Transformers' own adapters need peft {MIN_PEFT_VERSION}",
)
@pytest.mark.parametrize("kind", ["bootstrapped", "vit_impulse_init"])
def test_an_adapter_is_saved_without_the_code(kind, saved, pixel_values, tmp_path):
    folder = saved[0] / folder_name(kind)
    model = KINDS[kind].classifier.from_pretrained(folder)
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path)
    assert "adapter_model.safetensors" in os.listdir(tmp_path) and not code_of(tmp_path)
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    output = main_output(model, pixel_values)
    assert not torch.allclose(output, saved[1][folder.name])
    # Sums of weights that lie elsewhere in memory differ by a rounding.
    torch.testing.assert_close(main_output(loaded, pixel_values), output, rtol=0, atol=1e-6)


class TestUpload:
    def test_push_to_hub(self, make_model, hub):
        kind = "bootstrapped"
        model = make_model("classifier", kind)
        info = model.push_to_hub("someone/model", commit_message="Mine", private=True, tags=["tiny"], revision="dev")
        assert info.oid == "0"
        assert hub.created[0]["name"] == "model" and hub.branches == ["dev"]
        # Newer versions of huggingface_hub ask for a visibility.
        assert hub.created[0].get("visibility") == "private" or hub.created[0].get("private")
        [(path, commit, files)] = hub.commits
        assert path == "/api/models/someone/model/commit/dev" and commit["summary"] == "Mine"
        assert set(files) == KINDS[kind].complete
        card = ModelCard(files["README.md"].decode())
        assert f"# {KINDS[kind].classifier.__name__}" in card.text and "tiny" in card.data.tags
        assert files["model.safetensors"] == save(model.state_dict(), {"format": "pt"})

    def test_push_to_hub_keeps_a_card_that_is_there(self, make_model, hub):
        hub.files.append("README.md")
        make_model("base", "bootstrapped").push_to_hub("someone/model")
        [(_, _, files)] = hub.commits
        assert set(files) == KINDS["bootstrapped"].complete - {"README.md"}

    def test_save_pretrained_uploads_what_it_wrote(self, make_model, hub, tmp_path):
        folder = tmp_path / "model"
        (folder / "checkpoint-1").mkdir(parents=True)
        (folder / "checkpoint-1" / "optimizer.pt").write_text("private")
        (folder / "notes.txt").write_text("private")
        (folder / "README.md").write_text("# Mine\n")
        model = make_model("base", "bootstrapped")
        model.save_pretrained(tmp_path / "kept")
        assert not hub.created and not hub.commits
        model.save_pretrained(folder, push_to_hub=True, commit_message="Mine", repo_id="someone/other")
        [(path, commit, files)] = hub.commits
        assert path == "/api/models/someone/other/commit/main" and commit["summary"] == "Mine"
        assert set(files) == KINDS["bootstrapped"].complete
        assert files["README.md"] == b"# Mine\n"
        model.save_pretrained(folder, push_to_hub=True)
        assert hub.commits[1][0] == "/api/models/someone/model/commit/main"
