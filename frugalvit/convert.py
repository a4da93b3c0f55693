"""Convert SparseFormer checkpoints of github.com/showlab/sparseformer to model folders.

python -m frugalvit.convert CHECKPOINT --output FOLDER
"""

from dataclasses import dataclass

import torch
from timm.data import ImageNetInfo

from .command_line import OutputOptions, argument, read_options
from .modeling.conversion import (
    TEMPLATES,
    config_from_showlab,
    convert_showlab,
    load_showlab_checkpoint,
    showlab_model_class,
)
from .training.arguments import run_program
from .training.files import atomic_directory


PROG = "python -m frugalvit.convert"


@dataclass(kw_only=True)
class ConvertOptions(OutputOptions):
    """Convert a checkpoint of github.com/showlab/sparseformer to a folder that `from_pretrained` loads. Widths
    and the numbers of tokens, sampling points and blocks are read from the checkpoint. Other settings are those of
    `variant`."""

    checkpoint: str = argument(help=".pth or .safetensors file.", positional=True)
    variant: str | None = argument(
        None, "Default: the one whose weights have the checkpoint's names.", choices=[*TEMPLATES]
    )
    iterations: int | None = argument(None, "Iterations of the focusing layer. Default: the checkpoint's.")
    image_size: int | None = argument(None, "Height and width of the images in pixels. Default: 224.")


def main(argv: list[str] | None = None) -> None:
    options = read_options(ConvertOptions, PROG, argv)
    state_dict = load_showlab_checkpoint(options.checkpoint)
    config = config_from_showlab(state_dict, options.variant, options.iterations, options.image_size)
    projection_dim = getattr(config, "projection_dim", None)
    if projection_dim is None and config.num_labels == 1000:
        names = ImageNetInfo()
        config.id2label = {index: names.index_to_description(index) for index in range(1000)}
        config.label2id = {label: index for index, label in config.id2label.items()}
    model_class = showlab_model_class(config)
    with torch.device("meta"):
        model = model_class(config)
    model.load_state_dict(convert_showlab(state_dict, config), assign=True)
    with atomic_directory(options.output, options.overwrite) as folder:
        model.eval().save_pretrained(folder)

    outputs = f"projection to {projection_dim}" if projection_dim else f"{config.num_labels} classes"
    size = f"{model.num_parameters():,} parameters, {config.num_latent_tokens} tokens"
    print(f"Wrote {options.output}: {model_class.__name__}, {size}, {outputs}.")


if __name__ == "__main__":
    raise SystemExit(run_program(main, PROG))
