"""`Trainer` of images: Transformers' own, whose data sets are views of images, and which writes a model card."""

import copy
import functools
import json
import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import datasets
import torch
import transformers
from transformers import PreTrainedModel, Trainer, TrainerCallback, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from ..modeling.hosts.anatomy import is_timm
from .arguments import ArgumentParser, DataArguments, ImageTrainingArguments
from .cards import write_card
from .data import class_names
from .files import apply_umask, check_output_outside_input
from .splits import check_same_classes
from .views import SetEpoch, StreamedViews, Views, as_images, collate


class ImageTrainer(Trainer):
    """Base class of the trainers. A subclass defines `compute_loss`, `measure(prediction)`, the metrics of an
    evaluation, and `summary(metrics)`, the card's first sentence.

    Args:
        model (`PreTrainedModel`), args (`ImageTrainingArguments`), callbacks, kwargs: As in Transformers.
        train_dataset, eval_dataset: Images of `as_images`; without an `eval_dataset`, nothing is evaluated.
        train_view, eval_view (`Callable`): Make their views, see `Views`.
        mix (`Callable`, *optional*): See `collate`.
        classes (sequence of `int`, *optional*): See `Views`.
        base_model (`str`, *optional*): The model from which training starts, for the card.
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
        mix=None,
        classes=None,
        callbacks=None,
        base_model: str | None = None,
        **kwargs,
    ):
        args = copy.copy(args)
        if eval_dataset is None:
            args.eval_strategy = "no"
            args.load_best_model_at_end = False
        self.images = train_dataset
        self.eval_view = eval_view
        self.classes = classes
        self.base_model = base_model
        self.skip_corrupt = args.skip_corrupt
        self.interruption = SaveWhenInterrupted()
        views_class = StreamedViews if isinstance(train_dataset, datasets.IterableDataset) else Views
        views = views_class(train_dataset, train_view, args.seed, args.skip_corrupt, classes)
        super().__init__(
            model=model,
            args=args,
            data_collator=functools.partial(
                collate, formats=train_view.formats | eval_view.formats, mix=mix, seed=args.seed
            ),
            train_dataset=views,
            eval_dataset=None if eval_dataset is None else self.evaluation_views(eval_dataset),
            compute_metrics=self.measure,
            callbacks=[SetEpoch(views), self.interruption, *(callbacks or ())],
            **kwargs,
        )
        # The model that is saved, of which `model` may be a part.
        self.trained = model
        # By names of parameters, in whose place FSDP puts others.
        self.learning_rate_factors = {}
        # The loss is a mean over a batch, whatever the model's own would be.
        self.model_accepts_loss_kwargs = False
        # For the card: names of the images, and the command.
        self.data = None
        self.command = None
        # Arguments of `write_card`, where the task's do not fit.
        self.card = {}
        if hasattr(args, "attn_implementation") and (args.attn_implementation or args.device.type == "cpu"):
            # Fused attention has a slow backward pass on CPUs.
            model.set_attn_implementation(args.attn_implementation or "eager")
        # Step and time of the first step, for the speed in the logs.
        self.begun = None
        # Images to measure the model on that was chosen on others.
        self.test_images = None

    def evaluation_views(self, images) -> Views:
        """Views of images to evaluate on, of any form that `as_images` takes."""
        images = self.take_images(images)
        check_same_classes(class_names(self.images), images)
        return Views(images, self.eval_view, None, self.skip_corrupt, self.classes)

    def take_images(self, images):
        """Return images of any form as a data set with columns."""
        return as_images(images)

    def get_eval_dataloader(self, eval_dataset=None):
        """As in Transformers, also of images in any form that the trainer takes."""
        if eval_dataset is not None and not isinstance(eval_dataset, Views | str):
            eval_dataset = self.evaluation_views(eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset):
        return super().get_test_dataloader(self.evaluation_views(test_dataset))

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """As in Transformers. Matrices and filters decay; biases, norms, positions, [CLS] and what
        `model.no_weight_decay()` names do not. The learning rate is multiplied by `learning_rate_factors`."""
        if self.optimizer is None:
            model = model or self.model
            spared = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
            words = ("position_embeddings", "pos_embed", "cls_token", "mask_token", "distillation_token")
            parameters = {}
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    spare = parameter.ndim < 2 or name in spared or any(word in name for word in words)
                    parameters.setdefault((spare, self.learning_rate_factors.get(name, 1.0)), []).append(parameter)
            groups = [
                {
                    "params": parameters[spare, factor],
                    "weight_decay": 0.0 if spare else self.args.weight_decay,
                    "lr": factor * self.args.learning_rate,
                }
                for spare, factor in sorted(parameters)
            ]
            kind, options = self.get_optimizer_cls_and_kwargs(self.args)
            if self.args.sam_rho:
                kind = sharpness_aware(kind, self.args.sam_rho)
            self.optimizer = kind(groups, **options)
        return self.optimizer

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """As in Transformers; SAM computes a second gradient."""
        self.begun = self.begun or (self.state.global_step, time.perf_counter())
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.args.sam_rho:
            if self.args.max_grad_norm:
                self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
            self.optimizer.optimizer.first_step(zero_grad=True)
            super().training_step(model, inputs, num_items_in_batch)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None):
        """As in Transformers, with images per second. Raise a ValueError if the loss is not finite; the last
        checkpoint stays."""
        if not math.isfinite(logs.get("loss", logs.get("train_loss", 0))):
            checkpoint = last_checkpoint(self.args.output_dir)
            raise ValueError(
                f"The loss at step {self.state.global_step} is not finite, so training stopped. Lower learning_rate "
                f"or warm up longer. {f'{checkpoint} is kept.' if checkpoint else 'There is no checkpoint yet.'}"
            )
        if "loss" in logs and self.begun:
            step, time_then = self.begun
            images = (self.state.global_step - step) * self.get_total_train_batch_size(self.args)
            logs["images_per_second"] = images / (time.perf_counter() - time_then)
        super().log(logs, start_time)

    def train(self, *args, **kwargs):
        """As in Transformers; an error leaves no signal handler and no open progress bar behind."""
        self.begun = None
        handler = signal.getsignal(signal.SIGINT)
        handles = self.args.world_size == 1 and threading.current_thread() is threading.main_thread()
        try:
            if handles:
                signal.signal(signal.SIGINT, self.interruption.note)
            return super().train(*args, **kwargs)
        finally:
            if handles:
                signal.signal(signal.SIGINT, handler)
            for each in self.callback_handler.callbacks:
                if bar := getattr(each, "training_bar", None):
                    bar.close()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False):
        """Write a complete repository: model, processor and card; or a checkpoint's weights."""
        if _internal_call and output_dir is not None:
            # FSDP's weights are written after `Trainer` has looked for the folder of the best checkpoint.
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            if self.is_fsdp_enabled or self.is_deepspeed_enabled or not isinstance(self.model, PreTrainedModel):
                super().save_model(output_dir, _internal_call)
            elif self.args.should_save:
                # `Trainer` loads weights by the names that they have in the model, and `save_pretrained` gives those
                # of a ViT their older ones: a resumed run and the best model would have other weights
                # (huggingface/transformers#48805).
                self.model.save_pretrained(output_dir, save_original_format=False)
            return
        # All processes gather the weights where each has a part of them.
        weights = self.weights()
        folder = Path(output_dir or self.args.output_dir)
        if self.args.should_save:
            # First, as a model writes a card where there is none.
            write_card(folder, self, **self.card)
            self.trained.save_pretrained(folder, state_dict=weights)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            apply_umask(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def weights(self) -> dict[str, torch.Tensor]:
        """Weights of `trained`, by name."""
        return self.accelerator.get_state_dict(self.model)

    def create_model_card(self, *args, **kwargs):
        """Nothing: `save_model` writes the card."""

    def run(self, data: DataArguments | None = None, test_dataset=None) -> dict[str, float]:
        """Train, from the last checkpoint on if there is one, measure the best model, on `test_dataset` if given, and
        leave it in `output_dir` as a complete repository. `data` names the images for the card."""
        self.data = data
        checkpoint = self.args.resume_from_checkpoint or last_checkpoint(self.args.output_dir)
        result = self.train(resume_from_checkpoint=checkpoint)
        # It is 0 where the run had been finished before.
        if result.training_loss:
            self.log_metrics("train", result.metrics)
            self.save_metrics("train", result.metrics)
        if test_dataset is not None:
            self.evaluate(test_dataset, metric_key_prefix="test")
        if metrics := self.metrics:
            self.log_metrics("eval", metrics)
            self.save_metrics("eval", metrics)
        self.save_state()
        self.save_model()
        return metrics

    @property
    def kept_step(self) -> int:
        """Step of the weights that are kept."""
        best = self.state.best_global_step if self.args.load_best_model_at_end else None
        return best or self.state.global_step

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the kept model, on test images where there are any, without a prefix."""
        found = {}
        for record in self.state.log_history:
            prefix = "eval_" if record["step"] <= self.kept_step and "eval_runtime" in record else "test_"
            found |= {name.removeprefix(prefix): record[name] for name in record if name.startswith(prefix)}
        return found


class SaveWhenInterrupted(TrainerCallback):
    """Ends a run after Ctrl-C with a checkpoint of the step under way. A second Ctrl-C ends it at once, as does the
    first where there are several processes."""

    received = False

    def note(self, number: int, _):
        """Handle the first Ctrl-C."""
        self.received = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("\nThe step under way is finished and saved first. Once more ends it at once.", file=sys.stderr)

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save |= self.received
        # A loss that is not finite ends the run before its weights are saved.
        control.should_log |= control.should_save

    on_epoch_end = on_step_end

    def on_save(self, args, state, control, **kwargs):
        if self.received:
            print(f"Stopped at step {state.global_step}; the same command goes on from there.", file=sys.stderr)
            self.received = False
            raise KeyboardInterrupt


def learning_rate_factors(model: torch.nn.Module, head_multiplier: float, layer_decay: float) -> dict[str, float]:
    """Return the factor of each parameter's learning rate by its name: 1 for the last block, of the longest list of
    blocks, and what follows it, `layer_decay` times that of the next for each block before and for what precedes the
    first, and `head_multiplier` for the head, outside of the base model or, in timm's models, the classifier within.
    """
    base = model.base_model
    if base is model and head_multiplier != 1:
        raise ValueError(f"head_multiplier is {head_multiplier}, expected 1 for a {type(model).__name__}.")
    # timm keeps its blocks in an `nn.Sequential`.
    kinds = (torch.nn.ModuleList, torch.nn.Sequential) if is_timm(base) else torch.nn.ModuleList
    lists = [(name, module) for name, module in base.named_modules() if isinstance(module, kinds)]
    name, blocks = max(lists, key=lambda item: len(item[1]), default=("", ()))
    last = len(blocks) - 1
    index = -1
    heads = classifiers_inside(base)
    names = {parameter: name for name, parameter in model.named_parameters()}
    factors = dict.fromkeys(names.values(), head_multiplier)
    for full_name, parameter in base.named_parameters():
        if full_name.startswith(heads):
            continue
        if blocks and full_name.startswith(f"{name}."):
            index = int(full_name.removeprefix(f"{name}.").partition(".")[0])
        elif index >= 0:
            index = last
        factors[names[parameter]] = layer_decay ** (last - index)
    return factors


def classifiers_inside(base: torch.nn.Module) -> tuple[str, ...]:
    """Prefixes of the names of a timm model's classifier, which is inside; Transformers' models have it beside."""
    if not is_timm(base):
        return ()
    heads = base.get_classifier()
    heads = heads if isinstance(heads, tuple) else (heads,)
    return tuple(f"{name}." for name, module in base.named_modules() if any(module is head for head in heads))


def sharpness_aware(kind: type, rho: float) -> Callable:
    """Return a maker of optimizers of a class that minimize the sharpness within a radius, too (Foret et al. 2021)."""
    try:
        import pytorch_optimizer
    except ImportError:
        raise ValueError("sam_rho is pytorch_optimizer's: pip install 'frugalvit[sam]'.") from None

    class SAM(pytorch_optimizer.SAM):
        """SAM whose first step the trainer makes, before the second gradient."""

        def step(self, closure=None):
            self.second_step()

    return functools.partial(SAM, base_optimizer=kind, rho=rho)


def last_checkpoint(folder: str | Path) -> str | None:
    """Return the newest checkpoint in a folder. One that lacks what `Trainer` writes last is removed."""
    while os.path.isdir(folder) and (path := get_last_checkpoint(folder)):
        try:
            json.loads(Path(path, TRAINER_STATE_NAME).read_text(encoding="utf-8"))
            return path
        except (OSError, ValueError):
            # Another process may be removing it, too.
            with suppress(FileNotFoundError):
                shutil.rmtree(path)
    return None


def run_command(parser: ArgumentParser, make_trainer: Callable, argv: list[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options, data, args = parser.parse(argv)
    trainer = make_trainer(options, data, args)
    trainer.command = shlex.join([*parser.prog.split(), *argv])
    trainer.run(data, trainer.test_images)
    trainer.accelerator.print(f"{trainer.summary(trainer.metrics)}\nIt is in {trainer.args.output_dir}.")
    return 0


def start(args: ImageTrainingArguments, *sources: str | None):
    """Begin a command: check its output folder, apart from the models that it reads, and seed the draws of new
    weights."""
    check_output_outside_input(args.output_dir, *sources)
    started = int(os.environ.get("WORLD_SIZE") or 1)
    folder = Path(args.output_dir)
    if started > args.world_size and "RANK" in os.environ:
        raise ValueError(f"{started} processes were started, of which each would train alone; on CPUs, give use_cpu.")
    if folder.exists() and args.process_index == 0:
        while args.overwrite_output_dir and (path := get_last_checkpoint(folder)):
            shutil.rmtree(path)
        known = args.overwrite_output_dir or last_checkpoint(folder)
        if not known and not {path.name for path in folder.iterdir()} <= {"runs"}:
            raise ValueError(
                f"output_dir {folder} is not empty and holds no run to go on with (overwrite_output_dir)."
            )
    set_seed(args.seed)
    # Saving a model would draw its own bar through that of the training.
    transformers.utils.logging.disable_progress_bar()
