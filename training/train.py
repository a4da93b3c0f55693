"""Train an image classifier from scratch or go on from a checkpoint: the standard recipe for little data.

    accelerate launch -m frugalvit.training.train --output OUT --model-type vit --config-overrides patch_size=4,…

RandAugment, mixup, label smoothing, AdamW, warm-up and cosine, on any image classifier of Transformers or of this
package.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from accelerate import Accelerator, PartialState
from transformers import PreTrainedModel

from ..common.classes import match_labels
from ..common.labels import class_names
from ..common.loading import load_image_classifier
from ..common.metrics import evaluate_classifier
from ..common.precision import hold_teacher
from ..common.splits import load_splits
from ..common.views import EvalView, ImageFormat
from ..modeling.layers import divergence
from .components.arguments import OptimizerArguments, run_as_program
from .components.augmentation import Mix, SmallDataView
from .components.cards import count_measured, name_images, say_license
from .components.checkpoints import TrainingState
from .components.classifiers import build_model, choose_variant, format_in_training, typical_pixels
from .components.images import labeled_images
from .components.models import choose_attention
from .components.optimizers import learning_rate_factors, optimizer_with_schedule
from .components.runs import ImageTrainingArguments, start_run, training_arguments
from .options.train import PROG, LearningArguments, parse
from .trainer import ImageTrainer


# How many times as large as they are images are shown to a new model without a word.
MOST_ENLARGED = 3


@dataclass
class ImageClassificationArguments(LearningArguments, OptimizerArguments, ImageTrainingArguments):
    """Transformers' `TrainingArguments`, and the options of `frugalvit train` by the same names.

    Arguments of `TrainingArguments` about optimizer and schedule, such as `optim` and `warmup_steps`, are not read,
    but for the learning rate, the weight decay and Adam's numbers: see `optimizer`, `lr_scheduler` and
    `warmup_epochs`.

    Args:
        train_image_size (`int`, *optional*): Height and width in pixels of training images, if they are to be smaller
            than the model's; the model then interpolates its positions.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Run code that comes with the teacher.
        num_train_epochs (`float`, *optional*, defaults to 100): Epochs.
        per_device_train_batch_size (`int`, *optional*, defaults to 128): Images of a step on a device.

    Raises:
        ValueError: if a value does not fit.
    """

    train_image_size: int | None = None
    trust_remote_code: bool = False
    num_train_epochs: float = 100.0
    per_device_train_batch_size: int = 128


class ImageClassificationTrainer(ImageTrainer):
    """Transformers' `Trainer` with the recipe for little data: RandAugment, mixup, CutMix, label smoothing, learning
    rates that fall from block to block, and distillation.

    ```python
    model = AutoModelForImageClassification.from_config(config)
    args = ImageClassificationArguments(output_dir="trained", num_train_epochs=100)
    trainer = ImageClassificationTrainer(model, args, images, held_back, processing_class=processor)
    trainer.train()
    ```

    Args:
        model (`PreTrainedModel`): An image classifier.
        args (`ImageClassificationArguments`): How it is trained.
        train_dataset: Images with labels, see `BootstrapTrainer`.
        eval_dataset, test_dataset (*optional*): The same, to choose the best epoch on and to measure it on.
        processing_class: The model's image processor.
        callbacks (*optional*): As Transformers has them.
        command (*optional*): Arguments of `ImageTrainer` that a command gives, and `attn_implementation`.

    Raises:
        ValueError: if model, images and arguments do not fit each other.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: ImageClassificationArguments,
        train_dataset,
        eval_dataset=None,
        test_dataset=None,
        processing_class=None,
        callbacks=None,
        **command,
    ):
        attention = command.pop("attn_implementation", None)
        train, evaluation, test = labeled_images(train_dataset, eval_dataset, test_dataset)
        classes = classes_of(model.config, class_names(train))
        image_format = ImageFormat.from_processor(processing_class)
        self.view_format, self.options = format_in_training(model, image_format, args.train_image_size)
        view = SmallDataView(
            self.view_format,
            args.crop,
            args.crop_padding,
            padding_mode=args.padding_mode,
            crop_size=args.crop_size,
            scale=args.crop_scale,
            ratio=args.crop_ratio,
            flip=args.flip,
            randaugment_layers=args.randaugment_layers,
            randaugment_magnitude=args.randaugment_magnitude,
            erasing=args.erasing,
            augmentation=args.augmentation,
        )
        mix = Mix(model.config.num_labels, args.mixup, args.cutmix, args.label_smoothing, args.seed)
        super().__init__(
            *(model, args),
            train=(train, view),
            evaluation=(evaluation, EvalView(image_format)),
            test=test,
            classes=classes,
            loader_options={"mix": mix, "repeated_augmentation": args.repeated_augmentation},
            processing_class=processing_class,
            callbacks=callbacks,
            **command,
        )
        choose_attention(model, attention, self.accelerator.device)
        self.teacher_loss = None
        if args.distill_from:
            self.teacher_loss = load_teacher(args, self.view_format, model.config.num_labels, self.accelerator)

    def outline(self) -> str:
        """The model and the length of the training, in a sentence."""
        length = f"{self.run.epochs} x {self.loader.steps_per_epoch:,} x {self.run.batch_size:,}"
        return (
            f"{type(self.model).__name__}: {self.model.num_parameters():,} parameters, "
            f"{' x '.join(map(str, self.view_format.size))} pixels, {self.model.config.num_labels:,} classes; "
            f"epochs x steps x images: {length}."
        )

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs, targets = model(pixel_values=inputs["pixel_values"], **self.options), inputs["targets"]
        # A distilled model has two classifiers: one learns from the labels, one from the teacher if there is one.
        of_labels = getattr(outputs, "cls_logits", None)
        of_labels, of_teacher = (
            (outputs.logits,) * 2 if of_labels is None else (of_labels, outputs.distillation_logits)
        )
        loss = F.cross_entropy(of_labels, targets)
        if self.teacher_loss:
            loss = torch.lerp(loss, self.teacher_loss(of_teacher, inputs["pixel_values"]), self.args.distill_weight)
        elif of_teacher is not of_labels:
            loss = (loss + F.cross_entropy(of_teacher, targets)) / 2
        return (loss, outputs) if return_outputs else loss

    def make_optimizer(self) -> tuple:
        args, rates = self.args, None
        if (args.head_multiplier, args.layer_decay) != (1, 1):
            rates = learning_rate_factors(self.model, args.head_multiplier, args.layer_decay)
        return optimizer_with_schedule(
            *(self.model, args, self.epochs, self.loader.steps_per_epoch, args.optimizer, rates),
            sam_rho=args.sam_rho,
        )

    def measure(self, model, loader) -> dict[str, float]:
        return evaluate_classifier(self.accelerator, model, loader)

    def summary(self, state: TrainingState) -> str:
        config, accuracy = self.model.config, ", not evaluated"
        if "accuracy" in state.measured:
            accuracy = f": accuracy {state.measured['accuracy']:.2%}{count_measured(self.run)}"
        architecture = getattr(config, "architecture", config.model_type)
        return f"A {architecture} classifier trained on {name_images(self.data.dataset)}{accuracy}."


def main(argv: list[str] | None = None) -> int:
    """Train as a command line says."""
    trainer = make_trainer(parse(argv), argv)
    trainer.accelerator.print(trainer.outline())
    trainer.train()
    trainer.say_result("accuracy")
    return 0


def make_trainer(groups: tuple, argv: list[str] | None) -> ImageClassificationTrainer:
    """Return the trainer for the options of the command; `argv` are its arguments, for the card."""
    arguments, data, learning, optimization, run = groups
    start_run(run, PROG, argv, list(groups))
    say_license(run, arguments.model)
    train, evaluation, test = load_splits(data, learns_labels=True)
    is_chosen = not (arguments.model or arguments.model_type or arguments.config_overrides)
    pixels = None if arguments.model else arguments.image_size or typical_pixels(train)
    if is_chosen:
        variant = choose_variant(arguments, pixels)
        chosen = f"--model-type {arguments.model_type} --config-overrides {arguments.config_overrides}"
        PartialState().print(f"No model is named; images of {pixels} pixels have {variant}: {chosen}")
    model, processor = build_model(arguments, learning, class_names(train), run.seed)
    size = min(ImageFormat.from_processor(processor).size)
    if pixels and not is_chosen and size > MOST_ENLARGED * pixels:
        PartialState().print(
            f"Note: the new model sees images of {size} pixels, and these have {pixels}: they are enlarged. One for "
            f"their own size is faster: --config-overrides image_size={pixels},patch_size=…"
        )
    if run.compile:
        model.compile()
    args = training_arguments(ImageClassificationArguments, run, data, arguments, learning, optimization)
    return ImageClassificationTrainer(
        *(model, args, train, evaluation, test, processor),
        run=run,
        data=data,
        base_model=arguments.model,
        attn_implementation=arguments.attn_implementation,
    )


def classes_of(config, names: list[str]) -> list[int] | None:
    """The classifier's number of each class of a data set; None where the data set's numbers are the classifier's, or
    the classifier has no names.

    Raises:
        ValueError: if the classifier does not know a class.
    """
    own = [config.id2label[label] for label in range(config.num_labels)]
    unnamed = own == [f"LABEL_{label}" for label in range(len(names))]
    return None if own == names or unnamed else match_labels(names, config.id2label)


def load_teacher(learning: LearningArguments, image_format: ImageFormat, num_labels: int, accelerator: Accelerator):
    """Return the loss of distillation, a function of the student's logits and its pixels.

    It is the divergence from the teacher's distribution, times temperature^2, or, with `distill_kind="hard"`, the
    cross-entropy with the teacher's best class (DeiT).
    """
    teacher, processor = load_image_classifier(learning.distill_from, accelerator.device, learning.trust_remote_code)
    hold_teacher(accelerator, teacher)
    teacher_format = ImageFormat.from_processor(processor)
    if teacher.config.num_labels != num_labels:
        raise ValueError(
            f"--distill-from {learning.distill_from} has {teacher.config.num_labels} classes, the data set "
            f"{num_labels}."
        )

    def loss(logits: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), accelerator.autocast():
            expected = teacher(pixel_values=teacher_format.convert(pixel_values, image_format)).logits.float()
        if learning.distill_kind == "hard":
            return F.cross_entropy(logits, expected.argmax(1))
        return divergence(logits, expected, learning.distill_temperature)

    return loss


if __name__ == "__main__":
    run_as_program(main, PROG)
