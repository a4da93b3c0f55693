"""Test of a saved model in sentence-transformers."""

import numpy as np
import pytest
import torch

import frugalvit
from frugalvit.evaluation.two_towers import load_two_towers


def load(folder):
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="pip install 'frugalvit[search]'")
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu")


def test_a_clip_embeds_images_and_texts_side_by_side(photographs):
    """Similarities equal those of the CLIP itself. A text that is too long for the CLIP is truncated."""
    images, clip = photographs[0][:3], str(frugalvit.checkpoint_path("cifar10-sparseformer-clip"))
    searcher, towers = load(clip), load_two_towers(clip, device="cpu")
    texts = ["a photo of a ship .", "a photo of a cat . " * 100]
    with torch.inference_mode():
        pixel_values = towers.image_processor(images, return_tensors="pt")["pixel_values"]
        expected = towers.embed_images(pixel_values) @ towers.embed_texts(texts[:1]).mT
    cosines = searcher.similarity(searcher.encode(images), searcher.encode(texts))
    torch.testing.assert_close(cosines[:, :1], expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(searcher.encode(images, num_tokens=4), searcher.encode(images), atol=1e-3)
