"""Tests of saved models in sentence-transformers."""

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModel

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


def test_indexes_of_a_dinov2_hold_one_of_three_embeddings(photographs):
    """docs/keep_your_index.md has a table of the three embeddings."""
    images, folder = photographs[0][:2], frugalvit.checkpoint_path("caltech101-vit")
    dinov2, processor = (each.from_pretrained(folder) for each in (AutoModel, AutoImageProcessor))
    with torch.inference_mode():
        outputs = dinov2(**processor(images, return_tensors="pt"))
    cls, tokens = outputs.pooler_output, outputs.last_hidden_state
    expected = {
        "with a classifier": (frugalvit.Embedder(folder)(images), torch.cat([cls, tokens[:, 1:].mean(1)], dim=1)),
        "without a classifier": (frugalvit.Embedder(dinov2, processor)(images), cls),
        "sentence-transformers": (load(folder).encode(images), tokens.mean(1)),
    }
    for name, (found, embeddings) in expected.items():
        np.testing.assert_allclose(np.stack([*found]), embeddings, rtol=1e-4, atol=1e-4, err_msg=name)
