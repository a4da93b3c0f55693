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
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSemanticSegmentation, SegformerImageProcessor

from ..common.loading import check_sizes, load_image_processor, one_error, split_revision
from ..common.masks import MaskReader, SegmentationEvalView, SegmentationView, load_masked_splits
from ..common.metrics import evaluate_segmenter
from ..common.views import ImageFormat
from ..modeling.modeling_sparseformer import SparseFormerForSemanticSegmentation
from ..modeling.segmentation import semantic_segmentation_loss
from .components.arguments import (
    run_as_program,
)
from .components.cards import choice_of_epoch, count_measured, name_images, say_license, write_card
from .components.checkpoints import TrainingState
from .components.loaders import make_loaders
from .components.loop import fit
from .components.models import check_loading, check_numbers, parse_overrides, set_drop_path
from .components.optimizers import learning_rate_factors, optimizer_with_schedule
from .components.runs import start_accelerator
from .components.sharding import prepare
from .options.segment import PROG, MaskedImageArguments, SegmenterArguments, parse


# What `--model` should be, for messages.
KIND = "a model to go on from"


def main(argv: list[str] | None = None) -> int:
    """Run the recipe with a command line's arguments."""
    all_arguments = parse(argv)
    segmenter, data, augmentation, optimization, run = all_arguments
    accelerator = start_accelerator(run, PROG, argv, list(all_arguments))
    say_license(accelerator, run, segmenter.model)

    train_images, eval_images, test_images = load_masked_splits(data)
    model, processor = build_model(segmenter, data)
    num_labels = model.config.num_labels
    if run.compile:
        model.compile()

    image_format = ImageFormat.from_processor(processor)
    read_mask = MaskReader(num_labels, data.ignored_labels, data.reduce_labels)
    view = SegmentationView(
        *(image_format, read_mask, augmentation.scale, augmentation.max_share),
        *(augmentation.flip, augmentation.distort),
    )
    evaluation = (eval_images, SegmentationEvalView(image_format, read_mask))
    loader, eval_loader, test_loader = make_loaders(
        accelerator, data, run, (train_images, view), evaluation, test_images
    )
    run.epochs = run.epochs or math.ceil(80_000 / loader.steps_per_epoch)
    optimization.warmup_epochs = optimization.warmup_epochs or optimization.warmup_steps / loader.steps_per_epoch
    if optimization.warmup_epochs >= run.epochs:
        raise ValueError(
            f"--warmup-steps {optimization.warmup_steps} is all of the training of "
            f"{run.epochs * loader.steps_per_epoch} steps; warm up for fewer, or train for more --epochs."
        )
    optimizer, scheduler = optimizer_with_schedule(
        model,
        optimization,
        run.epochs,
        loader.steps_per_epoch,
        rates=learning_rate_factors(model, optimization.head_multiplier, optimization.layer_decay),
    )
    model, optimizer, scheduler = prepare(accelerator, model, optimizer, scheduler)

    def compute_loss(model, batch):
        logits = model(pixel_values=batch["pixel_values"]).logits
        return semantic_segmentation_loss(logits, batch["labels"], num_labels)

    def save(folder: Path, state: TrainingState, weights: dict[str, torch.Tensor]):
        trained = accelerator.unwrap_model(model)
        trained.save_pretrained(folder, state_dict=weights)
        processor.save_pretrained(folder)
        summary = f"A {trained.config.model_type} for semantic segmentation trained on {name_images(data.dataset)}"
        if eval_loader:
            size = " x ".join(map(str, segmenter.size))
            summary += f": mean IoU {state.measured['mean_iou']:.2%}{count_measured(run)}, measured at {size} pixels."
        else:
            summary += ", not evaluated."
        write_card(folder, trained, summary, data, run, state, segmenter.model, metric="mean_iou")

    state = fit(
        accelerator,
        run,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        compute_loss=compute_loss,
        evaluate=lambda model, loader: evaluate_segmenter(accelerator, model, loader, num_labels),
        eval_loader=eval_loader,
        test_loader=test_loader,
        save=save,
        metric="mean_iou",
    )
    mean_iou = f"Mean IoU {state.measured['mean_iou']:.4f}" if eval_loader else "Not evaluated"
    accelerator.print(f"{mean_iou}: {choice_of_epoch(data, run, state)}. See {run.output_dir}.")
    return 0


def build_model(arguments: SegmenterArguments, data: MaskedImageArguments):
    """The model for the classes, in float32, and its image processor."""
    labels = {"num_labels": data.num_labels} if data.num_labels else {}
    if data.class_names:
        names = dict(enumerate(data.class_names))
        labels = {"id2label": names, "label2id": {name: i for i, name in names.items()}}
    height, width = arguments.size
    preprocessing = {}
    if arguments.model:
        name, revision = split_revision(arguments.model)
        check_sizes(Path(name).expanduser(), KIND)
        remote = {"trust_remote_code": arguments.trust_remote_code}
        with one_error(arguments.model, KIND):
            config = AutoConfig.from_pretrained(name, **remote, **revision, **labels)
        if not labels and not any("Segmentation" in name for name in config.architectures or ()):
            raise ValueError(
                f"{arguments.model} is no segmentation model that would know the classes; say how many there are with "
                "--num-labels, or name them with --class-names."
            )
        set_drop_path(config, arguments.drop_path)
        sparse = config.model_type == "sparseformer"
        if sparse:
            config.image_size, config.resize_size = [height, width], None
        elif arguments.num_latent_tokens:
            raise ValueError(f"--num-latent-tokens is for SparseFormers, {arguments.model} is a {config.model_type}.")
        model_class = SparseFormerForSemanticSegmentation if sparse else AutoModelForSemanticSegmentation
        with one_error(arguments.model, KIND):
            model, info = model_class.from_pretrained(
                name,
                config=config,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **revision,
                **({"num_latent_tokens": arguments.num_latent_tokens} if sparse else remote),
            )
        check_loading(model, info, arguments.model)
        given = load_image_processor(arguments.model, arguments.trust_remote_code, KIND)
        if getattr(given, "do_flip_channel_order", False):
            raise ValueError(f"{arguments.model} takes blue before green before red, which this recipe does not.")
        names = ("image_mean", "image_std", "resample", "do_normalize")
        preprocessing = {name: getattr(given, name, None) for name in names}
        preprocessing["do_normalize"] = bool(preprocessing["do_normalize"])
    else:
        if not labels:
            raise ValueError(f"A new {arguments.model_type} needs its classes: --class-names or --num-labels.")
        overrides = parse_overrides(arguments.model_type, arguments.config_overrides)
        check_numbers(overrides)
        with one_error(arguments.model_type, "an architecture to train from scratch"):
            config = AutoConfig.for_model(arguments.model_type, **overrides, **labels)
        set_drop_path(config, arguments.drop_path)
        with one_error(arguments.model_type, "an architecture to train from scratch"):
            model = AutoModelForSemanticSegmentation.from_config(config)
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
