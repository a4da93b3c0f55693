"""SparseFormers for dense prediction: backbones with feature maps, and models for semantic segmentation.

A SparseFormer has the segmentation head of Gao et al., *Bootstrapping SparseFormers from Vision Foundation Models*,
section 4.1. A PatchSparseFormer has a linear classifier on feature maps.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.modeling_outputs import BackboneOutput, SemanticSegmenterOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple

from ..configuration.configuration_base import pair
from ..configuration.configuration_patch_sparseformer import PatchSparseFormerConfig
from ..configuration.configuration_sparseformer import SparseFormerConfig
from .dense import FeatureMaps, MapUpsampler
from .layers import INITIALIZER_STD
from .modeling_patch_sparseformer import PatchSparseFormerModel, PatchSparseFormerPreTrainedModel
from .modeling_sparseformer import SparseFormerModel, SparseFormerPreTrainedModel
from .segmentation_head import LinearDecoder, SegmentationHead, semantic_segmentation_loss


@dataclass
class SparseFormerBackboneOutput(BackboneOutput):
    """`BackboneOutput` with `rois` (`output_rois=True`), `pooler_output` (`output_embedding=True`) and
    `attention_forecast`, see `SparseFormerModelOutput`."""

    rois: tuple[torch.FloatTensor, ...] | None = None
    pooler_output: torch.FloatTensor | None = None
    attention_forecast: torch.FloatTensor | None = None


@dataclass
class SparseFormerSemanticSegmenterOutput(SemanticSegmenterOutput):
    """`SemanticSegmenterOutput` with `rois` (`output_rois=True`).

    Args:
        token_maps (`torch.FloatTensor` of shape `(batch, tokens, height, width)`, *optional*):
            Each token's weight in the logits of each pixel. The weights of a pixel sum to 1. Without
            `output_token_maps=True`, None.
    """

    rois: tuple[torch.FloatTensor, ...] | None = None
    token_maps: torch.FloatTensor | None = None


class DenseInitializationMixin:
    """Mixin that initializes the heads of SparseFormers for dense prediction."""

    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, SegmentationHead):
            init.trunc_normal_(module.query.weight, std=INITIALIZER_STD)
            init.zeros_(module.query.bias)
        elif isinstance(module, MapUpsampler):
            for convolution in module.modules():
                if isinstance(convolution, nn.Conv2d):
                    init.kaiming_normal_(convolution.weight)
                    init.zeros_(convolution.bias)
            # With a zero weight, an upsampler does not change a feature map before training.
            init.zeros_(module.out_proj.weight)
        else:
            super()._init_weights(module)


class FeatureMapsMixin(DenseInitializationMixin, BackboneMixin):
    """Mixin for backbones whose feature maps have the teacher's grid. The size of the maps does not depend on the
    number of tokens. These backbones can replace backbones of Transformers, for example a `Dinov2Backbone`.

    Each cell of a feature map has the mean hidden state of the tokens whose RoIs cover the cell
    (`assignment_weights`). If `upsampler_hidden_size` is set, a `MapUpsampler` adds details of the image to the map. A
    new student with one token per patch returns the same feature map as its teacher.

    The folder of any model of the same family, for example of a bootstrapped classifier, can be loaded as a backbone:
    `….from_pretrained(folder, out_features=["stage4", "stage8"])`. The backbone's configuration can be the
    `backbone_config` of a head of Transformers (docs/dense_features.md).
    """

    _keys_to_ignore_on_load_unexpected = [r"^(classifier|visual_projection|decode_head)\."]

    @can_return_tuple
    @filter_output_hidden_states
    def forward(
        self,
        pixel_values: torch.Tensor,
        num_tokens: int | None = None,
        output_rois: bool = False,
        output_embedding: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SparseFormerBackboneOutput:
        """
        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`):
                Normalized images of at least `feature_stride` pixels.
            output_embedding (`bool`, *optional*, defaults to `False`): Return `pooler_output`.
            num_tokens, output_rois, kwargs: Arguments of the base model's `forward`.

        Returns:
            `SparseFormerBackboneOutput` with a feature map for each layer of `out_features`, `(batch, hidden_size,
            height / stride, width / stride)`, rounded down. The stride is `feature_stride`, divided by the layer's
            factor in `feature_scales`. If `reshape_hidden_states` is False, maps are `(batch, 1 + cells,
            hidden_size)`. For all layers, tokens are assigned to cells by their RoIs after the last adjustment.
        """
        kwargs |= {"num_tokens": num_tokens, "output_rois": True, "return_dict": True}
        outputs = self.base_model(pixel_values, **kwargs)
        norm = self.base_model.layernorm
        maps, _ = self.feature_maps(outputs.hidden_states, outputs.rois[-1], pixel_values, norm)
        if not self.config.reshape_hidden_states:
            # Each map becomes a sequence. The first token is the layer's [CLS] or, if the model has no [CLS], the mean
            # of the layer's tokens. The cells of the map follow.
            states = [norm(outputs.hidden_states[index]) for index in self.out_indices]
            has_class = self.config.num_class_tokens > 0
            first = [each[:, :1] if has_class else each.mean(dim=1, keepdim=True) for each in states]
            cells = [each.flatten(2).mT for each in maps]
            maps = tuple(torch.cat(parts, dim=1) for parts in zip(first, cells, strict=True))
        return SparseFormerBackboneOutput(
            feature_maps=maps,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            rois=outputs.rois if output_rois else None,
            pooler_output=outputs.pooler_output if output_embedding else None,
            attention_forecast=outputs.get("attention_forecast"),
        )


class SparseFormerBackbone(FeatureMapsMixin, SparseFormerPreTrainedModel):
    """SparseFormer as a backbone with feature maps on its teacher's grid, see `FeatureMapsMixin`."""

    auto_classes = SparseFormerPreTrainedModel.auto_classes | {"AutoBackbone": "SparseFormerBackbone"}

    def __init__(self, config: SparseFormerConfig):
        super().__init__(config)
        self.num_features = [config.hidden_size] * len(config.stage_names)
        self.sparseformer = SparseFormerModel(config)
        self.feature_maps = FeatureMaps(config)
        self.post_init()


class PatchSparseFormerBackbone(FeatureMapsMixin, PatchSparseFormerPreTrainedModel):
    """PatchSparseFormer as a backbone with feature maps on its teacher's grid, see `FeatureMapsMixin`."""

    auto_classes = PatchSparseFormerPreTrainedModel.auto_classes | {"AutoBackbone": "PatchSparseFormerBackbone"}

    def __init__(self, config: PatchSparseFormerConfig):
        super().__init__(config)
        self.num_features = [config.hidden_size] * len(config.stage_names)
        self.sparseformer = PatchSparseFormerModel(config)
        self.feature_maps = FeatureMaps(config)
        self.post_init()


class SegmenterMixin(DenseInitializationMixin):
    """Mixin for semantic segmentation models."""

    # The loss is a mean over labeled pixels. `num_items_in_batch` of `Trainer` would also count pixels with the label
    # 255, which the loss ignores.
    accepts_loss_kwargs = False

    def image_processor_config(self) -> dict | None:
        """Return the `preprocessor_config.json` of a `SegformerImageProcessor`. Pipelines for segmentation need it."""
        fields = super().image_processor_config()
        if fields is None:
            return None
        height, width = pair(self.config.image_size)
        for name in ("do_center_crop", "crop_size", "do_convert_rgb"):
            fields.pop(name, None)
        return fields | {
            "image_processor_type": "SegformerImageProcessor",
            "size": {"height": height, "width": width},
            "do_reduce_labels": False,
        }


class SparseFormerForSemanticSegmentation(SegmenterMixin, SparseFormerPreTrainedModel):
    """SparseFormer with the segmentation head of Gao et al. (CVPR 2024, section 4.1), see `SegmentationHead`.

    With 256 latent tokens, 512 x 512 pixels and 150 classes, the base model has 65.4 M parameters and 25.4 G
    multiply-accumulates, and the large model has 213.5 M and 66.3 G. Table 5 of the paper has 68 M and 36 G for base,
    and 216 M and 77 G for large. The paper does not explain the difference.

    To train with larger images, load a bootstrapped classifier by
    `SparseFormerForSemanticSegmentation.from_pretrained(folder, image_size=512, num_labels=150)`, and then call
    `resize_tokens(256)`. The paper has 256 tokens for 512 x 512 pixels.
    """

    auto_classes = SparseFormerPreTrainedModel.auto_classes | {
        "AutoModelForSemanticSegmentation": "SparseFormerForSemanticSegmentation"
    }

    def __init__(self, config: SparseFormerConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.sparseformer = SparseFormerModel(config)
        self.decode_head = SegmentationHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        output_rois: bool = False,
        output_token_maps: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SparseFormerSemanticSegmenterOutput:
        """
        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`):
                Normalized images of at least 4 x 4 pixels.
            labels (`torch.LongTensor` of shape `(batch, height, width)`, *optional*):
                Class indices. The loss ignores 255.
            output_rois (`bool`, *optional*, defaults to `False`): Return `rois`.
            output_token_maps (`bool`, *optional*, defaults to `False`): Return `token_maps`.
            kwargs: Arguments of `SparseFormerModel.forward`.

        Returns:
            `SparseFormerSemanticSegmenterOutput` with `logits`, `(batch, num_labels, height / 4, width / 4)`, rounded
            up. `post_process_semantic_segmentation` of the image processor resizes the logits.
        """
        kwargs |= {"output_rois": True, "output_stem_features": True, "return_dict": True}
        outputs = self.sparseformer(pixel_values, **kwargs)
        tokens = outputs.last_hidden_state[:, self.config.num_prefix_tokens :]
        logits, token_maps = self.decode_head(tokens, outputs.rois[-1], outputs.stem_features)
        return SparseFormerSemanticSegmenterOutput(
            loss=None if labels is None else semantic_segmentation_loss(logits, labels),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            rois=outputs.rois if output_rois else None,
            token_maps=token_maps if output_token_maps else None,
        )


class PatchSparseFormerForSemanticSegmentation(SegmenterMixin, PatchSparseFormerPreTrainedModel):
    """PatchSparseFormer with a linear classifier on the feature maps of a `PatchSparseFormerBackbone`. If
    `out_features` names several layers, their maps are concatenated."""

    auto_classes = PatchSparseFormerPreTrainedModel.auto_classes | {
        "AutoModelForSemanticSegmentation": "PatchSparseFormerForSemanticSegmentation"
    }

    def __init__(self, config: PatchSparseFormerConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.sparseformer = PatchSparseFormerModel(config)
        self.feature_maps = FeatureMaps(config)
        self.decode_head = LinearDecoder(config)
        self.post_init()

    @can_return_tuple
    @filter_output_hidden_states
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        output_rois: bool = False,
        output_token_maps: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SparseFormerSemanticSegmenterOutput:
        """Arguments and results are those of `SparseFormerForSemanticSegmentation.forward`, except that logits have
        the rows and columns of the last layer's feature map."""
        kwargs |= {"output_rois": True, "return_dict": True}
        outputs = self.sparseformer(pixel_values, **kwargs)
        maps, token_maps = self.feature_maps(
            outputs.hidden_states, outputs.rois[-1], pixel_values, self.sparseformer.layernorm
        )
        logits = self.decode_head(maps)
        return SparseFormerSemanticSegmenterOutput(
            loss=None if labels is None else semantic_segmentation_loss(logits, labels),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            rois=outputs.rois if output_rois else None,
            token_maps=token_maps if output_token_maps else None,
        )


__all__ = [
    "PatchSparseFormerBackbone",
    "PatchSparseFormerForSemanticSegmentation",
    "SparseFormerBackbone",
    "SparseFormerForSemanticSegmentation",
]
