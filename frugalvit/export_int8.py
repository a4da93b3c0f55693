"""Quantize exported programs to int8, with the most sensitive layers in float32."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import exporters


# Largest share of the weights of linear layers that stays in float32.
FLOAT_SHARE = 0.1
# Number of calibration samples on which the sensitivity of each layer is measured.
SENSITIVITY_SAMPLES = 8
WEIGHTED = ["MatMul", "Gemm", "Conv"]


def quantize(part: nn.Module, program, name: str, calibration: list[dict[str, torch.Tensor]]):
    """Quantize a program to int8.

    Args:
        part (`Part`): The PyTorch module of the program.
        program (`openvino.Model` or `onnx_ir.Model`): The float32 program.
        name (`str`): The format, `"openvino"` or `"onnx"`.
        calibration (`list[dict[str, torch.Tensor]]`): Inputs with a batch size of 1.
    """
    layers = sensitive_layers(part, calibration[:SENSITIVITY_SAMPLES])
    make_quantizer = _openvino_quantizer if name == "openvino" else _onnx_quantizer
    return make_quantizer(part, program, layers, calibration).quantize(program, part.example(1), name)


class LinearCalls(TorchFunctionMode):
    """Record the inputs' ranges and the weights of all calls of `F.linear`, in the order of the calls."""

    def __init__(self):
        super().__init__()
        self.ranges = []
        self.num_weights = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.linear:
            inputs, weight = args[:2]
            self.ranges.append((min(inputs.min().item(), 0.0), max(inputs.max().item(), 0.0)))
            self.num_weights.append(weight.numel())
        return function(*args, **(kwargs or {}))


class OneInt8Layer(TorchFunctionMode):
    """Round input and weight of one call of `F.linear` to 8 bits.

    Args:
        index (`int`): Index of the call.
        low, high (`float`): Range of the input.
    """

    def __init__(self, index: int, low: float, high: float):
        super().__init__()
        self.remaining_calls = index
        self.low = low
        self.scale = max((high - low) / 255, 1e-12)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.linear:
            if self.remaining_calls == 0:
                inputs, weight, *bias = args
                zero_point = round(-self.low / self.scale)
                inputs = torch.fake_quantize_per_tensor_affine(inputs.float(), self.scale, zero_point, 0, 255)
                scales = weight.abs().amax(dim=1).clamp(min=1e-12) / 127
                zeros = torch.zeros_like(scales, dtype=torch.int32)
                weight = torch.fake_quantize_per_channel_affine(weight, scales, zeros, 0, -127, 127)
                args = (inputs, weight, *bias)
            self.remaining_calls -= 1
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def sensitive_layers(part: nn.Module, samples: list[Mapping[str, torch.Tensor]]) -> list[int]:
    """Return the linear layers whose quantization changes the first output most, as indices in the order of their
    calls. Together, these layers have at most `FLOAT_SHARE` of the weights of all linear layers."""
    inputs = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
    with LinearCalls() as calls:
        expected = _first_output(part, inputs)
    changes = []
    for index, (low, high) in enumerate(calls.ranges):
        with OneInt8Layer(index, low, high):
            computed = _first_output(part, inputs)
        changes.append(1 - F.cosine_similarity(computed, expected).mean().item())
    budget = FLOAT_SHARE * sum(calls.num_weights)
    chosen = []
    for index in sorted(range(len(changes)), key=changes.__getitem__, reverse=True):
        if calls.num_weights[index] <= budget:
            chosen.append(index)
            budget -= calls.num_weights[index]
    return chosen


def _first_output(part: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    values = next(iter(part(**inputs).values()))
    return (values[-1] if isinstance(values, tuple) else values).double().flatten(1)


def _openvino_quantizer(part: nn.Module, program, layers: list[int], calibration: list[dict[str, torch.Tensor]]):
    """Return NNCF's quantizer. `layers` and the layer whose inputs are pixels stay in float32."""
    import nncf
    from nncf.quantization.range_estimator import RangeEstimatorParametersSet

    # NNCF's default clips activations to the mean range of an image. With few tokens, this changes more labels.
    advanced = nncf.AdvancedQuantizationParameters(
        activations_range_estimator_params=RangeEstimatorParametersSet.MINMAX
    )
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        # On AVX2, sums of 8-bit products saturate. `overflow_fix` restricts weights to half of their range.
        advanced.overflow_fix = nncf.OverflowFix.ENABLE
    config = exporters.NNCFQuantizationConfig(subset_size=len(calibration), advanced_parameters=advanced)
    # OpenVINO's converter numbers the layers of each kind from 0, in the order of their calls.
    patterns = [f"linear_{index}/.*" for index in layers]
    if part.kind != "text_embeds":
        modules = (module for name, module in part.model.named_modules() if not name.startswith("text_"))
        first = next(module for module in modules if isinstance(module, nn.Conv2d | nn.Linear))
        patterns.append("convolution_0/.*" if isinstance(first, nn.Conv2d) else "linear_0/.*")
    config.ignored_scope = nncf.IgnoredScope(patterns=patterns, validate=False)
    return exporters.NNCFOpenVINOQuantizer(config, calibration_dataset=calibration)


def _onnx_quantizer(part: nn.Module, program, layers: list[int], calibration: list[dict[str, torch.Tensor]]):
    """Return ONNX Runtime's quantizer. `layers`, the layer whose inputs are pixels, and products of two activations
    (attention, mixing) stay in float32."""
    from onnxruntime.quantization import QuantType

    nodes = [node for node in program.graph if node.op_type in WEIGHTED]
    weighted = [node for node in nodes if any(value is not None and value.is_initializer() for value in node.inputs)]
    # `torch.export` numbers linear layers in the order of their calls, and gives the first one no number.
    in_float = {f"%linear_{index}" if index else "%linear" for index in layers}
    excluded = [node.name for node in nodes if node not in weighted or _traced_name(node) in in_float]
    if part.kind != "text_embeds":
        excluded.append(weighted[0].name)
    config = exporters.OnnxRuntimeStaticConfig(
        per_channel=True,
        op_types_to_quantize=WEIGHTED,
        nodes_to_exclude=excluded,
        # ONNX Runtime computes a product in int8 on x86 only if the activations are unsigned.
        activation_type=QuantType.QUInt8,
        # Products are sums in float32, so rounding them to 8 bits again would only lose precision.
        extra_options={"OpTypesToExcludeOutputQuantization": WEIGHTED},
    )
    return exporters.OnnxRuntimeQuantizer(config, calibration_dataset=calibration)


def _traced_name(node) -> str:
    """Return the name of the traced operation that became a node of an ONNX graph, such as `%linear_5`."""
    return node.metadata_props.get("pkg.torch.onnx.fx_node", "").partition(" ")[0]
