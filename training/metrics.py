"""Accuracy and segmentation scores as `evaluate` metrics that work offline."""

import datasets
import evaluate
import numpy as np

from .scores import check_scores


class _Metric(evaluate.Metric):
    """Base class of metrics that keep predictions and references in memory. `kept` is the `datasets` feature that both
    of them have."""

    kept = datasets.Sequence(datasets.Value("int64"))

    def __init__(self):
        super().__init__(keep_in_memory=True)

    def _info(self):
        features = datasets.Features({"predictions": self.kept, "references": self.kept})
        return evaluate.MetricInfo(description=self.__doc__, citation="", inputs_description="", features=features)


class TopKAccuracy(_Metric):
    """Share of images with a correct label among the k labels with the highest scores.

    `add_batch` takes scores `(batch, labels)` and references `(batch,)`. If images have several labels, references are
    `(batch, max_labels)` and padded with -1. The result's key is `accuracy` for k = 1, and `top5_accuracy` for k = 5.
    """

    def __init__(self, k: int = 1):
        self.k = k
        super().__init__()

    def add_batch(self, *, predictions, references):
        """Store the k labels with the highest scores of each image. Raise a ValueError if scores are not finite."""
        check_scores(predictions)
        # Scores are converted to floats, because negating unsigned integers results in large numbers.
        scores = np.asarray(predictions, dtype=np.float64)
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self.k]
        references = np.asarray(references)
        super().add_batch(predictions=best, references=references.reshape(len(references), -1))

    def _compute(self, predictions, references):
        name = "accuracy" if self.k == 1 else f"top{self.k}_accuracy"
        right = [not set(best).isdisjoint(labels) for best, labels in zip(predictions, references, strict=True)]
        return {name: float(np.mean(right))}


def accuracies() -> evaluate.CombinedEvaluations:
    """Return a metric that computes `accuracy` and `top5_accuracy`, see `TopKAccuracy`."""
    return evaluate.combine([TopKAccuracy(1), TopKAccuracy(5)])


class SegmentationScores(_Metric):
    """Mean intersection over union, mean accuracy and pixel accuracy, computed over the pixels of all images together.

    `add_batch` takes two arrays of class indices with equal shapes. Pixels with the reference `ignore_index` are
    ignored. `compute()` returns `mean_iou`, `mean_accuracy`, `pixel_accuracy` and the list `iou` with a value
    for each class. The IoU of a class without any pixel is `None`, and the means leave this class out.
    """

    kept = datasets.Sequence(datasets.Sequence(datasets.Value("int64")))

    def __init__(self, num_labels: int, ignore_index: int = 255):
        self.num_labels = num_labels
        self.ignore_index = ignore_index
        super().__init__()

    def add_batch(self, *, predictions, references):
        """Count the pixels of each class in the predictions, in the references, and in both."""
        predictions = np.asarray(predictions)
        references = np.asarray(references)
        counts = references != self.ignore_index
        predictions = predictions[counts].astype(np.int64)
        references = references[counts].astype(np.int64)
        for name, values in (("predictions", predictions), ("references", references)):
            if values.size and not 0 <= values.min() <= values.max() < self.num_labels:
                raise ValueError(
                    f"Got {name} from {values.min()} to {values.max()}, expected 0 to {self.num_labels - 1}."
                )
        right = references[predictions == references]
        predicted, right, real = (np.bincount(x, minlength=self.num_labels) for x in (predictions, right, references))
        super().add_batch(predictions=[[predicted, right]], references=[[real]])

    def _compute(self, predictions, references):
        predicted, right = np.sum(predictions, axis=0)
        [real] = np.sum(references, axis=0)
        union = real + predicted - right
        iou = [int(both) / int(either) if either else None for both, either in zip(right, union, strict=True)]
        known = [value for value in iou if value is not None]
        present = real > 0
        return {
            "mean_iou": float(np.mean(known)) if known else None,
            "mean_accuracy": float(np.mean(right[present] / real[present])) if present.any() else None,
            "pixel_accuracy": float(right.sum() / real.sum()) if present.any() else None,
            "iou": iou,
        }
