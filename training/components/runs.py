"""The start of a run: its folder, its processes, its precision."""

import dataclasses
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, parse_flag_from_env, set_seed
from transformers import TrainingArguments

from ...common.files import permit_as_usual
from ...common.precision import choose_mixed_precision, describe_device
from ...common.versions import origin
from .arguments import IN_PYTHON, DataArguments, ImageArguments, RunArguments
from .checkpoints import Checkpoints


# Where the best model is written before its files are moved over the earlier ones.
BEST_ASIDE = ".best.aside"
# What may be there before a run begins.
BESIDES = ("*_results.json", "trainer_state.json")
# Arguments that `results.json` leaves out, as `--config` reads it for other runs.
NOT_RECORDED = ("output_dir", "overwrite", "trust_remote_code")


def start_run(run: RunArguments, prog: str, argv: list[str] | None, arguments: list):
    """Refuse an output folder that holds something else than a run, seed everything, and print what the run computes
    on.

    Nothing is written before the training.

    Args:
        run (`RunArguments`): One of `arguments`; its `record` and `mixed_precision` are filled.
        prog (`str`): The command, for example `"frugalvit train"`.
        argv (`list[str]`, *optional*): Its arguments; those of the process if not given.
        arguments (`list`): All dataclasses of arguments.

    Raises:
        ValueError: if the folder is taken, or processes are started as training cannot run.
    """
    if run.mixed_precision == "auto":
        run.mixed_precision = automatic_precision()
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    run.record |= {
        "command": shlex.join([*prog.split(), *(sys.argv[1:] if argv is None else argv)]),
        "processes": state.num_processes,
        "device": state.device.type,
        "arguments": recorded(*arguments),
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
    check_output_folder(Path(run.output_dir))
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
        "report_to": run.report_to or "none",
    }
    return kind(**values)


def recorded(*groups) -> dict:
    """The arguments in dataclasses, by name, as `results.json` keeps them."""
    fields = ((group, each.name) for group in groups for each in dataclasses.fields(group) if each.init)
    return {name: getattr(group, name) for group, name in fields if name not in NOT_RECORDED}


def record_of(args: ImageTrainingArguments, trainer: str) -> dict:
    """The head of `results.json` for a run that no command began, with the arguments that are no defaults."""
    defaults = {each.name: each.default for each in dataclasses.fields(args)} | {"output_dir": args.output_dir}
    return {
        "command": f"frugalvit.{trainer}",
        "processes": args.world_size,
        "device": args.device.type,
        "arguments": {name: value for name, value in args.to_dict().items() if value != defaults[name]},
        **origin(),
    }


def automatic_precision() -> str:
    """The precision that the main process' device is fast at."""
    # As Accelerate asks for processes on CPUs, before it is told the precision.
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    chosen = [choose_mixed_precision(state.device) if state.is_main_process else None]
    return broadcast_object_list(chosen)[0]


def check_output_folder(folder: Path):
    """Raise a ValueError if a folder holds something else than a run to go on with or to overwrite."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {folder} is a file; expected a folder, or a name that is free.")
    if not folder.is_dir() or (folder / "metrics.jsonl").is_file():
        return
    if not all(any(path.match(kind) for kind in BESIDES) for path in folder.iterdir()):
        raise ValueError(
            f"--output {folder} is not empty and holds no run to go on with or to overwrite; give another folder."
        )


def replace_files(folder: Path, write: Callable[[Path], None]):
    """Replace files of a folder: `write` fills a folder aside, and its files are moved over, the weights last."""
    aside = folder / BEST_ASIDE
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    write(aside)
    permit_as_usual(aside)
    for path in sorted(aside.iterdir(), key=lambda path: path.suffix == ".safetensors"):
        os.replace(path, folder / path.name)
    aside.rmdir()


@contextmanager
def in_its_folder(accelerator: Accelerator, run: RunArguments) -> Iterator[None]:
    """Make the folder of a run, without checkpoints if it is to be overwritten, and say how an interrupted run goes
    on."""
    checkpoints = Checkpoints(accelerator, Path(run.output_dir) / "checkpoints")
    if accelerator.is_main_process:
        checkpoints.folder.parent.mkdir(parents=True, exist_ok=True)
        if run.overwrite and checkpoints.folder.exists():
            shutil.rmtree(checkpoints.folder)
    accelerator.wait_for_everyone()
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        kept = checkpoints.all()
        saved = f"{kept[-1].name} is saved; run the same command to go on." if kept else "There was no step."
        accelerator.print(f"\nStopped. {saved}", file=sys.stderr)
        raise
