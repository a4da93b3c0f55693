"""`frugalvit swap`: a LLaVA, a PaliGemma, a Gemma 3 or a LLaVA-OneVision with a SparseFormer as its vision tower."""

from collections.abc import Iterator

import datasets
import torch

from .command_line import CommandParser, add_device_map_argument, add_skip_argument, positive
from .configuration.configuration_sparseformer_vlm import image_grid
from .evaluation.images import image_batches
from .modeling.vision_tower import input_device, match_channels_, matching_processor, swap_vision_tower
from .training.choices import DTYPES, QUANTIZATIONS
from .training.data import load_images, sample
from .training.files import atomic_directory, check_output_outside_input
from .training.loading import GRID_VLMS, SEQUENCE_VLMS, load_model


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit swap",
        description="Write a LLaVA, a PaliGemma, a Gemma 3 or a LLaVA-OneVision with a SparseFormer in the place of "
        "the vision tower that it was bootstrapped from, and its processor. The language model stays as it is.",
    )
    parser.add_argument("--model", required=True, metavar="LLAVA", help="folder or hub id (@revision, too)")
    parser.add_argument("--vision-model", required=True, metavar="FOLDER", help="what `frugalvit bootstrap` wrote")
    parser.add_argument("--output", required=True, metavar="OUT", help="folder to write")
    parser.add_argument("--num-tokens", type=int, metavar="COUNT", help="latent tokens (default: the tower's own)")
    parser.add_argument("--image-grid", type=positive, metavar="ROWS", help="of a Gemma 3 or a LLaVA-OneVision")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights that are written")
    parser.add_argument("--quantize", choices=QUANTIZATIONS, help="the language model (needs frugalvit[quantize])")
    parser.add_argument("--dataset", nargs="+", metavar="DATA", help="images to match the tower's channels on")
    parser.add_argument("--images", type=positive, default=1000, help="how many of --dataset (default: %(default)s)")
    add_skip_argument(parser)
    add_device_map_argument(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a model folder")
    return parser


def main(argv: list[str] | None = None) -> None:
    arguments = make_parser().parse_args(argv)
    check_output_outside_input(arguments.output, arguments.model, arguments.vision_model)
    dtype = getattr(torch, arguments.dtype)
    with atomic_directory(arguments.output, arguments.overwrite) as folder:
        tower, _ = load_model(arguments.vision_model, "image-feature-extraction", "cpu")
        llava, old_processor = load_model(
            arguments.model,
            "image-text-to-text",
            "cpu",
            model_types=(*SEQUENCE_VLMS, *GRID_VLMS),
            dtype=dtype,
            quantize=arguments.quantize,
            device_map=arguments.device_map,
        )
        model = swap_vision_tower(llava, tower, arguments.image_grid)
        if arguments.num_tokens is not None:
            model.set_num_tokens(arguments.num_tokens)
        processor = matching_processor(old_processor, model)
        patches = image_grid(llava.config) ** 2
        about = f", in {arguments.dtype}"
        if arguments.quantize:
            # Written, and loaded, as it is held.
            model.hf_quantizer = llava.hf_quantizer
            model.config.quantization_config = llava.config.quantization_config
            about += f", its language model in {arguments.quantize}"
        if arguments.dataset:
            images = sample(load_images(arguments.dataset, "train"), arguments.images, seed=0)
            pairs = pixel_pairs(processor, old_processor, images, arguments.skip_corrupt)
            place = input_device(llava), dtype
            match_channels_(model, llava, ([pixel_values.to(*place) for pixel_values in pair] for pair in pairs))
            about += f", its channels matched on {len(images):,} images"
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
    vision = model.config.vision_config
    if vision.model_type == "sparseformer_grid":
        tokens = vision.tower_config.default_num_tokens
        grid = image_grid(model.config)
        tokens = f"{tokens} tokens instead of {patches} patches make a grid of {grid} x {grid}"
    else:
        tokens = f"{model.config.image_seq_length} tokens an image instead of {patches} patches"
        about += ". `frugalvit align-llava` lets the projector learn to read them"
    print(f"Wrote {arguments.output}: {tokens}{about}.")


def pixel_pairs(
    processor, old_processor, images: datasets.Dataset, skip_corrupt: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of images as two processors prepare them, for `match_channels_`."""
    both = [
        image_batches(each.image_processor, images, batch_size=16, skip_corrupt=skip_corrupt)
        for each in (processor, old_processor)
    ]
    for (ours, _), (theirs, _) in zip(*both, strict=True):
        yield ours, theirs
