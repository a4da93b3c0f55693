"""PatchSparseFormer: a vision transformer with few tokens.

An image is divided into cells. Each cell is resized to the size of a patch, and its patch embedding is a token. By
default, the cells form a grid. With `placement="content"`, cells differ between images: blocks of four cells with
little detail are merged, and cells with much detail are split (`placement.py`). A new student has its teacher's
weights, and interpolates the teacher's position embeddings. With a grid, the student's outputs are therefore those of
the teacher for smaller images. Bootstrapping (Gao et al., *Bootstrapping SparseFormers from Vision Foundation Models*,
CVPR 2024) then aligns the student's outputs with the teacher's outputs for images of full size.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..configuration.configuration_base import pair
from ..configuration.configuration_patch_sparseformer import (
    PatchSparseFormerConfig,
    PatchSparseFormerProjectionConfig,
)
from .layers import (
    INITIALIZER_STD,
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
    in_float32,
    norm_factory,
    resize,
    rotary_embeddings,
)
from .placement import (
    AttentionForecast,
    ContentPlacement,
    cells_of,
    cut_patches,
    grid_rois,
    merge_in_four,
    pick_patches,
)


@dataclass
class PatchSparseFormerEmbeddingsOutput(ModelOutput):
    """Output of `PatchSparseFormerEmbeddings`.

    Args:
        tokens (`torch.FloatTensor` of shape `(batch, prefix + latent tokens, hidden_size)`): Embedded tokens.
        rois (`torch.FloatTensor` of shape `(batch, latent tokens, 4)`):
            Cells of the latent tokens: left, top, right and bottom edges, 0 to 1 across the image.
        areas (`torch.FloatTensor` of shape `(batch, latent tokens)`, *optional*):
            Areas of the cells, 1 on average and 0 for padding; `None` if all areas are equal.
        attention_forecast (`torch.FloatTensor`, *optional*): Output of the `AttentionForecast`.
    """

    tokens: torch.FloatTensor | None = None
    rois: torch.FloatTensor | None = None
    areas: torch.FloatTensor | None = None
    attention_forecast: torch.FloatTensor | None = None


class PatchSparseFormerEmbeddings(nn.Module):
    """Embed cells of images as patches, add positions, and concatenate class tokens and registers before them."""

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
        self.placement = None if config.placement == "grid" else ContentPlacement(config)

    def forward(
        self,
        pixel_values: torch.Tensor,
        num_tokens: int,
        placement: str = "grid",
        output_attention_forecast: bool = False,
    ) -> PatchSparseFormerEmbeddingsOutput:
        pixel_values = in_float32(pixel_values)
        grids = [self.config.grid_of(num_tokens)]
        if self.placement is not None:
            grids = self.config.cell_grids(num_tokens, tuple(pixel_values.shape[-2:]))
        # There are no cells to choose from if `grids` has no second grid. If `grids[0]` has only one row or column, it
        # has no blocks of four cells.
        has_choice = len(grids) > 1 and min(grids[0]) > 1 and pixel_values.shape[0] > 0
        if has_choice and placement == "content":
            return self.embed_chosen_cells(pixel_values, grids)
        rows, columns = grids[0]
        height, width = self.patch_size
        resized = resize(pixel_values, (rows * height, columns * width))
        patches = cut_patches(resized, self.patch_size).flatten(1, 2)
        rois = grid_rois(grids[0]).to(pixel_values.device)
        forecast = None
        if has_choice and output_attention_forecast:
            rows, columns = grids[1]
            forecast = self.placement.forecast(resize(pixel_values, (rows * height, columns * width)))
        return PatchSparseFormerEmbeddingsOutput(
            tokens=self.embed(patches, self.positions_of(grids[0])),
            rois=rois.expand(patches.shape[0], -1, -1),
            attention_forecast=forecast,
        )

    def embed(self, patches: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return class tokens, registers and embedded patches, `(batch, prefix + latent tokens, hidden_size)`.

        Args:
            patches (`torch.Tensor` of shape `(batch, tokens, channels * height * width)`): Pixels of the cells.
            positions (`torch.Tensor` of shape `(tokens, hidden_size)` or `(batch, tokens, hidden_size)`):
                Position embeddings of the cells.
        """
        # Patches are cast to the dtype of positions, because the weight of the projection may be quantized.
        patches = patches.to(self.position_embeddings.dtype)
        tokens = self.patch_norm(self.projection(patches)) + positions
        prefix = [each for each in (self.cls_token, self.register_tokens) if each is not None]
        prefix = [each.expand(tokens.shape[0], -1, -1) for each in prefix]
        return self.norm(torch.cat([*prefix, tokens], dim=1))

    def embed_chosen_cells(
        self, pixel_values: torch.Tensor, grids: list[tuple[int, int]]
    ) -> PatchSparseFormerEmbeddingsOutput:
        """Choose cells for each image, and embed them. The candidates are the first grid's blocks of four cells and
        the cells of all `grids`. The number of chosen cells is the number of cells in the first grid."""
        device = pixel_values.device
        height, width = self.patch_size
        base, finest = (
            resize(pixel_values, (rows * height, columns * width)) for rows, columns in (grids[0], grids[-1])
        )
        levels = [finest]
        for _ in grids[1:-1]:
            levels.insert(0, merge_in_four(levels[0]))
        levels = [merge_in_four(base, grids[0], self.patch_size), base, *levels]
        chosen, forecast = self.placement(levels, grids[0])
        positions = [self.positions_of(grid) for grid in grids]
        table = positions[0].mT.unflatten(1, grids[0])
        positions.insert(0, merge_in_four(table, grids[0]).flatten(1).mT)
        rois, areas = cells_of(grids)
        patches = pick_patches(levels, self.patch_size, chosen)
        return PatchSparseFormerEmbeddingsOutput(
            tokens=self.embed(patches, torch.cat(positions)[chosen]),
            rois=rois.to(device)[chosen],
            areas=areas.to(device)[chosen],
            attention_forecast=forecast,
        )

    def positions_of(self, grid: tuple[int, int]) -> torch.Tensor:
        """Return the position embeddings of a grid's cells, `(cells, hidden_size)`. They are interpolated if `grid` is
        not `config.token_grid`."""
        own_grid = self.config.token_grid
        if grid == own_grid:
            return self.position_embeddings
        table = in_float32(self.position_embeddings).mT.unflatten(1, own_grid).unsqueeze(0)
        resized = F.interpolate(table, grid, mode="bicubic", antialias=True)
        return resized.flatten(2).squeeze(0).mT.to(self.position_embeddings)


class PatchSparseFormerPreTrainedModel(SparseFormerBasePreTrainedModel):
    """Base class of all PatchSparseFormers, with weight initialization, `from_teacher` and `resize_tokens`."""

    config: PatchSparseFormerConfig
    auto_classes = {
        "AutoModel": "PatchSparseFormerModel",
        "AutoModelForImageClassification": "PatchSparseFormerForImageClassification",
    }
    _no_split_modules = ["PatchSparseFormerEmbeddings", "EncoderLayer"]
    _input_embed_layer = "projection"
    _can_record_outputs = {
        "hidden_states": OutputRecorder(EncoderLayer, index=0, layer_name="layers"),
        "attentions": OutputRecorder(SelfAttention, index=1, layer_name="layers"),
    }

    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, PatchSparseFormerEmbeddings):
            init.trunc_normal_(module.position_embeddings, std=INITIALIZER_STD)
            for tokens in (module.cls_token, module.register_tokens):
                if tokens is not None:
                    init.normal_(tokens)
        elif isinstance(module, AttentionForecast):
            # With zero weights in the head, the forecast is equal for all cells before training.
            for convolution in (module.embedding, *module.convolutions):
                init.kaiming_normal_(convolution.weight, nonlinearity="relu")
                init.zeros_(convolution.bias)
            init.zeros_(module.head.weight)
            init.zeros_(module.head.bias)
        else:
            super()._init_weights(module)

    @torch.no_grad()
    def resize_tokens(self, num_latent_tokens: int):
        """Change the number of latent tokens in place, for continued bootstrapping. Interpolate position embeddings.

        Args:
            num_latent_tokens (`int`): Number of latent tokens, without [CLS].

        Raises:
            ValueError: if `num_latent_tokens` is below 1, or no grid has that number of cells.
        """
        config = self.config
        embeddings = self.base_model.embeddings
        grid = config.grid_of(num_latent_tokens, "num_latent_tokens")
        positions = embeddings.positions_of(grid).clone()
        embeddings.position_embeddings = nn.Parameter(positions, embeddings.position_embeddings.requires_grad)
        config.token_grid = grid
        config.elastic_token_counts = None
        config.num_latent_tokens = num_latent_tokens
        config.num_tokens = None

    def set_placement(self, placement: str):
        """Set `config.placement`, in place. `"grid"` removes the weights of the `AttentionForecast`. `"content"` and
        `"grid_then_content"` add an `AttentionForecast` with new weights if the model has none. All other weights
        stay."""
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
        """Return a new student, in evaluation mode. The student inherits the teacher's patch embedding, positions,
        blocks, final norm, and classifier or projection. By default, the student's outputs are those of the teacher
        for smaller images.

        Args:
            teacher, image_processor, fields: Arguments of `SparseFormerPreTrainedModel.from_teacher`.
            num_latent_tokens (`int`, *optional*):
                Number of latent tokens. By default, a quarter of the number of the teacher's patches.
            truncate (`float` or `int`, *optional*, defaults to 0):
                Leading blocks to leave out, as in `SparseFormerPreTrainedModel.from_teacher`.

        Raises:
            ValueError: in the cases of `SparseFormerPreTrainedModel.from_teacher`.
        """
        try:
            from frugalvit.modeling.inheritance import inherit_patches
        except ModuleNotFoundError as error:
            raise ImportError(
                "`from_teacher` needs the package frugalvit; its README says how to install it."
            ) from error
        return inherit_patches(cls, teacher, num_latent_tokens, truncate, image_processor, **fields)

    def to_plain_vit(self, num_tokens: int | None = None, like=None) -> nn.Module:
        """Convert this model to its teacher's class, for example to a `Dinov2ForImageClassification` for images of 84
        pixels. Each latent token becomes a patch of a smaller image. The outputs of the new model equal those of this
        model.

        Args:
            num_tokens (`int`, *optional*):
                Number of latent tokens. By default, the number is `config.num_tokens` or, if `config.num_tokens` is
                None, `config.num_latent_tokens`.
            like (`PreTrainedConfig` or `str`, *optional*):
                Configuration, folder or hub id of a Transformers model with the teacher's architecture. It is required
                if the teacher came from another library.

        Raises:
            ValueError: if tokens are placed by content, if `like` is required but missing, or if a model of the
                teacher's class (or of `like`) cannot have all weights of the student.
        """
        try:
            from frugalvit.modeling.plain_vit import to_plain_vit
        except ModuleNotFoundError as error:
            raise ImportError(
                "`to_plain_vit` needs the package frugalvit; its README says how to install it."
            ) from error
        return to_plain_vit(self, num_tokens, like)


class PatchSparseFormerModel(PatchSparseFormerPreTrainedModel):
    """The bare PatchSparseFormer, which maps pixels to tokens. `AutoModel` loads it, and LLaVA can use it."""

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
        self.pooler = Pooler(config)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        num_tokens: int | torch.Tensor | None = None,
        placement: str | None = None,
        output_rois: bool = False,
        output_attention_forecast: bool = False,
        output_tokens: bool = True,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SparseFormerModelOutput:
        """
        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`):
                Normalized images of any size.
            num_tokens (`int` or `torch.LongTensor` of shape `(batch,)`, *optional*):
                Number of latent tokens, as in `SparseFormerModel.forward`, or a tensor with one number for each image.
                With a tensor, tokens are padded to the largest number, and no token attends to padding.
            placement (`str`, *optional*):
                `"grid"` or `"content"`. By default, cells are those of `config.placement`. `"content"` needs a model
                with another `config.placement` than `"grid"`.
            output_rois (`bool`, *optional*, defaults to `False`): Return `rois`.
            output_attention_forecast (`bool`, *optional*, defaults to `False`):
                Return `attention_forecast`. `num_tokens` must not be a tensor.
            output_tokens (`bool`, *optional*, defaults to `True`): Argument of `SparseFormerModel.forward`.

        Raises:
            ValueError: if `num_tokens` is below 1 or above `config.num_latent_tokens`, if no grid has that number of
                cells, if the model cannot place tokens by `placement`, or if `num_tokens` is a tensor and
                `output_attention_forecast` is True.
        """
        if placement is None:
            placement = "content" if self.config.placement == "content" else "grid"
        elif placement not in (("grid",) if self.embeddings.placement is None else ("grid", "content")):
            raise ValueError(
                f"`placement` is {placement!r}, expected 'grid', or 'content' for a model whose `config.placement` is "
                f"'content' or 'grid_then_content'. Here, `config.placement` is {self.config.placement!r}."
            )
        num_queries = None if output_tokens else self.num_last_queries(**kwargs)
        if isinstance(num_tokens, torch.Tensor):
            if output_attention_forecast:
                raise ValueError(
                    "`output_attention_forecast` is True, expected False if `num_tokens` is a tensor, because the "
                    "sizes of the forecasts differ. Pass `num_tokens` as one number."
                )
            embedded = self.embed_each(pixel_values, num_tokens, placement)
            mask = F.pad(embedded.areas > 0, (self.config.num_prefix_tokens, 0), value=True)
            kwargs["attention_mask"] = create_bidirectional_mask(self.config, embedded.tokens, mask)
            # The mask has a row for each token, so the last block must compute all tokens.
            num_queries = None
        else:
            count = self.config.default_num_tokens if num_tokens is None else check_num_tokens(self.config, num_tokens)
            embedded = self.embeddings(pixel_values, count, placement, output_attention_forecast)
        position_embeddings = None
        if self.config.rope_theta is not None:
            position_embeddings = rotary_embeddings(self.config, embedded.rois)
        hidden_states = embedded.tokens
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                num_queries=num_queries if layer is self.layers[-1] else None,
                position_embeddings=position_embeddings,
                **kwargs,
            )
        return SparseFormerModelOutput(
            last_hidden_state=self.layernorm(hidden_states),
            pooler_output=self.pooler(hidden_states, self.layernorm, self.pooling_head, embedded.areas),
            rois=(embedded.rois,) if output_rois else None,
            attention_forecast=embedded.attention_forecast if output_attention_forecast else None,
        )

    @torch.compiler.disable
    def embed_each(
        self, pixel_values: torch.Tensor, num_tokens: torch.Tensor, placement: str
    ) -> PatchSparseFormerEmbeddingsOutput:
        """Embed each image with its own number of tokens in `num_tokens`, `(batch,)`. Pad to the largest number.

        `torch.compile` skips this method, because shapes depend on the values of `num_tokens`.
        """
        is_integer = not (num_tokens.is_floating_point() or num_tokens.is_complex() or num_tokens.dtype == torch.bool)
        if num_tokens.shape != pixel_values.shape[:1] or not is_integer:
            raise ValueError(
                f"`num_tokens` is a tensor of shape {tuple(num_tokens.shape)} and {num_tokens.dtype}, expected one "
                f"integer for each image, shape {tuple(pixel_values.shape[:1])}."
            )
        counts = num_tokens.unique().tolist() or [self.config.default_num_tokens]
        for count in counts:
            check_num_tokens(self.config, count)
        indices = []
        tokens = []
        rois = []
        areas = []
        for count in counts:
            chosen = (num_tokens == count).nonzero()[:, 0]
            part = self.embeddings(pixel_values[chosen], count, placement)
            padding = max(counts) - count
            indices.append(chosen)
            tokens.append(F.pad(part.tokens, (0, 0, 0, padding)))
            rois.append(F.pad(part.rois, (0, 0, 0, padding)))
            part_areas = part.rois.new_ones(part.rois.shape[:2]) if part.areas is None else part.areas
            areas.append(F.pad(part_areas, (0, padding)))
        order = torch.cat(indices).argsort()
        return PatchSparseFormerEmbeddingsOutput(
            tokens=torch.cat(tokens)[order],
            rois=torch.cat(rois)[order],
            areas=torch.cat(areas)[order],
        )


class PatchSparseFormerForImageClassification(AdaptiveClassifierMixin, PatchSparseFormerPreTrainedModel):
    """PatchSparseFormer with a linear classifier on the pooled embedding."""

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
    ) -> SparseFormerImageClassifierOutput:
        """Compute logits, `(batch, num_labels)`. With `labels`, also compute the loss by `image_classification_loss`.
        Other arguments are those of `PatchSparseFormerModel.forward`."""
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
        )


class PatchSparseFormerVisionModel(PatchSparseFormerModel):
    """`PatchSparseFormerModel` as a replacement for `CLIPVisionModel` and `SiglipVisionModel`."""


class PatchSparseFormerVisionModelWithProjection(PatchSparseFormerPreTrainedModel):
    """PatchSparseFormer with a linear projection, as a replacement for `CLIPVisionModelWithProjection`."""

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
    ) -> SparseFormerVisionModelWithProjectionOutput:
        """Compute `image_embeds`, `(batch, projection_dim)`. Arguments are those of
        `PatchSparseFormerModel.forward`."""
        outputs = self.sparseformer(pixel_values, **kwargs)
        image_embeds = self.visual_projection(outputs.pooler_output)
        return SparseFormerVisionModelWithProjectionOutput(image_embeds=image_embeds, **outputs)


__all__ = [
    "PatchSparseFormerConfig",
    "PatchSparseFormerForImageClassification",
    "PatchSparseFormerModel",
    "PatchSparseFormerPreTrainedModel",
    "PatchSparseFormerProjectionConfig",
    "PatchSparseFormerVisionModel",
    "PatchSparseFormerVisionModelWithProjection",
]
