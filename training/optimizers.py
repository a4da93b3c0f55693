"""Optimizers: groups of parameters with rates of their own, and sharpness-aware minimization."""

import torch
from transformers import Trainer

from ..modeling.hosts.anatomy import is_timm


def parameter_groups(model: torch.nn.Module, args, factors: dict[torch.nn.Parameter, float]) -> list[dict]:
    """Return groups of a model's trainable parameters: matrices and filters decay; biases, norms, positions, [CLS] and
    what `model.no_weight_decay()` names do not. The learning rate is multiplied by a parameter's factor, if any."""
    spared = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
    words = ("position_embeddings", "pos_embed", "cls_token", "mask_token", "distillation_token")
    groups = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            spare = parameter.ndim < 2 or name in spared or any(word in name for word in words)
            groups.setdefault((spare, factors.get(parameter, 1.0)), []).append(parameter)
    return [
        {
            "params": groups[spare, factor],
            "weight_decay": 0.0 if spare else args.weight_decay,
            "lr": factor * args.learning_rate,
        }
        for spare, factor in sorted(groups)
    ]


def learning_rate_factors(
    model: torch.nn.Module, head_multiplier: float, layer_decay: float
) -> dict[torch.nn.Parameter, float]:
    """Return the factor of each parameter's learning rate: 1 for the last block, of the longest list of blocks, and
    what follows it, `layer_decay` times that of the next for each block before and for what precedes the first, and
    `head_multiplier` for the head, outside of the base model or, in timm's models, the classifier within."""
    base = model.base_model
    if base is model and head_multiplier != 1:
        raise ValueError(f"head_multiplier is {head_multiplier}, expected 1 for a {type(model).__name__}.")
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
    """Prefixes of the names of a timm model's classifier, which is inside; Transformers' models have it beside."""
    if not is_timm(base):
        return ()
    heads = base.get_classifier()
    heads = heads if isinstance(heads, tuple) else (heads,)
    return tuple(f"{name}." for name, module in base.named_modules() if any(module is head for head in heads))


def make_optimizer(args, groups: list[dict]) -> torch.optim.Optimizer:
    """Return the optimizer of training arguments for groups of parameters, that of `optim`, with `sam_rho` in SAM."""
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
    if not args.sam_rho:
        return kind(groups, **options)
    try:
        import pytorch_optimizer
    except ImportError:
        raise ValueError("sam_rho is pytorch_optimizer's: pip install 'frugalvit[sam]'.") from None

    class SAM(pytorch_optimizer.SAM):
        """SAM whose first step the trainer makes, before the second gradient."""

        def step(self, closure=None):
            self.second_step()

    return SAM(groups, kind, rho=args.sam_rho, **options)
