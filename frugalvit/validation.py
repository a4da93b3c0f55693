"""Checks of a repository before it is shared: everything is looked at before a byte leaves this machine."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

import frugalvit

from .architectures import load_model
from .common.exported import ExportedModule, example_of, read_report
from .common.files import read_json
from .common.licenses import license_problem
from .common.loading import load_image_processor
from .common.names import is_hub_id, places_in
from .common.views import vision_config_of
from .configuration.configuration_base import pair
from .modeling.hub import HubModel, auto_class, flatten_imports, pipeline_tag
from .without_package import outputs_of


# What belongs into a repository. Pickles, which run code when they are read, do not.
ENDINGS = (".json", ".md", ".png", ".py", ".safetensors", ".txt")
# Metadata without which the hub finds and lists no model as it should. Data sets are left out where they are private.
METADATA = ("library_name", "license", "pipeline_tag", "tags")
# Problems in a message.
MOST_LISTED = 6


def validate_repository(folder: str | os.PathLike) -> list[str]:
    """Look at everything in a repository that can be looked at without the hub.

    Args:
        folder (`str` or `os.PathLike`): Folder with weights, configuration, code and card.

    Returns:
        `list[str]`: A line about each check that was passed.

    Raises:
        ValueError: if something is wrong; the message lists it.
    """
    folder = Path(folder)
    found = {check: check(folder) for check in (check_files, check_card, check_results, check_weights)}
    if not any(found.values()):
        model = load_model(folder)
        found |= {check: check(folder, model) for check in (check_code, check_preprocessing)}
    # Last, as it starts a process.
    if not any(found.values()):
        found[check_predictions] = check_predictions(folder, model)
    return _ready(found)


def validate_exported(folder: str | os.PathLike) -> list[str]:
    """Validate a folder of `frugalvit export` as `validate_repository` does a repository: its card is complete, and
    its programs run."""
    folder = Path(folder)
    return _ready({check_card: check_card(folder), check_programs: check_programs(folder)})


def _ready(found: dict[Callable, list[str]]) -> list[str]:
    """Return a line about each check if none has found a problem; otherwise raise a ValueError with the problems."""
    if problems := [problem for problems in found.values() for problem in problems]:
        more = f"; and {len(problems) - MOST_LISTED} more" if len(problems) > MOST_LISTED else ""
        raise ValueError(f"The model is not ready to be published: {'; '.join(problems[:MOST_LISTED])}{more}.")
    return [check.__doc__.rstrip(".") for check in found]


def check_files(folder: Path) -> list[str]:
    """The files are those of a model repository."""
    problems = [f"it has no {name}" for name in ("config.json", "README.md") if not (folder / name).is_file()]
    if not list(folder.glob("*.safetensors")):
        problems.append("it has no weights in safetensors")
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or path.is_symlink() or path.parent != folder or path.suffix not in ENDINGS:
            problems.append(
                f"{path.relative_to(folder)} does not belong into it (expected files *{', *'.join(ENDINGS)})"
            )
    return problems


def read_metadata(folder: Path) -> ModelCardData | str:
    """Read the card's metadata; a `str` says why they cannot be read."""
    try:
        return ModelCard.load(folder / "README.md").data
    # As many ways to fail as YAML has.
    except Exception as error:
        return f"README.md has no metadata that can be read ({type(error).__name__}: {error})"


def check_card(folder: Path) -> list[str]:
    """The card names library, license, task and tags."""
    data, problems = read_metadata(folder), []
    if isinstance(data, str):
        return [data]
    if missing := [name for name in METADATA if not data.get(name)]:
        problems.append(
            f"the metadata of README.md lack {', '.join(missing)}: add them there, or give a complete card by --card"
            f"{', or a license by --license' * ('license' in missing)}"
        )
    if data.license and (problem := license_problem(data.license)):
        problems.append(f"license in README.md: {problem}")
    base = data.base_model or []
    for name in [base] if isinstance(base, str) else base:
        if not is_hub_id(name):
            problems.append(f"base_model is {name!r} in README.md, expected an id of the hub like owner/name")
    if paths := places_in((folder / "README.md").read_text(encoding="utf-8")):
        problems.append(f"README.md names a place on this machine, {paths[0]!r}; take it out")
    return problems


def check_results(folder: Path) -> list[str]:
    """The card's measured results are numbers."""
    data = read_metadata(folder)
    # `check_card` says why metadata cannot be read.
    return [
        f"the result {result.metric_type!r} of README.md is {result.metric_value!r}, expected a number"
        for result in (not isinstance(data, str) and data.eval_results) or []
        if isinstance(result.metric_value, bool) or not isinstance(result.metric_value, int | float)
    ]


def check_programs(folder: Path) -> list[str]:
    """Its programs run, and what they compute is finite."""
    try:
        parts = read_report(folder)["parts"]
    except ValueError as error:
        return [str(error)]
    problems = []
    for name, part in parts.items():
        try:
            program = ExportedModule(folder, name)
        except ValueError as error:
            problems.append(str(error))
            continue
        outputs = program(**example_of(program.config, "text_embeds" in part["outputs"], 2))
        if not all(tensor.isfinite().all() for tensor in tree_leaves(dict(outputs))):
            problems.append(f"the program {name!r} computes values that are not finite")
    return problems


def check_weights(folder: Path) -> list[str]:
    """The weights are whole and finite."""
    problems, names = [], set()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (no dict)
                    names.add(name)
                    tensor = file.get_tensor(name)
                    if tensor.is_floating_point() and not tensor.isfinite().all():
                        problems.append(f"{name} in {path.name} has values that are not finite")
        except (SafetensorError, OSError) as error:
            problems.append(f"{path.name} cannot be read ({error})")
    for path in sorted(folder.glob("*.safetensors.index.json")):
        try:
            index = read_json(path, {"weight_map": dict[str, str]})["weight_map"]
        except (ValueError, OSError) as error:
            problems.append(str(error).rstrip("."))
            continue
        problems += [f"{path.name} names {name}, which no file has" for name in sorted(index.keys() - names)[:3]]
    return problems


def check_code(folder: Path, model: PreTrainedModel) -> list[str]:
    """The code is that of this version of frugalvit, to the byte."""
    expected = {}
    if isinstance(model, HubModel):
        expected = {name: flatten_imports(text) for name, text in model.family_class()._sources.items()}
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    return [
        f"{name} is not what frugalvit {frugalvit.__version__} ships"
        for name in sorted(expected.keys() | found.keys())
        if found.get(name) != expected.get(name)
    ]


def check_preprocessing(folder: Path, model: PreTrainedModel) -> list[str]:
    """The image processor fits the model and the card names its task."""
    problems = []
    if not any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        return ["it has no preprocessor_config.json"]
    try:
        problems += check_image_processor(load_image_processor(folder, False, "a model"), model)
    except ValueError as error:
        problems.append(str(error))
    task, named = pipeline_tag(model), ModelCard.load(folder / "README.md").data.get("pipeline_tag")
    if task and named != task:
        problems.append(f"pipeline_tag is {named!r} in README.md, expected {task!r}")
    return problems


def check_image_processor(image_processor, model: PreTrainedModel) -> list[str]:
    """The image processor makes images of the shape that the model was made for; of a model of another library, one
    that it takes is enough: a DINOv2 for 518 pixels comes with a processor for 224."""
    vision = vision_config_of(model.config)
    image = Image.new("RGB", (61, 61))
    pixel_values = image_processor(image, return_tensors="pt")["pixel_values"]
    size = getattr(vision, "image_size", None)
    height, width = pair(size) if size else pixel_values.shape[-2:]
    expected = (1, getattr(vision, "num_channels", 3), height, width)
    if tuple(pixel_values.shape) == expected or (not isinstance(model, HubModel) and takes(model, pixel_values)):
        return []
    return [f"the image processor makes pixel values {tuple(pixel_values.shape)}, the model takes {expected}"]


def takes(model: PreTrainedModel, pixel_values: torch.Tensor) -> bool:
    """Whether a model computes something of these images."""
    try:
        with torch.inference_mode():
            outputs_of(model, example_inputs(model.config) | {"pixel_values": pixel_values.expand(2, -1, -1, -1)})
    # Models refuse a size in more ways than can be listed.
    except Exception:
        return False
    return True


def check_predictions(folder: Path, model: PreTrainedModel) -> list[str]:
    """It loads where frugalvit is not installed, and computes the same there."""
    inputs, loader = example_inputs(model.config), auto_class(model)
    if loader is None:
        loader = f"{model.family_class().__module__.rpartition('.')[2]}.{type(model).__name__}"
    with torch.inference_mode():
        expected = outputs_of(model, inputs)
    with tempfile.TemporaryDirectory() as home:
        files = [str(Path(home) / name) for name in ("inputs.safetensors", "outputs.safetensors")]
        save_file(inputs, files[0])
        source = Path(__file__).with_name("without_package.py").read_text(encoding="utf-8")
        process = subprocess.run(
            [sys.executable, "-c", source, str(folder.absolute()), loader, *files],
            cwd=home,
            # Code of models is kept in HF_HOME; nothing is asked of the hub.
            env=os.environ | {"HF_HOME": home, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode:
            last = (process.stderr.strip().splitlines() or ["no message"])[-1]
            return [f"it does not load without frugalvit ({last})"]
        computed = load_file(files[1])
    problems = []
    for name, values in expected.items():
        # Threads and where tensors lie in memory may change the last digit.
        if not torch.allclose(computed[name], values.float(), rtol=1e-4, atol=1e-5):
            difference = (computed[name] - values).abs().max().item()
            problems.append(f"without frugalvit it computes other {name}, by up to {difference:.2g}")
    return problems


def example_inputs(config) -> dict[str, torch.Tensor]:
    """Two images of noise, and texts where a model reads these."""
    vision, text = vision_config_of(config), getattr(config, "text_config", None)
    height, width = pair(getattr(vision, "image_size", None) or 224)
    generator = torch.Generator().manual_seed(0)
    channels = getattr(vision, "num_channels", 3)
    inputs = {"pixel_values": torch.randn(2, channels, height, width, generator=generator)}
    if isinstance(text, PreTrainedConfig):
        inputs["input_ids"] = torch.randint(text.vocab_size, (2, 4), generator=generator)
    return inputs
