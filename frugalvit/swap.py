"""`frugalvit swap`: a LLaVA or another model that reads images and texts with a SparseFormer as its vision tower."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import datasets
import torch

from .common.data import load_images, sample
from .common.files import whole_folder
from .common.loading import load_llava, load_vision_model
from .common.reading import Reader
from .configuration.configuration_sparseformer_vlm import image_grid
from .evaluation.images import image_batches
from .modeling.swap import input_device, match_channels_, matching_processor, swap_vision_tower
from .options.swap import parse


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)

    # What cannot be written is known before anything is loaded.
    with whole_folder(arguments.output, arguments.overwrite) as folder:
        summary = write_swapped(arguments, folder)
    print(f"Wrote {arguments.output}: {summary}.")


def write_swapped(arguments: argparse.Namespace, folder: Path) -> str:
    """Put model and processor into a folder, and return a description of the model."""
    dtype = getattr(torch, arguments.dtype)
    tower, _ = load_vision_model(arguments.vision_model, "cpu")
    how = arguments.quantize, arguments.device_map
    llava, old_processor = load_llava(arguments.model, "cpu", dtype, *how, grids=True)
    before = image_grid(llava.config)
    model = swap_vision_tower(llava, tower, arguments.image_grid)
    if arguments.num_tokens is not None:
        model.set_num_tokens(arguments.num_tokens)
    processor = matching_processor(old_processor, model)
    matched = ""
    if arguments.dataset:
        images = sample(load_images(arguments.dataset, "train"), arguments.images, seed=0)
        pairs = pixel_pairs(processor, old_processor, images, arguments.skip_corrupt)
        place = input_device(llava), dtype
        match_channels_(model, llava, ([pixel_values.to(*place) for pixel_values in pair] for pair in pairs))
        matched = f", its channels matched on {len(images):,} images"
    if arguments.quantize:
        # Written, and loaded, as it is held.
        model.hf_quantizer, model.config.quantization_config = llava.hf_quantizer, llava.config.quantization_config
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    quantized = f", its language model in {arguments.quantize}" if arguments.quantize else ""
    if hasattr(model.config, "tower_config"):
        tokens, grid = model.config.tower_config.default_num_tokens, image_grid(model.config)
        counts = (
            f"{tokens} tokens instead of {before**2} patches make a grid of {grid} x {grid}, of which the language "
            f"model reads {model.config.tokens_per_grid} tokens"
        )
        hint = ""
    else:
        counts = f"{model.config.image_seq_length} tokens an image instead of {before**2} patches"
        hint = ". `frugalvit align-llava` lets the projector learn to read them"
    return f"{counts}, in {arguments.dtype}{quantized}{matched}{hint}"


def pixel_pairs(
    processor, old_processor, images: datasets.Dataset, skip_corrupt: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of images as two processors prepare them, for `match_channels_`."""
    both = [
        image_batches(Reader(each.image_processor, exact=True), images, batch_size=16, skip_corrupt=skip_corrupt)
        for each in (processor, old_processor)
    ]
    for (ours, _), (theirs, _) in zip(*both, strict=True):
        yield ours, theirs
