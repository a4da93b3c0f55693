"""Output folders of trainings: checkpoints that can be resumed, and the settings that a run was started with."""

import json
import re
import shutil
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.trainer import TRAINER_STATE_NAME


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
    "overwrite_output_dir",
    "license",
    "attn_implementation",
    "trust_remote_code",
)
# Arguments that name models and images, by hub id or path.
SOURCES = ("base_model", "model", "teacher", "student", "vision_model", "distill_from", "dataset", "eval_dataset")
# Fields of a configuration that depend on where a model was loaded from or saved, and by which version.
VOLATILE_FIELDS = ("_name_or_path", "transformers_version", "architectures", "auto_map", "dtype", "torch_dtype")


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Return the folders named `checkpoint-STEP`, the highest step first."""
    paths = [path for path in Path(folder).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    found = [path for path in paths if path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True)


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


def check_same_run(file: Path, settings: dict):
    """Raise a ValueError if the run whose settings are in a file was started with others than `settings`."""
    try:
        recorded = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); remove it to continue the run in its folder.") from error
    if changes := list_changes(recorded, settings):
        more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
        raise ValueError(
            f"output_dir {file.parent} holds a run with other settings: {', '.join(changes[:3])}{more}. Choose "
            f"another output_dir, or pass overwrite_output_dir to train anew; without {file.name} there, settings are "
            "not compared."
        )


def list_changes(recorded: dict, asked: dict, prefix: str = "") -> list[str]:
    """Return a text about each value that differs between two nested dicts, for keys that both have."""
    changes = []
    for name in sorted(recorded.keys() & asked.keys()):
        before = recorded[name]
        now = asked[name]
        if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
            changes += list_changes(before, now, f"{prefix}{name}.")
        elif before != now:
            changes.append(f"{prefix}{name} was {str(before):.60}, now {str(now):.60}")
    return changes
