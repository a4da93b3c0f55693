"""Cards of exported models: what they are, how near they are to the original, and lines that run them."""

from pathlib import Path

from transformers import PreTrainedModel

from .common.exported import FORMATS, counts_of, measured_of, method_of, openvino_precision
from .common.loading import split_revision
from .common.tables import format_markdown
from .common.views import ImageFormat
from .modeling.hub import make_card, pipeline_tag
from .training.components.cards import license_of


LIBRARIES = {"openvino": "openvino", "onnx": "onnx", "executorch": "executorch", "torch": "pytorch"}
FILTERS = {0: "NEAREST", 2: "BILINEAR", 3: "BICUBIC"}
OUTPUTS = {
    "logits": "scores of the labels",
    "image_embeds": "the image's embedding",
    "text_embeds": "the text's embedding, of norm 1",
    "pooler_output": "the image's embedding",
    "last_hidden_state": "tokens",
    "image_features": "what the language model reads of the image, a row a token",
    "feature_maps": "the feature map of each layer, (images, channels, rows, columns)",
    "rois": "left, top, right, bottom of each token's RoI after each adjustment, 0 to 1 across the image",
    "sampling_points": "where each token samples the image, x and y, 0 to 1",
}
# Outputs that are a tensor for each layer.
SEVERAL = ("feature_maps",)


def write_card(
    folder: Path,
    model: PreTrainedModel,
    image_format: ImageFormat,
    report: dict,
    name: str,
    license: str | None = None,
):
    """Write the card of an exported model.

    Args:
        folder (`Path`): Where it goes, as `README.md`.
        model (`PreTrainedModel`): The original.
        image_format (`ImageFormat`): The images that it takes.
        report (`dict`): The contents of `report.json`.
        name (`str`): The original's folder or hub id.
        license (`str`, *optional*): The model's license; by default that of the original's card.
    """
    base = split_revision(name)[0]
    from_hub = not Path(base).is_dir()
    title = f"{Path(base).name}, {report['format']}, {report['precision']}"
    outputs = [f"- `{output}`: {OUTPUTS[output]}" for part in report["parts"].values() for output in part["outputs"]]
    calibrated = report["calibration_images"]
    ways = f"Activations' ranges are those of {calibrated} images. " if calibrated else ""
    if report["float_layers"]:
        ways += f"Left in float32: layers of {', '.join(f'`{name}`' for name in report['float_layers'])}. "
    if report["format"] == "torch":
        ways += "Programs of PyTorch are pickled, so load only those of people whom you trust. "
    needs = {
        "torch": "PyTorch alone, and of frugalvit nothing",
        "executorch": "ExecuTorch's runtime, and of frugalvit nothing",
    }.get(report["format"], "neither PyTorch nor frugalvit")
    counts = {count for part in report["parts"].values() for count in counts_of(part)}
    if counts and report["format"] == "executorch":
        methods = ", ".join(f"`{method_of(count, counts)}` ({count})" for count in sorted(counts))
        ways += f"It has a method for each number of tokens, with the same weights: {methods}. "
    elif counts:
        ways += (
            f"Each call chooses the number of tokens, `num_tokens`: {', '.join(map(str, sorted(counts)))}. Of another "
            "number it takes the next of these below, or the smallest. "
        )
    if report.get("any_size"):
        ways += "Images may have any height and width; every second batch of those below had others. "
    warning = f"**It does not reach what it should**: {'; '.join(report['shortcomings'])}."
    make_card(
        *(model, title),
        f"{report['architecture']} of frugalvit {report['frugalvit']}, {report['bytes'] / 1e6:.1f} MB. {ways}These "
        f"lines need {needs}:",
        f"```python\n{example(image_format, report)}\n```",
        *("It computes", "\n".join(outputs)),
        warning if report["shortcomings"] else "",
        "**Beside the original**, on inputs that calibration did not see:",
        format_markdown(agreement_rows(report)),
        "Both in turns on the machine that exported it:",
        format_markdown(speed_rows(report)),
        library_name=LIBRARIES[report["format"]],
        license=license or license_of(base),
        tags=[report["format"], report["precision"]],
        pipeline_tag=pipeline_tag(model) or "image-feature-extraction",
        base_model=base if from_hub else None,
        base_model_relation="quantized" if from_hub else None,
    ).save(folder / "README.md")


def agreement_rows(report: dict) -> list[dict[str, object]]:
    """How near each program is to the original, as rows of a table."""
    return [
        {
            "program": FORMATS[report["format"]].program.format(part),
            **_tokens(num_tokens),
            "compared": measured["compared"],
            "smallest cosine": measured["min_cosine"],
            "mean cosine": measured["mean_cosine"],
            "same label": measured["agreement"],
            "accuracy": measured["accuracy"],
            "original's": measured["original_accuracy"],
        }
        for part, about in report["parts"].items()
        for num_tokens, measured in measured_of(about).items()
    ]


def speed_rows(report: dict) -> list[dict[str, object]]:
    """Images a second of the program that sees images, as rows of a table."""
    return [
        {
            **_tokens(num_tokens),
            "images at a time": int(size),
            **{f"images/s, {name}": speed for name, speed in row.items()},
        }
        for about in report["parts"].values()
        for num_tokens, measured in measured_of(about).items()
        for size, row in measured["images_per_second"].items()
    ]


def _tokens(num_tokens: int | None) -> dict[str, int]:
    """A column, where the number can be chosen."""
    return {} if num_tokens is None else {"tokens": num_tokens}


def example(image_format: ImageFormat, report: dict) -> str:
    """Lines of Python that read an image and print what a program makes of it."""
    height, width = image_format.size
    box = ""
    lines = ["import json", "", "import numpy as np", *_imports(report["format"]), "from PIL import Image", "", ""]
    lines += ['image = Image.open("photo.jpg").convert("RGB")']
    if image_format.resize:
        # A center crop of the image that is resized, resized.
        lines += [
            f"across, down = (min(image.size) * side / {image_format.resize} for side in ({width}, {height}))",
            "left, top = (image.width - across) / 2, (image.height - down) / 2",
        ]
        box = ", (left, top, left + across, top + down)"
    mean, std = (tuple(round(value, 6) for value in values) for values in (image_format.mean, image_format.std))
    part, about = next(iter(report["parts"].items()))
    first, most = about["outputs"][0], max(counts_of(about), default=None)
    lines += [
        f"image = image.resize(({width}, {height}), Image.Resampling.{FILTERS[image_format.resample]}{box})",
        f"pixels = (np.asarray(image, np.float32) / 255 - np.float32({mean})) / np.float32({std})",
        f"pixel_values = pixels{'[..., ::-1]' if image_format.reverse_channels else ''}.transpose(2, 0, 1)[None]",
        *_run(report["format"], report["precision"], FORMATS[report["format"]].program.format(part), first, most),
    ]
    if first == "logits" and not report["architecture"].endswith("SemanticSegmentation"):
        lines.append('labels = json.load(open("config.json"))["id2label"]')
        lines.append(f"print(labels[str(int({first}[0].argmax()))])")
    else:
        lines.remove("import json")
        shapes = f"*(each.shape for each in {first})" if first in SEVERAL else f"{first}.shape"
        lines = lines[1:] + [f"print({shapes})"]
    return "\n".join(lines)


def _imports(name: str) -> list[str]:
    modules = {"onnx": "onnxruntime", "openvino": "openvino", "torch": "torch"}
    return (
        ["import torch", "from executorch.runtime import Runtime"]
        if name == "executorch"
        else [f"import {modules[name]}"]
    )


def _run(name: str, precision: str, program: str, output: str, num_tokens: int | None) -> list[str]:
    """Return lines that compute `output` from `pixel_values`, with `num_tokens` tokens if these can be chosen. If
    `output` is several tensors, the lines keep all outputs."""
    several = output in SEVERAL
    tokens = "" if num_tokens is None else f', "num_tokens": np.array({num_tokens})'
    feed = f'{{"pixel_values": pixel_values{tokens}}}'
    if name == "openvino":
        hint = f'{{"INFERENCE_PRECISION_HINT": "{openvino_precision(precision)}"}}'
        return [
            f'program = openvino.Core().compile_model("{program}", "CPU", {hint})',
            f"{output} = program({feed})" + (".to_tuple()" if several else f'["{output}"]'),
        ]
    if name == "onnx":
        return [
            f'program = onnxruntime.InferenceSession("{program}")',
            f"{output} = program.run(None, {feed})" if several else f'[{output}] = program.run(["{output}"], {feed})',
        ]
    if name == "torch":
        dtype = ".bfloat16()" if precision == "bfloat16" else ""
        tokens = "" if num_tokens is None else f", num_tokens=torch.tensor({num_tokens})"
        return [
            f'program = torch.export.load("{program}").module()',
            "with torch.no_grad():",
            f'    {output} = program(pixel_values=torch.from_numpy(pixel_values){dtype}{tokens})["{output}"]',
        ]
    return [
        f'program = Runtime.get().load_program("{program}").load_method("forward")',
        f"{output} = program.execute([torch.from_numpy(pixel_values).contiguous()]){'' if several else '[0]'}",
    ]
