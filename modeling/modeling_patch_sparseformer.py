"""A SparseFormer that inherits its teacher's patch embedding: each token embeds the pixels in its RoI as the teacher
embeds a patch (`patch_stage.py`), so that a new student is its teacher at a lower resolution.

RoIs are the cells of a grid, or of a quadtree that is chosen for each image (`placement.py`). The cortex and the heads
are those of `modeling_sparseformer.py`.
"""

import math

import torch
from torch import nn

from ..configuration.configuration_base import pair
from ..configuration.configuration_patch_sparseformer import PatchSparseFormerConfig, choose_grid
from ..configuration.configuration_sparseformer_base import SparseFormerBaseConfig
from .cortex import SparseFormerLayer, cortex_norm
from .modeling_sparseformer import (
    Looks,
    SparseFormerBackbone,
    SparseFormerForImageClassification,
    SparseFormerForSemanticSegmentation,
    SparseFormerModel,
    SparseFormerPreTrainedModel,
    SparseFormerVisionModel,
    SparseFormerVisionModelWithProjection,
    join,
)
from .patch_stage import (
    SparseFormerGridLatents,
    SparseFormerPatchLayer,
    SparseFormerTreeLatents,
    content_placement,
    pixels_as_features,
    resize_table,
)
from .placement import AttentionForecast, CellPyramid, cells_of, known_size
from .pyramid import GridImage
from .sparse_tokens import place_among, read_at


class PatchSparseFormerPreTrainedModel(SparseFormerPreTrainedModel):
    """Base class of all SparseFormers whose tokens embed patches."""

    config: PatchSparseFormerConfig
    auto_classes = {
        "AutoModel": "PatchSparseFormerModel",
        "AutoBackbone": "PatchSparseFormerBackbone",
        "AutoModelForImageClassification": "PatchSparseFormerForImageClassification",
        "AutoModelForSemanticSegmentation": "PatchSparseFormerForSemanticSegmentation",
    }
    whole_modules = (*SparseFormerPreTrainedModel.whole_modules, SparseFormerPatchLayer)
    focusing_of_students = "inherited"

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.final_focusing_layer.sampling.projection

    def _smallest_head(self) -> int:
        return self.config.hidden_size // self.config.num_attention_heads

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, AttentionForecast):
            module.draw()

    @torch.no_grad()
    def place_by_content(self, rule: str = "detail", num_levels: int | None = None):
        """Place tokens by content, in place: those that embed the patches of a grid embed the cells of a quadtree
        from then on, see `frugalvit.modeling.placement`. Weights stay; positions are interpolated.

        Args:
            rule (`str`, *optional*, defaults to `"detail"`): `placement_rule` of the configuration.
            num_levels (`int`, *optional*): `num_placement_levels` of the configuration.

        Raises:
            ValueError: if tokens are placed by content already.
        """
        base, config = self.base_model, self.config
        if config.placement == "content":
            raise ValueError("This model's tokens are placed by content already.")
        fields = {"placement": "content", "placement_rule": rule, "num_placement_levels": num_levels}
        placed, latents = type(config).from_dict(config.to_dict() | fields | {"token_grid": None}), base.latents
        trees = SparseFormerTreeLatents(placed).to(latents.token_embedding)
        tables = [resize_table(latents.token_embedding, latents.grid, grid) for grid in trees.grids]
        trees.load_state_dict(
            latents.state_dict() | {"token_embedding": torch.cat(tables), "initial_rois": cells_of(trees.grids)}
        )
        trees.token_embedding.requires_grad_(latents.token_embedding.requires_grad)
        counts = ("num_latent_tokens", "elastic_token_counts", "num_tokens")
        for name in (*fields, "token_grid", "placement_grid", *counts):
            setattr(config, name, getattr(placed, name))
        base.latents, base.stem = trees, CellPyramid(pair(config.patch_size))
        base.placement = content_placement(config).to(latents.token_embedding)
        base.placement.apply(self._init_weights)


class PatchSparseFormerModel(PatchSparseFormerPreTrainedModel, SparseFormerModel):
    """The bare SparseFormer whose tokens embed patches. `AutoModel` loads it, and it is the vision tower of LLaVA."""

    config: PatchSparseFormerConfig

    def _make_layers(self, config: PatchSparseFormerConfig) -> list[nn.Module]:
        self.placement = None
        if config.placement == "content":
            self.stem, self.placement = CellPyramid(pair(config.patch_size)), content_placement(config)
            self.latents = SparseFormerTreeLatents(config)
        else:
            self.stem, self.latents = GridImage(pair(config.patch_size)), SparseFormerGridLatents(config)
        # The names of the papers' model, by which folders have the weights.
        self.final_focusing_layer = SparseFormerPatchLayer(config)
        self.embedding_norm = cortex_norm(config)(config.hidden_size) if config.embedding_norm else nn.Identity()
        blocks = config.num_hidden_layers
        return [SparseFormerLayer(config, config.drop_path_rate * number / blocks) for number in range(1, blocks + 1)]

    def look(
        self,
        pixel_values: torch.Tensor,
        num_tokens: int | torch.Tensor | None,
        features: torch.Tensor | None = None,
        **kwargs,
    ) -> Looks:
        """Tokens embed the cells of a grid, or those of a tree. Arguments are those of `forward`."""
        embed = self.embed_grid if self.placement is None else self.embed_tree
        return embed(pixel_values, num_tokens)

    def embed_grid(self, pixel_values: torch.Tensor, num_tokens: int | torch.Tensor | None) -> Looks:
        """Tokens embed the cells of a grid. Arguments are those of `forward`."""
        cells = grids = None
        if isinstance(num_tokens, torch.Tensor):
            grid, cells, grids = self.read_grid(num_tokens)
        else:
            grid = self.config.grid_of(self.choose_num_tokens(num_tokens))
        positions, rois, prefix = self.latents(pixel_values.shape[0], grid, cells, grids)
        hidden_states, rois, points = self.final_focusing_layer(positions, rois, self.stem(pixel_values, grid))
        return Looks(self.embedding_norm(join(prefix, hidden_states)), [rois], [points])

    def embed_tree(self, pixel_values: torch.Tensor, num_tokens: int | torch.Tensor | None) -> Looks:
        """Tokens embed the cells of a tree that is chosen for each image. Arguments are those of `forward`."""
        size = known_size(pixel_values)
        grids = self.config.cell_grids(size)
        num_tokens = self.config.tokens_of_tree(self.choose_num_tokens(num_tokens), size)
        levels = self.stem(pixel_values, grids)
        cells, forecast = self.placement(levels, num_tokens)
        positions, rois, prefix = self.latents(pixel_values.shape[0], cells, grids)
        patches = self.placement.patches(levels, cells)
        hidden_states, rois, points = self.final_focusing_layer(positions, rois, patches)
        return Looks(self.embedding_norm(join(prefix, hidden_states)), [rois], [points], forecast=forecast)

    def choose_num_tokens(self, num_tokens: int | torch.Tensor | None) -> int:
        if self.placement is None or not isinstance(num_tokens, torch.Tensor):
            return super().choose_num_tokens(num_tokens)
        # The only counts that trees can have.
        counts, base = self.config.trained_token_counts, math.prod(self.config.cell_grids()[0])
        return base + 3 * read_at(place_among(counts, num_tokens), [(count - base) // 3 for count in counts])

    def read_grid(self, num_tokens: torch.Tensor) -> tuple[tuple[int, int], torch.Tensor, list[tuple[int, int]]]:
        """Return the rows and columns of the grid that a number in a tensor chooses, the numbers of its cells among
        those of the grids of all counts, `(1, cells)`, and these grids."""
        counts = self.config.trained_token_counts
        grids, place = [self.config.grid_of(count) for count in counts], place_among(counts, num_tokens)
        count = read_at(place, counts)
        grid = tuple(read_at(place, [sides[axis] for sides in grids]) for axis in (0, 1))
        first = read_at(place, [sum(counts[:number]) for number in range(len(counts))])
        return grid, first + torch.arange(count, device=num_tokens.device).unsqueeze(0), grids

    def _layers_after_looks(self) -> list[nn.Module]:
        return [*self.layers]

    def shared_features(self, pixel_values: torch.Tensor) -> None:
        """None: other numbers of tokens see other pixels."""

    def map_of_image(self, pixel_values: torch.Tensor, looks: Looks) -> torch.Tensor:
        return pixels_as_features(pixel_values)

    def resize_latents(self, num_latent_tokens: int) -> bool:
        config = self.config
        if config.placement == "content":
            # Each cell has its token already.
            self.latents.num_latent_tokens = num_latent_tokens
            return True
        config.token_grid = choose_grid(num_latent_tokens, pair(config.image_size))
        self.latents.resize_grid(config.token_grid)
        # Smaller grids would be interpolated from one that is not the trained one.
        return False


class PatchSparseFormerForImageClassification(PatchSparseFormerPreTrainedModel, SparseFormerForImageClassification):
    """`SparseFormerForImageClassification` whose tokens embed patches."""

    config: PatchSparseFormerConfig


class PatchSparseFormerBackbone(PatchSparseFormerPreTrainedModel, SparseFormerBackbone):
    """`SparseFormerBackbone` whose tokens embed patches."""

    config: PatchSparseFormerConfig


class PatchSparseFormerForSemanticSegmentation(PatchSparseFormerPreTrainedModel, SparseFormerForSemanticSegmentation):
    """`SparseFormerForSemanticSegmentation` whose tokens embed patches."""

    config: PatchSparseFormerConfig


class PatchSparseFormerVisionModel(PatchSparseFormerModel, SparseFormerVisionModel):
    """`SparseFormerVisionModel` whose tokens embed patches."""

    config: PatchSparseFormerConfig


class PatchSparseFormerVisionModelWithProjection(
    PatchSparseFormerPreTrainedModel, SparseFormerVisionModelWithProjection
):
    """`SparseFormerVisionModelWithProjection` whose tokens embed patches."""

    config: PatchSparseFormerConfig


def tower_class(config: SparseFormerBaseConfig) -> type[SparseFormerModel]:
    """The class of a vision tower with this configuration. Models with towers ask here: so they ship this file."""
    return PatchSparseFormerModel if config.embeds_patches else SparseFormerModel


__all__ = [
    "PatchSparseFormerConfig",
    "PatchSparseFormerModel",
    "PatchSparseFormerBackbone",
    "PatchSparseFormerForImageClassification",
    "PatchSparseFormerForSemanticSegmentation",
    "PatchSparseFormerPreTrainedModel",
    "PatchSparseFormerVisionModel",
    "PatchSparseFormerVisionModelWithProjection",
]
