"""SparseFormer: a vision transformer whose few tokens look where they choose.

Gao et al., *SparseFormer: Sparse Visual Recognition via Limited Latent Tokens* (v1) and *Bootstrapping SparseFormers
from Vision Foundation Models* (CVPR 2024). Tokens look at the image in the focusing stage (`focusing.py`), then comes
a plain transformer encoder. Weights load from the authors' checkpoints through `frugalvit convert showlab`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput, ModelOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..configuration.configuration_sparseformer import SparseFormerConfig, SparseFormerProjectionConfig
from .focusing import (
    FinalSamplingLayer,
    SparseFormerFocusingLayer,
    SparseFormerLatents,
    SparseFormerStem,
    SparseFormerV1FocusingLayer,
)
from .hub import HubModel
from .layers import (
    INITIALIZER_STD,
    AdaptiveClassifierOutput,
    AttentionPooling,
    EncoderLayer,
    SelfAttention,
    check_num_tokens,
    classify_adaptively,
    image_classification_loss,
    norm_factory,
    pool_tokens,
    reads_class_tokens_alone,
    rotary_embeddings,
)


@dataclass
class SparseFormerModelOutput(BaseModelOutputWithPooling):
    """Output of `SparseFormerModel`.

    Args:
        last_hidden_state (`torch.FloatTensor` of shape `(batch, [CLS] + tokens, hidden_size)`):
            Tokens after the final LayerNorm.
        pooler_output (`torch.FloatTensor` of shape `(batch, hidden_size)`): [CLS] or the mean token, normalized.
        hidden_states (`tuple`, *optional*): Input of the first encoder block and the output of each block.
        attentions (`tuple`, *optional*): `(batch, heads, [CLS] + tokens, [CLS] + tokens)` of each encoder block.
        rois (`tuple`, *optional*, with `output_rois=True`):
            `(batch, tokens, 4)` float32 after every adjustment: left, top, right, bottom, 0 to 1 across the image,
            not clamped.
        sampling_points (`tuple`, *optional*, with `output_rois=True`):
            `(batch, tokens, points, 2)` float32 of every sampling: x and y, 0 to 1 across the image.
        focusing_hidden_states (`tuple`, *optional*, with `output_focusing_hidden_states=True`):
            `(batch, tokens, focusing_hidden_size)` after every focusing iteration.
        stem_features (`torch.FloatTensor`, *optional*, with `output_stem_features=True`):
            `(batch, stem_channels, height / 4, width / 4)`, what the tokens sample.
    """

    rois: tuple[torch.FloatTensor, ...] | None = None
    sampling_points: tuple[torch.FloatTensor, ...] | None = None
    focusing_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    stem_features: torch.FloatTensor | None = None


@dataclass
class SparseFormerImageClassifierOutput(ImageClassifierOutput):
    """`ImageClassifierOutput` with the extra outputs of `SparseFormerModelOutput`."""

    rois: tuple[torch.FloatTensor, ...] | None = None
    sampling_points: tuple[torch.FloatTensor, ...] | None = None
    focusing_hidden_states: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class SparseFormerVisionModelWithProjectionOutput(ModelOutput):
    """`SparseFormerModelOutput` with `image_embeds`, `(batch, projection_dim)`, the projected `pooler_output`."""

    image_embeds: torch.FloatTensor | None = None
    last_hidden_state: torch.FloatTensor | None = None
    pooler_output: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None
    rois: tuple[torch.FloatTensor, ...] | None = None
    sampling_points: tuple[torch.FloatTensor, ...] | None = None
    focusing_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    stem_features: torch.FloatTensor | None = None


class SparseFormerPreTrainedModel(HubModel):
    """Base class of all SparseFormers: loading, initialization and counts of tokens."""

    config: SparseFormerConfig
    base_model_prefix = "sparseformer"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    auto_classes = {
        "AutoModel": "SparseFormerModel",
        "AutoModelForImageClassification": "SparseFormerForImageClassification",
    }
    embeds = {"image": ("forward", "pooler_output")}
    embedding_arguments = ("num_tokens",)
    _keep_in_fp32_modules_strict = ["initial_rois"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        # The first block of v1's encoder is a focusing layer.
        "hidden_states": [
            OutputRecorder(EncoderLayer, index=0, layer_name="layers"),
            OutputRecorder(SparseFormerV1FocusingLayer, index=0, layer_name="layers"),
        ],
        "focusing_hidden_states": [
            OutputRecorder(SparseFormerFocusingLayer, index=0, layer_name="focusing_layer"),
            OutputRecorder(SparseFormerV1FocusingLayer, index=0, layer_name="focusing_layer"),
        ],
        "attentions": OutputRecorder(SelfAttention, index=1, layer_name="layers"),
    }

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.stem.convolution

    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        config = self.config
        encoder = config.hidden_size // config.num_attention_heads
        head_dim = min(encoder, config.focusing_hidden_size // config.focusing_num_attention_heads)
        if attn_implementation and "fl" in attn_implementation and head_dim < 16:
            raise ValueError(
                f"{attn_implementation!r} needs attention heads of 16 or more channels, this model's have {head_dim}. "
                'Use attn_implementation="sdpa" or "eager".'
            )
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def no_weight_decay(self) -> list[str]:
        """Names of parameters that optimizers should not decay, besides biases and norms."""
        names = (
            "initial_rois",
            "token_embedding",
            "cls_token",
            "register_tokens",
            "stage_embedding",
            "offset_bias",
            "probe",
            "attention_scale",
            "mlp_scale",
        )
        return [name for name, _ in self.named_parameters() if name.rsplit(".", 1)[-1] in names]

    @torch.no_grad()
    def _init_weights(self, module):
        """The reference implementation's initialization; bootstrapping depends on it."""
        if isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=INITIALIZER_STD)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif hasattr(module, "draw"):
            module.draw(INITIALIZER_STD)
        else:
            super()._init_weights(module)

    def set_num_tokens(self, num_tokens: int | None):
        """Choose the number of latent tokens, [CLS] not counted, for all calls that choose none; `None` for all. The
        model keeps the choice when it is saved, exported or given to a pipeline; weights stay. Raise a ValueError if
        it is below 1 or above `num_latent_tokens`."""
        self.config.num_tokens = None if num_tokens is None else check_num_tokens(self.config, num_tokens)

    def resize_tokens(self, num_latent_tokens: int):
        """Change the number of latent tokens, [CLS] not counted (80 tokens in the papers are 79 here), in place, as
        continued bootstrapping needs; kept tokens stay as they are. Raise a ValueError if it is below 1."""
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
        """Return a student, in evaluation mode, as in section 3.2 of the bootstrapping paper: it inherits a teacher's
        blocks but for the leading ones, its final norm and classifier or projection, and has a new focusing stage,
        which has to be bootstrapped.

        Args:
            teacher (`nn.Module` or `str`):
                A plain pre-norm vision transformer of Transformers, timm or open_clip, see docs/models.md, or what
                `read_anatomy` read of it; or a folder or hub id of Transformers, which brings its image processor.
                The student pools as it does, and has its registers, gates, norms, layer scale and rotary positions.
            num_latent_tokens (`int`, *optional*):
                Latent tokens; with [CLS], a quarter of the teacher's image tokens (at 224 pixels) by default.
            truncate (`float` or `int`, *optional*, defaults to 1/3):
                Leading blocks left out: below 1 a share, from 1 on a count (1.0 is one block).
            inherit_blocks (`bool`, *optional*, defaults to `True`):
                With `False`, only the classifier's weights are inherited (an ablation of table 3).
            break_ties (`bool`, *optional*, defaults to `True`):
                Whether equal initial RoIs, 12 of the paper's 48, are moved apart by N(0, 0.05) of the image, which
                neither paper nor reference does (`results/bootstrap_choices.json` has the gain).
            image_processor (*optional*):
                The teacher's image processor, whose size, crop and normalization the student's has. Without one, the
                student has none, and `save_pretrained` writes none.
            fields: Fields of the configuration to set differently, for example `stem_channels=32`.

        Raises:
            ValueError: if the teacher is no such transformer, has no classifier where one is needed, or the numbers
                do not fit.
        """
        try:
            from frugalvit.modeling.inheritance import inherit_blocks as inherit
        except ModuleNotFoundError as error:
            raise ImportError("from_teacher needs frugalvit: pip install frugalvit.") from error
        return inherit(
            cls, teacher, num_latent_tokens, truncate, inherit_blocks, break_ties, image_processor, **fields
        )


class SparseFormerModel(SparseFormerPreTrainedModel):
    """The bare SparseFormer, from pixels to tokens. `AutoModel` loads it, and it is the vision tower of LLaVA."""

    def __init__(self, config: SparseFormerConfig):
        config.validate()
        super().__init__(config)
        iterations = config.num_focusing_iterations
        blocks = config.num_hidden_layers
        # One for each execution of a layer, in order; v1's last focusing layer is the first block.
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
        # Context Broadcasting in the last block reads all tokens.
        self.skips_unread_tokens = True
        # FSDP refuses names of classes that a model has not.
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
        output_focusing_hidden_states: bool = False,
        output_stem_features: bool = False,
        output_tokens: bool = True,
        features: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SparseFormerModelOutput:
        """
        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`):
                Normalized images of any size from 4 x 4 pixels.
            num_tokens (`int`, *optional*):
                Latent tokens to compute with, the first ones; `config.num_tokens`, else all, by default. Best one of
                `config.elastic_token_counts`: another one warns, once.
            output_rois (`bool`, *optional*, defaults to `False`): Return `rois` and `sampling_points`.
            output_focusing_hidden_states (`bool`, *optional*, defaults to `False`):
                Return `focusing_hidden_states`.
            output_stem_features (`bool`, *optional*, defaults to `False`): Return `stem_features`.
            output_tokens (`bool`, *optional*, defaults to `True`):
                Return `last_hidden_state` of all tokens. Without it, the last block computes [CLS] alone where that is
                what is pooled, unless `hidden_states` or `attentions` are asked for. That saves 8 % of the
                multiply-accumulates of augreg-base-49-224, 4 % of augreg-large-49-224's.
            features (`torch.FloatTensor`, *optional*):
                The early convolution's map of the same images, if another call has computed it.

        Raises:
            ValueError: if `num_tokens` does not fit.
        """
        features = self.stem(pixel_values) if features is None else features
        # Before the first sampling, all images have the same tokens and RoIs: they are computed once.
        count = self.config.default_num_tokens if num_tokens is None else check_num_tokens(self.config, num_tokens)
        hidden_states, rois, prefix = self.latents(pixel_values.shape[0], count)
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
        if prefix is not None:
            hidden_states = torch.cat([prefix.to(hidden_states.dtype), hidden_states], dim=1)

        position_embeddings = rotary_embeddings(self.config, rois)
        skips = self.skips_unread_tokens and not output_tokens and reads_class_tokens_alone(self.config, **kwargs)
        for layer in layers:
            num_queries = self.config.num_class_tokens if skips and layer is layers[-1] else None
            hidden_states = layer(
                hidden_states, num_queries=num_queries, position_embeddings=position_embeddings, **kwargs
            )
        pooled = pool_tokens(
            hidden_states,
            self.config.pooling,
            self.layernorm,
            self.config.num_prefix_tokens,
            self.config.pooled_class_tokens or range(self.config.num_class_tokens),
            self.config.final_norm == "after_pooling",
            self.pooling_head,
        )
        return SparseFormerModelOutput(
            last_hidden_state=self.layernorm(hidden_states),
            pooler_output=pooled,
            rois=tuple(all_rois) if output_rois else None,
            sampling_points=tuple(all_points) if output_rois else None,
            stem_features=features if output_stem_features else None,
        )


class SparseFormerForImageClassification(SparseFormerPreTrainedModel):
    """SparseFormer with a linear classifier on the pooled token.

    If the pooled token is [CLS], the last block computes only that one. To read other tokens of that block, for
    example by a hook, pass `output_tokens=True`.
    """

    # The loss divides by `num_items_in_batch` for every problem type.
    accepts_loss_kwargs = True

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
        """
        Args:
            labels (`torch.Tensor`, *optional*):
                `(batch,)` class indices, or `(batch, num_labels)` floats (multi-label classification, regression).
            num_items_in_batch (`int`, *optional*): Divide the summed loss by this count (set by `Trainer`).
            output_tokens (`bool`, *optional*, defaults to `False`): Let the last block compute all tokens.
            kwargs: Passed to `SparseFormerModel.forward`.
        """
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
            focusing_hidden_states=outputs.focusing_hidden_states,
        )

    @torch.no_grad()
    def classify_adaptively(
        self, pixel_values: torch.Tensor, confidence: float = 0.9, token_counts: Sequence[int] | None = None
    ) -> AdaptiveClassifierOutput:
        """Classify images with few tokens, and those whose class is not sure enough again with more. Stem features are
        computed once.

        An image is done when the likeliest class has a probability of `confidence`, 0 to 1. `token_counts` are tried
        in this order; by default the smallest of `config.elastic_token_counts`, then `config.num_tokens` or all
        (`docs/results.md`: more between them save less than they cost).
        """
        features = self.sparseformer.stem(pixel_values)
        images = torch.arange(len(pixel_values), device=pixel_values.device)
        return classify_adaptively(
            self.config,
            lambda chosen, count: self(pixel_values[chosen], num_tokens=count, features=features[chosen]).logits,
            images,
            confidence,
            token_counts,
        )


class SparseFormerVisionModel(SparseFormerModel):
    """SparseFormer as a vision encoder of CLIP, in the place of `CLIPVisionModel`: a `SparseFormerModel` under the
    name that goes with `SparseFormerVisionModelWithProjection`."""


class SparseFormerVisionModelWithProjection(SparseFormerPreTrainedModel):
    """SparseFormer with a linear projection of the pooled token, in the place of `CLIPVisionModelWithProjection`."""

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
        """Pixels to `image_embeds`, `(batch, projection_dim)`; keyword arguments go to `SparseFormerModel.forward`."""
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
