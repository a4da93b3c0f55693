"""Model cards of trained models, with their metrics and the command that trained them."""

import os
import shlex
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, try_to_load_from_cache

from ..modeling.hub import TASKS, auto_class, code_examples, model_card
from .arguments import DataArguments
from .choices import OPEN_CLIP, SUBSET
from .files import HUB_ID, split_revision


# Hub id of the data set that contains the images of `SUBSET`.
SUBSET_OF = "uoft-cs/cifar10"
# Code example in a card. It follows the code that loads `model` and `processor`.
USE = """

inputs = processor(image, return_tensors="pt")
outputs = model.base_model(**inputs)
tokens, embedding = outputs.last_hidden_state, outputs.pooler_output"""
# Additional code for single-label classifiers (`LABEL`), and for multi-label classifiers and regression (`LOGITS`).
LABEL = """
label = model.config.id2label[model(**inputs).logits.argmax(-1).item()]"""
LOGITS = """
logits = model(**inputs).logits"""

NEEDS_CONTEXT_BROADCAST = (
    "Context Broadcasting was inserted into it: after loading, call `frugalvit.load_context_broadcast(model, folder)`."
)


def write_card(folder: Path, model, summary: str, metrics: dict[str, float], trainer):
    """Write the card of a trained model into its folder, as `README.md`.

    Args:
        folder (`Path`): The model's folder.
        model (`PreTrainedModel`): The trained model.
        summary (`str`): First paragraph of the card.
        metrics (`dict[str, float]`): Metrics of the model.
        trainer (`ImageTrainer`): The trainer of `model`, or of a larger model that contains `model`.
    """
    args = trainer.args
    data = trainer.data_args
    base = trainer.base_model and split_revision(trainer.base_model.removeprefix(f"{OPEN_CLIP}hf-hub:"))[0]
    # The card's metadata may contain hub ids, but neither folders nor revisions.
    hub_id = base if base and hub_ids([base]) else None
    task = TASKS[auto_class(model)]
    usage = trainer.usage
    # A backbone needs no additional code, because its code example already computes feature maps.
    if usage is None and not type(model).__name__.endswith("Backbone"):
        answer = LABEL if model.config.problem_type in (None, "single_label_classification") else LOGITS
        usage = {"image-classification": USE + answer, "image-feature-extraction": USE}.get(task)
    trained_on = hub_ids(data and data.dataset)
    measured_on = hub_ids(data and (data.eval_dataset or data.dataset))
    metric = args.metric_for_best_model
    name = Path(args.output_dir).name
    results = None
    # The hub lists results by the data set's hub id. Results are left out if the data set has no hub id.
    if metric in metrics and measured_on:
        is_tested = trainer.measured_dataset is not trainer.eval_dataset
        result = EvalResult(
            task_type=task,
            dataset_type=measured_on[0],
            dataset_name=" ".join(measured_on),
            dataset_split=data and (data.tested if is_tested else data.evaluated),
            metric_type=metric,
            metric_value=round(metrics[metric], 4),
        )
        results = [result]
    parameters = sum(each.numel() for each in model.parameters())
    paragraphs = [
        summary,
        f"{parameters:,} parameters; {describe_step(trainer)}; seed {args.seed}.",
        NEEDS_CONTEXT_BROADCAST if isinstance(getattr(model.config, "context_broadcast", None), dict) else "",
    ]
    load, *others = code_examples(model)
    paragraphs += [f"```python\n{code}\n```" for code in (load + (usage or ""), *others)]
    if args.command:
        names = [*data.dataset, *(data.eval_dataset or ())] if data else []
        paragraphs.append(f"Made by\n\n```\n{portable_command(args.command, names)}\n```")
    model_card(
        model,
        name,
        *paragraphs,
        license=args.license or license_of(base),
        datasets=trained_on or None,
        pipeline_tag=task,
        base_model=hub_id,
        base_model_relation=hub_id and trainer.base_model_relation,
        model_name=name,
        eval_results=results,
    ).save(folder / "README.md")


def share_error(share: float, count: int) -> float:
    """Return the standard error of a share of `count` images: half the width of the Wilson interval for one standard
    deviation. The usual formula, sqrt(share * (1 - share) / count), would return 0 for shares of 0 and 1."""
    return (share * (1 - share) / count + 1 / (4 * count**2)) ** 0.5 / (1 + 1 / count)


def describe_step(trainer) -> str:
    """Describe the step that trained the saved weights, and the images that this step was chosen and measured on."""
    data = trainer.data_args
    chosen = "not evaluated"
    if trainer.eval_dataset is not None:
        evaluated = f"{(data and data.evaluated) or 'eval_dataset'} ({len(trainer.eval_dataset):,} images)"
        chosen = f"chosen and measured on {evaluated}"
        if trainer.measured_dataset is not trainer.eval_dataset:
            tested = f"{(data and data.tested) or 'test_dataset'} ({len(trainer.test_dataset):,} images)"
            chosen = f"chosen on {evaluated}, measured on {tested}"
    return f"step {trainer.kept_step} of {trainer.state.max_steps}, {chosen}"


def hub_ids(names: list[str] | None) -> list[str]:
    """Return the names that are hub ids of data sets or models, without revisions. Other names are left out."""
    ids = [SUBSET_OF if name == SUBSET else split_revision(name)[0] for name in names or ()]
    return [name for name in ids if HUB_ID.fullmatch(name) and not os.path.exists(name)]


def name_images(data: DataArguments | None) -> str:
    """Return the hub ids of the training data sets for the card, or a description if there are no hub ids."""
    return " ".join(hub_ids(data and data.dataset)) or "local images"


def license_of(model: str | None) -> str | None:
    """Return the license in a model's card, or None. The card is read from the model's folder or from the hub's local
    cache."""
    try:
        card = Path(model, "README.md") if Path(model).is_dir() else try_to_load_from_cache(model, "README.md")
        return ModelCard.load(card).data.get("license") if Path(card).is_file() else None
    # There is an error if `model` is None, if `model` is neither a folder nor in the cache, or if the card's YAML
    # cannot be read.
    except Exception:
        return None


def strip_directory(name: str) -> str:
    """Shorten a path to its last part. A prefix with a colon, such as `open_clip:local-dir:`, is kept."""
    head, colon, path = name.rpartition(":")
    is_place = path.startswith(("/", "~", "./", "../")) or os.path.exists(path)
    return f"{head}{colon}{Path(path).name}" if is_place else name


def portable_command(command: str, data_sets: Iterable[str]) -> str:
    """Shorten paths in a command line to their last part. Paths that are in `data_sets` become a placeholder
    instead."""

    def portable(text: str) -> str:
        option, equals, value = text.partition("=") if text.startswith("--") else ("", "", text)
        own = value in data_sets and value != strip_directory(value)
        return f"{option}{equals}{'path/to/images' if own else strip_directory(value)}"

    return shlex.join(map(portable, shlex.split(command)))
