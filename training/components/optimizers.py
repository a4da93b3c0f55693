"""Optimizers and schedules that trainers share."""

import torch
import transformers

from ...modeling.hosts.timm import is_timm
from .arguments import OptimizerArguments


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Return the groups of a model's trainable parameters for an optimizer. Matrices and filters decay; biases, norms,
    positions, [CLS] and the like do not, nor do the parameters that a model names by a method `no_weight_decay()`.

    Args:
        model (`nn.Module`): The model.
        weight_decay (`float`): Weight decay of the first group.
    """
    spared = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
    words = ("position_embeddings", "pos_embed", "cls_token", "mask_token", "distillation_token")
    decayed, kept = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            spare = parameter.ndim < 2 or name in spared or any(word in name for word in words)
            (kept if spare else decayed).append(parameter)
    # timm's Muon leaves the second group to AdamW, with what is no matrix of the first.
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0, "use_fallback": True},
    ]


def learning_rate_factors(
    model: torch.nn.Module, head_multiplier: float, layer_decay: float
) -> dict[torch.nn.Parameter, float]:
    """Return the factor of each parameter's learning rate.

    It is 1 for the last block, of the longest list of blocks, and for the parameters behind it. Each block before has
    `layer_decay` times the factor of the next, and so do the parameters before the first block. The head, outside of
    the base model or, in timm's models, the classifier within, has `head_multiplier`.

    Args:
        model (`nn.Module`): The model.
        head_multiplier (`float`): Factor of the head.
        layer_decay (`float`): Factor from a block to the one before it.

    Raises:
        ValueError: if there is nothing outside the base model.
    """
    base = model.base_model
    if base is model and head_multiplier != 1:
        raise ValueError(
            f"--head-multiplier is {head_multiplier}, but a {type(model).__name__} does not say what its head is; "
            "expected 1."
        )
    # timm keeps its blocks in an `nn.Sequential`.
    kinds = (torch.nn.ModuleList, torch.nn.Sequential) if is_timm(base) else torch.nn.ModuleList
    lists = [(name, module) for name, module in base.named_modules() if isinstance(module, kinds)]
    name, blocks = max(lists, key=lambda item: len(item[1]), default=("", ()))
    last, index, heads = len(blocks) - 1, -1, classifiers_inside(base)
    factors = dict.fromkeys(model.parameters(), head_multiplier)
    for full_name, parameter in base.named_parameters():
        if full_name.startswith(heads):
            continue
        if blocks and full_name.startswith(f"{name}."):
            index = int(full_name.removeprefix(f"{name}.").partition(".")[0])
        elif index >= 0:
            index = last
        factors[parameter] = layer_decay ** (last - index)
    return factors


def classifiers_inside(base: torch.nn.Module) -> tuple[str, ...]:
    """Prefixes of the names of the parameters of a base model that are its classifier's.

    A timm model has its classifier inside; Transformers' models have it beside their base model, and so no prefix.
    """
    if not is_timm(base):
        return ()
    heads = base.get_classifier()
    heads = heads if isinstance(heads, tuple) else (heads,)
    return tuple(f"{name}." for name, module in base.named_modules() if any(module is head for head in heads))


def make_optimizer(name: str, groups: list[dict], sam_rho: float = 0.05, **options) -> torch.optim.Optimizer:
    """Return an optimizer.

    Args:
        name (`str`): One of `OPTIMIZERS`.
        groups (`list[dict]`): The groups of `parameter_groups`.
        sam_rho (`float`, *optional*, defaults to 0.05): Radius within which SAM looks for the worst weights.
        options: Options of AdamW; Muon takes no `eps`.

    Raises:
        ValueError: if its library is not installed.
    """
    if name == "muon":
        from timm.optim import Muon

        options.pop("eps", None)
        return Muon(groups, nesterov=True, **options)
    if name == "sam":
        try:
            import pytorch_optimizer
        except ImportError:
            raise ValueError("--optimizer sam is pytorch_optimizer's: pip install 'frugalvit[sam]'.") from None

        class SAM(pytorch_optimizer.SAM):
            """SAM whose first step the trainer makes, before the second gradient."""

            def step(self, closure=None):
                self.second_step()

        return SAM(groups, torch.optim.AdamW, rho=sam_rho, **options, fused=True)
    return torch.optim.AdamW(groups, **options, fused=True)


def optimizer_with_schedule(
    model: torch.nn.Module,
    optimization: OptimizerArguments,
    epochs: float,
    steps_per_epoch: int,
    name: str = "adamw",
    rates: dict[torch.nn.Parameter, float] | None = None,
    **options,
):
    """Return an optimizer of all parameters of a model that learn, and its schedule.

    Args:
        model (`nn.Module`): The model.
        optimization (`OptimizerArguments`): Learning rate, weight decay, warm-up and schedule.
        epochs (`float`), steps_per_epoch (`int`): Length of the training.
        name (`str`, *optional*, defaults to `"adamw"`): One of `OPTIMIZERS`.
        rates (`dict`, *optional*): Factor of the learning rate of each parameter, see `learning_rate_factors`.
        options: Passed to `make_optimizer`.
    """
    groups = parameter_groups(model, optimization.weight_decay)
    if rates:
        groups = [
            {**group, "params": members, "lr": factor * optimization.learning_rate}
            for group in groups
            for factor in sorted({rates[parameter] for parameter in group["params"]})
            if (members := [parameter for parameter in group["params"] if rates[parameter] == factor])
        ]
    optimizer = make_optimizer(
        name,
        groups,
        lr=optimization.learning_rate,
        betas=(optimization.adam_beta1, optimization.adam_beta2),
        eps=optimization.adam_epsilon,
        **options,
    )
    scheduler = transformers.get_scheduler(
        optimization.lr_scheduler,
        optimizer,
        num_warmup_steps=round(optimization.warmup_epochs * steps_per_epoch),
        num_training_steps=round(epochs * steps_per_epoch),
    )
    return optimizer, scheduler
