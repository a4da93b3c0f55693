"""benchmarks/small_clip.py: a CLIP that learns from labels, on a few embedded images."""

import pytest
import torch

import small_clip


def test_images_of_a_class_are_not_pushed_from_its_sentences():
    """The loss is each image's mean surprise at the sentences of its class, and each sentence's at the images."""
    logits, labels = torch.randn(6, 6), torch.tensor([0, 1, 0, 2, 1, 0])

    def model(input_ids, pixel_values):
        return type("Outputs", (), {"logits_per_image": logits})

    trainer = small_clip.ContrastiveTrainer.__new__(small_clip.ContrastiveTrainer)
    trainer.tokens = torch.zeros(3, 2, 4)
    loss = trainer.compute_loss(model, {"labels": labels, "pixel_values": None})
    same = labels[:, None] == labels
    surprises = [-scores.log_softmax(-1)[row, same[row]].mean() for scores in (logits, logits.T) for row in range(6)]
    assert loss.item() == pytest.approx(torch.stack(surprises).mean().item(), rel=1e-5)
