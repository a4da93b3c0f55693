"""Model cards of recipes, with what they measured."""

import json
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ...common.loading import split_revision
from ...modeling.hub import loading_example, pipeline_tag
from .arguments import ImageArguments, RunArguments
from .checkpoints import TrainingState


def write_card(
    folder: Path,
    model,
    summary: str,
    data: ImageArguments,
    run: RunArguments,
    state: TrainingState,
    base_model: str | None = None,
    metric: str = "accuracy",
):
    """Write the card of a trained model.

    Args:
        folder (`Path`): Where it goes, as `README.md`.
        model: The model.
        summary (`str`): What it is and what was measured, a sentence or two.
        data, run, state: The recipe's data, arguments and the state it is in.
        base_model (`str`, *optional*): The model that it came from.
        metric (`str`, *optional*, defaults to `"accuracy"`): What the hub is to list, if it was measured.
    """
    dataset, name = " ".join(data.dataset), Path(run.output_dir).name
    hub_id = base_model and split_revision(base_model)[0]
    results = None
    if metric in state.best:
        result = EvalResult(
            task_type=pipeline_tag(model),
            dataset_type=dataset,
            dataset_name=dataset,
            dataset_split=data.evaluated,
            metric_type=metric,
            metric_value=round(state.best[metric], 4),
        )
        results = [result]
    card = ModelCardData(
        library_name="transformers",
        tags=["frugalvit", model.config.model_type],
        pipeline_tag=pipeline_tag(model),
        # The hub knows its own ids only, neither folders nor open_clip's names nor revisions.
        base_model=None if hub_id is None or Path(hub_id).is_dir() or ":" in hub_id else hub_id,
        model_name=name,
        eval_results=results,
    )
    command = json.loads((Path(run.output_dir) / "run.json").read_text(encoding="utf-8"))["command"]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    evaluated = f"the best on the split {data.evaluated} of {' '.join(data.eval_dataset or data.dataset)}"
    ModelCard(
        f"---\n{card.to_yaml()}\n---\n\n# {name}\n\n{summary}\n\n"
        f"{parameters:,} parameters; epoch {state.epoch} of {run.epochs}, "
        f"{'none was evaluated' if data.evaluated is None else evaluated}; seed {run.seed}.\n\n"
        f"```python\n{loading_example(model)}\n```\n\n"
        f"Made by\n\n```\n{command}\n```\n"
    ).save(folder / "README.md")
