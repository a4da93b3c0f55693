"""The loop that recipes share: steps, evaluation, checkpoints that resume bit-exactly, the best model kept."""

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import os
import platform
import shlex
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.utils import (
    DistributedType,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    broadcast_object_list,
    parse_flag_from_env,
    set_seed,
)
from tqdm import tqdm

from ...common.data import TrainingLoader
from ...common.files import LOCK, disk_errors, locked, write_json, write_text
from ...common.precision import choose_mixed_precision, describe_device
from ...modeling.hosts.timm import is_timm
from .arguments import RESUMABLE, OptimizerArguments, RunArguments
from .muon import Muon, split_matrices


OPTIMIZERS = ("adamw", "muon", "sam")
# Where the best model is written before its files are moved over the earlier ones.
BEST_ASIDE = ".best.aside"
# What each file of a checkpoint was when it was written.
CHECKSUMS = "checksums.json"


@dataclass
class TrainingState:
    """Where a run is; saved with every checkpoint.

    Args:
        epoch (`int`): Epochs that are done.
        step (`int`): Optimizer steps that are done.
        best (`dict`, *optional*): Record of the best epoch.
        log (`list[dict]`): What `metrics.jsonl` holds: a record every so many steps and one an epoch.
        losses (`list[float]`): Loss of each step since the epoch began.
        seconds (`float`): Time in training steps since the epoch began.
        skipped (`int`): Images skipped since the epoch began.
    """

    epoch: int = 0
    step: int = 0
    best: dict | None = None
    log: list[dict] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    skipped: int = 0

    @property
    def epochs(self) -> list[dict]:
        """The records of whole epochs."""
        return [record for record in self.log if "train_loss" in record]


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
        log_with=run.report_to or None,
        project_config=ProjectConfiguration(run.output_dir, logging_dir=str(Path(run.output_dir) / "logs")),
    )
    run.record |= {
        "command": shlex.join([*prog.split(), *(sys.argv[1:] if argv is None else argv)]),
        "processes": accelerator.num_processes,
        "device": accelerator.device.type,
        "arguments": _fixed_values(arguments),
        "versions": versions(),
    }
    started = int(os.environ.get("WORLD_SIZE") or 1)
    if started > accelerator.num_processes and "RANK" in os.environ:
        raise ValueError(
            f"{started} processes were started and Accelerate sees {accelerator.num_processes}, so that each would "
            "train alone. On CPUs, set ACCELERATE_USE_CPU=true."
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


def automatic_precision(run: RunArguments) -> str:
    """The precision that the run in the output folder began with, or the one that the main process' device is fast
    at."""
    there = None if run.overwrite else read_run(Path(run.output_dir))
    if there and "mixed_precision" in there["arguments"]:
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
    if changed:
        raise ValueError(
            f"--output {folder} holds another run ("
            + ", ".join(f"{name} is {there.get(name)!r} there, {here.get(name)!r} here" for name in changed[:3])
            + "). Give another folder, the same arguments to go on, or --overwrite to start anew."
        )


def read_run(folder: Path) -> dict | None:
    """What a recipe noted about the run in a folder, or None if none did."""
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("arguments"), dict) else None


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


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    packages = ("frugalvit", "torch", "torchvision", "transformers", "accelerate", "datasets")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def replace_files(folder: Path, write: Callable[[Path], None]):
    """Let `write` fill a folder aside, then move its files over, the weights last."""
    aside = folder / BEST_ASIDE
    aside.mkdir()
    with disk_errors(folder):
        write(aside)
    for path in sorted(aside.iterdir(), key=lambda path: path.suffix == ".safetensors"):
        os.replace(path, folder / path.name)
    aside.rmdir()


def parameter_groups(model: torch.nn.Module, weight_decay: float, optimizer: str = "adamw") -> list[dict]:
    """Parameters for an optimizer: matrices and filters decay; biases, norms, positions, [CLS] and the like do not.

    A model adds names to the latter by a method `no_weight_decay()`. For Muon, the matrices of its body stand apart.
    """
    spared = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
    words = ("position_embeddings", "pos_embed", "cls_token", "mask_token", "distillation_token")
    decayed, kept = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            spare = parameter.ndim < 2 or name in spared or any(word in name for word in words)
            (kept if spare else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return split_matrices(model, *groups) if optimizer == "muon" else groups


def learning_rate_factors(
    model: torch.nn.Module, head_multiplier: float, layer_decay: float
) -> dict[torch.nn.Parameter, float]:
    """Factor of the learning rate of each parameter: 1 for the last block of the longest list of blocks and what
    follows it, `layer_decay` times that of the next for each block before, once more for what comes before the blocks,
    and `head_multiplier` outside the base model and for the classifier that timm's models have inside.

    Raises:
        ValueError: if there is nothing outside the base model.
    """
    base = model.base_model
    if base is model and head_multiplier != 1:
        raise ValueError(
            f"--head-multiplier is {head_multiplier}, but a {type(model).__name__} does not say what its head is; "
            "expected 1."
        )
    # timm's blocks are a sequence.
    kinds = (torch.nn.ModuleList, torch.nn.Sequential) if is_timm(base) else torch.nn.ModuleList
    lists = [(name, module) for name, module in base.named_modules() if isinstance(module, kinds)]
    name, blocks = max(lists, key=lambda item: len(item[1]), default=("", ()))
    last, index, heads = len(blocks) - 1, -1, classifiers_inside(base)
    factors = dict.fromkeys(model.parameters(), head_multiplier)
    for full_name, parameter in base.named_parameters():
        if full_name.startswith(heads):
            continue
        if blocks and full_name.startswith(f"{name}."):
            index = int(full_name.removeprefix(f"{name}.").partition(".")[0])
        elif index >= 0:
            index = last
        factors[parameter] = layer_decay ** (last - index)
    return factors


def classifiers_inside(base: torch.nn.Module) -> tuple[str, ...]:
    """What the names of a base model's parameters begin with that are its classifier's: of a timm model, which has it
    inside, where Transformers' models have it beside their base model."""
    if not is_timm(base):
        return ()
    heads = base.get_classifier()
    heads = heads if isinstance(heads, tuple) else (heads,)
    return tuple(f"{name}." for name, module in base.named_modules() if any(module is head for head in heads))


def make_optimizer(name: str, groups: list[dict], sam_rho: float = 0.05, **options) -> torch.optim.Optimizer:
    """One of `OPTIMIZERS` on what `parameter_groups` returns, with options of AdamW; `sam_rho` is how far SAM looks.

    Raises:
        ValueError: if its library is not installed.
    """
    if name == "muon":
        return Muon(groups, **options)
    if name == "sam":
        try:
            from pytorch_optimizer import SAM
        except ImportError:
            raise ValueError("--optimizer sam is pytorch_optimizer's: pip install pytorch_optimizer.") from None
        return SAM(groups, torch.optim.AdamW, rho=sam_rho, **options, fused=True)
    return torch.optim.AdamW(groups, **options, fused=True)


def optimizer_with_schedule(
    model: torch.nn.Module,
    optimization: OptimizerArguments,
    epochs: int,
    steps_per_epoch: int,
    name: str = "adamw",
    rates: dict[torch.nn.Parameter, float] | None = None,
    **options,
):
    """One of `OPTIMIZERS` for all parameters of a model that learn, and the schedule of its rate; `rates` are factors
    of the learning rate for each parameter, `options` those of `make_optimizer`."""
    groups = parameter_groups(model, optimization.weight_decay, name)
    if rates:
        groups = [
            {**group, "params": members, "lr": factor * optimization.learning_rate}
            for group in groups
            for factor in sorted({rates[parameter] for parameter in group["params"]})
            if (members := [parameter for parameter in group["params"] if rates[parameter] == factor])
        ]
    optimizer = make_optimizer(
        name,
        groups,
        lr=optimization.learning_rate,
        betas=(optimization.adam_beta1, optimization.adam_beta2),
        **options,
    )
    scheduler = transformers.get_scheduler(
        optimization.lr_scheduler,
        optimizer,
        num_warmup_steps=round(optimization.warmup_epochs * steps_per_epoch),
        num_training_steps=epochs * steps_per_epoch,
    )
    return optimizer, scheduler


def prepare(accelerator: Accelerator, model: torch.nn.Module, optimizer, scheduler) -> tuple:
    """`accelerator.prepare`; of the layers that a model keeps together, FSDP shards those that do not hold its input
    embedding, which Accelerate shards by itself.

    Raises:
        ValueError: if FSDP or DeepSpeed cannot do that with this model or optimizer.
    """
    name, sharing = type(optimizer).__name__, accelerator.distributed_type
    if (name == "SAM" and sharing == DistributedType.FSDP) or (
        name != "AdamW" and sharing == DistributedType.DEEPSPEED
    ):
        raise ValueError(f"--optimizer {name.lower()} does not work with {sharing.value}; expected adamw.")
    plugin, deepspeed = getattr(accelerator.state, "fsdp_plugin", None), accelerator.state.deepspeed_plugin
    if (plugin and plugin.fsdp_version != 2) or (deepspeed and deepspeed.zero_stage > 2):
        raise ValueError(
            "Expected FSDP of version 2 or DeepSpeed up to ZeRO stage 2, as training/launch/ configures them."
        )
    if plugin and plugin.transformer_cls_names_to_wrap is None:
        try:
            embedding, kept_together = model.get_input_embeddings(), model._no_split_modules or ()
        except NotImplementedError as error:
            raise ValueError(
                f"Accelerate's FSDP asks for the input embedding, and a {type(model).__name__} does not say which it "
                "is; leave FSDP out."
            ) from error
        layers = [module for module in model.modules() if type(module).__name__ in kept_together]
        names = {type(layer).__name__ for layer in layers if embedding not in layer.modules()}
        plugin.transformer_cls_names_to_wrap = sorted(names)
    return accelerator.prepare(model, optimizer, scheduler)


@contextmanager
def ordinary_class(model: torch.nn.Module) -> Iterator[None]:
    """FSDP makes a class of its own of a model's, which neither the hub nor model cards know."""
    if not torch.distributed.is_available():
        yield
        return
    from torch.distributed.fsdp import FSDPModule

    sharded = type(model)
    model.__class__ = next(kind for kind in sharded.__mro__ if not issubclass(kind, FSDPModule))
    try:
        yield
    finally:
        model.__class__ = sharded


class Checkpoints:
    """Complete states under `folder/step-…`: written aside, with checksums, renamed when complete, the newest two
    kept."""

    def __init__(self, accelerator: Accelerator, folder: Path, limit: int = 2):
        self.accelerator, self.folder, self.limit = accelerator, folder, limit

    def all(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))

    def save(self, state: TrainingState):
        """Model, optimizer, schedule, scaler and every process' random numbers by Accelerate, and `state`."""
        target, aside = self.folder / f"step-{state.step:08d}", self.folder / ".aside"
        if self.accelerator.is_main_process:
            shutil.rmtree(aside, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        with disk_errors(self.folder.parent):
            self.accelerator.save_state(str(aside))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            write_json(aside / CHECKSUMS, checksums(aside))
            write_json(aside / "state.json", dataclasses.asdict(state))
            if target.exists():
                self.remove(target)
            os.rename(aside, target)
            for old in self.all()[: -self.limit]:
                self.remove(old)

    def update(self, state: TrainingState):
        """Let the checkpoint of this step, whose weights are the same, say more."""
        if self.accelerator.is_main_process:
            write_json(self.folder / f"step-{state.step:08d}" / "state.json", dataclasses.asdict(state))

    def remove(self, checkpoint: Path):
        # One that is half gone must not look like a checkpoint.
        removed = self.folder / ".removed"
        shutil.rmtree(removed, ignore_errors=True)
        os.rename(checkpoint, removed)
        shutil.rmtree(removed)

    def resume(self) -> TrainingState:
        """Load the newest checkpoint that is whole, or begin at the beginning.

        Raises:
            ValueError: if there are checkpoints and none is whole.
        """
        found = [self.newest_whole() if self.accelerator.is_main_process else None]
        newest = broadcast_object_list(found)[0]
        if newest is None:
            return TrainingState()
        self.accelerator.load_state(str(newest))
        state = TrainingState(**json.loads((newest / "state.json").read_text(encoding="utf-8")))
        self.accelerator.print(f"Going on from {newest}: {state.epoch} epochs and {state.step} steps are done.")
        return state

    def newest_whole(self) -> Path | None:
        """The newest checkpoint whose files are as they were written; None if there are no checkpoints."""
        for checkpoint in reversed(self.all()):
            if damaged := damaged_files(checkpoint):
                print(f"The checkpoint {checkpoint} is damaged ({', '.join(damaged[:3])}) and left out.")
            else:
                return checkpoint
        if self.all():
            raise ValueError(f"All checkpoints in {self.folder} are damaged; start anew with --overwrite.")
        return None


def checksums(folder: Path) -> dict[str, int]:
    """CRC-32 of each file of a folder, by its path in there."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        checksum = 0
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                checksum = zlib.crc32(block, checksum)
        found[path.relative_to(folder).as_posix()] = checksum
    return found


def damaged_files(checkpoint: Path) -> list[str]:
    """Files of a checkpoint that are not what was written; without checksums (earlier versions), empty ones."""
    try:
        json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        noted = checkpoint / CHECKSUMS
        expected = json.loads(noted.read_text(encoding="utf-8")) if noted.is_file() else None
    except (OSError, ValueError):
        return ["state.json"]
    if expected is None:
        return [path.name for path in sorted(checkpoint.iterdir()) if path.is_file() and not path.stat().st_size]
    found = checksums(checkpoint)
    return [name for name, checksum in expected.items() if found.get(name) != checksum]


def fit(
    accelerator: Accelerator,
    run: RunArguments,
    *,
    model: torch.nn.Module,
    optimizer,
    scheduler,
    loader: TrainingLoader,
    compute_loss: Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor],
    evaluate: Callable[[torch.nn.Module], dict[str, float]] | None,
    save: Callable[[Path, TrainingState, dict[str, torch.Tensor]], None],
    saved: torch.nn.Module | None = None,
    metric: str = "accuracy",
    before_epoch: Callable[[int], None] | None = None,
    before_step: Callable[[int, int], None] | None = None,
    clipped: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
) -> TrainingState:
    """Train to `run.epochs`, from the newest checkpoint in `run.output_dir` on if there is one.

    Args:
        accelerator (`Accelerator`): What `start_accelerator` returns.
        run (`RunArguments`): Epochs, folder, clipping and the like.
        model, optimizer, scheduler: What `prepare` returns; the scheduler steps with the optimizer.
        loader (`TrainingLoader`): Gives the batches.
        compute_loss: Takes model and batch to the mean loss over this process' share.
        evaluate (*optional*): Takes the model to numbers, after every epoch; without it, the last one is best.
        save: Writes a complete model repository, with its card, into a folder, given the weights; called on the main
            process after an epoch that is the best so far.
        saved (*optional*): What the weights are those of, if not of `model` alone.
        metric (`str`): The number of `evaluate` that is to be high.
        before_epoch (*optional*): Called with the epoch, from 0, before it begins and when resuming within it.
        before_step (*optional*): Called with the optimizer steps that are done and those of the whole run, before
            each part of a batch.
        clipped (*optional*): Takes the model to the part whose gradient is clipped; all of it if not given.

    Returns:
        The final `TrainingState`. The folder has the best model, `metrics.jsonl`, `results.json`, `checkpoints/`.
        `metrics.jsonl` grows as the run goes: every `logging_steps` a record of the mean loss since the last one, the
        speed since then, the highest learning rate and the norm of the step's gradient, before it was clipped.

    Raises:
        ValueError: if the loss, what is measured, or the gradient or the weights before a checkpoint are not finite;
            the last checkpoint stays. If another process works in the folder, or it holds a run on other images. Or if
            the optimizer cannot do what `run` asks for.
    """
    folder = Path(run.output_dir)
    with ExitStack() as stack:
        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder))
            claim(folder, run)
        accelerator.wait_for_everyone()
        return _fit(
            *(accelerator, run, model, optimizer, scheduler, loader, compute_loss, evaluate, save),
            *(saved, metric, before_epoch, before_step, clipped),
        )


def claim(folder: Path, run: RunArguments):
    """Begin or go on with a run in its folder, which is locked.

    Raises:
        ValueError: if another process began one there since this one looked, or the run has seen other images.
    """
    found = read_run(folder)
    if found != run.found:
        raise ValueError(f"Another process has begun a run in --output {folder}; give another folder.")
    if run.overwrite:
        if (folder / "checkpoints").exists():
            shutil.rmtree(folder / "checkpoints")
    elif found:
        here, there = run.record.get("images", {}), found.get("images", {})
        changed = [name for name in here if name in there and here[name] != there[name]]
        if changed:
            counted = [name for name in changed if isinstance(here[name], int)]
            counts = "".join(f", {there[name]:,} {name} then and {here[name]:,} now" for name in counted)
            raise ValueError(
                f"The images are not those that the run in --output {folder} began with (other "
                f"{' and '.join(changed)}{counts}). Restore them, give another folder, or --overwrite to start anew."
            )
    shutil.rmtree(folder / BEST_ASIDE, ignore_errors=True)
    write_json(folder / "run.json", run.record)


def _fit(
    accelerator: Accelerator,
    run: RunArguments,
    model: torch.nn.Module,
    optimizer,
    scheduler,
    loader: TrainingLoader,
    compute_loss: Callable,
    evaluate: Callable | None,
    save: Callable,
    saved: torch.nn.Module | None,
    metric: str,
    before_epoch: Callable | None,
    before_step: Callable | None,
    clipped: Callable | None,
) -> TrainingState:
    """`fit` in a folder that is this process' own."""
    folder = Path(run.output_dir)
    checkpoints = Checkpoints(accelerator, folder / "checkpoints")
    values = run.record["arguments"].items()
    accelerator.init_trackers("frugalvit", {k: v for k, v in values if isinstance(v, int | float | str)})
    set_seed(run.seed, device_specific=True)
    state = checkpoints.resume()
    metrics = folder / "metrics.jsonl"
    if accelerator.is_main_process:
        # What a run that was killed logged after its last checkpoint is logged again.
        write_text(metrics, "".join(json.dumps(record) + "\n" for record in state.log))

    # Sharpness-aware minimization computes the gradient once more, where the first one has led.
    steps_twice = type(optimizer.optimizer).__name__ == "SAM"
    if steps_twice and (run.gradient_accumulation_steps > 1 or run.mixed_precision == "fp16"):
        raise ValueError("--optimizer sam needs --gradient-accumulation-steps 1 and --mixed-precision no or bf16.")

    def log(record: dict):
        state.log.append(record)
        accelerator.log({name: value for name, value in record.items() if name != "step"}, step=state.step)
        if accelerator.is_main_process:
            with metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def backward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal gradient_norm
        loss = compute_loss(model, batch)
        accelerator.backward(loss)
        # Where the gradient is not clipped, its norm is computed for those who read it alone.
        if accelerator.sync_gradients and (run.max_grad_norm or reads(state.step + 1)):
            parameters = (clipped(model) if clipped else model).parameters()
            gradient_norm = accelerator.clip_grad_norm_(parameters, run.max_grad_norm or math.inf)
        return loss

    def reads(step: int) -> bool:
        """Whether numbers are read off the device after this step; reading makes an accelerator wait."""
        return not all(step % every for every in (run.logging_steps, run.checkpointing_steps, loader.steps_per_epoch))

    if clipped and accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError("This recipe clips the gradient of a part of its model, which DeepSpeed cannot.")

    unread: list[torch.Tensor] = []
    gradient_norm: torch.Tensor | float | None = None
    total_steps = run.epochs * loader.steps_per_epoch
    progress = tqdm(
        total=total_steps * loader.batch_size,
        initial=state.step * loader.batch_size,
        unit="img",
        unit_scale=True,
        mininterval=0.2 if sys.stderr.isatty() else 30,
        disable=not accelerator.is_main_process,
    )
    foretold = False
    for epoch in range(state.epoch, run.epochs):
        if before_epoch:
            before_epoch(epoch)
        model.train()
        progress.set_description(f"epoch {epoch + 1}/{run.epochs}")
        end, started = (epoch + 1) * loader.steps_per_epoch, time.perf_counter()
        logged_at, logged_step = started, state.step
        for batch in loader.epoch(epoch, loader.steps_per_epoch - (end - state.step)):
            learning_rate = max(scheduler.get_last_lr())
            if before_step:
                before_step(state.step, total_steps)
            with accelerator.accumulate(model):
                loss = backward(batch)
                optimizer.step(*([functools.partial(backward, batch)] if steps_twice else []))
                scheduler.step()
                optimizer.zero_grad()
            unread.append(loss.detach().float())
            if not accelerator.sync_gradients:
                continue
            state.step += 1
            progress.update(loader.batch_size)

            logs, saves = state.step % run.logging_steps == 0, state.step % run.checkpointing_steps == 0
            # A CPU has its numbers anyway.
            if reads(state.step) or accelerator.device.type == "cpu":
                state.losses += read_losses(accelerator, unread, state.step, checkpoints)
            if logs:
                recent, now = state.losses[-run.logging_steps :], time.perf_counter()
                speed = (state.step - logged_step) * loader.batch_size / (now - logged_at)
                norm = math.nan if gradient_norm is None else float(gradient_norm)
                record = {
                    "step": state.step,
                    "loss": sum(recent) / len(recent),
                    "learning_rate": learning_rate,
                    # DeepSpeed may not tell it, and the first scales of fp16 are too large.
                    **({"gradient_norm": norm} if math.isfinite(norm) else {}),
                    "images_per_second": speed,
                }
                log(record)
                progress.set_postfix(loss=f"{record['loss']:.3f}")
                logged_at, logged_step = now, state.step
                if not foretold and accelerator.is_main_process:
                    left = datetime.timedelta(seconds=round((total_steps - state.step) * loader.batch_size / speed))
                    progress.write(f"{speed:.4g} images/s; {left} left, evaluation aside.")
                foretold = True
            if saves or state.step == end:
                if gradient_norm is not None and accelerator.mixed_precision != "fp16":
                    # What it has made of the weights shows in the next loss, after they were saved.
                    check_finite("gradient's norm", float(gradient_norm), state.step, checkpoints)
                paused = time.perf_counter()
                state.seconds += paused - started
                state.skipped += loader.take_skipped(accelerator)
                check_weights(accelerator, model, state.step, checkpoints)
                # At the end of an epoch, too: what is measured then may fail.
                checkpoints.save(state)
                started = time.perf_counter()
                logged_at += started - paused

        record = {
            "epoch": epoch + 1,
            "step": state.step,
            "train_loss": sum(state.losses) / len(state.losses),
            "images_per_second": len(state.losses) * loader.batch_size / state.seconds,
            **({"skipped": state.skipped} if state.skipped else {}),
            **(evaluate(model) if evaluate else {}),
        }
        for name, value in record.items():
            if isinstance(value, float):
                check_finite(f"{name} of epoch {epoch + 1}", value, state.step, checkpoints)
        is_best = evaluate is None or state.best is None or record[metric] > state.best[metric]
        state = TrainingState(epoch + 1, state.step, record if is_best else state.best, state.log)
        # Where each process has a part of the weights, all of them gather the whole.
        weights = accelerator.get_state_dict(model if saved is None else saved) if is_best else None
        if accelerator.is_main_process:
            progress.write(", ".join(f"{name} {value:.4g}" for name, value in record.items() if name != "step"))
            if is_best:
                with ordinary_class(accelerator.unwrap_model(model)):
                    replace_files(folder, lambda aside, state=state, weights=weights: save(aside, state, weights))
        log(record)
        checkpoints.update(state)

    progress.close()
    if accelerator.is_main_process:
        write_json(folder / "results.json", run.record | {"best": state.best, "epochs": state.epochs})
    accelerator.end_training()
    return state


def read_losses(
    accelerator: Accelerator, unread: list[torch.Tensor], step: int, checkpoints: Checkpoints
) -> list[float]:
    """Take the losses up to `step` off the device, as means over processes and accumulation steps.

    Raises:
        ValueError: if one is not finite; it names the step of the first.
    """
    losses = torch.stack(unread).view(-1, accelerator.gradient_accumulation_steps).mean(1)
    losses = accelerator.reduce(losses, reduction="mean").tolist()
    unread.clear()
    for at, loss in enumerate(losses, step - len(losses) + 1):
        check_finite("loss", loss, at, checkpoints)
    return losses


def check_weights(accelerator: Accelerator, model: torch.nn.Module, step: int, checkpoints: Checkpoints):
    """Raise a ValueError if a weight is not finite."""
    # Of a weight that FSDP shares out, this process' part.
    parts = (weight.to_local() if hasattr(weight, "to_local") else weight for weight in model.parameters())
    lost = sum((~part.detach().isfinite()).sum() for part in parts)
    if lost := int(accelerator.reduce(lost, reduction="sum")):
        check_finite(f"value of {lost:,} weights", math.nan, step, checkpoints)


def check_finite(what: str, value: float, step: int, checkpoints: Checkpoints):
    """Raise a ValueError if a number of a step is not finite."""
    if math.isfinite(value):
        return
    kept = checkpoints.all()
    raise ValueError(
        f"The {what} is {value} at step {step}, the first such, so training stopped. Lower --learning-rate or warm "
        f"up longer. {f'The checkpoint {kept[-1]} is kept.' if kept else 'There is no checkpoint yet.'}"
    )
