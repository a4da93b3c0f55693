"""Train an image classifier on little data, from scratch or from a checkpoint.

    accelerate launch -m frugalvit.training.train --output_dir OUT --model_type vit --config_overrides patch_size=4,…

Any image classifier of Transformers or of this package is trained with RandAugment, mixup, label smoothing, AdamW, and
a cosine schedule with warm-up.
"""

import copy
import math
import sys
from dataclasses import dataclass
from typing import get_args

import datasets
import torch
import torch.nn.functional as F
from torchvision.transforms import InterpolationMode, v2

from ..configuration.configuration_vit_context_broadcast import ContextBroadcastKind, ContextBroadcastPosition
from ..modeling.image_format import ImageFormat
from ..modeling.initialization import INITIALIZATIONS
from ..modeling.modeling_bootstrapped_vit import divergence
from ..modeling.reference_initialization import REFERENCE
from .arguments import ArgumentParser, DataArguments, ImageTrainingArguments, argument, run_program
from .cards import name_images, share_error
from .data import check_single_label, class_names, load_splits, match_classes
from .loading import load_model
from .metrics import accuracies
from .models import build_model, learning_rate_factors
from .sharpness import SharpnessAwareTrainer
from .trainer import run_command, start
from .views import EvalView, labeled_images, mixing


PROG = "frugalvit train"
# Default learning rates for new and for pretrained weights. The rate for new weights would destroy pretrained
# features.
SCRATCH_LEARNING_RATE = 1e-3
FINE_TUNING_LEARNING_RATE = 1e-4
# The default batch size is the largest of `BATCH_SIZES` for which an epoch has at least `STEPS_PER_EPOCH` steps. The
# batch size does not depend on the number of epochs, so that a longer run can continue a shorter run.
BATCH_SIZES = (8, 16, 32, 64, 128)
STEPS_PER_EPOCH = 20
# A training with fewer than `FEW_STEPS` steps prints a note.
FEW_STEPS = 100


@dataclass
class ModelArguments:
    """Arguments of the classifier to train."""

    model: str | None = argument(None, "Folder or hub id (owner/name@revision) of an image classifier to fine-tune.")
    model_type: str | None = argument(None, "Architecture to train from scratch, a model_type. Default: vit.")
    config_overrides: str = argument(
        "", "Configuration of a new model, for example image_size=32,patch_size=4,hidden_size=192."
    )
    initialization: str = argument(
        "default",
        "Initialization of a new ViT's attention, or of all its weights (reference).",
        choices=["default", *INITIALIZATIONS, REFERENCE],
    )
    initialization_options: str = argument("", "Arguments of initialize_attention_, for example kernel_size=5.")
    context_broadcast: str | None = argument(
        None, "Kind of Context Broadcasting to insert into every block.", choices=get_args(ContextBroadcastKind)
    )
    context_broadcast_position: list[str] = argument(
        ["mlp_end"], "Where to insert it.", choices=get_args(ContextBroadcastPosition)
    )
    context_broadcast_scale_init: float = argument(0.0, "Initial scale of cb_s.")
    context_broadcast_blend: bool = argument(False, "Insert it with a learned blend that starts at 0.")
    drop_path: float = argument(0.0, "Probability of dropping a block's branch, if the model has stochastic depth.")
    image_size: int | None = argument(None, "Size of the images in pixels, if the model takes several sizes.")
    image_mean: list[float] = argument([0.5, 0.5, 0.5], "Mean of the channels, in 0..1, for a new model.")
    image_std: list[float] = argument([0.5, 0.5, 0.5], "Standard deviation of the channels, in 0..1, for a new model.")

    def __post_init__(self):
        if not (self.model or self.model_type or self.config_overrides):
            raise ValueError("Pass model, to fine-tune it, or model_type or config_overrides, to train from scratch.")


@dataclass
class SmallDataArguments(ImageTrainingArguments):
    """Arguments of trainings on little data: the optimizer, crops and flips."""

    metric_for_best_model: str = argument("accuracy", "Metric that chooses the best model.")
    batch_eval_metrics: bool = argument(True, "Compute metrics batch by batch instead of keeping all logits.")
    learning_rate: float = argument(1e-3, "Peak learning rate.")
    weight_decay: float = argument(0.05, "Weight decay, except of biases, norms, positions and [CLS].")
    attn_implementation: str | None = argument(None, "Attention implementation in training. Default: eager on CPUs.")
    crop: str = argument("padded", "Random crop of the padded image, or resized crop.", choices=["padded", "resized"])
    crop_padding: int = argument(4, "Padding on each side in pixels, for crop padded.")
    padding_mode: str = argument(
        "reflect", "Content of the padding: the reflected image, or black.", choices=["reflect", "constant"]
    )
    crop_size: int | None = argument(None, "Size of the crop in pixels, for crop padded. Default: the model's.")
    crop_scale: list[float] = argument([0.08, 1.0], "Lowest and highest share of the image's area, for crop resized.")
    flip: float = argument(0.5, "Probability of a horizontal flip.")
    sam_rho: float = argument(0.0, "Radius of sharpness-aware minimization around optim; 0 turns it off.")

    def __post_init__(self):
        super().__post_init__()
        if self.sam_rho and (self.gradient_accumulation_steps > 1 or self.fp16):
            raise ValueError(
                f"sam_rho is {self.sam_rho}, expected 0 with gradient accumulation or fp16: pass "
                "gradient_accumulation_steps 1 and no fp16."
            )


class SmallDataView:
    """Augment an image for training on little data by torchvision's crop, flip, RandAugment and random erasing.

    Args:
        image_format (`ImageFormat`): The model's image format.
        args (`SmallDataArguments`): Crop, padding and flip.
        randaugment_layers (`int`), randaugment_magnitude (`int`): Number and strength of RandAugment's operations.
        erasing (`float`): Probability of erasing a rectangle.
    """

    def __init__(self, image_format: ImageFormat, args, randaugment_layers=0, randaugment_magnitude=9, erasing=0.0):
        self.formats = {"pixel_values": image_format}
        size = list(image_format.size)
        interpolation = image_format.interpolation
        before = 2 * [args.crop_size] if args.crop_size else size
        padding = args.crop_padding
        flip = v2.RandomHorizontalFlip(args.flip)
        if args.crop == "resized":
            steps = [v2.RandomResizedCrop(size, args.crop_scale, interpolation=interpolation), flip]
        else:
            if padding >= min(before):
                raise ValueError(f"crop_padding is {padding}, expected less than the image size, {min(before)}.")
            crop = v2.RandomCrop(before, padding or None, padding_mode=args.padding_mode)
            steps = [v2.Resize(before, interpolation), flip, crop, v2.Resize(size, interpolation)]
        if randaugment_layers:
            bilinear = InterpolationMode.BILINEAR
            steps.append(v2.RandAugment(randaugment_layers, randaugment_magnitude, 31, bilinear, image_format.fill))
        steps.append(v2.PILToTensor())
        if erasing:
            steps.append(v2.RandomErasing(erasing, value=image_format.fill))
        self.transform = v2.Compose(steps)

    def __call__(self, image):
        return {"pixel_values": self.transform(image)}


@dataclass
class ImageClassificationArguments(SmallDataArguments):
    """Arguments of the training of a classifier: augmentation, distillation, and learning rates of layers and head."""

    num_train_epochs: float = argument(100, "Epochs.")
    per_device_train_batch_size: int | None = argument(
        None,
        f"Training batch size on each device. Default: 8 to 128, for {STEPS_PER_EPOCH} steps or more in an epoch.",
    )
    learning_rate: float | None = argument(
        None,
        f"Highest learning rate. Default: {FINE_TUNING_LEARNING_RATE} with model, {SCRATCH_LEARNING_RATE} without.",
    )
    warmup_steps: float = argument(0.05, "Steps of warm-up, or a share of all.")
    label_smoothing_factor: float = argument(0.1, "Share of the target that is distributed over all classes.")
    randaugment_layers: int = argument(2, "RandAugment's number of operations; 0 turns it off.")
    randaugment_magnitude: int = argument(9, "RandAugment's strength, 0 to 30.")
    erasing: float = argument(0.0, "Probability of erasing a rectangle, which is filled with the mean.")
    mixup: float = argument(0.2, "Parameter of mixup's Beta distribution; 0 turns it off.")
    cutmix: float = argument(0.0, "Parameter of CutMix's Beta distribution; 0 turns it off.")
    distill_from: str | None = argument(None, "Folder or hub id (owner/name@revision) of a teacher, a classifier.")
    distill_weight: float = argument(0.5, "Weight of the teacher's loss; that of the labels is 1 minus it.")
    distill_kind: str = argument(
        "soft", "Learn the teacher's probabilities, or its best class.", choices=["soft", "hard"]
    )
    distill_temperature: float = argument(1.0, "Temperature of both distributions with distill_kind soft.")
    head_multiplier: float = argument(1.0, "Factor of the classifier's learning rate.")
    layer_decay: float = argument(1.0, "Factor of the learning rate from a block to the one before it.")
    trust_remote_code: bool = argument(False, "Run the code in the repository of model or teacher.")

    expected = {"label_smoothing_factor": ("a share from 0 to below 1", lambda value: 0 <= value < 1)}


def resolve_arguments(args: ImageClassificationArguments, config, images) -> ImageClassificationArguments:
    """Return a copy of the arguments in which a learning rate or a batch size of None is replaced by its default.

    Args:
        args (`ImageClassificationArguments`): The given arguments.
        config: The model's configuration. The field `name_or_path` is empty for a new model.
        images: Training images. For a stream, the largest batch size is chosen.
    """
    args = copy.copy(args)
    if args.learning_rate is None:
        args.learning_rate = FINE_TUNING_LEARNING_RATE if config.name_or_path else SCRATCH_LEARNING_RATE
    if args.per_device_train_batch_size is None:
        streams = isinstance(images, datasets.IterableDataset)
        largest = math.inf if streams else len(images) / (STEPS_PER_EPOCH * args.world_size)
        fitting = [size for size in BATCH_SIZES if size <= largest]
        args.per_device_train_batch_size = max(fitting, default=BATCH_SIZES[0])
    return args


class ImageClassificationTrainer(SharpnessAwareTrainer):
    """Transformers' `Trainer` for classifiers on little data, with RandAugment, mixup, CutMix, label smoothing,
    layer-wise decay of the learning rate, and distillation.

    Args:
        model (`PreTrainedModel`): An image classifier.
        args (`ImageClassificationArguments`): The training arguments.
        train_dataset: Images with labels, in a form that `BootstrapTrainer` accepts.
        eval_dataset (*optional*): Images with labels to choose the best model on.
        processing_class: The model's image processor.
        kwargs: See `ImageTrainer`.
    """

    def __init__(
        self,
        model,
        args: ImageClassificationArguments,
        train_dataset,
        eval_dataset=None,
        processing_class=None,
        **kwargs,
    ):
        self.image_format = image_format = ImageFormat.from_processor(processing_class)
        config = model.config
        check_single_label(config, PROG)
        config.problem_type = "single_label_classification"
        parts = labeled_images(train_dataset, eval_dataset)
        train, evaluation, classes = match_classes(parts, config.id2label, learns_labels=True)
        args = resolve_arguments(args, config, train)
        super().__init__(
            model,
            args,
            train,
            evaluation,
            SmallDataView(image_format, args, args.randaugment_layers, args.randaugment_magnitude, args.erasing),
            EvalView(image_format),
            mix=mixing(config.num_labels, args.mixup, args.cutmix),
            classes=classes,
            learning_rate_factors=learning_rate_factors(model, args.head_multiplier, args.layer_decay),
            processing_class=processing_class,
            **kwargs,
        )
        self.accuracies = accuracies()
        self.teacher = None
        if args.distill_from:
            self.teacher, processor = load_model(
                args.distill_from, "image-classification", args.device, args.trust_remote_code
            )
            check_single_label(self.teacher.config, "distill_from")
            if self.accelerator.mixed_precision == "bf16":
                self.teacher.to(torch.bfloat16)
            self.teacher_format = ImageFormat.from_processor(processor)
            if (count := self.teacher.config.num_labels) != config.num_labels:
                raise ValueError(
                    f"distill_from {args.distill_from} has {count} classes, the data set {config.num_labels}."
                )

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        pixel_values = inputs["pixel_values"]
        labels = inputs["labels"]
        args = self.args
        if not model.training:
            logits = model(pixel_values=pixel_values).logits
            loss = F.cross_entropy(logits.float(), labels)
            return (loss, {"logits": logits}) if return_outputs else loss
        outputs = model(pixel_values=pixel_values)
        # A model with a distillation token has two classifiers. The second classifier learns from the teacher.
        class_logits = outputs.logits
        distillation_logits = outputs.logits
        if getattr(outputs, "cls_logits", None) is not None:
            class_logits = outputs.cls_logits
            distillation_logits = outputs.distillation_logits
        loss = F.cross_entropy(class_logits, labels, label_smoothing=args.label_smoothing_factor)
        if self.teacher:
            loss = torch.lerp(loss, self.teacher_loss(distillation_logits, pixel_values), args.distill_weight)
        elif distillation_logits is not class_logits:
            loss = (
                loss + F.cross_entropy(distillation_logits, labels, label_smoothing=args.label_smoothing_factor)
            ) / 2
        return (loss, outputs) if return_outputs else loss

    def teacher_loss(self, logits: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the loss of distillation: the divergence from the teacher's distribution, times temperature^2. For
        "hard" distillation (DeiT), return the cross-entropy with the teacher's best class."""
        pixel_values = self.teacher_format.convert(pixel_values, self.image_format)
        with torch.no_grad(), self.accelerator.autocast():
            expected = self.teacher(pixel_values=pixel_values).logits.float()
        if self.args.distill_kind == "hard":
            return F.cross_entropy(logits, expected.argmax(1))
        return divergence(logits, expected, self.args.distill_temperature)

    def run(self) -> dict[str, float]:
        """Run `ImageTrainer.run`, and print a note if the training had few steps or may have learned nothing."""
        metrics = super().run()
        notes = []
        steps = self.state.global_step
        # More epochs are suggested only if the last epoch was the best.
        if 0 < steps < FEW_STEPS and self.kept_step == steps:
            epochs = math.ceil(self.state.epoch * FEW_STEPS / steps)
            notes.append(f"{steps} steps are few to learn from; num_train_epochs {epochs} makes {FEW_STEPS}.")
        if "accuracy" in metrics:
            images = len(self.measured_dataset)
            classes = self.saved_model.config.num_labels
            error = ((classes - 1) / images) ** 0.5 / classes
            if metrics["accuracy"] < 1 / classes + 2 * error:
                notes.append(
                    f"an accuracy of {metrics['accuracy']:.1%} on {images} images may be chance ({1 / classes:.1%}). "
                    f"Try more num_train_epochs, or a lower learning_rate than {self.args.learning_rate:g}."
                )
        for note in notes if self.is_world_process_zero() else ():
            print(f"Note: {note}", file=sys.stderr)
        return metrics

    def measure(self, prediction, compute_result: bool = True) -> dict[str, float]:
        """Add a batch to the metrics `accuracy` and `top5_accuracy`. With `compute_result`, which is set for the last
        batch, return the two metrics."""
        logits, labels = (torch.as_tensor(each).cpu() for each in (prediction.predictions, prediction.label_ids))
        self.accuracies.add_batch(predictions=logits.float().numpy(), references=labels.numpy())
        return self.accuracies.compute() if compute_result else {}

    def summary(self, metrics: dict[str, float]) -> str:
        config = self.saved_model.config
        measured = ", not evaluated"
        if "accuracy" in metrics:
            error = share_error(metrics["accuracy"], len(self.measured_dataset))
            measured = f": accuracy {metrics['accuracy']:.2%} ± {error:.2%}"
        architecture = getattr(config, "architecture", config.model_type)
        return f"A {architecture} classifier trained on {name_images(self.data_args)}{measured}."


def make_parser() -> ArgumentParser:
    return ArgumentParser([ModelArguments, DataArguments, ImageClassificationArguments], PROG)


def make_trainer(
    options: ModelArguments, data: DataArguments, args: ImageClassificationArguments
) -> ImageClassificationTrainer:
    """Return the trainer for the arguments of the command."""
    start(args, options.model, args.distill_from)
    train, evaluation, test = load_splits(data, learns_labels=True, skip_corrupt=args.skip_corrupt)
    model, processor = build_model(options, args, class_names(train))
    return ImageClassificationTrainer(
        model,
        args,
        train,
        evaluation,
        processor,
        test_dataset=test,
        base_model=options.model,
        model_args=options,
        data_args=data,
    )


def main(argv: list[str] | None = None) -> int:
    return run_command(make_parser(), make_trainer, argv)


if __name__ == "__main__":
    raise SystemExit(run_program(main, PROG))
