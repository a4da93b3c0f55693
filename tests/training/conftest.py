"""Fixtures for the tests of training: a tiny teacher and images of the shipped CIFAR-10 subset."""

import datasets
import pytest
import torch
from transformers import ViTImageProcessor

from frugalvit.training.data import load_images
from frugalvit.training.preprocessing import decode_image
from tiny import make_vit


# By default, `datasets` waits 5 seconds after each pass over a stream of parquet files. This makes tests slow.
datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0.01
# By default, PyTorch waits up to 5 seconds for the workers of a data loader that is garbage-collected.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5


@pytest.fixture(scope="session")
def class_names():
    return ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.fixture(scope="session")
def teacher(class_names, tmp_path_factory):
    """Save an untrained ViT with 3 encoder blocks, and return its folder."""
    folder = tmp_path_factory.mktemp("teacher")
    labels = {"id2label": dict(enumerate(class_names)), "label2id": {name: i for i, name in enumerate(class_names)}}
    make_vit(num_hidden_layers=3, layer_norm_eps=1e-6, **labels).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}, image_std=[0.25] * 3).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def images():
    """Load the first 32 images of the CIFAR-10 subset, with their labels."""
    return load_images("cifar10-subset", "train[:32]")


@pytest.fixture(scope="session")
def pictures(images):
    """Return the images of the fixture `images` as PIL images, without labels."""
    return [decode_image(record["image"], 0) for record in images]
