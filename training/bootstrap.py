"""Bootstrap a SparseFormer from a vision transformer, without labels.

    accelerate launch -m frugalvit.training.bootstrap --teacher TEACHER --dataset IMAGES --output OUT

Gao et al., *Bootstrapping SparseFormers from Vision Foundation Models* (CVPR 2024), section 3.2: the student inherits
the teacher's blocks without the leading third, learns to focus from random weights, tunes the next third, keeps the
rest frozen, and aligns its final embedding with the teacher's. For teachers of more than 96 pixels the defaults are
the paper's; it names no optimizer, AdamW is our choice. Continued bootstrapping starts from `--student`, with more
tokens or pixels. `recipes/` has a file for each student of the paper, of ablations with an option that it names.
"""

import copy
import functools
import statistics
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedModel

from ..common.loading import load_vision_model
from ..common.metrics import TopKAccuracy
from ..common.precision import hold_teacher
from ..common.sources import find_source
from ..common.splits import hold_back, load_splits, match_classes
from ..common.views import ImageFormat
from ..modeling.hosts import Anatomy, read_anatomy
from ..modeling.modeling_sparseformer import SparseFormerBackbone, SparseFormerPreTrainedModel
from .components.arguments import DataArguments, RunArguments, as_words, fill_groups, run_as_program
from .components.attended_cells import attended_cells
from .components.augmentation import BootstrapView, PairedEvalView
from .components.cards import choice_of_epoch, count_measured, say_license, write_card
from .components.checkpoints import TrainingState
from .components.images import PlainImages, as_images, draw_image
from .components.models import choose_attention
from .components.runs import ImageTrainingArguments, start_run, training_arguments
from .components.side_by_side import compare, contenders_of, describe, introduce
from .components.students import (
    apply_recipe,
    build_optimizer,
    build_student,
    check_teacher,
    fill_in,
    format_of,
    freeze,
    recipe_of,
    token_counts_to_train,
)
from .components.teacher_cache import TeacherCache
from .losses import AlignmentLoss, Targets, foretells_attention
from .options.bootstrap import (
    GROUPS,
    PROG,
    RECIPES,
    AlignmentArguments,
    ScheduleArguments,
    check_blocks,
    parse,
)
from .trainer import ImageTrainer


@dataclass
class BootstrapArguments(AlignmentArguments, ScheduleArguments, ImageTrainingArguments):
    """Transformers' `TrainingArguments`, and the options of `frugalvit bootstrap` by the same names.

    Arguments of `TrainingArguments` about optimizer and schedule, such as `optim` and `warmup_steps`, are not read.
    The schedule has a warm-up in which inherited weights rest: see `learning_rate`, `inherited_learning_rate`,
    `warmup_epochs`, `weight_decay` and `optimizer`.

    Args:
        recipe (`str`, *optional*): Gives the values of arguments that are not given: `"paper"`, `"small"` or
            `"inherited"`; chosen by teacher and student if not given.
        tune (`float`, *optional*): Blocks to tune, from the first inherited one on: a share of the teacher's, or, from
            1 on, a count. If not given, a third, or all of a student that inherits patches.
        tune_all (`bool`, *optional*, defaults to `False`): Tune every inherited block.
        inherit_blocks (`bool`, *optional*, defaults to `True`): Whether the student's blocks are the teacher's.
        num_train_epochs (`float`, *optional*): Epochs; 20 if not given.
        per_device_train_batch_size (`int`, *optional*): Images of a step on a device; the recipe's batch, shared out
            among processes and accumulation steps, if not given.

    Raises:
        ValueError: if a value does not fit.
    """

    recipe: str | None = None
    tune: float | None = None
    tune_all: bool = False
    inherit_blocks: bool = True
    num_train_epochs: float | None = None
    per_device_train_batch_size: int | None = None

    def __post_init__(self):
        check_blocks(self, "tune")


class BootstrapTrainer(ImageTrainer):
    """Transformers' `Trainer` that bootstraps a SparseFormer from a vision transformer, without labels (Gao et al.
    2024, section 3.2).

    ```python
    student = SparseFormerForImageClassification.from_teacher(teacher, num_latent_tokens=49)
    trainer = BootstrapTrainer(teacher, student, BootstrapArguments(output_dir="student"), train_dataset=images)
    trainer.train()
    ```

    The teacher is frozen, and so are the student's blocks that `args.tune` does not choose. Labels measure accuracy
    and no more, unless `args.label_loss_weight` is given. The best student lies in the output folder, as a complete
    repository; without an `eval_dataset`, it is that of the last epoch. A run that was killed goes on by the same
    call.

    Args:
        teacher (`PreTrainedModel` or `str`): A vision transformer, or its folder or hub id.
        model (`SparseFormerPreTrainedModel`): The student, of `from_teacher`, or one to go on from.
        args (`BootstrapArguments`): How it is trained.
        train_dataset: Images, with or without labels: a `datasets.Dataset`, a dataset of PyTorch (of images, or pairs
            of image and label, or dictionaries with `image`), a list of PIL images or of paths, or a folder's name.
        eval_dataset, test_dataset (*optional*): The same, to choose the best epoch on and to measure it on.
        processing_class (*optional*): The teacher's image processor; needed where `teacher` is a model.
        callbacks (*optional*): As Transformers has them.
        run, data (*optional*): The arguments of a command, as of `ImageTrainer`.
        base_model (`str`, *optional*): The teacher's name, for the card; by default where it was loaded from.
        attn_implementation (`str`, *optional*): The student's attention; by default "eager" on CPUs, else the model's.
        compile_teacher (`bool`, *optional*, defaults to `False`): Run the teacher through `torch.compile`.

    Raises:
        ValueError: if teacher, student, images and arguments do not fit each other.
    """

    metric = "alignment"

    def __init__(
        self,
        teacher: PreTrainedModel | str,
        model: SparseFormerPreTrainedModel,
        args: BootstrapArguments,
        train_dataset,
        eval_dataset=None,
        test_dataset=None,
        processing_class=None,
        callbacks=None,
        *,
        run: RunArguments | None = None,
        data: DataArguments | None = None,
        base_model: str | None = None,
        attn_implementation: str | None = None,
        compile_teacher: bool = False,
    ):
        args = copy.copy(args)
        if isinstance(teacher, str | Path):
            base_model = str(teacher)
            teacher, processor = load_vision_model(base_model, "cpu")
            processing_class = processing_class or processor
        if processing_class is None:
            raise ValueError("The teacher is a model; give its image processor, processing_class.")
        self.teacher_format = ImageFormat.from_processor(processing_class)
        self.student_format = format_of(model.config)
        if not isinstance(teacher, Anatomy):
            base_model = base_model or teacher.config._name_or_path or "a model without a name"
            teacher = read_anatomy(teacher.requires_grad_(False), self.teacher_format.size)
            check_teacher(teacher, base_model)
        normalized = [(form.mean, form.std) for form in (self.teacher_format, self.student_format)]
        if model.config.embeds_patches and normalized[0] != normalized[1]:
            raise ValueError(
                f"The student inherits its teacher's patches and normalizes otherwise: mean and std are "
                f"{normalized[1]}, the teacher's {normalized[0]}. Give them to from_teacher: image_mean, image_std."
            )
        self.anatomy, self.student = teacher, model
        self.complete(args)
        self.tuned = freeze(model, args, len(self.anatomy.blocks))
        self.classify = getattr(model, "classifier", None)
        if self.classify is None and (args.loss == "kl" or args.label_loss_weight):
            raise ValueError(
                f"--loss kl and --label-loss-weight compare classes, and {base_model} is no classifier; align its "
                "embedding (--loss cosine)."
            )
        parts = (as_images(train_dataset), *(images and as_images(images) for images in (eval_dataset, test_dataset)))
        train, evaluation, test, classes = match_classes(
            parts, self.classify and model.config.id2label, args.label_loss_weight > 0
        )
        if args.canvas_images and isinstance(train, datasets.IterableDataset):
            raise ValueError("--canvas-images chooses images by their numbers, and a stream has none; give it 0.")
        view = BootstrapView(
            *(self.student_format, self.teacher_format, args.crop_scale, args.crop_ratio, args.flip),
            *(args.zoom_out, args.canvas_images, functools.partial(draw_image, train)),
        )
        # A classifier or projection stays frozen, so the base model alone learns; of a backbone, upsamplers, too.
        reads_maps = isinstance(model, SparseFormerBackbone) and args.dense_loss_weight
        super().__init__(
            model=model if reads_maps else model.base_model,
            args=args,
            run=run,
            data=data,
            train=(train, view),
            evaluation=(evaluation, PairedEvalView(self.student_format, self.teacher_format)),
            test=test,
            classes=classes,
            loader_options={"repeats": args.repeats, "view_epochs": args.view_epochs},
            callbacks=callbacks,
            base_model=base_model,
        )
        self.align = AlignmentLoss(model, self.anatomy, args)
        self.hold_teacher(compile_teacher, view)
        choose_attention(model, attn_implementation, self.accelerator.device)
        model.to(self.accelerator.device)
        # What the teacher makes of each batch of a loader's images, which are the same in every epoch.
        self.known: dict[object, dict[int, torch.Tensor]] = defaultdict(dict)

    def complete(self, args: BootstrapArguments):
        """Fill in the arguments that were not given, by the recipe."""
        args.recipe = args.recipe or recipe_of(self.student.config, self.teacher_format.size)
        values = RECIPES[args.recipe] | {"num_train_epochs": 20}
        parts = args.world_size * args.gradient_accumulation_steps
        values["per_device_train_batch_size"] = max(values["batch_size"] // parts, 1)
        if args.teacher_cache:
            values["token_loss_weight"] = 0.0
        fill_in([args], values)

    def outline(self) -> str:
        """The length of the training and the images that it is measured on, in a sentence."""
        run, data = self.run, self.data
        length = f"{run.epochs} x {self.loader.steps_per_epoch:,} x {run.batch_size:,}"
        images, tested = self.evaluation_part[0], ""
        evaluated = "not" if images is None else f"on {len(images):,} images, {data.evaluated}"
        if self.test_images is not None:
            tested = f"; the best epoch tested on {len(self.test_images):,} images, {data.tested}"
        return f"Recipe {self.args.recipe}; epochs x steps x images: {length}; evaluated {evaluated}{tested}."

    def hold_teacher(self, compiles: bool, view: BootstrapView):
        """Freeze the teacher on the device, and open the cache of its embeddings if there is one."""
        args, anatomy = self.args, self.anatomy
        anatomy.source.to(self.accelerator.device)
        for name in ("token_loss_weight", "dense_loss_weight", "elastic_loss_weight"):
            if getattr(args, name) and self.accelerator.distributed_type == DistributedType.FSDP:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"{option} needs hidden states, which FSDP's classes do not record; give {option} 0, or leave "
                    "FSDP out."
                )
        # A cache serves students of all placements.
        inherits_patches = self.student.config.embeds_patches
        cached = args.teacher_cache is not None and inherits_patches
        self.notes_attention = foretells_attention(self.student) or cached
        self.map_layers = self.align.align_maps.layers if self.align.align_maps else []
        # Numbers of a view that are noted in float32, and behind them its maps.
        self.widths = anatomy.embedding_size, self.notes_attention * anatomy.num_patches
        self.cache = None
        if args.teacher_cache:
            map_width = len(self.map_layers) * anatomy.hidden_size * anatomy.num_patches
            self.cache = TeacherCache(
                *(args.teacher_cache, self.accelerator, anatomy.source, sum(self.widths), view),
                *(self.train_part[0], args.seed, self.notes_attention, map_width, self.map_layers),
            )
        self.states: list[torch.Tensor] = []
        hold_teacher(self.accelerator, anatomy.source, anatomy.classifier)
        # Not in evaluation, which asks about each batch once and ends with a smaller one.
        self.embed = torch.compile(anatomy.embed) if compiles else anatomy.embed

    def train(self, *arguments, **options):
        """As `ImageTrainer.train`."""
        # Watched before it is compiled, so that a compiled teacher gives its states, too.
        reads_states = self.align.align_tokens or self.align.align_maps or self.notes_attention
        with self.anatomy.watch() if reads_states else nullcontext([]) as self.states:
            return super().train(*arguments, **options)

    def before_epoch(self, epoch: int):
        if self.cache:
            self.cache.open(self.loader.sampler.views_of(epoch))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The mean loss over the counts of tokens that this step trains."""
        if "targets" not in inputs:
            # They stay for repeated steps.
            inputs["targets"] = self.targets_of(inputs)
        losses, largest = [], None
        # The same in all processes, and when a run goes on; the largest first.
        for count in token_counts_to_train(self.student.config, f"{self.args.seed}-{self.state.global_step}"):
            outputs = model(inputs["pixel_values"], num_tokens=count, **self.align.outputs_asked_for)
            losses.append(self.align(outputs, inputs["targets"], inputs.get("labels"), largest))
            largest = largest or outputs
        loss = torch.stack(losses).mean()
        return (loss, outputs) if return_outputs else loss

    def targets_of(self, inputs: dict) -> Targets:
        """The teacher's embeddings of a batch, and its attention, maps and hidden states where the loss reads them."""

        def ask() -> torch.Tensor:
            images = inputs.get("teacher_pixel_values", inputs["pixel_values"])
            with torch.inference_mode(), self.accelerator.autocast():
                parts = [self.embed(images).float()]
                if self.notes_attention:
                    parts.append(attended_cells(self.anatomy, self.states))
                if self.align.align_maps:
                    parts += [each.flatten(1).float() for each in self.align.align_maps.of_teacher(self.states)]
            # Out of inference mode, so that the loss may keep it for its gradient.
            return torch.cat(parts, dim=1).clone()

        # The cache keeps one row of numbers for each view.
        noted = self.cache(inputs["index"], ask) if self.cache else ask()
        anatomy = self.anatomy
        embedding, attention, maps = noted.tensor_split([self.widths[0], sum(self.widths)], dim=1)
        maps = maps.unflatten(1, (len(self.map_layers), anatomy.hidden_size, *anatomy.grid)).unbind(1)
        return Targets(
            embedding,
            attention.unflatten(1, anatomy.grid) if self.notes_attention else None,
            list(self.states) if self.align.align_tokens else [],
            list(maps),
        )

    def make_optimizer(self) -> tuple:
        return build_optimizer(self.student, self.tuned, self.args, self.loader.steps_per_epoch, self.epochs)

    def measure(self, model, loader) -> dict[str, float]:
        return evaluate_student(
            *(self.accelerator, model, self.student.config, self.align.project, self.classify, self.anatomy),
            *(loader, self.known[loader] if loader in (self.eval_loader, self.test_loader) else {}),
            self.align.embedding_asked_for,
        )

    @property
    def saved(self) -> nn.Module:
        return self.student

    def summary(self, state: TrainingState) -> str:
        """The result in a sentence, and a table of it if there are several counts of tokens."""
        labels = self.args.label_loss_weight > 0
        return describe(self.base_model, self.student, labels, state, count_measured(self.run))

    def write_repository(self, folder: Path, state: TrainingState, weights: dict[str, torch.Tensor]):
        self.student.save_pretrained(folder, state_dict=weights)
        # How a backbone is loaded says how it is used, too.
        use = "" if isinstance(self.student, SparseFormerBackbone) else None
        write_card(folder, self.student, self.summary(state), self.data, self.run, state, self.base_model, use=use)


def main(argv: list[str] | None = None) -> int:
    """Train as a command line says."""
    groups = parse(argv)
    run_training(make_trainer(groups, argv), compares=groups[-1].compare)
    return 0


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
        output (`str`, *optional*, defaults to `"student"`): Folder for the best student, its card and `results.json`.
        eval_images (*optional*): Images to choose the best epoch on. If not given, those that a folder or data set has
            for that, or else a tenth of `images`, which is held back.
        processing_class (*optional*): The teacher's image processor; needed where `teacher` is a model.
        options: Options of `frugalvit bootstrap`, with underscores, for example `epochs=5`, `focusing="inherited"`.

    Returns:
        `SparseFormerPreTrainedModel`: The best student, on the CPU, in float32.

    Raises:
        TypeError: if there is no option of such a name.
        ValueError: if teacher, images and options do not fit each other.
    """
    is_named = isinstance(teacher, str | Path)
    if not is_named and processing_class is None:
        raise ValueError("The teacher is a model; give its image processor, processing_class.")
    name = teacher if is_named else teacher.config._name_or_path or "a model without a name"
    options |= {"teacher": str(name), "output_dir": str(output)}
    if isinstance(num_tokens, int):
        options["num_latent_tokens"] = num_tokens
    elif num_tokens is not None:
        options["elastic_token_counts"] = list(num_tokens)
    parts, evaluated = None, None
    if isinstance(images, str | Path) and (eval_images is None or isinstance(eval_images, str | Path)):
        options["dataset"] = [str(images)]
        options |= {} if eval_images is None else {"eval_dataset": [str(eval_images)]}
    else:
        parts = as_images(images), None if eval_images is None else as_images(eval_images)
        evaluated = None if eval_images is None else "eval_images"
        if eval_images is None and not isinstance(parts[0], datasets.IterableDataset):
            hold = parts[0].hold_back if isinstance(parts[0], PlainImages) else functools.partial(hold_back, parts[0])
            parts, evaluated = hold(), "a tenth, held back"
    loaded = None if is_named else (teacher, processing_class)
    groups = fill_groups(GROUPS, options)
    groups[GROUPS.index(DataArguments)].evaluated = evaluated
    argv = [text for key, value in options.items() for text in as_words(key, value)]
    trainer = make_trainer(groups, argv, loaded, parts)
    # FSDP changes it.
    student_class = type(trainer.student)
    run_training(trainer, compares=groups[-1].compare)
    return student_class.from_pretrained(output, dtype=torch.float32)


def make_trainer(
    groups: tuple, argv: list[str] | None, teacher: tuple | None = None, parts: tuple | None = None
) -> BootstrapTrainer:
    """Return the trainer for the options of the command.

    Args:
        groups (`tuple`): An instance of each of `GROUPS`.
        argv (`list[str]`, *optional*): The command's arguments, for the card; those of the process if not given.
        teacher (pair of model and image processor, *optional*): The teacher, if it is loaded already.
        parts (pair of images, *optional*): Images to train and to evaluate on, in the place of those that the options
            name.
    """
    options, alignment, data, schedule, run = groups
    # What is not there is said before a teacher is loaded.
    for images in () if parts else filter(None, (data.dataset, data.eval_dataset)):
        find_source(images, data.dataset_config)
    # Its images' size decides what the arguments are that make the run what it is.
    teacher, processor = teacher or load_vision_model(options.teacher, "cpu", options.trust_remote_code)
    teacher_format = ImageFormat.from_processor(processor)
    apply_recipe(groups, teacher_format.size)
    if options.upsampler_hidden_size and not alignment.dense_loss_weight:
        raise ValueError(
            "--upsampler-hidden-size is for maps, which nothing aligns; give --dense-loss-weight, for example 1."
        )
    start_run(run, PROG, argv, list(groups))
    say_license(run, options.teacher)
    train, evaluation, test = (*parts, None) if parts else load_splits(data, alignment.label_loss_weight > 0)
    anatomy = read_anatomy(teacher.requires_grad_(False), teacher_format.size)
    check_teacher(anatomy, options.teacher)
    student = build_student(options, anatomy, teacher_format)
    args = training_arguments(BootstrapArguments, run, data, options, alignment, schedule)
    return BootstrapTrainer(
        *(anatomy, student, args, train, evaluation, test, processor),
        run=run,
        data=data,
        base_model=options.teacher,
        attn_implementation=options.attn_implementation,
        compile_teacher=options.compile_teacher,
    )


def run_training(trainer: BootstrapTrainer, compares: bool):
    """Train, and print what teacher and student cost before it, and the result after it."""
    anatomy, student, say = trainer.anatomy, trainer.student, trainer.accelerator.print
    sizes = (trainer.teacher_format.size, trainer.student_format.size)
    main = trainer.accelerator.is_main_process
    if main:
        names = [type(model).__name__ for model in (anatomy.source, student)]
        print("\n".join(introduce(contenders_of(anatomy, student, sizes), names)))
    say(trainer.outline())
    trainer.train()
    state = trainer.progress.now
    say(trainer.summary(state))
    say(f"It is {choice_of_epoch(trainer.data, trainer.run, state)}. See {trainer.run.output_dir}.")
    if compares and main:
        compare(anatomy, type(student), sizes, Path(trainer.run.output_dir), state)


@torch.inference_mode()
def evaluate_student(
    accelerator: Accelerator, model, config, project, classify, teacher: Anatomy, loader, targets, asked
) -> dict[str, float]:
    """Measure a student beside its teacher.

    The model is called with the arguments `asked`. `targets` holds the teacher's embeddings of batches, by number;
    those that it lacks are computed and kept there.

    Returns:
        `dict[str, float]`: `alignment`, the mean cosine of student's and teacher's embeddings, and, of classifiers
        where there are labels, `accuracy` and `teacher_accuracy`. If a student is for several counts of tokens,
        `alignment` is the mean over them and `accuracy` that of the largest; `alignment_COUNT` and `accuracy_COUNT`
        are those of each.
    """
    model.eval()
    counts = config.trained_token_counts
    cosines, accuracies = {count: [] for count in counts}, {count: TopKAccuracy() for count in (*counts, "teacher")}
    labeled = False
    for number, batch in enumerate(loader):
        pixel_values = batch["pixel_values"]
        if number not in targets:
            with accelerator.autocast():
                targets[number] = teacher.embed(batch.get("teacher_pixel_values", pixel_values)).float()
        target = targets[number]
        features = {}
        for count in counts:
            features[count] = project(model(pixel_values, num_tokens=count, **asked).pooler_output).float()
            cosines[count].append(accelerator.gather_for_metrics(F.cosine_similarity(features[count], target)))
        if labeled := classify is not None and "labels" in batch:
            logits = {count: classify(embedding) for count, embedding in features.items()}
            logits["teacher"] = teacher.classifier(target)
            logits, labels = accelerator.gather_for_metrics((logits, batch["labels"]))
            for name, scores in logits.items():
                accuracies[name].add_batch(predictions=scores.cpu().numpy(), references=labels.cpu().numpy())
    alignments = {count: torch.cat(values).mean().item() for count, values in cosines.items()}
    results = {"alignment": statistics.mean(alignments.values())}
    if labeled:
        found = {name: metric.compute()["accuracy"] for name, metric in accuracies.items()}
        results |= {"accuracy": found[counts[-1]], "teacher_accuracy": found["teacher"]}
    if len(counts) > 1:
        for count in counts:
            results[f"alignment_{count}"] = alignments[count]
            if labeled:
                results[f"accuracy_{count}"] = found[count]
    return results


if __name__ == "__main__":
    run_as_program(main, PROG)
