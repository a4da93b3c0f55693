"""`frugalvit swap`: replace the vision tower of a vision-language model by a SparseFormer."""

from collections.abc import Iterator
from dataclasses import dataclass

import datasets
import torch

from .command_line import OutputOptions, argument, read_options
from .configuration.configuration_sparseformer_vlm import image_grid
from .evaluation.images import image_batches
from .modeling.vision_tower import input_device, match_channels_, matching_processor, swap_vision_tower
from .training.arguments import POSITIVE
from .training.choices import DEVICE_MAPS, DTYPES, QUANTIZATIONS
from .training.data import load_images, sample
from .training.files import atomic_directory, check_output_outside_input
from .training.loading import GRID_VLMS, SEQUENCE_VLMS, load_model


PROG = "frugalvit swap"


@dataclass(kw_only=True)
class SwapOptions(OutputOptions):
    """Replace the vision tower of a LLaVA, a PaliGemma, a Gemma 3 or a LLaVA-OneVision by a SparseFormer that was
    bootstrapped from this tower. Write the model and its processor. The language model stays unchanged."""

    model: str = argument(help="The vision-language model: folder or hub id (@revision, too).")
    vision_model: str = argument(help="The SparseFormer: a folder that `frugalvit bootstrap` wrote.")
    num_tokens: int | None = argument(None, "Latent tokens. Default: the SparseFormer's.")
    image_grid: int | None = argument(None, "Rows of the grid that a Gemma 3 or a LLaVA-OneVision reads.")
    dtype: str = argument("float32", "Data type of the written weights.", choices=DTYPES)
    quantize: str | None = argument(
        None, "Quantize the language model (needs frugalvit[quantize]).", choices=QUANTIZATIONS
    )
    device_map: str | None = argument(None, "Distribute the weights, as Accelerate does.", choices=DEVICE_MAPS)
    dataset: list[str] | None = argument(None, "Images to match the vision tower's channels on.")
    images: int = argument(1000, "Number of these images.")
    skip_corrupt: bool = argument(False, "Leave out images that cannot be read, and print their names.")

    expected = {"image_grid": POSITIVE, "images": POSITIVE, "num_tokens": POSITIVE}


def main(argv: list[str] | None = None) -> None:
    options = read_options(SwapOptions, PROG, argv)
    check_output_outside_input(options.output, options.model, options.vision_model)
    dtype = getattr(torch, options.dtype)
    with atomic_directory(options.output, options.overwrite) as folder:
        tower, _ = load_model(options.vision_model, "image-feature-extraction", "cpu")
        vlm, old_processor = load_model(
            options.model,
            "image-text-to-text",
            "cpu",
            model_types=(*SEQUENCE_VLMS, *GRID_VLMS),
            dtype=dtype,
            quantize=options.quantize,
            device_map=options.device_map,
        )
        model = swap_vision_tower(vlm, tower, options.image_grid)
        if options.num_tokens is not None:
            model.set_num_tokens(options.num_tokens)
        processor = matching_processor(old_processor, model)
        num_patches = image_grid(vlm.config) ** 2
        about = f", in {options.dtype}"
        if options.quantize:
            # The quantized weights are written unchanged, so loading needs the quantizer and its configuration.
            model.hf_quantizer = vlm.hf_quantizer
            model.config.quantization_config = vlm.config.quantization_config
            about += f", its language model in {options.quantize}"
        if options.dataset:
            images = sample(load_images(options.dataset, "train"), options.images, seed=0)
            device = input_device(vlm)
            pairs = pixel_pairs(processor, old_processor, images, options.skip_corrupt)
            match_channels_(model, vlm, ([pixel_values.to(device, dtype) for pixel_values in pair] for pair in pairs))
            about += f", its channels matched on {len(images):,} images"
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
    vision = model.config.vision_config
    if vision.model_type == "sparseformer_grid":
        count = vision.tower_config.default_num_tokens
        rows = image_grid(model.config)
        tokens = f"{count} tokens in the place of {num_patches} patches, placed on a grid of {rows} x {rows}"
    else:
        tokens = f"{model.config.image_seq_length} tokens an image in the place of {num_patches} patches"
        about += ". `frugalvit align-llava` trains the projector to read them"
    print(f"Wrote {options.output}: {tokens}{about}.")


def pixel_pairs(
    processor, old_processor, images: datasets.Dataset, skip_corrupt: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of batches for `match_channels_`. Both batches of a pair contain the same images: one is prepared by
    `processor`, and the other by `old_processor`."""
    both = [
        image_batches(each.image_processor, images, batch_size=16, skip_corrupt=skip_corrupt)
        for each in (processor, old_processor)
    ]
    for (new_pixels, _), (old_pixels, _) in zip(*both, strict=True):
        yield new_pixels, old_pixels
