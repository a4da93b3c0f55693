"""Images to train on: found, decoded and put into batches that depend neither on workers nor on processes."""

import glob
import io
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import datasets
import torch
from accelerate import Accelerator
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from .augmentation import ORDER, VIEW, Mix, View, random_seed, seeded


SUBSET = "cifar10-subset"


class CorruptImageError(ValueError):
    """An image of a data set that cannot be decoded."""

    def __init__(self, message: str):
        # DataLoader re-raises what a worker raised with the worker's whole traceback as the message.
        super().__init__(message.strip().splitlines()[-1].removeprefix(f"{__name__}.{type(self).__name__}: "))


def load_images(
    dataset: str | list[str],
    split: str = "train",
    *,
    name: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    class_names: list[str] | None = None,
    streaming: bool = False,
) -> datasets.Dataset | datasets.IterableDataset:
    """Images and, where there are any, labels.

    Args:
        dataset (`str` or `list[str]`):
            A hub id, a folder of images (one folder a class) or of parquet files, parquet files (several, or with
            wildcards), or `"cifar10-subset"`, which ships with frugalvit.
        split (`str`): Which part, slices such as `"train[:1000]"` included. Files given directly are "train".
        name (`str`, *optional*): Configuration of a hub data set that has several.
        image_column, label_column (`str`, *optional*): Their names, where the types do not tell.
        class_names (`list[str]`, *optional*): Names of the labels 0, 1, …, where the data set has none.
        streaming (`bool`): Read as training goes, without a copy on disk.

    Returns:
        A `datasets.Dataset` (`IterableDataset` when streaming) with the columns `image`, not decoded, and `label`, a
        `ClassLabel`, if there are labels.

    Raises:
        ValueError: if there is no such data set, split or column.
    """
    loaded = _load(dataset, split, name, streaming)
    features = loaded.features
    if features is None:
        loaded = loaded._resolve_features()
        features = loaded.features
    image = _find_column(features, image_column, _is_image, "image", dataset)
    label = _find_column(features, label_column, lambda f: isinstance(f, datasets.ClassLabel), "label", dataset)
    if label is None and isinstance(getattr(features.get("label"), "dtype", None), str):
        label = "label" if features["label"].dtype.startswith(("int", "uint")) else None
    columns = {image: "image"} | ({label: "label"} if label else {})
    loaded = loaded.select_columns(list(columns))
    loaded = loaded.rename_columns({old: new for old, new in columns.items() if old != new})
    loaded = loaded.cast_column("image", datasets.Image(decode=False))
    if label:
        loaded = _name_labels(loaded, class_names)
    return loaded


def _load(dataset, split: str, name: str | None, streaming: bool):
    paths = [dataset] if isinstance(dataset, str) else list(dataset)
    if paths == [SUBSET]:
        folder = files(__package__) / "cifar10"
        arguments = {"path": "parquet", "data_files": {s: str(folder / f"{s}.parquet") for s in ("train", "test")}}
    elif all(path.endswith(".parquet") for path in paths):
        found = [sorted(glob.glob(path)) for path in paths]
        for path, matches in zip(paths, found, strict=True):
            if not matches:
                raise ValueError(f"No file {path!r}; expected a parquet file or a pattern that matches some.")
        arguments = {"path": "parquet", "data_files": sum(found, [])}
    elif len(paths) > 1:
        raise ValueError(f"Several data sets, {paths}; expected one, or several parquet files.")
    elif Path(paths[0]).is_dir():
        kind = "parquet" if any(Path(paths[0]).rglob("*.parquet")) else "imagefolder"
        arguments = {"path": kind, "data_dir": paths[0]}
    else:
        arguments = {"path": paths[0], "name": name}
    try:
        return datasets.load_dataset(**arguments, split=split, streaming=streaming)
    except (datasets.exceptions.DatasetNotFoundError, FileNotFoundError, ConnectionError) as error:
        raise ValueError(
            f"Cannot load the data set {paths[0]!r} ({_first_line(error)}). Expected a datasets hub id, an image "
            f"folder, parquet files or {SUBSET!r}."
        ) from error
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(f"Cannot read the data set {paths[0]!r}: {_first_line(error.__cause__ or error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _is_image(feature) -> bool:
    # Parquet files written without the `datasets` library hold images as structures of bytes and path.
    return isinstance(feature, datasets.Image) or (isinstance(feature, dict) and feature.keys() == {"bytes", "path"})


def _find_column(features, given: str | None, fits, what: str, dataset) -> str | None:
    if given is not None:
        if given not in features:
            raise ValueError(f"{dataset!r} has no column {given!r} (--{what}_column); it has {', '.join(features)}.")
        return given
    found = [name for name, feature in features.items() if fits(feature)]
    if len(found) > 1 or (what == "image" and not found):
        raise ValueError(
            f"{dataset!r} has {len(found) or 'no'} {what} columns among {', '.join(features)}; "
            f"expected one. Name it with --{what}_column."
        )
    return found[0] if found else None


def _name_labels(loaded, class_names: list[str] | None):
    feature = loaded.features["label"]
    if class_names is None:
        if isinstance(feature, datasets.ClassLabel):
            return loaded
        if isinstance(loaded, datasets.IterableDataset):
            raise ValueError("A stream of labels without names; name the classes with --class_names.")
        class_names = [str(i) for i in range(max(loaded["label"], default=-1) + 1)]
    return loaded.cast_column("label", datasets.ClassLabel(names=class_names))


def class_names(images) -> list[str] | None:
    """Names of the labels, or None if there are no labels."""
    return list(images.features["label"].names) if "label" in images.features else None


def decode_image(image: dict, index: int) -> Image.Image:
    """The RGB image of an undecoded `datasets` record.

    Raises:
        CorruptImageError: with the index, if it cannot be read.
    """
    try:
        source = io.BytesIO(image["bytes"]) if image["bytes"] is not None else image["path"]
        with Image.open(source) as opened:
            return opened.convert("RGB")
    except Exception as error:
        raise CorruptImageError(
            f"Image {index} of the data set cannot be read ({_first_line(error)}). "
            "Repair or remove it, or go on without such images: --skip_corrupt."
        ) from error


class ViewDataset(Dataset):
    """Views of images under keys (epoch, index).

    An image that cannot be read raises `CorruptImageError`, or, with `skip_corrupt`, gives way to the next readable
    one; `skipped` of the sample counts those passed over.
    """

    def __init__(self, images: datasets.Dataset, view: View, seed: int = 0, skip_corrupt: bool = False):
        self.images, self.view, self.seed, self.skip_corrupt = images, view, seed, skip_corrupt

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int]) -> dict:
        epoch, index = key
        for skipped in range(len(self)):
            position = (index + skipped) % len(self)
            record = self.images[position]
            try:
                image = decode_image(record["image"], position)
                break
            except CorruptImageError:
                if not self.skip_corrupt:
                    raise
        else:
            raise ValueError(f"None of the {len(self)} images of the data set can be read.")
        return make_sample(self.view, image, record, self.seed, epoch, position, skipped)


def make_sample(view: View, image: Image.Image, record: dict, seed: int, epoch: int, index: int, skipped: int) -> dict:
    """The view of an image that belongs to (seed, epoch, index), with what a batch needs besides."""
    with seeded(seed, epoch, index, VIEW):
        sample = view(image)
    label = {"labels": record["label"]} if "label" in record else {}
    return {**sample, **label, "epoch": epoch, "index": index, "skipped": skipped}


class Collate:
    """Samples of a view to a batch: pixels normalized, the rest int64, then `mix` applied."""

    def __init__(self, view: View, mix: Mix | None = None):
        self.formats, self.mix = view.formats, mix

    def __call__(self, samples: list[dict]) -> dict[str, torch.Tensor]:
        batch = {
            name: self.formats[name].normalize(torch.stack([sample[name] for sample in samples]))
            if name in self.formats
            else torch.tensor([sample[name] for sample in samples])
            for name in samples[0]
        }
        if self.mix:
            self.mix(batch)
        return batch


class EpochSampler(Sampler):
    """Keys (epoch, index) of `length` out of `size` images, in an order that is a function of (seed, epoch)."""

    def __init__(self, size: int, length: int, seed: int):
        self.size, self.length, self.seed, self.epoch, self.position = size, length, seed, 0, 0

    def start_at(self, epoch: int, position: int = 0):
        self.epoch, self.position = epoch, position

    def __len__(self) -> int:
        return self.length

    def __iter__(self):
        generator = torch.Generator().manual_seed(random_seed(self.seed, self.epoch, ORDER))
        order = torch.randperm(self.size, generator=generator)[self.position : self.length]
        return ((self.epoch, index) for index in order.tolist())


class TrainingLoader:
    """Batches of a training run, the same whatever the number of processes and workers.

    Args:
        accelerator (`Accelerator`): With `split_batches`; each process gets its share of every batch.
        images: What `load_images` returns.
        view (`View`): What is shown of an image.
        batch_size (`int`): Images of one optimizer step, over all processes and accumulation steps.
        seed (`int`): Of order and views.
        mix (`Mix`, *optional*): Applied to every share.
        num_workers (`int`): Processes that decode.
        skip_corrupt (`bool`): See `ViewDataset`; `skipped` counts for this process.
        steps_per_epoch (`int`, *optional*): Optimizer steps of an epoch, all images if not given.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        images,
        view: View,
        *,
        batch_size: int,
        seed: int = 0,
        mix: Mix | None = None,
        num_workers: int = 0,
        skip_corrupt: bool = False,
        steps_per_epoch: int | None = None,
    ):
        shares = accelerator.num_processes * accelerator.gradient_accumulation_steps
        if batch_size % (shares * (2 if mix and mix.mixes else 1)):
            raise ValueError(
                f"--batch_size {batch_size} cannot be shared evenly; expected a multiple of {shares} (processes times "
                f"gradient accumulation steps){', twice that where images mix in pairs' if mix and mix.mixes else ''}."
            )
        available = len(images) // batch_size
        self.steps_per_epoch = steps_per_epoch or available
        if not 0 < self.steps_per_epoch <= available:
            raise ValueError(
                f"{len(images)} training images give {available} batches of --batch_size {batch_size}, "
                f"but {max(self.steps_per_epoch, 1)} are wanted an epoch. Lower --batch_size or --steps_per_epoch."
            )
        self.batch_size, self.skipped = batch_size, 0
        share = batch_size // accelerator.gradient_accumulation_steps
        self.sampler = EpochSampler(len(images), self.steps_per_epoch * batch_size, seed)
        loader = DataLoader(
            ViewDataset(images, view, seed, skip_corrupt),
            batch_sampler=BatchSampler(self.sampler, share, drop_last=True),
            collate_fn=Collate(view, mix),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            generator=torch.Generator(),  # its own, or every pass would draw from the model's random numbers
        )
        self.loader = accelerator.prepare_data_loader(loader)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[dict[str, torch.Tensor]]:
        """Batches of an epoch for this process, on its device, from optimizer step `start` on."""
        self.sampler.start_at(epoch, start * self.batch_size)
        for batch in self.loader:
            self.skipped += int(batch.pop("skipped").sum())
            yield batch

    def take_skipped(self, accelerator: Accelerator) -> int:
        """Images skipped since the last call, over all processes."""
        skipped = accelerator.reduce(torch.tensor(self.skipped, device=accelerator.device)).item()
        self.skipped = 0
        return skipped


def evaluation_loader(
    accelerator: Accelerator,
    images: datasets.Dataset,
    view: View,
    *,
    batch_size: int = 256,
    num_workers: int = 0,
    skip_corrupt: bool = False,
) -> DataLoader:
    """All images once, in order, shared among processes; use `accelerator.gather_for_metrics` on what is computed."""
    processes = accelerator.num_processes
    loader = DataLoader(
        ViewDataset(images, view, skip_corrupt=skip_corrupt),
        batch_size=-(-batch_size // processes) * processes,
        sampler=[(0, index) for index in range(len(images))],
        collate_fn=Collate(view),
        num_workers=num_workers,
        generator=torch.Generator(),
    )
    return accelerator.prepare_data_loader(loader)
