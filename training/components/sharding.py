"""Models shared out over processes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType


def prepare_sharing(accelerator: Accelerator, model: torch.nn.Module, optimizer):
    """Let FSDP shard the layers that a model keeps together, but for the one that holds its input embedding, which
    Accelerate shards by itself.

    Raises:
        ValueError: if FSDP or DeepSpeed cannot do that with this model or optimizer.
    """
    name, sharing = type(optimizer).__name__, accelerator.distributed_type
    if (name == "SAM" and sharing == DistributedType.FSDP) or (
        name != "AdamW" and sharing == DistributedType.DEEPSPEED
    ):
        raise ValueError(f"--optimizer {name.lower()} does not work with {sharing.value}; expected adamw.")
    plugin, deepspeed = getattr(accelerator.state, "fsdp_plugin", None), accelerator.state.deepspeed_plugin
    if (plugin and plugin.fsdp_version != 2) or (deepspeed and deepspeed.zero_stage > 2):
        raise ValueError(
            "Expected FSDP of version 2 or DeepSpeed up to ZeRO stage 2, as training/launch/ configures them."
        )
    if plugin and plugin.transformer_cls_names_to_wrap is None:
        try:
            embedding, kept_together = model.get_input_embeddings(), model._no_split_modules or ()
        except NotImplementedError as error:
            raise ValueError(
                f"Accelerate's FSDP asks for the input embedding, and a {type(model).__name__} does not say which it "
                "is; leave FSDP out."
            ) from error
        layers = [module for module in model.modules() if type(module).__name__ in kept_together]
        names = {type(layer).__name__ for layer in layers if embedding not in layer.modules()}
        plugin.transformer_cls_names_to_wrap = sorted(names)


@contextmanager
def ordinary_class(model: torch.nn.Module) -> Iterator[None]:
    """Within, a model that FSDP shards has its ordinary class again. FSDP gives it a class of its own, which neither
    the hub nor model cards know."""
    if not torch.distributed.is_available():
        yield
        return
    from torch.distributed.fsdp import FSDPModule

    sharded = type(model)
    model.__class__ = next(kind for kind in sharded.__mro__ if not issubclass(kind, FSDPModule))
    try:
        yield
    finally:
        model.__class__ = sharded
