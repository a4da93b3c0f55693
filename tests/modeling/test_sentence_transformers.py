"""sentence-transformers gives the embeddings of every saved model, as `extract_features` does."""

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor

import frugalvit
from frugalvit import extract_features
from frugalvit.evaluation.two_towers import load_two_towers
from kinds import KINDS


def load(folder):
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="pip install 'frugalvit[search]'")
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu")


@pytest.mark.nightly
def test_every_model_embeds_as_extract_features_does(kind, make_model, photographs, tmp_path):
    images = photographs[0][:3]
    for model_class in KINDS[kind].classes:
        model = make_model(model_class, kind)
        folder = tmp_path / model_class.__name__
        model.save_pretrained(folder)
        searcher, processor = load(folder), AutoImageProcessor.from_pretrained(folder)
        found = searcher.encode(images)
        np.testing.assert_allclose(found, extract_features(model, processor, images), rtol=1e-4, atol=1e-5)
        assert not np.allclose(found[0], found[1], atol=1e-3)
        if model.embedding_arguments:
            few = searcher.encode(images, num_tokens=4)
            assert not np.allclose(few, found, atol=1e-3)
            model.set_num_tokens(4)
            np.testing.assert_allclose(few, extract_features(model, processor, images), rtol=1e-4, atol=1e-5)


def test_a_clip_embeds_images_and_texts_side_by_side(photographs):
    """Texts longer than its text side takes, too."""
    images, clip = photographs[0][:3], str(frugalvit.checkpoint_path("cifar10-sparseformer-clip"))
    searcher, towers = load(clip), load_two_towers(clip, device="cpu")
    texts = ["a photo of a ship .", "a photo of a cat . " * 100]
    with torch.inference_mode():
        pixel_values = towers.image_processor(images, return_tensors="pt")["pixel_values"]
        expected = towers.embed_images(pixel_values) @ towers.embed_texts(texts[:1]).mT
    cosines = searcher.similarity(searcher.encode(images), searcher.encode(texts))
    torch.testing.assert_close(cosines[:, :1], expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(searcher.encode(images, num_tokens=4), searcher.encode(images), atol=1e-3)
