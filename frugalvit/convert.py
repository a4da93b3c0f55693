"""`frugalvit convert`: checkpoints of reference implementations to hub repositories."""

from pathlib import Path

import torch

from .common.choices import CONVERTED_VARIANTS
from .common.command_line import CommandParser
from .common.files import whole_folder
from .configuration.configuration_base import pair
from .modeling.conversion import (
    config_from_showlab,
    convert_showlab,
    infer_showlab_variant,
    load_showlab_checkpoint,
    showlab_model_class,
)


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit convert",
        description="Convert checkpoints of reference implementations to folders of Transformers.",
    )
    sources = parser.add_subparsers(dest="source", required=True, metavar="SOURCE")
    showlab = sources.add_parser(
        "showlab",
        help="SparseFormer checkpoints of its authors",
        description="Convert a checkpoint of github.com/showlab/sparseformer to a folder that `from_pretrained` "
        "loads. Widths, tokens, points and blocks follow from the checkpoint, the rest from the variant.",
    )
    showlab.add_argument("checkpoint", metavar="CHECKPOINT", help=".pth or .safetensors file")
    showlab.add_argument("--output", required=True, metavar="OUT", help="folder to write; must not exist or be empty")
    showlab.add_argument(
        "--variant", choices=CONVERTED_VARIANTS, help="default: the one whose names the checkpoint has"
    )
    showlab.add_argument(
        "--iterations", type=int, help="executions of the focusing layer (default: stage embeddings, or the variant's)"
    )
    showlab.add_argument(
        "--image-size",
        type=int,
        nargs="+",
        metavar="PIXELS",
        help="side, or height and width, of the images that the model will get (default: 224): resized to 8/7 of the "
        "side and cropped, or resized straight to height and width",
    )
    showlab.add_argument("--overwrite", action="store_true", help="replace the model folder OUT")
    parser.set_defaults(error=showlab.error)
    return parser


def main(argv: list[str] | None = None) -> None:
    arguments = make_parser().parse_args(argv)
    size = arguments.image_size
    if size is not None and len(size) > 2:
        arguments.error(f"argument --image-size: got {len(size)} numbers, expected a side or height and width")
    convert_checkpoint(
        arguments.checkpoint,
        arguments.output,
        variant=arguments.variant,
        iterations=arguments.iterations,
        image_size=tuple(size) if size and len(size) == 2 else size and size[0],
        overwrite=arguments.overwrite,
    )


def convert_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    variant: str | None = None,
    iterations: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    overwrite: bool = False,
) -> None:
    """Convert a checkpoint of the SparseFormer authors to a hub repository, and check that it loads.

    Args:
        checkpoint (`str` or `Path`): A file that `load_showlab_checkpoint` reads.
        output (`str` or `Path`): Folder to write, whole or not at all.
        variant, iterations, image_size: As for `config_from_showlab`.
        overwrite (`bool`, *optional*, defaults to `False`): Replace `output` if it is a model folder.

    Raises:
        ValueError: if the checkpoint does not fit, or `output` is in the way.
    """
    state_dict = load_showlab_checkpoint(checkpoint)
    config = config_from_showlab(state_dict, variant, iterations, image_size)
    if config.projection_dim is None and config.num_labels == 1000:
        config.id2label, config.label2id = imagenet_labels()
    model_class = showlab_model_class(config)
    with torch.device("meta"):
        model = model_class(config)
    model.load_state_dict(convert_showlab(state_dict, config), assign=True)
    with whole_folder(output, overwrite) as folder:
        model.eval().save_pretrained(folder)
        check_reload(model, folder)

    outputs = f"projection to {config.projection_dim}" if config.projection_dim else f"{config.num_labels} classes"
    height, width = pair(config.image_size)
    print(
        f"variant      {variant or infer_showlab_variant(state_dict)}\n"
        f"tokens       {config.num_latent_tokens}{' and [CLS]' if config.use_cls_token else ''}, "
        f"{config.num_sampling_points} points each, {config.stem_channels} stem channels\n"
        f"focusing     width {config.focusing_hidden_size}, {config.num_focusing_iterations} iterations\n"
        f"cortex       width {config.hidden_size}, {config.num_hidden_layers} blocks\n"
        f"output       {outputs}\n"
        f"images       {height} x {width}, mean {tuple(config.image_mean)}, std {tuple(config.image_std)}\n"
        f"parameters   {model.num_parameters():,}\n"
        f"{model_class.__name__} written to {output}; it loads again with every weight."
    )


def imagenet_labels() -> tuple[dict[int, str], dict[str, int]]:
    """`id2label` and `label2id` of ImageNet's 1,000 classes, with timm's names."""
    from timm.data import ImageNetInfo

    info = ImageNetInfo()
    id2label = {index: info.index_to_description(index) for index in range(1000)}
    return id2label, {label: index for index, label in id2label.items()}


def check_reload(model, folder: str | Path) -> None:
    """Load a model that was just saved and compare.

    Raises:
        RuntimeError: if weights are missing, unexpected or changed.
    """
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    weights = loaded.state_dict()
    changed = [name for name, weight in model.state_dict().items() if not torch.equal(weight, weights[name])]
    if any(info.values()) or changed:
        raise RuntimeError(f"The saved model does not load as it was saved: {info}, changed: {changed}.")
