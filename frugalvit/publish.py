"""`frugalvit publish`: a trained model as a repository to share, in half the bytes."""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedModel

from .modeling.hub import upload_folder
from .training.files import whole_folder
from .training.loading import load_image_classifier


# What a model's folder may hold besides weights and configuration and what goes along as it is.
COMPANIONS = ("README.md", "preprocessor_config.json")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="frugalvit publish", description=__doc__)
    parser.add_argument("model", metavar="FOLDER", help="an image classifier, for example a recipe's output folder")
    parser.add_argument("output", metavar="OUT", help="folder to write: weights, configuration, code, card")
    parser.add_argument("--card", metavar="FILE", help="model card to put into OUT (default: the one in FOLDER)")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a model folder")
    parser.add_argument("--repo-id", "--repo_id", help="also upload OUT to this hub repository, in one commit")
    parser.add_argument("--private", action="store_true", help="make a new hub repository private")
    arguments = parser.parse_args(argv)

    if arguments.card and not Path(arguments.card).is_file():
        raise ValueError(f"--card: there is no file {arguments.card!r}; expected a model card in Markdown.")
    model, _ = load_image_classifier(arguments.model, "cpu")
    with whole_folder(arguments.output, arguments.overwrite) as folder:
        save_compact(model, folder)
        for name in COMPANIONS:
            if (Path(arguments.model) / name).is_file():
                shutil.copyfile(Path(arguments.model) / name, folder / name)
        if arguments.card:
            shutil.copyfile(arguments.card, folder / "README.md")
    size = sum(path.stat().st_size for path in Path(arguments.output).iterdir())
    print(f"Wrote {arguments.output}: {model.num_parameters():,} parameters, {size / 1e6:.1f} MB.")
    if arguments.repo_id:
        upload_folder(arguments.output, arguments.repo_id, private=arguments.private or None)
        print(f"Uploaded it to {arguments.repo_id}.")


def save_compact(model: PreTrainedModel, folder: Path):
    """Save a float32 model with half-precision tensors that load as float32.

    Half-precision weights that also compute in half precision would be several times slower on CPUs. What the model
    wants kept in float32 is kept.
    """
    strict = tuple(model._keep_in_fp32_modules_strict or ())
    weights = {
        name: tensor.to(torch.float16) if tensor.is_floating_point() and not name.endswith(strict) else tensor
        for name, tensor in model.state_dict().items()
    }
    # The configuration's dtype is that of the model, which stays float32.
    model.save_pretrained(folder, state_dict=weights)
