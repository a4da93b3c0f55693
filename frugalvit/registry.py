"""The model families, one line each, and what follows from them: public names and Auto classes."""

import importlib


# A family's public names in `configuration_<family>.py` and in `modeling_<family>.py`.
FAMILIES = {
    "agent_cnn": (
        ["AgentCNNConfig"],
        ["AgentCNNModel", "AgentCNNForImageClassification", "AgentCNNPreTrainedModel"],
    ),
    "bootstrapped_vit": (["BootstrappedViTConfig"], ["BootstrappedViTForImageClassification"]),
    "convmixer": (
        ["ConvMixerConfig"],
        ["ConvMixerModel", "ConvMixerForImageClassification", "ConvMixerPreTrainedModel"],
    ),
    "sparseformer": (
        ["SparseFormerConfig"],
        [
            "SparseFormerModel",
            "SparseFormerForImageClassification",
            "SparseFormerForSemanticSegmentation",
            "SparseFormerPreTrainedModel",
            "SparseFormerVisionModel",
            "SparseFormerVisionModelWithProjection",
        ],
    ),
    "sparseformer_clip": (
        ["SparseFormerCLIPConfig", "SparseFormerSiglipConfig"],
        ["SparseFormerCLIPModel", "SparseFormerSiglipModel"],
    ),
    "sparseformer_llava": (["SparseFormerLlavaConfig"], ["SparseFormerLlavaForConditionalGeneration"]),
    "sparseformer_paligemma": (
        ["SparseFormerPaliGemmaConfig"],
        ["SparseFormerPaliGemmaForConditionalGeneration"],
    ),
    "vit_context_broadcast": (
        ["ViTContextBroadcastConfig"],
        [
            "ViTContextBroadcastModel",
            "ViTContextBroadcastForImageClassification",
            "ViTContextBroadcastPreTrainedModel",
        ],
    ),
    "vit_impulse_init": (
        ["ViTImpulseInitConfig"],
        ["ViTImpulseInitModel", "ViTImpulseInitForImageClassification", "ViTImpulseInitPreTrainedModel"],
    ),
}

FUNCTIONS = {
    "Anatomy": "frugalvit.modeling.hosts.anatomy",
    "checkpoint_path": "frugalvit.resources",
    "ContextBroadcast": "frugalvit.modeling.context_broadcast",
    "count_context_broadcast": "frugalvit.common.macs",
    "count_macs": "frugalvit.common.macs",
    "extract_features": "frugalvit.evaluation.embeddings",
    "from_open_clip": "frugalvit.modeling.open_clip_adapter",
    "GeneralizedConv2d": "frugalvit.modeling.generalized_convolution",
    "HintDecayCallback": "frugalvit.training.components.callbacks",
    "impulse_init_": "frugalvit.modeling.initialization",
    "insert_context_broadcast": "frugalvit.modeling.context_broadcast_insertion",
    "initialize_attention_": "frugalvit.modeling.initialization",
    "match_channels_": "frugalvit.modeling.swap",
    "matching_processor": "frugalvit.modeling.swap",
    "measure_attention": "frugalvit.attention",
    "mimetic_init_": "frugalvit.modeling.initialization",
    "OpenClipVisual": "frugalvit.modeling.open_clip_adapter",
    "read_anatomy": "frugalvit.modeling.hosts",
    "remove_context_broadcast": "frugalvit.modeling.context_broadcast_insertion",
    "SparseFormerLlavaProcessor": "frugalvit.modeling.modeling_sparseformer_llava",
    "SparseFormerVisionTower": "frugalvit.modeling.llava_tower",
    "swap_vision_tower": "frugalvit.modeling.swap",
    "to_open_clip": "frugalvit.modeling.open_clip_adapter",
}


def public_names() -> dict[str, str]:
    """The names that `frugalvit` offers and the modules that define them."""
    names = dict(FUNCTIONS)
    for family, (configurations, models) in FAMILIES.items():
        names |= dict.fromkeys(configurations, f"frugalvit.configuration.configuration_{family}")
        names |= dict.fromkeys(models, f"frugalvit.modeling.modeling_{family}")
    return names


def configuration_classes() -> list[type]:
    """The configurations of all families."""
    return [
        getattr(importlib.import_module(f"frugalvit.configuration.configuration_{family}"), name)
        for family, (configurations, _) in FAMILIES.items()
        for name in configurations
    ]


def register() -> None:
    """Let Transformers' Auto classes load the families' folders with the installed classes.

    Configurations are registered always, models and image processors if PyTorch is there. Which Auto class loads a
    model stands in the model's own `auto_classes`.
    """
    import transformers
    from transformers.utils import is_torch_available

    for family, (configurations, models) in FAMILIES.items():
        module = importlib.import_module(f"frugalvit.configuration.configuration_{family}")
        for config_class in (getattr(module, name) for name in configurations):
            transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
            if is_torch_available():
                processors = {"torchvision": transformers.ViTImageProcessor, "pil": transformers.ViTImageProcessorPil}
                transformers.AutoImageProcessor.register(
                    config_class, image_processor_classes=processors, exist_ok=True
                )
        if is_torch_available():
            module = importlib.import_module(f"frugalvit.modeling.modeling_{family}")
            for model_class in (getattr(module, name) for name in models):
                for auto_class, name in model_class.auto_classes.items():
                    if name == model_class.__name__:
                        getattr(transformers, auto_class).register(
                            model_class.config_class, model_class, exist_ok=True
                        )
    if is_torch_available():
        altered = importlib.import_module("frugalvit.modeling.context_broadcast_classes")
        for config_class in (getattr(altered, f"ContextBroadcast{name}") for name in altered.CONFIGURATIONS):
            transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
