"""SparseFormer: a vision transformer with few tokens, each with a region of interest (RoI) that the model adjusts.

Gao et al., *SparseFormer: Sparse Visual Recognition via Limited Latent Tokens* (v1) and *Bootstrapping SparseFormers
from Vision Foundation Models* (CVPR 2024). In the focusing stage (`focusing.py`), tokens sample the image in their
RoIs. A plain transformer encoder follows. `python -m frugalvit.convert` loads the authors' checkpoints.
"""

import torch
from torch import nn
from transformers import initialization as init
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..configuration.configuration_sparseformer import SparseFormerConfig, SparseFormerProjectionConfig
from .focusing import (
    FinalSamplingLayer,
    SparseFormerFocusingLayer,
    SparseFormerLatents,
    SparseFormerMixing,
    SparseFormerRoIDeltas,
    SparseFormerSampling,
    SparseFormerStem,
    SparseFormerV1FocusingLayer,
    initial_rois,
    initial_sampling_offsets,
)
from .layers import (
    AdaptiveClassifierMixin,
    AttentionPooling,
    EncoderLayer,
    Pooler,
    SelfAttention,
    SparseFormerBasePreTrainedModel,
    SparseFormerImageClassifierOutput,
    SparseFormerModelOutput,
    SparseFormerVisionModelWithProjectionOutput,
    check_num_tokens,
    image_classification_loss,
    norm_factory,
    rotary_embeddings,
)


class SparseFormerPreTrainedModel(SparseFormerBasePreTrainedModel):
    """Base class of all SparseFormers, with weight initialization, `from_teacher` and `resize_tokens`."""

    config: SparseFormerConfig
    auto_classes = {
        "AutoModel": "SparseFormerModel",
        "AutoModelForImageClassification": "SparseFormerForImageClassification",
    }
    _keep_in_fp32_modules_strict = ["initial_rois"]
    _can_record_outputs = {
        # In v1, the first block of the encoder is a focusing layer.
        "hidden_states": [
            OutputRecorder(EncoderLayer, index=0, layer_name="layers"),
            OutputRecorder(SparseFormerV1FocusingLayer, index=0, layer_name="layers"),
        ],
        "attentions": OutputRecorder(SelfAttention, index=1, layer_name="layers"),
    }

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.stem.convolution

    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        config = self.config
        encoder = config.hidden_size // config.num_attention_heads
        head_dim = min(encoder, config.focusing_hidden_size // config.focusing_num_attention_heads)
        needs_wide_heads = any(name in str(attn_implementation) for name in ("flash", "flex"))
        if needs_wide_heads and head_dim < 16:
            raise ValueError(
                f"`attn_implementation` is {attn_implementation!r}, which needs attention heads of 16 or more "
                f'channels; this model\'s have {head_dim}. Choose "sdpa" or "eager".'
            )
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module):
        """Initialize weights as the authors' code does. Bootstrapping depends on this initialization."""
        if isinstance(module, SparseFormerStem):
            weight = module.convolution.weight
            init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu")
            bound = weight[0].numel() ** -0.5
            init.uniform_(module.convolution.bias, -bound, bound)
        elif isinstance(module, SparseFormerLatents):
            init.trunc_normal_(module.token_embedding, std=1.0)
            rois = initial_rois(self.config.num_latent_tokens, self.config.trained_token_counts[:-1])
            init.copy_(module.initial_rois, rois)
            for tokens in (module.cls_token, module.register_tokens):
                if tokens is not None:
                    init.normal_(tokens)
        elif isinstance(module, SparseFormerMixing):
            # With a zero weight, all tokens generate the same matrices before training.
            init.constant_(module.layernorm.weight, module.layernorm.normalized_shape[0] ** -0.5)
            init.zeros_(module.generator.weight)
            matrices = [nn.init.xavier_uniform_(torch.empty(shape)).flatten() for shape in module.shapes]
            init.copy_(module.generator.bias, torch.cat(matrices))
            if module.channel_bias is not None:
                init.zeros_(module.channel_bias)
                init.zeros_(module.point_bias)
        elif isinstance(module, SparseFormerSampling):
            # With a zero weight, sampling points form a grid in the RoI before training.
            init.constant_(module.offset_layernorm.weight, module.offset_layernorm.normalized_shape[0] ** -0.5)
            init.zeros_(module.offset_proj.weight)
            init.copy_(module.offset_bias, initial_sampling_offsets(module.num_points).flatten())
        elif isinstance(module, SparseFormerRoIDeltas):
            # With a zero weight, RoIs are not adjusted before training.
            init.constant_(module.layernorm.weight, module.layernorm.normalized_shape[0] ** -0.5)
            init.zeros_(module.out_proj.weight)
        elif isinstance(module, SparseFormerFocusingLayer):
            if module.stage_embedding is not None:
                init.normal_(module.stage_embedding)
        else:
            super()._init_weights(module)

    def resize_tokens(self, num_latent_tokens: int):
        """Change the number of latent tokens in place, for continued bootstrapping. Remaining tokens keep their
        weights.

        Args:
            num_latent_tokens (`int`):
                Number of latent tokens, without [CLS]. The papers' 80 tokens are 79 latent tokens and [CLS].

        Raises:
            ValueError: if `num_latent_tokens` is below 1.
        """
        if num_latent_tokens < 1:
            raise ValueError(f"`num_latent_tokens` is {num_latent_tokens}, expected at least 1.")
        config = self.config
        self.base_model.latents.resize_tokens(num_latent_tokens)
        smaller = [count for count in config.elastic_token_counts or () if count < num_latent_tokens]
        config.elastic_token_counts = [*smaller, num_latent_tokens] if smaller else None
        config.num_latent_tokens = num_latent_tokens
        config.num_tokens = None

    @classmethod
    def from_teacher(
        cls,
        teacher: str | nn.Module,
        num_latent_tokens: int | None = None,
        truncate: float | int = 1 / 3,
        inherit_blocks: bool = True,
        break_ties: bool = True,
        image_processor=None,
        **fields,
    ):
        """Return a student in evaluation mode, initialized as in section 3.2 of Gao et al. (CVPR 2024). The student
        inherits the last blocks, the final norm, and the classifier or projection of its teacher. The focusing stage
        has new weights, which have to be trained by bootstrapping.

        Args:
            teacher (`nn.Module`, `Anatomy` or `str`):
                A plain pre-norm vision transformer of Transformers, timm or open_clip (docs/models.md lists them), or
                its `Anatomy`. From a folder or hub id, Transformers loads the teacher and its image processor. The
                student has the teacher's pooling, registers, gates, norms, layer scale and rotary positions.
            num_latent_tokens (`int`, *optional*):
                Number of latent tokens, without [CLS]. By default, latent tokens and [CLS] together are a quarter of
                the teacher's patches (`default_num_latent_tokens`).
            truncate (`float` or `int`, *optional*, defaults to 1/3):
                Leading blocks to leave out. A value below 1 is a fraction of the teacher's blocks. A value of at least
                1 is a number of blocks (1.0 is one block).
            inherit_blocks (`bool`, *optional*, defaults to `True`):
                With `False`, only the student's head has inherited weights (an ablation of table 3).
            break_ties (`bool`, *optional*, defaults to `True`):
                Add Gaussian noise (std 0.05 of the image's side) to the initial RoIs of tokens that start with equal
                RoIs (12 of 48 tokens). The paper adds no noise. `results/bootstrap_choices.json` has the accuracy
                with and without noise.
            image_processor (*optional*):
                The teacher's image processor, from which the student gets size, crop and normalization. Without an
                image processor, `save_pretrained` writes no `preprocessor_config.json`.
            fields: Other fields of the configuration, for example `stem_channels=32`.

        Raises:
            ValueError: if the teacher is not a plain vision transformer or has no classifier or projection for the
                student, or if `num_latent_tokens` or `truncate` is out of range.
        """
        try:
            from frugalvit.modeling.inheritance import inherit_blocks as inherit
        except ModuleNotFoundError as error:
            raise ImportError(
                "`from_teacher` needs the package frugalvit; its README says how to install it."
            ) from error
        return inherit(
            cls, teacher, num_latent_tokens, truncate, inherit_blocks, break_ties, image_processor, **fields
        )


class SparseFormerModel(SparseFormerPreTrainedModel):
    """The bare SparseFormer, which maps pixels to tokens. `AutoModel` loads it. It can be LLaVA's vision tower."""

    def __init__(self, config: SparseFormerConfig):
        config.validate()
        super().__init__(config)
        iterations = config.num_focusing_iterations
        blocks = config.num_hidden_layers
        # Each execution of a layer has its own drop path rate. In v1, the last focusing layer is also the first
        # encoder block.
        executions = iterations + blocks + (not config.is_v1)
        rates = [config.drop_path_rate * number / max(executions - 1, 1) for number in range(executions)]
        focusing_layer = SparseFormerV1FocusingLayer if config.is_v1 else SparseFormerFocusingLayer
        self.stem = SparseFormerStem(config)
        self.latents = SparseFormerLatents(config)
        self.focusing_layer = focusing_layer(config, rates[:iterations])
        self.transition = nn.Linear(config.focusing_hidden_size, config.hidden_size)
        self.layers = nn.ModuleList(EncoderLayer(config, rate) for rate in rates[iterations + 1 :])
        if config.is_v1:
            self.transition_layernorm = nn.LayerNorm(config.hidden_size, eps=config.focusing_layer_norm_eps)
            self.layers.insert(
                0, SparseFormerV1FocusingLayer(config, rates[iterations : iterations + 1], full_width=True)
            )
        else:
            self.final_focusing_layer = FinalSamplingLayer(config, rates[iterations])
        self.layernorm = norm_factory(config)(config.hidden_size) if config.final_norm else nn.Identity()
        attends = config.pooling in ("attention", "latent_attention")
        self.pooling_head = AttentionPooling(config) if attends else None
        self.pooler = Pooler(config)
        # FSDP raises an error if `_no_split_modules` names a class that no module of the model has.
        whole = (focusing_layer, FinalSamplingLayer, SparseFormerLatents, EncoderLayer)
        self._no_split_modules = {type(module).__name__ for module in self.modules() if isinstance(module, whole)}
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        num_tokens: int | None = None,
        output_rois: bool = False,
        output_stem_features: bool = False,
        output_tokens: bool = True,
        features: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SparseFormerModelOutput:
        """
        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`):
                Normalized images of at least 4 x 4 pixels.
            num_tokens (`int`, *optional*):
                The model computes only the first `num_tokens` latent tokens. By default, the number is
                `config.num_tokens` or, if `config.num_tokens` is None, `config.num_latent_tokens`. The model warns
                once if the number is not in `config.trained_token_counts`.
            output_rois (`bool`, *optional*, defaults to `False`): Return `rois` and `sampling_points`.
            output_stem_features (`bool`, *optional*, defaults to `False`): Return `stem_features`.
            output_tokens (`bool`, *optional*, defaults to `True`):
                Return all tokens in `last_hidden_state`. With `False` and `pooling="cls"`, the last block computes
                only class tokens. This saves 8 % of the multiply-accumulates of augreg-base-49-224 and 4 % of those of
                augreg-large-49-224. If `hidden_states` or `attentions` are returned, all tokens are computed.
            features (`torch.FloatTensor` of shape `(batch, stem_channels, height / 4, width / 4)`, *optional*):
                `stem_features` that an earlier call returned for the same images. The stem is then not computed.

        Raises:
            ValueError: if `num_tokens` is below 1 or above `config.num_latent_tokens`.
        """
        features = self.stem(pixel_values) if features is None else features
        count = self.config.default_num_tokens if num_tokens is None else check_num_tokens(self.config, num_tokens)
        # Before the first sampling, tokens and RoIs do not depend on the image and are computed once for the batch.
        hidden_states, rois, prefix_tokens = self.latents(pixel_values.shape[0], count)
        all_rois = []
        all_points = []
        for iteration in range(self.config.num_focusing_iterations):
            hidden_states, rois, points = self.focusing_layer(hidden_states, rois, features, iteration, **kwargs)
            all_rois.append(rois)
            all_points.append(points)

        hidden_states = self.transition(hidden_states)
        layers = list(self.layers)
        if self.config.is_v1:
            hidden_states = self.transition_layernorm(hidden_states)
            hidden_states, rois, points = layers.pop(0)(hidden_states, rois, features, **kwargs)
            all_rois.append(rois)
        else:
            hidden_states, points = self.final_focusing_layer(hidden_states, rois, features)
        all_points.append(points)
        if prefix_tokens is not None:
            hidden_states = torch.cat([prefix_tokens.to(hidden_states.dtype), hidden_states], dim=1)

        num_queries = None if output_tokens else self.num_last_queries(**kwargs)
        position_embeddings = None
        if self.config.rope_theta is not None:
            position_embeddings = rotary_embeddings(self.config, rois)
        for layer in layers:
            hidden_states = layer(
                hidden_states,
                num_queries=num_queries if layer is layers[-1] else None,
                position_embeddings=position_embeddings,
                **kwargs,
            )
        return SparseFormerModelOutput(
            last_hidden_state=self.layernorm(hidden_states),
            pooler_output=self.pooler(hidden_states, self.layernorm, self.pooling_head),
            rois=tuple(all_rois) if output_rois else None,
            sampling_points=tuple(all_points) if output_rois else None,
            stem_features=features if output_stem_features else None,
        )


class SparseFormerForImageClassification(AdaptiveClassifierMixin, SparseFormerPreTrainedModel):
    """SparseFormer with a linear classifier on the pooled embedding.

    If the pooled embedding is [CLS], the last block computes only [CLS]. With `output_tokens=True`, the last block
    computes all tokens, for example for a forward hook.
    """

    def __init__(self, config: SparseFormerConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.sparseformer = SparseFormerModel(config)
        self.classifier = nn.Linear(config.pooled_size, config.num_labels) if config.num_labels else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        output_tokens: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SparseFormerImageClassifierOutput:
        """Compute logits, `(batch, num_labels)`. With `labels`, also compute the loss by `image_classification_loss`.
        Other arguments are those of `SparseFormerModel.forward`."""
        outputs = self.sparseformer(pixel_values, output_tokens=output_tokens, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss = None
        if labels is not None:
            loss = image_classification_loss(logits, labels, self.config, num_items_in_batch)
        return SparseFormerImageClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            rois=outputs.rois,
            sampling_points=outputs.sampling_points,
        )


class SparseFormerVisionModel(SparseFormerModel):
    """`SparseFormerModel` as a replacement for `CLIPVisionModel` and `SiglipVisionModel`."""


class SparseFormerVisionModelWithProjection(SparseFormerPreTrainedModel):
    """SparseFormer with a linear projection, as a replacement for `CLIPVisionModelWithProjection`."""

    config: SparseFormerProjectionConfig
    auto_classes = {"AutoModel": "SparseFormerVisionModelWithProjection"}
    embeds = {"image": ("forward", "image_embeds")}

    def __init__(self, config: SparseFormerProjectionConfig):
        super().__init__(config)
        self.sparseformer = SparseFormerModel(config)
        self.visual_projection = nn.Linear(config.pooled_size, config.projection_dim, bias=config.projection_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: torch.Tensor, **kwargs: Unpack[TransformersKwargs]
    ) -> SparseFormerVisionModelWithProjectionOutput:
        """Compute `image_embeds`, `(batch, projection_dim)`. Arguments are those of `SparseFormerModel.forward`."""
        outputs = self.sparseformer(pixel_values, **kwargs)
        image_embeds = self.visual_projection(outputs.pooler_output)
        return SparseFormerVisionModelWithProjectionOutput(image_embeds=image_embeds, **outputs)


__all__ = [
    "SparseFormerConfig",
    "SparseFormerForImageClassification",
    "SparseFormerModel",
    "SparseFormerPreTrainedModel",
    "SparseFormerProjectionConfig",
    "SparseFormerVisionModel",
    "SparseFormerVisionModelWithProjection",
]
