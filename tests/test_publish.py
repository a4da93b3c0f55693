"""`frugalvit publish`: half the bytes, the same model, and nothing uploaded that is not right."""

import argparse
import functools
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import HfApi, ModelCard
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageClassification,
    CLIPConfig,
    CLIPModel,
    Dinov2Config,
    Dinov2ForImageClassification,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

import frugalvit
from frugalvit import publish
from frugalvit.cli import main
from frugalvit.info import describe
from frugalvit.modeling.hub import loading_example
from frugalvit.publish import render_card
from frugalvit.training.components.arguments import RECIPE_FILES
from frugalvit.validation import (
    check_card,
    check_code,
    check_files,
    check_image_processor,
    check_predictions,
    check_preprocessing,
    check_results,
    check_weights,
    load_model,
    validate_repository,
)
from frugalvit.without_package import outputs_of


ROOT = Path(__file__).parents[1]
CARDS, RESULTS = ROOT / "model_cards" / "templates", ROOT / "results"
CARD = """---
library_name: transformers
license: mit
pipeline_tag: {task}
datasets: [uoft-cs/cifar10]
tags: [frugalvit]
model-index:
- name: tiny
  results:
  - task: {{type: image-classification}}
    dataset: {{name: CIFAR-10, type: uoft-cs/cifar10}}
    metrics:
    - {{type: accuracy, value: 0.1}}
---

A card with results.
"""


def sparseformer(**fields) -> frugalvit.SparseFormerConfig:
    return frugalvit.SparseFormerConfig(
        image_size=32,
        num_latent_tokens=4,
        stem_channels=8,
        focusing_hidden_size=16,
        hidden_size=32,
        num_hidden_layers=1,
        **fields,
    )


def write_card(folder, task="image-classification"):
    (folder / "README.md").write_text(CARD.format(task=task), encoding="utf-8")


@pytest.fixture(autouse=True)
def imports(request):
    """One test starts a process anew."""
    if "from_nothing" not in request.node.name:
        request.getfixturevalue("imported_once")


@pytest.fixture
def trained(tmp_path):
    torch.manual_seed(0)
    frugalvit.SparseFormerForImageClassification(sparseformer()).save_pretrained(tmp_path / "trained")
    write_card(tmp_path / "trained")
    return tmp_path / "trained"


def test_stores_half_precision_that_loads_as_float32_and_a_card_from_elsewhere(trained, tmp_path):
    card = tmp_path / "card.md"
    card.write_text(CARD.format(task="image-classification").replace("mit", "apache-2.0"), encoding="utf-8")
    publish.main([str(trained), "--output", str(tmp_path / "out"), "--card", str(card)])
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as weights:
        dtypes = {name: weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert {name for name, dtype in dtypes.items() if dtype == "F32"} == {"sparseformer.latents.initial_rois"}
    assert set(dtypes.values()) == {"F16", "F32"}
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    original = AutoModelForImageClassification.from_pretrained(trained)
    for name, parameter in original.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-3, atol=1e-6)
    assert (tmp_path / "out" / "README.md").read_bytes() == card.read_bytes()
    assert (tmp_path / "out" / "modeling_sparseformer.py").is_file()


def test_uploads_all_in_one_commit_and_checks_from_nothing(trained, tmp_path, hub, capsys):
    (trained / "checkpoints").mkdir()
    (trained / "optimizer.bin").write_text("private")
    assert main(["publish", str(trained), "someone/model", "--output", str(tmp_path / "out"), "--private"]) == 0
    [(path, _, files)] = hub.commits
    assert path == "/api/models/someone/model/commit/main"
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "preprocessor_config.json"} < set(files)
    assert "optimizer.bin" not in files
    assert hub.created[0].get("visibility") == "private" or hub.created[0].get("private")
    assert "Uploaded to someone/model." in capsys.readouterr().out


def test_dry_run_looks_at_everything_and_uploads_nothing(trained, tmp_path, hub, capsys):
    before = sorted(tmp_path.rglob("*"))
    assert main(["publish", str(trained), "someone/model", "--dry-run"]) == 0
    output = capsys.readouterr().out
    for file in ("model.safetensors", "modeling_sparseformer.py", "README.md"):
        assert file in output
    assert "It loads where frugalvit is not installed, and computes the same there." in output
    assert "Nothing was uploaded." in output and not hub.created and not hub.commits
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_writes_what_would_be_uploaded_with_the_name_in_its_card(trained, tmp_path, hub):
    card = (trained / "README.md").read_text(encoding="utf-8")
    (trained / "README.md").write_text(f'{card}from_pretrained("path/or/id")', encoding="utf-8")
    assert main(["publish", str(trained), "someone/model", "--output", str(tmp_path / "out"), "--dry-run"]) == 0
    assert (tmp_path / "out" / "README.md").read_text("utf-8") == f'{card}from_pretrained("someone/model")'
    assert not hub.created and not hub.commits


@pytest.mark.parametrize("offline", [True, False])
def test_publishing_without_a_network_is_said(offline, trained, monkeypatch):
    """The client of huggingface_hub raises errors of httpx or of httpx2, as its version has it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr("frugalvit.modeling.hub.HfApi", functools.partial(HfApi, endpoint="http://127.0.0.1:9"))
    with pytest.raises(OSError, match=r"^Cannot upload to someone/model: .* Is there a network, and HF_HUB_OFFLINE"):
        publish.upload(trained, "someone/model", private=False)


def test_what_the_hub_refuses_is_said(trained, hub, monkeypatch):
    monkeypatch.setattr(hub, "do_POST", lambda self: self.answer({}, "RepoNotFound"))
    with pytest.raises(OSError, match=r"^Cannot upload to someone/model: .* Is the token of `hf auth login` one that"):
        publish.upload(trained, "someone/model", private=False)


@pytest.mark.parametrize(
    "name",
    [
        *("my model", "someone/my model", "model", "a/b/c", "someone/a--b", "someone/a..b", "someone/model.git"),
        *(".hidden/model", "someone/-model", "someone/mödel", f"someone/{'x' * 97}", "https://huggingface.co/a/b"),
    ],
)
def test_names_that_the_hub_does_not_take_are_refused_before_all_else(name, capsys):
    assert main(["publish", "no-folder", name, "--license", "mit", "--dry-run"]) == 1
    [error] = capsys.readouterr().err.splitlines()
    assert error.startswith(f"frugalvit publish: error: REPO_ID is {name!r}, expected owner/name")


@pytest.mark.parametrize(
    ("license", "hint"),
    [
        *(("MIT", "mit"), ("Apache 2.0", "apache-2.0"), ("apache2", "apache-2.0"), ("cc-by-nc", "cc-by-nc-")),
        ("proprietary", 'give "other"'),
    ],
)
def test_licenses_that_the_hub_does_not_know_are_refused_before_all_else(license, hint, capsys):
    assert main(["publish", "no-folder", "--license", license, "--dry-run"]) == 1
    [error] = capsys.readouterr().err.splitlines()
    assert f"--license: the hub knows no license {license!r}; " in error and hint in error


def test_a_folder_without_a_card_gets_a_short_one(tmp_path, capsys):
    """`Trainer` writes no card for models of Transformers. The short card says that nothing was measured."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **sizes))
    arguments = TrainingArguments(tmp_path / "run", report_to=[], use_cpu=True)
    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    Trainer(model, arguments, processing_class=processor).save_model(tmp_path / "saved")
    assert not (tmp_path / "saved" / "README.md").exists()
    with pytest.raises(ValueError, match="lack license: add them there, .* or a license by --license"):
        publish.main([str(tmp_path / "saved"), "--dry-run"])
    publish.main([str(tmp_path / "saved"), "--license", "mit", "--output", str(tmp_path / "out")])
    assert "the card lists no measured results" in capsys.readouterr().out
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license, card.data.pipeline_tag) == ("mit", "image-classification")
    assert "AutoModelForImageClassification.from_pretrained" in card.text


def test_a_folder_without_code_loads_with_the_package(trained, tmp_path):
    assert main(["publish", str(trained), "--output", str(tmp_path / "out"), "--no-code"]) == 0
    assert not [*(tmp_path / "out").glob("*.py")]
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert type(model) is frugalvit.SparseFormerForImageClassification


def test_clips_and_backbones(tmp_path):
    torch.manual_seed(0)
    sides = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": 20, "max_position_embeddings": 8, "eos_token_id": 19, **sides}
    clip = CLIPModel(CLIPConfig(text_config=text, vision_config={"image_size": 32, "patch_size": 8, **sides}))
    vision = frugalvit.SparseFormerVisionModelWithProjection(sparseformer(projection_dim=512))
    vision.save_pretrained(tmp_path / "mine")
    # A model that was loaded remembers where from.
    vision = type(vision).from_pretrained(tmp_path / "mine")
    frugal = frugalvit.SparseFormerCLIPModel.from_clip(clip, vision)
    backbone = frugalvit.SparseFormerBackbone(sparseformer(out_indices=[0, 1]))
    assert outputs_of(backbone, {"pixel_values": torch.zeros(1, 3, 32, 32)}).keys() > {"feature_maps.1"}
    for name, model, task in (
        ("clip", frugal, "zero-shot-image-classification"),
        ("vision", vision, "image-feature-extraction"),
        ("backbone", backbone, "image-feature-extraction"),
    ):
        model.save_pretrained(tmp_path / name)
        write_card(tmp_path / name, task)
        publish.main([str(tmp_path / name), "--output", str(tmp_path / f"{name}-out")])
        assert str(tmp_path) not in (tmp_path / f"{name}-out" / "config.json").read_text(encoding="utf-8")


def test_the_card_of_a_backbone_has_its_measured_maps(tmp_path):
    """Of the results of benchmarks/dense_camvid.py, with milliseconds where these were measured."""
    torch.manual_seed(0)
    backbone = frugalvit.SparseFormerBackbone(sparseformer()).eval()
    backbone.save_pretrained(tmp_path / "model")
    table = json.loads((RESULTS / "dense_camvid.json").read_text("utf-8"))
    teacher = {name: value for name, value in table["rows"][0].items() if name != "milliseconds"}
    student = teacher | {"backbone": "grid with upsampler, bootstrapped", "macs": 10**9}
    card, argv = CARDS / "backbone.md", ["--output", str(tmp_path / "out"), "--overwrite"]
    for time, expected in (({}, "| 1.0 | 43.72 %"), ({"milliseconds": 12.345}, "| 1.0 | 12.3 | 43.72 %")):
        rows = [each | time for each in (teacher, student)]
        (tmp_path / "dense_camvid.json").write_text(json.dumps(table | {"rows": rows}), encoding="utf-8")
        publish.main([str(tmp_path / "model"), "--card", str(card), "--results", str(tmp_path), *argv])
        written = ModelCard.load(tmp_path / "out" / "README.md")
        assert f"| grid with upsampler, bootstrapped | 336 x 448 | 768 {expected}" in written.text
        [result] = written.data.eval_results
        assert (result.metric_type, result.metric_value) == ("mean_iou", round(student["mean_iou"], 4))
    with pytest.raises(ValueError, match="dense_camvid.json has no row 'grid with upsampler, bootstrapped'"):
        (tmp_path / "dense_camvid.json").write_text(json.dumps(table | {"rows": [teacher]}), encoding="utf-8")
        render_card(card, tmp_path)
    # The short card, too, says how maps are made.
    known = {"image": Image.new("RGB", (32, 32))}
    exec(loading_example(backbone).replace("path/or/id", str(tmp_path / "model")), known)
    assert known["feature_maps"][0].shape == (1, 32, 2, 2)


def spoil_weights(folder):
    weights = load_file(folder / "model.safetensors")
    weights["classifier.bias"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def cut_weights(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def edit_card(old, new):
    def edit(folder):
        text = (folder / "README.md").read_text(encoding="utf-8")
        assert old in text
        (folder / "README.md").write_text(text.replace(old, new), encoding="utf-8")

    return edit


def edit_processor(text: str | None = None, **values):
    """Function that gives a folder's image processor another text, or other values."""

    def edit(folder):
        file = folder / "preprocessor_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values) if text is None else text, encoding="utf-8")

    return edit


def edit_code(folder):
    """Code that computes something else where frugalvit is not installed."""
    file = folder / "modeling_sparseformer.py"
    text = file.read_text(encoding="utf-8")
    assert "pooler_output=" in text
    file.write_text(text.replace("pooler_output=", "pooler_output=2 * ", 1), encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_weights, r"classifier\.bias in model\.safetensors has values that are not finite"),
        (cut_weights, r"model\.safetensors cannot be read"),
        (edit_card("license: mit\n", ""), "lack license: add them there"),
        (edit_card("license: mit", "license: MIT license"), "the hub knows no license 'MIT license'; did you mean"),
        (edit_card("license: mit", "license: {name: mit}"), "the hub knows no license"),
        (
            edit_card("A card", "A card of /usr/lib/photographs"),
            "README.md names a place on this machine, '/usr/lib/p",
        ),
        (edit_card("value: 0.1", "value: high"), "'accuracy' of README.md is 'high', expected a number"),
        (edit_card("tags: ", "base_model: my-folder\ntags: "), "base_model is 'my-folder' in README.md"),
        (edit_card("tags: ", "base_model: my/good model\ntags: "), "base_model is 'my/good model' in README.md"),
        (
            edit_card("image-classification\ndatasets", "image-segmentation\ndatasets"),
            "expected 'image-classification'",
        ),
        (edit_card("tags: [", "tags: [["), "README.md has no metadata that can be read"),
        (edit_code, r"modeling_sparseformer\.py is not what frugalvit .* ships"),
        (lambda folder: (folder / "config.json").unlink(), "it has no config.json"),
        (lambda folder: (folder / "preprocessor_config.json").unlink(), "it has no preprocessor_config.json"),
        (edit_processor(""), "Cannot load .* as a model"),
        (edit_processor("[]"), "Cannot load .* as a model"),
        (edit_processor("null"), "Cannot load .* as a model"),
        (edit_processor(resample=99), "cannot prepare an image|Cannot load .* as a model"),
        (edit_processor(image_std=[0, 0, 0]), "makes pixels that are not finite; check image_mean, image_std"),
        (edit_processor(image_mean=None), "cannot prepare an image|Cannot load .* as a model"),
        (edit_processor(size={"height": 16, "width": 16}), r"makes pixel values \(1, 3, 16, 16\), the model takes"),
        (edit_processor(size={"height": -1, "width": 32}), "Cannot load .* as a model"),
        (lambda folder: (folder / "pytorch_model.bin").write_text(""), "pytorch_model.bin does not belong into it"),
        (lambda folder: (folder / "data").mkdir(), "data does not belong into it"),
        (lambda folder: (folder / "hub.py").unlink(), "hub.py is not what frugalvit .* ships"),
    ],
)
def test_what_is_wrong_is_found(spoil, message, trained):
    spoil(trained)
    with pytest.raises(ValueError, match=f"not ready to be published: .*{message}"):
        validate_repository(trained)


def test_a_model_that_takes_images_of_any_size_may_have_a_processor_for_others(tmp_path):
    """A DINOv2 interpolates its positions, a ViT does not unless it is asked to."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 7}
    dinov2 = Dinov2ForImageClassification(Dinov2Config(**sizes)).eval()
    vit = ViTForImageClassification(ViTConfig(**sizes, intermediate_size=16)).eval()
    processor = ViTImageProcessor(size={"height": 14, "width": 14})
    assert check_image_processor(processor, dinov2) == []
    assert len(check_image_processor(processor, vit)) == 1


def test_code_that_computes_something_else_is_found(trained):
    edit_code(trained)
    [problem] = check_predictions(trained, load_model(trained))
    assert "without frugalvit it computes other logits, by up to" in problem


def test_code_that_does_not_run_is_found(trained):
    model = load_model(trained)
    (trained / "modeling_sparseformer.py").write_text("raise RuntimeError('broken')", encoding="utf-8")
    assert check_predictions(trained, model) == ["it does not load without frugalvit (RuntimeError: broken)"]


def test_nothing_is_uploaded_that_is_not_right(trained, tmp_path, hub, capsys):
    edit_card("license: mit\n", "")(trained)
    assert main(["publish", str(trained), "someone/model", "--output", str(tmp_path / "out")]) == 1
    assert "lack license" in capsys.readouterr().err
    assert not hub.created and not hub.commits and not (tmp_path / "out").exists()


def test_cards_of_the_papers_models_are_those_of_the_recipes(monkeypatch):
    """`python model_cards/render.py` writes them; whose weights are not here says so, and whose numbers it has."""
    monkeypatch.syspath_prepend(str(ROOT / "model_cards"))
    import render

    cards, folder = render.render(), ROOT / "model_cards"
    assert cards == {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in (folder / "README.md", *folder.glob("papers/*.md"))
    }
    of_papers = {path: text for path, text in cards.items() if path != "README.md"}
    assert len(of_papers) == len([*RECIPE_FILES.glob("*.yaml")]) > 20
    for path, text in of_papers.items():
        name = Path(path).stem
        assert text.startswith(f"# {name}\n\n") and "**Weights are not published here.**" in text
        assert re.search(rf"^frugalvit [a-z]+ --config {name}\b", text, re.MULTILINE)
        assert re.search(r"counted: [\d,]+ parameters", text)
        # What the papers say stands in one place, which says so.
        assert len(re.findall("The (?:paper|authors)[:,] ", text)) == text.count("not reproduced here")
    towers = {path for path, text in of_papers.items() if "`SparseFormerVisionModelWithProjection`" in text}
    assert {"papers/clip-base-49-224.md"} < towers
    assert "It is a `SparseFormerVisionModel`, which classifies nothing" in of_papers["papers/siglip2-base.md"]


def test_cards_are_templates(tmp_path):
    table = {"epochs": [{"accuracy": 0.25}], "rows": [{"row": "a", "x": 0.123456}]}
    (tmp_path / "mine.json").write_text(json.dumps(table), encoding="utf-8")
    card = tmp_path / "card.md"
    card.write_text(
        "{{ name }}: {{ results('mine').epochs[-1].accuracy | percent }}, {{ row('mine', 'a').x | round(2) }}\n"
    )
    assert render_card(card, tmp_path) == "card: 25.00 %, 0.12\n"
    for wrong, message in (
        ("{{ accuracy }}", "'accuracy' is undefined"),
        ("{{ row('mine', 'b') }}", "mine.json has no row 'b'"),
    ):
        card.write_text(wrong)
        with pytest.raises(ValueError, match=message):
            render_card(card, tmp_path)
    card.write_text("{{ results('other') }}")
    with pytest.raises(FileNotFoundError):
        render_card(card, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-run", "--results", "results"], "--results has numbers for a template; name it with --card"),
        ([], "Give a REPO_ID to upload to, --output to write a folder, or --dry-run"),
        (["--dry-run", "--card", "none.md"], "there is no file 'none.md'"),
    ],
)
def test_wrong_arguments(arguments, message, trained, capsys):
    assert main(["publish", str(trained), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_refuses_a_folder_with_something_in_it(trained, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="not empty"):
        publish.main([str(trained), "--output", str(tmp_path / "out")])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


def published(source: Path, folder: Path):
    """The folder that `frugalvit publish SOURCE --output FOLDER` writes, before it is looked at."""
    return publish.prepared(
        argparse.Namespace(
            **{"model": str(source), "output": str(folder), "overwrite": False, "card": None, "results": None},
            **{"license": None, "repo_id": None, "space": False},
        )
    )


@pytest.mark.parametrize("card", sorted(CARDS.glob("cifar10-*.md")), ids=lambda card: card.stem)
class TestSmallShippedModels:
    def test_can_be_published(self, card, tmp_path):
        """A shipped model can be published. test_hub.py compares classifiers without frugalvit, in one process."""
        source, folder = frugalvit.checkpoint_path(card.stem), tmp_path / card.stem
        with published(source, folder):
            pass
        model = load_model(folder)
        problems = [problem for check in (check_files, check_card, check_results) for problem in check(folder)]
        problems += [*check_weights(folder), *check_code(folder, model), *check_preprocessing(folder, model)]
        if model.config.model_type in ("sparseformer_clip", "sparseformer_llava"):
            problems += check_predictions(folder, model)
        assert not problems
        publish.remove_code(folder)
        ours, theirs = ({path.name: path.read_bytes() for path in each.iterdir()} for each in (folder, source))
        assert ours.keys() == theirs.keys()
        # Each version of Transformers has fields of its own.
        if json.loads(theirs["config.json"])["transformers_version"] != transformers.__version__:
            for files, name in itertools.product((ours, theirs), ("config.json", "generation_config.json")):
                files.pop(name, None)
        assert ours == theirs
        assert sum(map(len, ours.values())) < 8e6


@pytest.mark.parametrize("card", sorted(CARDS.glob("c*.md")), ids=lambda card: card.stem)
class TestShippedModels:
    def test_carry_cards_with_the_numbers_of_the_results(self, card):
        assert (frugalvit.checkpoint_path(card.stem) / "README.md").read_text("utf-8") == render_card(card, RESULTS)

    def test_are_listed_in_the_readme(self, card):
        [result] = ModelCard(render_card(card, RESULTS)).data.eval_results
        [line] = re.findall(rf"^\| `{card.stem}` \|.*$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
        *_, parameters, accuracy = line.strip("| ").split(" | ")
        assert accuracy == f"{100 * result.metric_value:.2f} %"
        assert parameters == f"{describe(card.stem)['parameters']:,}"

    def test_cards_say_what_cards_should(self, card):
        content = ModelCard(render_card(card, RESULTS))
        [result] = content.data.eval_results
        assert f"{100 * result.metric_value:.2f} %" in content.text
        for title in ("Measured", "Intended use", "Limits", "Training", "Cost", "Method", "License"):
            assert f"**{title}.** " in content.text
        # Numbers come from results, but for those of the papers, which are marked as such.
        typed = re.findall(r"\d+\.\d+ %", re.sub(r"\(The\s+paper.*?\)", "", card.read_text("utf-8"), flags=re.DOTALL))
        assert not typed
