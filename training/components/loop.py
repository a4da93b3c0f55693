"""The loop that recipes share: steps, evaluation, the best model kept."""

import datetime
import functools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from tqdm import tqdm

from ...common.files import disk_errors, locked, write_json, write_text
from .arguments import RunArguments
from .checkpoints import TEST, Checkpoints, TrainingState
from .interruptions import Interruption
from .loaders import DeviceLoader, TrainingLoader
from .runs import has_begun, read_run
from .sharding import ordinary_class


# Seconds after which a checkpoint is written, besides those of steps and epochs; more where writing takes so long that
# it would be more than `SHARE_OF_WRITING` of the time.
CHECKPOINT_SECONDS, SHARE_OF_WRITING = 180.0, 0.05
# Seconds of steps from which the time that is left is foretold, the first step aside, which prepares much.
FORETELLING_SECONDS = 5.0
# Where the best model is written before its files are moved over the earlier ones.
BEST_ASIDE = ".best.aside"


def replace_files(folder: Path, write: Callable[[Path], None]):
    """Let `write` fill a folder aside, then move its files over, the weights last."""
    aside = folder / BEST_ASIDE
    aside.mkdir()
    with disk_errors(folder):
        write(aside)
    for path in sorted(aside.iterdir(), key=lambda path: path.suffix == ".safetensors"):
        os.replace(path, folder / path.name)
    aside.rmdir()


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


def in_own_folder(train: Callable) -> Callable:
    """A training whose folder no other process works in meanwhile."""

    @functools.wraps(train)
    def train_there(accelerator: Accelerator, run: RunArguments, **parts):
        folder = Path(run.output_dir)
        with ExitStack() as stack:
            if accelerator.is_main_process:
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(folder))
                claim(folder, run)
            accelerator.wait_for_everyone()
            try:
                return train(accelerator, run, **parts)
            except (KeyboardInterrupt, SystemExit):
                kept = Checkpoints(accelerator, folder / "checkpoints").all()
                saved = f"{kept[-1].name} is saved; run the same command to go on." if kept else "There was no step."
                accelerator.print(f"\nStopped. {saved}", file=sys.stderr)
                raise

    return train_there


@in_own_folder
def fit(
    accelerator: Accelerator,
    run: RunArguments,
    *,
    model: torch.nn.Module,
    optimizer,
    scheduler,
    loader: TrainingLoader,
    compute_loss: Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor],
    evaluate: Callable[[torch.nn.Module, DeviceLoader], dict[str, float]],
    eval_loader: DeviceLoader | None,
    test_loader: DeviceLoader | None,
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
        evaluate: Takes the model and a loader to numbers.
        eval_loader (*optional*): What is evaluated after every epoch; without it, the last one is best.
        test_loader (*optional*): What an epoch that is the best so far is measured on besides; the record has its
            numbers as `test_…`.
        save: Writes a complete model repository, with its card, into a folder, given the weights; called on the main
            process after an epoch that is the best so far.
        saved (*optional*): What the weights are those of, if not of `model` alone.
        metric (`str`): The number of `evaluate` that is to be high.
        before_epoch (*optional*): Called with the epoch, from 0, before it begins and when resuming within it.
        before_step (*optional*): Called with the optimizer steps that are done and those of the whole run, before
            each part of a batch.
        clipped (*optional*): Takes the model to the part whose gradient is clipped; all of it if not given.

    Ctrl-C and SIGTERM end it after the step, with a checkpoint; a second one at once.

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
    checkpoints = Checkpoints(accelerator, folder / "checkpoints")
    values = run.record["arguments"].items()
    accelerator.init_trackers("frugalvit", {k: v for k, v in values if isinstance(v, int | float | str)})
    set_seed(run.seed, device_specific=True)
    state = checkpoints.resume()
    if not 0 <= state.step - state.epoch * loader.steps_per_epoch <= loader.steps_per_epoch:
        raise ValueError(
            f"{folder} has a checkpoint of {state.epoch} epochs and {state.step} steps, and an epoch has "
            f"{loader.steps_per_epoch}; give another folder, or start anew with --overwrite."
        )
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
        began = time.perf_counter()
        loss = compute_loss(model, batch)
        guess(time.perf_counter() - began)
        accelerator.backward(loss)
        # Where the gradient is not clipped, its norm is computed for those who read it alone.
        if accelerator.sync_gradients and (run.max_grad_norm or reads(state.step + 1)):
            parameters = (clipped(model) if clipped else model).parameters()
            gradient_norm = accelerator.clip_grad_norm_(parameters, run.max_grad_norm or math.inf)
        return loss

    def guess(seconds: float):
        """Foretell the time by the first forward pass where a step takes long, as measuring needs two; the way back
        takes about twice as long."""
        nonlocal guessed
        if not guessed and accelerator.is_main_process and seconds > FORETELLING_SECONDS:
            step = 3 * seconds * run.gradient_accumulation_steps
            left = datetime.timedelta(seconds=round((total_steps - state.step) * step))
            speed = loader.batch_size / step
            progress.write(f"By the first forward pass, about {speed:.2g} images/s and {left} left.")
        guessed = True

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
    guessed, foretold, warm, interruption = False, False, None, Interruption()
    saved_at, writing = time.perf_counter(), 0.0

    def asked() -> tuple[int, bool]:
        """The signal that a process received, 0 for none, and whether it is time for a checkpoint; in all processes
        the same."""
        is_time = time.perf_counter() - saved_at > max(CHECKPOINT_SECONDS, writing / SHARE_OF_WRITING)
        if accelerator.num_processes == 1:
            return interruption.received, is_time
        found = torch.tensor([interruption.received, int(is_time)], device=accelerator.device)
        received, is_time = accelerator.gather(found[None]).amax(0).tolist()
        interruption.received = received
        return received, bool(is_time)

    for epoch in range(state.epoch, run.epochs):
        if before_epoch:
            before_epoch(epoch)
        model.train()
        progress.set_description(f"epoch {epoch + 1}/{run.epochs}")
        end, started = (epoch + 1) * loader.steps_per_epoch, time.perf_counter()
        logged_at, logged_step = started, state.step
        with interruption:
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
                # On a CPU, reading a number waits for nothing; neither does asking oneself.
                reading = reads(state.step) or accelerator.device.type == "cpu"
                received, is_time = asked() if reading or accelerator.num_processes == 1 else (0, False)
                saves = saves or is_time or received != 0
                if reading or saves:
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
                warm = warm or (state.step, time.perf_counter())
                if not foretold and state.step > warm[0]:
                    taken = time.perf_counter() - warm[1]
                    if logs or taken > FORETELLING_SECONDS:
                        foretold, seconds = True, taken / (state.step - warm[0])
                        left = datetime.timedelta(seconds=round((total_steps - state.step) * seconds))
                        if accelerator.is_main_process:
                            progress.write(
                                f"{loader.batch_size / seconds:.4g} images/s; {left} left, evaluation aside."
                            )
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
                    started = saved_at = time.perf_counter()
                    writing = started - paused
                    logged_at += writing
                if received:
                    progress.close()
                    interruption.end()

        record = {
            "epoch": epoch + 1,
            "step": state.step,
            "train_loss": sum(state.losses) / len(state.losses),
            "images_per_second": len(state.losses) * loader.batch_size / state.seconds,
            **({"skipped": state.skipped} if state.skipped else {}),
            **(evaluate(model, eval_loader) if eval_loader else {}),
        }
        is_best = not eval_loader or state.best is None or record[metric] > state.best.get(metric, -math.inf)
        if is_best and test_loader:
            record |= {f"{TEST}{name}": value for name, value in evaluate(model, test_loader).items()}
        for name, value in record.items():
            if isinstance(value, float):
                check_finite(f"{name} of epoch {epoch + 1}", value, state.step, checkpoints)
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
    """Raise a ValueError if a weight that learns is not finite."""
    learned = (weight for weight in model.parameters() if weight.requires_grad)
    # The part of a weight that this process holds, where FSDP shares it out.
    parts = (weight.to_local() if hasattr(weight, "to_local") else weight for weight in learned)
    # Weights may be on several devices.
    lost = sum((~part.detach().isfinite()).sum().to(accelerator.device) for part in parts)
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
