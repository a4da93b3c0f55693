"""Fine-tune a SparseFormer, or another model of Transformers, for semantic segmentation.

    accelerate launch -m frugalvit.training.segment --model BOOTSTRAPPED --num_latent_tokens 255 --image_size 512 \\
        --dataset ADE20K --train_split training --eval_split validation --reduce_labels --num_labels 150 \\
        --output_dir OUT

Gao et al., *Bootstrapping SparseFormers from Vision Foundation Models* (CVPR 2024), section 4.1, use the settings of
ViT-Adapter (Chen et al. 2023), but with 80,000 iterations and larger batches. The defaults are ViT-Adapter's settings
for AugReg models. Some of these settings depend on the model's size. Three defaults are those for base models: weight
decay 0.01 (large: 0.05), drop path 0.3 (large: 0.4), and the factor 10 (large: 1) of the head's learning rate. The
default layer decay of 0.95 is the one for large models (base: 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2
from transformers import AutoConfig, AutoImageProcessor, AutoModelForSemanticSegmentation, SegformerImageProcessor

from ..configuration.configuration_base import is_sparseformer
from ..modeling.image_format import ImageFormat
from ..modeling.segmentation_head import semantic_segmentation_loss
from .arguments import (
    NOT_NEGATIVE,
    PIXEL_VALUES,
    RANGE,
    ArgumentParser,
    CheckedArguments,
    DataArguments,
    ImageTrainingArguments,
    argument,
    run_program,
)
from .cards import name_images
from .choices import IGNORED
from .data import load_table
from .loading import load_pretrained
from .masks import MaskReader, load_masked_images, load_masked_splits
from .metrics import SegmentationScores
from .models import label_fields, learning_rate_factors, load_with_new_head, new_config, set_drop_path
from .preprocessing import LONGEST
from .scores import check_scores
from .trainer import ImageTrainer, run_command, start
from .views import PlainImages


PROG = "frugalvit segment"
# Description of the checkpoint to fine-tune, for messages.
KIND = "a model to fine-tune"
# Largest share of one class in a crop, and probability of each color distortion, both as in MMSegmentation.
MOST_OF_A_CLASS = 0.75
DISTORTION = 0.5


@dataclass
class SegmenterArguments(CheckedArguments):
    """Arguments of the segmentation model to train."""

    model: str | None = argument(
        None, "Folder or hub id (owner/name@revision) of a SparseFormer or segmentation model."
    )
    model_type: str | None = argument(None, "Architecture to train from scratch instead, a model_type.")
    config_overrides: str = argument("", "Configuration of a new model, for example hidden_sizes=[32,64,160,256].")
    num_latent_tokens: int | None = argument(None, "Latent tokens of a SparseFormer, without [CLS]; 255 in the paper.")
    image_size: list[int] = argument([512], "Size of the crop in pixels, one number or height and width.")
    drop_path: float = argument(0.3, "Largest stochastic depth rate.")
    trust_remote_code: bool = argument(False, "Run the code in the model's repository.")

    expected = {
        "drop_path": NOT_NEGATIVE,
        "image_size": ("one number or two, at least 4", lambda size: len(size) in (1, 2) and min(size) >= 4),
    }

    def __post_init__(self):
        if (self.model is None) == (self.model_type is None):
            raise ValueError("Pass either model, to fine-tune it, or model_type, to train from scratch.")
        super().__post_init__()


@dataclass
class MaskedDataArguments(DataArguments, CheckedArguments):
    """Arguments that name the images and masks for training and evaluation."""

    dataset: list[str] = argument(help="Hub id, parquet files, or folder with images/ and annotations/ or labelme's.")
    mask_column: str | None = argument(None, "Name of the column of masks. Default: the only one.")
    num_labels: int | None = argument(None, "Number of classes, if class_names is not given.")

    expected = {"num_labels": (f"2 to {IGNORED}", lambda count: 2 <= count <= IGNORED)}

    def __post_init__(self):
        if self.class_names and self.num_labels not in (None, len(self.class_names)):
            raise ValueError(f"num_labels is {self.num_labels}, class_names has {len(self.class_names)}.")
        super().__post_init__()


@dataclass
class SegmentationArguments(ImageTrainingArguments):
    """Arguments of segmentation training: augmentation, learning rates, and ignored labels."""

    metric_for_best_model: str = argument("mean_iou", "Metric that chooses the best model.")
    batch_eval_metrics: bool = argument(True, "Compute metrics batch by batch instead of keeping all logits.")
    num_train_epochs: float | None = argument(None, "Epochs. Default: as many as max_steps requires.")
    max_steps: int = argument(-1, "Optimizer steps. Default: 80,000 without num_train_epochs.")
    per_device_train_batch_size: int = argument(32, "Training batch size on each device.")
    per_device_eval_batch_size: int = argument(16, "Evaluation batch size on each device.")
    learning_rate: float = argument(2e-5, "Peak learning rate of the last block.")
    weight_decay: float = argument(0.01, "Weight decay, except of biases, norms, positions and [CLS].")
    warmup_steps: float = argument(
        0.01875, "Steps of linear warm-up, or a share of all. The default is 1,500 of 80,000 steps."
    )
    lr_scheduler_type: str = argument("linear", "Name of a schedule of Transformers.")
    head_multiplier: float = argument(10.0, "Factor of the head's learning rate.")
    layer_decay: float = argument(0.95, "Factor of the learning rate from a block to the one before it.")
    scale: list[float] = argument(
        [0.5, 2.0], "Range of the resized image's shorter side, relative to that of the crop."
    )
    ignored_labels: list[int] = argument([], "Labels in the masks to ignore, besides 255.")
    reduce_labels: bool = argument(False, "Ignore label 0 in the masks; label 1 is the first class (ADE20K).")

    expected = {
        "layer_decay": ("a number above 0, up to 1", lambda value: 0 < value <= 1),
        "head_multiplier": NOT_NEGATIVE,
        "scale": RANGE,
        "ignored_labels": PIXEL_VALUES,
    }

    def __post_init__(self):
        if self.num_train_epochs is None:
            self.num_train_epochs = 3.0
            self.max_steps = self.max_steps if self.max_steps > 0 else 80_000
        super().__post_init__()


def resize_pair(
    image: Image.Image, mask: torch.Tensor, size: Sequence[int], interpolation: InterpolationMode
) -> tuple[torch.Tensor, torch.Tensor]:
    """Resize an image and its mask, and return both as tensors. The mask is interpolated by `NEAREST_EXACT`, because
    `NEAREST`, torchvision's default for masks, would shift the mask by half a pixel."""
    pixels = v2.functional.resize(v2.functional.pil_to_tensor(image), size, interpolation, antialias=True)
    return pixels, v2.functional.resize(mask[None], size, InterpolationMode.NEAREST_EXACT)[0]


class SegmentationView:
    """Resize, crop and flip an image and its mask at random for training, and distort the colors of the image. If one
    class covers more than `MOST_OF_A_CLASS` of a crop's labeled pixels, another crop is drawn, up to 10 in all.

    Args:
        image_format (`ImageFormat`): The model's image format.
        read_mask (`Callable`): Reads a mask, see `MaskReader`.
        scale (`tuple[float, float]`): Range of the resized image's shorter side, relative to the crop's shorter side.
    """

    def __init__(self, image_format: ImageFormat, read_mask, scale: Sequence[float] = (0.5, 2.0)):
        self.formats = {"pixel_values": image_format}
        self.read_mask = read_mask
        self.sides = [max(round(factor * min(image_format.size)), 1) for factor in scale]
        fill = {tv_tensors.Image: image_format.fill, tv_tensors.Mask: IGNORED}
        self.crop = v2.RandomCrop(image_format.size, pad_if_needed=True, fill=fill)
        changes = {"brightness": 1 / 8, "contrast": 0.5, "saturation": 0.5, "hue": 0.05}
        jitters = [v2.RandomApply([v2.ColorJitter(**{name: value})], DISTORTION) for name, value in changes.items()]
        self.flip_and_distort = v2.Compose([v2.RandomHorizontalFlip(), *jitters])

    def __call__(self, image: Image.Image, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        # A very long image is cropped first, because resizing the whole image would take gigabytes.
        part = v2.RandomCrop([min(length, LONGEST * min(mask.shape)) for length in mask.shape])
        image, mask = part(image, tv_tensors.Mask(mask))
        shorter = int(torch.randint(self.sides[0], self.sides[1] + 1, ()))
        pixels, mask = resize_pair(image, mask, [shorter], self.formats["pixel_values"].interpolation)
        pair = tv_tensors.Image(pixels), tv_tensors.Mask(mask[None])
        for _ in range(10):
            pixels, mask = self.crop(*pair)
            counts = torch.bincount(mask[mask != IGNORED].flatten().int())
            if len(counts) and counts.max() <= MOST_OF_A_CLASS * counts.sum():
                break
        pixels, mask = self.flip_and_distort(pixels, mask)
        return {"pixel_values": pixels.as_subclass(torch.Tensor), "labels": mask[0].as_subclass(torch.Tensor)}


class SegmentationEvalView:
    """Resize an image and its mask to the model's image size for evaluation."""

    def __init__(self, image_format: ImageFormat, read_mask):
        self.formats = {"pixel_values": image_format}
        self.read_mask = read_mask

    def __call__(self, image: Image.Image, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        image_format = self.formats["pixel_values"]
        pixels, mask = resize_pair(image, mask, list(image_format.size), image_format.interpolation)
        return {"pixel_values": pixels, "labels": mask}


class PlainPairs(PlainImages):
    """Pairs of image and mask with the interface of a `datasets.Dataset`. The source is a list or a PyTorch dataset,
    such as torchvision's `VOCSegmentation`."""

    def __init__(self, source):
        super().__init__(source, datasets.Features(dict.fromkeys(("image", "mask"), datasets.Image())))

    def __getitem__(self, index: int) -> dict:
        image, mask = self.source[index]
        return {"image": image, "mask": mask}


class SegmentationTrainer(ImageTrainer):
    """Transformers' `Trainer` of semantic segmentation, with the settings of ViT-Adapter.

    Args:
        model (`PreTrainedModel`): A model for semantic segmentation.
        args (`SegmentationArguments`): The training arguments.
        train_dataset: A `datasets.Dataset` or stream with the columns `image` and `mask`, a PyTorch dataset or a list
            of pairs of PIL images, or a name that `load_masked_images` accepts.
        eval_dataset (*optional*): Images to choose the best model on, in a form that `train_dataset` accepts.
        processing_class: The model's image processor.
        kwargs: See `ImageTrainer`.
    """

    def __init__(
        self, model, args: SegmentationArguments, train_dataset, eval_dataset=None, processing_class=None, **kwargs
    ):
        image_format = ImageFormat.from_processor(processing_class)
        self.num_labels = model.config.num_labels
        if self.num_labels < 2:
            raise ValueError(f"The model has {self.num_labels} class, expected two or more to learn (num_labels).")
        read_mask = MaskReader(self.num_labels, args.ignored_labels, args.reduce_labels)
        # `ignored_labels` is saved in the configuration, because `frugalvit evaluate` reads it there.
        model.config.ignored_labels = list(args.ignored_labels)
        super().__init__(
            model,
            args,
            self.as_dataset(train_dataset),
            eval_dataset,
            SegmentationView(image_format, read_mask, args.scale),
            SegmentationEvalView(image_format, read_mask),
            processing_class=processing_class,
            learning_rate_factors=learning_rate_factors(model, args.head_multiplier, args.layer_decay),
            **kwargs,
        )
        self.scores = SegmentationScores(self.num_labels)

    def as_dataset(self, images):
        if isinstance(images, str | Path):
            return load_masked_images(str(images), "train")
        if not isinstance(images, datasets.Dataset | datasets.IterableDataset):
            return PlainPairs(images)
        images = load_table(images)
        for column in ("image", "mask"):
            images = images.cast_column(column, datasets.Image(decode=False))
        return images

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(pixel_values=inputs["pixel_values"]).logits
        loss = semantic_segmentation_loss(logits, inputs["labels"])
        return (loss, {"logits": logits}) if return_outputs else loss

    def measure(self, prediction, compute_result: bool = True) -> dict[str, float]:
        """Resize logits to the size of the masks, and add a batch to the scores. With `compute_result`, which is set
        for the last batch, return the scores."""
        logits = torch.as_tensor(prediction.predictions).float()
        labels = torch.as_tensor(prediction.label_ids)
        check_scores(logits)
        logits = F.interpolate(logits, labels.shape[-2:], mode="bilinear", align_corners=False)
        self.scores.add_batch(predictions=logits.argmax(1).cpu().numpy(), references=labels.cpu().numpy())
        if not compute_result:
            return {}
        scores = self.scores.compute()
        if scores["mean_iou"] is None:
            raise ValueError("All pixels of the evaluation masks are ignored; check ignored_labels and reduce_labels.")
        return {name: value for name, value in scores.items() if name != "iou"}

    def summary(self, metrics: dict[str, float]) -> str:
        measured = ", not evaluated"
        if "mean_iou" in metrics:
            size = " x ".join(map(str, self.eval_view.formats["pixel_values"].size))
            measured = f": mean IoU {metrics['mean_iou']:.2%}, measured at {size} pixels"
        kind = self.saved_model.config.model_type
        return f"A {kind} for semantic segmentation trained on {name_images(self.data_args)}{measured}."


def build_model(options: SegmenterArguments, data: MaskedDataArguments, reduce_labels: bool):
    """Return a float32 segmentation model and the model's image processor."""
    labels = {"num_labels": data.num_labels} if data.num_labels else {}
    if data.class_names:
        labels = label_fields(data.class_names)
    height = options.image_size[0]
    width = options.image_size[-1]
    preprocessing = {}
    if options.model:
        trust = options.trust_remote_code
        config = load_pretrained(AutoConfig, options.model, KIND, trust, **labels)
        if not labels and not any("Segmentation" in name for name in config.architectures or ()):
            raise ValueError(
                f"model is {options.model}, which has no classes for segmentation; pass num_labels or class_names."
            )
        set_drop_path(config, options.drop_path)
        if is_sparseformer(config):
            config.image_size = [height, width]
            config.resize_size = None
        elif options.num_latent_tokens:
            raise ValueError(
                f"num_latent_tokens is {options.num_latent_tokens}, expected a SparseFormer as model, which "
                f"{options.model} is not."
            )
        model = load_with_new_head(AutoModelForSemanticSegmentation, options.model, config, KIND, trust)
        if options.num_latent_tokens:
            model.resize_tokens(options.num_latent_tokens)
        given = load_pretrained(AutoImageProcessor, options.model, KIND, trust)
        for name in ("image_mean", "image_std", "resample", "do_normalize"):
            preprocessing[name] = getattr(given, name, None)
        preprocessing["do_normalize"] = bool(preprocessing["do_normalize"])
    else:
        if not labels:
            raise ValueError(f"A new {options.model_type} needs class_names or num_labels.")
        config = new_config(options.model_type, options.config_overrides, options.drop_path, **labels)
        model = AutoModelForSemanticSegmentation.from_config(config)
    size = {"height": height, "width": width}
    return model, SegformerImageProcessor(size=size, do_reduce_labels=reduce_labels, **preprocessing)


def make_parser() -> ArgumentParser:
    return ArgumentParser([SegmenterArguments, MaskedDataArguments, SegmentationArguments], PROG)


def make_trainer(
    options: SegmenterArguments, data: MaskedDataArguments, args: SegmentationArguments
) -> SegmentationTrainer:
    """Return the trainer for the arguments of the command."""
    start(args, options.model)
    train, evaluation, test = load_masked_splits(data, args.skip_corrupt)
    model, processor = build_model(options, data, args.reduce_labels)
    return SegmentationTrainer(
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
