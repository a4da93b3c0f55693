"""PatchSparseFormer: a vision transformer whose few tokens each embed a cell of the image as a teacher embeds a patch.

Cells are those of a grid, or of its blocks and parts, chosen for each image (`placement.py`). Positions are the
teacher's, interpolated, so that a new student is its teacher at a lower resolution, which bootstrapping (Gao et al.,
*Bootstrapping SparseFormers from Vision Foundation Models*, CVPR 2024) then aligns with the teacher.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput, ModelOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..configuration.configuration_base import pair
from ..configuration.configuration_patch_sparseformer import (
    PatchSparseFormerConfig,
    PatchSparseFormerProjectionConfig,
    choose_grid,
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
    in_float32,
    norm_factory,
    pool_tokens,
    reads_class_tokens_alone,
    resize,
    rotary_embeddings,
)
from .placement import ContentPlacement, cells_of, cut_patches, grid_rois, merge_in_four, pick_patches


@dataclass
class PatchSparseFormerModelOutput(BaseModelOutputWithPooling):
    """Output of `PatchSparseFormerModel`.

    Args:
        last_hidden_state (`torch.FloatTensor` of shape `(batch, [CLS] and registers + tokens, hidden_size)`):
            Tokens after the final norm; `hidden_states` are before the first block and after each.
        pooler_output (`torch.FloatTensor` of shape `(batch, pooled_size)`): The pooled embedding.
        rois (`tuple`, *optional*, with `output_rois=True`):
            The tokens' cells, `(batch, tokens, 4)` float32: left, top, right, bottom, 0 to 1 across the image.
        attention_forecast (`torch.FloatTensor`, *optional*, with `output_attention_forecast=True`):
            `(batch, rows, columns)` float32 logits of the share of a teacher's attention that falls on each cell of
            the grid of twice the rows and columns, where `placement` is `"content"`.
    """

    rois: tuple[torch.FloatTensor, ...] | None = None
    attention_forecast: torch.FloatTensor | None = None


@dataclass
class PatchSparseFormerImageClassifierOutput(ImageClassifierOutput):
    """`ImageClassifierOutput` with the `rois` of `PatchSparseFormerModelOutput`."""

    rois: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class PatchSparseFormerVisionModelWithProjectionOutput(ModelOutput):
    """`PatchSparseFormerModelOutput` with `image_embeds`, `(batch, projection_dim)`, the projected `pooler_output`."""

    image_embeds: torch.FloatTensor | None = None
    last_hidden_state: torch.FloatTensor | None = None
    pooler_output: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None
    rois: tuple[torch.FloatTensor, ...] | None = None


class PatchSparseFormerEmbeddings(nn.Module):
    """Embeds cells of images as patches, adds their positions, and puts [CLS] and registers in front."""

    def __init__(self, config: PatchSparseFormerConfig):
        super().__init__()
        self.config = config
        self.patch_size = pair(config.patch_size)
        hidden_size = config.hidden_size
        norm = norm_factory(config)
        self.projection = nn.Linear(config.num_channels * math.prod(self.patch_size), hidden_size)
        self.patch_norm = norm(hidden_size) if "patch" in config.extra_norms else nn.Identity()
        self.position_embeddings = nn.Parameter(torch.empty(math.prod(config.token_grid), hidden_size))
        self.cls_token = self.register_tokens = None
        if config.num_class_tokens:
            self.cls_token = nn.Parameter(torch.empty(config.num_class_tokens, hidden_size))
        if config.num_register_tokens:
            self.register_tokens = nn.Parameter(torch.empty(config.num_register_tokens, hidden_size))
        self.norm = norm(hidden_size) if "embedding" in config.extra_norms else nn.Identity()
        self.placement = ContentPlacement(config) if config.placement == "content" else None

    def draw(self, std: float):
        """Draw positions, class tokens and registers."""
        init.trunc_normal_(self.position_embeddings, std=std)
        for tokens in (self.cls_token, self.register_tokens):
            if tokens is not None:
                init.normal_(tokens)

    def forward(self, pixel_values: torch.Tensor, num_tokens: int | torch.Tensor | None) -> tuple:
        """Return tokens, `(batch, prefix + tokens, hidden_size)`, and of those that are no prefix the cells, `(batch,
        tokens, 4)`, and their areas, `(batch, tokens)`, 1 on average, or None if they are equal; then the placement's
        forecast."""
        if isinstance(num_tokens, torch.Tensor):
            return self.embed_each(pixel_values, num_tokens)
        config = self.config
        count = config.default_num_tokens if num_tokens is None else check_num_tokens(config, num_tokens)
        pixel_values = in_float32(pixel_values)
        grids = [config.grid_of(count)]
        if self.placement is not None:
            grids = config.cell_grids(count, tuple(pixel_values.shape[-2:]))
        if len(grids) > 1 and min(grids[0]) > 1:
            patches, positions, rois, areas, forecast = self.cut_cells(pixel_values, grids)
        else:
            # Without finer cells or blocks of four there is nothing to choose: all images have the grid's cells.
            rows, columns = grids[0]
            height, width = self.patch_size
            resized = resize(pixel_values, (rows * height, columns * width))
            patches = cut_patches(resized, self.patch_size).flatten(1, 2)
            positions = self.positions_of(grids[0])
            rois = grid_rois(grids[0]).to(pixel_values.device)
            areas = forecast = None
        # Not the projection's dtype, which may be that of quantized weights.
        patches = patches.to(self.position_embeddings.dtype)
        tokens = self.patch_norm(self.projection(patches)) + positions
        batch = tokens.shape[0]
        front = [each for each in (self.cls_token, self.register_tokens) if each is not None]
        tokens = torch.cat([*(each.expand(batch, -1, -1) for each in front), tokens], dim=1)
        return self.norm(tokens), rois.expand(batch, -1, -1), areas, forecast

    def embed_each(self, pixel_values: torch.Tensor, num_tokens: torch.Tensor) -> tuple:
        """As `forward`, with a count for each image, `(batch,)`; padding to the most tokens has an area of 0."""
        chosen = []
        parts = []
        for count in num_tokens.unique().tolist():
            chosen.append((num_tokens == count).nonzero()[:, 0])
            tokens, rois, areas, _ = self(pixel_values[chosen[-1]], count)
            areas = rois.new_ones(rois.shape[:2]) if areas is None else areas
            parts.append((tokens, rois, areas.unsqueeze(-1)))
        order = torch.cat(chosen).argsort()
        tokens, rois, areas = (
            torch.cat([F.pad(part, (0, 0, 0, each[-1].shape[1] - part.shape[1])) for part in each])[order]
            # Counts are in ascending order.
            for each in zip(*parts, strict=True)
        )
        return tokens, rois, areas.squeeze(-1), None

    def cut_cells(self, pixel_values: torch.Tensor, grids: list[tuple[int, int]]) -> tuple:
        """Return patches, `(batch, tokens, pixels)`, positions, RoIs and areas of the cells that are chosen for each
        image, and the placement's forecast."""
        device = pixel_values.device
        height, width = self.patch_size
        base, finest = (resize(pixel_values, (grid[0] * height, grid[1] * width)) for grid in (grids[0], grids[-1]))
        levels = [finest]
        for _ in grids[1:-1]:
            levels.insert(0, merge_in_four(levels[0]))
        levels = [merge_in_four(base, grids[0], self.patch_size), base, *levels]
        cells, forecast = self.placement(levels, grids[0])
        positions = [self.positions_of(grid) for grid in grids]
        table = positions[0].mT.unflatten(1, grids[0])
        positions.insert(0, merge_in_four(table, grids[0]).flatten(1).mT)
        rois, areas = cells_of(grids)
        patches = pick_patches(levels, self.patch_size, cells)
        return patches, torch.cat(positions)[cells], rois.to(device)[cells], areas.to(device)[cells], forecast

    def positions_of(self, grid: tuple[int, int]) -> torch.Tensor:
        """Positions of the cells of a grid, `(cells, hidden_size)`, interpolated."""
        own = self.config.token_grid
        if grid == own:
            return self.position_embeddings
        table = in_float32(self.position_embeddings).mT.unflatten(1, own).unsqueeze(0)
        resized = F.interpolate(table, grid, mode="bicubic", antialias=True)
        return resized.flatten(2).squeeze(0).mT.to(self.position_embeddings)


class PatchSparseFormerPreTrainedModel(HubModel):
    """Base class of all PatchSparseFormers: loading, initialization and counts of tokens."""

    config: PatchSparseFormerConfig
    base_model_prefix = "sparseformer"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    auto_classes = {
        "AutoModel": "PatchSparseFormerModel",
        "AutoModelForImageClassification": "PatchSparseFormerForImageClassification",
    }
    embeds = {"image": ("forward", "pooler_output")}
    embedding_arguments = ("num_tokens",)
    _no_split_modules = ["PatchSparseFormerEmbeddings", "EncoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": OutputRecorder(EncoderLayer, index=0, layer_name="layers"),
        "attentions": OutputRecorder(SelfAttention, index=1, layer_name="layers"),
    }

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.embeddings.projection

    def no_weight_decay(self) -> list[str]:
        """Names of parameters that optimizers should not decay, besides biases and norms."""
        names = ("position_embeddings", "cls_token", "register_tokens", "probe", "attention_scale", "mlp_scale")
        return [name for name, _ in self.named_parameters() if name.rsplit(".", 1)[-1] in names]

    @torch.no_grad()
    def _init_weights(self, module):
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
        it is below 1, above `num_latent_tokens`, or makes no grid."""
        if num_tokens is not None:
            self.config.grid_of(check_num_tokens(self.config, num_tokens))
        self.config.num_tokens = num_tokens

    @torch.no_grad()
    def resize_tokens(self, num_latent_tokens: int):
        """Change the number of latent tokens, [CLS] not counted, in place, as continued bootstrapping needs. Positions
        are interpolated. Errors as of `set_num_tokens`."""
        config = self.config
        embeddings = self.base_model.embeddings
        grid = choose_grid(num_latent_tokens, pair(config.image_size))
        positions = embeddings.positions_of(grid).clone()
        embeddings.position_embeddings = nn.Parameter(positions, embeddings.position_embeddings.requires_grad)
        config.token_grid = grid
        config.elastic_token_counts = None
        config.num_latent_tokens = num_latent_tokens
        config.num_tokens = None

    def set_placement(self, placement: str):
        """Choose where tokens look, in place: `"grid"` or `"content"`, see `placement` of the configuration. Weights
        stay, but a grid has no forecast of attention."""
        embeddings = self.base_model.embeddings
        self.config.placement = placement
        if placement == "grid":
            embeddings.placement = None
        elif embeddings.placement is None:
            embeddings.placement = ContentPlacement(self.config).to(embeddings.position_embeddings)
            embeddings.placement.apply(self._init_weights)

    @classmethod
    def from_teacher(
        cls,
        teacher: str | nn.Module,
        num_latent_tokens: int | None = None,
        truncate: float | int = 0,
        image_processor=None,
        **fields,
    ):
        """Return a student, in evaluation mode, that is its teacher at a lower resolution: it inherits the patch
        embedding, positions, blocks, final norm and classifier or projection.

        Args:
            teacher (`nn.Module` or `str`):
                A plain pre-norm vision transformer of Transformers, timm or open_clip, see docs/models.md, or what
                `read_anatomy` read of it; or a folder or hub id of Transformers, which brings its image processor.
                The student pools as it does, and has its registers, gates, norms, layer scale and rotary positions.
            num_latent_tokens (`int`, *optional*): Latent tokens; a quarter of the teacher's patches by default.
            truncate (`float` or `int`, *optional*, defaults to 0):
                Leading blocks left out: below 1 a share, from 1 on a count (1.0 is one block).
            image_processor (*optional*):
                The teacher's image processor, whose size, crop and normalization the student's has. Without one, the
                student has none, and `save_pretrained` writes none.
            fields: Fields of the configuration to set differently, for example `placement="content"`.

        Raises:
            ValueError: if the teacher is no such transformer, has no classifier where one is needed, or the numbers
                do not fit.
        """
        try:
            from frugalvit.modeling.inheritance import inherit_patches
        except ModuleNotFoundError as error:
            raise ImportError("from_teacher needs frugalvit: pip install frugalvit.") from error
        return inherit_patches(cls, teacher, num_latent_tokens, truncate, image_processor, **fields)

    def to_plain_vit(self, num_tokens: int | None = None, like=None) -> nn.Module:
        """Return this model with a count of tokens as one of its teacher's class, for images of as many patches: a
        `Dinov2ForImageClassification` for 84 pixels, for example, which loads and runs as any other.

        Args:
            num_tokens (`int`, *optional*): Latent tokens; those of a call that chooses none by default.
            like (`PreTrainedConfig` or `str`, *optional*):
                Configuration, folder or hub id of a model of Transformers with the teacher's architecture. Needed
                where the teacher was of another library.

        Raises:
            ValueError: if tokens are placed by content, `like` is needed or does not fit, or the class has no place
                for some of the student's weights.
        """
        try:
            from frugalvit.modeling.plain_vit import to_plain_vit
        except ModuleNotFoundError as error:
            raise ImportError("to_plain_vit needs frugalvit: pip install frugalvit.") from error
        return to_plain_vit(self, num_tokens, like)


class PatchSparseFormerModel(PatchSparseFormerPreTrainedModel):
    """The bare PatchSparseFormer, from pixels to tokens. `AutoModel` loads it, and it is the vision tower of LLaVA."""

    def __init__(self, config: PatchSparseFormerConfig):
        config.validate()
        super().__init__(config)
        blocks = config.num_hidden_layers
        self.embeddings = PatchSparseFormerEmbeddings(config)
        self.layers = nn.ModuleList(
            EncoderLayer(config, config.drop_path_rate * number / blocks) for number in range(1, blocks + 1)
        )
        self.layernorm = norm_factory(config)(config.hidden_size) if config.final_norm else nn.Identity()
        attends = config.pooling in ("attention", "latent_attention")
        self.pooling_head = AttentionPooling(config) if attends else None
        # Context Broadcasting in the last block reads all tokens.
        self.skips_unread_tokens = True
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        num_tokens: int | torch.Tensor | None = None,
        output_rois: bool = False,
        output_attention_forecast: bool = False,
        output_tokens: bool = True,
        **kwargs: Unpack[TransformersKwargs],
    ) -> PatchSparseFormerModelOutput:
        """
        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`):
                Normalized images of any size.
            num_tokens (`int` or `torch.LongTensor` of shape `(batch,)`, *optional*):
                Latent tokens to compute with, up to `config.num_latent_tokens`; `config.num_tokens`, else all, by
                default. Best one of `config.elastic_token_counts`: another one warns, once. With a count for each
                image, the others' tokens are padded to the most and attended to by none.
            output_rois (`bool`, *optional*, defaults to `False`): Return `rois`.
            output_attention_forecast (`bool`, *optional*, defaults to `False`): Return `attention_forecast`.
            output_tokens (`bool`, *optional*, defaults to `True`):
                Return `last_hidden_state` of all tokens. Without it, the last block computes [CLS] alone where that is
                what is pooled, unless `hidden_states` or `attentions` are asked for.
        """
        hidden_states, rois, areas, forecast = self.embeddings(pixel_values, num_tokens)
        position_embeddings = rotary_embeddings(self.config, rois)
        skips = self.skips_unread_tokens and not output_tokens and reads_class_tokens_alone(self.config, **kwargs)
        if isinstance(num_tokens, torch.Tensor):
            mask = F.pad(areas > 0, (self.config.num_prefix_tokens, 0), value=True)
            kwargs["attention_mask"] = create_bidirectional_mask(self.config, hidden_states, mask)
            # Its mask is of as many queries as keys.
            skips = False
        for layer in self.layers:
            num_queries = self.config.num_class_tokens if skips and layer is self.layers[-1] else None
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
            areas,
        )
        return PatchSparseFormerModelOutput(
            last_hidden_state=self.layernorm(hidden_states),
            pooler_output=pooled,
            rois=(rois,) if output_rois else None,
            attention_forecast=forecast if output_attention_forecast else None,
        )


class PatchSparseFormerForImageClassification(PatchSparseFormerPreTrainedModel):
    """PatchSparseFormer with a linear classifier on the pooled embedding."""

    # The loss divides by `num_items_in_batch` for every problem type.
    accepts_loss_kwargs = True

    def __init__(self, config: PatchSparseFormerConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.sparseformer = PatchSparseFormerModel(config)
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
    ) -> PatchSparseFormerImageClassifierOutput:
        """
        Args:
            labels (`torch.Tensor`, *optional*):
                `(batch,)` class indices, or `(batch, num_labels)` floats (multi-label classification, regression).
            num_items_in_batch (`int`, *optional*): Divide the summed loss by this count (set by `Trainer`).
            output_tokens (`bool`, *optional*, defaults to `False`): Let the last block compute all tokens.
        """
        outputs = self.sparseformer(pixel_values, output_tokens=output_tokens, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss = None
        if labels is not None:
            loss = image_classification_loss(logits, labels, self.config, num_items_in_batch)
        return PatchSparseFormerImageClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            rois=outputs.rois,
        )

    @torch.no_grad()
    def classify_adaptively(
        self, pixel_values: torch.Tensor, confidence: float = 0.9, token_counts: Sequence[int] | None = None
    ) -> AdaptiveClassifierOutput:
        """Classify images with few tokens, and those whose class is not sure enough again with more.

        An image is done when the likeliest class has a probability of `confidence`, 0 to 1. `token_counts` are tried
        in this order; by default the smallest of `config.elastic_token_counts`, then `config.num_tokens` or all
        (`docs/results.md`: more between them save less than they cost).
        """
        images = torch.arange(len(pixel_values), device=pixel_values.device)
        return classify_adaptively(
            self.config,
            lambda chosen, count: self(pixel_values[chosen], num_tokens=count).logits,
            images,
            confidence,
            token_counts,
        )


class PatchSparseFormerVisionModel(PatchSparseFormerModel):
    """PatchSparseFormer as a vision encoder of CLIP or SigLIP: a `PatchSparseFormerModel` under the name that goes
    with `PatchSparseFormerVisionModelWithProjection`."""


class PatchSparseFormerVisionModelWithProjection(PatchSparseFormerPreTrainedModel):
    """PatchSparseFormer with a linear projection of the pooled embedding, in the place of
    `CLIPVisionModelWithProjection`."""

    config: PatchSparseFormerProjectionConfig
    auto_classes = {"AutoModel": "PatchSparseFormerVisionModelWithProjection"}
    embeds = {"image": ("forward", "image_embeds")}

    def __init__(self, config: PatchSparseFormerProjectionConfig):
        super().__init__(config)
        self.sparseformer = PatchSparseFormerModel(config)
        self.visual_projection = nn.Linear(config.pooled_size, config.projection_dim, bias=config.projection_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: torch.Tensor, **kwargs: Unpack[TransformersKwargs]
    ) -> PatchSparseFormerVisionModelWithProjectionOutput:
        """Pixels to `image_embeds`, `(batch, projection_dim)`; arguments go to `PatchSparseFormerModel.forward`."""
        outputs = self.sparseformer(pixel_values, **kwargs)
        return PatchSparseFormerVisionModelWithProjectionOutput(
            image_embeds=self.visual_projection(outputs.pooler_output),
            last_hidden_state=outputs.last_hidden_state,
            pooler_output=outputs.pooler_output,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            rois=outputs.rois,
        )


__all__ = [
    "PatchSparseFormerConfig",
    "PatchSparseFormerForImageClassification",
    "PatchSparseFormerModel",
    "PatchSparseFormerPreTrainedModel",
    "PatchSparseFormerProjectionConfig",
    "PatchSparseFormerVisionModel",
    "PatchSparseFormerVisionModelWithProjection",
]
