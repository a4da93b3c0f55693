"""Output folders of trainings: checkpoints that can be resumed, and the settings that a run was started with."""

import dataclasses
import json
import os
import re
import shutil
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from .files import check_output_outside_input, write_json


# Settings of the run in an output folder. `Trainer.push_to_hub` does not upload files whose names start with "_".
RUN_FILE = "_run.json"
# Files and folders of which a checkpoint of `Trainer` has at least one, even if it is incomplete.
CHECKPOINT_FILES = (TRAINER_STATE_NAME, "model*.safetensors", "optimizer*", "pytorch_model*", "global_step*")
# Arguments of `TrainingArguments` that change the trained weights. The number of epochs or steps is not among them,
# because a longer run continues a shorter one.
TRAINING_SETTINGS = (
    "seed",
    "data_seed",
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "optim",
    "optim_args",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
)
# Our own arguments that do not change the trained weights.
WITHOUT_EFFECT = (
    "output_dir",
    "overwrite_output_dir",
    "license",
    "command",
    "attn_implementation",
    "trust_remote_code",
)
# Arguments that name models and images, by hub id or path.
SOURCES = ("model", "teacher", "student", "vision_model", "distill_from", "dataset", "eval_dataset")
# Fields of a configuration that depend on where a model was loaded from or saved, and by which version.
VOLATILE_FIELDS = ("_name_or_path", "transformers_version", "architectures", "auto_map", "dtype", "torch_dtype")


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Return the folders named `checkpoint-STEP`, the highest step first."""
    found = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in Path(folder).glob("checkpoint-*")}
    steps = {path: int(match[1]) for path, match in found.items() if match and path.is_dir()}
    return sorted(steps, key=steps.get, reverse=True)


def find_damaged_file(checkpoint: Path) -> Path | None:
    """Return the first file of a checkpoint that is missing, empty or cut, or None if the checkpoint is whole."""
    state_file = checkpoint / TRAINER_STATE_NAME
    try:
        state = json.loads(state_file.read_text(encoding="utf-8"))
        if not (isinstance(state, dict) and isinstance(state.get("global_step"), int)):
            return state_file
    except (OSError, ValueError):
        return state_file
    for file in sorted(checkpoint.iterdir()):
        # `torch.save` writes zip files, whose directory is at their end.
        if file.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(file):
            return file
        if file.suffix == ".safetensors":
            try:
                with safe_open(file, "pt"):
                    pass
            except (OSError, SafetensorError):
                return file
    return None


def find_checkpoint(folder: str | Path) -> tuple[Path | None, list[Path]]:
    """Return the newest whole checkpoint in a folder, or None, and a damaged file of each newer checkpoint."""
    damaged = []
    for checkpoint in list_checkpoints(folder):
        file = find_damaged_file(checkpoint)
        if file is None:
            return checkpoint, damaged
        damaged.append(file)
    return None, damaged


def is_checkpoint(folder: Path) -> bool:
    """Return whether `Trainer` wrote into a folder, even if it did not finish."""
    return any(next(folder.glob(pattern), None) for pattern in CHECKPOINT_FILES)


def remove_checkpoints(folder: str | Path):
    """Remove the checkpoints in a folder. Folders with such a name that `Trainer` did not finish stay."""
    for checkpoint in list_checkpoints(folder):
        if (checkpoint / TRAINER_STATE_NAME).is_file():
            shutil.rmtree(checkpoint)


def check_output_dir(args: TrainingArguments, *sources: str | None):
    """Raise a ValueError if a run must not write to `output_dir`: a folder that holds one of the models to read
    (`sources`), or, without `overwrite_output_dir`, other files than those of a run."""
    check_output_outside_input(args.output_dir, *sources)
    folder = Path(args.output_dir)
    if args.overwrite_output_dir or args.process_index != 0 or not folder.is_dir():
        return
    is_run = (folder / RUN_FILE).is_file() or find_checkpoint(folder)[0] is not None
    if not is_run and not {path.name for path in folder.iterdir()} <= {"runs"}:
        raise ValueError(
            f"output_dir {folder} is not empty and holds no run to continue; choose another folder, or pass "
            "overwrite_output_dir to write into it."
        )


def describe_arguments(args: TrainingArguments, *others) -> dict:
    """Return the arguments that change the trained weights, by name.

    Args:
        args (`TrainingArguments`): Of a training; `others` are dataclasses beside it, or None.
    """
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    settings = {name: getattr(args, name) for name in TRAINING_SETTINGS}
    for group in (args, *others):
        for field in dataclasses.fields(group) if group is not None else ():
            if field.init and field.name not in inherited and field.name not in WITHOUT_EFFECT:
                settings[field.name] = getattr(group, field.name)
    for name in SOURCES:
        settings[name] = resolve_paths(settings.get(name))
    return settings


def resolve_paths(source: str | list[str] | None):
    """Make paths absolute, so that a run may be continued from another working directory."""
    if isinstance(source, list):
        return [resolve_paths(each) for each in source]
    return os.path.realpath(source) if source and os.path.exists(source) else source


def describe_config(config) -> dict:
    """Return the fields of a model's configuration that do not depend on where it was loaded from or saved."""

    def stable(value):
        if isinstance(value, dict):
            return {name: stable(each) for name, each in value.items() if name not in VOLATILE_FIELDS}
        return value

    return stable(config.to_dict())


def check_same_run(folder: str | Path, settings: dict):
    """Raise a ValueError if the run in an output folder was started with other settings."""
    file = Path(folder, RUN_FILE)
    if not file.is_file():
        return
    try:
        recorded = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); remove it to continue the run in its folder.") from error
    changes = list_changes(recorded, json.loads(json.dumps(settings, default=str)))
    if changes:
        more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
        raise ValueError(
            f"output_dir {folder} holds a run with other settings: {', '.join(changes[:3])}{more}. Choose another "
            f"output_dir, or pass overwrite_output_dir to train anew; without {RUN_FILE} there, settings are not "
            "compared."
        )


def list_changes(recorded: dict, asked: dict, prefix: str = "") -> list[str]:
    """Return a text about each value that differs between two nested dicts, for keys that both have."""
    changes = []
    for name in recorded.keys() & asked.keys():
        before = recorded[name]
        now = asked[name]
        if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
            changes += list_changes(before, now, f"{prefix}{name}.")
        elif before != now:
            changes.append(f"{prefix}{name} was {shorten(before)}, now {shorten(now)}")
    return sorted(changes)


def shorten(value) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def write_settings(folder: str | Path, settings: dict):
    """Record the settings of the run in an output folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_json(Path(folder, RUN_FILE), json.loads(json.dumps(settings, default=str)))
