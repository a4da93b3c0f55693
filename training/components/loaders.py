"""Images put into batches that depend neither on workers nor on processes."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import datasets
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from datasets.distributed import split_dataset_by_node
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from ...common.decoding import CorruptImageError, decode_image
from ...common.interruptions import leave_interruptions_to_the_main_process
from ...common.views import ORDER, SHUFFLE, VIEW, View, random_seed, seeded
from .augmentation import Mix


# Shards of a stream for each process from which on one more or less for some does not matter.
MANY_SHARDS = 100
# Batches that are made before the first of them is repeated; each stays in memory until then.
REPEATED_TOGETHER = 8


class ViewDataset(Dataset):
    """Views of images under keys (epoch, index).

    An image that cannot be read raises `CorruptImageError`, or, with `skip_corrupt`, gives way to the next readable
    one; `skipped` of the sample counts those passed over. With `classes`, a label is an index into them, and the
    model's number of the class takes its place.
    """

    def __init__(
        self,
        images: datasets.Dataset,
        view: View,
        seed: int = 0,
        skip_corrupt: bool = False,
        classes: Sequence[int] | None = None,
    ):
        self.images, self.view, self.seed, self.skip_corrupt = images, view, seed, skip_corrupt
        self.classes = classes

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

    def read(self, index: int, record: dict | None = None) -> tuple:
        """The image of a record, and its mask if it has one; raises `ImageError`."""
        record = self.images[index] if record is None else record
        if "mask" not in record:
            return (decode_image(record["image"], index, self.view.at_least),)
        image = decode_image(record["image"], index)
        return image, self.view.read_mask(record["mask"], index, image.size)

    def sample(self, epoch: int, index: int, record: dict) -> dict | None:
        """The view of a record that belongs to (seed, epoch, index), with its label and key; None for an image that is
        skipped."""
        try:
            image, *mask = self.read(index, record)
            with seeded(self.seed, epoch, index, VIEW):
                # May read other images.
                sample = self.view(image, *mask)
        except CorruptImageError:
            if not self.skip_corrupt:
                raise
            return None
        label = {"labels": record["label"]} if "label" in record else {}
        if label and self.classes is not None:
            label = {"labels": self.classes[record["label"]]}
        return {**sample, **label, "epoch": epoch, "index": index, "skipped": 0}


class StreamedViewDataset(ViewDataset):
    """Views of images that come with their keys (epoch, position in the epoch, record); None for skipped ones."""

    def __getitem__(self, key: tuple[int, int, dict]) -> dict | None:
        return self.sample(*key)


class Collate:
    """Makes a batch of samples: uint8 pixels and masks as they are, numbers as int64, what `mix` draws, and `skipped`,
    the number of images that were passed over, an `int`."""

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
    """Batches of a DataLoader on the device. They travel as the DataLoader made them, pixels as uint8; they are
    normalized and mixed on the device, and nothing waits for that. `epoch` and `index` stay on the CPU, where numbers
    are read.

    Args:
        accelerator (`Accelerator`): Shares batches out among processes and knows the device.
        loader (`DataLoader`): Its `collate_fn` is a `Collate`.
        view (`View`): Its `formats` normalize.
        mix (`Mix`, *optional*): Applied to normalized batches.
        shared (`bool`): Whether batches are to be shared out; otherwise each process reads its own.
    """

    def __init__(
        self, accelerator: Accelerator, loader: DataLoader, view: View, mix: Mix | None = None, shared: bool = True
    ):
        processes = {"num_processes": 1, "process_index": 0}
        if shared:
            processes = {"num_processes": accelerator.num_processes, "process_index": accelerator.process_index}
        # Each process gets its share of every batch.
        self.loader = prepare_data_loader(loader, split_batches=True, put_on_device=False, **processes)
        self.device, self.formats, self.mix = accelerator.device, view.formats, mix

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor | int]]:
        try:
            for batch in self.loader:
                for name in batch.keys() - {"skipped", "epoch", "index"}:
                    batch[name] = batch[name].to(self.device, non_blocking=True)
                for name, image_format in self.formats.items():
                    batch[name] = image_format.normalize(batch[name])
                if self.mix:
                    self.mix(batch)
                yield batch
        finally:
            # Left at its last batch, as `Trainer` leaves it, it would cut what others gather to that batch's length.
            self.loader.end()


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
    """Keys (epoch, index, record) of the images of a stream that one process takes. A stream that ends begins anew.

    The sampler reads and the data set decodes, so that a process reads its shards once, in the same order whatever its
    number of workers. `datasets` shuffles the shards, the sampler within a block. A thread reads a block of
    `buffer_size` images ahead. A run that goes on within an epoch reads that from its beginning and skips what it has
    seen.

    Args:
        images (`datasets.IterableDataset`): The shards that this process reads.
        buffer_size (`int`): Images of a block.
        length (`int`): Images of an epoch, over all processes.
        seed (`int`): Decides the order.
        process, processes (`int`): Number of this process, and how many share out the shards.
    """

    def __init__(
        self,
        images: datasets.IterableDataset,
        buffer_size: int,
        length: int,
        seed: int,
        process: int = 0,
        processes: int = 1,
    ):
        super().__init__(0, length // processes, seed)
        self.images, self.buffer_size, self.process, self.processes = images, buffer_size, process, processes

    def start_at(self, epoch: int, position: int):
        super().start_at(epoch, position // self.processes)

    def __iter__(self) -> Iterator[tuple]:
        start, blocks = self.position, self.read_blocks()
        with ThreadPoolExecutor(1) as reader:
            position, ahead = 0, reader.submit(next, blocks)
            while position < self.length:
                records = ahead.result()
                if position + len(records) < self.length:
                    ahead = reader.submit(next, blocks)
                for record in records:
                    if position >= start:
                        yield self.epoch, position * self.processes + self.process, record
                    position += 1

    def read_blocks(self) -> Iterator[list[dict]]:
        """Records of the blocks of the epoch, which reads the stream as often as it needs to."""
        position = 0
        for repeat in itertools.count():
            # For its shards: a buffer of one shuffles nothing.
            seed = random_seed(self.seed, self.epoch, repeat, ORDER)
            records, found = iter(self.images.shuffle(seed=seed, buffer_size=1)), False
            while block := list(itertools.islice(records, min(self.buffer_size, self.length - position))):
                generator = torch.Generator().manual_seed(random_seed(self.seed, self.epoch, position, SHUFFLE))
                yield [block[i] for i in torch.randperm(len(block), generator=generator).tolist()]
                position, found = position + len(block), True
            if position == self.length:
                return
            if not found:
                raise ValueError("The stream has no images.")


def own_shards(images: datasets.IterableDataset, accelerator: Accelerator) -> datasets.IterableDataset | None:
    """The shards of a stream that this process reads, or `None` where these cannot be shared out evenly."""
    processes = accelerator.num_processes
    if images.num_shards % processes:
        images = images.reshard()
    if images.num_shards % processes and images.num_shards < MANY_SHARDS * processes:
        accelerator.print(
            f"{processes} processes cannot share out the {images.num_shards} shards of the stream evenly: each reads "
            "all of it."
        )
        return None
    return split_dataset_by_node(images, accelerator.process_index, processes, strategy="shards")


class TrainingLoader:
    """Batches of a training run, the same whatever the number of workers and, unless streamed, of processes.

    Each process reads its own shards of a stream: files or, where these cannot be shared out evenly, row groups of
    parquet files. If all have as many images, every image comes once before any comes again; a process whose shards
    hold fewer than others' begins anew earlier. Where even row groups cannot be shared out, all processes read
    everything, and the batches are those of a single process. A run that goes on with as many processes sees the
    images that it would have seen.

    Args:
        accelerator (`Accelerator`): Each process gets its share of every batch.
        images: Images of `load_images`.
        view (`View`): The view of an image.
        batch_size (`int`): Images of one optimizer step, over all processes and accumulation steps.
        accumulation_steps (`int`): Parts in which each process gets its share.
        seed (`int`): Seed of the order and the views.
        mix (`Mix`, *optional*): Applied to every share.
        num_workers (`int`): Processes that decode.
        skip_corrupt (`bool`): See `ViewDataset`.
        steps_per_epoch (`int`, *optional*): Optimizer steps of an epoch; all images once if not given. A stream, which
            has no length, needs it.
        shuffle_buffer (`int`): Images among which a stream is shuffled, besides its files.
        repeated_augmentation (`int`): Views of an image in an epoch, see `EpochSampler`; not of a stream.
        repeats (`int`): Steps that are made of every batch (data echoing, Choi et al. 2019), a group of
            `REPEATED_TOGETHER` at a time. The same `dict` comes again, with what was noted in it the first time.
        view_epochs (`int`, *optional*): Epochs after which the views of an image come again; not for a stream.
        classes (sequence of `int`, *optional*): The model's number of each class, see `match_classes`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        images: datasets.Dataset | datasets.IterableDataset,
        view: View,
        *,
        batch_size: int,
        accumulation_steps: int = 1,
        seed: int = 0,
        mix: Mix | None = None,
        num_workers: int = 0,
        skip_corrupt: bool = False,
        steps_per_epoch: int | None = None,
        shuffle_buffer: int = 1000,
        repeated_augmentation: int = 1,
        repeats: int = 1,
        view_epochs: int | None = None,
        classes: Sequence[int] | None = None,
    ):
        pairs = mix is not None and mix.pairs
        parts = accelerator.num_processes * accumulation_steps * (2 if pairs else 1)
        if batch_size % parts:
            raise ValueError(
                f"--batch-size {batch_size} cannot be shared evenly; expected a multiple of {parts} (processes times "
                f"accumulation steps{', twice that as images mix in pairs' if pairs else ''})."
            )
        streams = isinstance(images, datasets.IterableDataset)
        if streams and repeated_augmentation > 1:
            raise ValueError("--repeated-augmentation is for images that are not streamed.")
        if streams and view_epochs is not None:
            raise ValueError("--view-epochs is for images that are not streamed.")
        if streams and steps_per_epoch is None:
            raise ValueError("A stream has no length; say how long an epoch is with --steps-per-epoch.")
        if not streams:
            available = len(images) // batch_size
            steps_per_epoch = steps_per_epoch or available
            if not 0 < steps_per_epoch <= available:
                raise ValueError(
                    f"{len(images)} training images make {available} batches of --batch-size {batch_size}, and an "
                    f"epoch takes {max(steps_per_epoch, 1)}. Lower --batch-size or --steps-per-epoch."
                )
        self.batch_size, self.steps_per_epoch, self.skipped = batch_size, steps_per_epoch * repeats, 0
        self.repeats, self.parts_of_step = repeats, accumulation_steps
        length = steps_per_epoch * batch_size
        share = batch_size // accumulation_steps
        own = own_shards(images, accelerator) if streams else None
        if streams:
            rank = {"process": accelerator.process_index, "processes": accelerator.num_processes} if own else {}
            dataset = StreamedViewDataset(images, view, seed, skip_corrupt, classes)
            self.sampler = StreamSampler(own or images, shuffle_buffer, length, seed, **rank)
        else:
            dataset = ViewDataset(images, view, seed, skip_corrupt, classes)
            self.sampler = EpochSampler(len(images), length, seed, repeated_augmentation, view_epochs)
        loader = DataLoader(
            dataset,
            batch_sampler=BatchSampler(
                self.sampler, share // accelerator.num_processes if own else share, drop_last=True
            ),
            collate_fn=Collate(mix),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=accelerator.device.type == "cuda",
            generator=torch.Generator(),  # its own, or every pass would draw from the model's random numbers
            worker_init_fn=leave_interruptions_to_the_main_process,
        )
        self.loader = DeviceLoader(accelerator, loader, view, mix, shared=not own)

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
    classes: Sequence[int] | None = None,
) -> DeviceLoader:
    """Load all images once, in order, shared among processes. `accelerator.gather_for_metrics` joins the results."""
    if isinstance(images, Mapping) or not hasattr(images, "__len__"):
        raise ValueError(
            f"The images to evaluate on are of the type {type(images).__name__}; expected one data set that has a "
            "length: of a stream what take() gives, of several one, and evaluate(images) measures on the others."
        )
    if not len(images):
        raise ValueError("There are no images to evaluate on; check --eval-dataset and --eval-split.")
    processes = accelerator.num_processes
    loader = DataLoader(
        ViewDataset(images, view, skip_corrupt=skip_corrupt, classes=classes),
        batch_size=-(-batch_size // processes) * processes,
        sampler=[(0, index) for index in range(len(images))],
        collate_fn=Collate(),
        num_workers=num_workers,
        pin_memory=accelerator.device.type == "cuda",
        generator=torch.Generator(),
        worker_init_fn=leave_interruptions_to_the_main_process,
    )
    return DeviceLoader(accelerator, loader, view)


def count_images(train, evaluation: datasets.Dataset | None, test: datasets.Dataset | None) -> dict[str, int]:
    """Numbers of a run's images, as `results.json` and cards have them; a stream has none."""
    parts = {"images": train, "evaluation images": evaluation, "test images": test}
    return {name: len(part) for name, part in parts.items() if hasattr(part, "__len__")}
