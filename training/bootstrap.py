"""Bootstrap a SparseFormer from a vision transformer, without labels.

    accelerate launch -m frugalvit.training.bootstrap --teacher TEACHER --dataset IMAGES --output_dir OUT

In Gao et al., *Bootstrapping SparseFormers from Vision Foundation Models* (CVPR 2024), section 3.2, a new focusing
stage replaces the first third of the teacher's blocks. The second third is tuned, and the last third is frozen. The
loss compares the final embeddings of student and teacher. The paper names no optimizer; the default here is AdamW.
With `--student`, an existing student is trained further, for example with more tokens or larger images.
"""

import copy
import math
import os
import statistics
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from transformers import HfArgumentParser, PreTrainedModel
from transformers.backbone_utils import BackboneMixin

from ..configuration.configuration_base import set_image_size
from ..modeling.hosts import Anatomy, read_anatomy
from ..modeling.hosts.running import record_hidden_states
from ..modeling.image_format import ImageFormat
from .arguments import (
    POSITIVE,
    RANGE,
    ArgumentParser,
    DataArguments,
    ImageTrainingArguments,
    argument,
    run_program,
)
from .cards import share_error, strip_directory
from .data import check_classes, check_labels, check_single_label, class_names, hold_back, load_splits, match_classes
from .loading import bfloat16_is_fast, load_model
from .losses import AlignmentLoss, teacher_attention
from .students import (
    StudentArguments,
    build_student,
    continued_student,
    freeze,
    token_counts_to_train,
)
from .text import format_markdown
from .trainer import ImageTrainer, run_command, start
from .views import BootstrapView, EvalView, Views, as_images


PROG = "frugalvit bootstrap"
# For a new focusing stage, the default preset is "small" for images of up to this size in pixels, and "paper" for
# larger images.
LARGEST_SMALL = 96
# Defaults of training arguments by preset. "paper" and "small" train a new focusing stage: "paper" for images of 224
# pixels, "small" for images of 32 pixels. "small" has a higher learning rate than "paper", and a loss for each token.
# "inherited" is for students with the teacher's patch embedding. The learning rate of inherited weights is low,
# because large steps would destroy the weights.
PRESETS = {
    "paper": {
        "crop_scale": [0.5, 1.0],
        "token_loss_weight": 0.0,
        "learning_rate": 2e-4,
        "inherited_lr_factor": 0.1,
        "warmup_steps": 0.05,
        "per_device_train_batch_size": 128,
        "num_train_epochs": 20.0,
    },
    "small": {
        "crop_scale": [0.8, 1.0],
        "token_loss_weight": 4.0,
        "learning_rate": 6e-3,
        "inherited_lr_factor": 0.1,
        "warmup_steps": 0.025,
        "per_device_train_batch_size": 64,
        "num_train_epochs": 20.0,
    },
    "inherited": {
        "crop_scale": [0.5, 1.0],
        "token_loss_weight": 0.0,
        "learning_rate": 1e-3,
        "inherited_lr_factor": 0.02,
        "warmup_steps": 0.05,
        "per_device_train_batch_size": 64,
        "num_train_epochs": 20.0,
    },
}
# Configuration of new students by preset. The focusing stage of "small" has as many sampling points as the paper's
# focusing stage. Compared with the paper, "small" has half as many iterations and mixed points, and three quarters of
# the channels in stem and bottleneck.
STUDENT_FIELDS = {
    "paper": {"truncate": 1 / 3},
    "small": {
        "truncate": 1.0,
        "stem_channels": 48,
        "num_mixed_points": 16,
        "mixing_hidden_size": 96,
        "num_focusing_iterations": 2,
    },
    "inherited": {"truncate": 0.0},
}


@dataclass
class BootstrapArguments(ImageTrainingArguments):
    """Arguments of bootstrapping: the loss, the views of images, and the weights that are trained."""

    preset: str | None = argument(
        None,
        f"Defaults of the arguments below. Default: inherited or, with focusing paper, small up to {LARGEST_SMALL} "
        "pixels and paper above.",
        choices=[*PRESETS],
    )
    metric_for_best_model: str = argument("alignment", "Metric that chooses the best model.")
    num_train_epochs: float | None = argument(None, "Epochs. Default: 20, or 5 with student.")
    per_device_train_batch_size: int | None = argument(None, "Training batch size on each device. Default: by preset.")
    learning_rate: float | None = argument(None, "Peak learning rate. Default: by preset, a quarter with student.")
    inherited_lr_factor: float | None = argument(
        None, "Factor of the learning rate of inherited weights. Default: by preset."
    )
    warmup_steps: float | None = argument(
        None, "Steps of warm-up, or a share of all. Default: by preset, 0 with student."
    )
    weight_decay: float = argument(0.05, "Weight decay, except of biases, norms, RoIs, token embeddings and [CLS].")
    tune: float | None = argument(
        None, "Leading blocks to tune, a share or a count. Default: a third, or all with focusing inherited."
    )
    tune_all: bool = argument(False, "Tune every inherited block.")
    inherit_blocks: bool = argument(True, "Inherit the teacher's blocks; otherwise its classifier alone.")
    loss: str = argument(
        "cosine",
        "Cosine distance of embeddings (equation 5), or divergence of class probabilities.",
        choices=["cosine", "kl"],
    )
    temperature: float = argument(3.0, "Temperature of both distributions with loss kl.")
    label_loss_weight: float = argument(0.0, "Weight of the cross-entropy with labels.")
    token_loss_weight: float | None = argument(
        None, "Weight of the distance of tokens from the teacher's in their RoI. Default: by preset."
    )
    token_layers: list[int] | None = argument(None, "Layers of token_loss_weight, -1 for the last. Default: all.")
    token_distance: str = argument(
        "normalized", "Distance of tokens; raw for a LLaVA's tower.", choices=["normalized", "raw"]
    )
    dense_loss_weight: float = argument(0.0, "Weight of the distance of feature maps from the teacher's.")
    dense_layers: list[int] | None = argument(
        None, "Layers of dense_loss_weight as negative indices. Default: -1, the last."
    )
    crop_scale: list[float] | None = argument(
        None, "Lowest and highest share of the image's area in a crop. Default: by preset."
    )
    crop_ratio: list[float] = argument([3 / 4, 4 / 3], "Lowest and highest aspect ratio of a crop.")
    flip: float = argument(0.5, "Probability of a horizontal flip.")
    zoom_out: float = argument(1.0, "Place half of the images on a canvas with sides up to this many times theirs.")
    views_per_image: int | None = argument(
        None,
        "Repeat this many views of each image, and keep the teacher's embeddings on disk. Default: always new views.",
    )
    attn_implementation: str | None = argument(None, "The student's attention implementation. Default: eager on CPUs.")
    bf16: bool | None = argument(
        None,
        "Compute in bfloat16. Default: on a CPU whose matrix products measure twice as fast in bfloat16.",
        nargs="?",
        const=True,
    )

    expected = {
        "tune": (
            "a share from 0 to below 1, or a count",
            lambda value: 0 <= value < 1 or (value >= 1 and float(value).is_integer()),
        ),
        "crop_scale": RANGE,
        "crop_ratio": RANGE,
        "views_per_image": POSITIVE,
    }

    def __post_init__(self):
        # `TrainingArguments` rejects None, which selects the preset's warm-up.
        warmup_steps = self.warmup_steps
        self.warmup_steps = warmup_steps or 0
        if self.bf16 is None:
            on_cpu = self.use_cpu or torch.accelerator.current_accelerator(check_available=True) is None
            self.bf16 = on_cpu and not (self.fp16 or self.deepspeed) and bfloat16_is_fast()
            # `TrainingArguments` allows bfloat16 on a CPU only with `use_cpu`.
            self.use_cpu = self.use_cpu or self.bf16
        super().__post_init__()
        self.warmup_steps = warmup_steps


def resolve_arguments(args: BootstrapArguments, inherits_patches: bool, pixels: int, continued: bool):
    """Choose a preset, and return a copy of the arguments in which the preset's values replace None.

    Args:
        args (`BootstrapArguments`): The given arguments.
        inherits_patches (`bool`): Whether the student has its teacher's patch embedding instead of a focusing stage.
        pixels (`int`): Longer side of the teacher's images in pixels.
        continued (`bool`): Whether the student was bootstrapped before. If true, the defaults are five epochs without
            warm-up, at a quarter of the preset's learning rate.
    """
    args = copy.copy(args)
    if args.preset is None and inherits_patches:
        args.preset = "inherited"
    elif args.preset is None:
        args.preset = "paper" if continued or pixels > LARGEST_SMALL else "small"
    defaults = dict(PRESETS[args.preset])
    if continued:
        defaults["learning_rate"] /= 4
        defaults["warmup_steps"] = 0.0
        defaults["num_train_epochs"] = 5.0
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


class BootstrapTrainer(ImageTrainer):
    """Transformers' `Trainer` that bootstraps a SparseFormer from a vision transformer, without labels (Gao et al.
    2024, section 3.2). If `args.label_loss_weight` is 0, labels are only used to measure accuracy.

    Args:
        teacher (`PreTrainedModel`): A vision transformer.
        model (`PreTrainedModel`): The student. A student from `from_teacher` is new. A student from `from_pretrained`
            continues its bootstrapping. New and continued students have different defaults (see `resolve_arguments`).
        args (`BootstrapArguments`): The training arguments.
        train_dataset: Images, with or without labels: a `datasets.Dataset`, a PyTorch dataset (of images, of pairs of
            image and label, or of dictionaries with `image`), a list of PIL images or of paths, or a folder's name.
        eval_dataset (*optional*): Images to choose the best model on, in a form that `train_dataset` accepts.
        processing_class: The teacher's image processor.
        base_model (`str`, *optional*): The teacher's name in the model card. Default: the teacher's folder or hub id.
        kwargs: See `ImageTrainer`.
    """

    base_model_relation = "distill"

    def __init__(
        self,
        teacher: PreTrainedModel | Anatomy,
        model: PreTrainedModel,
        args: BootstrapArguments,
        train_dataset,
        eval_dataset=None,
        processing_class=None,
        base_model: str | None = None,
        **kwargs,
    ):
        config = model.config
        teacher_format = ImageFormat.from_processor(processing_class)
        if config.image_mean is None:
            image_size = config.image_size
            config.update(teacher_format.config_fields())
            set_image_size(config, image_size)
        student_format = ImageFormat.from_config(config)
        # A student with `name_or_path` was loaded by `from_pretrained`, so it was bootstrapped before.
        continued = bool(config.name_or_path)
        args = resolve_arguments(args, config.has_patch_embedding, max(teacher_format.size), continued)
        source = read_anatomy(teacher, teacher_format.size).source
        source.to(args.device).eval().requires_grad_(False)
        # The teacher is read on its device. An `Anatomy` contains views of fused layers, which do not move with them.
        self.anatomy = teacher = read_anatomy(source, teacher_format.size)
        self.align = AlignmentLoss(model, teacher, args)
        base_model = base_model or name_of(source)
        normalizations = [(each.mean, each.std) for each in (student_format, teacher_format)]
        if config.has_patch_embedding and normalizations[0] != normalizations[1]:
            raise ValueError(
                "The student inherits its teacher's patches and normalizes otherwise, by mean and std "
                "{} instead of {}. Pass image_processor to from_teacher.".format(*normalizations)
            )
        self.classifier = getattr(model, "classifier", None)
        self.labels = self.classifier and config.id2label
        if args.loss == "kl" or args.label_loss_weight:
            if self.classifier is None:
                raise ValueError(f"loss kl and label_loss_weight need a classifier, and {base_model} is none.")
            check_single_label(config, "loss kl or label_loss_weight")
        tuned = freeze(model, args, len(teacher.blocks))
        images = (as_images(train_dataset), None if eval_dataset is None else as_images(eval_dataset))
        if args.label_loss_weight:
            if class_names(images[0]) is None:
                raise ValueError("label_loss_weight compares classes, and the images have no labels; expected some.")
            check_classes(class_names(images[0]))
            check_labels(images[0], "train")
        train, evaluation, classes = match_classes(images, self.labels, args.label_loss_weight > 0)
        # Classifier and projection are frozen. Only the base model and, in backbones, the upsamplers are trained.
        reads_maps = isinstance(model, BackboneMixin) and args.dense_loss_weight
        learner = model if reads_maps else model.base_model
        names = [name for name, parameter in learner.named_parameters() if parameter in tuned]
        super().__init__(
            learner,
            args,
            train,
            evaluation,
            BootstrapView(student_format, teacher_format, args.crop_scale, args.crop_ratio, args.flip, args.zoom_out),
            EvalView(student_format, teacher_format),
            classes=classes,
            saved_model=model,
            learning_rate_factors=dict.fromkeys(names, args.inherited_lr_factor),
            base_model=base_model,
            **kwargs,
        )
        self.student = model
        self.kept_embeddings: torch.Tensor | None = None
        self.train_dataset.views_per_image = args.views_per_image
        if args.views_per_image and (isinstance(train, datasets.IterableDataset) or self.align.reads_states):
            raise ValueError(
                f"views_per_image is {args.views_per_image}, expected None with streaming, placement by content, "
                "token_loss_weight or dense_loss_weight: only the teacher's final embeddings are kept."
            )
        if self.is_fsdp_enabled and (args.token_loss_weight or args.dense_loss_weight):
            raise ValueError("FSDP records no hidden states; set token_loss_weight and dense_loss_weight to 0.")
        if args.bf16:
            source.to(torch.bfloat16)
            if teacher.classifier is not None:
                # The classifier is also called on float32 embeddings.
                teacher.classifier.float()
        model.to(args.device)

    def evaluation_views(self, images) -> Views:
        """Return evaluation views of images. Labels are converted to the student's class indices. If the student lacks
        one of the classes, labels are left out."""
        images, classes = match_classes([as_images(images)], self.labels, learns_labels=False)
        return Views(images, self.eval_view, None, self.skip_corrupt, classes)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the mean loss over the token counts of this step, see `token_counts_to_train`."""
        align = self.align
        recorder = record_hidden_states(self.anatomy) if align.reads_states else nullcontext()
        pixel_values = inputs.get("teacher_pixel_values", inputs["pixel_values"])
        with torch.no_grad(), self.accelerator.autocast(), recorder as states:
            if self.args.views_per_image:
                embedding = self.kept_embedding(pixel_values, inputs["epoch"], inputs["index"])
            else:
                embedding = self.anatomy.embed(pixel_values).float()
            targets = {"embedding": embedding}
            if align.predicts_attention:
                targets["attention"] = teacher_attention(self.anatomy, states)
            if align.align_tokens:
                targets["tokens"] = list(states)
            if align.align_maps:
                targets["maps"] = [each.float() for each in align.align_maps.teacher_maps(states)]
        losses = []
        # All processes and a resumed run use the same seed for a step, so they get the same token counts.
        for count in token_counts_to_train(self.student.config, f"{self.args.seed}-{self.state.global_step}"):
            outputs = model(inputs["pixel_values"], num_tokens=count, **align.options)
            losses.append(align(outputs, labels=inputs.get("labels"), **targets))
        loss = torch.stack(losses).mean()
        return (loss, outputs) if return_outputs else loss

    def kept_embedding(self, pixel_values: torch.Tensor, epochs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return the teacher's embeddings of repeated views, `(batch, embedding_size)` float32. Each process embeds a
        view when it first gets the view, and keeps the embedding in an unnamed file in the output folder."""
        if self.kept_embeddings is None:
            shape = (self.args.views_per_image, len(self.train_dataset), self.anatomy.embedding_size)
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.args.output_dir) as file:
                if hasattr(os, "posix_fallocate"):
                    # A full disk raises an OSError here. Later, it would end the process without a message.
                    os.posix_fallocate(file.fileno(), 0, 4 * math.prod(shape))
                self.kept_embeddings = torch.from_numpy(np.memmap(file, np.float32, shape=shape))
        places = epochs.cpu(), indices.cpu()
        embedding = self.kept_embeddings[places].to(pixel_values.device)
        # The file is filled with zeros at first.
        missing = ~embedding.any(1)
        if missing.any():
            embedding[missing] = self.anatomy.embed(pixel_values[missing]).float()
            self.kept_embeddings[places] = embedding.cpu()
        return embedding

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """Create Transformers' scheduler. If the focusing stage is new, the learning rate of inherited weights is 0
        during the warm-up."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        warmup = self.args.get_warmup_steps(num_training_steps)
        if not self.student.config.has_patch_embedding and hasattr(scheduler, "lr_lambdas"):
            rates = [group["initial_lr"] < self.args.learning_rate for group in scheduler.optimizer.param_groups]
            scheduler.lr_lambdas = [
                (lambda step, rate=rate: rate(step) if step >= warmup else 0.0) if inherited else rate
                for rate, inherited in zip(scheduler.lr_lambdas, rates, strict=True)
            ]
        return scheduler

    @torch.no_grad()
    def prediction_step(self, model, inputs, prediction_loss_only=False, ignore_keys=None):
        """Return a row of values for each image. The first values are the cosine similarities of the student's and
        the teacher's embedding, one for each token count. With labels, the next values are the student's accuracies (0
        or 1), one for each token count, and the last value is the teacher's accuracy."""
        embeddings = []
        labels = inputs.get("labels")
        with self.accelerator.autocast():
            target = self.anatomy.embed(inputs.get("teacher_pixel_values", inputs["pixel_values"])).float()
            for count in self.student.config.trained_token_counts:
                outputs = model(inputs["pixel_values"], num_tokens=count, **self.align.embedding_options)
                embeddings.append(self.align.project(outputs.pooler_output).float())
        found = [F.cosine_similarity(embedding, target) for embedding in embeddings]
        if labels is not None and self.classifier is not None:
            logits = [*map(self.classifier, embeddings), self.anatomy.classifier(target)]
            found += [(scores.argmax(1) == labels).float() for scores in logits]
        found = torch.stack(found, dim=1)
        return None, found, found.new_zeros(len(found))

    def measure(self, prediction) -> dict[str, float]:
        """Return the metrics of an evaluation.

        `alignment` is the cosine similarity of the student's and the teacher's embeddings, averaged over images and
        token counts. For classifiers, the metrics include `accuracy`, measured at the largest token count, and
        `teacher_accuracy`. With several token counts, the metrics include `alignment_COUNT` for each count and, for
        classifiers, `accuracy_COUNT`.
        """
        counts = self.student.config.trained_token_counts
        means = prediction.predictions.mean(0).tolist()
        alignments = means[: len(counts)]
        accuracies = means[len(counts) :]
        results = {"alignment": statistics.mean(alignments)}
        if accuracies:
            results |= {"accuracy": accuracies[-2], "teacher_accuracy": accuracies[-1]}
        if len(counts) > 1:
            results |= {f"alignment_{count}": value for count, value in zip(counts, alignments, strict=True)}
            results |= {f"accuracy_{count}": value for count, value in zip(counts, accuracies, strict=False)}
        return results

    def weights(self) -> dict[str, torch.Tensor]:
        learner = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        prefix = "" if learner is self.student else f"{self.student.base_model_prefix}."
        learned = self.accelerator.get_state_dict(self.model)
        return self.student.state_dict() | {f"{prefix}{key}": value for key, value in learned.items()}

    def summary(self, metrics: dict[str, float]) -> str:
        """Return a sentence about the result. With several token counts, a table follows."""
        counts = self.student.config.trained_token_counts
        with_class = " and [CLS]" if self.student.config.num_class_tokens else ""
        tokens = f"{', '.join(map(str, counts))} latent tokens{with_class}"
        choice = "" if len(counts) == 1 else ", of which a call chooses (`num_tokens`)"
        labels = "" if self.args.label_loss_weight else " without labels"
        text = f"A SparseFormer with {tokens}{choice}, bootstrapped from {strip_directory(self.base_model)}{labels}"
        if "alignment" not in metrics:
            return f"{text}, not evaluated."
        text += f": mean cosine with the teacher's embeddings {metrics['alignment']:.4f}"
        if "accuracy" in metrics:
            error = share_error(metrics["accuracy"], len(self.measured_dataset))
            text += f"; accuracy {metrics['accuracy']:.2%} ± {error:.2%}"
            text += f", the teacher's is {metrics['teacher_accuracy']:.2%}"
        names = [name for name in ("accuracy", "alignment") if f"{name}_{counts[0]}" in metrics]
        rows = [{"num_tokens": count} | {name: metrics[f"{name}_{count}"] for name in names} for count in counts]
        return f"{text}.\n\n{format_markdown(rows)}" if len(counts) > 1 else f"{text}."


def bootstrap(
    teacher: str | PreTrainedModel,
    images,
    num_tokens: int | list[int] | None = None,
    output: str | Path = "student",
    eval_images=None,
    processing_class=None,
    **options,
) -> PreTrainedModel:
    """Bootstrap a SparseFormer from a vision transformer, without labels. The SparseFormer learns to reproduce the
    embeddings of the vision transformer. To resume an interrupted call, repeat the call.

    Args:
        teacher (`str` or `PreTrainedModel`): A vision transformer, CLIP or SigLIP: its folder or hub id, or the model.
        images: The images to train on, see `BootstrapTrainer`.
        num_tokens (`int` or `list[int]`, *optional*): Number of latent tokens. With several numbers, each call of the
            student can choose one of them. Default: a quarter of the teacher's patches.
        output (`str`, *optional*, defaults to `"student"`): Folder for the student, its card and its checkpoints.
        eval_images (*optional*): Images to choose the best epoch on. Default: the data set's validation split, or else
            a tenth of the images.
        processing_class (*optional*): The teacher's image processor. Required if `teacher` is a model.
        options: Arguments of `frugalvit bootstrap`, for example `num_train_epochs=5`, `placement="content"`.

    Returns:
        `PreTrainedModel`: The student, on the CPU, in float32.
    """
    options["output_dir"] = str(output)
    loaded = None
    parts = None
    if isinstance(teacher, str | Path):
        options["teacher"] = str(teacher)
    else:
        options["teacher"] = name_of(teacher)
        loaded = (teacher, processing_class)
    if num_tokens is not None:
        options["num_tokens"] = [num_tokens] if isinstance(num_tokens, int) else list(num_tokens)
    if isinstance(images, str | Path) and (eval_images is None or isinstance(eval_images, str | Path)):
        options["dataset"] = [str(images)]
        options |= {} if eval_images is None else {"eval_dataset": [str(eval_images)]}
    else:
        parts = as_images(images), None if eval_images is None else as_images(eval_images)
        if eval_images is None and not isinstance(parts[0], datasets.IterableDataset):
            parts = hold_back(parts[0])
    student, data, args = HfArgumentParser([StudentArguments, DataArguments, BootstrapArguments]).parse_dict(options)
    trainer = make_trainer(student, data, args, loaded, parts)
    # The student's class is stored before the training, because FSDP changes the class.
    student_class = type(trainer.student)
    trainer.run()
    return student_class.from_pretrained(output, dtype=torch.float32)


def name_of(model: torch.nn.Module) -> str:
    """Return the folder or hub id that a model was loaded from. If there is none, describe the model's class."""
    return getattr(getattr(model, "config", None), "_name_or_path", "") or f"a {type(model).__name__}"


def make_parser() -> ArgumentParser:
    return ArgumentParser([StudentArguments, DataArguments, BootstrapArguments], PROG)


def make_trainer(
    options: StudentArguments,
    data: DataArguments,
    args: BootstrapArguments,
    teacher: tuple | None = None,
    parts: tuple | None = None,
) -> BootstrapTrainer:
    """Return the trainer for the arguments of the command.

    Args:
        options (`StudentArguments`), data (`DataArguments`), args (`BootstrapArguments`): The command's arguments.
        teacher (`tuple`, *optional*): A loaded teacher and its image processor, instead of `options.teacher`.
        parts (`tuple`, *optional*): Images to train and to evaluate on, instead of the data sets that `data` names.
    """
    start(args, options.teacher, options.student)
    if options.upsampler_hidden_size and not args.dense_loss_weight:
        raise ValueError("upsampler_hidden_size needs dense_loss_weight above 0, for example 1.")
    train, evaluation, test = (
        (*parts, None) if parts else load_splits(data, args.label_loss_weight > 0, args.skip_corrupt)
    )
    model, processor = teacher or load_model(
        options.teacher, "image-feature-extraction", "cpu", options.trust_remote_code
    )
    teacher_format = ImageFormat.from_processor(processor)
    anatomy = read_anatomy(model.requires_grad_(False), teacher_format.size)
    if options.student:
        student = continued_student(options)
    else:
        inherits_patches = options.focusing == "inherited"
        args = resolve_arguments(args, inherits_patches, max(teacher_format.size), continued=False)
        fields = STUDENT_FIELDS["inherited" if inherits_patches else args.preset]
        student = build_student(options, anatomy, teacher_format, args.inherit_blocks, **fields)
    if options.image_size:
        set_image_size(student.config, options.image_size)
    return BootstrapTrainer(
        anatomy,
        student,
        args,
        train,
        evaluation,
        processor,
        options.teacher,
        test_dataset=test,
        model_args=options,
        data_args=None if parts else data,
    )


def main(argv: list[str] | None = None) -> int:
    return run_command(make_parser(), make_trainer, argv)


if __name__ == "__main__":
    raise SystemExit(run_program(main, PROG))
