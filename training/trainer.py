"""`Trainer` of images, which all trainings share.

It adds to Transformers' own: An image's view is a function of (seed, epoch, image), so that batches depend neither on
workers nor on processes, and a run that was killed goes on to the same weights. Checkpoints are whole. The best model
lies in the output folder, as a complete repository. A number that is not finite ends the run, in one line.
"""

import copy
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import datasets
import torch
from accelerate import Accelerator
from accelerate.utils import SAFE_WEIGHTS_NAME, clean_state_dict_for_safetensors, save, set_seed
from safetensors.torch import load_model
from torch import nn
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import TrainOutput

from ..common.files import write_json, write_text
from ..common.interruptions import Interruption
from ..common.labels import check_same_classes, class_names
from ..common.tables import first_line
from ..modeling.hub import upload_folder
from .components.arguments import ImageArguments, RunArguments
from .components.cards import choice_of_epoch, write_card
from .components.checkpoints import NOT_IN_REPOSITORY, TEST, Checkpoints, TrainingState
from .components.images import as_images
from .components.loaders import DeviceLoader, TrainingLoader, count_images, evaluation_loader
from .components.runs import ImageTrainingArguments, check_output_folder, in_its_folder, record_of, replace_files


class ImageTrainer(Trainer):
    """Transformers' `Trainer` with all that trainings have in common. A subclass defines the loss (`compute_loss`),
    `make_optimizer`, `measure` and `summary`.

    Args:
        model (`PreTrainedModel`): The model that learns.
        args (`ImageTrainingArguments`): How it learns.
        run (`RunArguments`, *optional*), data (`ImageArguments`, *optional*):
            The arguments of a command that made the trainer, for its record and its card.
        train, evaluation (pairs of images and `View`): The images, `None` for none, and the view of each.
        test (`datasets.Dataset`, *optional*): Images in the view of `evaluation`. Each epoch that is the best so far
            is measured on them, too.
        base_model (`str`, *optional*): The model from which training starts, for the card.
        classes (sequence of `int`, *optional*): The model's number of each class, see `match_classes`.
        loader_options (`dict`, *optional*): Arguments of the `TrainingLoader` besides those from `args` and `data`.
        processing_class, callbacks (*optional*): As Transformers has them.
    """

    # The number of `measure` that is to be high.
    metric = "accuracy"

    def __init__(
        self,
        model: nn.Module,
        args: ImageTrainingArguments,
        *,
        run: RunArguments | None = None,
        data: ImageArguments | None = None,
        train: tuple,
        evaluation: tuple,
        test: datasets.Dataset | None = None,
        base_model: str | None = None,
        classes=None,
        loader_options: dict | None = None,
        processing_class=None,
        callbacks=None,
    ):
        args = copy.copy(args)
        own_run, own_data = args.as_run()
        self.run, self.data, self.is_command = run or own_run, data or own_data, run is not None
        self.train_part, self.evaluation_part, self.test_images = train, evaluation, test
        self.base_model = base_model
        self.classes, self.loader_options = classes, loader_options or {}
        # Evaluation needs no arguments: it follows from what there is to evaluate.
        args.eval_strategy = "no" if evaluation[0] is None else "epoch"
        args.metric_for_best_model, args.greater_is_better = self.metric, True
        for name, images in (("evaluated", evaluation[0]), ("tested", test)):
            if images is not None and getattr(self.data, name) is None:
                setattr(self.data, name, "eval_dataset" if name == "evaluated" else "test_dataset")
        was_there = Path(args.output_dir).exists()
        super().__init__(
            model=model, args=args, eval_dataset=evaluation[0], processing_class=processing_class, callbacks=callbacks
        )
        # Nothing is written before the training.
        if not was_there and args.should_save:
            with suppress(OSError):
                Path(args.output_dir).rmdir()
        # Losses are means over a process' share of a batch, whatever the model's own would be.
        self.model_accepts_loss_kwargs = False
        # `Progress` shows images instead of steps, in notebooks, too.
        for shown in (PrinterCallback, DEFAULT_PROGRESS_CALLBACK):
            self.remove_callback(shown)
        self.loader = self.make_training_loader()
        self.eval_loader, self.test_loader = (self.make_evaluation_loader(part) for part in (evaluation[0], test))
        if not self.is_command:
            self.run.epochs = math.ceil(self.epochs)
            self.run.record |= record_of(self.args, type(self).__name__)
        self.progress = Progress(self)
        self.add_callback(self.progress)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training."""
        steps = self.args.num_train_epochs * self.loader.steps_per_epoch
        return self.args.max_steps if self.args.max_steps > 0 else math.ceil(steps)

    @property
    def epochs(self) -> float:
        """Epochs of the whole training; the last one may end before its images do."""
        return self.total_steps / self.loader.steps_per_epoch

    # What a training says.

    def measure(self, model: nn.Module, loader: DeviceLoader) -> dict[str, float]:
        """Measure a model.

        Args:
            model (`nn.Module`): The model, as it is wrapped for training.
            loader (`DeviceLoader`): Batches of images, shared out among processes.

        Returns:
            `dict[str, float]`: Numbers by name, over all processes; that of `metric` chooses the best epoch.
        """
        raise NotImplementedError

    def make_optimizer(self) -> tuple:
        """Return an optimizer of the model's parameters and its schedule, over `total_steps`."""
        raise NotImplementedError

    def summary(self, state: TrainingState) -> str:
        """Describe the model in a sentence or two, for its card, with the numbers in `state.measured`."""
        raise NotImplementedError

    def write_repository(self, folder: Path, state: TrainingState, weights: dict[str, torch.Tensor]):
        """Write the best model as a complete repository: model, processor and card.

        Args:
            folder (`Path`): An empty folder.
            state (`TrainingState`): With the record of the best epoch.
            weights (`dict[str, torch.Tensor]`): The best weights, by their names in `saved`.
        """
        trained = self.accelerator.unwrap_model(self.model_wrapped)
        trained.save_pretrained(folder, state_dict=weights)
        self.processing_class.save_pretrained(folder)
        write_card(folder, trained, self.summary(state), self.data, self.run, state, self.base_model, self.metric)

    @property
    def saved(self) -> nn.Module:
        """The module whose weights are kept as the best model's."""
        return self.model_wrapped

    def take_images(self, images):
        """Return images to evaluate on, of any form that the trainer takes, in the one that it reads."""
        return as_images(images)

    def before_epoch(self, epoch: int):
        """Prepare for an epoch, numbered from 0; called before it begins, and when a run goes on within it."""

    def clipped(self, model: nn.Module) -> nn.Module:
        """Return the part of the model whose gradient is clipped to `args.max_grad_norm`."""
        return model

    # What Transformers' `Trainer` asks for.

    def make_training_loader(self) -> TrainingLoader:
        return TrainingLoader(
            self.accelerator,
            *self.train_part,
            batch_size=self.run.batch_size,
            accumulation_steps=self.args.gradient_accumulation_steps,
            seed=self.args.seed,
            num_workers=self.args.dataloader_num_workers,
            skip_corrupt=self.data.skip_corrupt,
            steps_per_epoch=self.data.steps_per_epoch,
            shuffle_buffer=self.data.shuffle_buffer,
            classes=self.classes,
            **self.loader_options,
        )

    def make_evaluation_loader(self, images: datasets.Dataset | None) -> DeviceLoader | None:
        if images is None:
            return None
        return evaluation_loader(
            self.accelerator,
            images,
            self.evaluation_part[1],
            batch_size=self.run.eval_batch_size,
            num_workers=self.args.dataloader_num_workers,
            skip_corrupt=self.data.skip_corrupt,
            classes=self.classes,
        )

    def get_train_dataloader(self) -> "EpochLoader":
        return EpochLoader(self)

    def get_eval_dataloader(self, eval_dataset=None) -> DeviceLoader:
        if eval_dataset is None or eval_dataset is self.evaluation_part[0]:
            return self.eval_loader
        images = self.take_images(eval_dataset)
        check_same_classes(class_names(self.train_part[0]), images)
        return self.make_evaluation_loader(images)

    def predict(self, test_dataset, *_, **__):
        """Not offered: `evaluate` measures, and Transformers' pipelines predict.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("This trainer measures by evaluate(images); predict with a pipeline.")

    def _prepare_inputs(self, inputs: dict) -> dict:
        # They are on the device, and stay one and the same `dict`, in which a loss may note what it needs again.
        return inputs

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.progress.unread.append(loss.float())
        if self.steps_twice:
            # Sharpness-aware minimization computes the gradient once more, where the first one has led.
            if self.args.max_grad_norm:
                self._clip_grad_norm(model)
            self.optimizer.optimizer.first_step(zero_grad=True)
            super().training_step(model, inputs, num_items_in_batch)
        return loss

    def _clip_grad_norm(self, model):
        return self.accelerator.clip_grad_norm_(self.clipped(model).parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model, grad_norm=None):
        # Where the gradient is not clipped, its norm is computed for those who read it alone.
        if grad_norm is None and self.progress.reads(self.state.global_step + 1):
            grad_norm = self.accelerator.clip_grad_norm_(self.clipped(model).parameters(), math.inf)
        self.progress.gradient_norm = grad_norm
        return grad_norm

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Measure the model on images.

        Args:
            eval_dataset (*optional*): Other images than those that the trainer was given.
            ignore_keys: Not used.
            metric_key_prefix (`str`, *optional*, defaults to `"eval"`): Prefix of the numbers' names.

        Returns:
            `dict[str, float]`: The numbers of `measure`, as `{prefix}_{name}`.

        Raises:
            ValueError: if there are no images to evaluate on.
        """
        loader = self.get_eval_dataloader(eval_dataset)
        if loader is None:
            raise ValueError("There are no images to evaluate on; give an eval_dataset.")
        measured = self.measure(self.model_wrapped, loader)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in measured.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _evaluate(self, *arguments, **options):
        metrics = super()._evaluate(*arguments, **options)
        self.progress.finish_awaited(metrics)
        return metrics

    def train(self, resume_from_checkpoint: str | bool | None = None, **options):
        """Train to the last epoch, from the newest whole checkpoint in the output folder on if there is one.

        Afterwards the folder has the best model, `metrics.jsonl`, `results.json` and `checkpoints/`. `metrics.jsonl`
        grows as the run goes on. Every `logging_steps` it gets a record of the mean loss and of the speed since the
        last record, in images a second, of the highest learning rate, and of the norm of the step's gradient before it
        was clipped.

        Ctrl-C or SIGTERM ends the run after the step, with a checkpoint; a second one ends it at once.

        Args:
            resume_from_checkpoint (`str`, *optional*): A checkpoint to go on from instead of the newest; later ones
                are removed.
            options: As Transformers has them.

        Returns:
            `TrainOutput`: As Transformers has it.

        Raises:
            ValueError: if the loss, a measured number, or the gradient or the weights before a checkpoint are not
                finite (the last checkpoint stays); or if the optimizer cannot do what the arguments ask for.
        """
        if not self.is_command:
            self.run.record |= record_of(self.args, type(self).__name__)
            check_output_folder(Path(self.args.output_dir))
        self.run.record["images"] = count_images(self.train_part[0], self.evaluation_part[0], self.test_images)
        with in_its_folder(self.accelerator, self.run):
            checkpoints = self.progress.checkpoints
            given = resume_from_checkpoint if isinstance(resume_from_checkpoint, str | Path) else None
            newest = checkpoints.go_back_to(Path(given)) if given else checkpoints.newest()
            self.progress.begin(newest)
            if self.progress.ended_within_an_epoch:
                self._load_from_checkpoint(str(newest))
                return TrainOutput(self.total_steps, self.progress.now.epochs[-1]["train_loss"], {})
            try:
                output = super().train(resume_from_checkpoint=newest and str(newest), **options)
            finally:
                self.progress.close()
        if self.args.load_best_model_at_end:
            own = self.accelerator.unwrap_model(self.saved, keep_torch_compile=False)
            own.load_state_dict(type(own).from_pretrained(self.args.output_dir).state_dict())
        if self.args.push_to_hub:
            self.push_to_hub()
        return output

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            self.optimizer, self.schedule = self.make_optimizer()
            self.steps_twice = hasattr(self.optimizer, "first_step")
            if self.steps_twice and (self.args.gradient_accumulation_steps > 1 or self.args.fp16):
                raise ValueError(
                    "--optimizer sam needs --gradient-accumulation-steps 1 and --mixed-precision no or bf16."
                )
        return self.optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        # DeepSpeed's start has left none where `Trainer` keeps it.
        self.lr_scheduler = self.schedule
        return self.lr_scheduler

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False):
        """Write the model as it is now to a folder, a complete repository with its card.

        Args:
            output_dir (`str`, *optional*): The folder; that of the run if not given, in which the best model stays
                where there is one.
        """
        if _internal_call:
            super().save_model(output_dir, _internal_call=True)
            return
        folder, now = Path(output_dir or self.args.output_dir), self.progress.now
        weights = self.accelerator.get_state_dict(self.saved)
        if self.accelerator.is_main_process and not (now.best and folder == Path(self.args.output_dir)):
            folder.mkdir(parents=True, exist_ok=True)
            # What the best epoch reached is not said of another one.
            state = TrainingState(now.epoch, now.step)
            replace_files(folder, lambda aside: self.write_repository(aside, state, weights))

    def save_metrics(self, *arguments, **options):
        """As in Transformers; also before the training, when there is no folder."""
        Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        super().save_metrics(*arguments, **options)

    def save_state(self):
        """As `save_metrics`."""
        Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        super().save_state()

    def say_result(self, *names: str):
        """Print the best epoch's numbers of these names, and the folder of the model."""
        state = self.progress.now
        measured = [f"{name.replace('_', ' ')} {state.measured[name]:.2%}" for name in names if name in state.measured]
        text = ", ".join(measured) or "not evaluated"
        chosen = choice_of_epoch(self.data, self.run, state)
        self.accelerator.print(f"{text[0].upper()}{text[1:]}: {chosen}. See {self.run.output_dir}.")

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
    ) -> str:
        """Upload the best model, with its card, to the hub, as `args.hub_model_id`, or else the output folder's name.

        Args:
            commit_message (`str`, *optional*, defaults to `"End of training"`): Message of the commit.
            blocking: Not used: the call returns when all files are there.
            token (`str`, *optional*): The user's token; `args.hub_token` if not given.
            revision (`str`, *optional*): The branch; the repository's main one if not given.

        Returns:
            `str`: The repository's id.
        """
        folder, args = Path(self.args.output_dir), self.args
        repo_id = args.hub_model_id or folder.resolve().name
        if self.accelerator.is_main_process:
            with tempfile.TemporaryDirectory() as aside:
                shutil.copytree(folder, aside, ignore=NOT_IN_REPOSITORY, dirs_exist_ok=True)
                upload_folder(
                    *(aside, repo_id, args.hub_private_repo, token or args.hub_token, commit_message, revision)
                )
        return repo_id

    def create_model_card(self, *_, **__):
        """Does nothing: the trainer has written its own card."""

    # Checkpoints: Transformers writes the files, aside.

    def _get_output_dir(self, trial) -> str:
        return str(self.progress.checkpoints.aside)

    def _save_checkpoint(self, model, trial):
        self.progress.before_checkpoint()
        self.progress.checkpoints.save(
            self.progress.now, lambda: super(ImageTrainer, self)._save_checkpoint(model, trial)
        )
        self.progress.after_checkpoint()

    def _save(self, output_dir=None, state_dict=None):
        # By the names that the model has in memory: `save_pretrained` may write others, which `Trainer` would not find
        # again.
        weights = clean_state_dict_for_safetensors(state_dict or self.model.state_dict())
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        save(weights, Path(output_dir) / SAFE_WEIGHTS_NAME, safe_serialization=True)

    def _load_best_model(self):
        # It is in the output folder, not in a checkpoint.
        pass

    def _push_from_checkpoint(self, checkpoint_folder):
        # The best model alone is pushed, at the end.
        pass

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        with foreign_files(resume_from_checkpoint):
            if self.is_fsdp_enabled:
                super()._load_from_checkpoint(resume_from_checkpoint, model)
            else:
                load_model(self.model, Path(resume_from_checkpoint) / SAFE_WEIGHTS_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is not None:
            with foreign_files(checkpoint):
                super()._load_optimizer_and_scheduler(checkpoint)
                # Again before the next step; here for its errors.
                super()._load_rng_state(checkpoint)

    def _load_rng_state(self, checkpoint):
        if checkpoint is not None:
            with foreign_files(checkpoint):
                super()._load_rng_state(checkpoint)


class EpochLoader:
    """The batches of a trainer's epochs, each from the step on that the run has come to."""

    def __init__(self, trainer: ImageTrainer):
        self.trainer, self.epoch = trainer, 0
        # What `Trainer` counts examples by.
        self.dataset = trainer.loader.loader.loader.dataset

    def __len__(self) -> int:
        return self.trainer.loader.steps_per_epoch * self.trainer.args.gradient_accumulation_steps

    def set_epoch(self, epoch: int):
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        loader = self.trainer.loader
        return loader.epoch(self.epoch, self.trainer.state.global_step - self.epoch * loader.steps_per_epoch)


class Progress(TrainerCallback):
    """The progress of a run: its losses, records, checkpoints and best epoch, and the bar that shows it."""

    def __init__(self, trainer: ImageTrainer):
        self.trainer, self.accelerator, self.loader = trainer, trainer.accelerator, trainer.loader
        self.folder = Path(trainer.args.output_dir)
        limit = trainer.args.save_total_limit or 2
        self.checkpoints = Checkpoints(self.accelerator, self.folder / "checkpoints", limit)
        self.now, self.bar, self.interruption = TrainingState(), None, Interruption()

    def begin(self, checkpoint: Path | None):
        """Take a run up where a checkpoint left it, or at its beginning."""
        self.interruption = Interruption()
        # Losses on the device, of each part of a batch.
        self.unread: list[torch.Tensor] = []
        self.gradient_norm: torch.Tensor | float | None = None
        self.awaits_evaluation = False
        with foreign_files(checkpoint):
            self.now = self.checkpoints.state_of(checkpoint)
        steps = self.loader.steps_per_epoch
        if not 0 <= self.now.step - self.now.epoch * steps <= steps and not self.ended_within_an_epoch:
            raise ValueError(
                f"{self.folder} has a checkpoint of {self.now.epoch} epochs and {self.now.step} steps, and an epoch "
                f"has {steps}; give another folder, or start anew with --overwrite."
            )
        self.metrics = self.folder / "metrics.jsonl"
        if self.accelerator.is_main_process:
            # What a run that was killed logged after its last checkpoint is logged again.
            write_text(self.metrics, "".join(json.dumps(record) + "\n" for record in self.now.log))

    @property
    def ended_within_an_epoch(self) -> bool:
        """Whether the run is at its end although its last epoch has more images."""
        steps, now = self.loader.steps_per_epoch, self.now
        return now.step == self.trainer.total_steps and now.step < now.epoch * steps

    def close(self):
        self.interruption.__exit__()
        if self.bar:
            self.bar.close()

    def reads(self, step: int) -> bool:
        """Whether numbers are read off the device after this step. Reading makes an accelerator wait."""
        args = self.trainer.args
        every = (args.logging_steps, args.save_steps, self.loader.steps_per_epoch)
        return self.accelerator.device.type == "cpu" or not all(step % number for number in every)

    def on_train_begin(self, args, state, control, **_):
        if not state.global_step:
            set_seed(args.seed, device_specific=True)
        self.bar = tqdm(
            total=state.max_steps * self.loader.batch_size,
            initial=state.global_step * self.loader.batch_size,
            unit="img",
            unit_scale=True,
            mininterval=0.2 if sys.stderr.isatty() else 30,
            disable=args.disable_tqdm or not self.accelerator.is_main_process,
        )
        if state.global_step == (self.now.epoch + 1) * self.loader.steps_per_epoch:
            # Killed in its evaluation.
            self.on_epoch_end(args, state, control)
            if self.trainer.eval_loader:
                self.trainer._evaluate(None, None)

    def on_epoch_begin(self, args, state, control, **_):
        self.trainer.before_epoch(self.now.epoch)
        self.trainer.model_wrapped.train()
        self.bar.set_description(f"epoch {self.now.epoch + 1}/{math.ceil(self.trainer.epochs)}")
        self.started = self.logged_at = time.perf_counter()
        self.logged_step = state.global_step
        self.interruption.__enter__()

    def on_step_begin(self, args, state, control, **_):
        self.learning_rate = max(self.trainer.lr_scheduler.get_last_lr())

    def on_step_end(self, args, state, control, **_):
        now, step = self.now, state.global_step
        now.step = step
        self.bar.update(self.loader.batch_size)
        received = self.received() if self.reads(step) or self.accelerator.num_processes == 1 else 0
        is_end = step == (now.epoch + 1) * self.loader.steps_per_epoch
        control.should_save = control.should_save or received != 0 or is_end
        if self.reads(step) or control.should_save:
            parts = args.gradient_accumulation_steps
            now.losses += read_losses(self.accelerator, self.unread, parts, step, self.checkpoints)
        if step % args.logging_steps == 0:
            self.log_step(args)

    def received(self) -> int:
        """Return the signal that any process received, 0 for none."""
        if self.accelerator.num_processes > 1:
            found = torch.tensor([self.interruption.received], device=self.accelerator.device)
            self.interruption.received = int(self.accelerator.gather(found).max())
        return self.interruption.received

    def log_step(self, args):
        recent, time_now, step = self.now.losses[-args.logging_steps :], time.perf_counter(), self.now.step
        norm = math.nan if self.gradient_norm is None else float(self.gradient_norm)
        record = {
            "step": step,
            "loss": sum(recent) / len(recent),
            "learning_rate": self.learning_rate,
            # DeepSpeed may not tell it, and the first scales of fp16 are too large.
            **({"gradient_norm": norm} if math.isfinite(norm) else {}),
            "images_per_second": (step - self.logged_step) * self.loader.batch_size / (time_now - self.logged_at),
        }
        self.note(record)
        self.bar.set_postfix(loss=f"{record['loss']:.3f}")
        self.logged_at, self.logged_step = time_now, step

    def note(self, record: dict):
        self.now.log.append(record)
        if self.accelerator.is_main_process:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def before_checkpoint(self):
        step = self.now.step
        if self.gradient_norm is not None and self.accelerator.mixed_precision != "fp16":
            # What it has made of the weights shows in the next loss, after they were saved.
            self.checkpoints.check_finite("gradient's norm", float(self.gradient_norm), step)
        self.paused = time.perf_counter()
        self.now.seconds += self.paused - self.started
        self.now.skipped += self.loader.take_skipped(self.accelerator)
        check_weights(self.accelerator, self.trainer.model, step, self.checkpoints)

    def after_checkpoint(self):
        self.started = time.perf_counter()
        self.logged_at += self.started - self.paused
        if self.interruption.received:
            self.bar.close()
            self.interruption.end()

    def on_epoch_end(self, args, state, control, **_):
        self.interruption.__exit__()
        self.awaits_evaluation = True
        if self.trainer.eval_loader:
            self.bar.set_description(f"epoch {self.now.epoch + 1}, evaluating")
        else:
            self.finish_epoch({})

    def finish_awaited(self, metrics: dict[str, float]):
        """Finish the epoch with the numbers of its evaluation, if one waits for them."""
        if self.awaits_evaluation:
            self.finish_epoch({name.removeprefix("eval_"): value for name, value in metrics.items()})

    def finish_epoch(self, measured: dict[str, float]):
        """Record an epoch with the numbers of its evaluation, and keep the model if it is the best so far."""
        self.awaits_evaluation = False
        trainer, now, metric = self.trainer, self.now, self.trainer.metric
        record = {
            "epoch": now.epoch + 1,
            "step": now.step,
            "train_loss": sum(now.losses) / len(now.losses),
            "images_per_second": len(now.losses) * self.loader.batch_size / now.seconds,
            **({"skipped": now.skipped} if now.skipped else {}),
            **measured,
        }
        is_best = not measured or now.best is None or record[metric] > now.best.get(metric, -math.inf)
        if is_best and trainer.test_loader:
            tested = trainer.measure(trainer.model_wrapped, trainer.test_loader)
            record |= {f"{TEST}{name}": value for name, value in tested.items()}
        for name, value in record.items():
            if isinstance(value, float):
                self.checkpoints.check_finite(f"{name} of epoch {now.epoch + 1}", value, now.step)
        self.now = TrainingState(now.epoch + 1, now.step, record if is_best else now.best, now.log)
        # Where each process has a part of the weights, all of them gather the whole.
        weights = self.accelerator.get_state_dict(trainer.saved) if is_best else None
        if self.accelerator.is_main_process:
            said = (f"{name} {value:.4g}" for name, value in record.items() if name != "step")
            self.bar.write(", ".join(said))
            if is_best:
                replace_files(self.folder, lambda aside: trainer.write_repository(aside, self.now, weights))
        self.note(record)
        self.checkpoints.update(self.now)
        self.started = time.perf_counter()

    def on_train_end(self, args, state, control, **_):
        self.bar.close()
        if self.accelerator.is_main_process:
            results = self.trainer.run.record | {"best": self.now.best, "epochs": self.now.epochs}
            write_json(self.folder / "results.json", results)


def read_losses(
    accelerator: Accelerator, unread: list[torch.Tensor], parts: int, step: int, checkpoints: Checkpoints
) -> list[float]:
    """Take the losses up to `step` off the device, as means over processes and sums over a batch's `parts`.

    Raises:
        ValueError: if one is not finite; it names the step of the first.
    """
    losses = accelerator.reduce(torch.stack(unread).view(-1, parts).sum(1), reduction="mean").tolist()
    unread.clear()
    for at, loss in enumerate(losses, step - len(losses) + 1):
        checkpoints.check_finite("loss", loss, at)
    return losses


def check_weights(accelerator: Accelerator, model: nn.Module, step: int, checkpoints: Checkpoints):
    """Raise a ValueError if a weight that learns is not finite."""
    learned = (weight for weight in model.parameters() if weight.requires_grad)
    # The part of a weight that this process holds, where FSDP shares it out.
    parts = (weight.to_local() if hasattr(weight, "to_local") else weight for weight in learned)
    # Weights may be on several devices.
    lost = sum((~part.detach().isfinite()).sum().to(accelerator.device) for part in parts)
    if lost := int(accelerator.reduce(lost, reduction="sum")):
        checkpoints.check_finite(f"value of {lost:,} weights", math.nan, step)


@contextmanager
def foreign_files(checkpoint: str | Path):
    """Within, an error in reading a checkpoint becomes a ValueError of one line."""
    try:
        yield
    # Files of others fail in as many ways as there are formats.
    except Exception as error:
        line = first_line(error)
        raise ValueError(
            f"The checkpoint {checkpoint} cannot be read: {line} Remove it to go on from an earlier one, or start "
            "anew with --overwrite."
        ) from error
