"""The loop that recipes share: steps, evaluation, checkpoints that resume bit-exactly, the best model kept."""

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed
from tqdm import tqdm

from .arguments import RESUMABLE, RunArguments
from .data import TrainingLoader


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
    """Seed everything, claim the output folder and start Accelerate.

    Raises:
        ValueError: if the folder holds something else than the same run.
    """
    folder = Path(run.output_dir)
    accelerator = Accelerator(
        mixed_precision=run.mixed_precision,
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(split_batches=True, non_blocking=True),
        log_with=run.report_to or None,
        project_config=ProjectConfiguration(project_dir=run.output_dir, logging_dir=str(folder / "logs")),
    )
    claim_folder(accelerator, folder, run.overwrite, prog, argv, arguments)
    set_seed(run.seed)
    # One progress bar, the training's: models load and save in a moment.
    transformers.utils.logging.disable_progress_bar()
    values = {name: value for name, value in _fixed_values(arguments).items() if isinstance(value, (int, float, str))}
    accelerator.init_trackers("frugalvit", config=values)
    return accelerator


def claim_folder(accelerator: Accelerator, folder: Path, overwrite: bool, prog: str, argv, arguments: list):
    """Make the output folder and note the run in `run.json`, or find the same run there to go on with."""
    fixed = _fixed_values(arguments)
    problem = None
    if folder.exists() and not folder.is_dir():
        problem = f"--output_dir {folder} is a file; expected a folder, or a name that is free."
    elif (folder / "run.json").is_file() and not overwrite:
        earlier = json.loads((folder / "run.json").read_text(encoding="utf-8"))["arguments"]
        changed = [name for name in sorted({*earlier, *fixed}) if earlier.get(name) != fixed.get(name)]
        if changed:
            what = ", ".join(
                f"{name} {earlier.get(name)!r} there and {fixed.get(name)!r} here" for name in changed[:3]
            )
            problem = (
                f"--output_dir {folder} holds a run with other arguments ({what}). "
                "Give another folder, the same arguments to go on with it, or --overwrite to start anew."
            )
    elif not overwrite and folder.is_dir() and any(folder.iterdir()):
        problem = f"--output_dir {folder} is not empty and holds no run to go on with. Give another, or --overwrite."
    accelerator.wait_for_everyone()
    if problem:
        raise ValueError(problem)
    if accelerator.is_main_process:
        if overwrite:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        command = shlex.join([*prog.split(), *(sys.argv[1:] if argv is None else argv)])
        write_json(folder / "run.json", {"command": command, "arguments": fixed, "versions": versions()})
    accelerator.wait_for_everyone()


def _fixed_values(arguments: list) -> dict:
    """The arguments that make a run what it is, by name."""
    return {
        f.name: getattr(group, f.name)
        for group in arguments
        for f in dataclasses.fields(group)
        if f.name not in RESUMABLE
    }


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    packages = ("frugalvit", "torch", "torchvision", "transformers", "accelerate", "datasets")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def write_json(path: Path, content):
    """Write a JSON file so that it is either the old or the new one, whenever the process dies."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str):
    aside = path.with_name(f".{path.name}.aside")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def parameter_groups(model: torch.nn.Module, weight_decay: float, learning_rate: float | None = None) -> list[dict]:
    """Parameters for AdamW: matrices and filters decay; biases, norms, positions, [CLS] and the like do not.

    A model adds names to the latter by a method `no_weight_decay()`.
    """
    spared = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
    words = ("position_embeddings", "pos_embed", "cls_token", "mask_token", "distillation_token")
    decayed, kept = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            spare = parameter.ndim < 2 or name in spared or any(word in name for word in words)
            (kept if spare else decayed).append(parameter)
    rate = {} if learning_rate is None else {"lr": learning_rate}
    return [
        {"params": decayed, "weight_decay": weight_decay, **rate},
        {"params": kept, "weight_decay": 0.0, **rate},
    ]


class Checkpoints:
    """Complete states under `folder/step-…`: written aside, renamed when complete, the newest two kept."""

    def __init__(self, accelerator: Accelerator, folder: Path, limit: int = 2):
        self.accelerator, self.folder, self.limit = accelerator, folder, limit

    def all(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))

    def save(self, state: TrainingState):
        """Model, optimizer, schedule, scaler and random numbers (of every process) by Accelerate, and `state`."""
        target = self.folder / f"step-{state.step:08d}"
        aside = self.folder / ".aside"
        if self.accelerator.is_main_process:
            shutil.rmtree(aside, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(aside))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            write_json(aside / "state.json", dataclasses.asdict(state))
            shutil.rmtree(target, ignore_errors=True)
            os.rename(aside, target)
            for old in self.all()[: -self.limit]:
                shutil.rmtree(old)
        self.accelerator.wait_for_everyone()

    def resume(self) -> TrainingState:
        """Load the newest checkpoint, or start at the beginning."""
        if not self.all():
            return TrainingState()
        newest = self.all()[-1]
        self.accelerator.load_state(str(newest))
        state = TrainingState(**json.loads((newest / "state.json").read_text(encoding="utf-8")))
        self.accelerator.print(f"Going on from {newest}: epoch {state.epoch + 1}, step {state.step}.")
        return state


def fit(
    accelerator: Accelerator,
    run: RunArguments,
    *,
    model: torch.nn.Module,
    optimizer,
    scheduler,
    loader: TrainingLoader,
    compute_loss: Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor],
    evaluate: Callable[[torch.nn.Module], dict[str, float]],
    save: Callable[[Path, TrainingState], None],
    metric: str = "accuracy",
    before_epoch: Callable[[int], None] | None = None,
) -> TrainingState:
    """Train to `run.epochs`, from the newest checkpoint in `run.output_dir` on if there is one.

    Args:
        accelerator (`Accelerator`): Has prepared model, optimizer and scheduler.
        run (`RunArguments`): Epochs, folder, clipping and the like.
        model, optimizer, scheduler: As prepared; the scheduler steps with the optimizer.
        loader (`TrainingLoader`): Gives the batches.
        compute_loss: Takes model and batch to the mean loss over this process' share.
        evaluate: Takes the model to numbers, after every epoch.
        save: Writes a complete model repository, with its card, into a folder; called on the main process after an
            epoch that is the best so far.
        metric (`str`): The number of `evaluate` that is to be high.
        before_epoch (*optional*): Called with the epoch, from 0, before it begins and when resuming within it.

    Returns:
        The final `TrainingState`. The folder has the best model, `metrics.jsonl`, `results.json`, `checkpoints/`.

    Raises:
        ValueError: if the loss is not finite; the last checkpoint stays.
    """
    folder = Path(run.output_dir)
    checkpoints = Checkpoints(accelerator, folder / "checkpoints")
    state = checkpoints.resume()
    unread: list[torch.Tensor] = []

    def read_losses():
        """Bring the losses since the last call here, over processes and accumulation steps."""
        if not unread:
            return
        parts = torch.stack(unread).view(-1, run.gradient_accumulation_steps).mean(1)
        losses = accelerator.reduce(parts, reduction="mean").tolist()
        unread.clear()
        first = state.step - len(losses) + 1
        for step, loss in enumerate(losses, first):
            if not math.isfinite(loss):
                kept = checkpoints.all()
                raise ValueError(
                    f"The loss is {loss} at step {step}, so training stopped. Lower --learning_rate, or lengthen the "
                    f"warm-up. {f'The checkpoint {kept[-1]} is kept' if kept else 'There is no checkpoint yet'}."
                )
        state.losses += losses

    progress = tqdm(
        total=run.epochs * loader.steps_per_epoch,
        initial=state.step,
        unit="step",
        mininterval=0.2 if sys.stderr.isatty() else 30,
        disable=not accelerator.is_main_process,
    )
    for epoch in range(state.epoch, run.epochs):
        if before_epoch:
            before_epoch(epoch)
        model.train()
        progress.set_description(f"epoch {epoch + 1}/{run.epochs}")
        started = time.perf_counter()
        for batch in loader.epoch(epoch, state.step - epoch * loader.steps_per_epoch):
            with accelerator.accumulate(model):
                loss = compute_loss(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients and run.max_grad_norm:
                    accelerator.clip_grad_norm_(model.parameters(), run.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            unread.append(loss.detach().float())
            if not accelerator.sync_gradients:
                continue

            state.step += 1
            progress.update()
            in_epoch = state.step - epoch * loader.steps_per_epoch
            if state.step % run.logging_steps == 0:
                read_losses()
                recent = state.losses[-run.logging_steps :]
                record = {"step": state.step, "loss": sum(recent) / len(recent), "lr": scheduler.get_last_lr()[0]}
                state.log.append(record)
                accelerator.log(record, step=state.step)
                progress.set_postfix(loss=f"{record['loss']:.3f}")
            if state.step % run.checkpointing_steps == 0 and in_epoch < loader.steps_per_epoch:
                read_losses()
                state.seconds += time.perf_counter() - started
                state.skipped += loader.take_skipped(accelerator)
                checkpoints.save(state)
                started = time.perf_counter()

        read_losses()
        state.seconds += time.perf_counter() - started
        state.skipped += loader.take_skipped(accelerator)
        state.epoch = epoch + 1
        record = {
            "epoch": state.epoch,
            "step": state.step,
            "train_loss": sum(state.losses) / len(state.losses),
            "images_per_second": len(state.losses) * loader.batch_size / state.seconds,
            **({"skipped": state.skipped} if state.skipped else {}),
            **evaluate(model),
        }
        state.log.append(record)
        state.losses, state.seconds, state.skipped = [], 0.0, 0
        accelerator.log({name: value for name, value in record.items() if name != "step"}, step=state.step)
        numbers = ", ".join(f"{k} {v:.4g}" for k, v in record.items() if k not in ("epoch", "step"))
        progress.write(f"epoch {state.epoch}: {numbers}") if accelerator.is_main_process else None

        best = state.best is None or record[metric] > state.best[metric]
        if best:
            state.best = record
        if accelerator.is_main_process:
            if best:
                replace_files(folder, lambda aside: save(aside, state))
            write_text(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in state.log))
        checkpoints.save(state)

    progress.close()
    if accelerator.is_main_process:
        noted = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        write_json(folder / "results.json", {**noted, "best": state.best, "epochs": state.epochs})
    accelerator.end_training()
    return state


def replace_files(folder: Path, write: Callable[[Path], None]):
    """Let `write` fill a folder aside, then move each file over; the weights last."""
    aside = folder / ".best.aside"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    write(aside)
    for path in sorted(aside.iterdir(), key=lambda path: path.suffix == ".safetensors"):
        os.replace(path, folder / path.name)
    aside.rmdir()
