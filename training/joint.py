"""Train a ViT with an agent CNN (Zhang et al., Bootstrapping ViTs). The ViT learns the CNN's inductive biases.

    accelerate launch -m frugalvit.training.joint --output_dir OUT --variant joint-small

The defaults are the settings of the authors' code for CIFAR-10, including its initialization
(`initialization="reference"`), dropout and clipping. There are two differences from the authors' code: the weight of
the hints decays with every step instead of every epoch, and biases and norms have no weight decay. In each process,
the agent's BatchNorm uses only the images of this process, so the losses depend slightly on the number of processes.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import TrainerCallback, ViTImageProcessor

from ..configuration.configuration_bootstrapped_vit import VARIANTS, BootstrappedViTConfig
from ..modeling.hub import image_processor_config
from ..modeling.image_format import ImageFormat
from ..modeling.initialization import INITIALIZATIONS
from ..modeling.modeling_bootstrapped_vit import BootstrappedViTForImageClassification
from ..modeling.reference_initialization import REFERENCE
from .arguments import ArgumentParser, CheckedArguments, DataArguments, argument, read_values, run_program
from .cards import name_images, share_error, write_card
from .data import class_names, load_splits
from .metrics import TopKAccuracy
from .models import configure_initialization, label_fields
from .sharpness import SharpnessAwareTrainer
from .train import SmallDataArguments, SmallDataView
from .trainer import run_command, start
from .views import EvalView, labeled_images


PROG = "frugalvit joint"
# Subfolder of each of the two models, and the name of the model's accuracy metric.
PARTS = {"vit": "accuracy", "agent": "agent_accuracy"}


@dataclass
class TwinArguments(CheckedArguments):
    """Arguments of the ViT, the agent CNN, and the hints between the two models."""

    variant: str = argument("joint-small", "The paper's models.", choices=[*VARIANTS])
    vit: str = argument("", "Fields of the ViT's configuration, for example image_size=32,patch_size=4.")
    agent: str = argument("", "Fields of the agent's configuration, for example patch_size=4.")
    config_overrides: str = argument("", "Fields of the pair's configuration, for example hint_weight=5.")
    without_hint_at: list[float] = argument([], "Relative depths without a hint, in (0, 1].")
    initialization: str = argument(
        REFERENCE,
        "Initialization of the paper, of Transformers, or of the attention.",
        choices=[REFERENCE, "default", *INITIALIZATIONS],
    )
    initialization_options: str = argument("", "Arguments of frugalvit.initialize_attention_.")

    expected = {"without_hint_at": ("numbers above 0, to 1", lambda depths: all(0 < depth <= 1 for depth in depths))}


@dataclass
class JointArguments(SmallDataArguments):
    """Arguments of the joint training of ViT and agent CNN: views of images and gradient clipping."""

    num_train_epochs: float = argument(240, "Epochs, over which the weight of the hints decays linearly to 0.")
    per_device_train_batch_size: int = argument(64, "Training batch size on each device.")
    max_grad_norm: float = argument(0.0, "Norm to which the gradient of both models is clipped; 0 turns it off.")
    # The authors' code clips gradients of base variants only. The default is therefore 0, and the recipes of base
    # variants set a norm.
    vit_max_grad_norm: float = argument(0.0, "Norm to which the gradient of the ViT alone is clipped; 0 turns it off.")
    padding_mode: str = argument(
        "constant", "Content of the padding: the reflected image, or black.", choices=["reflect", "constant"]
    )
    crop_size: int | None = argument(32, "Size of the crop in pixels, for crop padded, before it is resized.")
    crop_scale: list[float] = argument([0.6, 1.0], "Lowest and highest share of the image's area, for crop resized.")


class HintDecayCallback(TrainerCallback):
    """Decay the weight of the hints of a `BootstrappedViTForImageClassification` linearly to 0 (Zhang et al., arXiv
    2112.03552). The callback works in any `Trainer`. After the training, the model's `hint_share` is 1 again."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        # The module with `hint_share` is searched for, because the model may be wrapped, for example by PEFT.
        [self.pair] = [module for module in model.modules() if "hint_share" in vars(module)]
        # `hint_share` is a tensor, because a compiled model would be recompiled for each value of a Python number.
        self.pair.hint_share = torch.ones((), device=args.device)

    def on_step_begin(self, args, state, control, **kwargs):
        self.pair.hint_share.fill_(1 - state.global_step / state.max_steps)

    def on_train_end(self, args, state, control, **kwargs):
        self.pair.hint_share = 1.0


class JointTrainer(SharpnessAwareTrainer):
    """Transformers' `Trainer` of a ViT and an agent CNN that learn from each other (Zhang et al.). `run()` also saves
    each of the two models alone, in the subfolders `vit` and `agent` of `output_dir`.

    Args:
        model (`BootstrappedViTForImageClassification`): The ViT with its agent CNN.
        args (`JointArguments`): The training arguments.
        train_dataset: Images with labels, in a form that `BootstrapTrainer` accepts.
        eval_dataset (*optional*): Images with labels to choose the best model on.
        callbacks (`list`, *optional*), kwargs: See `ImageTrainer`.
    """

    def __init__(
        self,
        model: BootstrappedViTForImageClassification,
        args: JointArguments,
        train_dataset,
        eval_dataset=None,
        callbacks=None,
        **kwargs,
    ):
        train, evaluation = labeled_images(train_dataset, eval_dataset)
        processor = ViTImageProcessor(**image_processor_config(model.config))
        image_format = ImageFormat.from_processor(processor)
        super().__init__(
            model,
            args,
            train,
            evaluation,
            SmallDataView(image_format, args),
            EvalView(image_format),
            processing_class=processor,
            callbacks=[HintDecayCallback(), *(callbacks or ())],
            **kwargs,
        )
        self.accuracies = {name: TopKAccuracy() for name in PARTS.values()}

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """Create the optimizer. If `vit_max_grad_norm` is set, each step first clips the ViT's gradient."""
        optimizer = super().create_optimizer(model)
        norm = self.args.vit_max_grad_norm
        if norm and self.is_deepspeed_enabled:
            raise ValueError(f"vit_max_grad_norm is {norm}, expected 0 with DeepSpeed.")
        parameters = list(self.saved_model.vit.parameters())

        def clip(*_):
            torch.nn.utils.clip_grad_norm_(parameters, norm)

        if norm:
            optimizer.register_step_pre_hook(clip)
        return optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        # In evaluation, the loss does not include the hints.
        hints = {} if model.training else {"hint_share": 0.0}
        outputs = model(pixel_values=inputs["pixel_values"], labels=inputs["labels"], **hints)
        logits = {"vit": outputs.logits, "agent": outputs.agent_logits}
        return (outputs.loss, logits) if return_outputs else outputs.loss

    def measure(self, prediction, compute_result: bool = True) -> dict[str, float]:
        """Add a batch to the metrics `accuracy` (of the ViT) and `agent_accuracy`. With `compute_result`, which is set
        for the last batch, return the two metrics."""
        labels = torch.as_tensor(prediction.label_ids).cpu().numpy()
        for metric, logits in zip(self.accuracies.values(), prediction.predictions, strict=True):
            metric.add_batch(predictions=torch.as_tensor(logits).float().cpu().numpy(), references=labels)
        return {name: metric.compute()["accuracy"] for name, metric in self.accuracies.items() if compute_result}

    def summary(self, metrics: dict[str, float]) -> str:
        measured = ", not evaluated"
        if "accuracy" in metrics:
            count = len(self.measured_dataset)
            shares = [metrics[name] for name in ("accuracy", "agent_accuracy")]
            measured = " and ".join(f"{share:.2%} ± {share_error(share, count):.2%}" for share in shares)
            measured = f": accuracy {measured}"
        return f"A ViT and its agent CNN, trained together on {name_images(self.data_args)}{measured}."

    def run(self) -> dict[str, float]:
        """Run `ImageTrainer.run`, then save each of the two models alone, in the subfolders `vit` and `agent`."""
        metrics = super().run()
        if self.args.should_save:
            pair = BootstrappedViTForImageClassification.from_pretrained(self.args.output_dir)
            for name, accuracy in PARTS.items():
                folder = Path(self.args.output_dir) / name
                model = getattr(pair, name)
                own = {"accuracy": metrics[accuracy]} if accuracy in metrics else {}
                summary = f"The {name} of two models. {self.summary(metrics)}"
                write_card(folder, model, summary, own, self)
                model.save_pretrained(folder)
                self.processing_class.save_pretrained(folder)
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Models alone")
        return metrics


def build_twins(options: TwinArguments, names: list[str]) -> BootstrappedViTForImageClassification:
    """Return a new ViT with its agent CNN, in float32, for the class names `names`."""
    values = VARIANTS[options.variant]
    fields = {
        **values,
        "vit_config": values["vit_config"] | read_values("vit", options.vit),
        "agent_config": values["agent_config"] | read_values("agent", options.agent),
        **read_values("config_overrides", options.config_overrides),
        "initialization": "default",
        **label_fields(names),
    }
    config = BootstrappedViTConfig(**fields)
    blocks = config.vit_config.num_hidden_layers
    if without := {math.ceil(depth * blocks - 1e-6) - 1 for depth in options.without_hint_at}:
        hinted = range(blocks) if config.hint_layers is None else config.hint_layers
        config.hint_layers = [layer for layer in hinted if layer not in without]
    configure_initialization(config, options.initialization, options.initialization_options)
    return BootstrappedViTForImageClassification._from_config(config)


def make_parser() -> ArgumentParser:
    return ArgumentParser([TwinArguments, DataArguments, JointArguments], PROG)


def make_trainer(options: TwinArguments, data: DataArguments, args: JointArguments) -> JointTrainer:
    """Return the trainer for the arguments of the command."""
    start(args)
    train, evaluation, test = load_splits(data, learns_labels=True, skip_corrupt=args.skip_corrupt)
    model = build_twins(options, class_names(train))
    return JointTrainer(
        model,
        args,
        train,
        evaluation,
        test_dataset=test,
        model_args=options,
        data_args=data,
    )


def main(argv: list[str] | None = None) -> int:
    return run_command(make_parser(), make_trainer, argv)


__all__ = ["HintDecayCallback", "JointArguments", "JointTrainer"]

if __name__ == "__main__":
    raise SystemExit(run_program(main, PROG))
