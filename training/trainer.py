"""Base class of the trainers: Transformers' `Trainer` with views of images as data sets, and with a model card."""

import copy
import dataclasses
import functools
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import datasets
import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

from .arguments import ArgumentParser, DataArguments, ImageTrainingArguments
from .cards import describe_step, write_card
from .data import check_same_classes, class_names
from .files import apply_umask, check_output_outside_input
from .views import StreamedViews, Views, as_images, collate


# Parameters have no weight decay if their name contains one of these parts, or if they are vectors or scalars.
WITHOUT_DECAY = {
    "position_embeddings",
    "pos_embed",
    "cls_token",
    "mask_token",
    "distillation_token",
    "register_tokens",
    "token_embedding",
    "stage_embedding",
    "initial_rois",
    "offset_bias",
    "probe",
}
# File in `output_dir` with the run's settings. `Trainer.push_to_hub` uploads no files whose names start with "_".
RUN_FILE = "_run.json"
# Files and folders in checkpoints of `Trainer`. Even an incomplete checkpoint contains one of these names.
CHECKPOINT_FILES = (TRAINER_STATE_NAME, "model*.safetensors", "optimizer*", "pytorch_model*", "global_step*")
# Fields of `TrainingArguments` that change the trained weights. The number of epochs or steps is left out, so that a
# longer run can continue a shorter run.
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
# Fields of this package's arguments that do not change the trained weights.
WITHOUT_EFFECT = (
    "overwrite_output_dir",
    "license",
    "attn_implementation",
    "trust_remote_code",
)
# Arguments whose values are hub ids or paths of models and images.
SOURCES = ("base_model", "model", "teacher", "student", "vision_model", "distill_from", "dataset", "eval_dataset")
# Configuration fields that only record how, where and by which version a model was loaded or saved.
VOLATILE_FIELDS = ("_name_or_path", "transformers_version", "architectures", "auto_map", "dtype", "torch_dtype")


class ImageTrainer(Trainer):
    """Base class of the trainers. A subclass defines `compute_loss`, `measure(prediction)` and `summary(metrics)`.
    `measure` returns the metrics of an evaluation. `summary` returns the first paragraph of the model card.

    Args:
        model (`PreTrainedModel`): The model to train.
        args (`ImageTrainingArguments`): The training arguments. The trainer changes only a copy.
        train_dataset: Images in the form that `as_images` returns.
        eval_dataset: Images to choose the best model on, or None for no evaluation.
        train_view (`Callable`): Makes a training view of an image, see `Views`.
        eval_view (`Callable`): Makes an evaluation view of an image, see `Views`.
        mix (`Callable`, *optional*): Mixes the images and labels of a training batch, see `collate`.
        classes (sequence of `int`, *optional*): The model's index of each class of the data set, see `Views`.
        saved_model (`PreTrainedModel`, *optional*): The model to save. Default: `model`. The two differ if, for
            example, `model` is only a part of the model to save.
        learning_rate_factors (`dict[str, float]`, *optional*): Factors of the learning rate by parameter name. FSDP
            replaces parameters but keeps their names.
        test_dataset (*optional*): Images to measure the best model on.
        base_model (`str`, *optional*): Name of the model from which training starts, for the card.
        model_args, data_args (*optional*): The command's other arguments, for the card and the run's settings.
        usage (`str`, *optional*): Example code for the model card, which uses the variables `model` and `processor`.
            By default, the example computes the class or the embedding of an image.
        callbacks (`list`, *optional*), kwargs: Passed on to `Trainer`.
    """

    base_model_relation = "finetune"

    def __init__(
        self,
        model,
        args: ImageTrainingArguments,
        train_dataset,
        eval_dataset,
        train_view: Callable,
        eval_view: Callable,
        *,
        mix: Callable | None = None,
        classes=None,
        saved_model: PreTrainedModel | None = None,
        learning_rate_factors: dict[str, float] | None = None,
        test_dataset=None,
        base_model: str | None = None,
        model_args=None,
        data_args: DataArguments | None = None,
        usage: str | None = None,
        callbacks=None,
        **kwargs,
    ):
        args = copy.copy(args)
        args.dataloader_pin_memory &= args.device.type != "cpu"
        if eval_dataset is None:
            args.eval_strategy = "no"
            args.load_best_model_at_end = False
        self.images = train_dataset
        self.eval_view = eval_view
        self.classes = classes
        self.saved_model = saved_model or model
        self.learning_rate_factors = learning_rate_factors or {}
        self.test_dataset = test_dataset
        self.base_model = base_model
        self.model_args = model_args
        self.data_args = data_args
        self.usage = usage
        self.skip_corrupt = args.skip_corrupt
        views_class = StreamedViews if isinstance(train_dataset, datasets.IterableDataset) else Views
        views = views_class(train_dataset, train_view, args.seed, args.skip_corrupt, classes)
        super().__init__(
            model=model,
            args=args,
            data_collator=functools.partial(
                collate,
                formats=train_view.formats | eval_view.formats,
                mix=mix,
                seed=args.seed,
            ),
            train_dataset=views,
            eval_dataset=None if eval_dataset is None else self.evaluation_views(eval_dataset),
            compute_metrics=self.measure,
            callbacks=[views, *(callbacks or ())],
            **kwargs,
        )
        # `Trainer` takes label names from the signature of `forward`, but some models have no argument `labels`.
        self.label_names = ["labels"]
        # Losses are means over a batch, so `Trainer` must divide them by the number of gradient accumulation steps.
        self.model_accepts_loss_kwargs = False
        # Step and time of the last log, to compute the images per second since then.
        self.last_log = None
        # Training step that produced the saved weights.
        self.kept_step = 0
        if hasattr(args, "attn_implementation") and (args.attn_implementation or args.device.type == "cpu"):
            # Eager attention is the default on CPUs, because fused attention has a slow backward pass there.
            model.set_attn_implementation(args.attn_implementation or "eager")

    def evaluation_views(self, images) -> Views:
        """Return evaluation views of images in any form that `as_images` accepts."""
        images = self.as_dataset(images)
        check_same_classes(class_names(self.images), images)
        return Views(images, self.eval_view, None, self.skip_corrupt, self.classes)

    def as_dataset(self, images):
        """Convert images in any form that `as_images` accepts to a data set with columns."""
        return as_images(images)

    def get_eval_dataloader(self, eval_dataset=None):
        """Return the evaluation data loader. `eval_dataset` may have any form that `as_images` accepts."""
        if eval_dataset is not None and not isinstance(eval_dataset, Views):
            eval_dataset = self.evaluation_views(eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset):
        """Return the test data loader. `test_dataset` may have any form that `as_images` accepts."""
        return super().get_test_dataloader(self.evaluation_views(test_dataset))

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Run `Trainer.evaluate`. `eval_dataset` may have any form that `as_images` accepts. Metrics of images
        other than the trainer's `eval_dataset` are left out of the log history, because the model card takes its
        metrics from there."""
        if eval_dataset is None or eval_dataset is self.eval_dataset or isinstance(eval_dataset, dict):
            # For a dict of data sets, `Trainer` calls this method with each of them.
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if isinstance(eval_dataset, str):
            # For `Trainer`, a string is a key of a dict of data sets.
            eval_dataset = self.evaluation_views(eval_dataset)
        kept = len(self.state.log_history)
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        del self.state.log_history[kept:]
        return metrics

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """Create the optimizer with a parameter group for each combination of weight decay and learning rate factor.

        Vectors, scalars and the parameters in `WITHOUT_DECAY` have no weight decay. By default, Transformers applies
        weight decay to position embeddings, [CLS] and layer scales.
        """
        if self.optimizer is None:
            model = model or self.model
            parameters = {}
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    without_decay = parameter.ndim <= 1 or not WITHOUT_DECAY.isdisjoint(name.split("."))
                    key = (without_decay, self.learning_rate_factors.get(name, 1.0))
                    parameters.setdefault(key, []).append(parameter)
            groups = [
                {
                    "params": parameters[without_decay, factor],
                    "weight_decay": 0.0 if without_decay else self.args.weight_decay,
                    "lr": factor * self.args.learning_rate,
                }
                for without_decay, factor in sorted(parameters)
            ]
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args)
            self.optimizer = optimizer_class(groups, **options)
        return self.optimizer

    def log(self, logs: dict[str, float], start_time: float | None = None):
        """Add the images per second since the last log. Raise a ValueError if the loss is not finite."""
        if not math.isfinite(logs.get("loss", logs.get("train_loss", 0))):
            raise self.diverged("loss")
        if "loss" in logs:
            step = self.state.global_step
            now = time.perf_counter()
            if self.last_log:
                last_step, then = self.last_log
                images = (step - last_step) * self.get_total_train_batch_size(self.args)
                logs["images_per_second"] = images / (now - then)
            self.last_log = (step, now)
        super().log(logs, start_time)

    def diverged(self, what: str) -> ValueError:
        checkpoints = sort_checkpoints(self.args.output_dir)
        kept = f"{checkpoints[-1]} is kept." if checkpoints else "There is no checkpoint yet."
        return ValueError(
            f"At step {self.state.global_step}, the {what} became infinite or NaN, so training stopped. Lower "
            f"learning_rate or warm up longer. {kept}"
        )

    def train(self, *args, **kwargs):
        """Run `Trainer.train`. The first Ctrl-C saves a checkpoint and ends the run. The progress bar is closed even
        after an error."""
        self.last_log = None
        handler = None
        # Ctrl-C is only handled in a run with one process. With several processes, Ctrl-C ends all of them at once.
        if self.args.world_size == 1 and threading.current_thread() is threading.main_thread():
            handler = signal.signal(signal.SIGINT, self.interrupt)
        try:
            result = super().train(*args, **kwargs)
        finally:
            if handler is not None:
                signal.signal(signal.SIGINT, handler)
            self.remove_callback(SaveAndStop)
            for callback in self.callback_handler.callbacks:
                if bar := getattr(callback, "training_bar", None):
                    bar.close()
        best = self.state.best_global_step if self.args.load_best_model_at_end else None
        self.kept_step = best or self.state.global_step
        return result

    def interrupt(self, number: int, _):
        """Handle the first Ctrl-C, see `signal.signal`. A second Ctrl-C ends the run immediately."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.add_callback(SaveAndStop)
        print("\nFinishing and saving the current step. Press Ctrl-C again to stop at once.", file=sys.stderr)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False):
        """Save a complete repository: model, processor and card. For a checkpoint, save only the model."""
        if not all(parameter.isfinite().all() for parameter in self.model.parameters()):
            raise self.diverged("weights")
        if _internal_call and output_dir is not None:
            # The folder is created here, because `Trainer` looks for the folder before FSDP writes weights to it.
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            if self.is_fsdp_enabled or self.is_deepspeed_enabled or not isinstance(self.model, PreTrainedModel):
                super().save_model(output_dir, _internal_call)
            elif self.args.should_save:
                # By default, `save_pretrained` writes older parameter names for a ViT. `Trainer` loads weights by the
                # current names, so resumed runs and best models would have wrong weights
                # (huggingface/transformers#48805).
                self.model.save_pretrained(output_dir, save_original_format=False)
            return
        # All processes call `weights`, because all of them take part in gathering sharded weights.
        weights = self.weights()
        folder = Path(output_dir or self.args.output_dir)
        if self.args.should_save:
            # The card is written first, because `save_pretrained` writes another card if the folder has none.
            write_card(folder, self.saved_model, self.summary(self.metrics), self.metrics, self)
            self.saved_model.save_pretrained(folder, state_dict=weights)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            apply_umask(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the state dict of `saved_model`."""
        return self.accelerator.get_state_dict(self.model)

    def create_model_card(self, *args, **kwargs):
        """Do nothing, because `save_model` writes the card."""

    def settings(self) -> dict:
        """Return the settings of this run that change the trained weights, as a dict that can be saved as JSON."""
        settings = {name: getattr(self.args, name) for name in TRAINING_SETTINGS}
        for group in (self.args, self.model_args, self.data_args):
            for field in dataclasses.fields(group) if group is not None else ():
                inherited = field.name in TrainingArguments.__dataclass_fields__
                if field.init and not inherited and field.name not in WITHOUT_EFFECT:
                    settings[field.name] = getattr(group, field.name)
        stream = isinstance(self.images, datasets.IterableDataset)
        settings["total_train_batch_size"] = self.get_total_train_batch_size(self.args)
        settings["base_model"] = self.base_model
        settings["num_images"] = None if stream else len(self.images)
        settings["class_names"] = class_names(self.images)
        settings["image_formats"] = {
            name: dataclasses.asdict(image_format) for name, image_format in self.eval_view.formats.items()
        }
        settings["config"] = json.loads(
            self.saved_model.config.to_json_string(use_diff=False),
            object_hook=lambda fields: {name: fields[name] for name in fields if name not in VOLATILE_FIELDS},
        )
        for name in SOURCES:
            given = settings.get(name)
            sources = given if isinstance(given, list) else [given]
            # Paths are absolute, because a run may be continued from another working directory.
            settings[name] = [os.path.realpath(each) if each and os.path.exists(each) else each for each in sources]
        return json.loads(json.dumps(settings, default=str))

    def prepare_output_dir(self) -> str | None:
        """Record the settings of this run in `output_dir` and return the checkpoint to resume from, if there is one.

        Raise a ValueError if the folder contains a run with other settings. With `overwrite_output_dir`, do not
        compare settings, and remove the checkpoints in the folder unless `resume_from_checkpoint` is set.
        """
        args = self.args
        folder = Path(args.output_dir)
        settings = self.settings()
        checkpoint = args.resume_from_checkpoint
        if not args.overwrite_output_dir and (folder / RUN_FILE).is_file():
            check_same_run(folder / RUN_FILE, settings)
        if checkpoint:
            if file := find_damaged_file(Path(checkpoint)):
                raise ValueError(f"resume_from_checkpoint is {checkpoint}, whose {file.name} is missing or damaged.")
        elif args.overwrite_output_dir:
            if args.should_save:
                # Folders without the file `TRAINER_STATE_NAME` are kept, because other programs may have made them.
                for file in folder.glob(f"checkpoint-*/{TRAINER_STATE_NAME}"):
                    if re.fullmatch(r"checkpoint-\d+", file.parent.name):
                        shutil.rmtree(file.parent)
        else:
            damaged = []
            for path in reversed(sort_checkpoints(folder)):
                file = find_damaged_file(Path(path))
                if file is None:
                    checkpoint = path
                    break
                damaged.append(file)
            start = f"continues from {checkpoint}" if checkpoint else "starts anew"
            for file in damaged:
                self.accelerator.print(f"{file} is missing or damaged, so training {start}.")
        # Wait until all processes have read the earlier run's settings, because one process overwrites them below.
        self.accelerator.wait_for_everyone()
        for path in filter(Path.is_dir, folder.glob("checkpoint-*")):
            if not any(any(path.glob(pattern)) for pattern in CHECKPOINT_FILES) and args.save_total_limit:
                # With `save_total_limit`, `Trainer` would also remove this folder. The folder is named like a
                # checkpoint, but contains no file of a checkpoint.
                args.save_total_limit = None
                self.accelerator.print(f"{path} is no checkpoint, so all checkpoints are kept (save_total_limit).")
        if args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / RUN_FILE).write_text(json.dumps(settings, indent=2), encoding="utf-8")
        return checkpoint

    def run(self) -> dict[str, float]:
        """Train from the newest checkpoint in `output_dir`, or else from the start. Measure the best model on
        `test_dataset`, if given. Save the model in `output_dir` as a complete repository. Return `metrics`."""
        result = self.train(resume_from_checkpoint=self.prepare_output_dir())
        # If the run was already complete, no step was trained and the loss is 0.
        if result.training_loss:
            self.log_metrics("train", result.metrics)
            self.save_metrics("train", result.metrics)
        if self.test_dataset is not None:
            # `ImageTrainer.evaluate` would leave the metrics out of the log history.
            super().evaluate(self.evaluation_views(self.test_dataset), metric_key_prefix="test")
        if metrics := self.metrics:
            self.log_metrics("eval", metrics)
            self.save_metrics("eval", metrics)
        self.save_state()
        self.save_model()
        return metrics

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the saved model. Names have no prefix "eval_" or "test_". Test metrics replace evaluation
        metrics."""
        found = {}
        for record in self.state.log_history:
            prefix = "eval_" if record["step"] <= self.kept_step and "eval_runtime" in record else "test_"
            found |= {name.removeprefix(prefix): record[name] for name in record if name.startswith(prefix)}
        return found

    @property
    def measured_dataset(self):
        """Images of `metrics`: `test_dataset` after `run`, otherwise `eval_dataset`."""
        is_tested = any("test_runtime" in record for record in self.state.log_history)
        return self.test_dataset if self.test_dataset is not None and is_tested else self.eval_dataset


class SaveAndStop(TrainerCallback):
    """Save a checkpoint after the current step, and end the run as Ctrl-C does."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log = control.should_save = True

    on_epoch_end = on_step_end

    def on_save(self, args, state, control, **kwargs):
        print(f"Stopped at step {state.global_step}; the same command continues from there.", file=sys.stderr)
        raise KeyboardInterrupt


def find_damaged_file(checkpoint: Path) -> Path | None:
    """Return the first missing, empty or truncated file of a checkpoint, or None if the checkpoint is complete."""
    state_file = checkpoint / TRAINER_STATE_NAME
    try:
        state = json.loads(state_file.read_text(encoding="utf-8"))
        if not (isinstance(state, dict) and isinstance(state.get("global_step"), int)):
            return state_file
    except (OSError, ValueError):
        return state_file
    for file in sorted(checkpoint.iterdir()):
        # `torch.save` writes zip files. A truncated zip file lacks its central directory, so `is_zipfile` is false.
        if file.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(file):
            return file
        if file.suffix == ".safetensors":
            try:
                with safe_open(file, "pt"):
                    pass
            except (OSError, SafetensorError):
                return file
    return None


def check_same_run(file: Path, settings: dict):
    """Raise a ValueError if the settings of an earlier run in `file` differ from `settings`."""
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
    """Describe each value that differs between two nested dicts. Keys that only one dict has are ignored."""
    changes = []
    for name in sorted(recorded.keys() & asked.keys()):
        before = recorded[name]
        now = asked[name]
        if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
            changes += list_changes(before, now, f"{prefix}{name}.")
        elif before != now:
            changes.append(f"{prefix}{name} was {str(before):.60}, now {str(now):.60}")
    return changes


def run_command(parser: ArgumentParser, make_trainer: Callable, argv: list[str] | None) -> int:
    """Run a training's command: parse its arguments, train, and print the result."""
    trainer = make_trainer(*parser.parse(argv))
    trainer.run()
    trainer.accelerator.print(trainer.summary(trainer.metrics))
    trainer.accelerator.print(f"Saved in {trainer.args.output_dir}: {describe_step(trainer)}.")
    return 0


def start(args: ImageTrainingArguments, *sources: str | None):
    """Check the output folder and set the random seed. Call `start` before models and data are loaded.

    Raises:
        ValueError: If `output_dir` is or contains one of the model folders `sources`, or if it contains files but no
            earlier run and `overwrite_output_dir` is not set.
    """
    check_output_outside_input(args.output_dir, *sources)
    folder = Path(args.output_dir)
    if not args.overwrite_output_dir and args.process_index == 0 and folder.is_dir():
        is_run = (folder / RUN_FILE).is_file() or any(folder.glob(f"checkpoint-*/{TRAINER_STATE_NAME}"))
        if not is_run and not {path.name for path in folder.iterdir()} <= {"runs"}:
            raise ValueError(
                f"output_dir {folder} is not empty and holds no run to continue; choose another folder, or pass "
                "overwrite_output_dir to write into it."
            )
    started = int(os.environ.get("WORLD_SIZE") or 1)
    if started > args.world_size and "RANK" in os.environ:
        raise ValueError(f"{started} processes were started, but each would train alone; on CPUs, pass use_cpu.")
    set_seed(args.seed)
    # Transformers' progress bars for loading and saving models are disabled. Otherwise, the bar for saving would be
    # drawn into the progress bar of the training.
    transformers.utils.logging.disable_progress_bar()
