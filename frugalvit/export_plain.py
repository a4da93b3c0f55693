"""Write the image processor and the card of a student that is exported as a plain vision transformer."""

import types
from pathlib import Path

from PIL.Image import Resampling
from transformers import PreTrainedModel

from .modeling.hub import image_processor_config, model_card
from .training.cards import license_of
from .training.files import split_revision, write_json
from .training.preprocessing import ImageFormat


def write_smaller_processor(folder: Path, image_format: ImageFormat, size: tuple[int, int]):
    """Write an image processor that resizes images to `size` in one bilinear step. The student resizes images in two
    steps, first in its image processor and then in the model."""
    resize = image_format.resize and round(image_format.resize * min(size) / min(image_format.size))
    config = types.SimpleNamespace(
        image_size=size,
        resize_size=resize,
        resample=int(Resampling.BILINEAR),
        num_channels=3,
        image_mean=image_format.mean,
        image_std=image_format.std,
    )
    write_json(folder / "preprocessor_config.json", image_processor_config(config))


def write_plain_card(folder: Path, host: PreTrainedModel, size: tuple[int, int], report: dict, name: str):
    """Write the card of a plain vision transformer.

    Args:
        folder (`Path`): The exported folder, where `README.md` is written.
        host (`PreTrainedModel`): The plain vision transformer.
        size (`tuple[int, int]`): Height and width of the model's images.
        report (`dict`): Result of `compare_outputs`.
        name (`str`): Folder or hub id of the student. The license is read from the student's card.
    """
    base = split_revision(name)[0]
    loader = type(host).__name__
    classifies = report["agreement"] is not None
    found = f"On {report['compared']} photographs, the mean cosine of its outputs with the student's is "
    found += f"{report['mean_cosine']:.4f}"
    if classifies:
        found += f", and {report['agreement']:.1%} get the same label"
    model_card(
        host,
        f"{Path(base).name}, {size[0]} x {size[1]} pixels",
        f"A SparseFormer of frugalvit, written as a {loader}. It needs neither frugalvit nor its code:",
        f"""```python
from transformers import AutoImageProcessor, {loader}

processor = AutoImageProcessor.from_pretrained("path/or/id")
model = {loader}.from_pretrained("path/or/id")
outputs = model(**processor(image, return_tensors="pt"))
```""",
        f"{found}. The difference comes from resizing: the student's images are resized twice, and these once. Given "
        "the student's resized pixels, both compute the same.",
        license=license_of(base),
        pipeline_tag="image-classification" if classifies else "image-feature-extraction",
        base_model=None if Path(base).is_dir() else base,
    ).save(folder / "README.md")
