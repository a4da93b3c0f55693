"""Bootstrap a SparseFormer from a vision transformer, without labels.

    accelerate launch -m frugalvit.training.bootstrap --teacher TEACHER --dataset IMAGES --output OUT

Gao et al., *Bootstrapping SparseFormers from Vision Foundation Models* (CVPR 2024), section 3.2: the student inherits
the teacher's blocks without the leading third, learns to focus from random weights, tunes the next third, keeps the
rest frozen, and aligns its final embedding with the teacher's. For teachers of more than 96 pixels the defaults are
the paper's; it names no optimizer, AdamW is our choice. Continued bootstrapping starts from `--student`, with more
tokens or pixels. `recipes/` has a file for each student of the paper, of ablations with an option that it names.
"""

import json
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from ..common.comparison import compare_speeds, describe_pair, side_by_side, slower_than_teacher
from ..common.data import load_splits, match_classes
from ..common.files import write_json
from ..common.loading import load_vision_model
from ..common.metrics import TopKAccuracy
from ..common.names import without_place
from ..common.precision import hold_teacher
from ..common.tables import format_markdown, format_table
from ..common.views import ImageFormat
from ..configuration.configuration_base import pair as pair_of  # `pair` is student and teacher here
from ..configuration.configuration_sparseformer import choose_grid
from ..modeling.hosts import Anatomy, read_anatomy
from ..modeling.layers import divergence as kl_divergence
from ..modeling.modeling_sparseformer import (
    SparseFormerForImageClassification,
    SparseFormerPreTrainedModel,
    SparseFormerVisionModel,
    SparseFormerVisionModelWithProjection,
)
from .components.arguments import (
    run_as_program,
)
from .components.attended_windows import attended_windows
from .components.augmentation import BootstrapView, PairedEvalView
from .components.cards import add_table, choice_of_epoch, count_measured, say_license, write_card
from .components.checkpoints import TrainingState
from .components.loaders import make_loaders
from .components.loop import fit
from .components.models import choose_attention, parse_overrides, read_values, write_values
from .components.optimizers import make_optimizer, parameter_groups
from .components.runs import start_accelerator
from .components.sharding import prepare
from .components.teacher_cache import TeacherCache
from .components.token_alignment import TokenAlignment, distance_from_largest
from .options.bootstrap import (
    LARGEST_SMALL,
    PROG,
    RECIPES,
    AlignmentArguments,
    ScheduleArguments,
    StudentArguments,
    parse,
)


def main(argv: list[str] | None = None) -> int:
    """Run the recipe with a command line's arguments."""
    arguments = parse(argv)
    pair, alignment, data, schedule, run = arguments
    # Its images' size decides what the arguments are that make the run what it is.
    teacher, processor = load_vision_model(pair.teacher, "cpu", pair.trust_remote_code)
    teacher_format = ImageFormat.from_processor(processor)
    apply_recipe(arguments, teacher_format.size)
    accelerator = start_accelerator(run, PROG, argv, list(arguments))
    say_license(accelerator, run, pair.teacher)

    parts = load_splits(data, learns_labels=alignment.label_loss_weight > 0)
    teacher.requires_grad_(False).to(accelerator.device)
    anatomy = read_anatomy(teacher, teacher_format.size)
    check_teacher(anatomy, pair, alignment, accelerator.distributed_type)
    student = build_student(pair, anatomy, teacher_format)
    student_format = format_of(student.config)
    tuned = freeze(student, pair, len(anatomy.blocks))

    classify, classify_teacher = getattr(student, "classifier", None), anatomy.classifier
    if classify is None and (alignment.loss == "kl" or alignment.label_loss_weight):
        raise ValueError(
            f"--loss kl and --label-loss-weight compare classes, and {pair.teacher} is no classifier; align its "
            "embedding (--loss cosine)."
        )
    train_images, eval_images, test_images, classes = match_classes(
        parts, classify and student.config.id2label, alignment.label_loss_weight > 0
    )
    view = BootstrapView(
        student_format,
        teacher_format,
        alignment.crop_scale,
        alignment.crop_ratio,
        alignment.flip,
        alignment.zoom_out,
    )
    evaluation = (eval_images, PairedEvalView(student_format, teacher_format))
    loader, eval_loader, test_loader = make_loaders(
        accelerator,
        data,
        run,
        (train_images, view),
        evaluation,
        test_images,
        classes=classes,
        repeats=schedule.repeats,
        view_epochs=alignment.view_epochs,
    )
    glances = alignment.window_loss_weight > 0 and student.base_model.glance is not None
    # A cache serves other students, too.
    uses_windows = glances or (alignment.window_loss_weight > 0 and alignment.teacher_cache is not None)
    cache = None
    if alignment.teacher_cache:
        width = anatomy.embedding_size + 4 * uses_windows
        cache = TeacherCache(
            alignment.teacher_cache, accelerator, teacher, width, view, train_images, run.seed, uses_windows
        )

    sizes = (teacher_format.size, student_format.size)
    costs = describe_pair(anatomy, student, *sizes) if accelerator.is_main_process else []
    for line in introduce(costs, sizes, [type(model).__name__ for model in (teacher, student)]):
        accelerator.print(line)
    length = f"{run.epochs} x {loader.steps_per_epoch:,} x {run.batch_size:,}"
    evaluated = "not" if eval_images is None else f"on {len(eval_images):,} images, {data.evaluated}"
    tested = "" if test_images is None else f"; the best epoch tested on {len(test_images):,} images, {data.tested}"
    accelerator.print(f"Recipe {pair.recipe}; epochs x steps x images: {length}; evaluated {evaluated}{tested}.")

    optimizer, scheduler = build_optimizer(student, tuned, schedule, loader.steps_per_epoch, run.epochs)
    student.to(accelerator.device)
    choose_attention(student, pair.attn_implementation, accelerator.device)
    if run.compile:
        student.base_model.compile()
    # The classifier or projection stays frozen, so the base model alone is what learns.
    model, optimizer, scheduler = prepare(accelerator, student.base_model, optimizer, scheduler)
    project = getattr(student, "visual_projection", nn.Identity())
    uses_labels = alignment.label_loss_weight > 0
    if alignment.elastic_loss_weight and len(student.config.trained_token_counts) == 1:
        raise ValueError(
            "--elastic-loss-weight compares counts of tokens, and the student has one; give --elastic-token-counts."
        )
    align_tokens = None
    if alignment.token_loss_weight:
        align_tokens = TokenAlignment(student, anatomy, alignment.token_layers, alignment.token_distance)
    reads_tokens = align_tokens or alignment.elastic_loss_weight
    outputs_asked_for = TokenAlignment.arguments if reads_tokens else {"output_tokens": False}
    if glances:
        outputs_asked_for = {**outputs_asked_for, "output_rois": True}

    # Watched before it is compiled, so that a compiled teacher gives its states, too.
    watching = ExitStack()
    states = watching.enter_context(anatomy.watch()) if align_tokens or uses_windows else []
    hold_teacher(accelerator, teacher, classify_teacher)
    # Not in evaluation, which asks about each batch once and ends with a smaller one.
    embed_in_training = torch.compile(anatomy.embed) if pair.compile_teacher else anatomy.embed

    def ask_teacher(batch):
        images = batch.get("teacher_pixel_values", batch["pixel_values"])
        with torch.inference_mode(), accelerator.autocast():
            target = embed_in_training(images).float()
            if uses_windows:
                # The cache keeps one tensor for each view.
                target = torch.cat([target, attended_windows(anatomy, states)], dim=1)
        batch["teacher_tokens"] = list(states)
        # Out of inference mode, so that the loss may keep it for its gradient.
        return target.clone()

    def compute_loss(model, batch):
        pixel_values = batch["pixel_values"]
        if "target" not in batch:
            # It stays for repeated steps.
            batch["target"] = cache(batch["index"], lambda: ask_teacher(batch)) if cache else ask_teacher(batch)
        losses, largest = [], None
        # The same in all processes, and when a run goes on; the largest first.
        for count in token_counts_to_train(student.config, f"{run.seed}-{scheduler.scheduler.last_epoch}"):
            outputs = model(pixel_values, num_tokens=count, **outputs_asked_for)
            losses.append(compare_to_teacher(outputs, batch))
            if alignment.elastic_loss_weight and largest:
                distance = distance_from_largest(outputs, largest, student.config.num_prefix_tokens)
                losses[-1] = losses[-1] + alignment.elastic_loss_weight * distance
            largest = largest or outputs
        return torch.stack(losses).mean()

    def compare_to_teacher(outputs, batch):
        target = batch["target"]
        if uses_windows:
            target, window = target[:, :-4], target[:, -4:]
        embedding = project(outputs.pooler_output).float()
        if alignment.loss == "cosine":
            loss = (1 - F.cosine_similarity(embedding, target)).mean()
        else:
            loss = kl_divergence(classify(embedding), classify_teacher(target), alignment.temperature)
        if uses_labels:
            loss = loss + alignment.label_loss_weight * F.cross_entropy(classify(embedding), batch["labels"])
        if glances:
            rois = outputs.rois[-1]
            corners = torch.cat([rois[:, 0, :2], rois[:, -1, 2:]], dim=1)
            loss = loss + alignment.window_loss_weight * (corners - window).abs().mean()
        if align_tokens:
            loss = loss + alignment.token_loss_weight * align_tokens(outputs, batch["teacher_tokens"])
        return loss

    # What the teacher makes of each batch of a loader's images, which are the same in every epoch.
    targets: dict[object, dict[int, torch.Tensor]] = defaultdict(dict)

    def evaluate(model, loader):
        known = targets[loader]
        return evaluate_student(accelerator, model, student.config, project, classify, anatomy, loader, known)

    def save(folder: Path, state: TrainingState, weights: dict[str, torch.Tensor]):
        student.save_pretrained(folder, state_dict=weights)
        summary = describe(pair, student, uses_labels, state, count_measured(run))
        write_card(folder, student, summary, data, run, state, pair.teacher)

    state = fit(
        accelerator,
        run,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        compute_loss=compute_loss,
        evaluate=evaluate,
        eval_loader=eval_loader,
        test_loader=test_loader,
        save=save,
        saved=student,
        metric="alignment",
        before_epoch=lambda epoch: cache.open(loader.sampler.views_of(epoch)) if cache else None,
    )
    watching.close()
    accelerator.print(describe(pair, student, uses_labels, state, count_measured(run)))
    accelerator.print(f"It is {choice_of_epoch(data, run, state)}. See {run.output_dir}.")
    if run.compare and accelerator.is_main_process:
        compare(anatomy, type(student), sizes, costs, Path(run.output_dir), state)
    return 0


def apply_recipe(arguments: Sequence, size: tuple[int, int]):
    """Fill in what the command line leaves open: by `--recipe` or else the teacher's image size, and by what else was
    given.

    Args:
        arguments (sequence): Dataclasses of arguments, `StudentArguments` first.
        size (pair of `int`): Height and width of the teacher's images in pixels.
    """
    pair = arguments[0]
    # A student that was trained before would lose by large steps.
    small = "paper" if pair.student or max(size) > LARGEST_SMALL else "small"
    pair.recipe = pair.recipe or ("inherited" if pair.focusing == "inherited" else small)
    values = RECIPES[pair.recipe] | {"epochs": 20}
    if pair.student:
        # It has its configuration, and its weights are good enough to begin with.
        values |= {"config_overrides": "", "learning_rate": values["learning_rate"] / 4, "warmup_epochs": 0.0}
        values["epochs"] = 5
    if any(getattr(group, "teacher_cache", None) for group in arguments):
        values["token_loss_weight"] = 0.0
    if not pair.glance and not pair.student:
        values["window_loss_weight"] = 0.0
    overrides = values.pop("config_overrides"), pair.config_overrides
    pair.config_overrides = write_values(read_values("config_overrides", ",".join(filter(None, overrides))))
    for group in arguments:
        for name, value in values.items():
            if getattr(group, name, value) is None:
                setattr(group, name, value)


def check_teacher(
    teacher: Anatomy,
    pair: StudentArguments,
    alignment: AlignmentArguments,
    sharing: DistributedType,
):
    """Raise a ValueError if the teacher does not take the images that its image processor makes, or if its tokens
    cannot be aligned in such a run."""
    teacher.require_plain("bootstrap from", embeds=True)
    with torch.inference_mode():
        try:
            teacher.embed(teacher.example())
        # Models fail in more ways than can be listed.
        except Exception as error:
            raise ValueError(
                f"--teacher {pair.teacher} does not take what its image processor makes, images of "
                f"{' x '.join(map(str, teacher.image_size))} pixels: {' '.join(str(error).split())[:200]}"
            ) from error
    for name in ("token_loss_weight", "elastic_loss_weight"):
        if getattr(alignment, name) and sharing == DistributedType.FSDP:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{option} needs hidden states, which FSDP's classes do not record; give {option} 0, or leave FSDP "
                "out."
            )


def build_student(
    pair: StudentArguments, teacher: Anatomy, teacher_format: ImageFormat
) -> SparseFormerPreTrainedModel:
    """A new student with the teacher's blocks, or `--student` with the tokens and pixels that are wanted."""
    if pair.student:
        student, _ = load_vision_model(pair.student, "cpu")
        if not isinstance(student, SparseFormerPreTrainedModel):
            raise ValueError(f"--student {pair.student} is no SparseFormer but a {type(student).__name__}.")
        projects = isinstance(student, SparseFormerVisionModelWithProjection)
        width = student.config.projection_dim if projects else student.config.pooled_size
        teacher_width = teacher.embedding_size
        if width != teacher_width or projects != (teacher.projection is not None):
            raise ValueError(
                f"--student {pair.student} gives embeddings {width} wide and --teacher {teacher_width}, before or "
                "after a projection; these cannot be aligned. Give the teacher that the student was bootstrapped from."
            )
        if pair.num_latent_tokens not in (None, student.config.num_latent_tokens):
            student.resize_tokens(pair.num_latent_tokens)
        if pair.elastic_token_counts:
            student.config.elastic_token_counts = pair.elastic_token_counts
        student.set_num_tokens(None)
        if pair.image_size:
            set_image_size(student.config, pair.image_size)
        return student
    if teacher_format.reverse_channels and pair.focusing == "inherited":
        raise ValueError(
            f"--teacher {pair.teacher} takes blue, green and red; a student gets red, green and blue, for which the "
            "teacher's patches are not made. Leave --focusing inherited out."
        )
    height, width = teacher_format.size
    image_size = height if height == width else [height, width]
    if teacher.classifier is not None:
        student_class = SparseFormerForImageClassification
    else:
        student_class = (
            SparseFormerVisionModel if teacher.projection is None else SparseFormerVisionModelWithProjection
        )
    glance = {}
    if pair.focusing == "inherited" and pair.glance:
        # Windows are smaller than the image, which is then needed at twice the size, too.
        glance = {"glance_grid": choose_grid(pair.glance, teacher_format.size), "num_pyramid_levels": 2}
    student = student_class.from_teacher(
        teacher,
        num_latent_tokens=pair.num_latent_tokens,
        elastic_token_counts=pair.elastic_token_counts,
        truncate=pair.truncate,
        inherit_blocks=pair.inherit_blocks,
        focusing=pair.focusing,
        break_ties=pair.break_ties,
        image_mean=teacher_format.mean,
        image_std=teacher_format.std,
        resample=teacher_format.resample,
        resize_size=teacher_format.resize,
        **{"image_size": image_size, **glance, **parse_overrides("sparseformer", pair.config_overrides)},
    )
    if pair.image_size:
        set_image_size(student.config, pair.image_size)
    return student


def token_counts_to_train(config, seed: str) -> list[int]:
    """The largest count of tokens, the smallest, and two of the others, chosen by the seed.

    The sandwich rule of Yu and Huang, *Universally Slimmable Networks and Improved Training Techniques*.
    """
    smallest, *between = config.trained_token_counts
    if not between:
        return [smallest]
    *between, largest = between
    return [largest, *random.Random(seed).sample(between, min(len(between), 2)), smallest]


def set_image_size(config, image_size: int):
    """Other pixels for the preprocessing; the model takes any."""
    if config.resize_size is not None:
        config.resize_size = round(config.resize_size * image_size / min(pair_of(config.image_size)))
    config.image_size = image_size


def format_of(config) -> ImageFormat:
    """The images that a SparseFormer's configuration wants."""
    return ImageFormat(
        pair_of(config.image_size), config.image_mean, config.image_std, config.resample, config.resize_size
    )


def freeze(student: SparseFormerPreTrainedModel, pair: StudentArguments, num_blocks: int) -> set[nn.Parameter]:
    """Leave the focusing stage and the blocks to tune trainable; returns the parameters of the latter.

    Without inherited blocks the whole transformer is trained, and only what follows it is frozen: the inherited
    classifier, projection or pooling head.
    """
    for name in ("classifier", "visual_projection", "pooling_head"):
        for owner in (student, student.base_model):
            if isinstance(module := getattr(owner, name, None), nn.Module):
                module.requires_grad_(False)
    if not pair.inherit_blocks:
        return set()
    base = student.base_model
    layers, inherits_patches = base.layers, base.config.patch_size is not None
    tune = 1 / 3 if pair.tune is None else pair.tune
    count = int(tune) if tune >= 1 else round(tune * num_blocks)
    if pair.tune_all or (inherits_patches and pair.tune is None):
        count = len(layers)
    if count > len(layers):
        raise ValueError(f"--tune asks for {count} blocks, the student has {len(layers)}; --tune-all tunes them all.")
    layers[count:].requires_grad_(False)
    if inherits_patches:
        # Cells stay where they are in the window. All but the glance begins as the teacher's.
        base.latents.initial_rois.requires_grad_(False)
        return {*base.parameters()} - {*(base.glance or nn.Module()).parameters()}
    base.layernorm.requires_grad_(False)
    return set(layers[:count].parameters())


def build_optimizer(student, tuned: set[nn.Parameter], schedule: ScheduleArguments, steps_per_epoch: int, epochs: int):
    """Optimizer and schedule: a rise over the warm-up, at 0 for inherited weights beside new ones, then a fall as half
    a cosine."""
    warmup, total = round(schedule.warmup_epochs * steps_per_epoch), epochs * steps_per_epoch

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))

    # Where the focusing stage is inherited, too, nothing waits for it.
    waits = student.config.patch_size is None

    def inherited_rate(step: int) -> float:
        return 0.0 if step < warmup and waits else schedule.inherited_learning_rate * rate(step)

    groups, rates = [], []
    for group in parameter_groups(student, schedule.weight_decay, schedule.optimizer):
        for members, factor in (
            ([p for p in group["params"] if p not in tuned], rate),
            ([p for p in group["params"] if p in tuned], inherited_rate),
        ):
            groups.append({**group, "params": members})
            rates.append(factor)
    optimizer = make_optimizer(schedule.optimizer, groups, lr=schedule.learning_rate)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rates)


@torch.inference_mode()
def evaluate_student(
    accelerator: Accelerator, model, config, project, classify, teacher: Anatomy, loader, targets
) -> dict[str, float]:
    """Mean cosine of student's and teacher's embeddings and, of classifiers where there are labels, the accuracy of
    both. Of a student for several counts of tokens, `alignment` is the mean over them, `accuracy` that of the largest,
    and both are given for each count besides. The teacher is asked about batches that `targets` lacks, and noted
    there."""
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
            features[count] = project(model(pixel_values, num_tokens=count, output_tokens=False).pooler_output).float()
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


def introduce(costs: list[dict], sizes: Sequence[tuple[int, int]], names: Sequence[str]) -> list[str]:
    """Teacher and student, a line each, of what `describe_pair` counted; `sizes` of images and `names` of both."""
    lines = []
    for cost in costs:
        role = cost["model"]
        height, width = sizes[role == "student"]
        macs = "" if cost["macs"] is None else f"{cost['macs'] / 1e9:.3g} G multiply-accumulates, "
        lines.append(
            f"{role.capitalize()}: {names[role == 'student']}, {cost['parameters']:,} parameters, {macs}"
            f"{tokens_of(cost)}, {height} x {width} pixels."
        )
    return lines


def tokens_of(cost: dict) -> str:
    """The tokens of a row of `describe_pair`, as they are asked for, and those that always are among them."""
    kind = "patches" if cost["model"] == "teacher" else "latent tokens"
    others = cost["tokens"] - cost["num_tokens"]
    return f"{cost['num_tokens']:,} {kind}" + {0: "", 1: " and [CLS]"}.get(
        others, f" and {others} more, [CLS] and registers"
    )


def compare(
    teacher: Anatomy,
    student_class: type[SparseFormerPreTrainedModel],
    sizes: Sequence[tuple[int, int]],
    costs: list[dict],
    folder: Path,
    state: TrainingState,
):
    """Measure the speeds of the teacher and of the student in a folder, print both side by side with what the best
    epoch's evaluation said and what they cost, and add that to `results.json`."""
    weight = next(teacher.model.parameters())
    dtype = weight.dtype
    teacher.source.to(dtype)
    student = student_class.from_pretrained(folder).to(weight.device, dtype)
    rows = side_by_side(costs, scores_of(state, student.config), compare_speeds(teacher, student, *sizes))
    print(f"Side by side, on {weight.device.type} in {str(dtype).removeprefix('torch.')}:\n\n{format_table(rows)}\n")
    if slow := slower_than_teacher(rows):
        print(
            f"Warning: the student is not faster than its teacher, {' and '.join(slow)}. Fewer tokens "
            "(--num-latent-tokens), fewer blocks (--truncate) or a smaller focusing stage (--config-overrides) help."
        )
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    write_json(folder / "results.json", results | {"comparison": rows})
    add_table(folder, "Beside the teacher", rows)


def scores_of(state: TrainingState, config) -> list[dict[str, float]]:
    """What the best epoch's evaluation said of the teacher and of the student, for each count of tokens: accuracy, or
    else alignment."""
    counts = config.trained_token_counts
    measured = state.measured
    name = next((name for name in ("accuracy", "alignment") if name in measured), None)
    if name is None:
        return [{} for _ in ("teacher", *counts)]
    names = [name] if len(counts) == 1 else [f"{name}_{count}" for count in counts]
    return [{name: measured.get(key)} for key in (f"teacher_{name}", *names)]


def describe(
    pair: StudentArguments, student: SparseFormerPreTrainedModel, labels: bool, state: TrainingState, images: str
) -> str:
    """What came out, in a sentence, of so many `images`, and for several counts of tokens a table."""
    config = student.config
    counts = config.trained_token_counts
    tokens = f"{', '.join(map(str, counts))} latent tokens{' and [CLS]' if config.use_cls_token else ''}"
    choice = "" if len(counts) == 1 else ", of which a call chooses (`num_tokens`)"
    text = (
        f"A SparseFormer with {tokens}{choice}, bootstrapped from {without_place(pair.teacher)}"
        f"{'' if labels else ' without labels'}"
    )
    measured = state.measured
    if "accuracy" in measured:
        own, teachers = measured["accuracy"], measured["teacher_accuracy"]
        text = f"{text}: accuracy {own:.2%}{images}, the teacher's is {teachers:.2%}."
    elif "alignment" in measured:
        text = f"{text}: mean cosine with the teacher's embeddings {measured['alignment']:.4f}{images}."
    else:
        text = f"{text}, not evaluated."
    if len(counts) > 1 and "alignment" in measured:
        _, *scores = scores_of(state, config)
        rows = [{"num_tokens": count, **score} for count, score in zip(counts, scores, strict=True)]
        text = f"{text}\n\n{format_markdown(rows)}"
    return text


if __name__ == "__main__":
    run_as_program(main, PROG)
