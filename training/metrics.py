"""Accuracy as `evaluate` metrics that need no network."""

import datasets
import evaluate
import numpy as np
import torch
from accelerate import Accelerator


class TopKAccuracy(evaluate.Metric):
    """Share of images whose label is among the k highest scores.

    Call `add_batch(predictions=scores, references=labels)` with scores `(batch, labels)`, then `compute()`, which
    returns `{"accuracy": …}` for k = 1 and `{"top5_accuracy": …}` for k = 5. Nothing is written to disk.
    """

    def __init__(self, k: int = 1):
        self.k = k
        super().__init__(keep_in_memory=True)

    def _info(self):
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            inputs_description="",
            features=datasets.Features(
                {"predictions": datasets.Sequence(datasets.Value("int64")), "references": datasets.Value("int64")}
            ),
        )

    def add_batch(self, *, predictions, references):
        """Keep the k best labels of each image, `(batch, k)`, rather than all scores."""
        best = np.argsort(-np.asarray(predictions), axis=1, kind="stable")[:, : self.k]
        super().add_batch(predictions=best, references=references)

    def _compute(self, predictions, references):
        name = "accuracy" if self.k == 1 else f"top{self.k}_accuracy"
        right = np.asarray(predictions) == np.asarray(references)[:, None]
        return {name: float(right.any(axis=1).mean())}


@torch.inference_mode()
def evaluate_classifier(accelerator: Accelerator, model: torch.nn.Module, loader) -> dict[str, float]:
    """Loss, top-1 and top-5 accuracy of an image classifier, over all processes.

    Args:
        accelerator (`Accelerator`): Gathers and drops the images that pad the last batch.
        model (`nn.Module`): Returns an output with `logits`; it is left in training mode if it was.
        loader: What `evaluation_loader` returns.
    """
    was_training = model.training
    model.eval()
    accuracy, top5, loss, count = TopKAccuracy(1), TopKAccuracy(5), 0.0, 0
    for batch in loader:
        logits = model(pixel_values=batch["pixel_values"]).logits.float()
        logits, labels = accelerator.gather_for_metrics((logits, batch["labels"]))
        loss += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        count += len(labels)
        for metric in (accuracy, top5):
            metric.add_batch(predictions=logits.cpu().numpy(), references=labels.cpu().numpy())
    model.train(was_training)
    return {"loss": loss / count, **accuracy.compute(), **top5.compute()}
