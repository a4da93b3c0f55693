"""Models of Transformers that read images as rows and columns of patches, with a SparseFormer as their vision tower.

What follows their tower counts on a grid: it cuts it into rows, pools neighbours or puts them side by side. Here few
tokens compute, and each cell of the grid has what the tokens that look at it hold, so nothing behind it changes.

`SparseFormerGemma3ForConditionalGeneration` and the like are subclasses of Transformers' classes, made when they are
first asked for. Their folders ship this file, so that they load where frugalvit is not installed.
"""

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple

from ..configuration.configuration_base import pair
from ..configuration.configuration_patch_sparseformer import PatchSparseFormerConfig
from ..configuration.configuration_sparseformer import SparseFormerConfig, check_feature_layers, read_vision_config
from ..configuration.configuration_sparseformer_base import SparseFormerBaseConfig
from .dense import FeatureMaps, shares_of_tokens, spread
from .hub import AlteredConfigMixin, AlteredModel
from .modeling_patch_sparseformer import PatchSparseFormerModel
from .modeling_sparseformer import SparseFormerModel, SparseFormerModelOutput


# What Transformers' classes are called without `Config`, `Model` and `ForConditionalGeneration`.
VLMS = ("Gemma3", "Idefics3", "InternVL", "LlavaNext", "LlavaOnevision", "SmolVLM")
# What they call their vision tower and what follows it.
TOWERS = ("vision_tower", "vision_model")
CONNECTORS = ("multi_modal_projector", "connector")
_PREFIX = "SparseFormer"


class SparseFormerGridTower(SparseFormerModel):
    """A SparseFormer whose states lie on a grid, as those of the vision transformer whose place it takes: few tokens
    compute, and each cell has the state of the token whose RoI covers it, or the mean of several (`shares_of_tokens`).
    With a token for each patch, it gives what its teacher does, before any training.

    Args:
        config (`SparseFormerBaseConfig`): `feature_stride` is the size of a cell.
        num_front_tokens (`int`, *optional*, defaults to 0):
            Tokens before those of cells: class and register tokens as far as there are any, then the mean token.
    """

    # Those of a tower that is loaded alone are the model's own; vLLM would leave them out.
    _keys_to_ignore_on_load_unexpected = None

    def __init__(self, config: SparseFormerBaseConfig, num_front_tokens: int = 0):
        super().__init__(config)
        self.num_front_tokens = num_front_tokens
        self.feature_maps = FeatureMaps(config)

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        patch_attention_mask: torch.BoolTensor | None = None,
        output_rois: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SparseFormerModelOutput:
        """
        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`): Normalized images.
            patch_attention_mask (`torch.BoolTensor`, *optional*):
                Which patches there are, of Idefics3 and SmolVLM: all, as their processors resize images to squares.
            output_rois, kwargs: As of `SparseFormerModel.forward`.

        Returns:
            `SparseFormerModelOutput`: `last_hidden_state` and `hidden_states` are `(batch, front + cells,
            hidden_size)`, cells row by row; `attentions` are those of the tokens.

        Raises:
            ValueError: if a part of an image is masked, or an image is smaller than a cell.
        """
        if patch_attention_mask is not None and not patch_attention_mask.all():
            raise ValueError(
                "Parts of an image are masked, which a SparseFormer cannot leave out; resize images to the tower's "
                "size instead of padding them."
            )
        outputs = super().forward(pixel_values, output_rois=True, return_dict=True, **kwargs)
        shares = shares_of_tokens(outputs.rois[-1], *self.feature_maps.size_of(pixel_values))
        outputs.last_hidden_state = self.on_grid(outputs.last_hidden_state, shares)
        if outputs.hidden_states is not None:
            # Of layers that were not asked for there is None.
            outputs.hidden_states = tuple(
                None if states is None else self.on_grid(states, shares) for states in outputs.hidden_states
            )
        if not output_rois:
            outputs.rois = outputs.sampling_points = None
        return outputs

    def on_grid(self, states: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """States of tokens, `(batch, prefix + tokens, hidden_size)`, as `(batch, front + cells, hidden_size)`, given
        the share of each token in each cell, `(batch, tokens, rows, columns)`."""
        prefix, tokens = states.tensor_split([self.config.num_prefix_tokens], dim=1)
        front = prefix[:, : self.num_front_tokens]
        mean = states.mean(dim=1, keepdim=True).expand(-1, self.num_front_tokens - front.shape[1], -1)
        return torch.cat([front, mean, spread(tokens, shares).flatten(2).mT], dim=1)


class PatchSparseFormerGridTower(SparseFormerGridTower, PatchSparseFormerModel):
    """`SparseFormerGridTower` whose tokens embed patches."""

    config: PatchSparseFormerConfig


class GridTowerConfigMixin(AlteredConfigMixin):
    """A configuration of Transformers with a SparseFormer as its vision tower.

    `vision_config` is that of the tower that was there before, on which all else counts, but for its `patch_size`: it
    is the size of a cell of the grid.

    Args:
        tower_config (`SparseFormerConfig`, `PatchSparseFormerConfig` or `dict`, *optional*): The vision tower.
        tower_front_tokens (`int`, *optional*, defaults to 0): Tokens before those of cells, as the tower had before.
    """

    def __post_init__(self, tower_config=None, tower_front_tokens: int = 0, **kwargs):
        self.tower_config = read_vision_config({} if tower_config is None else tower_config)
        self.tower_front_tokens = tower_front_tokens
        super().__post_init__(**kwargs)

    @property
    def image_grid(self) -> int:
        """Rows, and columns, of the grid."""
        return grid_of(self)

    @property
    def tile_seq_length(self) -> int:
        """Tokens that the language model reads of a grid, where it cuts images into several of each."""
        return (self.image_grid // cells_of_token(self)) ** 2


def grid_of(config: PreTrainedConfig) -> int:
    """Rows, and columns, of the grid that such a model, with its own tower or another, counts on."""
    vision = config.vision_config
    return pair(vision.image_size)[0] // pair(vision.patch_size)[0]


def cells_of_token(config: PreTrainedConfig) -> int:
    """Rows, and columns, of cells that such a model puts into a token."""
    if (tokens := getattr(config, "mm_tokens_per_image", None)) is not None:
        return grid_of(config) // int(tokens**0.5)
    return getattr(config, "scale_factor", None) or round(1 / getattr(config, "downsample_ratio", 1))


def part_name(model: nn.Module, names: tuple[str, ...]) -> str | None:
    """Return the name that a model gives its tower (`TOWERS`) or the part after it (`CONNECTORS`)."""
    return next((name for name in names if name in model._modules), None)


class GridTowerMixin(AlteredModel):
    """A model of Transformers with a SparseFormer as its vision tower; `swap_vision_tower` puts one together."""

    def __init__(self, config):
        config.tower_config.validate()
        check_feature_layers(getattr(config, "vision_feature_layer", -1), config.tower_config)
        super().__init__(config)
        parts = self.base_model
        setattr(parts, part_name(parts, TOWERS), make_tower(config))
        self.post_init()

    @property
    def grid_tower(self) -> SparseFormerGridTower:
        """The vision tower, by whatever name."""
        return getattr(self.base_model, part_name(self.base_model, TOWERS))

    def set_num_tokens(self, num_tokens: int | None):
        """Choose the vision tower's latent tokens of all calls, as of a SparseFormer alone. The grid, and so the
        number of image tokens, stays as it is."""
        self.grid_tower.set_num_tokens(num_tokens)


def make_tower(config: PreTrainedConfig) -> SparseFormerGridTower:
    """The tower of such a model, with fresh weights."""
    return SparseFormerGridTower._from_config(config.tower_config, num_front_tokens=config.tower_front_tokens)


def grid_class(host: type) -> type | None:
    """The class for a class of Transformers with another tower, if there is one."""
    name = f"{_PREFIX}{host.__name__}"
    return __getattr__(name) if _host_of(name) is host else None


def _host_of(name: str) -> type | None:
    """The class of Transformers that a class of that name is made of."""
    family, _, host = name.partition(_PREFIX)
    known = {f"{vlm}{suffix}" for vlm in VLMS for suffix in ("Config", "Model", "ForConditionalGeneration")}
    return getattr(transformers, host) if not family and host in known else None


def __getattr__(name: str):
    """Classes for Transformers' models, made when first asked for: `SparseFormerGemma3Config`,
    `SparseFormerGemma3Model`, `SparseFormerGemma3ForConditionalGeneration` and so on."""
    host = _host_of(name)
    if host is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    body = {"__module__": __name__, "__doc__": f"`{host.__name__}` with a SparseFormer as its vision tower."}
    if issubclass(host, PreTrainedConfig):
        body |= {
            "model_type": f"sparseformer_{host.model_type}",
            "sub_configs": {**host.sub_configs, "tower_config": SparseFormerConfig},
        }
        made = type(name, (GridTowerConfigMixin, host), body)
    else:
        config_name = f"{_PREFIX}{host.config_class.__name__}"
        family = config_name.removesuffix("Config")
        body |= {
            "config_class": globals().get(config_name) or __getattr__(config_name),
            "auto_classes": {
                "AutoModel": f"{family}Model",
                "AutoModelForImageTextToText": f"{family}ForConditionalGeneration",
            },
        }
        made = type(name, (GridTowerMixin, host), body)
    return globals().setdefault(name, made)
