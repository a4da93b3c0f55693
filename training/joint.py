"""Train a ViT together with an agent CNN, from which it learns its biases (Zhang et al., Bootstrapping ViTs).

    accelerate launch -m frugalvit.training.joint --output OUT --variant joint-small

The defaults are the reference implementation's for CIFAR-10, its start (`--initialization reference`), places of
dropout and clipping among them. Not as there: hints fade with every step, not with every epoch, and biases and norms
do not decay. The agent's BatchNorm knows the images of its own process alone, so that several processes do not have
the losses of one to the digit.
"""

import dataclasses
import functools
import math
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import ViTImageProcessor

from ..common.data import class_names, load_splits
from ..common.files import whole_folder
from ..common.metrics import TopKAccuracy
from ..common.views import EvalView, ImageFormat
from ..configuration.configuration_bootstrapped_vit import VARIANTS, BootstrappedViTConfig
from ..modeling.hub import image_processor_config
from ..modeling.modeling_bootstrapped_vit import BootstrappedViTForImageClassification
from .components.arguments import (
    DataArguments,
    RunArguments,
    run_as_program,
)
from .components.augmentation import SmallDataView
from .components.cards import choice_of_epoch, count_measured, name_images, say_license, write_card
from .components.checkpoints import TrainingState
from .components.loaders import make_loaders
from .components.loop import fit
from .components.models import choose_attention, configure_start, read_values
from .components.optimizers import optimizer_with_schedule
from .components.runs import start_accelerator
from .components.sharding import prepare
from .options.joint import CLIPPING, PROG, TwinArguments, parse


# Folders of the two models within a run's, and what their accuracies are called.
PARTS = {"vit": "accuracy", "agent": "agent_accuracy"}


def main(argv: list[str] | None = None) -> int:
    """Run the recipe with a command line's arguments."""
    all_arguments = parse(argv)
    arguments, data, recipe, optimization, run = all_arguments
    if run.max_grad_norm is None:
        run.max_grad_norm = CLIPPING.get(arguments.variant.removesuffix("-res"), 0.0)
    accelerator = start_accelerator(run, PROG, argv, list(all_arguments))
    say_license(accelerator, run)

    train_images, eval_images, test_images = load_splits(data, learns_labels=True)
    names = class_names(train_images)
    if eval_images is not None and class_names(eval_images) is None:
        raise ValueError("The evaluation images have no labels; choose others with --eval-dataset or --eval-split.")

    model = build_twins(arguments, names, run.seed)
    # An agent has no attention.
    choose_attention(model.vit, arguments.attn_implementation, accelerator.device)
    if run.compile:
        model.compile()
    values = image_processor_config(model.config)
    processor = ViTImageProcessor(**{name: value for name, value in values.items() if name != "image_processor_type"})
    image_format = ImageFormat.from_processor(processor)
    view = SmallDataView(
        image_format,
        recipe.crop,
        padding=recipe.crop_padding,
        padding_mode=recipe.padding_mode,
        crop_size=recipe.crop_size,
        scale=recipe.crop_scale,
        flip=recipe.flip,
        randaugment_layers=0,
    )
    evaluation = (eval_images, EvalView(image_format))
    loader, eval_loader, test_loader = make_loaders(
        accelerator, data, run, (train_images, view), evaluation, test_images
    )
    optimizer, scheduler = optimizer_with_schedule(
        model, optimization, run.epochs, loader.steps_per_epoch, recipe.optimizer, sam_rho=recipe.sam_rho
    )
    model, optimizer, scheduler = prepare(accelerator, model, optimizer, scheduler)
    # A tensor, as a compiled model would be compiled anew for each number.
    hint_share = torch.ones((), device=accelerator.device)

    def before_step(step: int, steps: int):
        hint_share.fill_(1 - step / steps)

    def save(folder: Path, state: TrainingState, weights: dict[str, torch.Tensor]):
        trained = accelerator.unwrap_model(model)
        trained.save_pretrained(folder, state_dict=weights)
        processor.save_pretrained(folder)
        write_card(
            folder, trained, f"A ViT and its agent CNN, {accuracies(data, run, state.measured)}", data, run, state
        )

    state = fit(
        accelerator,
        run,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        compute_loss=lambda model, batch: (
            model(pixel_values=batch["pixel_values"], labels=batch["labels"], hint_share=hint_share).loss
        ),
        evaluate=functools.partial(evaluate_twins, accelerator),
        eval_loader=eval_loader,
        test_loader=test_loader,
        save=save,
        before_step=before_step,
        clipped=lambda model: accelerator.unwrap_model(model).vit,
    )
    if accelerator.is_main_process:
        for name, accuracy in PARTS.items():
            save_alone(name, accuracy, processor, data, run, state)
    result = "Not evaluated"
    if eval_loader:
        result = f"Accuracy {state.measured['accuracy']:.4f}, its agent's {state.measured['agent_accuracy']:.4f}"
    accelerator.print(
        f"{result}: {choice_of_epoch(data, run, state)}. See {run.output_dir}; the ViT alone is in "
        f"{Path(run.output_dir) / 'vit'}."
    )
    return 0


def build_twins(arguments: TwinArguments, names: list[str], seed: int = 0) -> BootstrappedViTForImageClassification:
    """The pair for these class names, in float32."""
    values = VARIANTS[arguments.variant]
    config = BootstrappedViTConfig(
        **{
            **values,
            "vit_config": values["vit_config"] | read_values("vit", arguments.vit),
            "agent_config": values["agent_config"] | read_values("agent", arguments.agent),
            **read_values("config_overrides", arguments.config_overrides),
            "initialization": "default",
        },
        id2label=dict(enumerate(names)),
        label2id={name: index for index, name in enumerate(names)},
    )
    blocks = config.vit_config.num_hidden_layers
    without = {math.ceil(depth * blocks - 1e-6) - 1 for depth in arguments.without_hint_at}
    if without:
        hinted = range(blocks) if config.hint_layers is None else config.hint_layers
        config.hint_layers = [layer for layer in hinted if layer not in without]
    configure_start(config, arguments.initialization, arguments.initialization_options, seed)
    return BootstrappedViTForImageClassification._from_config(config)


def starting_twins(values: dict, config) -> BootstrappedViTForImageClassification:
    """The pair that a run began with; as `frugalvit.training.train.starting_model`."""
    arguments = TwinArguments(
        **{f.name: values[f.name] for f in dataclasses.fields(TwinArguments) if f.name in values}
    )
    names = [config.id2label[label] for label in range(config.num_labels)]
    return build_twins(arguments, names, values["seed"])


@torch.inference_mode()
def evaluate_twins(accelerator: Accelerator, model, loader) -> dict[str, float]:
    """Loss of both, without hints, and accuracy of each, over all processes."""
    was_training = model.training
    model.eval()
    accuracies, loss, count = {"accuracy": TopKAccuracy(), "agent_accuracy": TopKAccuracy()}, 0.0, 0
    for batch in loader:
        outputs = model(pixel_values=batch["pixel_values"], labels=batch["labels"], hint_share=0.0)
        logits = (outputs.logits.float(), outputs.agent_logits.float())
        *logits, losses, labels = accelerator.gather_for_metrics(
            (*logits, outputs.loss.float().expand(len(batch["labels"])), batch["labels"])
        )
        loss += losses.sum().item()
        count += len(labels)
        for metric, scores in zip(accuracies.values(), logits, strict=True):
            metric.add_batch(predictions=scores.cpu().numpy(), references=labels.cpu().numpy())
    model.train(was_training)
    measured = {name: metric.compute()["accuracy"] for name, metric in accuracies.items()}
    return {"loss": loss / count, **measured}


def accuracies(data: DataArguments, run: RunArguments, measured: dict[str, float]) -> str:
    together = f"trained together on {name_images(data.dataset)}"
    if "accuracy" not in measured:
        return f"{together}, not evaluated."
    both = f"{measured['accuracy']:.2%} and {measured['agent_accuracy']:.2%}"
    return f"{together}: accuracy {both}{count_measured(run)}."


def save_alone(name: str, accuracy: str, processor, data: DataArguments, run: RunArguments, state: TrainingState):
    """Write one of the two, as it was in the best epoch, to a folder of its own within the run's."""
    model = getattr(BootstrappedViTForImageClassification.from_pretrained(run.output_dir), name)
    best = {"epoch": state.best["epoch"]}
    if accuracy in state.measured:
        best["accuracy"] = state.measured[accuracy]
    alone = dataclasses.replace(state, best=best)
    with whole_folder(Path(run.output_dir) / name, overwrite=True) as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        summary = f"The {name} of the two that were {accuracies(data, run, state.measured)}"
        write_card(folder, model, summary, data, run, alone)


if __name__ == "__main__":
    run_as_program(main, PROG)
