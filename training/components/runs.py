"""How a run starts: its folder, its processes, its precision."""

import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    GradientAccumulationPlugin,
    ProjectConfiguration,
    broadcast_object_list,
    parse_flag_from_env,
    set_seed,
)

from ...common.files import LOCK, read_json, refuse_links
from ...common.precision import choose_mixed_precision, describe_device
from ...common.versions import origin
from .arguments import RESUMABLE, RunArguments


# What a run writes into its folder by these names, besides its checkpoints and the files of the best model.
WRITTEN = ("run.json", "results.json", "metrics.jsonl", "README.md", "logs")


def start_accelerator(run: RunArguments, prog: str, argv: list[str] | None, arguments: list) -> Accelerator:
    """Start Accelerate, refuse an output folder that holds something else than the same run, seed everything, and say
    what the run computes on.

    Nothing is written before `fit`.

    Args:
        run (`RunArguments`): One of `arguments`; its `record` is filled, and its `mixed_precision` chosen.
        prog (`str`): The command, for example `"frugalvit train"`.
        argv (`list[str]`, *optional*): Its arguments; those of the process if not given.
        arguments (`list`): All dataclasses of arguments.

    Raises:
        ValueError: if the folder is taken, or Accelerate is configured for what recipes cannot do, or not at all.
    """
    if run.mixed_precision == "auto":
        run.mixed_precision = automatic_precision(run)
    accelerator = Accelerator(
        mixed_precision=run.mixed_precision,
        # Batches are read ahead; their last one is no sign that the last step has come.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=run.gradient_accumulation_steps, sync_with_dataloader=False
        ),
        dataloader_config=DataLoaderConfiguration(split_batches=True, non_blocking=True),
        log_with=trackers(run.report_to) or None,
        project_config=ProjectConfiguration(run.output_dir, logging_dir=str(Path(run.output_dir) / "logs")),
    )
    run.record |= {
        "command": shlex.join([*prog.split(), *(sys.argv[1:] if argv is None else argv)]),
        "processes": accelerator.num_processes,
        "device": accelerator.device.type,
        "arguments": _fixed_values(arguments),
        **origin(),
    }
    started = int(os.environ.get("WORLD_SIZE") or 1)
    if started > accelerator.num_processes and "RANK" in os.environ:
        raise ValueError(
            f"{started} processes were started and Accelerate sees {accelerator.num_processes}, so that each would "
            "train alone. On CPUs, set ACCELERATE_USE_CPU=true."
        )
    if accelerator.num_processes == 1 and "MASTER_ADDR" in os.environ and "RANK" not in os.environ:
        # So `accelerate launch` leaves it on CPUs, whatever --num_processes says.
        module = f"frugalvit.training.{prog.split()[-1].replace('-', '_')}"
        print(
            "Warning: several processes were asked for and one was started. On CPUs, start them with\n"
            f"    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 -m {module} …",
            file=sys.stderr,
        )
    check_output_folder(Path(run.output_dir), run, arguments)
    if getattr(getattr(accelerator.state, "fsdp_plugin", None), "cpu_ram_efficient_loading", False):
        raise ValueError(
            "fsdp_cpu_ram_efficient_loading leaves teachers and students empty in all processes but the first; "
            "expected false in the configuration of `accelerate launch`."
        )
    if deepspeed := accelerator.state.deepspeed_plugin:
        parts = accelerator.num_processes * run.gradient_accumulation_steps
        deepspeed.deepspeed_config["train_micro_batch_size_per_gpu"] = run.batch_size // parts
        # DeepSpeed clips by itself.
        deepspeed.deepspeed_config["gradient_clipping"] = run.max_grad_norm
    set_seed(run.seed)
    if accelerator.device.type == "cuda":
        # TF32 for what stays float32.
        torch.set_float32_matmul_precision("high")
    # Saving a model would draw its own bar through that of the epochs.
    transformers.utils.logging.disable_progress_bar()
    accelerator.print(f"{prog} on {describe_device(accelerator)}.")
    return accelerator


def trackers(names: list[str]) -> list[str]:
    """The trackers that `--report-to` names; `none` is none.

    Raises:
        ValueError: if one is unknown or not installed, of which Accelerate says nothing.
    """
    names = [name for name in names if name != "none"]
    installed = [tracker.value for tracker in get_available_trackers()]
    for name in names:
        if name not in installed:
            raise ValueError(
                f"--report-to {name} is no tracker that is installed; these are: {', '.join(installed) or 'none'}. "
                "TensorBoard comes with pip install 'frugalvit[track]'."
            )
    return names


def automatic_precision(run: RunArguments) -> str:
    """The precision that the run in the output folder began with, or the one that the main process' device is fast
    at."""
    there = None if run.overwrite else read_run(Path(run.output_dir))
    if there and there["arguments"].get("mixed_precision") in ("no", "bf16", "fp16"):
        return there["arguments"]["mixed_precision"]
    # As Accelerate asks for processes on CPUs, before it is told the precision.
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    chosen = [choose_mixed_precision(state.device) if state.is_main_process else None]
    return broadcast_object_list(chosen)[0]


def check_output_folder(folder: Path, run: RunArguments, arguments: list):
    """Refuse a folder that is not free, unless the same run can go on there or is to be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {folder} is a file; expected a folder, or a name that is free.")
    if not folder.is_dir() or not any(path.name != LOCK for path in folder.iterdir()):
        return
    run.found = read_run(folder)
    if run.found is None:
        raise ValueError(
            f"--output {folder} is not empty and holds no run to go on with or to overwrite; give another folder."
        )
    checkpoints = folder / "checkpoints"
    if checkpoints.is_symlink() or (checkpoints.exists() and not checkpoints.is_dir()):
        raise ValueError(
            f"{checkpoints} is no folder of the run in --output {folder} but leads elsewhere; give another one."
        )
    refuse_links(folder, *WRITTEN)
    if checkpoints.is_dir():
        refuse_links(checkpoints, *(path.relative_to(checkpoints) for path in checkpoints.rglob("*")))
    if run.overwrite:
        return
    defaults = {f.name: _default(f) for group in arguments for f in dataclasses.fields(group)}
    here = json.loads(json.dumps(run.record["arguments"]))
    there = run.found["arguments"]
    # A run of an earlier version lacks the arguments that came later.
    there = {name: default for name, default in defaults.items() if name in here} | there
    # What may change was noted by one.
    there = {name: value for name, value in there.items() if name not in RESUMABLE}
    changed = [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]
    if changed and has_begun(folder):
        raise ValueError(
            f"--output {folder} holds another run ("
            + ", ".join(f"{name} is {there.get(name)!r} there, {here.get(name)!r} here" for name in changed[:3])
            + "). Give another folder, the same arguments to go on, or --overwrite to start anew."
        )


def has_begun(folder: Path) -> bool:
    """Whether the run in a folder has left anything to go on with, or a model."""
    return any((folder / "checkpoints").glob("step-*")) or (folder / "config.json").exists()


def read_run(folder: Path) -> dict | None:
    """What a recipe noted about the run in a folder, or None if none did."""
    try:
        return read_json(folder / "run.json", {"arguments": dict, "images": dict | None})
    except PermissionError:
        raise
    except (OSError, ValueError):
        return None


def _fixed_values(arguments: list) -> dict:
    """The arguments that make a run what it is, by name."""
    return {
        f.name: getattr(group, f.name)
        for group in arguments
        for f in dataclasses.fields(group)
        if f.init and f.name not in RESUMABLE
    }


def _default(argument: dataclasses.Field):
    if argument.default_factory is not dataclasses.MISSING:
        return argument.default_factory()
    return None if argument.default is dataclasses.MISSING else argument.default
