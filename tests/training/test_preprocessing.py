"""Test preprocessing of strips, which are very long images, and the seeds of random views."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessor, ViTImageProcessor
from transformers.models.timm_wrapper.image_processing_timm_wrapper import TimmWrapperImageProcessor

from frugalvit.modeling.image_format import ImageFormat
from frugalvit.training.preprocessing import LONGEST, prepare_images
from frugalvit.training.views import EvalView, seeded


SQUARE = {"height": 16, "width": 16}
TIMM = {"input_size": [3, 16, 16], "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"}
CROPPING = {
    "CLIP": CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=SQUARE),
    "timm": TimmWrapperImageProcessor(TIMM | {"crop_pct": 0.9}),
}
WHOLE = {"ViT": ViTImageProcessor(size=SQUARE)}


def strip(width, height):
    """Draw waves along a strip. The wavelength is six times the strip's shorter side."""
    places = np.arange(max(width, height)) / min(width, height)
    waves = (128 + 100 * np.sin(places * 2 * np.pi / 6 + 1)).astype(np.uint8)
    along = np.broadcast_to(waves[None] if width >= height else waves[:, None], (height, width))
    return Image.fromarray(np.ascontiguousarray(along)).convert("RGB")


@pytest.mark.parametrize("size", [(8, 6), (256, 8), (2000, 9), (7, 2001), (60_000, 2)])
@pytest.mark.parametrize("name", [*CROPPING, *WHOLE])
def test_a_strip_is_seen_as_if_it_were_resized_whole(name, size):
    processor, image = (CROPPING | WHOLE)[name], strip(*size)
    pixels = prepare_images(processor, [image])
    cut = max(size) > LONGEST * min(size) and name in CROPPING
    if max(size) < 10_000:
        expected = processor([image], return_tensors="pt")["pixel_values"]
        # If a strip is cropped before it is resized, the result may shift by a fraction of a pixel.
        torch.testing.assert_close(pixels, expected, rtol=0, atol=0.1 if cut else 0)
    image_format = ImageFormat.from_processor(processor)
    seen = image_format.normalize(EvalView(image_format)(image)["pixel_values"][None])
    torch.testing.assert_close(seen, pixels, rtol=0, atol=0.1)


def test_seeds_are_fixed_and_spread_and_leave_no_trace():
    def seed(*keys):
        with seeded(*keys):
            return torch.initial_seed()

    # The seed must not change, because other versions and machines must draw the same views.
    assert seed(0, 0, 0, 0) == 556823690
    seeds = {seed(*key) for key in np.ndindex(2, 4, 100, 2)}
    assert len(seeds) == 2 * 4 * 100 * 2 and 0.48 < np.mean(list(seeds)) / 2**32 < 0.52
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), seeded(1, 2):
        torch.rand(5)
        raise RuntimeError
    assert torch.equal(torch.get_rng_state(), before)
