"""A student beside its teacher: costs, speeds and scores, in words and as a table."""

import json
from collections.abc import Sequence
from pathlib import Path

from ...common.comparison import compare_speeds, side_by_side, slower_than_teacher
from ...common.files import write_json
from ...common.names import without_place
from ...common.tables import format_markdown, format_table
from ...modeling.hosts import Anatomy
from ...modeling.modeling_sparseformer import (
    SparseFormerPreTrainedModel,
)
from .cards import add_table
from .checkpoints import TrainingState


def introduce(costs: list[dict], sizes: Sequence[tuple[int, int]], names: Sequence[str]) -> list[str]:
    """A line about each row of costs of `describe_pair`; `sizes` are those of the teacher's and the student's images,
    `names` those of their classes."""
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
    """The tokens of a row of `describe_pair` in words: patches or latent tokens, and [CLS] and registers."""
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
    """Measure the speeds of the teacher and of the student in a folder. Print them in a table with the costs and the
    best epoch's scores, and add the table to `results.json` and to the card."""
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
