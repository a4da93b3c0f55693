"""Models as programs of other runtimes: OpenVINO, ONNX Runtime, ExecuTorch, or PyTorch without any of a model's code.

All that is asked of Transformers' exporters, which it calls experimental, is asked here. A folder that is written has
the programs and what the exporters need to run them (`export.json`), the model's configuration and, from
`frugalvit export`, a report of what was compared (`report.json`).
"""

import ast
import contextlib
import copy
import fnmatch
import importlib
import importlib.util
import inspect
import io
import json
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from packaging.version import parse
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from ..configuration.configuration_base import pair
from ..modeling.sparse_tokens import place_among
from .choices import EXPORT_PRECISIONS as PRECISIONS
from .files import forget_code, misshapen, read_json
from .num_tokens import using_tokens
from .tables import first_line
from .views import vision_config_of


MANIFEST, REPORT = "export.json", "report.json"
# Sizes of batches that a program takes, and tokens that any has.
MOST_IMAGES, MOST_TOKENS = 4_096, 2**31 - 1
# Formats whose int8 leaves the layer that reads the pixels in float32: results/int8_layers.json has what it suffers.
PIXELS_IN_FLOAT = ("openvino",)
# What holds tensors in a program's inputs and outputs.
PLAIN_TYPES = (None, "builtins.dict", "builtins.list", "builtins.tuple")
# Operators that ONNX Runtime computes in integers. All others stay in floating point.
INTEGER_OPERATORS = ["MatMul", "Gemm", "Conv"]


@dataclass(frozen=True)
class Format:
    """A runtime that models are exported for.

    Args:
        name (`str`): The beginning of the names of Transformers' classes for it.
        packages (`dict[str, str]`): Packages that it needs, by the name that Python imports.
        precisions (`tuple[str, ...]`): Those of `PRECISIONS` that it takes.
        program (`str`): File of a program, `{}` its name.
        any_batch (`bool`): Whether programs take batches and images of any size, and the number of tokens as an
            input; else one image of one size, and each number of tokens has a method of the program.
    """

    name: str
    packages: dict[str, str]
    precisions: tuple[str, ...]
    program: str
    any_batch: bool = True


FORMATS = {
    "openvino": Format("OpenVINO", {"openvino": "openvino", "nncf": "nncf"}, PRECISIONS, "openvino_{}.xml"),
    # Not bfloat16: on CPUs, ONNX Runtime 1.32 has no products, convolutions or additions in it.
    "onnx": Format(
        "Onnx",
        {"onnx": "onnx", "onnxruntime": "onnxruntime", "onnxscript": "onnxscript"},
        ("float32", "int8"),
        "{}.onnx",
    ),
    # Its lowering takes minutes, and a phone looks at one image at a time. Of a length that is read from an input,
    # Transformers' exporter says with ExecuTorch 1.5: "Cannot cast FakeTensor to number". Methods share their weights.
    "executorch": Format("Executorch", {"executorch": "executorch"}, ("float32", "int8"), "{}.pte", any_batch=False),
    # Not int8: PyTorch would load such a program with torchao alone, and make its numbers floats for each product.
    "torch": Format("Dynamo", {}, ("float32", "bfloat16"), "{}.pt2"),
}


@dataclass
class ExportedOutput(ModelOutput):
    """Outputs of an exported model; the fields depend on the model.

    Args:
        logits (`torch.FloatTensor`): `(batch, num_labels)`, of a segmenter `(batch, num_labels, height, width)`.
        image_embeds, text_embeds (`torch.FloatTensor`): `(batch, projection_dim)`, of a CLIP with norm 1.
        pooler_output, last_hidden_state (`torch.FloatTensor`): As of the model.
        image_features (`torch.FloatTensor`): `(batch, tokens, width)`, image tokens for a LLaVA's language model.
        feature_maps (`tuple`): As of `SparseFormerBackbone`.
        rois, sampling_points (`tuple`): As of `SparseFormerModel`.
    """

    logits: torch.FloatTensor | None = None
    image_embeds: torch.FloatTensor | None = None
    text_embeds: torch.FloatTensor | None = None
    pooler_output: torch.FloatTensor | None = None
    last_hidden_state: torch.FloatTensor | None = None
    image_features: torch.FloatTensor | None = None
    feature_maps: tuple[torch.FloatTensor, ...] | None = None
    rois: tuple[torch.FloatTensor, ...] | None = None
    sampling_points: tuple[torch.FloatTensor, ...] | None = None


class Part(nn.Module):
    """The part of a model that becomes one program. It maps images, or a CLIP's texts, to named tensors.

    Args:
        model (`PreTrainedModel`): In evaluation mode.
        kind (`str`): "model", "image_embeds", "text_embeds" or "image_features".
        output_rois (`bool`): With `rois` and `sampling_points`.
        token_counts (sequence of `int`): Numbers of latent tokens that the program is to take as an input, increasing,
            of those that the model is made for; none of one whose number is settled.
        any_size (`bool`): Whether the program is to take images of any height and width.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kind: str,
        output_rois: bool = False,
        token_counts: Sequence[int] = (),
        any_size: bool = False,
    ):
        super().__init__()
        self.model, self.kind, self.output_rois = model, kind, output_rois
        self.token_counts, self.any_size = tuple(token_counts), any_size

    def example(self, batch_size: int) -> dict[str, torch.Tensor]:
        """Return noise as inputs and, if the number of tokens can be chosen, the largest one."""
        inputs = example_of(self.model.config, self.kind == "text_embeds", batch_size)
        return inputs | ({"num_tokens": torch.tensor(self.token_counts[-1])} if self.token_counts else {})

    def dynamic_shapes(self) -> dict[str, dict | None]:
        """Return the sizes of inputs that a program learns when it runs, as `torch.export` takes them."""
        batch = torch.export.Dim("batch", min=1, max=MOST_IMAGES)
        shapes = {name: {0: batch} if values.dim() else None for name, values in self.example(2).items()}
        if self.any_size:
            shapes["pixel_values"] |= dict.fromkeys((2, 3), torch.export.Dim.DYNAMIC)
        return shapes

    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        num_tokens: torch.Tensor | int | None = None,
    ) -> dict[str, torch.Tensor | tuple[torch.Tensor, ...]]:
        if isinstance(num_tokens, torch.Tensor):
            # The program has no other numbers than these, which were compared.
            num_tokens = torch.tensor(self.token_counts)[place_among(self.token_counts, num_tokens)]
        with contextlib.nullcontext() if num_tokens is None else using_tokens(self.model, num_tokens):
            return self._compute(pixel_values, input_ids, attention_mask)

    def _compute(
        self, pixel_values: torch.Tensor | None, input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None
    ) -> dict[str, torch.Tensor | tuple[torch.Tensor, ...]]:
        if self.kind == "text_embeds":
            texts = self.model.get_text_features(input_ids=input_ids, attention_mask=attention_mask)
            return {"text_embeds": F.normalize(texts.pooler_output, dim=-1)}
        if self.kind == "image_embeds":
            images = self.model.get_image_features(pixel_values=pixel_values)
            return {"image_embeds": F.normalize(images.pooler_output, dim=-1)}
        if self.kind == "image_features":
            return {"image_features": _image_features(self.model, pixel_values)}
        outputs = self.model(pixel_values, **({"output_rois": True} if self.output_rois else {}))
        found = ((name, outputs.get(name)) for name in ExportedOutput.__dataclass_fields__)
        return {name: value for name, value in found if value is not None}


def _image_features(model: PreTrainedModel, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return the tokens that a LLaVA's language model reads, `(batch, tokens, width)`. The model's own method returns
    a list with one entry an image, and so fixes the size of the batch."""
    config = model.config
    states = model.model.vision_tower(pixel_values, output_hidden_states=True).hidden_states
    layers = config.vision_feature_layer
    layers = [layers] if isinstance(layers, int) else layers
    first = 1 if config.vision_feature_select_strategy == "default" else 0
    return model.model.multi_modal_projector(torch.cat([states[layer][:, first:] for layer in layers], dim=-1))


def parts_of(
    model: PreTrainedModel, output_rois: bool = False, token_counts: Sequence[int] = (), any_size: bool = False
) -> dict[str, Part]:
    """The programs that a model becomes, by name; arguments as of `Part`.

    Raises:
        ValueError: if the model cuts images into tiles, or pools its grid of patches.
    """
    if hasattr(model.config, "tower_config"):
        raise ValueError(
            f"A {type(model).__name__} prepares its grid in ways that no program does. Export the SparseFormer that "
            "was swapped into it, from its own folder."
        )
    options = {"token_counts": token_counts, "any_size": any_size}
    if hasattr(model, "get_text_features"):
        return {"vision_model": Part(model, "image_embeds", **options), "text_model": Part(model, "text_embeds")}
    if hasattr(model, "get_image_features"):
        return {"vision_model": Part(model, "image_features", **options)}
    return {"model": Part(model, "model", output_rois, **options)}


def check_format(name: str, precision: str, any_size: bool = False):
    """Raise a ValueError if a format does not take a precision, or images of any size that are asked for, or if a
    package that it needs is not installed."""
    found = FORMATS[name]
    if not found.any_batch and any_size:
        raise ValueError(f"--any-size is not for {name}, whose programs have the size that they were exported with.")
    if precision not in found.precisions:
        raise ValueError(f"--precision {precision} is not for {name}, which takes {', '.join(found.precisions)} here.")
    # Before, there were exporters to fewer formats, without quantization.
    if parse(transformers.__version__).release < (5, 20):
        raise ValueError(f"Exported models need Transformers 5.20 or newer, this is {transformers.__version__}.")
    needed = [package for module, package in found.packages.items() if importlib.util.find_spec(module) is None]
    needed = [package for package in needed if package != "nncf" or precision == "int8"]
    if needed:
        extra = "executorch" if name == "executorch" else "export"
        raise ValueError(f"{name} needs {', '.join(needed)}: pip install 'frugalvit[{extra}]'.")


def export_parts(
    parts: Mapping[str, Part],
    config: PreTrainedConfig,
    name: str,
    precision: str,
    folder: Path,
    calibration: Mapping[str, list[dict[str, torch.Tensor]]] | None = None,
    float_layers: Iterable[str] = (),
):
    """Write parts of a model as programs, with the model's configuration.

    Args:
        parts (mapping of `str` to `Part`): What `parts_of` returns, on the CPU in float32.
        config (`PreTrainedConfig`): The model's.
        name, precision (`str`): One of `FORMATS` and one of `PRECISIONS`, which `check_format` lets pass.
        folder (`Path`): Where to write.
        calibration (mapping, *optional*): For int8, by part, inputs of which activations' ranges are measured.
        float_layers (iterable of `str`, *optional*): For int8, names of modules or patterns, as of `modules_named`,
            whose linear layers and convolutions stay in floating point.

    Raises:
        ValueError: for int8, if numbers that a part computes have no finite range.
    """
    found = FORMATS[name]
    with _quiet():
        exporters = importlib.import_module("transformers.exporters")
        of_library = getattr(exporters, f"{found.name}Exporter")
        exporter = _executorch_exporter(exporters) if name == "executorch" else of_library()
        components = {}
        for part_name, part in parts.items():
            options = {}
            if precision == "int8":
                kept = modules_named(part.model, float_layers)
                options["quantizer"] = _quantizer(exporters, name, part, calibration[part_name], kept)
            if precision == "bfloat16" and name == "openvino":
                # It computes in bfloat16 from weights of either half precision, and keeps float16 more exactly.
                options["compress_to_fp16"] = True
            if precision == "bfloat16" and name == "torch":
                # A copy: the original is what it is compared with.
                part = copy.deepcopy(part).to(torch.bfloat16)
            inputs = part.example(2 if found.any_batch else 1)
            if found.any_batch:
                options["dynamic_shapes"] = part.dynamic_shapes()
            weight = next(part.parameters())
            inputs = {key: x.to(weight.dtype) if x.is_floating_point() else x for key, x in inputs.items()}
            try:
                with torch.no_grad():
                    exported = exporter.export(part, inputs, getattr(exporters, f"{found.name}Config")(**options))
            except AssertionError as error:
                # ONNX Runtime's quantizer, of ranges that are not finite.
                raise ValueError(
                    f"Cannot write {part_name!r} in {precision} for {name}: {error}. Some of what it computes is not "
                    "finite, or too large; its weights may be damaged."
                ) from error
            components[part_name] = exported.components["model"]
        exporters.ExportedModel(components, exporter.export_format).save_pretrained(folder)
    config.save_pretrained(folder)
    forget_code(folder)


def first_layer(model: nn.Module) -> str:
    """The name of the layer that reads the pixels: the first convolution or linear layer that is not for texts."""
    layers = (name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear))
    return next(name for name in layers if not name.startswith("text_"))


def modules_named(model: nn.Module, patterns: Iterable[str]) -> set[str]:
    """Names of a model's modules that patterns such as `classifier` or `*.mlp` match.

    Raises:
        ValueError: if a pattern matches none.
    """
    names, found = [name for name, _ in model.named_modules() if name], set()
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            children = ", ".join(name for name, _ in model.named_children())
            raise ValueError(
                f"{type(model).__name__} has no module {pattern!r}. Expected a name such as those of its parameters, "
                f"or a pattern with *; it begins with {children}."
            )
        found.update(matches)
    return found


def _quantizer(exporters, name: str, part: Part, calibration: list[dict[str, torch.Tensor]], kept: set[str]):
    """The exporter's quantizer: of weights by channel, of activations by their ranges for the calibration's inputs.
    `kept` are modules of the part's model whose layers stay in floating point."""
    # As the program names them.
    kept = {f"model.{module}" for module in kept}
    if name == "openvino":
        # As transformers are quantized: norms, softmax and what adds positions stay in floating point.
        config = exporters.NNCFQuantizationConfig(subset_size=len(calibration))
        if layers := _layers_within(part, kept):
            import nncf

            patterns = [rf"{layer}/.*" for layer in layers]
            # What OpenVINO computed beforehand is not in its graph any more.
            config.ignored_scope = nncf.IgnoredScope(patterns=patterns, validate=False)
        return exporters.NNCFOpenVINOQuantizer(config, calibration_dataset=calibration)
    if name == "executorch":
        from executorch.backends.xnnpack.quantizer import xnnpack_quantizer

        config = xnnpack_quantizer.get_symmetric_quantization_config(is_per_channel=True)
        quantizer = xnnpack_quantizer.XNNPACKQuantizer()
        # By itself it takes additions and products of coordinates, too, and a fifth of the labels changed.
        for operator in (torch.ops.aten.linear.default, torch.ops.aten.conv2d.default):
            quantizer.set_operator_type(operator, config)
        quantizer.set_filter_function(lambda node: kept.isdisjoint(_modules_around(node)))
        bucketize = torch.bucketize

        class ExecutorchQuantizer(exporters.PT2EQuantizer):
            def quantize(self, *args):
                # The exporter has put in its place what compares every number with every bin; calibration, which
                # makes histograms, took more than 20 minutes by it instead of one.
                exporters_own, torch.bucketize = torch.bucketize, bucketize
                try:
                    return super().quantize(*args)
                finally:
                    torch.bucketize = exporters_own

        return ExecutorchQuantizer(quantizer, calibration_dataset=calibration)

    class OnnxQuantizer(exporters.OnnxRuntimeQuantizer):
        def quantize(self, model, sample_inputs, export_format):
            # Names of nodes are those of the converted program.
            self.config.nodes_to_exclude = [
                node.name
                for node in model.graph
                if not kept.isdisjoint(ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]")))
            ]
            return super().quantize(model, sample_inputs, export_format)

    static = exporters.OnnxRuntimeStaticConfig(
        per_channel=True,
        op_types_to_quantize=INTEGER_OPERATORS,
        # Products of activations (attention, mixing) stay in floating point.
        extra_options={"MatMulConstBOnly": True},
    )
    return OnnxQuantizer(static, calibration_dataset=calibration)


def _layers_within(part: Part, modules: set[str]) -> list[str]:
    """Linear layers and convolutions inside modules, as OpenVINO's converter names them: counted by kind, in the
    order of the program."""
    kinds = {torch.ops.aten.linear.default: "linear", torch.ops.aten.conv2d.default: "convolution"}
    program, counts, found = torch.export.export(part, (), part.example(2)), Counter(), []
    for node in program.graph.nodes:
        if kind := kinds.get(node.target):
            if not modules.isdisjoint(_modules_around(node)):
                found.append(f"{kind}_{counts[kind]}")
            counts[kind] += 1
    return found


def _modules_around(node: torch.fx.Node) -> list[str]:
    """Names of the modules that a node of a program is in."""
    return [name for name, _ in node.meta.get("nn_module_stack", {}).values()]


def method_of(num_tokens: int | None, token_counts: Iterable[int]) -> str:
    """Return the name of the method of an ExecuTorch program for a number of tokens, `forward` for the most and where
    there is one number."""
    return f"forward_{num_tokens}_tokens" if num_tokens in sorted(token_counts)[:-1] else "forward"


def _executorch_exporter(exporters):
    """The exporter to ExecuTorch, which writes a method for each number of tokens of a part. Methods have the same
    weights, so they are there once."""
    from executorch.exir.passes.constant_prop_pass import constant_prop_pass

    library = importlib.import_module("transformers.exporters.exporter_executorch")

    class ExecutorchExporter(exporters.ExecutorchExporter):
        def export_program(self, model: Part, sample_inputs: dict[str, torch.Tensor], config):
            inputs = {name: x for name, x in sample_inputs.items() if name != "num_tokens"}
            model, inputs, partitioner = library.prepare_for_xnnpack(model, inputs)
            programs = {}
            with library.apply_patches("executorch"), library.apply_patches("executorch.xnnpack"):
                for count in model.token_counts or [None]:
                    with contextlib.nullcontext() if count is None else using_tokens(model.model, count):
                        program, metadata = exporters.DynamoExporter.export_program(self, model, inputs, config)
                    library.apply_fx_program_fixes("executorch", program)
                    library.apply_fx_node_fixes("executorch", program.graph_module)
                    # Positions of another grid are interpolated now; the runtime has no operator for it.
                    programs[method_of(count, model.token_counts)] = constant_prop_pass(program)
                edge = library.to_edge_transform_and_lower(
                    programs, partitioner=partitioner, compile_config=library._get_edge_compile_config("xnnpack")
                )
                return edge.to_executorch(), metadata

    return ExecutorchExporter()


@contextlib.contextmanager
def _quiet():
    """Silence the exporters, which report each step, and the packages that they call. Errors pass."""
    # NNCF, when it is imported, puts a class of its own in the place of all loggers to come.
    disabled, logger_class = logging.root.manager.disable, logging.getLoggerClass()
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        logging.setLoggerClass(logger_class)


def example_of(config: PreTrainedConfig, reads_texts: bool, batch_size: int) -> dict[str, torch.Tensor]:
    """Return noise as inputs: images, or texts for a CLIP's second program."""
    generator = torch.Generator().manual_seed(0)
    if reads_texts:
        text = config.text_config
        ids = torch.randint(text.vocab_size, (batch_size, text.max_position_embeddings), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    vision = vision_config_of(config)
    size = pair(vision.image_size)
    return {"pixel_values": torch.randn(batch_size, vision.num_channels, *size, generator=generator)}


def is_exported(folder: str | os.PathLike) -> bool:
    """Whether `frugalvit export` wrote a folder."""
    return all((Path(folder).expanduser() / name).is_file() for name in (MANIFEST, REPORT))


def read_report(folder: Path) -> dict:
    """Read the report that `frugalvit export` wrote into a folder.

    Raises:
        ValueError: if the folder is not from `frugalvit export`, or its programs are not of the format that the report
            names. A format that runs code when it is loaded must not pass for one that does not.
    """
    wrong = f"Cannot load {str(folder)!r}: "
    try:
        report = read_json(
            folder / REPORT, {"format": str, "precision": str, "parts": dict[str, dict], "macs": int | None}
        )
        manifest = read_json(folder / MANIFEST, {"export_format": str, "components": dict[str, dict]})
    except (ValueError, OSError) as error:
        raise ValueError(f"{wrong}{REPORT} or {MANIFEST} is none that frugalvit export wrote. {error}") from error
    found = FORMATS.get(report["format"])
    if found is None or report["precision"] not in PRECISIONS:
        raise ValueError(f"{wrong}{report['format']}, {report['precision']} is none of its formats.")
    components, parts = manifest["components"], report["parts"]
    if manifest["export_format"] != found.name.lower() or not components or components.keys() != parts.keys():
        raise ValueError(f"{wrong}{REPORT} and {MANIFEST} speak of other programs; export the model again.")
    for name, component in components.items():
        if problem := misshapen(component, {"file": str, "metadata": dict}) or misshapen(
            parts[name], {"outputs": list[str], "num_tokens": dict[str, dict] | None}
        ):
            raise ValueError(f"{wrong}the program {name!r} is described in another way than expected: {problem}.")
        file, outputs, expected = component["file"], parts[name]["outputs"], found.program.format(name)
        if file != expected or Path(file).name != file or not (folder / file).is_file():
            raise ValueError(f"{wrong}{MANIFEST} names the file {file!r}, expected {expected!r} beside it.")
        try:
            counts_of(parts[name])
        except ValueError as error:
            raise ValueError(f"{wrong}the program {name!r} takes other numbers of tokens than expected.") from error
        if not outputs or not {*outputs} <= ExportedOutput.__dataclass_fields__.keys():
            raise ValueError(f"{wrong}the program {name!r} computes {outputs}, expected names of `ExportedOutput`.")
        for spec in ("in_spec", "out_spec"):
            if not _is_plain(component["metadata"].get(spec)):
                raise ValueError(f"{wrong}{spec} in {MANIFEST} has more than dicts, lists and tuples of tensors.")
    return report


def counts_of(part: dict) -> list[int]:
    """Return the numbers of tokens that a program takes, from its part of a report; none if its number is settled.

    Raises:
        ValueError: if these are no numbers.
    """
    counts = sorted(map(int, part.get("num_tokens") or ()))
    if counts and not 1 <= counts[0] <= counts[-1] <= MOST_TOKENS:
        raise ValueError(f"`num_tokens` are {counts}, expected 1 to {MOST_TOKENS}.")
    return counts


def measured_of(part: dict) -> dict[int | None, dict]:
    """Return the measurements of a program in its part of a report, for each number of tokens that it takes. The key
    is `None` where the number is settled."""
    return {count: part["num_tokens"][str(count)] for count in counts_of(part)} or {None: part}


def _is_plain(spec: str | None) -> bool:
    """Whether a structure of tensors, as `torch.utils._pytree.treespec_dumps` writes it, has only dicts, lists and
    tuples. For other types, PyTorch imports the modules that the structure names."""
    if spec is None:
        return True
    try:
        _, *nodes = json.loads(spec)
        while nodes:
            node = nodes.pop()
            context = node["context"] if node["type"] is None else json.loads(node["context"])
            if node["type"] not in PLAIN_TYPES or misshapen(context, list[str] | None):
                return False
            nodes += node["children_spec"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
    return True


class ExportedModule(nn.Module):
    """A program, called as the model that it came from: `config`, `device`, and outputs with names.

    Args:
        folder (`str` or `os.PathLike`): What `frugalvit export` wrote.
        part (`str`, *optional*): The program, of several; the one that sees images if not given.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Load programs of torch, too, which are pickled: they can run any code when they are loaded.

    Raises:
        ValueError: if the folder is damaged, its runtime is not installed, or it is not trusted.
    """

    def __init__(self, folder: str | os.PathLike, part: str | None = None, trust_remote_code: bool = False):
        super().__init__()
        folder = Path(folder).expanduser()
        self.folder, self.report = folder, read_report(folder)
        self.format, self.precision = self.report["format"], self.report["precision"]
        check_format(self.format, self.precision)
        if self.format == "torch" and not trust_remote_code:
            raise ValueError(
                f"Cannot load {str(folder)!r}: a program of torch is pickled and can run any code. If you trust who "
                "wrote it, pass --trust-remote-code."
            )
        try:
            with _quiet():
                self.config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
                exporters = importlib.import_module("transformers.exporters")
                load = exporters.ExportedModel.from_pretrained
                options = self._options()
                if self.format == "torch" and "trust_remote_code" in inspect.signature(load).parameters:
                    options["trust_remote_code"] = True  # From Transformers 5.24 on.
                program = load(folder, device="cpu", **options)
        # As many ways to fail as there are runtimes.
        except Exception as error:
            line = first_line(error)
            raise ValueError(f"Cannot load {str(folder)!r} as a program of {self.format}: {line}") from error
        # In the order of `parts_of`.
        part = part or next(iter(program.runners))
        if part not in program.runners:
            raise ValueError(f"{str(folder)!r} has no program {part!r}, it has {', '.join(program.runners)}.")
        self._runner, self.outputs = program.runners[part], self.report["parts"][part]["outputs"]
        if self.format == "executorch":
            # Methods that calls have asked for; loading one takes a while. Other runtimes hold no program besides.
            self._program, self._methods = program.components[part].program, {}
        self.token_counts, self.num_tokens = counts_of(self.report["parts"][part]), None
        if self.token_counts:
            own = getattr(vision_config_of(self.config), "default_num_tokens", None)
            self.num_tokens = own if own in self.token_counts else self.token_counts[-1]
        self.device = torch.device("cpu")
        self.eval()

    def _options(self) -> dict:
        """Return the runtime's options: as many threads as PyTorch takes, and the precision of the export."""
        threads = torch.get_num_threads()
        if self.format == "openvino":
            hint = openvino_precision(self.precision)
            return {"config": {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads}}
        if self.format == "onnx":
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads
            # Its threads would go on turning after each call, and take the cores from PyTorch's work around it.
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            return {"session_options": options}
        return {}

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if (self.format, self.precision) == ("torch", "bfloat16") else torch.float32

    @property
    def base_model(self) -> "ExportedModule":
        return self

    def check_num_tokens(self, num_tokens: int) -> int:
        """Return the number if the program takes it.

        Raises:
            ValueError: if it does not.
        """
        if not self.token_counts:
            raise ValueError(
                "This exported model has the tokens that it was exported with; `frugalvit export --num-tokens all` "
                "writes one for several."
            )
        if num_tokens not in self.token_counts:
            counts = ", ".join(map(str, self.token_counts))
            raise ValueError(f"`num_tokens` is {num_tokens}, expected one that the program is for: {counts}.")
        return num_tokens

    def set_num_tokens(self, num_tokens: int):
        """Choose the latent tokens of calls that choose none; errors as of `check_num_tokens`."""
        self.num_tokens = self.check_num_tokens(num_tokens)

    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        output_rois: bool | None = None,
        num_tokens: int | None = None,
        **inputs,
    ):
        """Run the program. Inputs are those of the original model; the export has settled `output_rois`.

        Returns:
            `ExportedOutput`: In float32, or in the precision in which the program computes.

        Raises:
            ValueError: if RoIs are asked for that are not there, or a number of tokens that the program does not take.
        """
        if output_rois and "rois" not in self.outputs:
            raise ValueError("The model was exported without its RoIs; `frugalvit export --output-rois` keeps them.")
        if pixel_values is not None:
            inputs["pixel_values"] = pixel_values.to(self.device, self.dtype)
        size = len(next(iter(inputs.values())))
        num_tokens = self.num_tokens if num_tokens is None else self.check_num_tokens(num_tokens)
        if num_tokens is not None:
            self._choose(num_tokens, inputs)
        if FORMATS[self.format].any_batch or size == 1:
            return ExportedOutput(**self._run(inputs))
        singles = [self._run({name: x[index : index + 1] for name, x in inputs.items()}) for index in range(size)]
        return ExportedOutput(**{name: _join([single[name] for single in singles]) for name in singles[0]})

    def _choose(self, num_tokens: int, inputs: dict[str, torch.Tensor]):
        """Make the next run one with so many tokens: by the program's method for them, or by an input."""
        if self.format != "executorch":
            inputs["num_tokens"] = torch.tensor(num_tokens)
            return
        name = method_of(num_tokens, self.token_counts)
        if name not in self._methods:
            self._methods[name] = self._program.load_method(name)
        self._runner.method = self._methods[name]

    def _run(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | tuple[torch.Tensor, ...]]:
        try:
            with torch.no_grad():
                outputs = self._runner(**inputs)
        # As many ways to fail as there are runtimes.
        except Exception as error:
            line = first_line(error)
            raise ValueError(f"The program of {self.format} in {str(self.folder)!r} does not run: {line}") from error
        if outputs.keys() != {*self.outputs}:
            raise ValueError(
                f"The program of {self.format} in {str(self.folder)!r} computes {', '.join(outputs)}, expected "
                f"{', '.join(self.outputs)}, as {REPORT} says."
            )
        # The runtime's own memory, which its next call writes to.
        return {
            name: tuple(x.clone() for x in value) if isinstance(value, tuple | list) else value.clone()
            for name, value in outputs.items()
        }


def _join(values: list):
    """Join the outputs of single images to those of a batch."""
    if isinstance(values[0], tuple):
        return tuple(torch.cat(each) for each in zip(*values, strict=True))
    return torch.cat(values)


def openvino_precision(precision: str) -> str:
    """Return the precision in which OpenVINO computes where numbers are not int8. By default it takes bfloat16 where
    that is fast, so a model's answers would differ from machine to machine."""
    return "bf16" if precision == "bfloat16" else "f32"
