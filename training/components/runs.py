"""The start of a run: its folder, its processes, its precision."""

import dataclasses
import inspect
import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import broadcast_object_list, parse_flag_from_env, set_seed
from transformers import TrainingArguments

from ...common.files import LOCK, disk_errors, locked, permit_as_usual, read_json, refuse_links, write_json
from ...common.precision import choose_mixed_precision, describe_device
from ...common.versions import origin
from .arguments import IN_PYTHON, RESUMABLE, DataArguments, ImageArguments, RunArguments, arguments_named
from .checkpoints import Checkpoints


# Where the best model is written before its files are moved over the earlier ones.
BEST_ASIDE = ".best.aside"
# Of `TrainingArguments`, what makes a run what it is.
FIXED = frozenset(
    {
        *("num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "seed"),
        *("bf16", "fp16", "max_grad_norm"),
    }
)
# Of the arguments, what does not.
NOT_FIXED = frozenset({"per_device_eval_batch_size"})
# What may be there before a run begins.
BESIDES = (LOCK, "*_results.json", "trainer_state.json")
# What a run writes into its folder by these names, besides its checkpoints and the files of the best model.
WRITTEN = ("run.json", "results.json", "metrics.jsonl", "README.md", "runs")


def start_run(run: RunArguments, prog: str, argv: list[str] | None, arguments: list):
    """Refuse an output folder that holds something else than the same run, seed everything, and say what the run
    computes on.

    Nothing is written before the training.

    Args:
        run (`RunArguments`): One of `arguments`; its `record`, `found` and `mixed_precision` are filled.
        prog (`str`): The command, for example `"frugalvit train"`.
        argv (`list[str]`, *optional*): Its arguments; those of the process if not given.
        arguments (`list`): All dataclasses of arguments.

    Raises:
        ValueError: if the folder is taken, or processes are started as training cannot run.
    """
    if run.mixed_precision == "auto":
        run.mixed_precision = automatic_precision(run)
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    run.record |= {
        "command": shlex.join([*prog.split(), *(sys.argv[1:] if argv is None else argv)]),
        "processes": state.num_processes,
        "device": state.device.type,
        "arguments": _fixed_values(arguments),
        **origin(),
    }
    started = int(os.environ.get("WORLD_SIZE") or 1)
    if started > state.num_processes and "RANK" in os.environ:
        raise ValueError(
            f"{started} processes were started and Accelerate sees {state.num_processes}, so that each would train "
            "alone. On CPUs, set ACCELERATE_USE_CPU=true."
        )
    if state.num_processes == 1 and "MASTER_ADDR" in os.environ and "RANK" not in os.environ:
        # So `accelerate launch` leaves it on CPUs, whatever --num_processes says.
        module = f"frugalvit.training.{prog.split()[-1].replace('-', '_')}"
        print(
            "Warning: several processes were asked for and one was started. On CPUs, start them with\n"
            f"    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 -m {module} …",
            file=sys.stderr,
        )
    check_output_folder(Path(run.output_dir), run, arguments)
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and parse_flag_from_env("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        raise ValueError(
            "fsdp_cpu_ram_efficient_loading leaves teachers and students empty in all processes but the first; "
            "expected false in the configuration of `accelerate launch`."
        )
    set_seed(run.seed)
    if state.device.type == "cuda":
        # TF32 for what stays float32.
        torch.set_float32_matmul_precision("high")
    # Saving a model would draw its own bar through that of the epochs.
    transformers.utils.logging.disable_progress_bar()
    state.print(f"{prog} on {describe_device(state.device, run.mixed_precision, state.num_processes)}.")


@dataclass
class ImageTrainingArguments(TrainingArguments):
    """Transformers' `TrainingArguments`, and arguments that all trainers here have besides.

    Args:
        seed (`int`, *optional*, defaults to 0): Seed of initialization, order and augmentation.
        logging_steps (`int`, *optional*, defaults to 50): Optimizer steps between lines of `metrics.jsonl`.
        per_device_eval_batch_size (`int`, *optional*, defaults to 256): Images of an evaluation step on a device.
        steps_per_epoch (`int`, *optional*): Optimizer steps of an epoch; all images once if not given.
        shuffle_buffer (`int`, *optional*, defaults to 1000): Images among which a stream is shuffled.
        skip_corrupt (`bool`, *optional*, defaults to `False`): Replace an image that cannot be read by the next one.
        license (`str`, *optional*):
            License of the trained model, for its card; that of the model it is from if not given.
        overwrite (`bool`, *optional*, defaults to `False`): Start anew in an output folder that holds another run.

    Raises:
        ValueError: if a value does not fit.
    """

    seed: int = 0
    logging_steps: float = 50
    per_device_eval_batch_size: int = 256
    steps_per_epoch: int | None = None
    shuffle_buffer: int = 1000
    skip_corrupt: bool = False
    license: str | None = None
    overwrite: bool = False

    def __init_subclass__(cls):
        # A trainer's arguments are those of several groups of options, each of which checks its own.
        checks = [kind.__post_init__ for kind in (*cls.__bases__, cls) if hasattr(kind, "__post_init__")]

        def check_all(self):
            with arguments_named({each.name for each in dataclasses.fields(self)}, IN_PYTHON):
                for check_own in dict.fromkeys(checks):
                    check_own(self)

        cls.__post_init__ = check_all

    def __post_init__(self):
        # A view is a function of (seed, epoch, index), and a loss that is not finite ends the run.
        self.remove_unused_columns, self.ignore_data_skip, self.logging_nan_inf_filter = False, True, False
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False
        if self.load_best_model_at_end:
            self.eval_strategy = self.save_strategy = "epoch"
        super().__post_init__()
        for name, fits, expected in (
            ("logging_steps", self.logging_steps >= 1 and self.logging_steps == int(self.logging_steps), "1 or more"),
            ("save_steps", self.save_steps >= 1 and self.save_steps == int(self.save_steps), "1 or more"),
            ("save_only_model", not self.save_only_model, "False: a run goes on from its optimizer, too"),
            ("label_smoothing_factor", not self.label_smoothing_factor, "0: that of trainers here is label_smoothing"),
        ):
            if not fits:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected {expected}.")
        # Several devices are several processes' affair.
        self._n_gpu = min(self.n_gpu, 1)

    @property
    def parts(self) -> int:
        """Number of parts of a batch that are computed apart, over all processes."""
        return self.world_size * self.gradient_accumulation_steps

    def as_run(self) -> tuple[RunArguments, DataArguments]:
        """The same arguments in the groups of a command."""

        def group(kind: type, **values):
            names = {each.name: IN_PYTHON.get(each.name, each.name) for each in dataclasses.fields(kind) if each.init}
            own = {option: getattr(self, name) for option, name in names.items() if hasattr(self, name)}
            return kind(**own | values)

        run = group(
            RunArguments,
            epochs=self.num_train_epochs and math.ceil(self.num_train_epochs),
            batch_size=self.per_device_train_batch_size * self.parts,
            eval_batch_size=self.per_device_eval_batch_size * self.world_size,
            logging_steps=int(self.logging_steps),
            checkpointing_steps=int(self.save_steps),
        )
        return run, group(DataArguments, dataset=[])


def training_arguments(kind: type[ImageTrainingArguments], run: RunArguments, data: ImageArguments, *groups):
    """Return the arguments of a trainer for the options of a command.

    Args:
        kind (`type`): The class of arguments to return.
        run, data, groups: The command's groups of options; those that `kind` has no name for are left out.

    Raises:
        ValueError: if a tracker is not installed.
    """
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    parts, values = state.num_processes * run.gradient_accumulation_steps, {}
    known = {each.name for each in dataclasses.fields(kind) if each.init}
    for group in (run, data, *groups):
        names = {IN_PYTHON.get(each.name, each.name): each.name for each in dataclasses.fields(group)}
        values |= {name: getattr(group, option) for name, option in names.items() if name in known}
    values |= {
        "per_device_train_batch_size": max(run.batch_size // parts, 1),
        "per_device_eval_batch_size": -(-run.eval_batch_size // state.num_processes),
        "use_cpu": state.device.type == "cpu",
        "bf16": run.mixed_precision == "bf16",
        "fp16": run.mixed_precision == "fp16",
        "report_to": trackers(run.report_to) or "none",
    }
    return kind(**values)


def record_of(args: ImageTrainingArguments, trainer: str) -> dict:
    """The content of `run.json` for a run that no command began: the arguments that made it what it is."""
    kinds = type(args).__mro__
    own = set().union(*(inspect.get_annotations(kind) for kind in kinds[: kinds.index(TrainingArguments)]))
    values = {name: getattr(args, name) for name in sorted((own - RESUMABLE - NOT_FIXED) | FIXED)}
    return {
        "command": f"frugalvit.{trainer}",
        "processes": args.world_size,
        "device": args.device.type,
        "arguments": json.loads(json.dumps(values)),
        **origin(),
    }


def trackers(names: list[str]) -> list[str]:
    """The trackers that `--report-to` names, without `none`.

    Raises:
        ValueError: if one is unknown or not installed; Accelerate would say nothing.
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
    """The precision that the run in the output folder began with, or, of a new run, the one that the main process'
    device is fast at."""
    there = None if run.overwrite else read_run(Path(run.output_dir))
    if there and there["arguments"].get("mixed_precision") in ("no", "bf16", "fp16"):
        return there["arguments"]["mixed_precision"]
    # As Accelerate asks for processes on CPUs, before it is told the precision.
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    chosen = [choose_mixed_precision(state.device) if state.is_main_process else None]
    return broadcast_object_list(chosen)[0]


def check_output_folder(folder: Path, run: RunArguments, arguments: list):
    """Raise a ValueError if a folder is not free, unless the same run can go on there or is to be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {folder} is a file; expected a folder, or a name that is free.")
    if not folder.is_dir() or all(any(path.match(kind) for kind in BESIDES) for path in folder.iterdir()):
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
    """Whether the run in a folder has left a checkpoint or a model."""
    return any((folder / "checkpoints").glob("step-*")) or (folder / "config.json").exists()


def read_run(folder: Path) -> dict | None:
    """Read the `run.json` that a training wrote into a folder; None if there is none that can be read."""
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


def replace_files(folder: Path, write: Callable[[Path], None]):
    """Replace files of a folder: `write` fills a folder aside, and its files are moved over, the weights last."""
    aside = folder / BEST_ASIDE
    aside.mkdir()
    try:
        with disk_errors(folder):
            write(aside)
            permit_as_usual(*aside.iterdir())
        for path in sorted(aside.iterdir(), key=lambda path: path.suffix == ".safetensors"):
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def claim(folder: Path, run: RunArguments):
    """Begin a run in its folder, which is locked, or go on with it.

    Raises:
        ValueError: if another process began a run there since this one looked, or the run has seen other images.
    """
    found = read_run(folder)
    if found != run.found:
        raise ValueError(f"Another process has begun a run in --output {folder}; give another folder.")
    if run.overwrite:
        if (folder / "checkpoints").exists():
            shutil.rmtree(folder / "checkpoints")
    elif found and has_begun(folder):
        here, there = run.record.get("images", {}), found.get("images", {})
        changed = [name for name in here if name in there and here[name] != there[name]]
        if changed:
            counted = [name for name in changed if isinstance(here[name], int) and isinstance(there[name], int)]
            counts = "".join(f", {there[name]:,} {name} then and {here[name]:,} now" for name in counted)
            raise ValueError(
                f"The images are not those that the run in --output {folder} began with (other "
                f"{' and '.join(changed)}{counts}). Restore them, give another folder, or --overwrite to start anew."
            )
    shutil.rmtree(folder / BEST_ASIDE, ignore_errors=True)
    write_json(folder / "run.json", run.record)


@contextmanager
def own_folder(accelerator: Accelerator, run: RunArguments) -> Iterator[None]:
    """Within, no other process works in the folder of the run."""
    folder = Path(run.output_dir)
    with ExitStack() as stack:
        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder))
            claim(folder, run)
        accelerator.wait_for_everyone()
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            kept = Checkpoints(accelerator, folder / "checkpoints").all()
            saved = f"{kept[-1].name} is saved; run the same command to go on." if kept else "There was no step."
            accelerator.print(f"\nStopped. {saved}", file=sys.stderr)
            raise
