"""Train a ViT together with an agent CNN, from which it learns its biases (Zhang et al., Bootstrapping ViTs).

    accelerate launch -m frugalvit.training.joint --output OUT --variant joint-small

The defaults are the reference implementation's for CIFAR-10, its start (`--initialization reference`), places of
dropout and clipping among them. Not as there: hints fade with every step, not with every epoch, and biases and norms
do not decay. The agent's BatchNorm knows the images of its own process alone, so that several processes do not have
the losses of one to the digit.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import ViTImageProcessor

from ..common.files import whole_folder
from ..common.labels import class_names
from ..common.metrics import TopKAccuracy
from ..common.splits import load_splits
from ..common.views import EvalView, ImageFormat
from ..configuration.configuration_bootstrapped_vit import VARIANTS, BootstrappedViTConfig
from ..modeling.hub import image_processor_config
from ..modeling.modeling_bootstrapped_vit import BootstrappedViTForImageClassification
from .components.arguments import DataArguments, RunArguments, read_values, run_as_program
from .components.augmentation import SmallDataView
from .components.callbacks import HintDecayCallback
from .components.cards import count_measured, name_images, say_license, write_card
from .components.checkpoints import TrainingState
from .components.images import labeled_images
from .components.models import choose_attention, configure_start
from .components.optimizers import optimizer_with_schedule
from .components.runs import ImageTrainingArguments, start_run, training_arguments
from .options.joint import CLIPPING, PROG, JointOptimizerArguments, LearningArguments, TwinArguments, parse
from .trainer import ImageTrainer


# Folders of the two models within a run's, and what their accuracies are called.
PARTS = {"vit": "accuracy", "agent": "agent_accuracy"}


@dataclass
class JointArguments(LearningArguments, JointOptimizerArguments, ImageTrainingArguments):
    """Transformers' `TrainingArguments`, and the options of `frugalvit joint` by the same names.
    `ImageClassificationArguments` says which of `TrainingArguments` are not read.

    Args:
        num_train_epochs (`float`, *optional*, defaults to 240): Epochs.
        per_device_train_batch_size (`int`, *optional*, defaults to 64): Images of a step on a device.
        max_grad_norm (`float`, *optional*, defaults to 0.0): Norm that the ViT's gradient is clipped to; 0 clips none.

    Raises:
        ValueError: if a value does not fit.
    """

    num_train_epochs: float = 240.0
    per_device_train_batch_size: int = 64
    max_grad_norm: float = 0.0


class JointTrainer(ImageTrainer):
    """Transformers' `Trainer` of a ViT and an agent CNN that learn from each other (Zhang et al.).

    The weight of the hints falls to 0 with the steps. `max_grad_norm` clips the ViT's gradient. Both models alone lie
    in the folders `vit` and `agent` of the output folder afterwards.

    Args:
        model (`BootstrappedViTForImageClassification`): The ViT and its agent.
        args (`JointArguments`): How it is trained.
        train_dataset: Images with labels, see `BootstrapTrainer`.
        eval_dataset, test_dataset (*optional*): The same, to choose the best epoch on and to measure it on.
        callbacks (*optional*): As Transformers has them.
        command (*optional*): Arguments of `ImageTrainer` that a command gives, and `attn_implementation`.

    Raises:
        ValueError: if model, images and arguments do not fit each other.
    """

    def __init__(
        self,
        model: BootstrappedViTForImageClassification,
        args: JointArguments,
        train_dataset,
        eval_dataset=None,
        test_dataset=None,
        callbacks=None,
        **command,
    ):
        attention = command.pop("attn_implementation", None)
        train, evaluation, test = labeled_images(train_dataset, eval_dataset, test_dataset)
        values = image_processor_config(model.config)
        processor = ViTImageProcessor(
            **{name: value for name, value in values.items() if name != "image_processor_type"}
        )
        image_format = ImageFormat.from_processor(processor)
        view = SmallDataView(
            image_format,
            args.crop,
            padding=args.crop_padding,
            padding_mode=args.padding_mode,
            crop_size=args.crop_size,
            scale=args.crop_scale,
            flip=args.flip,
            randaugment_layers=0,
        )
        super().__init__(
            *(model, args),
            train=(train, view),
            evaluation=(evaluation, EvalView(image_format)),
            test=test,
            processing_class=processor,
            callbacks=[HintDecayCallback(), *(callbacks or ())],
            **command,
        )
        if self.is_deepspeed_enabled:
            raise ValueError("This training clips the gradient of a part of its model, which DeepSpeed cannot.")
        # An agent has no attention.
        choose_attention(model.vit, attention, self.accelerator.device)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(pixel_values=inputs["pixel_values"], labels=inputs["labels"])
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def clipped(self, model):
        return self.accelerator.unwrap_model(model).vit

    def make_optimizer(self) -> tuple:
        return optimizer_with_schedule(
            *(self.model, self.args, self.epochs, self.loader.steps_per_epoch, self.args.optimizer),
            sam_rho=self.args.sam_rho,
        )

    def measure(self, model, loader) -> dict[str, float]:
        return evaluate_twins(self.accelerator, model, loader)

    def summary(self, state: TrainingState) -> str:
        return f"A ViT and its agent CNN, {accuracies(self.data, self.run, state.measured)}"

    def train(self, *arguments, **options):
        output = super().train(*arguments, **options)
        if self.accelerator.is_main_process:
            for name, accuracy in PARTS.items():
                save_alone(name, accuracy, self.processing_class, self.data, self.run, self.progress.now)
        return output


def main(argv: list[str] | None = None) -> int:
    """Train as a command line says."""
    trainer = make_trainer(parse(argv), argv)
    trainer.train()
    trainer.say_result("accuracy", "agent_accuracy")
    trainer.accelerator.print(f"The ViT alone is in {Path(trainer.args.output_dir) / 'vit'}.")
    return 0


def make_trainer(groups: tuple, argv: list[str] | None) -> JointTrainer:
    """Return the trainer for the options of the command; `argv` are its arguments, for the card."""
    twins, data, learning, optimization, run = groups
    if run.max_grad_norm is None:
        run.max_grad_norm = CLIPPING.get(twins.variant.removesuffix("-res"), 0.0)
    start_run(run, PROG, argv, list(groups))
    say_license(run)
    train, evaluation, test = load_splits(data, learns_labels=True)
    model = build_twins(twins, class_names(train), run.seed)
    if run.compile:
        model.compile()
    args = training_arguments(JointArguments, run, data, learning, optimization)
    return JointTrainer(
        *(model, args, train, evaluation, test),
        run=run,
        data=data,
        attn_implementation=twins.attn_implementation,
    )


def build_twins(arguments: TwinArguments, names: list[str], seed: int = 0) -> BootstrappedViTForImageClassification:
    """Return a new ViT and its agent for these class names, in float32."""
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


@torch.inference_mode()
def evaluate_twins(accelerator: Accelerator, model, loader) -> dict[str, float]:
    """Measure the `loss` of both, without hints, and the `accuracy` of the ViT and the `agent_accuracy`, over all
    processes."""
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
    """Write one of the two models, as it was in the best epoch, to a folder of its own within the run's."""
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
