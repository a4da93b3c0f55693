"""Fine-tune a model for semantic segmentation: SparseFormers, and all of Transformers that have a class for it.

    accelerate launch -m frugalvit.training.segment --model BOOTSTRAPPED --num-latent-tokens 256 --image-size 512 \\
        --dataset ADE20K --train-split training --eval-split validation --reduce-labels --num-labels 150 \\
        --output OUT

Gao et al., *Bootstrapping SparseFormers from Vision Foundation Models* (CVPR 2024), section 4.1, follow the recipe of
ViT-Adapter (Chen et al. 2023) with 80,000 iterations and more images a step. The defaults are what that has for both
sizes of AugReg models: AdamW, 2e-5, linear decay after 1,500 steps of warm-up, images resized to 0.5 to 2 times the
crop, cropped, flipped and distorted in color; and where the sizes differ, ten times the rate for the head, weight
decay 0.01 and drop path 0.3 as for base (large: 1, 0.05, 0.4), and a rate that falls by 0.95 from block to block
towards the image as for large (base: 1).
"""

import math
from dataclasses import dataclass, field

from transformers import AutoModelForSemanticSegmentation, PreTrainedModel, SegformerImageProcessor

from ..common.loading import load_image_processor
from ..common.masks import MaskReader, SegmentationEvalView, SegmentationView, load_masked_splits
from ..common.metrics import evaluate_segmenter
from ..common.views import ImageFormat
from ..configuration.configuration_sparseformer_base import is_sparseformer
from ..modeling.segmentation import semantic_segmentation_loss
from .components.arguments import run_as_program
from .components.cards import count_measured, name_images, say_license
from .components.checkpoints import TrainingState
from .components.models import load_checkpoint, new_config, new_model, read_config, set_drop_path
from .components.optimizers import learning_rate_factors, optimizer_with_schedule
from .components.runs import ImageTrainingArguments, start_run, training_arguments
from .options.segment import (
    PROG,
    AugmentationArguments,
    MaskedImageArguments,
    SegmenterArguments,
    SegmentOptimizerArguments,
    parse,
)
from .trainer import ImageTrainer


# What `--model` should be, for messages.
KIND = "a model to go on from"


@dataclass
class SegmentationArguments(AugmentationArguments, SegmentOptimizerArguments, ImageTrainingArguments):
    """Transformers' `TrainingArguments`, and the options of `frugalvit segment` by the same names.
    `ImageClassificationArguments` says which of `TrainingArguments` are not read; `warmup_steps` is read here, if
    `warmup_epochs` is 0.

    Args:
        num_train_epochs (`float`, *optional*): Epochs; as many as make 80,000 steps if not given.
        per_device_train_batch_size (`int`, *optional*, defaults to 32): Images of a step on a device.
        ignored_labels (`list[int]`, *optional*): Numbers in the masks that do not count, besides 255.
        reduce_labels (`bool`, *optional*, defaults to `False`): Whether 0 in the masks does not count, and 1 is the
            first class.

    Raises:
        ValueError: if a value does not fit.
    """

    num_train_epochs: float | None = None
    per_device_train_batch_size: int = 32
    ignored_labels: list[int] = field(default_factory=list)
    reduce_labels: bool = False


class SegmentationTrainer(ImageTrainer):
    """Transformers' `Trainer` of semantic segmentation, with ViT-Adapter's recipe.

    Args:
        model (`PreTrainedModel`): A `SparseFormerForSemanticSegmentation` or a model of Transformers for segmentation.
        args (`SegmentationArguments`): How it is trained.
        train_dataset (`datasets.Dataset`): Images, in `image`, with masks, in `mask`, not decoded.
        eval_dataset, test_dataset (`datasets.Dataset`, *optional*): The same, to choose the best epoch on and to
            measure it on.
        processing_class: The model's image processor.
        callbacks (*optional*): As Transformers has them.
        command (*optional*): Arguments of `ImageTrainer` that a command gives, as `run` and `data`.

    Raises:
        ValueError: if model, images and arguments do not fit each other.
    """

    metric = "mean_iou"

    def __init__(
        self,
        model: PreTrainedModel,
        args: SegmentationArguments,
        train_dataset,
        eval_dataset=None,
        test_dataset=None,
        processing_class=None,
        callbacks=None,
        **command,
    ):
        image_format = ImageFormat.from_processor(processing_class)
        read_mask = MaskReader(model.config.num_labels, args.ignored_labels, args.reduce_labels)
        view = SegmentationView(image_format, read_mask, args.scale, args.max_share, args.flip, args.distort)
        super().__init__(
            *(model, args),
            train=(train_dataset, view),
            evaluation=(eval_dataset, SegmentationEvalView(image_format, read_mask)),
            test=test_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            **command,
        )
        steps, args = self.loader.steps_per_epoch, self.args
        args.warmup_epochs = args.warmup_epochs or args.warmup_steps / steps
        if args.warmup_epochs >= self.epochs:
            raise ValueError(
                f"--warmup-steps {args.warmup_steps} is all of the training of {self.total_steps} steps; warm up for "
                "fewer, or train for more --epochs."
            )

    @property
    def total_steps(self) -> int:
        if self.args.num_train_epochs is None:
            self.args.num_train_epochs = self.run.epochs = math.ceil(80_000 / self.loader.steps_per_epoch)
        return super().total_steps

    def take_images(self, images):
        return images

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(pixel_values=inputs["pixel_values"])
        loss = semantic_segmentation_loss(outputs.logits, inputs["labels"], self.model.config.num_labels)
        return (loss, outputs) if return_outputs else loss

    def make_optimizer(self) -> tuple:
        rates = learning_rate_factors(self.model, self.args.head_multiplier, self.args.layer_decay)
        return optimizer_with_schedule(self.model, self.args, self.epochs, self.loader.steps_per_epoch, rates=rates)

    def measure(self, model, loader) -> dict[str, float]:
        return evaluate_segmenter(self.accelerator, model, loader, self.model.config.num_labels)

    def summary(self, state: TrainingState) -> str:
        images, measured = name_images(self.data.dataset), ", not evaluated."
        if "mean_iou" in state.measured:
            size = " x ".join(map(str, self.evaluation_part[1].formats["pixel_values"].size))
            mean_iou = f"{state.measured['mean_iou']:.2%}{count_measured(self.run)}"
            measured = f": mean IoU {mean_iou}, measured at {size} pixels."
        return f"A {self.model.config.model_type} for semantic segmentation trained on {images}{measured}"


def main(argv: list[str] | None = None) -> int:
    """Train as a command line says."""
    trainer = make_trainer(parse(argv), argv)
    trainer.train()
    trainer.say_result("mean_iou")
    return 0


def make_trainer(groups: tuple, argv: list[str] | None) -> SegmentationTrainer:
    """Return the trainer for the options of the command; `argv` are its arguments, for the card."""
    segmenter, data, augmentation, optimization, run = groups
    start_run(run, PROG, argv, list(groups))
    say_license(run, segmenter.model)
    train, evaluation, test = load_masked_splits(data)
    model, processor = build_model(segmenter, data)
    if run.compile:
        model.compile()
    args = training_arguments(SegmentationArguments, run, data, augmentation, optimization)
    return SegmentationTrainer(
        *(model, args, train, evaluation, test, processor), run=run, data=data, base_model=segmenter.model
    )


def build_model(arguments: SegmenterArguments, data: MaskedImageArguments):
    """Return the model for the data's classes, in float32, and its image processor."""
    labels = {"num_labels": data.num_labels} if data.num_labels else {}
    if data.class_names:
        names = dict(enumerate(data.class_names))
        labels = {"id2label": names, "label2id": {name: i for i, name in names.items()}}
    height, width = arguments.size
    preprocessing = {}
    if arguments.model:
        config = read_config(arguments.model, KIND, arguments.trust_remote_code, **labels)
        if not labels and not any("Segmentation" in name for name in config.architectures or ()):
            raise ValueError(
                f"{arguments.model} is no segmentation model that would know the classes; say how many there are with "
                "--num-labels, or name them with --class-names."
            )
        set_drop_path(config, arguments.drop_path)
        sparse = is_sparseformer(config)
        if sparse:
            config.image_size, config.resize_size = [height, width], None
        elif arguments.num_latent_tokens:
            raise ValueError(f"--num-latent-tokens is for SparseFormers, {arguments.model} is a {config.model_type}.")
        remote = {"trust_remote_code": arguments.trust_remote_code}
        options = {"num_latent_tokens": arguments.num_latent_tokens} if sparse else remote
        model = load_checkpoint(AutoModelForSemanticSegmentation, arguments.model, config, KIND, **options)
        given = load_image_processor(arguments.model, arguments.trust_remote_code, KIND)
        if getattr(given, "do_flip_channel_order", False):
            raise ValueError(f"{arguments.model} takes blue before green before red, which `segment` does not.")
        names = ("image_mean", "image_std", "resample", "do_normalize")
        preprocessing = {name: getattr(given, name, None) for name in names}
        preprocessing["do_normalize"] = bool(preprocessing["do_normalize"])
    else:
        if not labels:
            raise ValueError(f"A new {arguments.model_type} needs its classes: --class-names or --num-labels.")
        config = new_config(arguments.model_type, arguments.config_overrides, arguments.drop_path, **labels)
        model = new_model(AutoModelForSemanticSegmentation, config)
    # Nothing that the logits depend on: they would have no gradient, which several processes do not take.
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("auxiliary_head", "pooling_head"):
            module.requires_grad_(False)
    processor = SegformerImageProcessor(
        size={"height": height, "width": width}, do_reduce_labels=data.reduce_labels, **preprocessing
    )
    return model, processor


if __name__ == "__main__":
    run_as_program(main, PROG)
