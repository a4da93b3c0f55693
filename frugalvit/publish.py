"""`frugalvit publish`: upload a model to the hub, with weights in half precision. The command checks that the model
runs without frugalvit before the upload."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch
import yaml
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, PreTrainedConfig, PreTrainedModel

from .architectures import load_saved_model
from .command_line import argument, read_options
from .modeling.hub import HubModel, auto_class, model_card
from .modeling.notebook import write_notebook
from .training.arguments import CheckedArguments
from .training.files import (
    COMPANIONS,
    atomic_directory,
    check_output_outside_input,
    is_picture_of,
    read_text,
    split_revision,
    strip_auto_map,
)
from .training.loading import load_pretrained
from .without_package import outputs_of


PROG = "frugalvit publish"
# Placeholder in a model card for a hub id that is not known yet.
UNNAMED = "path/or/id"
# Form of the hub's license identifiers, such as `apache-2.0`. The hub refuses cards with other licenses.
LICENSE_ID = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*")
ACCESS_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}")


@dataclass(kw_only=True)
class PublishOptions(CheckedArguments):
    """Upload a model to the hub, with weights in half precision."""

    model: str = argument(help="Model folder, for example the output folder of a training.", positional=True)
    repo_id: str | None = argument(None, "Hub repository to upload to, in one commit.", positional=True)
    output: str | None = argument(None, "Also keep the uploaded files in this folder.", metavar="FOLDER")
    overwrite: bool = argument(False, "Replace the output folder if it is a model folder.")
    dry_run: bool = argument(False, "Try everything and upload nothing.")
    license: str | None = argument(None, "License of the model, for its card, for example apache-2.0.")
    no_code: bool = argument(False, "Write the output folder without code, for use with frugalvit installed.")
    private: bool = argument(False, "Make a new hub repository private.")


def main(argv: list[str] | None = None) -> None:
    options = read_options(PublishOptions, PROG, argv)
    source = Path(split_revision(options.model)[0])
    if options.output:
        check_output_outside_input(options.output, source)
    if options.repo_id:
        validate_repo_id(options.repo_id)
        if options.no_code:
            raise ValueError("no_code is for folders: a hub repository loads where frugalvit is not installed.")
    model = load_saved_model(source)
    with (
        tempfile.TemporaryDirectory() as aside,
        atomic_directory(options.output or Path(aside) / "model", options.overwrite) as folder,
    ):
        save_compact(model, folder)
        copy_companions(source, folder)
        write_card(model, folder, options.license, options.repo_id)
        check_texts(folder)
        check_outputs(folder)
        if options.no_code:
            for path in folder.glob("*.py"):
                path.unlink()
            strip_auto_map(folder)
        else:
            write_notebook(model, folder, options.repo_id or ".")
        for path in sorted(folder.iterdir()):
            print(f"{path.stat().st_size:>12,}  {path.name}")
        if options.repo_id and not options.dry_run:
            upload(folder, options.repo_id, options.private)
            print(f"Uploaded to {options.repo_id}.")
        else:
            print("Nothing was uploaded.")
    if options.output:
        print(f"Wrote {options.output}.")


def upload(folder: Path, repo_id: str, private: bool = False):
    """Upload a folder to a hub repository in one commit. The repository is created if it does not exist."""
    api = HfApi()
    try:
        repo_id = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
        if private and not api.repo_info(repo_id).private:
            raise ValueError(f"private: {repo_id} exists and is public; change that on the hub or use another name.")
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload model")
    except (HTTPError, OfflineModeIsEnabled) as error:
        raise OSError(f"Cannot upload to {repo_id}: {error or type(error).__name__}") from error


def save_compact(model: PreTrainedModel, folder: Path):
    """Save a float32 model with float16 weights. Weights that the model's class keeps in float32 are saved in float32.
    The saved model loads as float32."""
    strict = tuple(model._keep_in_fp32_modules_strict or ())
    weights = {
        name: tensor.to(torch.float16) if tensor.is_floating_point() and not name.endswith(strict) else tensor
        for name, tensor in model.state_dict().items()
    }
    if wrong := [name for name, tensor in weights.items() if not tensor.isfinite().all()]:
        raise ValueError(f"The weights {wrong[0]} have values that are not finite in half precision.")
    # The sub-configurations store the folders that they were loaded from. These paths are private.
    for name in getattr(model.config, "sub_configs", ()):
        getattr(model.config, name)._name_or_path = ""
    # Only the saved weights are float16. The dtype in the configuration stays float32.
    model.save_pretrained(folder, state_dict=weights)
    if not isinstance(model, HubModel):
        # Another library's `auto_map` may name third-party code, which `check_outputs` would run.
        strip_auto_map(folder)


def copy_companions(source: Path, folder: Path):
    """Copy the card with its pictures, and the files of processors and tokenizers."""
    card = source / "README.md"
    text = read_text(card) if card.is_file() else ""
    for path in sorted(source.glob("*")):
        if is_picture_of(text, path) or any(fnmatch(path.name, pattern) for pattern in COMPANIONS):
            # A link is an error, because it may lead to a private file.
            if path.is_symlink():
                raise ValueError(f"{str(path)!r} is a link; put the file itself there, or remove it.")
            shutil.copyfile(path, folder / path.name)


def write_card(model: PreTrainedModel, folder: Path, license: str | None = None, repo_id: str | None = None):
    """Write the license and the hub id into the folder's model card. If there is no card, write a short card first."""
    file = folder / "README.md"
    if not file.is_file():
        model_card(model).save(file)
    try:
        card = ModelCard.load(file)
    except yaml.YAMLError as error:
        raise ValueError(f"README.md has no metadata that can be read: {error}") from error
    if license:
        card.data.license = license
        card.save(file)
    if not card.data.license:
        raise ValueError("README.md names no license; give it by --license, for example apache-2.0.")
    if not LICENSE_ID.fullmatch(str(card.data.license)):
        raise ValueError(f"The license is {card.data.license!r}, expected the hub's name of one, such as apache-2.0.")
    if repo_id:
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(UNNAMED, repo_id), encoding="utf-8")


def check_texts(folder: Path):
    """Raise a ValueError if a file in the folder contains an access token of the hub, or if the `auto_map` of a JSON
    file refers to code that is not in the folder."""
    for path in sorted(folder.iterdir()):
        text = "" if path.suffix in (".safetensors", ".png") else path.read_text(encoding="utf-8", errors="replace")
        if ACCESS_TOKEN.search(text):
            raise ValueError(f"{path.name} holds an access token of the hub; remove it, and revoke it on the hub.")
        if path.suffix == ".json":
            json.loads(text, object_hook=functools.partial(check_code, path))


def check_code(path: Path, part: dict) -> dict:
    """Check `part`, an object in the JSON file `path`. Raise a ValueError if the `auto_map` of `part` refers to code
    that is not in the file's folder. Otherwise, return `part`, because `json.loads` uses the returned object."""
    for names in dict(part.get("auto_map") or {}).values():
        # A tokenizer's entry in `auto_map` lists a slow and a fast class. Each class may be None.
        for name in filter(None, [names] if isinstance(names, str) else names):
            if f"{name.partition('.')[0]}.py" not in os.listdir(path.parent):
                raise ValueError(f"The auto_map of {path.name} names code that is not published, {name!r}; remove it.")
    return part


def check_outputs(folder: Path):
    """Raise a ValueError if, without frugalvit, a folder's model does not load or has different outputs."""
    model = load_saved_model(folder)
    image_processor = load_pretrained(AutoImageProcessor, folder)
    images = [Image.effect_noise((64, 64), 50).convert("RGB") for _ in range(2)]
    inputs = {"pixel_values": image_processor(images, return_tensors="pt")["pixel_values"]}
    if isinstance(text := getattr(model.config, "text_config", None), PreTrainedConfig):
        inputs["input_ids"] = torch.randint(text.vocab_size, (2, 4))
    loader = auto_class(model)
    if type(model).__name__.endswith("Backbone"):
        loader = f"{model.config.auto_map['AutoConfig'].partition('.')[0]}.{type(model).__name__}"
    source = Path(__file__).with_name("without_package.py").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as home:
        files = [f"{home}/inputs", f"{home}/outputs"]
        save_file(inputs, files[0])
        command = [sys.executable, "-c", source, str(folder.absolute()), loader, *files]
        # Transformers caches models' code in HF_HOME. With an empty cache, only the folder's code can run.
        environment = os.environ | {"HF_HOME": home, "HF_HUB_OFFLINE": "1"}
        process = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
        if process.returncode:
            last = (process.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"The model does not load without frugalvit: {last}")
        computed = load_file(files[1])
    for number, values in outputs_of(model, inputs).items():
        # Compare with a tolerance, because outputs depend slightly on the number of threads and memory alignment.
        if not torch.allclose(computed[number], values, rtol=1e-4, atol=1e-5):
            difference = (computed[number] - values).abs().max().item()
            raise ValueError(f"Without frugalvit the model computes something else, by up to {difference:.2g}.")
    print("It loads where frugalvit is not installed, and computes the same there.")
