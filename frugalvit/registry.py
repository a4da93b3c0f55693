"""Registration of the model families with Transformers' Auto classes."""

import importlib

import transformers


# Model families. The public names of a family are listed in `__all__` of `modeling_<family>.py`.
FAMILIES = (
    "agent_cnn",
    "bootstrapped_vit",
    "convmixer",
    "patch_sparseformer",
    "sparseformer",
    "sparseformer_clip",
    "sparseformer_dense",
    "sparseformer_vlm",
    "vit_context_broadcast",
    "vit_impulse_init",
)


def register() -> dict[str, type]:
    """Register the models of all families with Transformers' Auto classes. Return the public classes by name."""
    processors = {"torchvision": transformers.ViTImageProcessor, "pil": transformers.ViTImageProcessorPil}
    classes = {}
    for family in FAMILIES:
        module = importlib.import_module(f"frugalvit.modeling.modeling_{family}")
        classes |= {name: getattr(module, name) for name in module.__all__}
    for found in classes.values():
        if issubclass(found, transformers.PreTrainedConfig):
            transformers.AutoConfig.register(found.model_type, found, exist_ok=True)
            transformers.AutoImageProcessor.register(found, image_processor_classes=processors, exist_ok=True)
    for name, found in classes.items():
        for auto_class, own in getattr(found, "auto_classes", {}).items():
            if own == name:
                getattr(transformers, auto_class).register(found.config_class, found, exist_ok=True)
    return classes
