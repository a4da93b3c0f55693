"""Feature maps from a SparseFormer's tokens: a token's state goes to the cells that its RoI covers, and a few
convolutions that see the image add the differences from cell to cell."""

import torch
import torch.nn.functional as F
from torch import nn

from ..configuration.configuration_base import pair
from .layers import in_float32, resize
from .segmentation_head import geometric_bias


# Pixels along a cell's side that an upsampler looks at, at most.
MOST_POINTS = 8


def assignment_weights(rois: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The share of each token in each cell of a map.

    A token has one vote, spread evenly over its RoI. Cells that no RoI covers belong to those nearest, as in the
    segmentation head of the paper (`geometric_bias`). No gradient flows into the RoIs.
    RoIs are `(batch, tokens, 4)` as left, top, right, bottom, 0 to 1 across the image; the result, of a map's height
    and width in cells, is `(batch, tokens, height, width)` in float32 and sums to 1 over the tokens.
    """
    rois = in_float32(rois).detach()
    left, top, right, bottom = rois.unsqueeze(-1).unbind(-2)

    def along(one: torch.Tensor, other: torch.Tensor, cells: int) -> torch.Tensor:
        """The share of an interval that lies in each cell, `(batch, tokens, cells)`."""
        low = torch.minimum(one, other) * cells
        high = torch.maximum(one, other) * cells
        starts = torch.arange(cells, device=rois.device)
        within = (torch.minimum(high, starts + 1) - torch.maximum(low, starts)).clamp(min=0)
        return within / (high - low).clamp(min=1e-6)

    votes = along(top, bottom, height).unsqueeze(-1) * along(left, right, width).unsqueeze(-2)
    sums = votes.sum(1, keepdim=True)
    nearest = geometric_bias(rois, height, width).softmax(1)
    # What is less is a rounding.
    return torch.where(sums > 1e-6, votes / sums.clamp(min=1e-6), nearest)


def scatter_to_grid(states: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Spread states of tokens, `(batch, tokens, channels)`, over the cells where they have a share, `(batch, tokens,
    height, width)`: to `(batch, channels, height, width)`."""
    return (states.mT @ shares.flatten(2).to(states.dtype)).unflatten(-1, shares.shape[-2:])


def place_in_token(rois: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The place of each cell in the tokens to which it belongs, given their RoIs, `(batch, tokens, 4)`, and shares,
    see `assignment_weights`: `(batch, 4, height, width)`, the offset of the cell's center from the token's, x and y,
    in units of the token's size, and the log of that size in cells, x and y. Where tokens share a cell, their mean.
    """
    rows, columns = shares.shape[-2:]
    left, top, right, bottom = scatter_to_grid(in_float32(rois).detach(), shares).unbind(1)
    found = []
    for low, high, cells, shape in ((left, right, columns, (1, 1, -1)), (top, bottom, rows, (1, -1, 1))):
        size = ((high - low).abs() * cells).clamp(1e-3, 1e3)
        centers = torch.arange(cells, device=rois.device).view(shape) + 0.5
        found.append((((centers - (low + high) * 0.5 * cells) / size).clamp(-2, 2), size.log2()))
    return torch.stack([found[0][0], found[1][0], found[0][1], found[1][1]], dim=1)


class MapUpsampler(nn.Module):
    """Adds to a map the details that its cells, `cell` pixels high and wide, show and their tokens do not hold.

    Residual convolutions of the map, the pixels of each cell and the cell's place in its token; nothing is added
    before training. docs/dense_features.md says which ideas are whose.
    """

    def __init__(self, config, cell: tuple[float, float]):
        super().__init__()
        width = config.upsampler_hidden_size
        self.points = tuple(min(max(round(side), 1), MOST_POINTS) for side in cell)
        self.read = nn.Conv2d(config.hidden_size, width, 1)
        self.look = nn.Conv2d(config.num_channels, width, self.points, stride=self.points)
        self.place = nn.Conv2d(4, width, 1)
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.out_proj = nn.Conv2d(width, config.hidden_size, 1)

    def forward(self, features: torch.Tensor, pixel_values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """A map `(batch, hidden_size, height, width)`, the image and `place_in_token` to such a map."""
        size = tuple(cells * points for cells, points in zip(features.shape[-2:], self.points, strict=True))
        pixel_values = resize(pixel_values, size)
        # Layers differ in how large their features are.
        channels_last = features.permute(0, 2, 3, 1)
        normed = F.layer_norm(channels_last, channels_last.shape[-1:]).permute(0, 3, 1, 2)
        hidden = self.read(normed) + self.look(pixel_values.to(features.dtype)) + self.place(places.to(features.dtype))
        for convolution in self.convolutions:
            hidden = hidden + convolution(F.gelu(hidden))
        return features + self.out_proj(F.gelu(hidden))


class FeatureMaps(nn.Module):
    """Maps of the layers that a configuration names, each with an upsampler where it has one."""

    def __init__(self, config):
        super().__init__()
        self.stride = pair(config.feature_stride)
        self.stage_names = tuple(config.stage_names)
        self.num_prefix_tokens = config.num_prefix_tokens
        scales = config.feature_scales or [1] * len(config.out_features)
        self.scales = dict(zip(config.out_features, scales, strict=True))
        self.upsamplers = nn.ModuleDict()
        if config.upsampler_hidden_size:
            for name, scale in self.scales.items():
                self.upsamplers[name] = MapUpsampler(config, tuple(side / scale for side in self.stride))

    def size_of(self, pixel_values: torch.Tensor, scale: float = 1) -> tuple[int, int]:
        """Height and width of a map of images. Raise a ValueError if the images are smaller than a cell of the
        teacher's grid."""
        height, width = pixel_values.shape[-2:]
        rows, columns = self.stride
        if height < rows or width < columns:
            raise ValueError(
                f"Got an image of {height} x {width} pixels, expected at least {rows} x {columns}, a cell of the "
                "feature map. Resize it first."
            )
        cells = (height // rows, width // columns)
        return cells if scale == 1 else tuple(max(int(count * scale), 1) for count in cells)

    def forward(
        self,
        hidden_states: tuple[torch.Tensor, ...],
        rois: torch.Tensor,
        pixel_values: torch.Tensor,
        norm: nn.Module,
        names: list[str],
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return the maps, `(batch, hidden_size, rows, columns)`, of the named layers, by the norm of their tokens,
        `(batch, prefix + tokens, hidden_size)` before the first block of the encoder and after each, and the share of
        each token in each cell of the last. Layers that the configuration does not name have no scale or upsampler."""
        maps = []
        shares_by_scale = {}
        for name in names:
            scale = self.scales.get(name, 1)
            if scale not in shares_by_scale:
                shares_by_scale[scale] = assignment_weights(rois, *self.size_of(pixel_values, scale))
            shares = shares_by_scale[scale]
            states = hidden_states[self.stage_names.index(name)][:, self.num_prefix_tokens :]
            features = scatter_to_grid(norm(states), shares)
            if name in self.upsamplers:
                features = self.upsamplers[name](features, pixel_values, place_in_token(rois, shares))
            maps.append(features)
        return tuple(maps), shares
