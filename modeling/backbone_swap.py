"""Puts a SparseFormer into a segmenter, a detector or a depth estimator of Transformers, in the place of their
backbone."""

import copy

from transformers import PreTrainedModel
from transformers.backbone_utils import BackboneMixin


def swap_backbone(model: PreTrainedModel, backbone: BackboneMixin) -> PreTrainedModel:
    """Replace a model's backbone in place, weights and configuration, so that what is saved loads again.

    Args:
        model (`PreTrainedModel`):
            With a backbone of Transformers, for example `UperNetForSemanticSegmentation` or `DPTForDepthEstimation`.
            Its head keeps its weights: one that was trained on a teacher reads the maps of the teacher's student.
        backbone (`SparseFormerBackbone`): Becomes part of the model, in its precision and place; it is not copied.

    Raises:
        ValueError: if there is no backbone in the model, or its head reads other maps than the new one gives.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, BackboneMixin)]
    if not names or getattr(model.config, "backbone_config", None) is None:
        raise ValueError(f"Got a {type(model).__name__}, expected a model with a `backbone_config`.")
    before = model.get_submodule(names[0])
    if backbone.channels != before.channels:
        raise ValueError(
            f"The head of this {type(model).__name__} reads maps of {before.channels} channels, the backbone gives "
            f"{backbone.channels}. Choose as many layers by `out_features`; for another width, make a new head with "
            "the backbone's configuration as `backbone_config`."
        )
    weight = next(before.parameters())
    model.set_submodule(names[0], backbone.to(weight.device, weight.dtype).train(before.training))
    model.config.backbone_config = copy.deepcopy(backbone.config)
    return model


__all__ = ["swap_backbone"]
