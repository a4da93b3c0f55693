"""Model cards of trained models, with what was measured."""

from pathlib import Path

from accelerate import PartialState
from huggingface_hub import EvalResult, ModelCard, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from ...common.choices import SUBSET
from ...common.files import write_text
from ...common.loading import split_revision
from ...common.names import is_hub_id, portable_command
from ...common.tables import format_markdown
from ...modeling.hub import embedding_example, loading_example, make_card, pipeline_tag
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
        folder (`Path`): Folder in which the card is written, as `README.md`.
        model (`PreTrainedModel`): The model.
        summary (`str`): The model and its measured numbers in a sentence or two.
        data (`ImageArguments`), run (`RunArguments`), state (`TrainingState`): The training's arguments and state.
        base_model (`str`, *optional*): The model from which training started.
        metric (`str`, *optional*, defaults to `"accuracy"`): The number that the hub lists, if it was measured.
        use (`str`, *optional*): Code that uses `model` and `processor`, where that of the task does not fit.
        num_parameters (`int`, *optional*): Number of saved parameters, if it is not that of the parameters in memory.
    """
    name = Path(run.output_dir).name
    # Projections of embeddings have no pipeline of their own.
    task = pipeline_tag(model) or "image-feature-extraction"
    base = base_model and split_revision(base_model)[0]
    measured = state.measured
    metric = metric if metric in measured else "alignment"
    results = None
    if metric in measured:
        evaluated = hub_ids(data.eval_dataset or data.dataset) or ["images"]
        result = EvalResult(
            task_type=task,
            dataset_type=evaluated[0],
            dataset_name=" ".join(evaluated),
            dataset_split=data.tested or data.evaluated,
            metric_type=metric,
            metric_value=round(measured[metric], 4),
        )
        results = [result]
    command = portable_command(run.record["command"], [*data.dataset, *(data.eval_dataset or [])])
    num_parameters = num_parameters or sum(parameter.numel() for parameter in model.parameters())
    use = USES.get(pipeline_tag(model), "") if use is None else use
    make_card(
        *(model, name, summary),
        f"{num_parameters:,} parameters; {choice_of_epoch(data, run, state)}; seed {run.seed}.",
        *(f"```python\n{code}\n```" for code in (f"{loading_example(model)}{use}", embedding_example(model)) if code),
        *("Made by", f"```\n{command}\n```"),
        license=run.license or license_of(base),
        datasets=hub_ids(data.dataset) or None,
        pipeline_tag=task,
        # The hub knows its own ids only, neither folders nor open_clip's names nor revisions.
        base_model=base if base and is_hub_id(base) else None,
        model_name=name,
        eval_results=results,
    ).save(folder / "README.md")


def choice_of_epoch(data: ImageArguments, run: RunArguments, state: TrainingState) -> str:
    """The epoch that a run kept, the images on which it was chosen, and those on which it was measured, in words."""
    images = run.record.get("images", {})

    def part(split: str, which: str) -> str:
        count = images.get(f"{which} images")
        # A file that is given to evaluate on has one split, "train".
        split += " of --eval-dataset" if data.eval_dataset else ""
        return f"{split}{'' if count is None else f' ({count:,} images)'}"

    epoch = f"epoch {(state.best or {}).get('epoch', state.epoch)} of {run.epochs}"
    if data.evaluated is None or state.best is None:
        return f"{epoch}, none was evaluated"
    chosen = part(data.evaluated, "evaluation")
    if data.tested is None:
        return f"{epoch}, chosen and measured on {chosen}"
    return f"{epoch}, chosen on {chosen}, measured on {part(data.tested, 'test')}"


def count_measured(run: RunArguments) -> str:
    """The number of images that were measured, as words behind a share: " of 1,000 images", or nothing."""
    images = run.record.get("images", {})
    count = images.get("test images", images.get("evaluation images"))
    return "" if count is None else f" of {count:,} images"


def hub_ids(datasets: list[str]) -> list[str]:
    """The ids of those data sets that are on the hub; files and folders of this machine have none."""
    ids = [EMBEDDED if name == SUBSET else split_revision(name)[0] for name in datasets]
    return [name for name in ids if is_hub_id(name)]


def name_images(datasets: list[str]) -> str:
    """Data sets as a card speaks of them."""
    return " ".join(hub_ids(datasets)) or "images that are on no hub"


def say_license(run: RunArguments, base_model: str | None = None):
    """Print before a training that its card will name no license, if so: `frugalvit publish` asks for one."""
    if not (run.license or license_of(base_model and split_revision(base_model)[0])):
        PartialState().print(
            "The card will name no license, without which nothing is published: --license, for example apache-2.0, "
            "here or to `frugalvit publish`."
        )


def license_of(model: str | None) -> str | None:
    """The license that a model's card names; None if there is no card in its folder or in the cache of the hub."""
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


def add_table(folder: Path, title: str, rows: list[dict]):
    """Add a table to a model's card, in the place of an earlier one of that title."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8").partition(f"\n## {title}\n")[0].rstrip()
    write_text(card, f"{text}\n\n## {title}\n\n{format_markdown(rows)}\n")
