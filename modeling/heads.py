"""Puts a SparseFormer into a segmenter, a detector or a depth estimator of Transformers, in the place of their
backbone."""

import copy

from transformers import PreTrainedModel
from transformers.backbone_utils import BackboneMixin


def swap_backbone(model: PreTrainedModel, backbone: BackboneMixin) -> PreTrainedModel:
    """Replace a model's backbone in place, weights and configuration, so that what is saved loads again.

    Args:
        model (`PreTrainedModel`):
            With a backbone of Transformers, for example `UperNetForSemanticSegmentation`, `DPTForDepthEstimation`,
            `Mask2FormerForUniversalSegmentation` or `RTDetrV2ForObjectDetection`. Its head keeps its weights: one that
            was trained on a teacher reads the maps of the teacher's student.
        backbone (`SparseFormerBackbone`): Becomes part of the model, in its precision and place; it is not copied.

    Returns:
        The model.

    Raises:
        ValueError: if there is no backbone in the model, or its head reads other maps than the new one gives.
    """
    name, before = next(
        ((name, module) for name, module in model.named_modules() if isinstance(module, BackboneMixin)), (None, None)
    )
    if before is None or getattr(model.config, "backbone_config", None) is None:
        raise ValueError(
            f"Got a {type(model).__name__}, expected a model with a backbone of Transformers and its "
            "`backbone_config`, for example UperNetForSemanticSegmentation."
        )
    if not isinstance(backbone, BackboneMixin):
        raise ValueError(f"Got a {type(backbone).__name__} as backbone, expected a SparseFormerBackbone.")
    if backbone.channels != before.channels:
        raise ValueError(
            f"The head of this {type(model).__name__} reads maps of {_listed(before.channels)} channels, the backbone "
            f"gives {_listed(backbone.channels)}. Choose as many layers by `out_features`; for another width, make a "
            "new head with the backbone's configuration as `backbone_config`."
        )
    in_rows = [getattr(each.config, "reshape_hidden_states", True) for each in (before, backbone)]
    if in_rows[0] != in_rows[1]:
        raise ValueError(
            f"The head of this {type(model).__name__} was made for `reshape_hidden_states={in_rows[0]}`, the backbone "
            f"has {in_rows[1]}. Load it with the other."
        )
    weight = next(before.parameters())
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, backbone.to(weight.device, weight.dtype).train(before.training))
    model.config.backbone_config = copy.deepcopy(backbone.config)
    return model


def _listed(channels: list[int]) -> str:
    return ", ".join(map(str, channels))


__all__ = ["swap_backbone"]
