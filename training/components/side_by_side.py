"""A student beside its teacher: costs, speeds and scores, in words and as a table."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from ...common.contender import Contender, as_students, as_teacher, measure_speeds
from ...common.files import write_json
from ...common.names import without_place
from ...common.speed import LIMIT
from ...common.tables import format_markdown, format_table
from ...modeling.hosts import Anatomy
from ...modeling.modeling_sparseformer import SparseFormerPreTrainedModel
from .cards import add_table
from .checkpoints import TrainingState


# Columns of a table, and batch sizes of its speeds.
COSTS = ("num_tokens", "tokens", "parameters", "macs")
BATCH_SIZES = (1, 32)


def contenders_of(
    teacher: Anatomy, student: SparseFormerPreTrainedModel, sizes: Sequence[tuple[int, int]]
) -> list[Contender]:
    """The teacher, and the student with each count of tokens that it is made for; `sizes` are the height and width of
    the teacher's and the student's images in pixels."""
    return [as_teacher(teacher, sizes[0]), *as_students(student, sizes[1])]


def introduce(contenders: Sequence[Contender], names: Sequence[str]) -> list[str]:
    """A line about each of `contenders_of`; `names` are those of the teacher's class and of the student's."""
    return [
        f"{each.name.capitalize()}: {names[each.name == 'student']}, {each.parameters:,} parameters, "
        f"{each.macs / 1e9:.3g} G multiply-accumulates, {tokens_of(each)}, "
        f"{' x '.join(map(str, each.image_size))} pixels."
        for each in contenders
    ]


def tokens_of(contender: Contender) -> str:
    """The tokens of a contender in words: patches or latent tokens, and [CLS] and registers."""
    kind = "patches" if contender.name == "teacher" else "latent tokens"
    others = contender.tokens - contender.num_tokens
    return f"{contender.num_tokens:,} {kind}" + {0: "", 1: " and [CLS]"}.get(
        others, f" and {others} more, [CLS] and registers"
    )


def compare(
    teacher: Anatomy,
    student_class: type[SparseFormerPreTrainedModel],
    sizes: Sequence[tuple[int, int]],
    folder: Path,
    state: TrainingState,
):
    """Measure the speeds of the teacher and of the student in a folder. Print them in a table with the costs and the
    best epoch's scores, and add the table to `results.json` and to the card."""
    weight = next(teacher.model.parameters())
    dtype = weight.dtype
    teacher.source.to(dtype)
    student = student_class.from_pretrained(folder).to(weight.device, dtype)
    contenders = contenders_of(teacher, student, sizes)
    costs = [{name: getattr(each, name) for name in COSTS} for each in contenders]
    found = zip(contenders, scores_of(state, student.config), costs, compare_speeds(contenders, dtype), strict=True)
    rows = [{"model": each.name, **score, **cost, **speed} for each, score, cost, speed in found]
    print(f"Side by side, on {weight.device.type} in {str(dtype).removeprefix('torch.')}:\n\n{format_table(rows)}\n")
    if slow := slower_than_teacher(rows):
        print(
            f"Warning: the student is not faster than its teacher, {' and '.join(slow)}. Fewer tokens "
            "(--num-latent-tokens), fewer blocks (--truncate) or a smaller focusing stage (--config-overrides) help."
        )
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    write_json(folder / "results.json", results | {"comparison": rows})
    add_table(folder, "Beside the teacher", rows)


def compare_speeds(contenders: Sequence[Contender], dtype: torch.dtype) -> list[dict[str, float]]:
    """Images per second of contenders, which are on one device and in `dtype`, by batch size as `images/s,
    BATCH_SIZE`.

    Measuring takes seconds; two passes of each batch where large models on a slow machine take longer.
    """
    for contender in contenders:
        contender.model.eval()
    speeds = {f"images/s, {size}": measure_speeds(contenders, size, dtype, limit=LIMIT) for size in BATCH_SIZES}
    return [dict(zip(speeds, own, strict=True)) for own in zip(*speeds.values(), strict=True)]


def slower_than_teacher(rows: list[dict[str, object]]) -> list[str]:
    """Sentences about the counts of tokens and batch sizes at which a student is not faster than its teacher."""
    teacher, *students = rows
    return [
        f"{student[name] / teacher[name]:.2f} times its images/s in batches of {name.removeprefix('images/s, ')}"
        + (f" with {student['num_tokens']} latent tokens" if len(students) > 1 else "")
        for student in students
        for name in student
        if name.startswith("images/s") and student[name] <= teacher[name]
    ]


def scores_of(state: TrainingState, config) -> list[dict[str, float]]:
    """Scores of the teacher and of the student with each count of tokens, in the best epoch: accuracy, or else
    alignment."""
    counts = config.trained_token_counts
    measured = state.measured
    name = next((name for name in ("accuracy", "alignment") if name in measured), None)
    if name is None:
        return [{} for _ in ("teacher", *counts)]
    names = [name] if len(counts) == 1 else [f"{name}_{count}" for count in counts]
    return [{name: measured.get(key)} for key in (f"teacher_{name}", *names)]


def describe(
    teacher: str, student: SparseFormerPreTrainedModel, labels: bool, state: TrainingState, images: str
) -> str:
    """The result in a sentence, and a table of it if there are several counts of tokens; `images` says on how many
    images it was measured."""
    config = student.config
    counts = config.trained_token_counts
    tokens = f"{', '.join(map(str, counts))} latent tokens{' and [CLS]' if config.use_cls_token else ''}"
    choice = "" if len(counts) == 1 else ", of which a call chooses (`num_tokens`)"
    text = (
        f"A SparseFormer with {tokens}{choice}, bootstrapped from {without_place(teacher)}"
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
