"""`frugalvit convert`: checkpoints of reference implementations to hub repositories."""

import torch
from timm.data import ImageNetInfo

from .command_line import CommandParser
from .modeling.conversion import config_from_showlab, convert_showlab, load_showlab_checkpoint, showlab_model_class
from .training.choices import CONVERTED_VARIANTS
from .training.files import atomic_directory


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit convert",
        description="Convert a checkpoint of github.com/showlab/sparseformer to a folder that `from_pretrained` "
        "loads. Widths, tokens, points and blocks follow from the checkpoint, the rest from the variant.",
    )
    parser.add_argument("source", choices=["showlab"], help="SparseFormer checkpoints of its authors")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=".pth or .safetensors file")
    parser.add_argument("--output", required=True, metavar="OUT", help="folder to write; must not exist or be empty")
    parser.add_argument("--variant", choices=CONVERTED_VARIANTS, help="default: the one that the names belong to")
    parser.add_argument("--iterations", type=int, help="of the focusing layer (default: as in the checkpoint)")
    parser.add_argument("--image-size", type=int, metavar="PIXELS", help="side of its images (default: 224)")
    parser.add_argument("--overwrite", action="store_true", help="replace the model folder OUT")
    return parser


def main(argv: list[str] | None = None) -> None:
    arguments = make_parser().parse_args(argv)
    state_dict = load_showlab_checkpoint(arguments.checkpoint)
    config = config_from_showlab(state_dict, arguments.variant, arguments.iterations, arguments.image_size)
    projection_dim = getattr(config, "projection_dim", None)
    if projection_dim is None and config.num_labels == 1000:
        names = ImageNetInfo()
        config.id2label = {index: names.index_to_description(index) for index in range(1000)}
        config.label2id = {label: index for index, label in config.id2label.items()}
    model_class = showlab_model_class(config)
    with torch.device("meta"):
        model = model_class(config)
    model.load_state_dict(convert_showlab(state_dict, config), assign=True)
    with atomic_directory(arguments.output, arguments.overwrite) as folder:
        model.eval().save_pretrained(folder)

    outputs = f"projection to {projection_dim}" if projection_dim else f"{config.num_labels} classes"
    size = f"{model.num_parameters():,} parameters, {config.num_latent_tokens} tokens"
    print(f"Wrote {arguments.output}: {model_class.__name__}, {size}, {outputs}.")
