"""SparseFormer: a vision transformer whose few tokens look where they choose.

Gao et al., *SparseFormer: Sparse Visual Recognition via Limited Latent Tokens* (v1) and *Bootstrapping SparseFormers
from Vision Foundation Models* (CVPR 2024). Tokens look at the image in the focusing stage (`focusing.py`), then comes
the cortex (`cortex.py`). Students whose tokens embed patches as their teacher does are in
`modeling_patch_sparseformer.py`; given their configuration, the classes of this file make those of that one. Weights
load from the authors' checkpoints through `frugalvit convert showlab`.
"""

import copy
import functools
import importlib
import sys
from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutputWithPooling,
    ImageClassifierOutput,
    ModelOutput,
    SemanticSegmenterOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..configuration.configuration_base import pair
from ..configuration.configuration_sparseformer import SparseFormerConfig
from ..configuration.configuration_sparseformer_base import SparseFormerBaseConfig
from .context_broadcast import ContextBroadcast, broadcast_layers, has_context_broadcast
from .cortex import SparseFormerLayer, SparseFormerPoolingHead, cortex_norm
from .dense import FeatureMaps, MapUpsampler
from .focusing import (
    SparseFormerFocusingLayer,
    SparseFormerLastLook,
    SparseFormerLatents,
    SparseFormerMixing,
    SparseFormerRoIDeltas,
    SparseFormerSampling,
    SparseFormerStem,
    SparseFormerV1FocusingLayer,
    focusing_eps,
    initial_sampling_offsets,
)
from .hub import HubModel, image_processor_config
from .layers import (
    GenericForImageClassification,
    SelfAttention,
    check_pixel_values,
    in_float32,
    pool_tokens,
    rotary_table,
)
from .segmentation import LinearDecoder, SegmentationHead, semantic_segmentation_loss
from .sparse_tokens import AdaptiveClassificationMixin, TokensMixin, place_among, read_at


@dataclass
class SparseFormerModelOutput(BaseModelOutputWithPooling):
    """Output of `SparseFormerModel`.

    Args:
        last_hidden_state (`torch.FloatTensor` of shape `(batch, [CLS] + tokens, hidden_size)`):
            Tokens after the final LayerNorm.
        pooler_output (`torch.FloatTensor` of shape `(batch, hidden_size)`): [CLS] or the mean token, normalized.
        hidden_states (`tuple`, *optional*): Input of the first cortex block and the output of each block.
        attentions (`tuple`, *optional*): `(batch, heads, [CLS] + tokens, [CLS] + tokens)` of each cortex block.
        rois (`tuple`, *optional*, with `output_rois=True`):
            `(batch, tokens, 4)` float32 after every adjustment: left, top, right, bottom, 0 to 1 across the image,
            not clamped.
        sampling_points (`tuple`, *optional*, with `output_rois=True`):
            `(batch, tokens, points, 2)` float32 of every sampling: x and y, 0 to 1 across the image.
        focusing_hidden_states (`tuple`, *optional*, with `output_focusing_hidden_states=True`):
            `(batch, tokens, focusing_hidden_size)` after every focusing iteration.
        stem_features (`torch.FloatTensor`, *optional*, with `output_stem_features=True`):
            `(batch, stem_channels, height / 4, width / 4)`, what the tokens sample.
        attention_forecast (`torch.FloatTensor`, *optional*, with `output_attention_forecast=True`):
            `(batch, rows, columns)` float32 logits of the share of a teacher's attention that falls on each cell of
            the finest grid, where `placement_rule` is `"learned"`.
    """

    rois: tuple[torch.FloatTensor, ...] | None = None
    sampling_points: tuple[torch.FloatTensor, ...] | None = None
    focusing_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    stem_features: torch.FloatTensor | None = None
    attention_forecast: torch.FloatTensor | None = None


@dataclass
class SparseFormerBackboneOutput(BackboneOutput):
    """`BackboneOutput` with the extra outputs of `SparseFormerModelOutput`, and `pooler_output` with
    `output_embedding=True`."""

    rois: tuple[torch.FloatTensor, ...] | None = None
    sampling_points: tuple[torch.FloatTensor, ...] | None = None
    focusing_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    pooler_output: torch.FloatTensor | None = None
    attention_forecast: torch.FloatTensor | None = None


@dataclass
class SparseFormerImageClassifierOutput(ImageClassifierOutput):
    """`ImageClassifierOutput` with the extra outputs of `SparseFormerModelOutput`."""

    rois: tuple[torch.FloatTensor, ...] | None = None
    sampling_points: tuple[torch.FloatTensor, ...] | None = None
    focusing_hidden_states: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class SparseFormerSemanticSegmenterOutput(SemanticSegmenterOutput):
    """`SemanticSegmenterOutput` with the extra outputs of `SparseFormerModelOutput`.

    Args:
        token_maps (`torch.FloatTensor`, *optional*, with `output_token_maps=True`):
            `(batch, tokens, …)` of the size of the logits, the share of each token in each pixel's scores; sums to 1.
    """

    rois: tuple[torch.FloatTensor, ...] | None = None
    sampling_points: tuple[torch.FloatTensor, ...] | None = None
    focusing_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    token_maps: torch.FloatTensor | None = None


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


class SparseFormerPreTrainedModel(TokensMixin, HubModel):
    """Base class of all SparseFormers: loading and initialization."""

    config: SparseFormerConfig
    base_model_prefix = "sparseformer"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    auto_classes = {
        "AutoModel": "SparseFormerModel",
        "AutoBackbone": "SparseFormerBackbone",
        "AutoModelForImageClassification": "SparseFormerForImageClassification",
        "AutoModelForSemanticSegmentation": "SparseFormerForSemanticSegmentation",
    }
    # Modules that run on one device, and whose parameters are gathered together.
    whole_modules = (SparseFormerFocusingLayer, SparseFormerLastLook, SparseFormerLatents, SparseFormerLayer)
    # `focusing` of `from_teacher`, where it is not given.
    focusing_of_students = "paper"
    embeds = {"image": ("forward", "pooler_output")}
    embedding_arguments = ("num_tokens",)
    _keep_in_fp32_modules_strict = ["initial_rois"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        # The first block of v1's cortex is a focusing layer.
        "hidden_states": [
            OutputRecorder(SparseFormerLayer, index=0, layer_name="layers"),
            OutputRecorder(SparseFormerV1FocusingLayer, index=0, layer_name="layers"),
        ],
        "focusing_hidden_states": OutputRecorder(SparseFormerFocusingLayer, index=0, layer_name="focusing_layer"),
        "attentions": OutputRecorder(SelfAttention, index=1, layer_name="layers"),
    }

    # Of a model that has a SparseFormer as its image side, a vision class takes that.
    _keys_to_ignore_on_load_unexpected = [
        r"^text_(model|projection)\.",
        r"^logit_(scale|bias)$",
        r"^(model\.)?(language_model|multi_modal_projector|lm_head)\.",
        r"^feature_maps\.",
    ]

    def __new__(cls, config=None, *args, **kwargs):
        return super().__new__(cls.class_for(config))

    @classmethod
    def class_for(cls, config: SparseFormerBaseConfig | None) -> type:
        """This class, or, for a `PatchSparseFormerConfig`, its subclass for that."""
        if not getattr(config, "embeds_patches", False) or cls.config_class.model_type == config.model_type:
            return cls
        # Not a `from … import`, by which folders of the papers' models would ship that file.
        patches = importlib.import_module(".modeling_patch_sparseformer", __package__)
        for module in (sys.modules[cls.__module__], patches):
            found = getattr(module, f"Patch{cls.__name__}", None)
            if isinstance(found, type) and issubclass(found, cls):
                return found
        # A class that was derived elsewhere, for example in a notebook.
        is_base = issubclass(cls, SparseFormerModel)
        return _derive(cls, patches.PatchSparseFormerModel if is_base else patches.PatchSparseFormerPreTrainedModel)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As in Transformers. A CLIP, a SigLIP, a LLaVA or a PaliGemma with a SparseFormer is loaded as its image
        side."""
        base = "" if issubclass(cls, SparseFormerModel) else f"{cls.base_model_prefix}."
        kwargs.setdefault("key_mapping", {r"^(vision_model|model\.vision_tower)\.": base})
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        # Saved, weights have the names that they have here.
        (loaded[0] if isinstance(loaded, tuple) else loaded)._weight_conversions = None
        return loaded

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.stem.convolution

    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        head_dim = self._smallest_head()
        if attn_implementation and "fl" in attn_implementation and head_dim < 16:
            raise ValueError(
                f"{attn_implementation!r} needs attention heads of 16 or more channels, this model's have {head_dim}. "
                'Use attn_implementation="sdpa" or "eager".'
            )
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def _smallest_head(self) -> int:
        config = self.config
        return min(
            config.hidden_size // config.num_attention_heads,
            config.focusing_hidden_size // config.focusing_num_attention_heads,
        )

    def no_weight_decay(self) -> list[str]:
        """Names of parameters that optimizers should not decay, besides biases and norms."""
        names = (
            *("initial_rois", "token_embedding", "cls_token", "register_tokens", "stage_embedding", "offset_bias"),
            "probe",
        )
        return [name for name, _ in self.named_parameters() if name.rsplit(".", 1)[-1] in names]

    @torch.no_grad()
    def _init_weights(self, module):
        """The reference implementation's initialization; bootstrapping depends on it."""
        std = self.config.initializer_range
        # Convolutions are drawn by what they are a part of.
        if not isinstance(module, (nn.Linear, nn.Conv2d)):
            super()._init_weights(module)
        if isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, SparseFormerStem):
            weight = module.convolution.weight
            init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu")
            bound = weight[0].numel() ** -0.5
            init.uniform_(module.convolution.bias, -bound, bound)
        elif isinstance(module, SparseFormerLatents):
            module.draw(self.config)
        elif isinstance(module, SparseFormerMixing):
            init.constant_(module.layernorm.weight, module.layernorm.normalized_shape[0] ** -0.5)
            init.zeros_(module.generator.weight)
            matrices = [nn.init.xavier_uniform_(torch.empty(shape)).flatten() for shape in module.shapes]
            init.copy_(module.generator.bias, torch.cat(matrices))
            if module.channel_bias is not None:
                init.zeros_(module.channel_bias)
                init.zeros_(module.point_bias)
        elif isinstance(module, SparseFormerSampling):
            init.constant_(module.offset_layernorm.weight, module.offset_layernorm.normalized_shape[0] ** -0.5)
            init.zeros_(module.offset_proj.weight)
            init.copy_(module.offset_bias, initial_sampling_offsets(module.num_points).flatten())
        elif isinstance(module, SparseFormerRoIDeltas):
            init.constant_(module.layernorm.weight, module.layernorm.normalized_shape[0] ** -0.5)
            init.zeros_(module.out_proj.weight)
        elif isinstance(module, SparseFormerFocusingLayer) and module.stage_embedding is not None:
            init.normal_(module.stage_embedding)
        elif isinstance(module, SparseFormerPoolingHead):
            init.normal_(module.probe)
        elif isinstance(module, MapUpsampler):
            for convolution in module.modules():
                if isinstance(convolution, nn.Conv2d):
                    init.kaiming_normal_(convolution.weight)
                    init.zeros_(convolution.bias)
            init.zeros_(module.out_proj.weight)
        elif isinstance(module, SegmentationHead):
            init.trunc_normal_(module.query.weight, std=std)
            init.zeros_(module.query.bias)
        elif isinstance(module, ContextBroadcast):
            module.reset_parameters()


@functools.cache
def _derive(model_class: type, base: type) -> type:
    """A subclass of a class that was derived from one of this file, with the methods of a base class of patches."""
    body = {"__module__": model_class.__module__, "__doc__": model_class.__doc__, "config_class": base.config_class}
    return type(model_class.__name__, (model_class, base), body)


@dataclass
class Looks:
    """The result of the stage before the cortex.

    Args:
        hidden_states (`torch.Tensor`): `(batch, [CLS] and registers + tokens, hidden_size)`.
        rois (`list[torch.Tensor]`): `(batch, tokens, 4)` after every adjustment.
        points (`list[torch.Tensor]`): `(batch, tokens, points, 2)` of every sampling.
        features (`torch.Tensor`, *optional*): The early convolution's map.
        forecast (`torch.Tensor`, *optional*): That of `AttentionForecast`.
    """

    hidden_states: torch.Tensor
    rois: list[torch.Tensor]
    points: list[torch.Tensor]
    features: torch.Tensor | None = None
    forecast: torch.Tensor | None = None


def join(prefix: torch.Tensor | None, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return tokens, `(batch, tokens, hidden_size)`, behind [CLS] and registers, if there are any."""
    return hidden_states if prefix is None else torch.cat([prefix.to(hidden_states.dtype), hidden_states], dim=1)


class SparseFormerModel(SparseFormerPreTrainedModel):
    """The bare SparseFormer, from pixels to tokens. `AutoModel` loads it, and it is the vision tower of LLaVA."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config=None, **kwargs):
        """As in Transformers. Loads a `SparseFormerVisionModelWithProjection` if `config` names that class."""
        # `AutoModel` has one class for all SparseFormers and gives it the folder's configuration.
        architectures, chosen = getattr(config, "architectures", None) or (), super()
        is_auto = cls.auto_classes["AutoModel"] == cls.__name__
        if is_auto and any(name.endswith("VisionModelWithProjection") for name in architectures):
            chosen = SparseFormerVisionModelWithProjection
        return chosen.from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)

    def __init__(self, config: SparseFormerBaseConfig):
        config.validate()
        super().__init__(config)
        self.layers = nn.ModuleList(self._make_layers(config))
        self.layernorm = cortex_norm(config)(config.hidden_size) if config.final_norm else nn.Identity()
        attends = config.pooling in ("attention", "latent_attention")
        self.pooling_head = SparseFormerPoolingHead(config) if attends else None
        broadcast_layers(self.layers, config, has_class_token=config.use_cls_token)
        # FSDP refuses names of classes that a model has not.
        whole = [module for module in self.modules() if isinstance(module, self.whole_modules)]
        self._no_split_modules = {type(module).__name__ for module in whole}
        self.post_init()

    def _make_layers(self, config: SparseFormerConfig) -> list[nn.Module]:
        """Make the modules before the cortex, and return its blocks."""
        iterations, blocks = config.num_focusing_iterations, config.num_hidden_layers
        is_block = config.final_focusing_is_block
        # One for each execution of a layer, in order; v1's last focusing layer is the first block.
        executions = iterations + blocks + (not is_block)
        rates = [config.drop_path_rate * i / max(executions - 1, 1) for i in range(executions)]
        block_rates = rates[executions - blocks :]

        norm, eps = config.transition_layer_norm, focusing_eps(config)
        self.stem = SparseFormerStem(config)
        self.latents = SparseFormerLatents(
            config, config.focusing_hidden_size, num_embeddings=1 if config.shared_token_embedding else None
        )
        focusing_layer = SparseFormerV1FocusingLayer if is_block else SparseFormerFocusingLayer
        self.focusing_layer = focusing_layer(config, rates[:iterations])
        self.transition = nn.Linear(config.focusing_hidden_size, config.hidden_size)
        self.transition_layernorm = nn.LayerNorm(config.hidden_size, eps=eps) if norm else nn.Identity()
        self.final_focusing_layer = None if is_block else SparseFormerLastLook(config, rates[iterations])
        layers: list[nn.Module] = [SparseFormerLayer(config, rate) for rate in block_rates[is_block:]]
        if is_block:
            layers.insert(0, SparseFormerV1FocusingLayer(config, block_rates[:1], full_width=True))
        return layers

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        output_rois: bool = False,
        output_focusing_hidden_states: bool = False,
        output_stem_features: bool = False,
        output_attention_forecast: bool = False,
        output_tokens: bool = True,
        num_tokens: int | None = None,
        features: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SparseFormerModelOutput:
        """
        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`):
                Normalized images of any size from 4 x 4 pixels.
            output_rois (`bool`, *optional*, defaults to `False`): Return `rois` and `sampling_points`.
            output_focusing_hidden_states (`bool`, *optional*, defaults to `False`):
                Return `focusing_hidden_states`.
            output_stem_features (`bool`, *optional*, defaults to `False`): Return `stem_features`.
            output_attention_forecast (`bool`, *optional*, defaults to `False`): Return `attention_forecast`.
            output_tokens (`bool`, *optional*, defaults to `True`):
                Return `last_hidden_state` of all tokens. Without it, the last block computes [CLS] alone where that is
                what is pooled, and `last_hidden_state` has no other token, unless `hidden_states` or `attentions` are
                asked for or Context Broadcasting is in that block. That saves 8 % of the multiply-accumulates of
                augreg-base-49-224, 4 % of augreg-large-49-224's.
            num_tokens (`int` or `torch.LongTensor` of shape `()`, *optional*):
                Latent tokens to compute with, up to `config.num_latent_tokens`; `config.num_tokens`, else all, by
                default. Best one of `config.elastic_token_counts`: another one warns, once. A tensor, as a program
                takes it, chooses among these, see `choose_num_tokens`.
            features (`torch.FloatTensor`, *optional*):
                The early convolution's map of the same images, if another call has computed it.

        Raises:
            ValueError: if the images have other channels or are smaller, or `num_tokens` does not fit.
        """
        pixel_values = check_pixel_values(pixel_values, self.config.num_channels, min_size=4)
        looks = self.look(pixel_values, num_tokens, features, **kwargs)
        hidden_states = looks.hidden_states
        kwargs |= self.rotation(looks.rois[-1])
        cls_alone = not output_tokens and self.reads_cls_alone(**kwargs)
        for layer in self._layers_after_looks():
            leading = self.config.num_class_tokens if cls_alone and layer is self.layers[-1] else None
            hidden_states = layer(hidden_states, leading=leading, **kwargs)

        return SparseFormerModelOutput(
            last_hidden_state=self.layernorm(hidden_states),
            pooler_output=self.pool(hidden_states),
            rois=tuple(looks.rois) if output_rois else None,
            sampling_points=tuple(looks.points) if output_rois else None,
            stem_features=self.map_of_image(pixel_values, looks) if output_stem_features else None,
            attention_forecast=looks.forecast if output_attention_forecast else None,
        )

    def look(
        self,
        pixel_values: torch.Tensor,
        num_tokens: int | torch.Tensor | None,
        features: torch.Tensor | None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Looks:
        """The focusing stage. Arguments are those of `forward`."""
        num_tokens = self.choose_num_tokens(num_tokens)
        features = self.stem(pixel_values) if features is None else features
        # Before the first sampling, all images have the same tokens and RoIs: they are computed once.
        hidden_states, rois, prefix = self.latents(pixel_values.shape[0], num_tokens)
        all_rois, all_points = [], []
        for iteration in range(self.config.num_focusing_iterations):
            hidden_states, rois, points = self.focusing_layer(hidden_states, rois, features, iteration, **kwargs)
            all_rois.append(rois)
            all_points.append(points)

        hidden_states = self.transition_layernorm(self.transition(hidden_states))
        if self.final_focusing_layer is not None:
            hidden_states, points = self.final_focusing_layer(hidden_states, rois, features)
        else:
            hidden_states, rois, points = self.layers[0](hidden_states, rois, features, **kwargs)
            all_rois.append(rois)
        all_points.append(points)
        return Looks(join(prefix, hidden_states), all_rois, all_points, features)

    def _layers_after_looks(self) -> list[nn.Module]:
        """The blocks that `look` has not run, which are all but v1's first."""
        return [*self.layers][self.config.final_focusing_is_block :]

    def shared_features(self, pixel_values: torch.Tensor) -> torch.Tensor | None:
        """The part of `forward` that is the same for any number of tokens, its `features`."""
        return self.stem(pixel_values)

    def map_of_image(self, pixel_values: torch.Tensor, looks: Looks) -> torch.Tensor:
        """The map that the paper's segmentation head reads, `(batch, stem_channels, height / 4, width / 4)`."""
        return looks.features

    def choose_num_tokens(self, num_tokens: int | torch.Tensor | None) -> int:
        """Return the count of tokens to compute with, see `forward`. One that a tensor chooses is the largest of
        `config.trained_token_counts` that is not above it, else the smallest."""
        if num_tokens is None:
            return self.config.default_num_tokens
        if not isinstance(num_tokens, torch.Tensor):
            return self.check_num_tokens(num_tokens)
        counts = self.config.trained_token_counts
        return read_at(place_among(counts, num_tokens), counts)

    def resize_latents(self, num_latent_tokens: int) -> bool:
        """Change the number of latent tokens, and return whether smaller counts stay as they were trained."""
        self.latents.resize_tokens(num_latent_tokens)
        return True

    def run_cortex(self, hidden_states: torch.Tensor, rois: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cortex alone, for any tokens.

        Args:
            hidden_states (`torch.Tensor`): `(batch, prefix + latent tokens, hidden_size)`, [CLS] and registers first.
            rois (`torch.Tensor`): `(batch, latent tokens, 4)`.

        Returns:
            pair of `torch.Tensor`: As `last_hidden_state` and `pooler_output`.
        """
        rotation = self.rotation(rois)
        for layer in self.layers:
            hidden_states = layer(hidden_states, **rotation)
        return self.layernorm(hidden_states), self.pool(hidden_states)

    def rotation(self, rois: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Rotary positions for the cortex, from the RoIs that it is given, `(batch, tokens, 4)`: cosines and sines
        that all blocks share, as `SelfAttention` takes them.

        A token without a grid is rotated as the patch around the center of its RoI would be. No gradient flows into
        the RoIs through it, as through the position encoding of the focusing stage. With it, students of a small
        DINOv3 learned less.
        """
        config = self.config
        if config.rope_theta is None:
            return {}
        left_top, right_bottom = in_float32(rois.detach()).chunk(2, dim=-1)
        centers = ((left_top + right_bottom) * 0.5).flip(-1)
        head_dim = config.hidden_size // config.num_attention_heads
        table = rotary_table(centers, config.rope_theta, config.rope_scale, config.rope_shift, head_dim)
        return {"position_embeddings": table}

    def reads_cls_alone(self, **kwargs) -> bool:
        """Whether the pooled embedding needs only [CLS] of the last block, and a call with these arguments returns no
        states or attentions of it."""
        names = ("output_hidden_states", "output_attentions")
        recorded = any(kwargs.get(name, getattr(self.config, name, False)) for name in names)
        return self.config.pooling == "cls" and not has_context_broadcast(self.layers[-1]) and not recorded

    def pool(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Pool tokens before the final LayerNorm, `(batch, tokens, hidden_size)`, to `(batch, pooled_size)`."""
        config = self.config
        return pool_tokens(
            hidden_states,
            config.pooling,
            self.layernorm,
            config.num_prefix_tokens,
            config.pooled_class_tokens or range(config.num_class_tokens),
            config.pool_before_norm,
            self.pooling_head,
        )


class SparseFormerForImageClassification(
    AdaptiveClassificationMixin, GenericForImageClassification, SparseFormerPreTrainedModel
):
    """SparseFormer with a linear classifier on the pooled token.

    If the pooled token is [CLS], the last block computes only that one (`output_tokens` of the base model). To read
    other tokens of that block, for example by a hook, pass `output_tokens=True`.
    """

    model_class = SparseFormerModel
    output_class = SparseFormerImageClassifierOutput
    base_model_arguments = {"output_tokens": False}


class SparseFormerBackbone(BackboneMixin, SparseFormerPreTrainedModel):
    """SparseFormer as a backbone: feature maps at its teacher's own grid, whatever the number of tokens, in the place
    of Transformers' `Dinov2Backbone` and the like.

    A cell of a map has the state of the token whose RoI covers it, or the mean of several (`shares_of_tokens`); with
    `upsampler_hidden_size`, convolutions that see the image refine it. With a token for each patch of its teacher, it
    is the teacher's own map before any training.

    It loads from what any SparseFormer was saved to, for example a bootstrapped classifier:
    `SparseFormerBackbone.from_pretrained(folder, out_features=["stage4", "stage8"])`. Heads of Transformers take its
    configuration as `backbone_config`, see docs/dense_features.md.
    """

    _keys_to_ignore_on_load_unexpected = [
        *SparseFormerPreTrainedModel._keys_to_ignore_on_load_unexpected,
        r"^(classifier|visual_projection|decode_head)\.",
    ]

    def __init__(self, config: SparseFormerBaseConfig):
        super().__init__(config)
        self.num_features = [config.hidden_size] * len(config.stage_names)
        self.sparseformer = SparseFormerModel(config)
        self.feature_maps = FeatureMaps(config)
        self.post_init()

    @can_return_tuple
    @filter_output_hidden_states
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        num_tokens: int | None = None,
        output_rois: bool = False,
        output_embedding: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SparseFormerBackboneOutput:
        """
        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`):
                Normalized images of any size from `feature_stride` on.
            num_tokens (`int`, *optional*): As of `SparseFormerModel.forward`.
            output_rois (`bool`, *optional*, defaults to `False`): Return `rois` and `sampling_points`.
            output_embedding (`bool`, *optional*, defaults to `False`): Return `pooler_output`.
            kwargs: Passed to `SparseFormerModel.forward`.

        Returns:
            `SparseFormerBackboneOutput`: `feature_maps`, of each layer of `out_features` `(batch, hidden_size,
            height / stride, width / stride)`, rounded down, where the stride is `feature_stride`, divided by the
            layer's `feature_scales`, or as `reshape_hidden_states` says. All are spread by the last RoIs.

        Raises:
            ValueError: if the images have other channels or are smaller than a cell, or `num_tokens` does not fit.
        """
        kwargs |= {"output_rois": True, "return_dict": True}
        outputs = self.sparseformer(pixel_values, num_tokens=num_tokens, **kwargs)
        norm = self.sparseformer.layernorm if self.config.apply_layernorm else None
        places = outputs.hidden_states, outputs.rois[-1], pixel_values
        maps, _ = self.feature_maps(*places, norm, self.out_features)
        if not self.config.reshape_hidden_states:
            maps = tuple(map(self.in_a_row, maps, (outputs.hidden_states[index] for index in self.out_indices)))
        return SparseFormerBackboneOutput(
            feature_maps=maps,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            rois=outputs.rois if output_rois else None,
            sampling_points=outputs.sampling_points if output_rois else None,
            focusing_hidden_states=outputs.focusing_hidden_states,
            pooler_output=outputs.pooler_output if output_embedding else None,
            attention_forecast=outputs.attention_forecast,
        )

    def in_a_row(self, features: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """A map `(batch, hidden_size, rows, columns)` behind [CLS] or the mean token of the states that it is of."""
        front = states[:, :1] if self.config.use_cls_token else states.mean(dim=1, keepdim=True)
        front = self.sparseformer.layernorm(front) if self.config.apply_layernorm else front
        return torch.cat([front, features.flatten(2).mT], dim=1)


class SparseFormerForSemanticSegmentation(SparseFormerPreTrainedModel):
    """SparseFormer with a class for every pixel: scores of each latent token, spread over the image by its RoI and
    likeness (section 4.1 of the bootstrapping paper; `SegmentationHead` says what that leaves open). With
    `decoder_type="linear"`, a linear classifier of its feature maps, see `SparseFormerBackbone`, side by side where
    `out_features` names several.

    With 256 latent tokens, 512 x 512 pixels and 150 classes, base has 65.4 M parameters and 25.4 G
    multiply-accumulates, large 213.5 M and 66.3 G. Table 5 prints 68 M and 36 G, 216 M and 77 G, which the paper's
    text does not explain.

    It starts from a bootstrapped classifier, with more tokens and pixels (256 tokens for 512 x 512 in the paper):
    `SparseFormerForSemanticSegmentation.from_pretrained(folder, num_latent_tokens=256, image_size=512,
    num_labels=150)`.
    """

    # The loss is a mean over the pixels that count, whose number `Trainer` does not know.
    accepts_loss_kwargs = False

    def __init__(self, config: SparseFormerBaseConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.sparseformer = SparseFormerModel(config)
        self.feature_maps = FeatureMaps(config) if config.decoder_type == "linear" else None
        self.decode_head = (SegmentationHead if self.feature_maps is None else LinearDecoder)(config)
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, num_latent_tokens: int | None = None, **kwargs):
        """As in Transformers. `num_latent_tokens`, given here or in a `config`, may differ from the checkpoint's;
        `resize_tokens` changes it."""
        config = kwargs.get("config")
        if isinstance(config, SparseFormerBaseConfig) and pretrained_model_name_or_path is not None:
            num_latent_tokens = config.num_latent_tokens if num_latent_tokens is None else num_latent_tokens
            others = {name: value for name, value in kwargs.items() if name != "config"}
            stored, _ = cls.config_class.from_pretrained(
                pretrained_model_name_or_path, return_unused_kwargs=True, **others
            )
            kwargs["config"] = copy.deepcopy(config)
            kwargs["config"].num_latent_tokens = stored.num_latent_tokens
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if num_latent_tokens is not None and num_latent_tokens != model.config.num_latent_tokens:
            model.resize_tokens(num_latent_tokens)
        return loaded

    def image_processor_config(self) -> dict:
        height, width = pair(self.config.image_size)
        fields = image_processor_config(self.config)
        for name in ("do_center_crop", "crop_size", "do_convert_rgb"):
            fields.pop(name, None)
        return {
            **fields,
            "image_processor_type": "SegformerImageProcessor",
            "size": {"height": height, "width": width},
            "do_reduce_labels": False,
        }

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        output_rois: bool = False,
        output_token_maps: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SparseFormerSemanticSegmenterOutput:
        """
        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`):
                Normalized images of any size from 4 x 4 pixels.
            labels (`torch.LongTensor` of shape `(batch, height, width)`, *optional*):
                Class numbers; `config.semantic_loss_ignore_index` does not count.
            output_rois (`bool`, *optional*, defaults to `False`): Return `rois` and `sampling_points`.
            output_token_maps (`bool`, *optional*, defaults to `False`): Return `token_maps`.
            kwargs: Passed to `SparseFormerModel.forward`.

        Returns:
            `SparseFormerSemanticSegmenterOutput`: `loss`, the mean over the pixels that count, and `(batch,
            num_labels, height / 4, width / 4)` `logits`, rounded up, or of a linear decoder at the grid of the last
            of the feature maps; the image processor's `post_process_semantic_segmentation` makes maps of them.

        Raises:
            ValueError: if the labels are of another size than the images, or no classes of the model.
        """
        if labels is not None and pixel_values is not None and labels.shape[-2:] != pixel_values.shape[-2:]:
            raise ValueError(
                f"Got masks of {' x '.join(map(str, labels.shape[-2:]))} pixels for images of "
                f"{' x '.join(map(str, pixel_values.shape[-2:]))}; expected the same size. Prepare both with the "
                "model's AutoImageProcessor: `processor(images, masks)`."
            )
        kwargs |= {"output_rois": True, "return_dict": True}
        if self.feature_maps is None:
            outputs = self.sparseformer(pixel_values, output_stem_features=True, **kwargs)
            tokens = outputs.last_hidden_state[:, self.config.num_prefix_tokens :]
            logits, token_maps = self.decode_head(tokens, outputs.rois[-1], outputs.stem_features)
        else:
            returns_states = kwargs.get("output_hidden_states", self.config.output_hidden_states)
            outputs = self.sparseformer(pixel_values, **kwargs | {"output_hidden_states": True})
            norm = self.sparseformer.layernorm if self.config.apply_layernorm else None
            places = outputs.hidden_states, outputs.rois[-1], pixel_values
            maps, token_maps = self.feature_maps(*places, norm, self.config.out_features)
            logits = self.decode_head(maps)
            if not returns_states:
                outputs.hidden_states = None
        loss = None
        if labels is not None:
            ignored = self.config.semantic_loss_ignore_index
            loss = semantic_segmentation_loss(logits, labels, self.config.num_labels, ignored)
        return SparseFormerSemanticSegmenterOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            rois=outputs.rois if output_rois else None,
            sampling_points=outputs.sampling_points if output_rois else None,
            focusing_hidden_states=outputs.focusing_hidden_states,
            token_maps=token_maps if output_token_maps else None,
        )


class SparseFormerVisionModel(SparseFormerModel):
    """SparseFormer as a vision encoder of CLIP, in the place of `CLIPVisionModel`.

    The same weights under the same names as `SparseFormerModel`, which `AutoModel` loads from the same folder.
    """

    loads_with = "AutoModel"


class SparseFormerVisionModelWithProjection(SparseFormerPreTrainedModel):
    """SparseFormer with a linear projection of the pooled token, in the place of `CLIPVisionModelWithProjection`.

    `AutoModel` loads it from a folder that it was saved to.
    """

    loads_with = "AutoModel"
    embeds = {"image": ("forward", "image_embeds")}

    def __init__(self, config: SparseFormerBaseConfig):
        if config.projection_dim is None:
            raise ValueError(
                "`projection_dim` of the configuration is None, expected the width of the projected embedding."
            )
        super().__init__(config)
        self.sparseformer = SparseFormerModel(config)
        self.visual_projection = nn.Linear(config.pooled_size, config.projection_dim, bias=config.projection_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: torch.Tensor | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> SparseFormerVisionModelWithProjectionOutput:
        """Pixels to `image_embeds`, `(batch, projection_dim)`; keyword arguments go to `SparseFormerModel.forward`."""
        outputs = self.sparseformer(pixel_values, **kwargs)
        return SparseFormerVisionModelWithProjectionOutput(
            image_embeds=self.visual_projection(outputs.pooler_output),
            last_hidden_state=outputs.last_hidden_state,
            pooler_output=outputs.pooler_output,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            rois=outputs.rois,
            sampling_points=outputs.sampling_points,
            focusing_hidden_states=outputs.focusing_hidden_states,
        )


__all__ = [
    "SparseFormerConfig",
    "SparseFormerModel",
    "SparseFormerBackbone",
    "SparseFormerForImageClassification",
    "SparseFormerForSemanticSegmentation",
    "SparseFormerPreTrainedModel",
    "SparseFormerVisionModel",
    "SparseFormerVisionModelWithProjection",
]
