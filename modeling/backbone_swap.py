"""Replace the backbone of a segmentation, detection or depth estimation model of Transformers by a SparseFormer."""

import copy

from transformers import PreTrainedModel
from transformers.backbone_utils import BackboneMixin


def swap_backbone(model: PreTrainedModel, backbone: BackboneMixin) -> PreTrainedModel:
    """Replace a model's backbone and its `backbone_config` in place. The model can then be saved and loaded as usual.

    Args:
        model (`PreTrainedModel`):
            Model with a `backbone_config`, for example `UperNetForSemanticSegmentation` or `DPTForDepthEstimation`.
            The weights of the head do not change. A head that was trained on a teacher's feature maps also fits the
            feature maps of the teacher's student.
        backbone (`SparseFormerBackbone`):
            The new backbone. It is moved to the model's device and dtype. It is not copied.

    Raises:
        ValueError: if the model has no backbone, or if the `channels` of the old and the new backbone differ.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, BackboneMixin)]
    if not names or getattr(model.config, "backbone_config", None) is None:
        raise ValueError(f"`model` is a {type(model).__name__}, expected a model with a `backbone_config`.")
    before = model.get_submodule(names[0])
    if backbone.channels != before.channels:
        raise ValueError(
            f"`backbone` has feature maps of {backbone.channels} channels, but the head of this "
            f"{type(model).__name__} reads maps of {before.channels} channels. Choose the same number of layers by "
            "`out_features`; for another width, make a new head with the backbone's configuration as "
            "`backbone_config`."
        )
    weight = next(before.parameters())
    model.set_submodule(names[0], backbone.to(weight.device, weight.dtype).train(before.training))
    model.config.backbone_config = copy.deepcopy(backbone.config)
    return model


__all__ = ["swap_backbone"]
