"""`frugalvit info`: tokens, parameters, multiply-accumulates and speed of variants and of model folders."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from .architectures import COUNTED, architecture_of, image_side, variants
from .baselines import WithTokens
from .command_line import CommandParser, add_device_argument, positive
from .configuration.configuration_base import is_sparseformer, pair
from .macs import count_macs
from .speed import images_per_second
from .training.files import shipped_checkpoints, split_revision
from .training.loading import check_complete, choose_device, load_processor, loading_errors
from .training.preprocessing import size_made_by
from .training.text import format_table


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit info",
        description="List tokens (latent and [CLS]), image size, parameters and multiply-accumulates for one image, "
        "without and with attention's two products; of a CLIP or a LLaVA, those of its image side.",
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="NAME|FOLDER",
        help="variants of the papers, shipped models, folders or hub ids, owner/name@revision too "
        "(default: all variants and shipped models)",
    )
    parser.add_argument(
        "--speed",
        action="store_true",
        help="measure images per second, too, with each number of tokens that a model is trained for",
    )
    parser.add_argument("--batch-size", type=positive, default=8, help="of --speed: images at a time (default: 8)")
    add_device_argument(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.speed and not arguments.models:
        parser.error("argument --speed: name the models to measure")
    names = arguments.models or [*variants(), *shipped_checkpoints()]
    rows = [describe(name) for name in tqdm(names, desc="counting", leave=False, disable=None)]
    if arguments.speed:
        rows = with_speeds(rows, arguments.batch_size, choose_device(arguments.device))
    print(json.dumps(rows, indent=2) if arguments.json else format_table(rows))


@torch.no_grad()
def describe(name: str) -> dict[str, object]:
    """Count the tokens (with [CLS], `None` for a feature map), parameters and multiply-accumulates (`count_macs`) of a
    model: one of `variants()`, one that ships, a model folder or a hub id."""
    architecture, config = architecture_of(name)
    folder = Path(split_revision(name)[0])
    if folder.is_dir():
        # Only the weights' header is read.
        options = {"device_map": "meta", "ignore_mismatched_sizes": True, "output_loading_info": True}
        with loading_errors(name, COUNTED):
            model, report = architecture.from_pretrained(folder, **options)
        check_complete(name, model, report)
    else:
        with loading_errors(name, COUNTED), torch.device("meta"):
            model = architecture._from_config(config)
    vision = image_side(model)
    height, width = pair(vision.config.image_size)
    if vision.config.model_type.startswith("dinov2") and (folder / "preprocessor_config.json").is_file():
        # Its configuration has the size of its positions.
        height, width = size_made_by(load_processor(folder, COUNTED))
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
    """Measure the models of rows of `describe`, with random weights, and return a row for each number of tokens that
    they are trained for, with its costs, `num_tokens` (`None` without a choice) and `images/s`."""
    found = []
    models = {}
    images = {}
    for row in rows:
        architecture, config = architecture_of(row["name"])
        vision = image_side(architecture._from_config(config)).eval().to(device)
        config = vision.config
        size = pair(row["image_size"])
        for count in getattr(config, "trained_token_counts", [None]):
            model = vision if count is None else WithTokens(vision, count)
            tokens = row["tokens"] if count is None else config.num_prefix_tokens + count
            images[len(found)] = torch.randn(batch_size, config.num_channels, *size).to(device)
            models[len(found)] = model
            macs = count_macs(model, size, config.num_channels)._asdict()
            found.append(row | macs | {"tokens": tokens, "num_tokens": count})
    speeds = images_per_second(models, images, rounds=10)
    return [row | {"images/s": speeds[number]} for number, row in enumerate(found)]
