"""Heads and loss for semantic segmentation from a few tokens (section 4.1 of Gao et al., *Bootstrapping SparseFormers
from Vision Foundation Models*, CVPR 2024)."""

import torch
import torch.nn.functional as F
from torch import nn

from .layers import MLP, SelfAttention, in_float32


# Width and number of transformer blocks of the paper's head.
HIDDEN_SIZE = 256
NUM_BLOCKS = 2
# Label of pixels that the loss ignores.
IGNORED = 255


def geometric_bias(rois: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return the logarithm of a Gaussian for each token. The center of the Gaussian is the center of the token's RoI.

    The paper specifies only "the Gaussian-like form w.r.t. token RoIs". Our standard deviations are half the RoI's
    width and half its height. In the middle of a RoI's left edge, the logarithm is then -1/2. One RoI width farther
    left, it is -4.5. Standard deviations are at least one cell, so that a RoI that has shrunk to a point keeps a
    weight in its cell.

    Args:
        rois (`torch.Tensor` of shape `(batch, tokens, 4)`): Left, top, right, bottom, 0 to 1 across the image.
        height, width (`int`): Size of the map in cells.

    Returns:
        Logarithms, at most 0, `(batch, tokens, height, width)` float32.
    """
    left, top, right, bottom = in_float32(rois).unsqueeze(-1).unbind(-2)

    def along(low: torch.Tensor, high: torch.Tensor, cells: int) -> torch.Tensor:
        centers = (torch.arange(cells, device=rois.device) + 0.5) / cells
        deviation = (0.5 * (high - low).abs()).clamp(min=1 / cells)
        distance = (centers - 0.5 * (low + high)) / deviation
        # The clamp keeps the result finite for RoIs far outside the image.
        return -0.5 * distance.clamp(-1e3, 1e3).square()

    return along(top, bottom, height).unsqueeze(-1) + along(left, right, width).unsqueeze(-2)


class SegmentationLayer(nn.Module):
    """Transformer block of `SegmentationHead`."""

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
    """Head that distributes tokens' class scores over the cells of a map by single-head attention (equations 6 and 7).

    The paper specifies the width (256), two transformer blocks, a linear classifier and a predictive bias. The
    predictive bias is a score of each token, and is added to the token's attention scores. A 3 x 3 convolution
    computes the queries from the stem's map. We chose the other details. Blocks are pre-norm, with 64 channels per
    head and an MLP of four times the width. A LayerNorm follows the blocks. The linear layers `key` and `importance`
    (for the predictive bias) have no bias parameters. In each cell, such a parameter would add the same value to the
    scores of all tokens, and this value would not change the softmax over the tokens.
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
        """
        Args:
            tokens (`torch.Tensor` of shape `(batch, tokens, hidden_size)`): Latent tokens.
            rois (`torch.Tensor` of shape `(batch, tokens, 4)`): RoIs of the latent tokens.
            features (`torch.Tensor` of shape `(batch, stem_channels, height, width)`): Feature map of the stem.

        Returns:
            Logits, `(batch, num_labels, height, width)`, and attention weights, `(batch, tokens, height, width)`. The
            attention weights sum to 1 over the tokens.
        """
        tokens = self.reduction(tokens)
        for block in self.blocks:
            tokens = block(tokens, **kwargs)
        tokens = self.layernorm(tokens)
        queries = self.query(features.to(tokens.dtype))
        size = queries.shape[-2:]
        keys = self.key(tokens) * tokens.shape[-1] ** -0.5
        # Tokens are classified before they are distributed over cells. If they were distributed first, the input of
        # the classifier would have `HIDDEN_SIZE` channels for each cell.
        scores = in_float32(keys @ queries.flatten(2) + self.importance(tokens))
        weights = (scores + geometric_bias(rois, *size).flatten(2)).softmax(1).to(tokens.dtype)
        logits = self.classifier(tokens).mT @ weights
        return logits.unflatten(-1, size), weights.unflatten(-1, size)


class LinearDecoder(nn.Module):
    """Linear classifier for each cell of the concatenated feature maps."""

    def __init__(self, config):
        super().__init__()
        self.classifier = nn.Linear(len(config.out_features) * config.hidden_size, config.num_labels)

    def forward(self, maps: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return logits, `(batch, num_labels, rows, columns)`, for maps `(batch, hidden_size, rows, columns)`. All
        maps are first resized to the size of the last map."""
        size = maps[-1].shape[-2:]
        maps = [
            features if features.shape[-2:] == size else F.interpolate(features, size, mode="bilinear")
            for features in maps
        ]
        return self.classifier(torch.cat(maps, dim=1).flatten(2).mT).mT.unflatten(-1, size)


def semantic_segmentation_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over labeled pixels, or 0 if no pixel is labeled. With one class, the loss is
    binary cross-entropy.

    Args:
        logits (`torch.Tensor` of shape `(batch, num_labels, height, width)`):
            Logits of any resolution. They are interpolated to the resolution of the labels.
        labels (`torch.Tensor` of shape `(batch, height, width)`): Class indices. Pixels with index 255 are ignored.
    """
    labels = labels.to(logits.device).long()
    is_labeled = labels != IGNORED
    logits = F.interpolate(in_float32(logits), labels.shape[-2:], mode="bilinear", align_corners=False)
    if logits.shape[1] == 1:
        losses = F.binary_cross_entropy_with_logits(logits[:, 0], (labels == 1).to(logits.dtype), reduction="none")
        return (losses * is_labeled).sum() / is_labeled.sum().clamp(min=1)
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / is_labeled.sum().clamp(min=1)
