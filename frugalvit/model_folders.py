"""Folders of models: what the training or the card in one says of its model, and copies of one."""

import re
import shutil
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData, snapshot_download
from transformers import PreTrainedModel

from .common.files import read_json
from .common.loading import split_revision
from .training.components.checkpoints import NOT_IN_REPOSITORY, measured_of


# What a training may have noted of each count, the first choice first.
SCORES = ("accuracy", "alignment")
# Images that they may be of, the first choice first.
PARTS = ("test", "evaluation")
# What is read of the results that a training wrote.
RESULTS = {
    "arguments": {"teacher": str | None, "dataset": list[str] | None, "eval_dataset": list[str] | None},
    "best": dict[str, float | int] | None,
    "images": {f"{part} {what}": kind | None for part in PARTS for what, kind in (("split", str), ("images", int))},
}
# Weights of other frameworks, which no folder of ours needs.
OTHER_WEIGHTS = ("*.bin", "*.h5", "*.msgpack", "*.onnx", "*.pt", "*.pth")


def source_folder(name: str) -> Path:
    """The folder with the files of a model that was loaded."""
    hub_id, revision = split_revision(name)
    if (folder := Path(hub_id)).is_dir():
        return folder
    return Path(snapshot_download(hub_id, ignore_patterns=OTHER_WEIGHTS, **revision))


class Notes:
    """Notes on a model, in the `results.json` of its training and in its card.

    Args:
        folder (`Path`): The folder. There may be neither.

    Raises:
        ValueError: if the `results.json` holds something else.
    """

    def __init__(self, folder: Path):
        results, card = folder / "results.json", folder / "README.md"
        self.results = read_json(results, RESULTS) if results.is_file() else {}
        card = ModelCard.load(card) if card.is_file() else None
        self.text, data = (card.text, card.data) if card else ("", ModelCardData())
        self.bases, self.listed = data.get("base_model") or [], data.eval_results or []

    def teachers(self) -> list[str]:
        """Names of models that this one may have been made of, the first choice first."""
        bases = [self.bases] if isinstance(self.bases, str) else self.bases
        return [name for name in [(self.results.get("arguments") or {}).get("teacher"), *bases] if name]

    def scores(self, rows: list[dict[str, object]]) -> list[dict[str, float | None]]:
        """Scores of rows with `model` and `num_tokens`, the teacher's too: accuracy, or else alignment."""
        found = measured_of(self.results.get("best") or {})
        counts = [row["num_tokens"] for row in rows if row["model"] != "teacher"]
        for name in SCORES:
            scores = {count: found[key] for count in counts if (key := f"{name}_{count}") in found}
            if not scores:
                scores = {count: score for count, score in read_table(self.text, name).items() if count in counts}
                listed = [result.metric_value for result in self.listed if result.metric_type == name]
                # What the hub lists is that of the largest.
                scores = {counts[-1]: listed[0]} | scores if listed else scores
            if name in found:
                scores = {counts[-1]: found[name]} | scores
            if scores:
                teacher = found.get(f"teacher_{name}")
                of_rows = (teacher if row["model"] == "teacher" else scores.get(row["num_tokens"]) for row in rows)
                return [{name: score} for score in of_rows]
        return [{SCORES[0]: None} for _ in rows]

    def images(self) -> str | None:
        """The images that scores were measured on, in words."""
        images, arguments = self.results.get("images") or {}, self.results.get("arguments") or {}
        for part in PARTS:
            if split := images.get(f"{part} split"):
                names = arguments.get("eval_dataset") or arguments.get("dataset") or []
                return f"{split} of {' '.join(names)} ({images.get(f'{part} images') or 0:,} images)"
        described = (" of ".join(filter(None, (each.dataset_split, each.dataset_name))) for each in self.listed)
        return next(described, None)


def read_table(text: str, name: str) -> dict[int, float]:
    """Read a card's table with a column `num_tokens` and one of that name, whose numbers may be percentages."""
    scores = {}
    for table in re.findall(r"(?:^\|.*\|\n?)+", text, re.MULTILINE):
        header, *rows = ([cell.strip("` ") for cell in line.split("|")[1:-1]] for line in table.splitlines())
        if not {"num_tokens", name} <= {*header}:
            continue
        for row in rows:
            cells = dict(zip(header, row, strict=False))
            count, score = cells.get("num_tokens", ""), cells.get(name, "")
            if re.fullmatch(r"[\d,]+", count) and (number := re.fullmatch(r"([\d.]+)( ?%)?", score)):
                scores[int(count.replace(",", ""))] = float(number[1]) / (100 if number[2] else 1)
    return scores


def copy_with_configuration(model: PreTrainedModel, source: Path, folder: Path):
    """Fill a folder with a model's files and its present configuration; weights stay the same to the bit."""
    names = {path.name for path in source.iterdir() if path.is_file()}
    for name in names - NOT_IN_REPOSITORY(source, names):
        shutil.copyfile(source / name, folder / name)
    # That of an older version would not know of the change.
    model.write_code(folder)
    model.config.save_pretrained(folder)
