"""Model cards of recipes, with what they measured."""

import json
import re
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from ...common.data import SUBSET
from ...common.files import write_text
from ...common.loading import split_revision
from ...common.tables import format_markdown
from ...modeling.hub import loading_example, pipeline_tag
from .arguments import ImageArguments, RunArguments
from .checkpoints import TrainingState


# The data set that the embedded images are from.
EMBEDDED = "uoft-cs/cifar10"
# What is done with a model that was loaded, by the hub's name of its task.
USES = {
    "image-classification": """

inputs = processor(image, return_tensors="pt")
label = model.config.id2label[model(**inputs).logits.argmax(-1).item()]
tokens = model.base_model(**inputs).last_hidden_state  # (1, tokens, channels)
embedding = model.base_model(**inputs).pooler_output  # (1, channels)""",
    "image-feature-extraction": """

inputs = processor(image, return_tensors="pt")
tokens = model(**inputs).last_hidden_state  # (1, tokens, channels)
embedding = model(**inputs).pooler_output  # (1, channels)""",
}


def write_card(
    folder: Path,
    model,
    summary: str,
    data: ImageArguments,
    run: RunArguments,
    state: TrainingState,
    base_model: str | None = None,
    metric: str = "accuracy",
    use: str | None = None,
    num_parameters: int | None = None,
):
    """Write the card of a trained model.

    Args:
        folder (`Path`): Where it goes, as `README.md`.
        model: The model.
        summary (`str`): What it is and what was measured, a sentence or two.
        data, run, state: The recipe's data, arguments and the state it is in.
        base_model (`str`, *optional*): The model that it came from.
        metric (`str`, *optional*, defaults to `"accuracy"`): What the hub is to list, if it was measured.
        use (`str`, *optional*): Code that uses `model` and `processor`, where those of the task do not fit.
        num_parameters (`int`, *optional*): Where those in memory are others than those that are saved.
    """
    name = Path(run.output_dir).name
    # Projections of embeddings have no pipeline of their own.
    task = pipeline_tag(model) or "image-feature-extraction"
    base = base_model and split_revision(base_model)[0]
    metric = metric if metric in state.best else "alignment"
    results = None
    if metric in state.best:
        evaluated = data.eval_dataset or data.dataset
        result = EvalResult(
            task_type=task,
            dataset_type=(hub_ids(evaluated) or ["images"])[0],
            dataset_name=" ".join(Path(each).name for each in evaluated),
            dataset_split=data.evaluated,
            metric_type=metric,
            metric_value=round(state.best[metric], 4),
        )
        results = [result]
    card = ModelCardData(
        library_name="transformers",
        license=run.license or license_of(base),
        datasets=hub_ids(data.dataset) or None,
        tags=["frugalvit", model.config.model_type],
        pipeline_tag=task,
        # The hub knows its own ids only, neither folders nor open_clip's names nor revisions.
        base_model=None if base is None or Path(base).is_dir() or ":" in base else base,
        model_name=name,
        eval_results=results,
    )
    command = json.loads((Path(run.output_dir) / "run.json").read_text(encoding="utf-8"))["command"]
    num_parameters = num_parameters or sum(parameter.numel() for parameter in model.parameters())
    use = USES.get(pipeline_tag(model), "") if use is None else use
    evaluated = f"the best on the split {data.evaluated} of {' '.join(data.eval_dataset or data.dataset)}"
    ModelCard(
        f"---\n{card.to_yaml()}\n---\n\n# {name}\n\n{summary}\n\n"
        f"{num_parameters:,} parameters; epoch {state.epoch} of {run.epochs}, "
        f"{'none was evaluated' if data.evaluated is None else evaluated}; seed {run.seed}.\n\n"
        f"```python\n{loading_example(model)}{use}\n```\n\n"
        f"Made by\n\n```\n{command}\n```\n"
    ).save(folder / "README.md")


def hub_ids(datasets: list[str]) -> list[str]:
    """The ids of those data sets that are on the hub; files and folders of this machine have none."""
    ids = [EMBEDDED if name == SUBSET else split_revision(name)[0] for name in datasets]
    return [name for name in ids if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists()]


def license_of(model: str | None) -> str | None:
    """What the card of a model says that is here, in a folder or in the cache of the hub."""
    if model is None:
        return None
    card = Path(model) / "README.md"
    if not Path(model).is_dir():
        try:
            card = try_to_load_from_cache(model, "README.md")
        except HFValidationError:
            return None
    if not isinstance(card, str | Path) or not Path(card).is_file():
        return None
    try:
        return ModelCard.load(card).data.get("license")
    # As many ways to fail as YAML has: a card that cannot be read says nothing.
    except Exception:
        return None


def name_of(model: str) -> str:
    """A model as a card speaks of it: where a folder is on this machine says nothing to others."""
    return Path(model).name if Path(model).is_dir() else model


def add_table(folder: Path, title: str, rows: list[dict]):
    """Add a table to a model's card, in the place of an earlier one of that title."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8").partition(f"\n## {title}\n")[0].rstrip()
    write_text(card, f"{text}\n\n## {title}\n\n{format_markdown(rows)}\n")
