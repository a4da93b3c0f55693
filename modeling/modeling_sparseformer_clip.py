"""CLIP and SigLIP models whose vision model is a SparseFormer (section 4.2 of Gao et al., CVPR 2024)."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModel, CLIPTextModel, SiglipTextModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPOutput, image_text_contrastive_loss
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple

from ..configuration.configuration_patch_sparseformer import PatchSparseFormerConfig
from ..configuration.configuration_sparseformer import SparseFormerConfig
from ..configuration.configuration_sparseformer_clip import SparseFormerCLIPConfig, SparseFormerSiglipConfig
from .hub import HubModel
from .modeling_patch_sparseformer import PatchSparseFormerModel
from .modeling_sparseformer import SparseFormerModel, SparseFormerModelOutput


AutoModel.register(SparseFormerConfig, SparseFormerModel, exist_ok=True)
AutoModel.register(PatchSparseFormerConfig, PatchSparseFormerModel, exist_ok=True)


def image_side_fields(vision_model: nn.Module) -> dict:
    """Return the configuration of a SparseFormer as a dictionary, without the fields of its projection."""
    fields = vision_model.config.to_dict()
    for name in ("projection_dim", "projection_bias"):
        fields.pop(name, None)
    fields["model_type"] = fields["model_type"].removesuffix("_projection")
    if fields["model_type"] not in ("sparseformer", "patch_sparseformer"):
        raise ValueError(f"`vision_model` is a {type(vision_model).__name__}, expected a SparseFormer.")
    return fields


class SparseFormerCLIPPreTrainedModel(HubModel):
    """Base class of CLIP and SigLIP models with a SparseFormer."""

    input_modalities = ("image", "text")
    embeds = {"text": ("get_text_features", "pooler_output"), "image": ("get_image_features", "pooler_output")}
    embedding_arguments = ("num_tokens",)
    text_padding: bool | str = True
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module):
        # The text model and the vision model are initialized by their own classes.
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, SparseFormerCLIPPreTrainedModel):
            init.constant_(module.logit_scale, self.config.logit_scale_init_value)

    def get_input_embeddings(self) -> nn.Module:
        return self.text_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module):
        self.text_model.set_input_embeddings(value)

    def set_num_tokens(self, num_tokens: int | None):
        """Set the default number of latent tokens, see `SparseFormerModel.set_num_tokens`."""
        self.vision_model.set_num_tokens(num_tokens)

    def sentence_transformers_config(self) -> dict[str, object]:
        """Return the files of `HubModel.sentence_transformers_config`. Add the padding and maximum length of texts."""
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
        """Return text features in `pooler_output`. Arguments are those of `CLIPModel.get_text_features`."""
        outputs = self.text_model(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, return_dict=True, **kwargs
        )
        outputs.pooler_output = self.text_projection(outputs.pooler_output)
        return outputs

    @can_return_tuple
    def get_image_features(
        self, pixel_values: torch.Tensor, num_tokens: int | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> SparseFormerModelOutput:
        """Return image features in `pooler_output`. Images can have any size. Arguments are those of
        `SparseFormerModel.forward`."""
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
        """Compute the similarity of texts and images. `output_rois` and `num_tokens` are arguments of
        `SparseFormerModel.forward`. Other arguments are those of `CLIPModel.forward`. With `return_loss`, image i must
        belong to text i."""
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
    """CLIP whose vision transformer is a SparseFormer, with the interface of `CLIPModel`."""

    config: SparseFormerCLIPConfig
    base_model_prefix = "clip"
    auto_classes = {
        "AutoModel": "SparseFormerCLIPModel",
        "AutoModelForZeroShotImageClassification": "SparseFormerCLIPModel",
    }
    _no_split_modules = ["CLIPTextEmbeddings", "CLIPEncoderLayer"]

    def __init__(self, config: SparseFormerCLIPConfig):
        super().__init__(config)
        text = config.text_config
        vision = config.vision_config
        self.text_model = CLIPTextModel._from_config(text)
        self.vision_model = AutoModel.from_config(vision)
        self.text_projection = nn.Linear(text.hidden_size, config.projection_dim, bias=False)
        self.visual_projection = nn.Linear(vision.hidden_size, config.projection_dim, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(float(config.logit_scale_init_value)))
        self.post_init()

    def logits(self, cosines: torch.Tensor) -> torch.Tensor:
        return cosines * self.logit_scale.exp()

    def contrastive_loss(self, logits_per_text: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of logits, `(texts, images)`, averaged over text-to-image and image-to-text."""
        return image_text_contrastive_loss(logits_per_text)

    @classmethod
    @torch.no_grad()
    def from_clip(cls, clip: nn.Module, vision_model: nn.Module) -> "SparseFormerCLIPModel":
        """Return a CLIP in evaluation mode with the text model of `clip` and the weights of `vision_model`. The dtype
        and device are those of `clip`.

        Args:
            clip (`CLIPModel`): The teacher. Its text model is copied.
            vision_model: A `SparseFormerVisionModelWithProjection` or `PatchSparseFormerVisionModelWithProjection`,
                bootstrapped from `clip`.
        """
        if not hasattr(clip, "text_projection") or not hasattr(vision_model, "visual_projection"):
            raise ValueError(
                f"Got a {type(clip).__name__} and a {type(vision_model).__name__}, expected a CLIPModel and a "
                "SparseFormerVisionModelWithProjection. For a SigLIP there is `SparseFormerSiglipModel.from_siglip`, "
                "for models of open_clip `from_open_clip`."
            )
        config = SparseFormerCLIPConfig(
            text_config=clip.config.text_config.to_dict(),
            vision_config=image_side_fields(vision_model),
            projection_dim=clip.config.projection_dim,
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
    """SigLIP whose vision transformer is a SparseFormer, with the interface of `SiglipModel`."""

    config: SparseFormerSiglipConfig
    base_model_prefix = "siglip"
    auto_classes = {
        "AutoModel": "SparseFormerSiglipModel",
        "AutoModelForZeroShotImageClassification": "SparseFormerSiglipModel",
    }
    # SigLIP was trained with texts that are padded to one length, but some SigLIP tokenizers do not pad by default.
    text_padding = "max_length"
    _no_split_modules = ["SiglipTextEmbeddings", "SiglipEncoderLayer"]

    def __init__(self, config: SparseFormerSiglipConfig):
        super().__init__(config)
        self.text_model = SiglipTextModel._from_config(config.text_config)
        self.vision_model = AutoModel.from_config(config.vision_config)
        # SigLIP has no projections. Its text model ends in a linear layer, and its vision model in a pooling head.
        self.text_projection = nn.Identity()
        self.visual_projection = nn.Identity()
        self.logit_scale = nn.Parameter(torch.tensor([float(config.logit_scale_init_value)]))
        self.logit_bias = nn.Parameter(torch.tensor([float(config.logit_bias_init_value)]))
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, SparseFormerSiglipModel):
            init.constant_(module.logit_bias, self.config.logit_bias_init_value)

    def logits(self, cosines: torch.Tensor) -> torch.Tensor:
        return cosines * self.logit_scale.exp() + self.logit_bias

    def contrastive_loss(self, logits_per_text: torch.Tensor) -> torch.Tensor:
        """Return the sigmoid loss of logits, `(texts, images)`, summed over images and averaged over texts (Zhai et
        al., *Sigmoid Loss for Language Image Pre-Training*, algorithm 1)."""
        signs = 2 * torch.eye(len(logits_per_text), device=logits_per_text.device) - 1
        return -F.logsigmoid(signs * logits_per_text).sum(dim=-1).mean()

    @classmethod
    @torch.no_grad()
    def from_siglip(cls, siglip: nn.Module, vision_model: nn.Module) -> "SparseFormerSiglipModel":
        """Return a SigLIP in evaluation mode with the text model of `siglip` and the weights of `vision_model`. The
        dtype and device are those of `siglip`.

        Args:
            siglip (`SiglipModel` or `Siglip2Model`): The teacher. Its text model is copied.
            vision_model: A `SparseFormerVisionModel` or `PatchSparseFormerVisionModel`, bootstrapped from `siglip`.
        """
        # The text models of SigLIP and SigLIP 2 have different classes, but the same computation.
        text_config = siglip.config.text_config.to_dict()
        text_config.pop("model_type")
        config = SparseFormerSiglipConfig(text_config=text_config, vision_config=image_side_fields(vision_model))
        model = cls(config).to(siglip.text_model.head.weight).eval()
        model.text_model.load_state_dict(siglip.text_model.state_dict())
        model.logit_scale.copy_(siglip.logit_scale)
        model.logit_bias.copy_(siglip.logit_bias)
        model.vision_model.load_state_dict(vision_model.state_dict())
        return model


__all__ = [
    "SparseFormerCLIPConfig",
    "SparseFormerCLIPModel",
    "SparseFormerSiglipConfig",
    "SparseFormerSiglipModel",
]
