"""Cards of exported models: what they are, how near they are to the original, and lines that run them."""

from pathlib import Path

from transformers import PreTrainedModel

from .common.exported import FORMATS, OUTPUTS, openvino_precision
from .common.loading import split_revision
from .common.tables import format_markdown
from .common.views import ImageFormat
from .modeling.hub import make_card, pipeline_tag
from .training.cards import license_of


FILTERS = {0: "NEAREST", 2: "BILINEAR", 3: "BICUBIC"}
IMPORTS = {"openvino": "import openvino", "onnx": "import onnxruntime"}
# Lines of Python that read an image, a center crop of it where the model's processor crops, and run a program.
READ = """import json

import numpy as np
{imports}
from PIL import Image


image = Image.open("photo.jpg").convert("RGB")
"""
CROP = """across, down = (min(image.size) * side / {resize} for side in ({width}, {height}))
left, top = (image.width - across) / 2, (image.height - down) / 2
"""
PREPARE = """image = image.resize(({width}, {height}), Image.Resampling.{resample}{box})
pixels = (np.asarray(image, np.float32) / 255 - np.float32({mean})) / np.float32({std})
pixel_values = pixels{channels}.transpose(2, 0, 1)[None]
"""
RUN = {
    "openvino": 'program = openvino.Core().compile_model("{program}", "CPU", '
    '{{"INFERENCE_PRECISION_HINT": "{precision}"}})\noutputs = program({inputs}).to_tuple()\n',
    "onnx": 'program = onnxruntime.InferenceSession("{program}")\noutputs = program.run(None, {inputs})\n',
}
LABEL = 'labels = json.load(open("config.json"))["id2label"]\nprint(labels[str(int(outputs[0].argmax()))])'
SHAPES = "print(*(output.shape for output in outputs))"


def write_card(
    folder: Path,
    model: PreTrainedModel,
    image_format: ImageFormat,
    report: dict,
    name: str,
    license: str | None = None,
):
    """Write the card of an exported model, `README.md`, given the original and its image format, the contents of
    `report.json`, and the original's folder or hub id, whose card's license is the default."""
    base = split_revision(name)[0]
    from_hub = not Path(base).is_dir()
    title = f"{Path(base).name}, {report['format']}, {report['precision']}"
    outputs = [f"- `{output}`: {OUTPUTS[output]}" for part in report["parts"].values() for output in part["outputs"]]
    about = ""
    if report["calibration_images"]:
        about += f"Activations' ranges are those of {report['calibration_images']} images. "
    if report["float_layers"]:
        about += f"Left in float32: layers of {', '.join(f'`{name}`' for name in report['float_layers'])}. "
    if counts := next(iter(report["parts"].values()))["num_tokens"]:
        about += (
            f"Each call chooses the number of tokens, `num_tokens`: {', '.join(map(str, counts))}. Of another number "
            "it takes the next of these below, or the smallest. "
        )
    warning = f"**It does not reach what it should**: {'; '.join(report['shortcomings'])}."
    make_card(
        model,
        title,
        f"{report['architecture']} of frugalvit {report['frugalvit']}, {report['bytes'] / 1e6:.1f} MB. {about}These "
        "lines need neither PyTorch nor frugalvit:",
        f"```python\n{example(image_format, report)}\n```",
        "It computes",
        "\n".join(outputs),
        warning if report["shortcomings"] else "",
        "**Beside the original** in PyTorch, on inputs that calibration did not see, on the machine that exported it:",
        format_markdown(rows(report)),
        library_name=report["format"],
        license=license or license_of(base),
        tags=[report["format"], report["precision"]],
        pipeline_tag=pipeline_tag(model) or "image-feature-extraction",
        base_model=base if from_hub else None,
        base_model_relation="quantized" if from_hub else None,
    ).save(folder / "README.md")


def example(image_format: ImageFormat, report: dict) -> str:
    """Return lines of Python that read an image and print what a program makes of it."""
    height, width = image_format.size
    part, about = next(iter(report["parts"].items()))
    tokens = f', "num_tokens": np.array({about["num_tokens"][-1]})' if about["num_tokens"] else ""
    labels = about["outputs"][0] == "logits" and not report["architecture"].endswith("SemanticSegmentation")
    lines = READ + (CROP if image_format.resize else "") + PREPARE + RUN[report["format"]]
    lines = (lines if labels else lines.removeprefix("import json\n\n")) + (LABEL if labels else SHAPES)
    return lines.format(
        imports=IMPORTS[report["format"]],
        resize=image_format.resize,
        width=width,
        height=height,
        resample=FILTERS[image_format.resample],
        box=", (left, top, left + across, top + down)" if image_format.resize else "",
        mean=tuple(round(value, 6) for value in image_format.mean),
        std=tuple(round(value, 6) for value in image_format.std),
        channels="[..., ::-1]" if image_format.reverse_channels else "",
        program=FORMATS[report["format"]].program.format(part),
        precision=openvino_precision(report["precision"]),
        inputs=f'{{"pixel_values": pixel_values{tokens}}}',
    )


def rows(report: dict) -> list[dict[str, object]]:
    """Return how near each program is to the original, and how fast, as rows of a table."""
    return [
        {
            "program": FORMATS[report["format"]].program.format(part),
            **({"tokens": measured["num_tokens"]} if measured["num_tokens"] else {}),
            "compared": measured["compared"],
            "min cosine": measured["min_cosine"],
            "mean cosine": measured["mean_cosine"],
            "same label": measured["agreement"],
            "accuracy": measured["accuracy"],
            "original's": measured["original_accuracy"],
            **{
                f"{'PyTorch' if name.startswith('pytorch') else 'images/s'}, {size} at a time": speed
                for size, speeds in measured["images_per_second"].items()
                for name, speed in speeds.items()
            },
        }
        for part, about in report["parts"].items()
        for measured in about["measured"]
    ]
