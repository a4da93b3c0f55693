"""Model cards of exported models, with code that runs the model and a comparison with the original."""

from pathlib import Path

from transformers import PreTrainedModel

from .exported import OUTPUTS, openvino_precision, program_file
from .modeling.hub import TASKS, auto_class, model_card
from .modeling.image_format import ImageFormat
from .training.cards import license_of
from .training.files import split_revision
from .training.text import format_markdown


# Notes on threads and processes, with the formats as keys.
SHARING = {
    "openvino": "Threads may share `program` if each call makes an infer request of its own, as above: a request "
    "that two threads use at once raises an error or gives one thread the other's result. A process compiles the "
    "program itself; a compiled program cannot be pickled.",
    "onnx": "Threads may share `program`: `run` keeps the inputs and outputs of each call apart. A process opens a "
    "session of its own; a session cannot be pickled.",
}
PACKAGES = {
    "openvino": "It needs `pip install openvino pillow numpy`, but neither PyTorch nor frugalvit.",
    "onnx": "It needs `pip install onnxruntime pillow numpy`, but neither PyTorch nor frugalvit.",
}
PIPELINE = """import {{ pipeline }} from "@huggingface/transformers";

const run = await pipeline("{}", "path/or/id");
console.log(await run("photo.jpg"));"""


def write_card(folder: Path, model: PreTrainedModel, image_format: ImageFormat, report: dict, name: str):
    """Write the card of an exported model.

    Args:
        folder (`Path`): The exported folder, where `README.md` is written.
        model (`PreTrainedModel`): The original model.
        image_format (`ImageFormat`): Image format of the original model.
        report (`dict`): Contents of `report.json`.
        name (`str`): Folder or hub id of the original model. The license is read from the original model's card.
    """
    base = split_revision(name)[0]
    hub_id = None if Path(base).is_dir() else base
    outputs = [f"- `{output}`: {OUTPUTS[output]}" for part in report["parts"].values() for output in part["outputs"]]
    is_onnx = report["format"] == "onnx"
    task = TASKS[auto_class(model)]
    if task == "zero-shot-image-classification":
        # A CLIP's programs return embeddings, not classes.
        task = "image-feature-extraction"
    about = f"{report['architecture']} of frugalvit {report['frugalvit']}, {report['bytes'] / 1e6:.1f} MB. "
    height, width = image_format.size
    about += f"Its images have {width} x {height} pixels; other sizes need an export of their own. "
    if report["num_tokens"] is not None:
        about += f"It computes with {report['num_tokens']} latent tokens. "
    if report["calibration_images"]:
        about += f"Ranges of activations were calibrated on {report['calibration_images']} images. "
    logits = ""
    if prints_label(report) and model.config.problem_type != "regression":
        logits = " The code prints the largest logit and its label; `frugalvit.Classifier` returns probabilities."
    warning = f"**It differs too much from the original**: {'; '.join(report['shortcomings'])}."
    model_card(
        model,
        f"{Path(base).name}, {report['format']}, {report['precision']}",
        f"{about}Run this code in the exported folder. {PACKAGES[report['format']]}{logits}",
        f"```python\n{example(image_format, report)}\n```",
        SHARING[report["format"]],
        f"In node and browsers:\n\n```js\n{PIPELINE.format(task)}\n```" if is_onnx else "",
        "It computes",
        "\n".join(outputs),
        warning if report["shortcomings"] else "",
        "**Comparison with the original** in PyTorch, on inputs that were not used for calibration:",
        format_markdown(rows(report)),
        library_name="transformers.js" if is_onnx else report["format"],
        license=license_of(base),
        tags=[report["format"], report["precision"]],
        pipeline_tag=task,
        base_model=hub_id,
        base_model_relation=hub_id and "quantized",
    ).save(folder / "README.md")


def prints_label(report: dict) -> bool:
    outputs = next(iter(report["parts"].values()))["outputs"]
    return outputs[0] == "logits" and not report["architecture"].endswith("SemanticSegmentation")


def example(image_format: ImageFormat, report: dict) -> str:
    """Return Python code that runs the program on an image and prints a label or the shapes of the outputs."""
    height, width = image_format.size
    part = next(iter(report["parts"]))
    program = program_file(report["format"], report["precision"], part)
    mean = tuple(round(value, 6) for value in image_format.mean)
    std = tuple(round(value, 6) for value in image_format.std)
    crop = ""
    box = ""
    if image_format.resize:
        crop = f"""across, down = (min(image.size) * side / {image_format.resize} for side in ({width}, {height}))
left, top = (image.width - across) / 2, (image.height - down) / 2
"""
        box = ", (left, top, left + across, top + down)"
    inputs = '{"pixel_values": pixel_values}'
    if report["format"] == "openvino":
        hint = f'{{"INFERENCE_PRECISION_HINT": "{openvino_precision(report["precision"])}"}}'
        run = f"""program = openvino.Core().compile_model("{program}", "CPU", {hint})
outputs = program.create_infer_request().infer({inputs}).to_tuple()"""
    else:
        run = f"""program = onnxruntime.InferenceSession("{program}")
outputs = program.run(None, {inputs})"""
    show = "print(*(output.shape for output in outputs))"
    if prints_label(report):
        # For a regression, this code prints the predicted number.
        show = """labels = json.load(open("config.json"))["id2label"].values()
print(max(zip(outputs[0][0].tolist(), labels)))"""
    # torchvision's filters have Pillow's names, except for NEAREST_EXACT.
    resampling = image_format.interpolation.name.removesuffix("_EXACT")
    return f"""import json

import numpy as np
import {"openvino" if report["format"] == "openvino" else "onnxruntime"}
from PIL import Image, ImageOps


image = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGB")
{crop}image = image.resize(({width}, {height}), Image.Resampling.{resampling}{box})
pixels = (np.asarray(image, np.float32) / 255 - np.float32({mean})) / np.float32({std})
pixel_values = pixels.transpose(2, 0, 1)[None]
{run}
{show}"""


def rows(report: dict) -> list[dict[str, object]]:
    """Return table rows that compare each program with the original model."""
    return [
        {
            "program": program_file(report["format"], report["precision"], part),
            "compared": measured["compared"],
            "min cosine": measured["min_cosine"],
            "mean cosine": measured["mean_cosine"],
            "same label": measured["agreement"],
            "standard error": measured["agreement_error"],
        }
        for part, measured in report["parts"].items()
    ]


def write_plain_card(folder: Path, host: PreTrainedModel, size: tuple[int, int], report: dict, name: str):
    """Write the card of a plain vision transformer.

    Args:
        folder (`Path`): The exported folder, where `README.md` is written.
        host (`PreTrainedModel`): The plain vision transformer.
        size (`tuple[int, int]`): Height and width of the model's images.
        report (`dict`): Result of `compare_outputs`.
        name (`str`): Folder or hub id of the student. The license is read from the student's card.
    """
    base = split_revision(name)[0]
    loader = type(host).__name__
    classifies = report["agreement"] is not None
    found = f"On {report['compared']} photographs, the mean cosine of its outputs with the student's is "
    found += f"{report['mean_cosine']:.4f}"
    if classifies:
        found += f", and {report['agreement']:.1%} get the same label"
    model_card(
        host,
        f"{Path(base).name}, {size[0]} x {size[1]} pixels",
        f"A SparseFormer of frugalvit, written as a {loader}. It needs neither frugalvit nor its code:",
        f"""```python
from transformers import AutoImageProcessor, {loader}

processor = AutoImageProcessor.from_pretrained("path/or/id")
model = {loader}.from_pretrained("path/or/id")
outputs = model(**processor(image, return_tensors="pt"))
```""",
        f"{found}. The difference comes from resizing: the student's images are resized twice, and these once. Given "
        "the student's resized pixels, both compute the same.",
        license=license_of(base),
        pipeline_tag="image-classification" if classifies else "image-feature-extraction",
        base_model=None if Path(base).is_dir() else base,
    ).save(folder / "README.md")
