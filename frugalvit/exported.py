"""Write and run models as programs of OpenVINO or ONNX Runtime, with Transformers' exporters."""

import contextlib
import copy
import dataclasses
import importlib.util
import io
import json
import logging
import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoImageProcessor, PreTrainedConfig, PreTrainedModel, exporters
from transformers.utils import ModelOutput

from .configuration.configuration_base import is_sparseformer, pair
from .export_int8 import quantize
from .training.files import write_json
from .training.loading import TASKS, choose_device, load_model, load_pretrained
from .training.text import first_line


MANIFEST = "export.json"
REPORT = "report.json"


class Format(NamedTuple):
    """An export format: the name prefix of Transformers' exporter classes, required packages, and precisions."""

    prefix: str
    packages: tuple[str, ...]
    precisions: tuple[str, ...]


FORMATS = {
    "openvino": Format("OpenVINO", ("openvino",), ("float32", "bfloat16", "int8")),
    # ONNX Runtime cannot compute in bfloat16 on the CPU.
    "onnx": Format("Onnx", ("onnx", "onnxruntime", "onnxscript"), ("float32", "int8")),
}
PRECISIONS = FORMATS["openvino"].precisions

# Names and descriptions of outputs. An exported program returns only those outputs of the model that are listed here.
OUTPUTS = {
    "logits": "scores of the labels",
    "image_embeds": "the image's embedding, of norm 1",
    "text_embeds": "the text's embedding, of norm 1",
    "pooler_output": "the image's embedding",
    "last_hidden_state": "tokens",
    "feature_maps": "the feature map of each layer, (images, channels, rows, columns)",
    "rois": "left, top, right, bottom of each token's RoI after each adjustment, 0 to 1 across the image",
    "sampling_points": "where each token samples the image, x and y, 0 to 1",
}


class Part(nn.Module):
    """A part of a model that is exported as one program. It maps images, or a CLIP's texts, to named tensors.

    Args:
        model (`PreTrainedModel`): The model.
        kind (`str`): `"model"` for a whole model, `"image_embeds"` or `"text_embeds"` for one encoder of a CLIP.
        output_rois (`bool`, *optional*, defaults to `False`): Also return RoIs and sampling points.
    """

    def __init__(self, model: PreTrainedModel, kind: str, output_rois: bool = False):
        super().__init__()
        self.model = model
        self.kind = kind
        self.output_rois = output_rois

    def example(self, batch_size: int) -> dict[str, torch.Tensor]:
        """Return random inputs."""
        generator = torch.Generator().manual_seed(0)
        if self.kind == "text_embeds":
            text = self.model.config.text_config
            ids = torch.randint(text.vocab_size, (batch_size, text.max_position_embeddings), generator=generator)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        vision = getattr(self.model.config, "vision_config", self.model.config)
        shape = (batch_size, vision.num_channels, *pair(vision.image_size))
        return {"pixel_values": torch.randn(shape, generator=generator)}

    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor | tuple[torch.Tensor, ...]]:
        if self.kind == "text_embeds":
            texts = self.model.get_text_features(input_ids=input_ids, attention_mask=attention_mask)
            return {"text_embeds": F.normalize(texts.pooler_output, dim=-1)}
        if self.kind == "image_embeds":
            images = self.model.get_image_features(pixel_values=pixel_values)
            return {"image_embeds": F.normalize(images.pooler_output, dim=-1)}
        outputs = self.model(pixel_values, **({"output_rois": True} if self.output_rois else {}))
        return {name: outputs[name] for name in OUTPUTS if outputs.get(name) is not None}


def num_tokens_of(model: PreTrainedModel) -> int | None:
    """Return the number of latent tokens of a model's SparseFormer, or `None` if the model has no SparseFormer."""
    config = getattr(model.config, "vision_config", model.config)
    return config.default_num_tokens if is_sparseformer(config) else None


def parts_of(model: PreTrainedModel, output_rois: bool = False) -> dict[str, Part]:
    """Return the parts of a model that are exported as programs, with the programs' names as keys."""
    if hasattr(model, "get_text_features"):
        return {"vision_model": Part(model, "image_embeds"), "text_model": Part(model, "text_embeds")}
    if hasattr(model, "get_image_features"):
        raise ValueError(f"Cannot export a {type(model).__name__}; export the SparseFormer that was swapped into it.")
    return {"model": Part(model, "model", output_rois)}


def check_format(name: str, precision: str):
    """Raise a ValueError if a format does not support a precision, or if a required package is not installed."""
    found = FORMATS[name]
    if precision not in found.precisions:
        raise ValueError(f"precision {precision} is not for {name}, which takes {', '.join(found.precisions)}.")
    if missing := [package for package in found.packages if importlib.util.find_spec(package) is None]:
        raise ValueError(f"{name} needs {', '.join(missing)}: pip install 'frugalvit[export]'.")


def program_file(name: str, precision: str, part: str) -> str:
    """Return a program's path in the exported folder. ONNX files have the names that transformers.js expects."""
    if name == "openvino":
        return f"openvino_{part}.xml"
    return f"onnx/{part}_quantized.onnx" if precision == "int8" else f"onnx/{part}.onnx"


def export_parts(
    parts: Mapping[str, Part],
    name: str,
    precision: str,
    folder: Path,
    calibration: Mapping[str, list[dict[str, torch.Tensor]]] | None = None,
):
    """Export a model's parts as programs, and write `config.json`. For int8, `calibration` has each part's inputs."""
    prefix = FORMATS[name].prefix
    components = {}
    with _quiet():
        exporter = getattr(exporters, f"{prefix}Exporter")()
        for part_name, part in parts.items():
            example = part.example(2)
            batch = torch.export.Dim("batch", min=1, max=4_096)
            options = {"dynamic_shapes": {key: {0: batch} for key in example}}
            if precision == "bfloat16":
                # OpenVINO can compute in bfloat16 from float16 weights, which are more precise than bfloat16 weights.
                options["compress_to_fp16"] = True
            with torch.no_grad():
                exported = exporter.export(part, example, getattr(exporters, f"{prefix}Config")(**options))
            component = exported.components["model"]
            program = component.program
            if precision == "int8":
                program = quantize(part, program, name, calibration[part_name])
            file = program_file(name, precision, part_name)
            if name == "onnx":
                import onnx_ir

                # transformers.js expects an axis named batch. Browsers load one file, which must contain the weights.
                for value in (*program.graph.inputs, *program.graph.outputs):
                    value.shape = onnx_ir.Shape(["batch", *value.shape[1:]])
                (folder / file).parent.mkdir(exist_ok=True)
                onnx_ir.save(program, folder / file)
            else:
                exporter.save_program(program, folder / file)
            components[part_name] = {"file": file, "metadata": dataclasses.asdict(component.metadata)}
    write_json(folder / MANIFEST, {"export_format": name, "components": components})
    write_json(folder / "config.json", program_config(next(iter(parts.values())).model, precision))


def program_config(model: PreTrainedModel, precision: str) -> dict[str, object]:
    """Return the contents of a program's `config.json`: labels, image size, number of latent tokens, and a model type
    that transformers.js can run."""
    config = model.config
    num_tokens = num_tokens_of(model)
    name = type(model).__name__
    vision = getattr(config, "vision_config", config)
    segments = name.endswith("SemanticSegmentation")
    return {
        "model_type": "segformer" if segments else "vit" if vision is config else "clip",
        "architectures": [name],
        "image_size": vision.image_size,
        "num_channels": vision.num_channels,
        "id2label": config.id2label,
        "label2id": config.label2id,
        "problem_type": config.problem_type,
        "num_tokens": num_tokens,
        "transformers.js_config": {"dtype": "q8" if precision == "int8" else "fp32"},
    }


@contextlib.contextmanager
def _quiet():
    """Suppress printed text, warnings, and log messages below the level of errors."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def is_exported(folder: str | os.PathLike) -> bool:
    """Return whether `frugalvit export` wrote the folder."""
    return all((Path(folder).expanduser() / name).is_file() for name in (MANIFEST, REPORT))


def read_report(folder: Path) -> dict:
    """Read `report.json` of an exported folder. Raise a ValueError if a file is damaged, or if loading the
    folder could run code."""
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        manifest = (folder / MANIFEST).read_text(encoding="utf-8")
        # Refuse Transformers' other formats: their programs are pickled, and a pickle can run code.
        if report["format"] not in FORMATS or report["format"] != json.loads(manifest)["export_format"]:
            raise ValueError(f"format {report['format']!r}, expected {' or '.join(FORMATS)} in both files")
        # Refuse a manifest with `default_factory`, because PyTorch would import the module that this entry names.
        # Refuse `\u` escapes too, because they could hide the word `default_factory`.
        if any(text in manifest for text in ("default_factory", "\\u")):
            raise ValueError(f"{MANIFEST} has more than dicts, lists and tuples of tensors")
        for part in report["parts"].values():
            if not {*part["outputs"]} <= OUTPUTS.keys():
                raise ValueError(f"outputs {part['outputs']}, expected some of {', '.join(OUTPUTS)}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{REPORT} or {MANIFEST} is not from frugalvit export ({type(error).__name__}: {first_line(error)})"
        raise ValueError(f"Cannot load {str(folder)!r}: {problem}.") from error
    return report


class ExportedModule(nn.Module):
    """A program that `frugalvit export` wrote. The module takes the inputs of the original model, for example
    `module(pixel_values=images)`, and returns a `ModelOutput` with named outputs. The module has the attributes
    `config` and `device`. Threads may share one module. Unpickling loads the program from its folder again.

    Args:
        folder (`str` or `os.PathLike`): The exported folder.
        part (`str`, *optional*): Name of the program. Default: the program whose inputs are images.
    """

    def __init__(self, folder: str | os.PathLike, part: str | None = None):
        super().__init__()
        self.folder = Path(folder).expanduser()
        self.report = read_report(self.folder)
        self.format = self.report["format"]
        self.precision = self.report.get("precision")
        check_format(self.format, self.precision)
        components = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))["components"]
        # The first program is the one for images, see `parts_of`.
        self.part = part or next(iter(components))
        if self.part not in components or self.part not in self.report["parts"]:
            raise ValueError(f"{str(self.folder)!r} has no program {self.part!r}, expected one of {[*components]}.")
        file = components[self.part]["file"]
        metadata = components[self.part]["metadata"]
        try:
            with _quiet():
                exporter = getattr(exporters, f"{FORMATS[self.format].prefix}Exporter")
                program = exporter.load_program(self.folder / file)
                component = exporters.ExportedComponent(program, exporters.ExportMetadata.from_dict(metadata))
                exported = exporters.ExportedModel({self.part: component}, self.format)
                exported.to("cpu", **_runner_options(self.format, self.precision))
                self.config = PreTrainedConfig.from_pretrained(self.folder)
        # Each runtime raises its own types of errors, so all exceptions are caught.
        except Exception as error:
            raise ValueError(f"Cannot load {str(self.folder)!r} in {self.format}: {first_line(error)}") from error
        self._runner = exported.runners[self.part]
        self._idle_runners = [self._runner]
        self.outputs = self.report["parts"][self.part]["outputs"]
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.eval()

    def forward(
        self, pixel_values: torch.Tensor | None = None, output_rois: bool | None = None, **inputs
    ) -> ModelOutput:
        """Run the program. The inputs are those of the original model."""
        if output_rois and "rois" not in self.outputs:
            raise ValueError("The model was exported without its RoIs; `frugalvit export --output_rois` keeps them.")
        if pixel_values is not None:
            height, width = pair(self.config.image_size)
            shape = (self.config.num_channels, height, width)
            if tuple(pixel_values.shape[1:]) != shape:
                raise ValueError(
                    f"Images have the shape {tuple(pixel_values.shape[1:])}, expected {shape}. An exported program "
                    "takes images of one size, see its image processor. Export the model again for another size."
                )
            inputs["pixel_values"] = pixel_values.to(self.device, self.dtype)
        with self._exclusive_runner() as runner:
            return ModelOutput(**runner(**inputs))

    @contextlib.contextmanager
    def _exclusive_runner(self):
        """Reserve a runner for one call. An OpenVINO runner has a single infer request, so concurrent calls would
        overwrite results. An ONNX Runtime runner has no such state: it binds tensors for each call."""
        try:
            # A list's `pop` and `append` are atomic, so no lock is needed.
            runner = self._idle_runners.pop()
        except IndexError:
            runner = copy.copy(self._runner)
            if self.format == "openvino":
                runner.request = runner.compiled_model.create_infer_request()
        try:
            yield runner
        finally:
            self._idle_runners.append(runner)

    def __reduce__(self):
        # A compiled program cannot be pickled, so unpickling loads it from the folder again.
        return type(self), (self.folder.absolute(), self.part)


def load_runnable(
    name: str | os.PathLike,
    task: str,
    outputs: Collection[str],
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, object]:
    """Load a model, exported or not, and its image processor. See `load_model` for the other arguments.

    Raises:
        ValueError: If an exported program has none of `outputs`, or if `device` is not the CPU, on which exported
            programs run.
    """
    if not is_exported(name):
        return load_model(name, task, device, trust_remote_code)
    if device is not None and choose_device(device).type != "cpu":
        raise ValueError(f"device {device}: the exported {os.fspath(name)!r} runs on the CPU.")
    model = ExportedModule(name)
    kind = TASKS[task].kind
    if not {*outputs} & {*model.outputs}:
        found = f"it computes {', '.join(model.outputs)}, expected {' or '.join(outputs)}"
        raise ValueError(f"Cannot load {os.fspath(name)!r} as {kind}: {found}.")
    return model, load_pretrained(AutoImageProcessor, name, kind)


def load_classifier(
    name: str | os.PathLike, device: str | torch.device | None = None, trust_remote_code: bool = False
) -> tuple[nn.Module, object]:
    """Load an image classifier, exported or not, and its image processor. See `load_model` for arguments."""
    return load_runnable(name, "image-classification", ["logits"], device, trust_remote_code)


def _runner_options(name: str, precision: str) -> dict[str, object]:
    """Return a runtime's options: PyTorch's number of threads and, for OpenVINO, the precision of the export."""
    if name == "openvino":
        hint = openvino_precision(precision)
        return {"config": {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": torch.get_num_threads()}}
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Turn off spinning: waiting threads would occupy CPU cores that PyTorch needs between the calls.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return {"session_options": options}


def openvino_precision(precision: str) -> str:
    """Return OpenVINO's precision for all layers that are not int8. OpenVINO's default depends on the machine."""
    return "bf16" if precision == "bfloat16" else "f32"
