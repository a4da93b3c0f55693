"""Images to train on: found, decoded and put into batches that depend neither on workers nor on processes."""

import glob
import itertools
import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import datasets
import torch
from accelerate import Accelerator
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from .augmentation import ORDER, VIEW, Mix, View, random_seed, seeded
from .loading import split_revision


SUBSET = "cifar10-subset"
# Batches that are made before the first of them is repeated; each stays in memory until then.
REPEATED_TOGETHER = 8


class ImageError(ValueError):
    """Something wrong with an image of a data set, said in one line also where a worker found it."""

    def __init__(self, message: str):
        # DataLoader raises again what a worker raised, with the worker's whole traceback as the message.
        where = f"{type(self).__module__}.{type(self).__name__}: "
        super().__init__(message.strip().splitlines()[-1].removeprefix(where))


class CorruptImageError(ImageError):
    """An image of a data set that cannot be decoded."""


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
            A hub id (owner/name@revision, too), a folder of images (one folder a class) or of parquet files, parquet
            files (several, or with wildcards), or `"cifar10-subset"`, which ships with frugalvit.
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
    loaded = load_table(dataset, split, name, streaming)
    if loaded.features is None:
        loaded = loaded._resolve_features()
    features = loaded.features
    image = _find_column(features, image_column, is_image, "image", dataset)
    label = _find_column(
        features, label_column, lambda feature: isinstance(feature, datasets.ClassLabel), "label", dataset
    )
    if label is None and "label" in features and _holds(features["label"], "int"):
        label = "label"
    if not (is_image(features[image]) or _holds(features[image], "binary", "string")):
        raise ValueError(f"The column {image!r} of {dataset!r} holds {features[image]}, expected images.")
    if label and not (isinstance(features[label], datasets.ClassLabel) or _holds(features[label], "int", "uint")):
        raise ValueError(f"The column {label!r} of {dataset!r} holds {features[label]}, expected class numbers.")
    columns = {image: "image"} | ({label: "label"} if label else {})
    # First of all, as renaming the columns of a stream reads it.
    loaded = loaded.cast_column(image, datasets.Image(decode=False)).select_columns(list(columns))
    loaded = loaded.rename_columns({old: new for old, new in columns.items() if old != new})
    return _name_labels(loaded, class_names) if label else loaded


def load_splits(data) -> tuple[datasets.Dataset | datasets.IterableDataset, datasets.Dataset]:
    """The images to train on and those to evaluate on that `DataArguments` tell. The latter are never streamed.

    Raises:
        ValueError: as `load_images`, and if the two have different classes.
    """
    options = {
        "name": data.dataset_config,
        "image_column": data.image_column,
        "label_column": data.label_column,
        "class_names": data.class_names,
    }
    train = load_images(data.dataset, data.train_split, streaming=data.streaming, **options)
    evaluation = load_images(data.eval_dataset or data.dataset, data.eval_split, **options)
    names, eval_names = class_names(train), class_names(evaluation)
    if names and eval_names and names != eval_names:
        raise ValueError(
            f"The training images have the classes {_short(names)}, the evaluation images {_short(eval_names)}; "
            "expected the same. Name them with --class_names if the data sets do not."
        )
    return train, evaluation


def class_names(images) -> list[str] | None:
    """Names of the labels, or None if there are no labels."""
    return list(images.features["label"].names) if "label" in images.features else None


def default_split(dataset: str | list[str] | None) -> str:
    """The split to evaluate on where none is named: files that are given directly have "train" alone."""
    paths = [dataset] if isinstance(dataset, str) else dataset
    return "train" if paths and all(path.endswith(".parquet") for path in paths) else "test"


def load_table(
    dataset: str | list[str], split: str, name: str | None = None, streaming: bool = False
) -> datasets.Dataset | datasets.IterableDataset:
    """A data set with all its columns. Arguments and errors as in `load_images`."""
    paths = [dataset] if isinstance(dataset, str) else list(dataset)
    path = Path(paths[0])
    hub_id, revision = split_revision(paths[0])
    if paths == [SUBSET]:
        folder = files(__package__) / "cifar10"
        source = {
            "path": "parquet",
            "data_files": {part: str(folder / f"{part}.parquet") for part in ("train", "test")},
        }
    elif all(path.endswith(".parquet") for path in paths):
        source = {"path": "parquet", "data_files": [file for path in paths for file in _matching(path)]}
    elif len(paths) > 1:
        raise ValueError(f"Several data sets, {', '.join(paths)}; expected one, or several parquet files.")
    elif path.is_dir():
        parquet = next(path.rglob("*.parquet"), None)
        source = {"path": "parquet" if parquet else "imagefolder", "data_dir": str(path)}
    elif path.exists() or paths[0].startswith((".", "~", os.sep)) or hub_id.count("/") > 1:
        raise ValueError(f"{paths[0]!r} is no data set; {_EXPECTED}.")
    else:
        source = {"path": hub_id, "name": name, **revision}
    try:
        return datasets.load_dataset(**source, split=split, streaming=streaming)
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(f"Cannot read the data set {paths[0]!r}: {_first_line(error.__cause__ or error)}") from error
    except (datasets.exceptions.DatasetsError, OSError) as error:
        raise ValueError(f"Cannot load the data set {paths[0]!r} ({_first_line(error)}); {_EXPECTED}.") from error
    except ValueError as error:
        raise ValueError(f"Cannot load the split {split!r} of {paths[0]!r}: {_first_line(error)}") from error


_EXPECTED = f"expected a hub id, a folder of images or of parquet files, parquet files, or {SUBSET!r}"


def _matching(pattern: str) -> list[str]:
    found = sorted(glob.glob(pattern))
    if not found:
        raise ValueError(f"There is no file {pattern!r}; expected a parquet file or a pattern that matches some.")
    return found


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _short(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''} ({len(names)})"


def is_image(feature) -> bool:
    # Parquet files that were not written by `datasets` hold images as structures of bytes and path.
    return isinstance(feature, datasets.Image) or (isinstance(feature, dict) and feature.keys() == {"bytes", "path"})


def _holds(feature, *types: str) -> bool:
    return isinstance(feature, datasets.Value) and feature.dtype.removeprefix("large_").startswith(types)


def _find_column(features, given: str | None, fits, what: str, dataset) -> str | None:
    if given is not None:
        if given not in features:
            raise ValueError(f"{dataset!r} has no column {given!r} (--{what}_column); it has {', '.join(features)}.")
        return given
    found = [name for name, feature in features.items() if fits(feature)]
    if len(found) > 1 or (what == "image" and not found):
        raise ValueError(
            f"{dataset!r} has {len(found) or 'no'} {what} columns among {', '.join(features)}; expected one. "
            f"Name it with --{what}_column."
        )
    return found[0] if found else None


def _name_labels(loaded, names: list[str] | None):
    if names is None:
        if isinstance(loaded.features["label"], datasets.ClassLabel):
            return loaded
        if isinstance(loaded, datasets.IterableDataset):
            raise ValueError("The stream's labels have no names; give them with --class_names.")
        names = [str(label) for label in range(max(loaded["label"], default=-1) + 1)]
    elif not isinstance(loaded, datasets.IterableDataset) and max(loaded["label"], default=0) >= len(names):
        raise ValueError(f"{len(names)} --class_names do not fit the labels, which go up to {max(loaded['label'])}.")
    return loaded.cast_column("label", datasets.ClassLabel(names=names))


def check_labels(images: datasets.Dataset, split: str):
    """Raise a ValueError if an image has no label: the test splits of some data sets keep theirs secret."""
    missing = next((index for index, label in enumerate(images["label"]) if label is None or label < 0), None)
    if missing is not None:
        raise ValueError(f"Image {missing} of the split {split!r} has no label; choose another split.")


_DECODER = datasets.Image(mode="RGB")


def decode_image(image: dict, index: int) -> Image.Image:
    """The RGB image of an undecoded `datasets` record, upright.

    Raises:
        CorruptImageError: with the index, if it cannot be read.
    """
    try:
        return _DECODER.decode_example(image)
    except Exception as error:
        path = f", {image['path']}" if image.get("path") else ""
        raise CorruptImageError(
            f"Image {index} of the data set cannot be read ({_first_line(error)}{path}). "
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
            sample = self.sample(epoch, position, self.images[position])
            if sample:
                return sample | {"skipped": skipped}
        raise ValueError(f"None of the {len(self)} images of the data set can be read.")

    def sample(self, epoch: int, index: int, record: dict) -> dict | None:
        """The view of a record that belongs to (seed, epoch, index), with what a batch needs besides."""
        try:
            image = decode_image(record["image"], index)
            mask = [self.view.read_mask(record["mask"], index, image.size)] if "mask" in record else []
        except CorruptImageError:
            if not self.skip_corrupt:
                raise
            return None
        with seeded(self.seed, epoch, index, VIEW):
            sample = self.view(image, *mask)
        label = {"labels": record["label"]} if "label" in record else {}
        return {**sample, **label, "epoch": epoch, "index": index, "skipped": 0}


class StreamedViewDataset(ViewDataset):
    """Views of images that come with their keys (epoch, position in the epoch, record); None for skipped ones."""

    def __getitem__(self, key: tuple[int, int, dict]) -> dict | None:
        return self.sample(*key)


class Collate:
    """Samples of a view to a batch: uint8 pixels and masks as they are, numbers int64, what `mix` draws, and in
    `skipped` how many images were passed over, an `int`."""

    def __init__(self, mix: Mix | None = None):
        self.mix = mix

    def __call__(self, samples: list[dict | None]) -> dict[str, torch.Tensor | int]:
        samples = self.replace_skipped(samples) if None in samples else samples
        batch = {}
        for name, first in samples[0].items():
            values = [sample[name] for sample in samples]
            batch[name] = torch.stack(values) if isinstance(first, torch.Tensor) else torch.tensor(values)
        batch["skipped"] = int(batch["skipped"].sum())
        if self.mix:
            self.mix.draw(batch)
        return batch

    @staticmethod
    def replace_skipped(samples: list[dict | None]) -> list[dict]:
        """The next readable image of the batch for each skipped one: a stream cannot be asked for others."""
        readable = [sample for sample in samples if sample]
        if not readable:
            raise ValueError(f"None of {len(samples)} images of the stream in a row can be read.")
        following = samples + readable[:1]
        return [sample or next(filter(None, following[i:])) | {"skipped": 1} for i, sample in enumerate(samples)]


class DeviceLoader:
    """Batches of a DataLoader on the device: they travel as the DataLoader made them, pixels as uint8, and are
    normalized and mixed there, and nothing waits for it. `epoch` and `index` stay where numbers are read, on the CPU.

    Args:
        accelerator (`Accelerator`): Shares batches out among processes and knows the device.
        loader (`DataLoader`): Its `collate_fn` is a `Collate`.
        view (`View`): Its `formats` normalize.
        mix (`Mix`, *optional*): Applied to normalized batches.
    """

    def __init__(self, accelerator: Accelerator, loader: DataLoader, view: View, mix: Mix | None = None):
        self.loader = accelerator.prepare_data_loader(loader, device_placement=False)
        self.device, self.formats, self.mix = accelerator.device, view.formats, mix

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor | int]]:
        for batch in self.loader:
            for name in batch.keys() - {"skipped", "epoch", "index"}:
                batch[name] = batch[name].to(self.device, non_blocking=True)
            for name, image_format in self.formats.items():
                batch[name] = image_format.normalize(batch[name])
            if self.mix:
                self.mix(batch)
            yield batch


class EpochSampler(Sampler):
    """Keys (epoch, index) of `length` out of `size` images, in an order that is a function of (seed, epoch).

    With `repeats`, an image comes that often, under as many keys (Hoffer et al. 2020, as in DeiT), and so many images
    fewer. The second and further times come `TOGETHER` images later, so that an image never mixes with itself. With
    `view_epochs`, keys, though not their order, come again after so many epochs.
    """

    TOGETHER = 64

    def __init__(self, size: int, length: int, seed: int, repeats: int = 1, view_epochs: int | None = None):
        self.size, self.length, self.seed, self.repeats = size, length, seed, repeats
        self.view_epochs = view_epochs
        self.epoch, self.position = 0, 0

    def start_at(self, epoch: int, position: int):
        self.epoch, self.position = epoch, position

    def views_of(self, epoch: int) -> int:
        """The epoch whose views are shown."""
        return epoch % self.view_epochs if self.view_epochs else epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple]:
        generator = torch.Generator().manual_seed(random_seed(self.seed, self.epoch, ORDER))
        order = torch.randperm(self.size, generator=generator)[: -(-self.length // self.repeats)].tolist()
        keys = (
            (self.views_of(self.epoch) * self.repeats + repeat, index)
            for start in range(0, len(order), self.TOGETHER)
            for repeat in range(self.repeats)
            for index in order[start : start + self.TOGETHER]
        )
        return itertools.islice(keys, self.position, self.length)


class StreamSampler(EpochSampler):
    """Keys (epoch, position, record) of `length` images of a stream, begun anew when it ends.

    It reads and the data set decodes, so that one process reads a stream once whatever its number of workers.
    """

    def __init__(self, images: datasets.IterableDataset, buffer_size: int, length: int, seed: int):
        super().__init__(0, length, seed)
        self.images, self.buffer_size = images, buffer_size

    def __iter__(self):
        records = itertools.islice(self.read(), self.position, self.length)
        return ((self.epoch, position, record) for position, record in enumerate(records, self.position))

    def read(self) -> Iterator[dict]:
        for repeat in itertools.count():
            seed = random_seed(self.seed, self.epoch, repeat, ORDER)
            records = iter(self.images.shuffle(seed=seed, buffer_size=self.buffer_size))
            first = next(records, None)
            if first is None:
                raise ValueError("The stream has no images.")
            yield first
            yield from records


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
        skip_corrupt (`bool`): See `ViewDataset`.
        steps_per_epoch (`int`, *optional*): Optimizer steps of an epoch; all images once if not given. A stream, which
            has no length, needs it.
        shuffle_buffer (`int`): Images among which a stream is shuffled, besides its files.
        repeated_augmentation (`int`): Views of an image in an epoch, see `EpochSampler`; not of a stream.
        repeats (`int`): Steps that are made of every batch (data echoing, Choi et al. 2019), a group of
            `REPEATED_TOGETHER` at a time. The same `dict` comes again, with what was noted in it the first time.
        view_epochs (`int`, *optional*): Epochs after which the views of an image come again; not of a stream.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        images: datasets.Dataset | datasets.IterableDataset,
        view: View,
        *,
        batch_size: int,
        seed: int = 0,
        mix: Mix | None = None,
        num_workers: int = 0,
        skip_corrupt: bool = False,
        steps_per_epoch: int | None = None,
        shuffle_buffer: int = 1000,
        repeated_augmentation: int = 1,
        repeats: int = 1,
        view_epochs: int | None = None,
    ):
        pairs = mix is not None and mix.pairs
        parts = accelerator.num_processes * accelerator.gradient_accumulation_steps * (2 if pairs else 1)
        if batch_size % parts:
            raise ValueError(
                f"--batch_size {batch_size} cannot be shared evenly; expected a multiple of {parts} (processes times "
                f"accumulation steps{', twice that as images mix in pairs' if pairs else ''})."
            )
        streams = isinstance(images, datasets.IterableDataset)
        if streams and repeated_augmentation > 1:
            raise ValueError("--repeated_augmentation is for images that are not streamed.")
        if streams and view_epochs is not None:
            raise ValueError("--view_epochs is for images that are not streamed.")
        if streams and steps_per_epoch is None:
            raise ValueError("A stream has no length; say how long an epoch is with --steps_per_epoch.")
        if not streams:
            available = len(images) // batch_size
            steps_per_epoch = steps_per_epoch or available
            if not 0 < steps_per_epoch <= available:
                raise ValueError(
                    f"{len(images)} training images make {available} batches of --batch_size {batch_size}, and an "
                    f"epoch takes {max(steps_per_epoch, 1)}. Lower --batch_size or --steps_per_epoch."
                )
        self.batch_size, self.steps_per_epoch, self.skipped = batch_size, steps_per_epoch * repeats, 0
        self.repeats, self.parts_of_step = repeats, accelerator.gradient_accumulation_steps
        length = steps_per_epoch * batch_size
        if streams:
            dataset = StreamedViewDataset(images, view, seed, skip_corrupt)
            self.sampler = StreamSampler(images, shuffle_buffer, length, seed)
        else:
            dataset = ViewDataset(images, view, seed, skip_corrupt)
            self.sampler = EpochSampler(len(images), length, seed, repeated_augmentation, view_epochs)
        share = batch_size // accelerator.gradient_accumulation_steps
        loader = DataLoader(
            dataset,
            batch_sampler=BatchSampler(self.sampler, share, drop_last=True),
            collate_fn=Collate(mix),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=accelerator.device.type == "cuda",
            generator=torch.Generator(),  # its own, or every pass would draw from the model's random numbers
        )
        self.loader = DeviceLoader(accelerator, loader, view, mix)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[dict[str, torch.Tensor]]:
        """Batches of an epoch for this process, on its device, from optimizer step `start` on.

        They hold what the view makes, normalized, `labels`, if there are any, what `mix` adds, and on the CPU `epoch`
        and `index`.
        """
        group = REPEATED_TOGETHER if self.repeats > 1 else 1
        done = start % (group * self.repeats)
        self.sampler.start_at(epoch, (start - done) // self.repeats * self.batch_size)
        parts, done = iter(self.loader), done * self.parts_of_step
        while batches := list(itertools.islice(parts, group * self.parts_of_step)):
            skipped = [batch.pop("skipped") for batch in batches]
            for repeat in range(self.repeats):
                for batch, count in zip(batches, skipped, strict=True):
                    if done:
                        done -= 1
                        continue
                    self.skipped += count if repeat == 0 else 0
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
) -> DeviceLoader:
    """All images once, in order, shared among processes; use `accelerator.gather_for_metrics` on what is computed."""
    if not len(images):
        raise ValueError("There are no images to evaluate on; check --eval_dataset and --eval_split.")
    processes = accelerator.num_processes
    loader = DataLoader(
        ViewDataset(images, view, skip_corrupt=skip_corrupt),
        batch_size=-(-batch_size // processes) * processes,
        sampler=[(0, index) for index in range(len(images))],
        collate_fn=Collate(),
        num_workers=num_workers,
        pin_memory=accelerator.device.type == "cuda",
        generator=torch.Generator(),
    )
    return DeviceLoader(accelerator, loader, view)


def make_loaders(
    accelerator: Accelerator, data, run, train: tuple, evaluation: tuple, **options
) -> tuple[TrainingLoader, DeviceLoader]:
    """The loaders of a recipe.

    Args:
        accelerator (`Accelerator`): As in `TrainingLoader`.
        data (`DataArguments`), run (`RunArguments`): What the command line says.
        train, evaluation (pairs of images and `View`): What is shown of which images.
        options: Of the `TrainingLoader`, besides those that the arguments tell.
    """
    shared = {"num_workers": data.num_workers, "skip_corrupt": data.skip_corrupt}
    training_loader = TrainingLoader(
        accelerator,
        *train,
        batch_size=run.batch_size,
        seed=run.seed,
        steps_per_epoch=data.steps_per_epoch,
        shuffle_buffer=data.shuffle_buffer,
        **shared,
        **options,
    )
    return training_loader, evaluation_loader(accelerator, *evaluation, batch_size=run.eval_batch_size, **shared)
