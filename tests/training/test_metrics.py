"""Test metrics against brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frugalvit.training.metrics import SegmentationScores, TopKAccuracy


@pytest.mark.parametrize(("k", "dtype"), [(1, np.float32), (3, np.float32), (5, np.float32), (3, np.uint8)])
def test_accuracy_against_brute_force(k, dtype):
    numbers = np.random.default_rng(0)
    # Each image's scores are distinct and include 0. If unsigned integers were negated, 0 would rank first.
    scores = numbers.permuted(np.tile(np.arange(7), (60, 1)), axis=1).astype(dtype)
    labels = numbers.integers(7, size=60)
    metric = TopKAccuracy(k)
    for start in range(0, 60, 25):
        part = slice(start, start + 25)
        metric.add_batch(predictions=scores[part], references=labels[part])
    right = sum(int((row > row[label]).sum() < k) for row, label in zip(scores, labels, strict=True))
    name = "accuracy" if k == 1 else f"top{k}_accuracy"
    assert metric.compute() == {name: right / 60}


@given(seed=st.integers(0, 2**31), num_labels=st.integers(2, 6), batches=st.integers(1, 3))
def test_segmentation_against_brute_force(seed, num_labels, batches):
    generator = np.random.default_rng(seed)
    scores, everything = SegmentationScores(num_labels), []
    for _ in range(batches):
        references = generator.choice([*range(num_labels), 255], (2, 4, 5))
        predictions = generator.integers(0, num_labels, (2, 4, 5))
        scores.add_batch(predictions=predictions, references=references)
        everything += zip(predictions.ravel(), references.ravel(), strict=True)
    pairs = [(guess, truth) for guess, truth in everything if truth != 255]
    iou, accuracy = {}, {}
    for label in range(num_labels):
        both = sum(guess == truth == label for guess, truth in pairs)
        either = sum(label in pair for pair in pairs)
        truths = sum(truth == label for _, truth in pairs)
        iou[label] = both / either if either else None
        accuracy[label] = both / truths if truths else None
    results = scores.compute()
    assert results["iou"] == pytest.approx(list(iou.values()))
    known = [value for value in iou.values() if value is not None]
    assert results["mean_iou"] == (pytest.approx(np.mean(known)) if known else None)
    known = [value for value in accuracy.values() if value is not None]
    assert results["mean_accuracy"] == (pytest.approx(np.mean(known)) if known else None)
    right = [guess == truth for guess, truth in pairs]
    assert results["pixel_accuracy"] == (pytest.approx(np.mean(right)) if right else None)
