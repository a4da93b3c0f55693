"""`frugalvit info`: list tokens, parameters, multiply-accumulates and speed of models."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoImageProcessor

from .architectures import COUNTED, architecture_of, image_side, load_saved_model, variants
from .baselines import WithTokens
from .command_line import argument, read_options
from .configuration.configuration_base import is_sparseformer, pair
from .macs import count_macs
from .speed import images_per_second
from .training.arguments import POSITIVE, CheckedArguments
from .training.files import shipped_checkpoints, split_revision
from .training.loading import choose_device, load_pretrained
from .training.preprocessing import size_made_by
from .training.text import format_table


PROG = "frugalvit info"


@dataclass(kw_only=True)
class InfoOptions(CheckedArguments):
    """List each model's tokens (latent and [CLS]), image size, parameters, and multiply-accumulates for one image. The
    multiply-accumulates are listed without and with the two matrix products of attention. For a CLIP or a LLaVA, all
    columns except the parameters describe the vision model."""

    models: list[str] = argument(
        [],
        "Variants of the papers, shipped models, folders or hub ids (@revision, too). Default: all variants and "
        "shipped models.",
        positional=True,
    )
    speed: bool = argument(False, "Measure images per second, too, at each number of tokens that a model has.")
    batch_size: int = argument(8, "Images of a measured batch.")
    device: str | None = argument(None, "Device to measure on. Default: an accelerator if there is one.")
    json: bool = argument(False, "Print a JSON list instead of a table.")

    expected = {"batch_size": POSITIVE}

    def __post_init__(self):
        super().__post_init__()
        if self.speed and not self.models:
            raise ValueError("speed needs the names of the models to measure")


def main(argv: list[str] | None = None) -> None:
    options = read_options(InfoOptions, PROG, argv)
    names = options.models or [*variants(), *shipped_checkpoints()]
    rows = [describe(name) for name in tqdm(names, desc="counting", leave=False, disable=None)]
    if options.speed:
        rows = with_speeds(rows, options.batch_size, choose_device(options.device))
    print(json.dumps(rows, indent=2) if options.json else format_table(rows))


@torch.no_grad()
def describe(name: str) -> dict[str, object]:
    """Count the tokens, parameters and multiply-accumulates of a model.

    Args:
        name (`str`): A variant of the papers, a shipped model, a model folder or a hub id.

    Returns:
        `name`, `tokens` (including [CLS], or `None` if the model computes feature maps), `image_size`, `parameters`
        and the fields of `Macs`.
    """
    architecture, config = architecture_of(name)
    folder = Path(split_revision(name)[0])
    if folder.is_dir():
        # On the meta device, only the header of the weights file is read.
        model = load_saved_model(name, device_map="meta")
    else:
        with torch.device("meta"):
            model = architecture._from_config(config)
    vision = image_side(model)
    height, width = pair(vision.config.image_size)
    if vision.config.model_type.startswith("dinov2") and (folder / "preprocessor_config.json").is_file():
        # DINOv2's `config.image_size` is the size for position embeddings. The image processor outputs smaller images.
        height, width = size_made_by(load_pretrained(AutoImageProcessor, folder, COUNTED))
    if is_sparseformer(vision.config):
        tokens = vision.config.default_num_tokens + vision.config.num_prefix_tokens
    else:
        image = torch.empty(1, vision.config.num_channels, height, width, device="meta")
        hidden_states = vision(image, output_hidden_states=True).hidden_states[-1]
        tokens = hidden_states.shape[1] if hidden_states.ndim == 3 else None
    return {
        "name": name,
        "tokens": tokens,
        "image_size": height if height == width else [height, width],
        "parameters": model.num_parameters(),
        **count_macs(vision, (height, width), vision.config.num_channels)._asdict(),
    }


def with_speeds(rows: Sequence[dict[str, object]], batch_size: int, device: torch.device) -> list[dict[str, object]]:
    """Measure the speed of the models in the rows of `describe`. The models get random weights.

    Returns:
        A row for each model and each number of tokens that the model is trained for. The row has `images/s`, the
        fields of `Macs` at this number of tokens, and `num_tokens` (`None` if the number is fixed).
    """
    measured = []
    models = {}
    batches = {}
    for row in rows:
        architecture, config = architecture_of(row["name"])
        vision = image_side(architecture._from_config(config, dtype=torch.float32)).eval().to(device)
        config = vision.config
        size = pair(row["image_size"])
        for count in getattr(config, "trained_token_counts", [None]):
            model = vision if count is None else WithTokens(vision, count)
            tokens = row["tokens"] if count is None else config.num_prefix_tokens + count
            macs = count_macs(model, size, config.num_channels)._asdict()
            models[len(measured)] = model
            batches[len(measured)] = torch.randn(batch_size, config.num_channels, *size).to(device)
            measured.append(row | macs | {"tokens": tokens, "num_tokens": count})
    speeds = images_per_second(models, batches, rounds=10)
    return [row | {"images/s": speeds[number]} for number, row in enumerate(measured)]
