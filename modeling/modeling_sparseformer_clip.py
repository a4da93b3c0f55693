"""CLIP and SigLIP whose image side is a SparseFormer (section 4.2 of the bootstrapping paper): the text side is their
own."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import CLIPTextModel, SiglipTextModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPOutput, image_text_contrastive_loss
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple

from ..configuration.configuration_sparseformer_base import is_sparseformer
from ..configuration.configuration_sparseformer_clip import SparseFormerCLIPConfig, SparseFormerSiglipConfig
from .hub import HubModel
from .modeling_patch_sparseformer import tower_class
from .modeling_sparseformer import SparseFormerModelOutput


class SparseFormerCLIPPreTrainedModel(HubModel):
    """Base class of a CLIP and a SigLIP with a SparseFormer: two sides, and a comparison of what they pool.

    Subclasses have `text_model` and `vision_model`, `text_projection` and `visual_projection` of their pooled outputs,
    `logits` of the cosines between the two, and the `contrastive_loss` of logits.
    """

    input_modalities = ("image", "text")
    embeds = {"text": ("get_text_features", "pooler_output"), "image": ("get_image_features", "pooler_output")}
    embedding_arguments = ("num_tokens",)
    text_padding: bool | str = True
    supports_gradient_checkpointing = True
    _keep_in_fp32_modules_strict = ["initial_rois"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def get_input_embeddings(self) -> nn.Module:
        return self.text_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module):
        self.text_model.set_input_embeddings(value)

    def set_num_tokens(self, num_tokens: int | None):
        """Choose the image side's latent tokens of all calls that choose none, as of a SparseFormer alone."""
        self.vision_model.set_num_tokens(num_tokens)

    def sentence_transformers_config(self) -> dict[str, object]:
        """As of every model; texts are as long as the text side takes them."""
        files = super().sentence_transformers_config()
        lengths = {"padding": self.text_padding, "max_length": self.config.text_config.max_position_embeddings}
        files["sentence_bert_config.json"]["processing_kwargs"] = {"text": lengths}
        return files

    @can_return_tuple
    def get_text_features(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Return the text model's output for token ids, `(batch, tokens)`, with its `pooler_output` projected,
        `(batch, width)`."""
        outputs = self.text_model(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, return_dict=True, **kwargs
        )
        outputs.pooler_output = self.text_projection(outputs.pooler_output)
        return outputs

    @can_return_tuple
    def get_image_features(
        self, pixel_values: torch.Tensor, num_tokens: int | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> SparseFormerModelOutput:
        """Return the SparseFormer's output for images, `(batch, num_channels, height, width)` of any size, with its
        `pooler_output` projected, `(batch, width)`. `num_tokens` are the latent tokens to compute with, as in
        `SparseFormerModel`."""
        outputs = self.vision_model(pixel_values, num_tokens=num_tokens, return_dict=True, **kwargs)
        outputs.pooler_output = self.visual_projection(outputs.pooler_output)
        return outputs

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        return_loss: bool | None = None,
        output_rois: bool = False,
        num_tokens: int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CLIPOutput:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(texts, tokens)`): Token ids.
            pixel_values (`torch.FloatTensor` of shape `(images, num_channels, height, width)`): Normalized images.
            attention_mask (`torch.Tensor`, *optional*): `(texts, tokens)`, 0 where `input_ids` are padding.
            position_ids (`torch.LongTensor`, *optional*): `(texts, tokens)`.
            return_loss (`bool`, *optional*): Also return the contrastive loss; image i belongs to text i.
            output_rois (`bool`, *optional*, defaults to `False`):
                Return `rois` and `sampling_points` with `vision_model_output`.
            num_tokens (`int`, *optional*):
                Latent tokens of the image side to compute with, as of `SparseFormerModel`.

        Returns:
            `CLIPOutput`: `logits_per_image`, `(images, texts)`, their transpose `logits_per_text`, the normalized
            `image_embeds` and `text_embeds`, and the outputs of both sides.
        """
        images = self.get_image_features(pixel_values, num_tokens, output_rois=output_rois, return_dict=True, **kwargs)
        texts = self.get_text_features(input_ids, attention_mask, position_ids, return_dict=True, **kwargs)
        image_embeds = F.normalize(images.pooler_output, dim=-1)
        text_embeds = F.normalize(texts.pooler_output, dim=-1)
        logits_per_text = self.logits(text_embeds @ image_embeds.mT)
        return CLIPOutput(
            loss=self.contrastive_loss(logits_per_text) if return_loss else None,
            logits_per_image=logits_per_text.mT,
            logits_per_text=logits_per_text,
            text_embeds=text_embeds,
            image_embeds=image_embeds,
            text_model_output=texts,
            vision_model_output=images,
        )


class SparseFormerCLIPModel(SparseFormerCLIPPreTrainedModel):
    """A CLIP with a SparseFormer in the place of its vision transformer, called as `CLIPModel` is.

    `from_clip` puts one together from a CLIP and a SparseFormer that was bootstrapped from its vision transformer.
    """

    config: SparseFormerCLIPConfig
    base_model_prefix = "clip"
    auto_classes = {
        "AutoModel": "SparseFormerCLIPModel",
        "AutoModelForZeroShotImageClassification": "SparseFormerCLIPModel",
    }
    _no_split_modules = ["CLIPTextEmbeddings", "CLIPEncoderLayer"]

    def __init__(self, config: SparseFormerCLIPConfig):
        config.validate()
        super().__init__(config)
        text, vision = config.text_config, config.vision_config
        self.text_model = CLIPTextModel._from_config(text)
        self.vision_model = tower_class(vision)._from_config(vision)
        self.text_projection = nn.Linear(text.hidden_size, config.projection_dim, bias=False)
        self.visual_projection = nn.Linear(vision.hidden_size, config.projection_dim, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(float(config.logit_scale_init_value)))
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        # The two sides initialize themselves.
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, SparseFormerCLIPModel):
            init.constant_(module.logit_scale, self.config.logit_scale_init_value)

    def logits(self, cosines: torch.Tensor) -> torch.Tensor:
        """Cosines `(texts, images)` to logits of the same shape."""
        return cosines * self.logit_scale.exp()

    def contrastive_loss(self, logits_per_text: torch.Tensor) -> torch.Tensor:
        """The cross-entropy of logits `(pairs, pairs)`, mean of both directions."""
        return image_text_contrastive_loss(logits_per_text)

    @classmethod
    @torch.no_grad()
    def from_clip(cls, clip: nn.Module, vision_model: nn.Module) -> "SparseFormerCLIPModel | SparseFormerSiglipModel":
        """A CLIP or SigLIP with its image side replaced; the text side is the same to the bit.

        Args:
            clip (`CLIPModel`, `SiglipModel` or `Siglip2Model`):
                The model with the text side, both projections of a CLIP, and the scale (and bias) of logits.
            vision_model (`SparseFormerVisionModelWithProjection`, of a SigLIP `SparseFormerVisionModel`):
                Bootstrapped from the image side of `clip`.

        Returns:
            The model, a `SparseFormerSiglipModel` if `clip` is a SigLIP, in evaluation mode, in the precision and on
            the device of `clip`.

        Raises:
            ValueError: if `clip` is no CLIP or SigLIP of Transformers, or the embeddings of the two have different
                widths.
        """
        if getattr(clip, "logit_bias", None) is not None:
            return SparseFormerSiglipModel.from_siglip(clip, vision_model)
        parts = ("text_model", "text_projection", "visual_projection", "logit_scale")
        if not all(hasattr(clip, part) for part in parts):
            raise ValueError(
                f"Got a {type(clip).__name__} as CLIP, expected a CLIPModel or SiglipModel, with both sides. Models "
                "of open_clip are converted by `from_open_clip`."
            )
        if not _is_sparseformer(vision_model) or not hasattr(vision_model, "visual_projection"):
            raise ValueError(
                f"Got a {type(vision_model).__name__} as vision model, expected a "
                "SparseFormerVisionModelWithProjection that was bootstrapped from the CLIP."
            )
        ours, theirs = vision_model.visual_projection.out_features, clip.text_projection.out_features
        if ours != theirs:
            raise ValueError(
                f"The vision model projects to {ours} channels, the CLIP to {theirs}; bootstrap it from this CLIP."
            )
        config = SparseFormerCLIPConfig(
            text_config=clip.config.text_config.to_dict(),
            vision_config=vision_model.config.to_dict(),
            projection_dim=theirs,
            logit_scale_init_value=clip.config.logit_scale_init_value,
        )
        model = cls(config).to(clip.text_projection.weight).eval()
        model.text_model.load_state_dict(clip.text_model.state_dict())
        model.text_projection.load_state_dict(clip.text_projection.state_dict())
        model.logit_scale.copy_(clip.logit_scale)
        model.vision_model.load_state_dict(vision_model.base_model.state_dict())
        model.visual_projection.load_state_dict(vision_model.visual_projection.state_dict())
        return model


class SparseFormerSiglipModel(SparseFormerCLIPPreTrainedModel):
    """A SigLIP with a SparseFormer in the place of its vision transformer, called as `SiglipModel` is.

    `SparseFormerCLIPModel.from_clip` puts one together from a SigLIP or SigLIP 2 and a SparseFormer that was
    bootstrapped from its vision transformer.
    """

    config: SparseFormerSiglipConfig
    base_model_prefix = "siglip"
    auto_classes = {
        "AutoModel": "SparseFormerSiglipModel",
        "AutoModelForZeroShotImageClassification": "SparseFormerSiglipModel",
    }
    # SigLIP was trained on texts of one length, which not all of its tokenizers know.
    text_padding = "max_length"
    _no_split_modules = ["SiglipTextEmbeddings", "SiglipEncoderLayer"]

    def __init__(self, config: SparseFormerSiglipConfig):
        config.validate()
        super().__init__(config)
        self.text_model = SiglipTextModel._from_config(config.text_config)
        vision = config.vision_config
        self.vision_model = tower_class(vision)._from_config(vision)
        # The text model ends in a linear layer, the image side in its pooling head.
        self.text_projection = self.visual_projection = nn.Identity()
        self.logit_scale = nn.Parameter(torch.tensor([float(config.logit_scale_init_value)]))
        self.logit_bias = nn.Parameter(torch.tensor([float(config.logit_bias_init_value)]))
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        # The two sides initialize themselves.
        if isinstance(module, SparseFormerSiglipModel):
            init.constant_(module.logit_scale, self.config.logit_scale_init_value)
            init.constant_(module.logit_bias, self.config.logit_bias_init_value)

    def logits(self, cosines: torch.Tensor) -> torch.Tensor:
        """Cosines `(texts, images)` to logits of the same shape, whose sigmoids are probabilities."""
        return cosines * self.logit_scale.exp() + self.logit_bias

    def contrastive_loss(self, logits_per_text: torch.Tensor) -> torch.Tensor:
        """The binary loss of logits, `(pairs, pairs)`, about whether an image is a text's own (Zhai et al., *Sigmoid
        Loss for Language Image Pre-Training*, algorithm 1): a sum over images, a mean over texts."""
        signs = 2 * torch.eye(len(logits_per_text), device=logits_per_text.device) - 1
        return -F.logsigmoid(signs * logits_per_text).sum(dim=-1).mean()

    @classmethod
    @torch.no_grad()
    def from_siglip(cls, siglip: nn.Module, vision_model: nn.Module) -> "SparseFormerSiglipModel":
        """A SigLIP with its image side replaced; the text side is the same to the bit.

        Args:
            siglip (`SiglipModel` or `Siglip2Model`): Has the text side and the logits' scale and bias.
            vision_model (`SparseFormerVisionModel`): Bootstrapped from the SigLIP's image side.

        Returns:
            The model, in evaluation mode, in the precision and on the device of `siglip`.

        Raises:
            ValueError: if `siglip` is no SigLIP of Transformers, or the embeddings of the two have different widths.
        """
        text_model = getattr(siglip, "text_model", None)
        if not hasattr(text_model, "head") or not all(hasattr(siglip, part) for part in ("logit_scale", "logit_bias")):
            raise ValueError(
                f"Got a {type(siglip).__name__} as SigLIP, expected a SiglipModel or Siglip2Model, with both sides. "
                "Models of open_clip are converted by `from_open_clip`."
            )
        if not _is_sparseformer(vision_model) or vision_model.base_model is not vision_model:
            raise ValueError(
                f"Got a {type(vision_model).__name__} as vision model, expected a SparseFormerVisionModel that was "
                "bootstrapped from the SigLIP, which projects no images."
            )
        ours, theirs = vision_model.config.hidden_size, text_model.head.out_features
        if ours != theirs:
            raise ValueError(
                f"The vision model gives {ours} channels, the text side of the SigLIP {theirs}; bootstrap it from "
                "this SigLIP."
            )
        # The text sides of SigLIP and SigLIP 2 compute the same, in two classes.
        text_config = {name: value for name, value in text_model.config.to_dict().items() if name != "model_type"}
        config = SparseFormerSiglipConfig(text_config=text_config, vision_config=vision_model.config.to_dict())
        model = cls(config).to(text_model.head.weight).eval()
        model.text_model.load_state_dict(text_model.state_dict())
        model.logit_scale.copy_(siglip.logit_scale)
        model.logit_bias.copy_(siglip.logit_bias)
        model.vision_model.load_state_dict(vision_model.state_dict())
        return model


def _is_sparseformer(model: nn.Module) -> bool:
    return is_sparseformer(getattr(model, "config", None))


__all__ = [
    "SparseFormerCLIPConfig",
    "SparseFormerCLIPModel",
    "SparseFormerSiglipConfig",
    "SparseFormerSiglipModel",
]
