"""Promises about images that were not seen, made from images that were: Learn then Test.

Angelopoulos, Bates, Candès, Jordan and Lei, *Learn then Test: Calibrating Predictive Algorithms to Achieve Risk
Control* (2021). Conformal risk control (Angelopoulos et al. 2022) bounds the risk on average over calibrations, so
that about every other calibration may exceed it; this one exceeds it in at most one of twenty, with a certainty of
95 %.
"""

import math
from collections.abc import Mapping, Sequence

import torch


# Confidences that are tried, from the one at which all images have the last look.
CONFIDENCES = [1 - index / 1_000 for index in range(1_001)]


def most_wrong(images: int, risk: float, certainty: float) -> int:
    """The largest number of wrong answers among `images` with which the risk is at most `risk`, with that certainty.

    If the risk were larger, so few wrong answers would be found with a probability of 1 - certainty at most (the exact
    binomial tail, section 2.2 of the paper). -1 if even no wrong answer is not enough."""
    wrong, tail = -1, 0.0
    while wrong < images:
        count = wrong + 1
        choices = math.lgamma(images + 1) - math.lgamma(count + 1) - math.lgamma(images - count + 1)
        tail += math.exp(choices + count * math.log(risk) + (images - count) * math.log1p(-risk))
        if tail > 1 - certainty:
            break
        wrong = count
    return wrong


def stop_when_sure(logits: Mapping[int, torch.Tensor], confidence: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and numbers of looks, `(images,)` int64 each, with which `classify_adaptively` ends, from the logits of
    all looks.

    Args:
        logits (mapping of `int` to `torch.Tensor`): By number of tokens, in the order of the looks, `(images,
            labels)`.
        confidence (`float`): Probability from which on an image is done.
    """
    labels = looks = None
    for look, found in enumerate(logits.values(), 1):
        scores, best = found.float().softmax(-1).max(-1)
        if labels is None:
            labels, looks, left = best, torch.ones_like(best), torch.ones_like(best, dtype=torch.bool)
        labels, looks = torch.where(left, best, labels), torch.where(left, look, looks)
        left = left & (scores < confidence)
    return labels, looks


def choose_confidence(
    logits: Mapping[int, torch.Tensor],
    reference: torch.Tensor,
    risk: float,
    certainty: float,
    confidences: Sequence[float] = CONFIDENCES,
) -> float | None:
    """The least confidence at which, with that certainty, labels differ from the reference for at most a share `risk`
    of images that are drawn as these were; `None` if there is none.

    Args:
        logits: As in `stop_when_sure`.
        reference (`torch.Tensor`): `(images,)`, the labels that count.
        risk, certainty (`float`): Above 0 and below 1.
        confidences (sequence of `float`, *optional*): Confidences to try, falling; they have to be chosen before
            images are looked at.
    """
    wrong = torch.stack([stop_when_sure(logits, confidence)[0] != reference for confidence in confidences])
    last = last_safe(wrong, risk, certainty)
    return None if last is None else confidences[last]


def last_safe(wrong: torch.Tensor, risk: float, certainty: float) -> int | None:
    """The last choice before the first that fails, `None` if that is the first one (fixed sequence testing, section
    2.3 of the paper). Trying many choices in this order costs no certainty.

    Args:
        wrong (`torch.Tensor`): `(choices, images)` bool, the safest choice first.
        risk, certainty (`float`): As in `choose_confidence`.
    """
    failed = wrong.sum(1) > most_wrong(wrong.shape[1], risk, certainty)
    first = int(failed.int().argmax()) if failed.any() else len(wrong)
    return first - 1 if first else None
