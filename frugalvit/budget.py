"""`frugalvit budget`: the number of tokens that a model can afford on this machine."""

import argparse
import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoProcessor, PreTrainedModel

from .architectures import image_side, image_size_of, load_model
from .common.contender import as_students, as_teacher, measure_speeds
from .common.files import whole_folder
from .common.loading import choose_device, split_revision
from .common.packing import PackedLinear, pack_linear_layers
from .common.tables import format_table
from .contenders import load_teacher
from .model_folders import Notes, copy_with_configuration, source_folder
from .modeling.hosts import Anatomy
from .modeling.swap import matching_processor
from .options.budget import parse


@dataclass
class Budget:
    """A limit on the cost of a batch or an image.

    Args:
        column (`str`): The column of the table that is limited.
        limit (`float`): In the column's unit.
        text (`str`): The limit as the user gave it.
        is_least (`bool`): Whether the limit is the least that is wanted, not the most.
    """

    column: str
    limit: float
    text: str
    is_least: bool = False

    def allows(self, row: dict[str, object]) -> bool:
        value = row[self.column]
        return value >= self.limit if self.is_least else value <= self.limit


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    budget = budget_of(arguments)

    device = str(choose_device(arguments.device))
    model = load_model(arguments.model, device)
    if arguments.output and not hasattr(model, "set_num_tokens"):
        raise ValueError(f"{arguments.model!r} is a {type(model).__name__}, whose tokens cannot be chosen.")
    # Refused before anything is measured.
    with whole_folder(arguments.output, arguments.overwrite) if arguments.output else nullcontext() as folder:
        source = source_folder(arguments.model)
        notes = Notes(source)
        teacher = find_teacher(arguments.teacher, notes, device)
        dtype = getattr(torch, arguments.dtype)
        rows = measure_counts(model, teacher, arguments.batch_size, dtype, arguments.rounds)
        for row, score in zip(rows, notes.scores(rows), strict=True):
            row |= score

        settings = {
            "scored_on": notes.images(),
            "device": device,
            "dtype": arguments.dtype,
            "batch_size": arguments.batch_size,
            "threads": torch.get_num_threads(),
            "packed": any(isinstance(module, PackedLinear) for module in model.modules()),
        }
        if not arguments.json:
            print(f"{format_table(rows)}\n\n{describe(settings)}")
        chosen = None if budget is None else choose(rows, budget)
        if folder:
            save(model, chosen["num_tokens"], source, folder)
    if arguments.json:
        print(json.dumps({"settings": settings, "rows": rows, "chosen": chosen}, indent=2))
        return
    if chosen:
        print(f"Within {budget.text}: {name_of(chosen)}, {measured(chosen, budget)}.")
    if arguments.output:
        print(f"Wrote {arguments.output}.")


def budget_of(arguments: argparse.Namespace) -> Budget | None:
    """The budget that the arguments set, None if they set none."""
    if arguments.latency is not None:
        milliseconds = 1000 * arguments.latency
        return Budget("latency (ms)", milliseconds, f"{milliseconds:.4g} ms a batch of {arguments.batch_size}")
    if arguments.images_per_second is not None:
        least = arguments.images_per_second
        return Budget("images/s", least, f"at least {least:.4g} images a second", is_least=True)
    if arguments.macs is not None:
        return Budget("macs", arguments.macs, f"{arguments.macs / 1e9:.4g} G multiply-accumulates an image")
    return None


def find_teacher(given: str | None, notes: Notes, device: str) -> Anatomy | None:
    """Load the teacher that is given, or else the one that the training or the card names, if it is on this machine.

    Raises:
        ValueError: if the given teacher is no vision transformer.
    """
    if given:
        return load_teacher(given, device)[0]
    for name in notes.teachers():
        try:
            if is_here(name):
                return load_teacher(name, device)[0]
        except ValueError as error:
            print(f"Measured without its teacher: {error}", file=sys.stderr)
    return None


def is_here(name: str) -> bool:
    """Whether a model is on this machine, in a folder or in the hub's cache."""
    hub_id, revision = split_revision(name)
    if Path(hub_id).is_dir():
        return True
    return hub_id.count("/") == 1 and isinstance(try_to_load_from_cache(hub_id, "config.json", **revision), str)


def measure_counts(
    model: PreTrainedModel, teacher: Anatomy | None, batch_size: int, dtype: torch.dtype, rounds: int
) -> list[dict[str, object]]:
    """Measure the cost of a teacher, if there is one, and of a model with each count of tokens, in increasing order.

    Args:
        model (`PreTrainedModel`): In evaluation mode; it is cast and packed, as the teacher is.
        teacher (`Anatomy`, *optional*): The teacher's anatomy.
        batch_size (`int`), dtype (`torch.dtype`), rounds (`int`): See `measure_speeds`.

    Returns:
        `list[dict]`: Rows with `model` ("teacher" and "student", or "model" alone), `num_tokens` (latent tokens, a
        teacher's patches, None where there is no choice), `macs` of an image with attention's products,
        `latency (ms)` of a batch and `images/s`.
    """
    vision = image_side(model)
    channels, *size = image_size_of(vision)
    contenders = [*([as_teacher(teacher)] if teacher else []), *as_students(vision, tuple(size), channels)]
    rows = [
        {"model": each.name if teacher else "model", "num_tokens": each.num_tokens, "macs": each.macs}
        for each in contenders
    ]
    for whole in [*([teacher.source] if teacher else []), vision]:
        pack_linear_layers(whole.to(dtype))
    for row, speed in zip(rows, measure_speeds(contenders, batch_size, dtype, rounds), strict=True):
        row |= {"latency (ms)": 1000 * batch_size / speed, "images/s": speed}
    return rows


def choose(rows: list[dict[str, object]], budget: Budget) -> dict[str, object]:
    """The row with most tokens that is within the budget.

    Raises:
        ValueError: if no row is within the budget; the message says how near the nearest one is.
    """
    students = [row for row in rows if row["model"] != "teacher"]
    for row in reversed(students):
        if budget.allows(row):
            return row
    nearest = (max if budget.is_least else min)(students, key=lambda row: row[budget.column])
    raise ValueError(
        f"Nothing is within {budget.text}: the nearest is {name_of(nearest)}, {measured(nearest, budget)}. Give it "
        "more, or bootstrap with fewer tokens."
    )


def name_of(row: dict[str, object]) -> str:
    return "the model" if row["num_tokens"] is None else f"num_tokens={row['num_tokens']}"


def measured(row: dict[str, object], budget: Budget) -> str:
    """The value of a row that the budget limits, with its unit."""
    value = row[budget.column]
    if budget.column == "macs":
        return f"{value / 1e9:.4g} G multiply-accumulates"
    return f"{value:.4g} {'images a second' if budget.is_least else 'ms'}"


def describe(settings: dict[str, object]) -> str:
    """The circumstances under which rows were measured, in a sentence."""
    count = settings["threads"]
    threads = f", {count} thread{'' if count == 1 else 's'}" if settings["device"] == "cpu" else ""
    scores = f" Accuracy or alignment is what the training noted, on {settings['scored_on']}."
    packed = " Linear layers are packed, as in frugalvit.Embedder." if settings["packed"] else ""
    return (
        f"On {settings['device']}{threads} in {settings['dtype']}, batches of {settings['batch_size']}; num_tokens "
        f"counts latent tokens or patches, neither [CLS] nor registers."
        f"{packed}{scores if settings['scored_on'] else ''}"
    )


def save(model: PreTrainedModel, num_tokens: int, source: Path, folder: Path):
    """Fill a folder with the files of a model that computes with so many tokens in calls that choose none; weights
    stay the same to the bit."""
    model.set_num_tokens(num_tokens)
    copy_with_configuration(model, source, folder)
    if model.config.model_type in ("sparseformer_llava", "sparseformer_paligemma"):
        # It inserts as many tokens for an image. The image side may have been cast.
        matching_processor(AutoProcessor.from_pretrained(source), model.float()).save_pretrained(folder)
