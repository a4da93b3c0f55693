"""ViTContextBroadcast configuration: the vision transformers of Hyeon-Woo et al., with Context Broadcasting."""

from huggingface_hub.dataclasses import strict

from .configuration_base import AttentionStartConfig, PatchTransformerConfig


@strict
class ViTContextBroadcastConfig(AttentionStartConfig, PatchTransformerConfig):
    r"""
    Configuration of a vision transformer with Context Broadcasting (Hyeon-Woo et al., *Scratching Visual Transformer's
    Back with Uniform Attention*, arXiv 2210.08457). The defaults are ViT-S with CB at the end of every MLP;
    `from_variant` has the rest.

    Args:
        image_size (`int` or pair of `int`, *optional*, defaults to 224): Image size in pixels, or height and width.
        patch_size (`int` or pair of `int`, *optional*, defaults to 16): Patch size in pixels; divides the image.
        num_channels (`int`, *optional*, defaults to 3): Channels of the image.
        hidden_size (`int`, *optional*, defaults to 384): Width of the tokens.
        num_hidden_layers (`int`, *optional*, defaults to 12): Blocks.
        num_attention_heads (`int`, *optional*, defaults to 6): Heads; divides `hidden_size`.
        intermediate_size (`int`, *optional*): Width inside the MLP; four times `hidden_size` if not given.
        hidden_act (`str`, *optional*, defaults to `"gelu"`): Activation of the MLP.
        qkv_bias (`bool`, *optional*, defaults to `True`): Biases on queries, keys and values.
        layer_norm_eps (`float`, *optional*, defaults to 1e-6): Epsilon of the LayerNorms.
        context_broadcast (`str`, *optional*, defaults to `"cb"`):
            `"cb"`, `"cb_s"`, `"cb_gate"`, `"cb_hybrid"`, see `insert_context_broadcast`, or `None`, a plain ViT.
        context_broadcast_position (`str` or several, *optional*, defaults to `"mlp_end"`):
            Where in a block: `"mlp_front"`, `"mlp_mid"`, `"mlp_end"`, `"attention_end"`.
        context_broadcast_scale_init (`float`, *optional*, defaults to 0.0): Start of the scale of `"cb_s"`.
        context_broadcast_blend (`bool`, *optional*, defaults to `False`):
            Whether a learned number leads from a plain transformer to Context Broadcasting, see `ContextBroadcast`.
        use_distillation_token (`bool`, *optional*, defaults to `False`):
            A second learned token with a classifier of its own, which learns from a teacher (DeiT).
        drop_path_rate (`float`, *optional*, defaults to 0.0):
            Largest stochastic depth rate; rises linearly over the blocks.
        initializer_range (`float`, *optional*, defaults to 0.02): Std of truncated normal weights.
        initialization, impulse_solver, …: How attention starts, as in `AttentionStartConfig`; by default as in DeiT.
        image_mean, image_std (`float` or sequence of `float`, *optional*):
            Normalization written into the image processor, for all channels or each.
        resize_size (`int`, *optional*, defaults to 256):
            Shorter side to resize to before a center crop of `image_size`; `None` resizes straight to `image_size`.
        resample (`int`, *optional*, defaults to 3): PIL's resampling filter (2 bilinear, 3 bicubic).

    Raises:
        huggingface_hub.errors.StrictDataclassError: if a value has the wrong type, if values contradict each other, or
            if a name looks like a misspelled field; the message says what was given and what would fit.
    """

    model_type = "vit_context_broadcast"
    attribute_map = {"layer_norm_epsilon": "layer_norm_eps"}

    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    num_channels: int = 3
    hidden_size: int = 384
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    intermediate_size: int | None = None
    hidden_act: str = "gelu"
    qkv_bias: bool = True
    layer_norm_eps: float | int = 1e-6
    context_broadcast: str | None = "cb"
    context_broadcast_position: str | list[str] | tuple[str, ...] = "mlp_end"
    context_broadcast_scale_init: float | int = 0.0
    context_broadcast_blend: bool = False
    use_distillation_token: bool = False
    drop_path_rate: float | int = 0.0
    initializer_range: float | int = 0.02
    image_mean: float | list[float] | tuple[float, ...] = (0.485, 0.456, 0.406)
    image_std: float | list[float] | tuple[float, ...] = (0.229, 0.224, 0.225)
    resize_size: int | None = 256
    resample: int = 3

    @staticmethod
    def _variants() -> dict[str, dict]:
        return VARIANTS


# Names read size, whether it learns from a teacher, kind of Context Broadcasting (none for the paper's baselines), and
# image size.
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


__all__ = ["ViTContextBroadcastConfig"]
