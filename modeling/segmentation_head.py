"""Dense prediction from a few tokens: section 4.1 of Gao et al., *Bootstrapping SparseFormers from Vision Foundation
Models* (CVPR 2024), and the loss of semantic segmentation."""

import torch
import torch.nn.functional as F
from torch import nn

from .layers import MLP, SelfAttention, in_float32


# Width and number of transformer blocks of the head.
HIDDEN_SIZE = 256
NUM_BLOCKS = 2
# Label of pixels that do not count.
IGNORED = 255


def geometric_bias(rois: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Log of a Gaussian over the map for each token, centered in its RoI, with half the RoI's width and height for
    standard deviations: -1/2 in the middle of an edge, -4.5 one RoI further out.

    The paper says "in the Gaussian-like form w.r.t. token RoIs"; the deviations are our choice. They are at least one
    cell of the map, so that a token whose RoI has shrunk to a point still speaks for the cell it lies in. RoIs are
    `(batch, tokens, 4)`, 0 to 1 across the image; the result is `(batch, tokens, height, width)` float32, at most 0.
    """
    left, top, right, bottom = in_float32(rois).unsqueeze(-1).unbind(-2)

    def along(low: torch.Tensor, high: torch.Tensor, cells: int) -> torch.Tensor:
        """`(batch, tokens, cells)`."""
        centers = (torch.arange(cells, device=rois.device) + 0.5) / cells
        deviation = (0.5 * (high - low).abs()).clamp(min=1 / cells)
        distance = (centers - 0.5 * (low + high)) / deviation
        # RoIs far outside the image stay finite.
        return -0.5 * distance.clamp(-1e3, 1e3).square()

    return along(top, bottom, height).unsqueeze(-1) + along(left, right, width).unsqueeze(-2)


class SegmentationLayer(nn.Module):
    """A transformer encoder block at the width of the head."""

    def __init__(self, config):
        super().__init__()
        hidden_size = HIDDEN_SIZE
        self.layernorm_before = nn.LayerNorm(hidden_size, eps=config.layer_norm_eps)
        self.attention = SelfAttention(config, hidden_size, hidden_size // 64)
        self.layernorm_after = nn.LayerNorm(hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(hidden_size, 4 * hidden_size, "gelu")

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        hidden_states = hidden_states + self.attention(self.layernorm_before(hidden_states), **kwargs)[0]
        return hidden_states + self.mlp(self.layernorm_after(hidden_states))


class SegmentationHead(nn.Module):
    """Class scores of each token, spread over the map by single-head attention (equations 6 and 7).

    The paper gives the width (256), two encoder blocks, linear classifier and bias, and a 3 x 3 convolution of the
    early convolution's map for the queries. It leaves open, and here is: blocks as those of the encoder, with 64
    channels a head and an MLP four times as wide; a LayerNorm after them, which such blocks need; keys by a linear
    layer; no constants in the keys and the predictive bias, which the softmax would cancel.
    """

    def __init__(self, config):
        super().__init__()
        hidden_size = HIDDEN_SIZE
        self.reduction = nn.Linear(config.hidden_size, hidden_size)
        self.blocks = nn.ModuleList(SegmentationLayer(config) for _ in range(NUM_BLOCKS))
        self.layernorm = nn.LayerNorm(hidden_size, eps=config.layer_norm_eps)
        self.classifier = nn.Linear(hidden_size, config.num_labels)
        self.query = nn.Conv2d(config.stem_channels, hidden_size, kernel_size=3, padding=1)
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)
        self.importance = nn.Linear(hidden_size, 1, bias=False)

    def forward(
        self, tokens: torch.Tensor, rois: torch.Tensor, features: torch.Tensor, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens `(batch, tokens, hidden_size)`, without [CLS], their RoIs and the stem's map, `(batch, stem_channels,
        height, width)`, to logits `(batch, num_labels, height, width)` and the share of each token in each cell,
        `(batch, tokens, height, width)`, which sums to 1 over the tokens."""
        tokens = self.reduction(tokens)
        for block in self.blocks:
            tokens = block(tokens, **kwargs)
        tokens = self.layernorm(tokens)
        queries = self.query(features.to(tokens.dtype))
        size = queries.shape[-2:]
        keys = self.key(tokens) * tokens.shape[-1] ** -0.5
        # The largest tensors have one value for each token and cell, not one for each channel as well.
        scores = in_float32(keys @ queries.flatten(2) + self.importance(tokens))
        shares = (scores + geometric_bias(rois, *size).flatten(2)).softmax(1).to(tokens.dtype)
        logits = self.classifier(tokens).mT @ shares
        return logits.unflatten(-1, size), shares.unflatten(-1, size)


class LinearDecoder(nn.Module):
    """Class scores of each cell of feature maps, side by side, by a linear layer."""

    def __init__(self, config):
        super().__init__()
        self.classifier = nn.Linear(len(config.out_features) * config.hidden_size, config.num_labels)

    def forward(self, maps: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """`(batch, hidden_size, rows, columns)` each to `(batch, num_labels, rows, columns)`, of the last's size."""
        size = maps[-1].shape[-2:]
        maps = [
            features if features.shape[-2:] == size else F.interpolate(features, size, mode="bilinear")
            for features in maps
        ]
        return self.classifier(torch.cat(maps, dim=1).flatten(2).mT).mT.unflatten(-1, size)


def semantic_segmentation_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over the pixels that count, 0 if none does; with a single class, binary cross entropy.

    Args:
        logits (`torch.Tensor`): `(batch, num_labels, height, width)`, at any resolution; interpolated to the labels'.
        labels (`torch.Tensor`): `(batch, height, width)` class numbers; 255 does not count.
    """
    labels = labels.to(logits.device).long()
    counts = labels != IGNORED
    logits = F.interpolate(in_float32(logits), labels.shape[-2:], mode="bilinear", align_corners=False)
    if logits.shape[1] == 1:
        losses = F.binary_cross_entropy_with_logits(logits[:, 0], (labels == 1).to(logits.dtype), reduction="none")
        return (losses * counts).sum() / counts.sum().clamp(min=1)
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / counts.sum().clamp(min=1)
