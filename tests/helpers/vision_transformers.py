"""Small vision transformers of other libraries with random weights: at least one for each row of docs/models.md."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import open_clip
import timm
import torch
import transformers
from safetensors.torch import save_file
from timm.layers import HybridEmbed
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import ConvStem
from torch import nn


def randomize(model: nn.Module, scale: float = 0.2) -> nn.Module:
    """Replace parameters by random values around 0.1, or around 1 for the scales of normalization layers."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            shift = 1.0 if parameter.ndim == 1 and (parameter == 1).all() else 0.1
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) + shift)
    return model.eval()


SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
IMAGES = {"image_size": 32, "patch_size": 4}
NAFLEX = {"num_patches": 64, "patch_size": 4}
TEXT = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
# Fields of SigLIP's text model. The text model must be as wide as the vision model.
WIDE = {"hidden_size": 48, "projection_size": 48}
SIZES_OF_TIMM = {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 4, "num_classes": 5}


def of_transformers(family: str, model: str = "Model", **fields) -> Callable[[], nn.Module]:
    """Return a function that builds a small Transformers model."""

    def make() -> nn.Module:
        config_class = getattr(transformers, f"{family}Config")
        return randomize(getattr(transformers, f"{family}{model}")(config_class(**SIZES | IMAGES | fields)))

    return make


def of_two_sides(family: str, model: str = "Model", vision=IMAGES, text=(), **fields) -> Callable[[], nn.Module]:
    """Return a function that builds a small model of an image-text family, such as `CLIPModel`."""

    def make() -> nn.Module:
        sides = {"vision_config": SIZES | vision, "text_config": TEXT | dict(text)}
        config = getattr(transformers, f"{family}Config")(**sides, **fields)
        return randomize(getattr(transformers, f"{family}{model}")(config))

    return make


def of_timm(model_class=VisionTransformer, **arguments) -> Callable[[], nn.Module]:
    return lambda: randomize(model_class(**SIZES_OF_TIMM | arguments))


def in_timm(architecture: str, **options) -> Callable[[], nn.Module]:
    """Return a function that builds a small model of a timm architecture."""
    return lambda: randomize(timm.create_model(architecture, **SIZES_OF_TIMM | options))


def open_clip_config(trunk: str | None = None, **fields) -> dict:
    """Return the configuration of a small open_clip model. `trunk` is the timm architecture of its vision model."""
    vision = {"image_size": 32, "patch_size": 4, "width": 48, "layers": 3, "head_width": 12, "mlp_ratio": 2}
    if trunk:
        vision = {"image_size": 32, "timm_model_name": small_trunk(trunk)}
    text = {"context_length": 8, "vocab_size": 50, "width": 16, "heads": 2, "layers": 1}
    return {"embed_dim": 24, "vision_cfg": vision | fields, "text_cfg": text}


def of_open_clip(trunk: str | None = None, **fields) -> Callable[[], nn.Module]:
    model_class = open_clip.CustomTextCLIP if trunk else open_clip.CLIP
    return lambda: randomize(model_class(**open_clip_config(trunk, **fields)))


def small_trunk(name: str) -> str:
    """Register a small version of a timm architecture for open_clip, and return the name of this version."""

    def create(pretrained=False, **arguments):
        return timm.create_model(name, **SIZES_OF_TIMM | arguments)

    create.__name__ = f"small_{name}"
    if not timm.is_model(create.__name__):
        register_model(create)
    return create.__name__


def conv_stem() -> Callable[..., nn.Module]:
    """Return the `embed_layer` of MobileCLIP-B: convolutions for patches of 16 pixels."""
    stem = ConvStem(channels=(8, 8, 48), stride=(4, 2, 2), kernel_size=(4, 2, 2), padding=0, act_layer=nn.GELU)
    return partial(HybridEmbed, backbone=stem, proj=False)


@dataclass(frozen=True)
class Kind:
    """A vision transformer of another library, and its properties.

    Args:
        row (`str`): Name of its row in docs/models.md.
        build (`Callable`): Function that builds a small model.
        impulses (`bool`): Whether `impulse_init_` supports the model.
        class_token (`bool`): Whether the model has a class token, which `cb_gate` and `cb_hybrid` need.
        patches (`bool`): Whether the patch embedding is one linear map.
        resizes (`bool`): Whether the model's own library accepts images that do not have the configured size.
    """

    row: str
    build: Callable[[], nn.Module]
    impulses: bool = True
    class_token: bool = True
    patches: bool = True
    resizes: bool = True

    @cached_property
    def _model(self) -> nn.Module:
        return self.build()

    def make(self) -> nn.Module:
        """Return a copy of the small model. Copying takes less time than building."""
        return copy.deepcopy(self._model)


REGISTERS = {"num_register_tokens": 3}

KINDS = {
    "vit": Kind("ViT", of_transformers("ViT")),
    "vit-classifier": Kind("ViT", of_transformers("ViT", "ForImageClassification", num_labels=5)),
    "vit-rectangle": Kind(
        "ViT", of_transformers("ViT", "ForImageClassification", image_size=[24, 32], num_labels=5), resizes=False
    ),
    "vit-msn": Kind("ViTMSN", of_transformers("ViTMSN", "ForImageClassification", num_labels=5)),
    "vit-mae": Kind("ViTMAE", of_transformers("ViTMAE")),
    "deit": Kind("DeiT", of_transformers("DeiT", "ForImageClassification", num_labels=5)),
    "dinov2": Kind("DINOv2", of_transformers("Dinov2", mlp_ratio=2)),
    "dinov2-swiglu": Kind("DINOv2", of_transformers("Dinov2", mlp_ratio=2, use_swiglu_ffn=True)),
    "dinov2-registers": Kind(
        "DINOv2 with registers", of_transformers("Dinov2WithRegisters", mlp_ratio=2, **REGISTERS)
    ),
    "dinov2-registers-classifier": Kind(
        "DINOv2 with registers",
        of_transformers("Dinov2WithRegisters", "ForImageClassification", mlp_ratio=2, num_labels=5, **REGISTERS),
    ),
    "dinov3": Kind("DINOv3", of_transformers("DINOv3ViT", intermediate_size=96, **REGISTERS), impulses=False),
    "dinov3-gated": Kind(
        "DINOv3",
        of_transformers("DINOv3ViT", intermediate_size=96, use_gated_mlp=True, hidden_act="silu", **REGISTERS),
        impulses=False,
    ),
    "clip": Kind("CLIP", of_two_sides("CLIP", projection_dim=24)),
    "clip-vision": Kind("CLIP", of_transformers("CLIPVision", intermediate_size=96)),
    "clip-vision-with-projection": Kind(
        "CLIP", of_transformers("CLIPVision", "ModelWithProjection", projection_dim=24)
    ),
    "clip-classifier": Kind("CLIP", of_two_sides("CLIP", "ForImageClassification", num_labels=5)),
    "siglip": Kind("SigLIP", of_two_sides("Siglip", text=WIDE), class_token=False),
    "siglip-vision": Kind("SigLIP", of_transformers("SiglipVision", intermediate_size=96), class_token=False),
    "siglip-without-head": Kind("SigLIP", of_transformers("SiglipVision", vision_use_head=False), class_token=False),
    "siglip-classifier": Kind(
        "SigLIP", of_two_sides("Siglip", "ForImageClassification", num_labels=5), class_token=False
    ),
    "siglip2": Kind("SigLIP 2 NaFlex", of_two_sides("Siglip2", vision=NAFLEX, text=WIDE), class_token=False),
    "siglip2-vision": Kind(
        "SigLIP 2 NaFlex",
        lambda: randomize(transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**NAFLEX, **SIZES))),
        class_token=False,
    ),
    "aimv2": Kind("AIMv2", of_transformers("Aimv2Vision", intermediate_size=96), class_token=False, resizes=False),
    "aimv2-with-projection": Kind(
        "AIMv2",
        of_two_sides("Aimv2", vision=IMAGES | {"intermediate_size": 96}, projection_dim=24),
        class_token=False,
        resizes=False,
    ),
    "aimv2-native": Kind(
        "AIMv2",
        of_transformers("Aimv2Vision", intermediate_size=96, is_native=True, use_head=False),
        impulses=False,
        class_token=False,
    ),
    "ijepa": Kind("I-JEPA", of_transformers("IJepa"), class_token=False),
    "pixio": Kind("Pixio", of_transformers("Pixio", n_cls_tokens=8, mlp_ratio=2)),
    "radio": Kind(
        "C-RADIO",
        of_transformers(
            "Radio", mlp_ratio=2.0, max_img_size=48, num_cls_tokens=3, num_registers=2, summary_idxs=[0, 2]
        ),
        impulses=False,
    ),
    "internvl": Kind(
        "InternVL",
        of_transformers("InternVLVision", intermediate_size=96, attention_bias=True, use_mean_pooling=False),
    ),
    "internvl-without-norm": Kind("InternVL", of_transformers("InternVLVision", intermediate_size=96)),
    "idefics3": Kind("Idefics3, SmolVLM", of_transformers("Idefics3Vision", "Transformer"), class_token=False),
    "smolvlm": Kind("Idefics3, SmolVLM", of_transformers("SmolVLMVision", "Transformer"), class_token=False),
    "timm-vit": Kind("timm ViT, DeiT, MAE", in_timm("vit_tiny_patch16_224")),
    "timm-without-head": Kind("timm ViT, DeiT, MAE", in_timm("vit_tiny_patch16_224", num_classes=0)),
    "timm-without-pooling": Kind(
        "timm ViT, DeiT, MAE", in_timm("vit_tiny_patch16_224", num_classes=0, global_pool="")
    ),
    "timm-mean-pooled": Kind("timm ViT, DeiT, MAE", in_timm("vit_tiny_patch16_224", global_pool="avg")),
    "timm-mean-pooled-without-class-token": Kind(
        "timm ViT, DeiT, MAE",
        in_timm("vit_tiny_patch16_224", global_pool="avg", class_token=False),
        class_token=False,
    ),
    "timm-registers": Kind(
        "timm ViT with registers, layer scale", in_timm("vit_small_patch14_reg4_dinov2", init_values=0.5)
    ),
    "timm-registers-mean-pooled": Kind(
        "timm ViT with registers, layer scale", in_timm("vit_medium_patch16_reg4_gap_256"), class_token=False
    ),
    "timm-query-key-norm": Kind(
        "timm ViT with q/k norms", in_timm("vit_tiny_patch16_224", qk_norm=True), impulses=False
    ),
    "timm-attention-and-mlp-norm": Kind(
        "timm ViT with q/k norms", in_timm("vit_tiny_patch16_224", scale_attn_norm=True, scale_mlp_norm=True)
    ),
    "timm-swiglu": Kind("timm ViT with SwiGLU", in_timm("vit_giant_patch14_dinov2", mlp_ratio=4)),
    "timm-clip": Kind("timm CLIP", in_timm("vit_base_patch16_clip_224")),
    "timm-siglip": Kind("timm SigLIP", in_timm("vit_base_patch16_siglip_224", num_classes=0), class_token=False),
    "timm-aimv2": Kind("timm AIMv2", in_timm("aimv2_large_patch14_224", mlp_ratio=4), class_token=False),
    "timm-mobileclip-b": Kind(
        "timm MobileCLIP-B, MobileCLIP2-B",
        lambda: of_timm(embed_layer=conv_stem(), img_size=64, patch_size=1, no_embed_class=True)(),
        patches=False,
    ),
    "timm-eva02": Kind("timm EVA-02", in_timm("eva02_base_patch14_224", mlp_ratio=2), impulses=False),
    "timm-eva02-packed": Kind("timm EVA-02", in_timm("eva02_tiny_patch14_224", mlp_ratio=2), impulses=False),
    "timm-eva02-clip": Kind("timm EVA-02", in_timm("eva02_base_patch16_clip_224", mlp_ratio=2), impulses=False),
    "timm-pe-core": Kind("timm PE-Core", in_timm("vit_pe_core_tiny_patch16_384"), impulses=False),
    "timm-dinov3": Kind("timm DINOv3", in_timm("vit_small_patch16_dinov3"), impulses=False),
    "timm-dinov3-gated": Kind("timm DINOv3", in_timm("vit_small_plus_patch16_dinov3", num_classes=0), impulses=False),
    "open_clip": Kind("open_clip ViT", of_open_clip(), resizes=False),
    "open_clip-layer-scale": Kind("open_clip ViT", of_open_clip(ls_init_value=0.5), resizes=False),
    "open_clip-mean-pooled": Kind(
        "open_clip ViT", of_open_clip(pool_type="avg", final_ln_after_pool=True, no_ln_pre=True), resizes=False
    ),
    "open_clip-tower": Kind("open_clip ViT", lambda: of_open_clip()().visual, resizes=False),
    "open_clip-timm": Kind(
        "open_clip with a trunk of timm", of_open_clip("vit_base_patch16_224", timm_pool="", timm_proj="linear")
    ),
    "open_clip-timm-siglip": Kind(
        "open_clip with a trunk of timm",
        of_open_clip("vit_base_patch16_siglip_224", timm_pool="map", timm_proj="none"),
        class_token=False,
    ),
    "open_clip-timm-eva02": Kind(
        "open_clip with a trunk of timm",
        of_open_clip("eva02_base_patch16_clip_224", timm_pool="token", timm_proj=""),
        impulses=False,
    ),
}


def save_kind(kind: str, folder: Path) -> str:
    """Save a small model in the format of open_clip or Transformers. Return its name for the option `--teacher`."""
    model = KINDS[kind].make()
    if kind == "open_clip":
        folder.mkdir()
        save_file(model.state_dict(), folder / "open_clip_model.safetensors")
        images = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "interpolation": "bicubic"}
        config = {"model_cfg": open_clip_config() | {"custom_text": False}, "preprocess_cfg": images}
        (folder / "open_clip_config.json").write_text(json.dumps(config), encoding="utf-8")
        return f"open_clip:local-dir:{folder}"
    model.save_pretrained(folder)
    crop, square = {"shortest_edge": 36}, {"height": 32, "width": 32}
    if kind.startswith("siglip"):
        transformers.SiglipImageProcessor(size=square).save_pretrained(folder)
    else:
        transformers.CLIPImageProcessor(size=crop, crop_size=square).save_pretrained(folder)
    return str(folder)
