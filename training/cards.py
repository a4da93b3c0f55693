"""Model cards of trained models, with what was measured."""

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, try_to_load_from_cache

from ..modeling.model_card import TASKS, auto_class, code_examples, make_card
from .arguments import DataArguments
from .choices import OPEN_CLIP, SUBSET
from .files import split_revision


# The data set that the shipped subset is from.
SUBSET_OF = "uoft-cs/cifar10"
# Code that uses a loaded model.
USE = """

inputs = processor(image, return_tensors="pt")
outputs = model.base_model(**inputs)
tokens, embedding = outputs.last_hidden_state, outputs.pooler_output"""
LABEL = """
label = model.config.id2label[model(**inputs).logits.argmax(-1).item()]"""
# Of several labels, or of a regression.
LOGITS = """
logits = model(**inputs).logits"""

NEEDS_CONTEXT_BROADCAST = (
    "Context Broadcasting was inserted into it: after loading, call `frugalvit.load_context_broadcast(model, folder)`."
)


def write_card(
    folder: Path,
    trainer,
    model=None,
    summary: str | None = None,
    use: str | None = None,
    metrics: dict[str, float] | None = None,
):
    """Write the card of a trained model into its folder, as `README.md`. `model`, `summary` and `metrics` take the
    place of the trainer's; `use` is code that uses `model` and `processor`, where that of the task does not fit."""
    model = model or trainer.trained
    args = trainer.args
    data = trainer.data
    metrics = trainer.metrics if metrics is None else metrics
    base = trainer.base_model and split_revision(trainer.base_model.removeprefix(f"{OPEN_CLIP}hf-hub:"))[0]
    # The hub knows its own ids only, neither folders nor revisions.
    hub_id = base if base and hub_ids([base]) else None
    task = TASKS[auto_class(model)]
    # How a backbone is loaded says how it is used, too.
    if use is None and not type(model).__name__.endswith("Backbone"):
        answer = LABEL if model.config.problem_type in (None, "single_label_classification") else LOGITS
        use = {"image-classification": USE + answer, "image-feature-extraction": USE}.get(task)
    trained_on = hub_ids(data and data.dataset)
    measured_on = hub_ids(data and (data.eval_dataset or data.dataset))
    metric = args.metric_for_best_model
    name = Path(args.output_dir).name
    results = None
    # The hub lists results by the id of their data set.
    if metric in metrics and measured_on:
        result = EvalResult(
            task_type=task,
            dataset_type=measured_on[0],
            dataset_name=" ".join(measured_on),
            dataset_split=data and (data.tested or data.evaluated),
            metric_type=metric,
            metric_value=round(metrics[metric], 4),
        )
        results = [result]
    chosen = "not evaluated"
    if trainer.eval_dataset is not None:
        evaluated = f"{(data and data.evaluated) or 'eval_dataset'} ({len(trainer.eval_dataset):,} images)"
        chosen = f"chosen and measured on {evaluated}"
        if data and data.tested:
            chosen = f"chosen on {evaluated}, measured on {data.tested}"
    step = f"step {trainer.kept_step} of {trainer.state.max_steps}"
    parameters = sum(each.numel() for each in model.parameters())
    paragraphs = [
        summary or trainer.summary(metrics),
        f"{parameters:,} parameters; {step}, {chosen}; seed {args.seed}.",
        NEEDS_CONTEXT_BROADCAST if isinstance(getattr(model.config, "context_broadcast", None), dict) else "",
    ]
    load, *others = code_examples(model)
    paragraphs += [f"```python\n{code}\n```" for code in (load + (use or ""), *others)]
    if trainer.command:
        command = portable_command(trainer.command, [*data.dataset, *(data.eval_dataset or ())])
        paragraphs.append(f"Made by\n\n```\n{command}\n```")
    make_card(
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


def hub_ids(names: list[str] | None) -> list[str]:
    """Return the ids, without revisions, of data sets or models that are on the hub."""
    ids = [SUBSET_OF if name == SUBSET else split_revision(name)[0] for name in names or ()]
    return [name for name in ids if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) and not os.path.exists(name)]


def name_images(data: DataArguments | None) -> str:
    return " ".join(hub_ids(data and data.dataset)) or "images that are on no hub"


def license_of(model: str | None) -> str | None:
    """The license that a model's card names; None if there is no card in its folder or in the cache of the hub."""
    try:
        card = Path(model, "README.md") if Path(model).is_dir() else try_to_load_from_cache(model, "README.md")
        return ModelCard.load(card).data.get("license") if Path(card).is_file() else None
    # There is no model, none is in the cache, its name is no hub id, or its YAML has one of many faults.
    except Exception:
        return None


def strip_directory(name: str) -> str:
    """Shorten the path in a name to its last part, also after a colon (`open_clip:local-dir:FOLDER`)."""
    head, colon, path = name.rpartition(":")
    is_place = path.startswith(("/", "~", "./", "../")) or os.path.exists(path)
    return f"{head}{colon}{Path(path).name}" if is_place else name


def portable_command(command: str, data_sets: Iterable[str]) -> str:
    """Remove this machine's paths from a command line; `data_sets` are its arguments that name images."""

    def portable(text: str) -> str:
        option, equals, value = text.partition("=") if text.startswith("--") else ("", "", text)
        own = value in data_sets and value != strip_directory(value)
        return f"{option}{equals}{'path/to/images' if own else strip_directory(value)}"

    return shlex.join(map(portable, shlex.split(command)))
