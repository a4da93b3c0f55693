"""Bootstrap a SparseFormer from a vision transformer, without labels.

    accelerate launch -m frugalvit.training.bootstrap --teacher TEACHER --dataset IMAGES --output_dir OUT

Gao et al., *Bootstrapping SparseFormers from Vision Foundation Models* (CVPR 2024), section 3.2: the student inherits
the teacher's blocks without the leading third, learns to focus from random weights, tunes the next third, keeps the
rest frozen, and aligns its final embedding with the teacher's. For teachers of more than 96 pixels the defaults are
the paper's; it names no optimizer, AdamW is our choice. Continued bootstrapping starts from `--student`, with more
tokens or pixels. `recipes/` has a file for each student of the paper, of ablations with an argument that it names.
"""

import copy
import functools
import statistics
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F
from accelerate.utils import DistributedType
from transformers import PreTrainedModel

from ..common.data import find_source
from ..common.loading import load_vision_model
from ..common.names import without_place
from ..common.precision import hold_teacher
from ..common.splits import load_splits, match_classes
from ..common.tables import format_markdown
from ..common.views import ImageFormat
from ..modeling.hosts import Anatomy, read_anatomy
from ..modeling.modeling_sparseformer import SparseFormerBackbone, SparseFormerPreTrainedModel
from .arguments import (
    ArgumentParser,
    DataArguments,
    ImageTrainingArguments,
    argument,
    check,
    check_from,
    check_ranges,
    check_shares,
    run_as_program,
)
from .augmentation import BootstrapView, PairedEvalView
from .cards import write_card
from .data import Views, as_images, draw_image, split_off
from .losses import AlignmentLoss, Targets, attended_cells
from .models import choose_attention
from .optimizers import parameter_groups, with_rates
from .students import (
    LARGEST_SMALL,
    StudentArguments,
    build_student,
    check_blocks,
    check_teacher,
    format_of,
    freeze,
    token_counts_to_train,
)
from .trainer import ImageTrainer, run_command, start


PROG = "frugalvit bootstrap"
# Arguments that are not given. "paper" is made for 224 pixels, and students of 32 pixels learn slowly with it: "small"
# has large steps, and tokens that are told what to hold. "inherited" is for students that begin as their teacher at a
# lower resolution, which large steps destroy.
RECIPES = {
    "paper": {
        "crop_scale": [0.5, 1.0],
        "token_loss_weight": 0.0,
        "learning_rate": 2e-4,
        "inherited_lr_factor": 0.1,
        "warmup_steps": 0.05,
        "per_device_train_batch_size": 128,
    },
    "small": {
        "crop_scale": [0.8, 1.0],
        "token_loss_weight": 4.0,
        "learning_rate": 6e-3,
        "inherited_lr_factor": 0.1,
        "warmup_steps": 0.025,
        "per_device_train_batch_size": 64,
    },
    "inherited": {
        "crop_scale": [0.5, 1.0],
        "token_loss_weight": 0.0,
        "learning_rate": 1e-3,
        "inherited_lr_factor": 0.02,
        "warmup_steps": 0.05,
        "per_device_train_batch_size": 64,
    },
}
# What their new students are made with. The focusing stage of "small" has the paper's sampling points, half its
# iterations and mixed points, three quarters of its stem channels and bottleneck.
NEW_STUDENTS = {
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


def by_recipe(name: str, help: str):
    """An argument whose default is the recipe's."""
    values = (f"{values[name]} ({recipe})" for recipe, values in RECIPES.items())
    return argument(None, f"{help} Default: {', '.join(values)}.")


@dataclass
class BootstrapArguments(ImageTrainingArguments):
    """`ImageTrainingArguments` of bootstrapping: the loss, the views of images, and what learns.

    Args:
        recipe (`str`, *optional*): Gives the values of arguments that are not given: `"paper"`, `"small"` or
            `"inherited"`; chosen by teacher and student if not given.

    Raises:
        ValueError: if a value does not fit.
    """

    recipe: str | None = argument(
        None,
        "Whose defaults apply, where an argument has one for each. Default: inherited for students that inherit "
        f"patches, else small for teachers of up to {LARGEST_SMALL} pixels without student, else paper.",
        choices=[*RECIPES],
    )
    metric_for_best_model: str = argument("alignment", "Metric that chooses the best model.")
    num_train_epochs: float | None = argument(None, "Epochs. Default: 20, or 5 with student.")
    per_device_train_batch_size: int | None = by_recipe("per_device_train_batch_size", "Images of a step on a device.")
    learning_rate: float | None = by_recipe("learning_rate", "Highest learning rate; a quarter with student.")
    inherited_lr_factor: float | None = by_recipe(
        "inherited_lr_factor", "Learning rate of inherited weights, in learning rates of the others."
    )
    warmup_steps: float | None = by_recipe(
        "warmup_steps", "Steps of warm-up, or a share of all, in which inherited weights rest; none with student."
    )
    weight_decay: float = argument(0.05, "Weight decay; none on biases, norms, RoIs, token embeddings and [CLS].")
    lr_scheduler_type: str = argument("cosine", "Schedule, a name of Transformers.")
    tune: float | None = argument(
        None,
        "Blocks to tune, from the first inherited one: a share of the teacher's, or a count. Default: a third, or all "
        "of a student that inherits patches.",
    )
    tune_all: bool = argument(False, "Tune every inherited block.")
    inherit_blocks: bool = argument(True, "Inherit the teacher's blocks, or its classifier alone.")
    loss: str = argument(
        "cosine", "cosine: of the final embeddings (eq. 5). kl: of the class distributions.", choices=["cosine", "kl"]
    )
    temperature: float = argument(3.0, "Of both distributions, for loss kl.")
    label_loss_weight: float = argument(0.0, "Weight of an added cross-entropy with the labels.")
    token_loss_weight: float | None = by_recipe(
        "token_loss_weight", "Weight of an added distance of each token from the teacher's where it looks."
    )
    token_layers: list[int] | None = argument(
        None, "Layers of these tokens, -1 for the last; a LLaVA reads -2. Default: all, the first one's inputs, too."
    )
    token_distance: str = argument(
        "normalized",
        "normalized: of LayerNorm-ed tokens. raw: of tokens as they are, which a LLaVA reads.",
        choices=["normalized", "raw"],
    )
    dense_loss_weight: float = argument(
        0.0, "Weight of an added distance of the student's feature map from the teacher's, for heads that read maps."
    )
    dense_layers: list[int] | None = argument(
        None, "Layers of these maps, from the last, -1, backwards; name those that a head reads. Default: -1."
    )
    elastic_loss_weight: float = argument(
        0.0, "With several num_tokens, weight of an added distance of each token from those of the largest count."
    )
    crop_scale: list[float] | None = by_recipe("crop_scale", "Lowest and highest share of the area that a crop shows.")
    crop_ratio: list[float] = argument([3 / 4, 4 / 3], "Lowest and highest aspect ratio of a crop.")
    flip: float = argument(0.5, "Probability of a horizontal flip.")
    zoom_out: float = argument(
        1.0,
        "Half of the images are put on a canvas, whose sides are up to so many times theirs: objects become smaller.",
    )
    canvas_images: float = argument(
        0.0, "With zoom_out, share of these canvases that show another image of the data set; others are plain."
    )
    attn_implementation: str | None = argument(
        None, "The student's attention in training. Default: eager on CPUs, whose fused attention goes back slowly."
    )

    def __post_init__(self):
        given = self.warmup_steps
        self.warmup_steps = given or 0
        super().__post_init__()
        self.warmup_steps = given
        check_blocks(self, "tune")
        check_from(self, 0, "label_loss_weight", "elastic_loss_weight", "token_loss_weight", "dense_loss_weight")
        check_from(self, 0, "inherited_lr_factor")
        check_shares(self, "flip", "canvas_images")
        check_ranges(self, "crop_scale", "crop_ratio")
        check(self, lambda value: value > 0, "a positive number", "temperature", "learning_rate")
        check(self, lambda value: 1 <= value <= 100, "1 to 100", "zoom_out")
        if self.canvas_images and self.zoom_out == 1:
            raise ValueError(f"canvas_images is {self.canvas_images}, expected 0 without zoom_out above 1.")

    def complete(self, recipe: str, continues: bool):
        """Fill in what was not given, by a recipe; one that `continues` is shorter and starts with smaller steps."""
        self.recipe, values = recipe, RECIPES[recipe] | {"num_train_epochs": 20.0}
        if continues:
            shorter = {"learning_rate": values["learning_rate"] / 4, "warmup_steps": 0.0, "num_train_epochs": 5.0}
            values |= shorter
        for name, value in values.items():
            if getattr(self, name) is None:
                setattr(self, name, value)


class BootstrapTrainer(ImageTrainer):
    """Transformers' `Trainer` that bootstraps a SparseFormer from a vision transformer, without labels (Gao et al.
    2024, section 3.2).

    ```python
    student = SparseFormerForImageClassification.from_teacher(teacher, num_latent_tokens=49)
    trainer = BootstrapTrainer(teacher, student, BootstrapArguments(output_dir="student"), train_dataset=images)
    trainer.train()
    trainer.save_model()
    ```

    The teacher is frozen, and so are the student's blocks that `args.tune` does not choose. Labels measure accuracy
    and no more, unless `args.label_loss_weight` is given.

    Args:
        teacher (`PreTrainedModel` or `str`): A vision transformer, or its folder or hub id.
        model (`SparseFormerPreTrainedModel`): The student, of `from_teacher`, or one to go on from.
        args (`BootstrapArguments`): How it is trained.
        train_dataset: Images, with or without labels: a `datasets.Dataset`, a dataset of PyTorch (of images, or pairs
            of image and label, or dictionaries with `image`), a list of PIL images or of paths, or a folder's name.
        eval_dataset (*optional*): The same, to choose the best epoch on.
        processing_class (*optional*): The teacher's image processor; needed where `teacher` is a model.
        callbacks (*optional*): As Transformers has them.
        base_model (`str`, *optional*): The teacher's name, for the card; by default where it was loaded from.

    Raises:
        ValueError: if teacher, student, images and arguments do not fit each other.
    """

    def __init__(
        self,
        teacher: PreTrainedModel | Anatomy | str,
        model: SparseFormerPreTrainedModel,
        args: BootstrapArguments,
        train_dataset,
        eval_dataset=None,
        processing_class=None,
        callbacks=None,
        base_model: str | None = None,
    ):
        args = copy.copy(args)
        if isinstance(teacher, str | Path):
            base_model = str(teacher)
            teacher, processor = load_vision_model(base_model, "cpu")
            processing_class = processing_class or processor
        if processing_class is None:
            raise ValueError("The teacher is a model; give its image processor, processing_class.")
        teacher_format, student_format = ImageFormat.from_processor(processing_class), format_of(model.config)
        if not isinstance(teacher, Anatomy):
            base_model = base_model or teacher.config._name_or_path or "a model without a name"
            teacher = read_anatomy(teacher.requires_grad_(False), teacher_format.size)
            check_teacher(teacher, base_model)
        check_normalization(model, student_format, teacher_format)
        args.complete(args.recipe or recipe_of(model.config.embeds_patches, teacher_format, False), False)
        self.anatomy, self.student, self.classify = teacher, model, getattr(model, "classifier", None)
        self.tuned = freeze(model, args, len(teacher.blocks))
        if self.classify is None and (args.loss == "kl" or args.label_loss_weight):
            raise ValueError(
                f"loss kl and label_loss_weight compare classes, and {base_model} is no classifier; align its "
                "embedding (loss cosine)."
            )
        images = (as_images(train_dataset), None if eval_dataset is None else as_images(eval_dataset))
        learns_labels, labels = args.label_loss_weight > 0, self.classify and model.config.id2label
        train, evaluation, _, classes = match_classes((*images, None), labels, learns_labels)
        if args.canvas_images and isinstance(train, datasets.IterableDataset):
            raise ValueError("canvas_images chooses images by their numbers, and a stream has none; give it 0.")
        view = BootstrapView(
            student_format,
            teacher_format,
            args.crop_scale,
            args.crop_ratio,
            args.flip,
            args.zoom_out,
            args.canvas_images,
            functools.partial(draw_image, train),
        )
        # A classifier or projection stays frozen, so the base model alone learns; of a backbone, upsamplers, too.
        reads_maps = isinstance(model, SparseFormerBackbone) and args.dense_loss_weight
        super().__init__(
            model=model if reads_maps else model.base_model,
            args=args,
            train_dataset=train,
            eval_dataset=evaluation,
            train_view=view,
            eval_view=PairedEvalView(student_format, teacher_format),
            classes=classes,
            callbacks=callbacks,
            base_model=base_model,
        )
        self.align = AlignmentLoss(model, teacher, args)
        self.hold_teacher()
        choose_attention(model, args.attn_implementation, args.device)
        model.to(args.device)

    def evaluation_views(self, images, skip_corrupt: bool) -> Views:
        """As in `ImageTrainer`; labels are the student's classes by name, or are left out."""
        labels = self.classify and self.student.config.id2label
        images, _, _, classes = match_classes((as_images(images), None, None), labels, False)
        return Views(images, self.eval_view, None, skip_corrupt, classes)

    def hold_teacher(self):
        """Freeze the teacher on the device."""
        args, anatomy = self.args, self.anatomy
        for name in ("token_loss_weight", "dense_loss_weight", "elastic_loss_weight"):
            if getattr(args, name) and self.accelerator.distributed_type == DistributedType.FSDP:
                raise ValueError(f"{name} needs hidden states, which FSDP's classes do not record; set it to 0.")
        anatomy.source.to(args.device)
        hold_teacher(self.accelerator, anatomy.source, anatomy.classifier)
        self.states: list[torch.Tensor] = []

    def train(self, *args, **kwargs):
        """As in Transformers."""
        reads_states = self.align.align_tokens or self.align.align_maps or self.align.foretells
        with self.anatomy.watch() if reads_states else nullcontext([]) as self.states:
            return super().train(*args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The mean loss over the counts of tokens that this step trains."""
        targets, losses, largest = self.targets_of(inputs), [], None
        # The same in all processes, and when a run goes on; the largest first.
        for count in token_counts_to_train(self.student.config, f"{self.args.seed}-{self.state.global_step}"):
            outputs = model(inputs["pixel_values"], num_tokens=count, **self.align.outputs_asked_for)
            losses.append(self.align(outputs, targets, inputs.get("labels"), largest))
            largest = largest or outputs
        loss = torch.stack(losses).mean()
        return (loss, outputs) if return_outputs else loss

    def targets_of(self, inputs: dict) -> Targets:
        """The teacher's embeddings of a batch, and its attention, maps and hidden states where the loss reads them."""
        align, maps = self.align, []
        with torch.no_grad(), self.accelerator.autocast():
            embedding = self.anatomy.embed(inputs.get("teacher_pixel_values", inputs["pixel_values"])).float()
            attention = attended_cells(self.anatomy, self.states) if align.foretells else None
            if align.align_maps:
                maps = [each.float() for each in align.align_maps.of_teacher(self.states)]
        return Targets(
            embedding,
            None if attention is None else attention.unflatten(1, self.anatomy.grid),
            list(self.states) if align.align_tokens else [],
            maps,
        )

    def parameter_groups(self, model) -> list[dict]:
        rates = dict.fromkeys(self.tuned, self.args.inherited_lr_factor)
        return with_rates(parameter_groups(model, self.args.weight_decay), rates, self.args.learning_rate)

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """As in Transformers; inherited weights rest during the warm-up if the focusing stage is new."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        warmup = self.args.get_warmup_steps(num_training_steps)
        if not self.student.config.embeds_patches and hasattr(scheduler, "lr_lambdas"):
            rates = [group["initial_lr"] < self.args.learning_rate for group in scheduler.optimizer.param_groups]
            scheduler.lr_lambdas = [
                (lambda step, rate=rate: rate(step) if step >= warmup else 0.0) if inherited else rate
                for rate, inherited in zip(scheduler.lr_lambdas, rates, strict=True)
            ]
        return scheduler

    @torch.no_grad()
    def prediction_step(self, model, inputs, prediction_loss_only=False, ignore_keys=None):
        """Return, for each image, its cosine with the teacher's embedding at each count of tokens and, with labels,
        whether these and the teacher classify it rightly."""
        inputs = self._prepare_inputs(inputs)
        counts, labels = self.student.config.trained_token_counts, inputs.get("labels")
        with self.accelerator.autocast():
            target = self.anatomy.embed(inputs.get("teacher_pixel_values", inputs["pixel_values"])).float()
            embeddings = [self.embed(model, inputs["pixel_values"], count) for count in counts]
        found = [F.cosine_similarity(embedding, target) for embedding in embeddings]
        if labels is not None and self.classify is not None:
            logits = [*map(self.classify, embeddings), self.anatomy.classifier(target)]
            found += [(scores.argmax(1) == labels).float() for scores in logits]
        found = torch.stack(found, dim=1)
        return None, found, found.new_zeros(len(found))

    def embed(self, model, pixel_values: torch.Tensor, num_tokens: int) -> torch.Tensor:
        outputs = model(pixel_values, num_tokens=num_tokens, **self.align.embedding_asked_for)
        return self.align.project(outputs.pooler_output).float()

    def measure(self, prediction) -> dict[str, float]:
        """`alignment`, the mean cosine of student's and teacher's embeddings, and, of classifiers where there are
        labels, `accuracy` and `teacher_accuracy`.

        If a student is for several counts of tokens, `alignment` is the mean over them and `accuracy` that of the
        largest; `alignment_COUNT` and `accuracy_COUNT` are those of each.
        """
        counts, means = self.student.config.trained_token_counts, prediction.predictions.mean(0).tolist()
        alignments, accuracies = means[: len(counts)], means[len(counts) :]
        results = {"alignment": statistics.mean(alignments)}
        if accuracies:
            results |= {"accuracy": accuracies[-2], "teacher_accuracy": accuracies[-1]}
        if len(counts) > 1:
            results |= {f"alignment_{count}": value for count, value in zip(counts, alignments, strict=True)}
            results |= {f"accuracy_{count}": value for count, value in zip(counts, accuracies, strict=False)}
        return results

    @property
    def trained(self) -> SparseFormerPreTrainedModel:
        return self.student

    def weights(self) -> dict[str, torch.Tensor]:
        learner = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        name = next(name for name, module in self.student.named_modules() if module is learner)
        prefix = f"{name}." if name else ""
        learned = self.accelerator.get_state_dict(self.model)
        return self.student.state_dict() | {f"{prefix}{key}": value for key, value in learned.items()}

    def write_card(self, folder: Path):
        # How a backbone is loaded says how it is used, too.
        write_card(folder, self, use="" if isinstance(self.student, SparseFormerBackbone) else None)

    def summary(self, metrics: dict[str, float]) -> str:
        """The result in a sentence, and a table of it if there are several counts of tokens."""
        config = self.student.config
        counts, labels = config.trained_token_counts, self.args.label_loss_weight > 0
        tokens = f"{', '.join(map(str, counts))} latent tokens{' and [CLS]' if config.use_cls_token else ''}"
        choice = "" if len(counts) == 1 else ", of which a call chooses (`num_tokens`)"
        text = f"A SparseFormer with {tokens}{choice}, bootstrapped from {without_place(self.base_model)}"
        text = f"{text}{'' if labels else ' without labels'}"
        if "alignment" not in metrics:
            return f"{text}, not evaluated."
        if "accuracy" in metrics:
            own, teachers = metrics["accuracy"], metrics["teacher_accuracy"]
            text = f"{text}: accuracy {own:.2%}{self.of_images}, the teacher's is {teachers:.2%}."
        else:
            text = f"{text}: mean cosine with the teacher's embeddings {metrics['alignment']:.4f}{self.of_images}."
        if len(counts) == 1:
            return text
        names = [name for name in ("accuracy", "alignment") if f"{name}_{counts[0]}" in metrics]
        rows = [{"num_tokens": count} | {name: metrics[f"{name}_{count}"] for name in names} for count in counts]
        return f"{text}\n\n{format_markdown(rows)}"


def recipe_of(inherits_patches: bool, teacher_format: ImageFormat, continues: bool) -> str:
    """The recipe for a student, new or continued, of a teacher of such images."""
    if inherits_patches:
        return "inherited"
    return "paper" if continues or max(teacher_format.size) > LARGEST_SMALL else "small"


def check_normalization(student, student_format: ImageFormat, teacher_format: ImageFormat):
    """Raise a ValueError if a student that inherits patches normalizes images otherwise than its teacher."""
    own, teachers = ((each.mean, each.std) for each in (student_format, teacher_format))
    if student.config.embeds_patches and own != teachers:
        raise ValueError(
            f"The student inherits its teacher's patches and normalizes otherwise: mean and std are {own}, the "
            f"teacher's {teachers}. Give them to from_teacher: image_mean, image_std."
        )


def bootstrap(
    teacher: str | PreTrainedModel,
    images,
    num_tokens: int | list[int] | None = None,
    output: str | Path = "student",
    eval_images=None,
    processing_class=None,
    **options,
) -> SparseFormerPreTrainedModel:
    """Bootstrap a SparseFormer, without labels, that embeds images as a vision transformer does.

    ```python
    student = bootstrap("path/to/teacher", images="path/to/images", num_tokens=[16, 36, 64], output="student")
    ```

    A call that was interrupted goes on when it is made again.

    Args:
        teacher (`str` or `PreTrainedModel`): A vision transformer, CLIP or SigLIP: its folder or hub id, or the model.
        images: See `BootstrapTrainer`'s `train_dataset`.
        num_tokens (`int` or `list[int]`, *optional*): Latent tokens, or the counts that one student is to serve; a
            quarter of the teacher's if not given.
        output (`str`, *optional*, defaults to `"student"`): Folder of the student, its card and its checkpoints.
        eval_images (*optional*): Images to choose the best epoch on. If not given, those that a folder or data set has
            for that, or else a tenth of `images`, which is held back.
        processing_class (*optional*): The teacher's image processor; needed where `teacher` is a model.
        options: Arguments of `frugalvit bootstrap`, for example `num_train_epochs=5`, `focusing="inherited"`.

    Returns:
        `SparseFormerPreTrainedModel`: The student, on the CPU, in float32.

    Raises:
        ValueError: if teacher, images and arguments do not fit each other, or there is no such argument.
    """
    is_named = isinstance(teacher, str | Path)
    if not is_named and processing_class is None:
        raise ValueError("The teacher is a model; give its image processor, processing_class.")
    options["teacher"] = str(teacher if is_named else teacher.config._name_or_path or "a model without a name")
    options["output_dir"] = str(output)
    if num_tokens is not None:
        options["num_tokens"] = [num_tokens] if isinstance(num_tokens, int) else list(num_tokens)
    parts = None
    if isinstance(images, str | Path) and (eval_images is None or isinstance(eval_images, str | Path)):
        options["dataset"] = [str(images)]
        options |= {} if eval_images is None else {"eval_dataset": [str(eval_images)]}
    else:
        parts = as_images(images), None if eval_images is None else as_images(eval_images)
        if eval_images is None and not isinstance(parts[0], datasets.IterableDataset):
            parts = split_off(parts[0])
    groups = make_parser().parse_dict(options)
    trainer = make_trainer(*groups, None if is_named else (teacher, processing_class), parts)
    trainer.command = "frugalvit.bootstrap"
    # FSDP changes it.
    student_class = type(trainer.student)
    trainer.run(None if parts else groups[1], trainer.test_images)
    return student_class.from_pretrained(output, dtype=torch.float32)


def make_parser() -> ArgumentParser:
    return ArgumentParser(
        [StudentArguments, DataArguments, BootstrapArguments],
        PROG,
        "Bootstrap a SparseFormer from a vision transformer, without labels. (A BootstrappedViT is another method's: "
        "`frugalvit joint` trains it.)",
    )


def make_trainer(
    options: StudentArguments,
    data: DataArguments,
    args: BootstrapArguments,
    teacher: tuple | None = None,
    parts: tuple | None = None,
) -> BootstrapTrainer:
    """Return the trainer for the arguments of the command.

    Args:
        options, data, args: The arguments.
        teacher (pair of model and image processor, *optional*): The teacher, if it is loaded already.
        parts (pair of images, *optional*): Images to train and to evaluate on, in the place of those of `data`.
    """
    start(args)
    # What is not there is said before a teacher is loaded.
    for images in () if parts else filter(None, (data.dataset, data.eval_dataset)):
        find_source(images, data.dataset_config)
    if options.upsampler_hidden_size and not args.dense_loss_weight:
        raise ValueError(
            "upsampler_hidden_size is for maps, which nothing aligns; give dense_loss_weight, for example 1."
        )
    teacher, processor = teacher or load_vision_model(options.teacher, "cpu", options.trust_remote_code)
    teacher_format = ImageFormat.from_processor(processor)
    recipe = args.recipe or recipe_of(options.focusing == "inherited", teacher_format, options.student is not None)
    args.complete(recipe, options.student is not None)
    train, evaluation, test = (*parts, None) if parts else load_splits(data, args.label_loss_weight > 0)
    anatomy = read_anatomy(teacher.requires_grad_(False), teacher_format.size)
    check_teacher(anatomy, options.teacher)
    student = build_student(options, anatomy, teacher_format, args.inherit_blocks, **NEW_STUDENTS[recipe])
    trainer = BootstrapTrainer(anatomy, student, args, train, evaluation, processor, base_model=options.teacher)
    trainer.test_images = test
    return trainer


def main(argv: list[str] | None = None) -> int:
    """Train as a command line says."""
    return run_command(make_parser(), make_trainer, argv)


if __name__ == "__main__":
    run_as_program(main, PROG)
