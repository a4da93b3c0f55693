"""Configuration of vision transformers with Context Broadcasting (Hyeon-Woo et al., arXiv 2210.08457)."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from .configuration_vit import PlainViTConfig


ContextBroadcastKind = Literal["cb", "cb_s", "cb_gate", "cb_hybrid"]
ContextBroadcastPosition = Literal["mlp_front", "mlp_mid", "mlp_end", "attention_end"]

# A variant name contains the model size, "distilled" if there is a distillation token, the kind of Context
# Broadcasting or "plain", and the image size.
VARIANTS = {
    f"vit-{size}{'-distilled' if distilled else ''}-{'plain' if kind is None else kind}-224": {
        "hidden_size": width,
        "num_attention_heads": heads,
        "context_broadcast": kind,
        "use_distillation_token": distilled,
        "num_labels": 1000,
    }
    for size, width, heads in (("tiny", 192, 3), ("small", 384, 6), ("base", 768, 12))
    for distilled in (False, True)
    for kind in (None, "cb", "cb_s")
}


@strict
class ViTContextBroadcastConfig(PlainViTConfig):
    r"""
    Configuration of a vision transformer with Context Broadcasting (Hyeon-Woo et al., *Scratching Visual Transformer's
    Back with Uniform Attention*, arXiv 2210.08457). The default model is ViT-S with Context Broadcasting at the end of
    every MLP. `from_variant` returns the configurations of the paper's models. Other fields are documented in
    `PlainViTConfig` and `AttentionStartConfig`.

    Args:
        context_broadcast (`str`, *optional*, defaults to `"cb"`):
            Kind of `ContextBroadcast`: `"cb"`, `"cb_s"`, `"cb_gate"`, `"cb_hybrid"`, or `None` for a plain ViT.
        context_broadcast_position (`str` or sequence of `str`, *optional*, defaults to `"mlp_end"`):
            One or several positions in each block: `"mlp_front"`, `"mlp_mid"`, `"mlp_end"`, `"attention_end"`.
        context_broadcast_scale_init (`float`, *optional*, defaults to 0.0): Initial value of the scale in `"cb_s"`.
        context_broadcast_blend (`bool`, *optional*, defaults to `False`): Argument `blend` of `ContextBroadcast`.
        use_distillation_token (`bool`, *optional*, defaults to `False`):
            Add a distillation token with its own classifier, which is trained with a teacher's predictions (DeiT).
    """

    model_type = "vit_context_broadcast"
    _variants = VARIANTS

    context_broadcast: Literal[ContextBroadcastKind, None] = "cb"
    context_broadcast_position: (
        ContextBroadcastPosition | list[ContextBroadcastPosition] | tuple[ContextBroadcastPosition, ...]
    ) = "mlp_end"
    context_broadcast_scale_init: float | int = 0.0
    context_broadcast_blend: bool = False
    use_distillation_token: bool = False
    image_mean: float | list[float] | tuple[float, ...] = (0.485, 0.456, 0.406)
    image_std: float | list[float] | tuple[float, ...] = (0.229, 0.224, 0.225)
    resize_size: int | None = 256
    resample: int = 3

    def validate_position(self):
        """Check that there is at least one position, and that all positions differ."""
        positions = self.context_broadcast_position
        if not positions or (not isinstance(positions, str) and len({*positions}) < len(positions)):
            raise ValueError(f"`context_broadcast_position` is {positions}, expected one or several different names.")


__all__ = ["ViTContextBroadcastConfig"]
