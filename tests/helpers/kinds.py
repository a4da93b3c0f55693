"""Model families and generations of SparseFormer, with tiny configurations."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

import frugalvit


@dataclass(frozen=True)
class Kind:
    """A model family, or a generation of SparseFormer, with a tiny configuration.

    Attributes:
        config_class (`type`): Configuration class.
        variant (`str`, *optional*): Name of the variant whose fields the tiny configuration starts with.
        fields (`dict`): Fields that replace the variant's fields to make models small.
        classes (`tuple`): Model classes: first the base model, then the classifier, then other classes.
    """

    config_class: type[PreTrainedConfig]
    variant: str | None
    fields: dict
    classes: tuple[type[PreTrainedModel], ...]

    def config(self, model_class: type[PreTrainedModel] | None = None, **fields) -> PreTrainedConfig:
        """Return the tiny configuration of `model_class` (default: the base model) with changed `fields`."""
        config_class = (model_class or self.base).config_class
        fields = self.fields | fields
        if config_class.model_type.endswith("_projection"):
            fields = {"projection_dim": 16} | fields
        return config_class(**self.config_class._variants.get(self.variant, {}) | fields)

    @property
    def base(self) -> type[PreTrainedModel]:
        return self.classes[0]

    @property
    def classifier(self) -> type[PreTrainedModel]:
        return self.classes[1]


def main_output(outputs: ModelOutput) -> torch.Tensor:
    """Return logits, image embeddings, tokens, or the last feature map of a backbone."""
    name = next(name for name in ("logits", "image_embeds", "last_hidden_state", "feature_maps") if name in outputs)
    return outputs[name][-1] if name == "feature_maps" else outputs[name]


SHARED = {"image_size": 32, "resize_size": None, "num_labels": 3}
ENCODER = {
    **SHARED,
    "num_latent_tokens": 5,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "drop_path_rate": 0.0,
    "upsampler_hidden_size": 8,
}
SPARSEFORMER = ENCODER | {
    "num_sampling_points": 4,
    "num_mixed_points": 8,
    "stem_channels": 8,
    "focusing_hidden_size": 32,
}
PATCHES = ENCODER | {"patch_size": 4}
SPARSEFORMERS = (
    frugalvit.SparseFormerModel,
    frugalvit.SparseFormerForImageClassification,
    frugalvit.SparseFormerVisionModel,
    frugalvit.SparseFormerVisionModelWithProjection,
    frugalvit.SparseFormerForSemanticSegmentation,
    frugalvit.SparseFormerBackbone,
)
PATCH_SPARSEFORMERS = tuple(getattr(frugalvit, f"Patch{each.__name__}") for each in SPARSEFORMERS)
KINDS = {
    "bootstrapped": Kind(
        frugalvit.SparseFormerConfig,
        "augreg-base-49-224",
        {**SPARSEFORMER, "mixing_hidden_size": 16},
        SPARSEFORMERS,
    ),
    "patches": Kind(
        frugalvit.PatchSparseFormerConfig,
        None,
        PATCHES | {"num_latent_tokens": 6, "extra_norms": ["patch", "embedding"]},
        PATCH_SPARSEFORMERS,
    ),
    "content": Kind(
        frugalvit.PatchSparseFormerConfig,
        None,
        PATCHES | {"num_latent_tokens": 9, "placement": "content", "pooling": "mean", "rope_theta": 100.0},
        (*PATCH_SPARSEFORMERS[:2], frugalvit.PatchSparseFormerBackbone),
    ),
    "v1": Kind(frugalvit.SparseFormerConfig, "v1-tiny", {**SPARSEFORMER, "num_attention_heads": 16}, SPARSEFORMERS),
    "vit_impulse_init": Kind(
        frugalvit.ViTImpulseInitConfig,
        "vit-tiny-h3-32",
        {**SHARED, "patch_size": 4, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2},
        (frugalvit.ViTImpulseInitModel, frugalvit.ViTImpulseInitForImageClassification),
    ),
    "vit_context_broadcast": Kind(
        frugalvit.ViTContextBroadcastConfig,
        "vit-tiny-cb_s-224",
        {**SHARED, "patch_size": 4, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2},
        (frugalvit.ViTContextBroadcastModel, frugalvit.ViTContextBroadcastForImageClassification),
    ),
    "agent_cnn": Kind(
        frugalvit.AgentCNNConfig,
        "agent-base",
        {**SHARED, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 3, "dropout": 0.0}
        # Tests of losses expect the small weights of the default initialization.
        | {"initialization": "default"},
        (frugalvit.AgentCNNModel, frugalvit.AgentCNNForImageClassification),
    ),
    "convmixer": Kind(
        frugalvit.ConvMixerConfig,
        "convmixer-256-k3",
        {**SHARED, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 3, "spatial_filters": "impulse"},
        (frugalvit.ConvMixerModel, frugalvit.ConvMixerForImageClassification),
    ),
}
