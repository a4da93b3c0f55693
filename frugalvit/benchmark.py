"""`frugalvit benchmark`: images a second of models, side by side, and beside the speed that the machine can have."""

import itertools
import json

import torch
from torch import nn
from tqdm import tqdm
from transformers import ViTConfig, ViTForImageClassification

from .architectures import architecture_of, image_side, image_size_of
from .common.exported import ExportedModule, is_exported
from .common.files import check_file_path, write_json
from .common.loading import choose_device, one_error
from .common.macs import count_macs, macs_of
from .common.speed import measure
from .common.tables import format_table
from .common.versions import origin
from .options.benchmark import parse


# What SparseFormers are compared with, as Transformers runs them.
VITS = {
    "vit-base": {},
    "vit-large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
# Passes of small batches are short: up to so many times as many as of the largest.
MOST_ROUNDS = 10


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    if arguments.output:
        check_file_path(arguments.output)
    device = str(choose_device(arguments.device))

    names = list(dict.fromkeys(arguments.models))
    models = {
        name: build_model(name, arguments.trust_remote_code)
        for name in tqdm(names, desc="building", leave=False, disable=None)
    }
    sizes = {name: image_size_of(model) for name, model in models.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {' x '.join(map(str, size))}" for name, size in sizes.items())
        raise ValueError(f"The models take images of different sizes ({listed}); expected one size for all.")
    rows = measure_all(
        models,
        sizes[names[0]],
        arguments.batch_size,
        [getattr(torch, dtype) for dtype in arguments.dtype],
        device,
        arguments.rounds,
        arguments.compile,
    )
    print(json.dumps(rows, indent=2) if arguments.json else format_table(rows))
    if arguments.output:
        settings = {"device": device, "threads": torch.get_num_threads(), "rounds": arguments.rounds}
        write_json(arguments.output, {"settings": settings, **origin(), "rows": rows})


def build_model(name: str, trust_remote_code: bool = False) -> nn.Module:
    """Make a model by name, with random weights, or load an exported one. A CLIP or a LLaVA gives its image side.

    Raises:
        ValueError: if there is no such model.
    """
    if is_exported(name):
        return ExportedModule(name)
    if name in VITS:
        return ViTForImageClassification(ViTConfig(num_labels=1000, **VITS[name])).eval()
    if name.startswith("timm:"):
        import timm

        try:
            return timm.create_model(name.removeprefix("timm:")).eval()
        except RuntimeError as error:
            raise ValueError(f"{name!r} is no model of timm: {error}") from error
    architecture, config = architecture_of(name)
    with one_error(name, "a model to measure"):
        model = image_side(architecture._from_config(config)).eval()
        # A model that cannot compute fails here.
        channels, *size = image_size_of(model)
        count_macs(model, tuple(size), channels)
    return model


def measure_all(
    models: dict[str, nn.Module],
    image_size: tuple[int, int, int],
    batch_sizes: list[int],
    dtypes: list[torch.dtype],
    device: str,
    rounds: int = 10,
    compiled: bool = False,
) -> list[dict[str, object]]:
    """The rows of `measure` for every dtype and batch size, with `dtype` and `macs`.

    Args:
        models (`dict[str, nn.Module]`): Models in evaluation mode; they are moved and cast.
        image_size (`tuple[int, int, int]`): Channels, height and width.
        batch_sizes (`list[int]`), dtypes (`list[torch.dtype]`), device (`str`): Each combination is measured.
        rounds (`int`): Timed passes of each model; in proportion more for batches that are smaller than the largest.
        compiled (`bool`): Whether each model is also measured compiled, as another row.
    """
    channels, *size = image_size
    programs = {name: model for name, model in models.items() if isinstance(model, ExportedModule)}
    macs = {
        name: model.report.get("macs") if name in programs else macs_of(model, tuple(size), channels)
        for name, model in models.items()
    }
    rows = []
    settings = [*itertools.product(dtypes, batch_sizes)]
    for dtype, batch_size in tqdm(settings, desc="measuring", leave=False, disable=None):
        # A program computes in what it was exported with.
        timed = {
            name: model.to(device, dtype)
            for name, model in models.items()
            if dtype == dtypes[0] or name not in programs
        }
        costs = dict(macs)
        if compiled:
            # One program a batch size, as serving compiles it.
            torch.compiler.reset()
            for name in [name for name in models if name not in programs]:
                timed[f"{name}, compiled"] = torch.compile(timed[name], dynamic=False)
                costs[f"{name}, compiled"] = macs[name]
        pixel_values = torch.randn(batch_size, *image_size).to(device, dtype)
        more = min(max(batch_sizes) // batch_size, MOST_ROUNDS)
        for row in measure(timed, costs, pixel_values, rounds * more):
            program = programs.get(row["row"])
            precision = program.precision if program else str(dtype).removeprefix("torch.")
            rows.append({**row, "dtype": precision, "macs": costs[row["row"]]})
    return rows
