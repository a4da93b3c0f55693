"""The number of tokens that a command's model computes with: a count, or for each image as many as it needs."""

import torch
from torch import nn
from transformers import PreTrainedModel

from .common.choices import CALIBRATED
from .common.exported import ExportedModule
from .common.macs import macs_of
from .common.num_tokens import WithTokens
from .configuration.configuration_sparseformer_base import is_sparseformer


def choose_tokens(model: PreTrainedModel, num_tokens: int | None, confidence: float | str | None) -> float | None:
    """Let a model compute with so many tokens.

    Args:
        model (`PreTrainedModel`): The model.
        num_tokens (`int`, *optional*): Latent tokens.
        confidence (`float` or `str`, *optional*): Confidence from which on an image needs no more tokens, or
            `CALIBRATED`.

    Returns:
        `float`, *optional*: The confidence; for `CALIBRATED`, the one that was found.

    Raises:
        ValueError: if the model is no SparseFormer or has not so many tokens; with `confidence`, if it is made for one
            count alone or was not calibrated.
    """
    if isinstance(model, ExportedModule):
        if confidence is not None:
            raise ValueError("--confidence looks at some images again, which an exported model does not do.")
        if num_tokens is not None:
            model.set_num_tokens(num_tokens)
        return None
    # Of a CLIP or a LLaVA with a SparseFormer, its tokens.
    if not hasattr(model, "set_num_tokens") and (num_tokens is not None or confidence is not None):
        option = "--confidence" if num_tokens is None else "--num-tokens"
        raise ValueError(f"{option} is for SparseFormers, whose tokens can be chosen; got a {type(model).__name__}.")
    if num_tokens is not None:
        model.set_num_tokens(num_tokens)
    if confidence is not None:
        check_elastic(model, "--confidence")
    if confidence != CALIBRATED:
        return confidence
    if found := model.config.holding_calibration:
        return found["confidence"]
    raise ValueError(
        f"--confidence {CALIBRATED}: the model was not calibrated for {model.config.default_num_tokens} tokens; "
        "frugalvit calibrate MODEL --dataset PHOTOGRAPHS --output FOLDER does so."
    )


def check_elastic(model: PreTrainedModel, purpose: str):
    """Raise a ValueError if a model is no SparseFormer for several counts of tokens."""
    if not is_sparseformer(model.config):
        raise ValueError(f"{purpose} is for SparseFormers, whose tokens can be chosen; got a {type(model).__name__}.")
    if len(model.config.trained_token_counts) == 1:
        raise ValueError(
            f"{purpose} needs a model for several counts of tokens, and this one is made for "
            f"{model.config.num_latent_tokens} alone; frugalvit bootstrap --student MODEL --elastic-token-counts … "
            "makes it one."
        )


class Adaptive(nn.Module):
    """A classifier that spends few tokens on images whose class is sure, and keeps account of them.

    Args:
        model (`SparseFormerForImageClassification`): The classifier.
        confidence (`float`): Probability of the likeliest class from which on it is sure.
    """

    def __init__(self, model: PreTrainedModel, confidence: float):
        super().__init__()
        self.model, self.confidence = model, confidence
        self.images_by_count: dict[int, int] = {}

    def forward(self, pixel_values: torch.Tensor):
        """Images to an output with `logits` and `num_tokens`."""
        outputs = self.model.classify_adaptively(pixel_values, self.confidence)
        for count in outputs.num_tokens.tolist():
            self.images_by_count[count] = self.images_by_count.get(count, 0) + 1
        return outputs

    def account(self) -> dict[str, float]:
        """Averages over images: the tokens of the last look at an image, and the multiply-accumulates of all looks."""
        images, left, tokens, macs = sum(self.images_by_count.values()), 0, 0, 0
        # The last count sees the images that are left, the one before it those and its own, and so on.
        for count in reversed(self.model.config.adaptive_token_counts):
            here = self.images_by_count.get(count, 0)
            left, tokens = left + here, tokens + count * here
            macs += left * macs_of(WithTokens(self.model, count), self.model.config.image_size)
        return {"mean_num_tokens": tokens / images, "mean_macs": macs / images}
