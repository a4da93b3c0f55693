"""Model cards of trained models, with what was measured."""

import shlex
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from ..common.choices import SUBSET
from ..common.loading import split_revision
from ..common.names import is_hub_id, portable_command
from ..modeling.hub import embedding_example, loading_example, make_card, pipeline_tag
from .arguments import DataArguments


# The data set that the shipped subset is from.
SUBSET_OF = "uoft-cs/cifar10"
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
    """Write the card of a trained model into its folder, as `README.md`.

    Args:
        folder (`Path`): The folder.
        trainer (`ImageTrainer`): What trained it.
        model (`PreTrainedModel`, *optional*), summary (`str`, *optional*): The model and what is said of it, if not
            the trainer's.
        use (`str`, *optional*): Code that uses `model` and `processor`, where that of the task does not fit.
        metrics (`dict[str, float]`, *optional*): What was measured of the model, if it is not the trainer's.
    """
    model, args, data = model or trainer.trained, trainer.args, trainer.data
    metrics = trainer.metrics if metrics is None else metrics
    # Projections of embeddings have no pipeline of their own.
    task = pipeline_tag(model) or "image-feature-extraction"
    base = trainer.base_model and split_revision(trainer.base_model)[0]
    metric, results = args.metric_for_best_model, None
    trained_on, measured_on = named(data, "dataset"), named(data, "eval_dataset") or named(data, "dataset")
    if metric in metrics:
        result = EvalResult(
            task_type=task,
            dataset_type=(measured_on or ["images"])[0],
            dataset_name=" ".join(measured_on) or "images",
            dataset_split=data and (data.tested or data.evaluated),
            metric_type=metric,
            metric_value=round(metrics[metric], 4),
        )
        results = [result]
    data_sets = [*data.dataset, *(data.eval_dataset or ())] if data else []
    use = USES.get(pipeline_tag(model), "") if use is None else use
    about = f"{sum(each.numel() for each in model.parameters()):,} parameters; {chosen(trainer)}; seed {args.seed}."
    make_card(
        model,
        Path(args.output_dir).name,
        summary or trainer.summary(metrics),
        about,
        NEEDS_CONTEXT_BROADCAST if isinstance(getattr(model.config, "context_broadcast", None), dict) else "",
        *(f"```python\n{code}\n```" for code in (f"{loading_example(model)}{use}", embedding_example(model)) if code),
        "Made by",
        f"```\n{portable_command(trainer.command, data_sets)}\n```",
        license=args.license or license_of(base),
        datasets=trained_on or None,
        pipeline_tag=task,
        # The hub knows its own ids only, neither folders nor open_clip's names nor revisions.
        base_model=base if base and is_hub_id(base) else None,
        model_name=Path(args.output_dir).name,
        eval_results=results,
    ).save(folder / "README.md")


def chosen(trainer) -> str:
    """The step that a run kept, and the images on which it was chosen and measured, in words."""
    args, data, step, steps = trainer.args, trainer.data, trainer.kept_step, trainer.state.max_steps
    epochs = args.num_train_epochs
    epoch = f"step {step} of {steps}"
    if args.max_steps <= 0:
        epoch = f"epoch {epochs * step / max(steps, 1):.3g} of {epochs:g}"
    if trainer.eval_dataset is None:
        return f"{epoch}, not evaluated"
    evaluated = f"{(data and data.evaluated) or 'eval_dataset'} ({len(trainer.eval_dataset):,} images)"
    if not (data and data.tested):
        return f"{epoch}, chosen and measured on {evaluated}"
    return f"{epoch}, chosen on {evaluated}, measured on {data.tested}"


def named(data: DataArguments | None, which: str) -> list[str]:
    """The ids of those data sets that are on the hub; files and folders of this machine have none."""
    names = (data and getattr(data, which)) or []
    ids = [SUBSET_OF if name == SUBSET else split_revision(name)[0] for name in names]
    return [name for name in ids if is_hub_id(name)]


def name_images(data: DataArguments | None) -> str:
    """The images of a training as a card speaks of them."""
    return " ".join(named(data, "dataset")) or "images that are on no hub"


def command_line(prog: str, argv: list[str]) -> str:
    """A command as it is typed."""
    return shlex.join([*prog.split(), *argv])


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
