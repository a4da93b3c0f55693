"""Tests of `frugalvit export`: exported programs compute the same outputs as the PyTorch models."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import ExifTags, Image
from processes import answers_of_threads, first_answers, web_server
from transformers import AutoImageProcessor

import frugalvit
from drawn import noise
from frugalvit import export, export_page
from frugalvit.cli import main
from frugalvit.export_int8 import sensitive_layers
from frugalvit.export_page import RUNTIME_FILES, check_page
from frugalvit.exported import ExportedModule, load_classifier, parts_of
from frugalvit.predict import predict
from frugalvit.training.cards import share_error
from frugalvit.training.choices import SUBSET
from frugalvit.training.data import class_names, load_images
from tiny import PATCHES, randomize, word_tokenizer


# The scores of untrained weights are nearly equal, so int8 may change labels. `--force` allows these exports.
FEW = ["--limit", "16", "--calibration-images", "8"]
ONNX = ("--format", "onnx", "--output-rois")
INT8 = ("--format", "onnx", "--precision", "int8")
DOG = Path(__file__).parents[1] / "docs" / "dog.png"
# This script runs a pipeline of transformers.js on an image.
PIPELINE = """
const { pipeline, env } = require("@huggingface/transformers");
env.allowRemoteModels = false;
const [, task, folder, name, picture] = process.argv;
env.localModelPath = folder;
pipeline(task, name)
  .then((run) => run(picture, { top_k: 10, pool: true }))
  .then((found) => console.log(JSON.stringify(found.tolist?.() ?? found)));
"""
# This script logs the page's result or error, and closes the browser.
REPORTER = """<script>
const shown = document.getElementById("status");
new MutationObserver(() => {
  if (shown.textContent === "Ready.") return;
  console.log(document.getElementById("result").innerText);
  close();
}).observe(shown, { childList: true });
</script>"""
# The example code in model cards must run although this code blocks the import of four packages.
BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "frugalvit", "huggingface_hub"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Save a small SparseFormer whose image processor resizes and crops, and return its folder."""
    sizes = PATCHES | {"num_latent_tokens": 4, "num_hidden_layers": 1, "intermediate_size": 64, "num_labels": 10}
    images = {"resize_size": 36, "image_mean": (0.5, 0.45, 0.4), "image_std": (0.45, 0.5, 0.55)}
    config = frugalvit.PatchSparseFormerConfig(**sizes, **images)
    torch.manual_seed(0)
    model = randomize(frugalvit.PatchSparseFormerForImageClassification(config), 0.2)
    model.config.id2label = dict(enumerate(class_names(load_images(SUBSET, "test"))))
    model.save_pretrained(folder := tmp_path_factory.mktemp("model") / "tiny")
    return folder


@pytest.fixture(scope="module")
def write(folder, tmp_path_factory):
    """Return a function that exports the model. Calls with equal arguments share one export."""

    @functools.cache
    def export_it(*arguments: str) -> Path:
        output = tmp_path_factory.mktemp("exported") / "out"
        assert main(["export", "--model", str(folder), "--output", str(output), *FEW, "--force", *arguments]) == 0
        return output

    return export_it


@pytest.fixture(scope="module")
def student(tmp_path_factory) -> Path:
    """Save a classifier that inherits the weights of a ViT, and return its folder."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(image_size=32, patch_size=4, num_labels=10, **sizes)
    torch.manual_seed(0)
    teacher = randomize(transformers.ViTForImageClassification(config))
    square = {"height": 32, "width": 32}
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 36}, crop_size=square)
    model = frugalvit.PatchSparseFormerForImageClassification.from_teacher(teacher, 16, image_processor=processor)
    model.save_pretrained(folder := tmp_path_factory.mktemp("student") / "tiny")
    return folder


def test_a_student_is_exported_as_a_model_of_transformers(student, tmp_path, capsys):
    output = tmp_path / "plain"
    command = ["export", "--format", "transformers", "--num-tokens", "9", *FEW, "--output", str(output)]
    assert main([*command, "--model", str(student), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["compared"] == 16 and report["mean_cosine"] > 0.9
    assert not [*output.glob("*.py")]
    host = transformers.AutoModelForImageClassification.from_pretrained(output).eval()
    assert type(host) is transformers.ViTForImageClassification
    processor = transformers.AutoImageProcessor.from_pretrained(output)
    assert dict(processor.size) == {"shortest_edge": 14} and processor.resample == 2
    images = torch.randn(2, 3, 32, 32)
    resized = torch.nn.functional.interpolate(images, (12, 12), mode="bilinear", antialias=True)
    model, _ = load_classifier(student)
    with torch.no_grad():
        torch.testing.assert_close(host(resized).logits, model(images, num_tokens=9).logits, rtol=0, atol=1e-4)
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "ViTForImageClassification.from_pretrained" in card and f"{report['mean_cosine']:.4f}" in card


@pytest.mark.parametrize(
    "arguments, tolerance",
    [
        (ONNX, 1e-4),
        (INT8, None),
        (("--format", "openvino"), 1e-4),
        (("--format", "openvino", "--precision", "bfloat16"), None),
        (("--format", "openvino", "--precision", "int8"), None),
    ],
)
def test_a_program_computes_the_logits_of_the_model(arguments, tolerance, write, folder):
    """For every batch size, the program's logits equal the model's at float32, and are similar at lower precision."""
    output = write(*arguments)
    model, _ = load_classifier(folder)
    program, _ = load_classifier(output)
    generator = torch.Generator().manual_seed(1)
    for size in (1, 2, 7, 64) if tolerance else (1, 3):
        pixel_values = torch.randn(size, 3, 32, 32, generator=generator)
        with torch.no_grad():
            expected, computed = model(pixel_values).logits, program(pixel_values).logits.float()
        if tolerance:
            torch.testing.assert_close(computed, expected, atol=tolerance, rtol=tolerance)
        else:
            assert not torch.equal(computed, expected)
            assert torch.cosine_similarity(computed, expected).min() > 0.9
    if "onnx" in arguments:
        import onnx

        [graph] = (onnx.load(file).graph for file in (output / "onnx").iterdir())
        assert {each.type.tensor_type.shape.dim[0].dim_param for each in [*graph.input, *graph.output]} == {"batch"}
    report = json.loads((output / "report.json").read_text())
    measured = report["parts"]["model"]
    assert measured["compared"] == 16
    assert 0.9 < measured["min_cosine"] <= measured["mean_cosine"] <= 1 + 1e-6
    # The report compares each program with the float32 model, so outputs differ at lower precision.
    assert tolerance or measured["min_cosine"] < 1 - 1e-7
    assert measured["agreement_error"] == share_error(measured["agreement"], 16)
    with pytest.raises(ValueError, match=r"shape \(3, 32, 40\), expected \(3, 32, 32\)"):
        program(torch.zeros(1, 3, 32, 40))
    assert (report["calibration_images"] == 8) == ("int8" in arguments)
    assert report["num_tokens"] == json.loads((output / "config.json").read_text())["num_tokens"] == 4
    card = (output / "README.md").read_text()
    assert "computes with 4 latent tokens" in card and "images have 32 x 32 pixels" in card


def test_int8_products_have_one_activation(write):
    """Attention and the sensitive layers stay in float32. All other linear layers have unsigned 8-bit inputs, because
    ONNX Runtime multiplies signed inputs in float32."""
    import onnx

    [file] = (write(*INT8) / "onnx").iterdir()
    graph = onnx.load(file).graph
    makers = {output: node for node in graph.node for output in node.output}
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    inputs = [
        [makers.get(name) for name in node.input[:2]] for node in graph.node if node.op_type in ("MatMul", "Gemm")
    ]
    quantized = [[node for node in pair if node and node.op_type == "DequantizeLinear"] for pair in inputs]
    # There are eight linear layers, and attention has two products.
    assert len(quantized) == 10 and {len(pair) for pair in quantized} == {0, 2}
    assert 2 < sum(map(bool, quantized)) < 8
    signs = [[types[node.input[2]] for node in pair] for pair in quantized if pair]
    assert all(pair == [onnx.TensorProto.UINT8, onnx.TensorProto.INT8] for pair in signs)


def test_the_most_sensitive_layers_stay_in_float():
    """A layer whose inputs have a large outlier is the most sensitive one."""

    class Layers(torch.nn.Sequential):
        def forward(self, pixel_values):
            return {"logits": super().forward(pixel_values)}

    torch.manual_seed(0)
    layers = Layers(*(torch.nn.Linear(8, 8) for _ in range(12)))
    with torch.no_grad():
        layers[4].bias[0] = 1000
        layers[5].weight[:, 0] = 0
    samples = [{"pixel_values": torch.randn(1, 8)} for _ in range(8)]
    assert sensitive_layers(layers, samples) == [5]


@pytest.mark.parametrize(
    "agreement, compared, found",
    [
        (0.98, 300, []),
        (0.975, 300, []),
        (0.96, 150, ["agreement 0.9600 ± 0.0162 of model (standard error of 150 images), expected 0.98"]),
        (float("nan"), 150, ["agreement nan ± nan of model (standard error of 150 images), expected 0.98"]),
    ],
)
def test_an_agreement_may_be_one_standard_error_below_its_limit(agreement, compared, found):
    part = {"compared": compared, "mean_cosine": 0.99, "agreement": agreement}
    part["agreement_error"] = share_error(agreement, compared)
    assert export.shortcomings({"precision": "int8", "parts": {"model": part}}) == found


@torch.no_grad()
def test_attention_pooling_is_exported_for_every_batch_size(folder):
    config = frugalvit.PatchSparseFormerConfig.from_pretrained(folder, pooling="attention", num_class_tokens=0)
    model = frugalvit.PatchSparseFormerModel(config).eval()
    shapes = {"pixel_values": {0: torch.export.Dim("batch", min=1, max=64)}}
    program = torch.export.export(model, (torch.zeros(2, 3, 32, 32),), dynamic_shapes=shapes).module()
    assert program(torch.zeros(5, 3, 32, 32)).pooler_output.shape == (5, 32)


@pytest.mark.parametrize("arguments", [ONNX, ("--format", "openvino")])
def test_threads_and_processes_share_a_program(arguments, write):
    """Each thread gets the output for its own image. A pickled classifier gives equal outputs in another process."""
    classify = frugalvit.Classifier(write(*arguments))
    images = [noise(seed=seed) for seed in range(7)]
    alone = [next(classify([image])) for image in images]
    for _, index, answer in answers_of_threads([classify], images):
        np.testing.assert_allclose(answer, alone[index], atol=1e-5)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        answers = pool.submit(first_answers, classify, images).result()
    np.testing.assert_allclose(answers, alone, atol=1e-5)


@pytest.mark.parametrize("arguments", [ONNX, ("--format", "openvino")])
def test_code_of_the_card_needs_only_the_runtime(arguments, write, tmp_path):
    output = write(*arguments)
    [code] = re.findall(r"```python\n(.*?)```", (output / "README.md").read_text(), re.DOTALL)
    # A phone stores a photograph sideways and names the orientation in EXIF data.
    photo = tmp_path / "photo.png"
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    with Image.open(DOG) as upright:
        upright.convert("RGB").transpose(Image.Transpose.ROTATE_90).save(photo, exif=exif)
    script = BLOCKED + code.replace("photo.jpg", str(photo))
    # The code runs in a copy of the exported folder, so it cannot use files outside the folder.
    copied = shutil.copytree(output, tmp_path / "elsewhere")
    process = subprocess.run([sys.executable, "-c", script], cwd=copied, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    model, image_processor = load_classifier(output)
    with torch.no_grad(), Image.open(DOG) as upright:
        [logits] = model(image_processor(upright.convert("RGB"), return_tensors="pt").pixel_values).logits.tolist()
    printed = re.fullmatch(r"\((.+), '(.+)'\)", process.stdout.strip())
    assert float(printed[1]) == pytest.approx(max(logits), abs=0.01)
    assert printed[2] == model.config.id2label[logits.index(max(logits))]


def test_an_exported_model_has_one_number_of_tokens(write, capsys):
    output = write(*ONNX)
    message = "`num_tokens` is 9; this exported model always computes with 4 tokens. Leave out `num_tokens`, or export"
    with pytest.raises(ValueError, match=re.escape(message)):
        frugalvit.Classifier(output, num_tokens=9)
    assert main(["predict", str(DOG), "--model", str(output), "--num_tokens", "9"]) == 1
    assert message in capsys.readouterr().err


def npm_file(package: str) -> Path:
    """Return the main file of an npm package. Skip the test if node or the package is missing."""
    if shutil.which("node"):
        command = ["node", "-p", f'require.resolve("{package}")']
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if not process.returncode:
            return Path(process.stdout.strip())
    pytest.skip(f"needs node, and {package} of npm in NODE_PATH")


@pytest.fixture(scope="module")
def transformers_js():
    """Return a function that runs a pipeline of transformers.js in node."""

    def run(task: str, output: Path, picture: Path):
        command = ["node", "-e", PIPELINE, task, str(output.parent), output.name, str(picture)]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    npm_file("@huggingface/transformers")
    return run


@pytest.mark.parametrize("arguments", [ONNX, INT8])
def test_transformers_js_labels_a_picture(arguments, write, transformers_js):
    output = write(*arguments)
    found = {each["label"]: each["score"] for each in transformers_js("image-classification", output, DOG)}
    [prediction] = predict(*load_classifier(output), [Image.open(DOG)], top=10)
    assert found == pytest.approx(dict(prediction.labels), abs=0.02)


def test_transformers_js_embeds_a_picture(folder, transformers_js, tmp_path):
    model = frugalvit.PatchSparseFormerModel.from_pretrained(folder)
    model.save_pretrained(tmp_path / "tower")
    assert main(["export", "--model", str(tmp_path / "tower"), "--output", str(tmp_path / "out"), *FEW]) == 0
    found = torch.tensor(transformers_js("image-feature-extraction", tmp_path / "out", DOG))
    pixel_values = AutoImageProcessor.from_pretrained(folder)(Image.open(DOG), return_tensors="pt").pixel_values
    with torch.no_grad():
        expected = model(pixel_values).pooler_output
    assert torch.cosine_similarity(found, expected).item() > 0.999


def test_inexact_programs_need_force(folder, tmp_path, capsys, monkeypatch):
    """A program that differs too much from its model is written only with `--force`. Its model card has a warning."""
    output = tmp_path / "out"
    monkeypatch.setattr(export, "LEAST", dict.fromkeys(export.LEAST, 1))
    command = ["export", "--model", str(folder), "--output", str(output), *FEW]
    assert main([*command, "--precision", "int8"]) == 1
    message = capsys.readouterr().err
    assert re.search(r"mean cosine 0\.9\d+ .* expected 1", message)
    assert not list(tmp_path.iterdir())
    assert main([*command, "--format", "openvino", "--precision", "bfloat16", "--force"]) == 0
    assert "differs too much" in (output / "README.md").read_text()


def test_commands_accept_exported_folders(write, tmp_path, capsys, folder):
    output = str(write(*ONNX))
    capsys.readouterr()
    assert main(["predict", str(DOG), "--model", output, "--rois", str(tmp_path / "rois.png")]) == 0
    exported = capsys.readouterr().out
    assert main(["predict", str(DOG), "--model", str(folder), "--device", "cpu"]) == 0
    assert capsys.readouterr().out == exported
    assert (tmp_path / "rois.png").stat().st_size > 10_000
    assert main(["predict", str(DOG), "--model", output, "--device", "gpu"]) == 1
    assert "The device 'gpu' cannot be used here" in capsys.readouterr().err
    assert main(["evaluate", "classification", "--model", output, "--limit", "16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 16


def test_unsupported_precisions_are_refused(folder, tmp_path, capsys):
    command = ["export", "--model", str(folder), "--output", str(tmp_path / "out"), "--precision", "bfloat16"]
    assert main(command) == 1
    assert "precision bfloat16 is not for onnx, which takes float32, int8" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_clip_is_exported_as_two_programs(folder, tmp_path, capsys):
    """The report compares the text program with the PyTorch model on one sentence for each class."""
    vision = frugalvit.PatchSparseFormerConfig.from_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[BOS]", "[EOS]", "a", "photo", "of", "airplane", "cat"]
    text = {"vocab_size": len(words), "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    text |= {"intermediate_size": 32, "max_position_embeddings": 8, "eos_token_id": 3, "projection_dim": 8}
    config = frugalvit.SparseFormerCLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    source = tmp_path / "clip"
    randomize(frugalvit.SparseFormerCLIPModel(config)).save_pretrained(source)
    word_tokenizer(words, model_max_length=8).save_pretrained(source)
    assert main(["export", "--model", str(source), "--output", str(tmp_path / "out"), "--page"]) == 1
    assert "page: SparseFormerCLIPModel has no labels to show" in capsys.readouterr().err
    assert main(["export", "--model", str(source), "--output", str(tmp_path / "out"), *FEW, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    compared = {name: part["compared"] for name, part in report["parts"].items()}
    assert compared == {"vision_model": 16, "text_model": 10}
    model = export.load_saved_model(source)
    for name, part in parts_of(model).items():
        inputs = part.example(3)
        with torch.no_grad():
            [(key, expected)] = part(**inputs).items()
        torch.testing.assert_close(ExportedModule(tmp_path / "out", name)(**inputs)[key], expected, atol=1e-4, rtol=0)
    # Without a name, `ExportedModule` loads the vision program.
    assert ExportedModule(tmp_path / "out").outputs == ["image_embeds"]
    with pytest.raises(ValueError, match="as an image classifier: it computes image_embeds"):
        load_classifier(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_the_page_loads_from_no_other_host(tmp_path, monkeypatch):
    page = (Path(export.__file__).parent / "page" / "index.html").read_text()
    assert "//" not in re.sub(r"^\s*//.*$", "", page, flags=re.MULTILINE).replace("</", "")
    with pytest.raises(ValueError, match="page runs ONNX in the browser"):
        check_page("openvino")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="from npm, and there is no npm here"):
        check_page("onnx")


def test_the_page_draws_the_last_adjustment():
    """`lastAdjustment` sorts outputs by number, not by text, so that `rois.11` comes after `rois.9`."""
    if shutil.which("node") is None:
        pytest.skip("needs node")
    page = (Path(export.__file__).parent / "page" / "index.html").read_text()
    [function] = re.findall(r"^function lastAdjustment.*?^}", page, re.MULTILINE | re.DOTALL)
    names = json.dumps(["logits", *(f"rois.{step}" for step in range(12))])
    script = f"{function}\nconsole.log(lastAdjustment({names}), lastAdjustment(['logits']))"
    printed = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["rois.11", "undefined"]


def test_the_page_shows_the_scores_of_pytorch_in_a_browser(folder, tmp_path, monkeypatch):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    # A local package replaces onnxruntime-web, because npm can pack a local package without a network.
    package, output = tmp_path / "package", tmp_path / "out"
    (package / "dist").mkdir(parents=True)
    (package / "package.json").write_text('{"name": "runtime", "version": "1.0.0"}')
    for name in RUNTIME_FILES:
        shutil.copy(npm_file("onnxruntime-web").with_name(name), package / "dist")
    monkeypatch.setattr(export_page, "PACKAGE", str(package))
    assert main(["export", "--model", str(folder), "--output", str(output), *FEW, "--page"]) == 0
    shutil.copy(DOG, output)
    with (output / "index.html").open("a") as page:
        page.write(REPORTER)
    options = ["--headless", "--no-sandbox", "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"]
    server = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "0"]
    with web_server(server, output, dict(os.environ)) as address:
        command = [browser, *options, f"{address}?image={DOG.name}"]
        process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    shown = process.stderr.partition(":CONSOLE")[2]
    found = {label: float(share) / 100 for label, share in re.findall(r"(\w+)\t+([\d.]+) %", shown)}
    [prediction] = predict(*load_classifier(folder), [Image.open(DOG)])
    # Browsers and Pillow resize images differently, so the scores differ a little.
    assert found == pytest.approx(dict(prediction.labels), abs=0.01), shown
