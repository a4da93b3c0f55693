"""`Embedder` and `Classifier` compute embeddings and class scores of images in applications."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torchvision.transforms.v2.functional import to_pil_image

from .evaluation.embeddings import EMBEDDINGS, image_embedder, image_maker
from .exported import ExportedModule, load_classifier, load_runnable
from .modeling.layers import check_num_tokens, class_scores
from .modeling.packing import pack_linear_layers
from .reading import read_ahead, stack_pixels
from .training.preprocessing import CorruptImageError, decode_image, prepare_images, size_made_by
from .training.scores import check_scores
from .training.text import first_line


def without_choice(model: nn.Module, num_tokens: int) -> ValueError:
    """Return the error for a model whose number of tokens cannot be chosen."""
    problem = f"a {type(model).__name__} has no choice of tokens."
    if isinstance(model, ExportedModule) and model.report["num_tokens"] is not None:
        problem = (
            f"this exported model always computes with {model.report['num_tokens']} tokens. Leave out `num_tokens`, "
            f"or export the model again with --num_tokens {num_tokens}."
        )
    return ValueError(f"`num_tokens` is {num_tokens}; {problem}")


def choose_tokens(model: nn.Module, num_tokens: int | None, confidence: float | None):
    """Set a model's number of tokens to `num_tokens`, if given. Check that the model supports `confidence`, if given.

    Raises:
        ValueError: If the model does not support the given `num_tokens` or `confidence`.
    """
    if num_tokens is not None:
        if not hasattr(model, "set_num_tokens"):
            raise without_choice(model, num_tokens)
        model.set_num_tokens(num_tokens)
    if confidence is not None and not hasattr(model, "classify_adaptively"):
        raise ValueError(f"confidence is for SparseFormers that classify; got a {type(model).__name__}.")
    if confidence is not None and len(model.config.trained_token_counts) == 1:
        raise ValueError("confidence needs a model for several numbers of tokens, see num_tokens of bootstrap.")


def as_record(image: object) -> Path | Mapping | Image.Image:
    """Convert an image of a supported type to an argument of `decode_image`. Raise a ValueError for other types."""
    if isinstance(image, str | os.PathLike):
        return Path(image)
    if isinstance(image, bytes):
        return {"path": None, "bytes": image}
    if isinstance(image, np.ndarray | torch.Tensor) and str(image.dtype).endswith("uint8"):
        return to_pil_image(image)
    if isinstance(image, Image.Image | Mapping):
        return image
    kind = f"{image.dtype} array" if hasattr(image, "dtype") else type(image).__name__
    article = "an" if kind[0] in "aeio" else "a"
    raise ValueError(f"{article} {kind}, expected a path, bytes, a PIL image or a uint8 array")


class Application:
    """Base class of `Embedder`, `Classifier` and `Predictor`. A call with images yields a result for each image, in
    order. Threads may share an instance, and an instance can be pickled."""

    # "embeddings" or "scores", for error messages of `_compute`. A subclass with a `_compute` of its own needs none.
    what: str

    def __init__(
        self,
        model: str | os.PathLike | nn.Module,
        image_processor=None,
        *,
        num_tokens: int | None = None,
        batch_size: int = 32,
        num_workers: int = 0,
        return_errors: bool = False,
        device: str | None = None,
        trust_remote_code: bool = False,
    ):
        """
        Args:
            model (`str`, `os.PathLike` or `nn.Module`): A shipped model's name, a folder, a hub id or a loaded model.
            image_processor (*optional*): The image processor, which a loaded model requires.
            num_tokens (`int`, *optional*): Number of latent tokens of a SparseFormer.
            batch_size (`int`, *optional*, defaults to 32): Number of images in a forward pass.
            num_workers (`int`, *optional*, defaults to 0): Number of decoding threads. 0 stands for one for each CPU.
            return_errors (`bool`, *optional*): Yield the `CorruptImageError` of an image instead of raising it.
            device (`str`, *optional*): "cpu", "cuda", "mps", … By default an accelerator, if there is one. A loaded
                model stays on its device.
            trust_remote_code (`bool`, *optional*): Run the code in the model's repository.
        """
        if batch_size < 1:
            raise ValueError(f"`batch_size` is {batch_size}, expected 1 or more.")
        if isinstance(model, nn.Module):
            if image_processor is None:
                raise ValueError("A loaded model needs its image processor: AutoImageProcessor.from_pretrained(…).")
        else:
            model, image_processor = self._load(model, device, trust_remote_code)
            pack_linear_layers(model)
        if num_tokens is not None:
            configs = (getattr(part, "config", None) for part in model.modules())
            config = next((config for config in configs if hasattr(config, "trained_token_counts")), None)
            if config is None:
                raise without_choice(model, num_tokens)
            check_num_tokens(config, num_tokens)
        self.model = model
        self.image_processor = image_processor
        self.num_tokens = num_tokens
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.return_errors = return_errors
        self.prepare = image_maker(image_processor)
        # An exported program has no parameters. `torch.empty(0)` has the dtype and device of the program's inputs.
        parameter = next(model.parameters(), torch.empty(0))
        self.device = parameter.device
        self.dtype = parameter.dtype

    def __call__(self, images: Iterable) -> Iterator[np.ndarray | CorruptImageError]:
        """Yield an array for each image, in order. `images` may be endless. An image is a path, `bytes`, a
        `PIL.Image.Image`, a uint8 array `(height, width, channels)`, a uint8 tensor `(channels, height, width)` or an
        undecoded record of `datasets`. Threads decode up to two batches in advance."""
        is_array = isinstance(images, np.ndarray | torch.Tensor) and images.ndim < 4
        if is_array or isinstance(images, str | bytes | os.PathLike | Image.Image | Mapping):
            raise ValueError(f"Got a {type(images).__name__}, expected an iterable of images; of one image, a list.")
        for (index, image), found in self.process(enumerate(images)):
            if isinstance(found, CorruptImageError):
                name = f" {str(image)!r}" if isinstance(image, str | os.PathLike) else ""
                found = CorruptImageError(f"Image {index}{name} cannot be read ({found}).")
                if not self.return_errors:
                    raise found
            yield found

    def process(self, items: Iterable[tuple[object, object]]) -> Iterator[tuple[tuple, object]]:
        """Yield each item, a pair of a key and an image, with its output or, if the image cannot be read, with the
        `CorruptImageError`."""
        pending = read_ahead(self._read, items, 2 * self.batch_size, self.num_workers)
        while batch := list(islice(pending, self.batch_size)):
            # The caller may have set the model to training mode since the last batch.
            self.model.eval()
            read = [(item, future.result()) for item, future in batch]
            pixels = [each for _, each in read if isinstance(each, torch.Tensor)]
            outputs = iter(self._compute(stack_pixels(pixels)) if pixels else ())
            for item, each in read:
                yield item, next(outputs) if isinstance(each, torch.Tensor) else each

    def _read(self, item: tuple[object, object]) -> torch.Tensor | CorruptImageError:
        try:
            return prepare_images(self.prepare, [decode_image(as_record(item[1]))])[0]
        # For a broken file, decoders raise errors of any type.
        except Exception as error:
            return CorruptImageError(first_line(error))

    @torch.inference_mode()
    def _compute(self, pixel_values: torch.Tensor) -> np.ndarray:
        found = self._run(pixel_values.to(self.device, self.dtype)).float().cpu()
        check_scores(found, self.what)
        return found.numpy()


class Embedder(Application):
    """A model that computes image embeddings `(embedding_size,)`, float32 and not normalized.

    ```python
    embed = frugalvit.Embedder("student")
    embeddings = np.stack(list(embed(paths)))
    ```
    """

    what = "embeddings"

    def __init__(self, model: str | os.PathLike | nn.Module, image_processor=None, **options):
        super().__init__(model, image_processor, **options)
        self._run = self._make_embedder()

    def _make_embedder(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return image_embedder(self.model, size_made_by(self.image_processor), self.num_tokens)

    def __getstate__(self) -> dict:
        # `_run` is a closure and cannot be pickled.
        return {name: value for name, value in vars(self).items() if name != "_run"}

    def __setstate__(self, state: dict):
        vars(self).update(state)
        self._run = self._make_embedder()

    @staticmethod
    def _load(name: str | os.PathLike, device: str | None, trust_remote_code: bool) -> tuple[nn.Module, object]:
        return load_runnable(name, "image-feature-extraction", EMBEDDINGS, device, trust_remote_code)


class Classifier(Application):
    """A model that computes class scores `(classes,)` of images, in float32. See `class_scores`.

    ```python
    classify = frugalvit.Classifier("caltech101-sparseformer", num_tokens=16)
    for path, scores in zip(paths, classify(paths)):
        print(path, classify.labels[scores.argmax()])
    ```

    With `confidence`, a number from 0 to 1, the model uses few tokens first. Images whose best class has a
    probability below `confidence` are computed again with more tokens
    (`SparseFormerForImageClassification.classify_adaptively`).
    """

    what = "scores"
    _load = staticmethod(load_classifier)

    def __init__(self, model, image_processor=None, *, confidence: float | None = None, **options):
        super().__init__(model, image_processor, **options)
        if confidence is not None and self.num_tokens is not None:
            raise ValueError("Got `num_tokens` and `confidence`, which chooses them for each image; give one of both.")
        choose_tokens(self.model, None, confidence)
        self.confidence = confidence
        self.labels = [label for _, label in sorted(self.model.config.id2label.items())]

    def _run(self, pixel_values: torch.Tensor) -> torch.Tensor:
        if self.confidence is not None:
            logits = self.model.classify_adaptively(pixel_values, self.confidence).logits
        else:
            chosen = {} if self.num_tokens is None else {"num_tokens": self.num_tokens}
            logits = self.model(pixel_values, **chosen).logits
        return class_scores(self.model.config, logits)
