"""A small random model of every kind that can be a teacher, built from its own library's classes, and what it can do.

`docs/models.md` has a row for each kind; a test compares.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import open_clip
import timm
import torch
import transformers
from timm.layers import GluMlp, HybridEmbed, RmsNorm, SwiGLU
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import ConvStem
from torch import nn


def randomize(model: nn.Module, scale: float = 0.2) -> nn.Module:
    """Weights far from their initialization, so that nothing is equal by being zero or one; norms near one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            shift = 1.0 if parameter.ndim == 1 and (parameter == 1).all() else 0.1
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) + shift)
    return model.eval()


SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
IMAGES = {"image_size": 32, "patch_size": 4}


def of_transformers(family: str, model: str = "Model", **fields) -> Callable[[], nn.Module]:
    """Makes one of Transformers' models; `intermediate_size` goes where a family has it."""

    def make() -> nn.Module:
        config_class = getattr(transformers, f"{family}Config")
        return randomize(getattr(transformers, f"{family}{model}")(config_class(**SIZES | IMAGES | fields)))

    return make


def of_timm(model_class=VisionTransformer, **arguments) -> Callable[[], nn.Module]:
    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 4, "num_classes": 5}
    return lambda: randomize(model_class(**sizes | arguments))


def of_open_clip(**fields) -> Callable[[], nn.Module]:
    vision = {"image_size": 32, "patch_size": 4, "width": 48, "layers": 3, "head_width": 12, "mlp_ratio": 2, **fields}
    text = {"context_length": 8, "vocab_size": 50, "width": 16, "heads": 2, "layers": 1}
    return lambda: randomize(open_clip.CLIP(24, vision, text))


def with_trunk(name: str, proj: str = "linear", pool: str = "", **arguments) -> Callable[[], nn.Module]:
    """An open_clip model whose visual tower is a model of timm."""

    def make() -> nn.Module:
        sizes = {"img_size": 32, "embed_dim": 48, "depth": 3, "num_heads": 4} | arguments
        original = timm.create_model
        from open_clip.timm_model import TimmModel

        open_clip.timm_model.timm.create_model = lambda *a, **k: original(*a, **k | sizes)
        try:
            visual = TimmModel(name, 24, image_size=32, pool=pool, proj=proj)
        finally:
            open_clip.timm_model.timm.create_model = original
        text = {"context_length": 8, "vocab_size": 50, "width": 16, "heads": 2, "layers": 1}
        vision = {"image_size": 32, "patch_size": 4, "width": 48, "layers": 1, "head_width": 12}
        clip = open_clip.CustomTextCLIP(24, vision, text)
        clip.visual = visual
        return randomize(clip)

    return make


def conv_stem() -> Callable[..., nn.Module]:
    """Makes MobileCLIP-B's convolutions in the place of a patch embedding, of 16 pixels each."""
    stem = ConvStem(channels=(8, 8, 48), stride=(4, 2, 2), kernel_size=(4, 2, 2), padding=0, act_layer=nn.GELU)
    return partial(HybridEmbed, backbone=stem, proj=False)


def clip() -> nn.Module:
    text = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(text_config=text, vision_config=SIZES | IMAGES, projection_dim=24)
    return randomize(transformers.CLIPModel(config))


def classifier_of_tower(family: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = getattr(transformers, f"{family}Config")(vision_config=SIZES | IMAGES, num_labels=5)
        return randomize(getattr(transformers, f"{family}ForImageClassification")(config))

    return make


def siglip(family: str = "Siglip") -> nn.Module:
    text = {
        "vocab_size": 50,
        "hidden_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "projection_size": 48,
    }
    patches = {"num_patches": 64, "patch_size": 4} if family == "Siglip2" else IMAGES
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=SIZES | patches)
    return randomize(getattr(transformers, f"{family}Model")(config))


def siglip2_classifier() -> nn.Module:
    vision = SIZES | {"num_patches": 64, "patch_size": 4}
    return randomize(
        transformers.Siglip2ForImageClassification(transformers.Siglip2Config(vision_config=vision, num_labels=5))
    )


def aimv2_with_text() -> nn.Module:
    text = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = SIZES | IMAGES | {"intermediate_size": 96}
    config = transformers.Aimv2Config(text_config=text, vision_config=vision, projection_dim=24)
    return randomize(transformers.Aimv2Model(config))


@dataclass(frozen=True)
class Kind:
    """A kind of vision transformer.

    Args:
        row (`str`): Its row in docs/models.md.
        build (`Callable`): Builds a small one.
        impulses (`bool`): Whether attention can be initialized.
        class_token (`bool`): Whether Context Broadcasting may gate by a class token.
        patches (`bool`): Whether its patches are embedded by one linear map.
        resizes (`bool`): Whether its own library takes images of another size.
        counts_patches (`bool`): Whether rotary angles there follow from the number of patches.
    """

    row: str
    build: Callable[[], nn.Module]
    impulses: bool = True
    class_token: bool = True
    patches: bool = True
    resizes: bool = True
    counts_patches: bool = False

    @cached_property
    def _model(self) -> nn.Module:
        return self.build()

    def make(self) -> nn.Module:
        """A small model; to copy one takes less time than to build and initialize it again."""
        return copy.deepcopy(self._model)


EVA02 = {"qkv_fused": False, "swiglu_mlp": True, "scale_mlp": True, "use_rot_pos_emb": True, "ref_feat_shape": (4, 4)}
PE = {"use_rot_pos_emb": True, "use_pre_transformer_norm": True, "global_pool": "map", "rope_grid_offset": 1.0}
DINOV3 = {
    **{"use_abs_pos_emb": False, "use_rot_pos_emb": True, "rope_type": "dinov3", "rope_temperature": 100},
    **{"rope_rotate_half": True, "num_reg_tokens": 4, "init_values": 0.5, "qkv_bias": False, "global_pool": "avg"},
    **{"use_fc_norm": False},
}
REGISTERS = {"num_register_tokens": 3}
AIM = {
    **{"class_token": False, "qkv_bias": False, "proj_bias": False, "norm_layer": partial(RmsNorm, eps=1e-5)},
    **{"mlp_layer": partial(SwiGLU, bias=False), "act_layer": nn.SiLU, "global_pool": "avg", "fc_norm": False},
}

KINDS = {
    "vit": Kind("ViT", of_transformers("ViT")),
    "vit-without-pooler": Kind(
        "ViT",
        lambda: randomize(transformers.ViTModel(transformers.ViTConfig(**SIZES | IMAGES), add_pooling_layer=False)),
    ),
    "vit-classifier": Kind("ViT", of_transformers("ViT", "ForImageClassification", num_labels=5)),
    "vit-rectangle": Kind(
        "ViT", of_transformers("ViT", "ForImageClassification", image_size=[24, 32], num_labels=5), resizes=False
    ),
    "vit-msn": Kind("ViTMSN", of_transformers("ViTMSN", "ForImageClassification", num_labels=5)),
    "vit-mae": Kind("ViTMAE", of_transformers("ViTMAE")),
    "deit": Kind("DeiT", of_transformers("DeiT", "ForImageClassification", num_labels=5)),
    "dinov2": Kind("DINOv2", of_transformers("Dinov2", mlp_ratio=2)),
    "dinov2-classifier": Kind(
        "DINOv2", of_transformers("Dinov2", "ForImageClassification", mlp_ratio=2, num_labels=5)
    ),
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
    "clip": Kind("CLIP", clip),
    "clip-vision": Kind("CLIP", of_transformers("CLIPVision", intermediate_size=96)),
    "clip-vision-with-projection": Kind(
        "CLIP", of_transformers("CLIPVision", "ModelWithProjection", projection_dim=24)
    ),
    "clip-classifier": Kind("CLIP", classifier_of_tower("CLIP")),
    "siglip": Kind("SigLIP", siglip, class_token=False),
    "siglip-vision": Kind("SigLIP", of_transformers("SiglipVision", intermediate_size=96), class_token=False),
    "siglip-without-head": Kind("SigLIP", of_transformers("SiglipVision", vision_use_head=False), class_token=False),
    "siglip-classifier": Kind("SigLIP", classifier_of_tower("Siglip"), class_token=False),
    "siglip2": Kind("SigLIP 2 NaFlex", partial(siglip, "Siglip2"), class_token=False),
    "siglip2-vision": Kind(
        "SigLIP 2 NaFlex",
        lambda: randomize(
            transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(num_patches=64, patch_size=4, **SIZES))
        ),
        class_token=False,
    ),
    "siglip2-classifier": Kind("SigLIP 2 NaFlex", siglip2_classifier, class_token=False),
    "aimv2": Kind("AIMv2", of_transformers("Aimv2Vision", intermediate_size=96), class_token=False, resizes=False),
    "aimv2-with-projection": Kind("AIMv2", aimv2_with_text, class_token=False, resizes=False),
    "aimv2-native": Kind(
        "AIMv2",
        of_transformers("Aimv2Vision", intermediate_size=96, is_native=True, use_head=False),
        impulses=False,
        class_token=False,
    ),
    "ijepa": Kind("I-JEPA", of_transformers("IJepa"), class_token=False),
    "ijepa-classifier": Kind(
        "I-JEPA", of_transformers("IJepa", "ForImageClassification", num_labels=5), class_token=False
    ),
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
    "timm-vit": Kind("timm ViT, DeiT, MAE", of_timm()),
    "timm-without-head": Kind("timm ViT, DeiT, MAE", of_timm(num_classes=0)),
    "timm-without-pooling": Kind("timm ViT, DeiT, MAE", of_timm(num_classes=0, global_pool="")),
    "timm-mean-pooled": Kind("timm ViT, DeiT, MAE", of_timm(global_pool="avg")),
    "timm-mean-pooled-without-class-token": Kind(
        "timm ViT, DeiT, MAE", of_timm(global_pool="avg", class_token=False), class_token=False
    ),
    "timm-registers": Kind(
        "timm ViT with registers, layer scale", of_timm(reg_tokens=4, no_embed_class=True, init_values=0.5)
    ),
    "timm-registers-mean-pooled": Kind(
        "timm ViT with registers, layer scale",
        of_timm(reg_tokens=4, global_pool="avg", class_token=False),
        class_token=False,
    ),
    "timm-query-key-norm": Kind("timm ViT with q/k norms", of_timm(qk_norm=True), impulses=False),
    "timm-attention-and-mlp-norm": Kind("timm ViT with q/k norms", of_timm(scale_attn_norm=True, scale_mlp_norm=True)),
    "timm-swiglu": Kind(
        "timm ViT with SwiGLU",
        of_timm(mlp_layer=partial(GluMlp, gate_last=False), mlp_ratio=4, act_layer=nn.SiLU),
    ),
    "timm-clip": Kind("timm CLIP", of_timm(pre_norm=True)),
    "timm-siglip": Kind(
        "timm SigLIP", of_timm(global_pool="map", class_token=False, num_classes=0), class_token=False
    ),
    "timm-aimv2": Kind("timm AIMv2", of_timm(**AIM), class_token=False),
    "timm-mobileclip-b": Kind(
        "timm MobileCLIP-B, MobileCLIP2-B",
        lambda: of_timm(embed_layer=conv_stem(), img_size=64, patch_size=1, no_embed_class=True)(),
        patches=False,
    ),
    "timm-eva02": Kind("timm EVA-02", of_timm(Eva, mlp_ratio=2, **EVA02), impulses=False, counts_patches=True),
    "timm-eva02-packed": Kind(
        "timm EVA-02",
        of_timm(Eva, mlp_ratio=2, swiglu_mlp=True, use_rot_pos_emb=True),
        impulses=False,
        counts_patches=True,
    ),
    "timm-eva02-clip": Kind(
        "timm EVA-02",
        of_timm(Eva, global_pool="token", mlp_ratio=2, scale_attn_inner=True, **EVA02),
        impulses=False,
        counts_patches=True,
    ),
    "timm-pe-core": Kind(
        "timm PE-Core",
        of_timm(Eva, attn_type="rope", rope_grid_indexing="xy", attn_pool_num_heads=8, attn_pool_mlp_ratio=4.0, **PE),
        impulses=False,
        counts_patches=True,
    ),
    "timm-dinov3": Kind("timm DINOv3", of_timm(Eva, **DINOV3), impulses=False),
    "timm-dinov3-gated": Kind(
        "timm DINOv3", of_timm(Eva, swiglu_mlp=True, swiglu_align_to=8, **DINOV3 | {"num_classes": 0}), impulses=False
    ),
    "open_clip": Kind("open_clip ViT", of_open_clip()),
    "open_clip-layer-scale": Kind("open_clip ViT", of_open_clip(ls_init_value=0.5)),
    "open_clip-mean-pooled": Kind(
        "open_clip ViT", of_open_clip(pool_type="avg", final_ln_after_pool=True, no_ln_pre=True)
    ),
    "open_clip-tower": Kind("open_clip ViT", lambda: of_open_clip()().visual),
    "open_clip-timm": Kind("open_clip with a trunk of timm", with_trunk("vit_base_patch16_224", patch_size=4)),
    "open_clip-timm-siglip": Kind(
        "open_clip with a trunk of timm",
        with_trunk("vit_base_patch16_siglip_224", proj="none", pool="map", patch_size=4),
        class_token=False,
    ),
    "open_clip-timm-eva02": Kind(
        "open_clip with a trunk of timm",
        with_trunk("eva02_base_patch16_clip_224", proj="", pool="token", patch_size=4),
        impulses=False,
        counts_patches=True,
    ),
}
