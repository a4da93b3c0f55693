"""Feature maps from the tokens of a SparseFormer. Each grid cell gets a weighted mean of the tokens whose RoIs cover
the cell. Optional convolutions (`MapUpsampler`) add details of the image."""

import torch
import torch.nn.functional as F
from torch import nn

from ..configuration.configuration_base import pair
from .layers import in_float32, resize
from .segmentation_head import geometric_bias


# `MapUpsampler` scales the image down if the side of a grid cell is longer than this number of pixels.
MOST_POINTS = 8


def assignment_weights(rois: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return the weight of each token in each cell of a feature map.

    Each token spreads a weight of 1 evenly over its RoI. The weights in each cell are then normalized to a sum of 1.
    If no RoI covers a cell, the cell's weights are the softmax of `geometric_bias`. RoIs get no gradient.

    Args:
        rois (`torch.Tensor` of shape `(batch, tokens, 4)`): Left, top, right, bottom, 0 to 1 across the image.
        height, width (`int`): Size of the feature map in cells.

    Returns:
        Weights, `(batch, tokens, height, width)` float32. The sum over the tokens is 1.
    """
    rois = in_float32(rois).detach()
    left, top, right, bottom = rois.unsqueeze(-1).unbind(-2)

    def along(one: torch.Tensor, other: torch.Tensor, cells: int) -> torch.Tensor:
        """Return the fraction of each RoI's side that lies in each cell of an axis, `(batch, tokens, cells)`."""
        low = torch.minimum(one, other) * cells
        high = torch.maximum(one, other) * cells
        starts = torch.arange(cells, device=rois.device)
        within = (torch.minimum(high, starts + 1) - torch.maximum(low, starts)).clamp(min=0)
        return within / (high - low).clamp(min=1e-6)

    weights = along(top, bottom, height).unsqueeze(-1) * along(left, right, width).unsqueeze(-2)
    sums = weights.sum(1, keepdim=True)
    nearest = geometric_bias(rois, height, width).softmax(1)
    # If the weights in a cell sum to at most 1e-6, the sum is a rounding error, so the cell counts as not covered.
    return torch.where(sums > 1e-6, weights / sums.clamp(min=1e-6), nearest)


def scatter_to_grid(states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return a feature map, `(batch, channels, height, width)`, of weighted means of tokens, `(batch, tokens,
    channels)`. `weights` is the result of `assignment_weights`."""
    return (states.mT @ weights.flatten(2).to(states.dtype)).unflatten(-1, weights.shape[-2:])


def place_in_token(rois: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return each grid cell's position relative to the weighted mean RoI of the tokens that cover the cell.

    Args:
        rois (`torch.Tensor` of shape `(batch, tokens, 4)`): RoIs of the tokens.
        weights (`torch.Tensor` of shape `(batch, tokens, height, width)`): Result of `assignment_weights`.

    Returns:
        `(batch, 4, height, width)`. Channels 0 and 1 are the x and y offset of the cell's center from the center of
        the mean RoI, in units of the mean RoI's size. Channels 2 and 3 are log2 of the mean RoI's width and height in
        cells.
    """
    rows, columns = weights.shape[-2:]
    left, top, right, bottom = scatter_to_grid(in_float32(rois).detach(), weights).unbind(1)
    offsets = []
    sizes = []
    for low, high, cells, shape in ((left, right, columns, (1, 1, -1)), (top, bottom, rows, (1, -1, 1))):
        size = ((high - low).abs() * cells).clamp(1e-3, 1e3)
        centers = torch.arange(cells, device=rois.device).view(shape) + 0.5
        offsets.append(((centers - (low + high) * 0.5 * cells) / size).clamp(-2, 2))
        sizes.append(size.log2())
    return torch.stack([*offsets, *sizes], dim=1)


class MapUpsampler(nn.Module):
    """Residual convolutions that add details of the image to a feature map.

    The inputs are the map, the pixels of each grid cell and the position of each cell (`place_in_token`). `cell` is
    the height and width of a cell in pixels. Before training, the output equals the input map. docs/dense_features.md
    lists the sources of this design.
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
        """Return a refined feature map with the shape of `features`, `(batch, hidden_size, rows, columns)`. `places`
        is the result of `place_in_token`."""
        size = tuple(cells * points for cells, points in zip(features.shape[-2:], self.points, strict=True))
        pixel_values = resize(pixel_values, size)
        # Features are normalized, because different encoder layers have features of different scales.
        channels_last = features.permute(0, 2, 3, 1)
        normed = F.layer_norm(channels_last, channels_last.shape[-1:]).permute(0, 3, 1, 2)
        hidden = self.read(normed) + self.look(pixel_values.to(features.dtype)) + self.place(places.to(features.dtype))
        for convolution in self.convolutions:
            hidden = hidden + convolution(F.gelu(hidden))
        return features + self.out_proj(F.gelu(hidden))


class FeatureMaps(nn.Module):
    """Module that computes feature maps of encoder layers from their hidden states and from RoIs."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.stride = pair(config.feature_stride)
        self.num_prefix_tokens = config.num_prefix_tokens
        scales = config.feature_scales or [1] * len(config.out_features)
        self.scales = dict(zip(config.out_features, scales, strict=True))
        self.upsamplers = nn.ModuleDict()
        if config.upsampler_hidden_size:
            for name, scale in self.scales.items():
                self.upsamplers[name] = MapUpsampler(config, tuple(side / scale for side in self.stride))

    def size_of(self, pixel_values: torch.Tensor, scale: float = 1) -> tuple[int, int]:
        """Return the number of rows and the number of columns of the feature map. `scale` multiplies both numbers.
        Raise a ValueError if the images are smaller than one cell (`config.feature_stride`)."""
        height, width = pixel_values.shape[-2:]
        rows, columns = self.stride
        if height < rows or width < columns:
            raise ValueError(
                f"`pixel_values` has images of {height} x {width} pixels, expected at least {rows} x {columns}, a "
                "cell of the feature map; resize them."
            )
        cells = (height // rows, width // columns)
        return cells if scale == 1 else tuple(max(int(count * scale), 1) for count in cells)

    def forward(
        self,
        hidden_states: tuple[torch.Tensor, ...],
        rois: torch.Tensor,
        pixel_values: torch.Tensor,
        norm: nn.Module,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """
        Args:
            hidden_states (`tuple` of `torch.Tensor` of shape `(batch, prefix + tokens, hidden_size)`):
                Input of the first encoder block and outputs of all encoder blocks.
            rois (`torch.Tensor` of shape `(batch, tokens, 4)`): RoIs of the tokens.
            pixel_values (`torch.Tensor` of shape `(batch, num_channels, height, width)`): The images.
            norm (`nn.Module`): Norm that is applied to the hidden states.

        Returns:
            Feature maps of the layers in `config.out_features`, each `(batch, hidden_size, rows, columns)`, and the
            `assignment_weights` of the last map.
        """
        maps = []
        weights_by_scale = {}
        for name, index in zip(self.config.out_features, self.config.out_indices, strict=True):
            # Layers that were chosen after the module was made have neither a scale nor an upsampler.
            scale = self.scales.get(name, 1)
            if scale not in weights_by_scale:
                weights_by_scale[scale] = assignment_weights(rois, *self.size_of(pixel_values, scale))
            weights = weights_by_scale[scale]
            states = hidden_states[index][:, self.num_prefix_tokens :]
            features = scatter_to_grid(norm(states), weights)
            if name in self.upsamplers:
                features = self.upsamplers[name](features, pixel_values, place_in_token(rois, weights))
            maps.append(features)
        return tuple(maps), weights
