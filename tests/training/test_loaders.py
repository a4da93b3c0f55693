"""Batches that depend neither on workers nor on where a run goes on; bad images."""

import itertools
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from frugalvit.common.data import load_images
from frugalvit.common.decoding import CorruptImageError, decode_image
from frugalvit.common.views import VIEW, EvalView, ImageFormat, seeded
from frugalvit.training.components import loaders
from frugalvit.training.components.augmentation import BootstrapView, Mix, PairedEvalView, SmallDataView
from frugalvit.training.components.loaders import StreamSampler, TrainingLoader, evaluation_loader, own_shards


FORMAT = ImageFormat((8, 8))


@pytest.mark.parametrize(
    ("view", "size"),
    [
        (BootstrapView(FORMAT, ImageFormat((16, 16))), (320, 240)),
        (PairedEvalView(FORMAT, ImageFormat((16, 16))), (80, 60)),
        (EvalView(FORMAT), (40, 30)),
        (SmallDataView(FORMAT), (320, 240)),
    ],
    ids=["bootstrapping", "pairs", "evaluation", "little data"],
)
def test_jpegs_are_decoded_as_large_as_views_need(view, size, tmp_path):
    """Views of evaluation allow smaller images. Random views do not: crops depend on the size, and cached embeddings
    on crops."""
    y, x = np.mgrid[0:240, 0:320]
    Image.fromarray(np.stack([x * 255 // 320, y * 255 // 240, 0 * x], axis=2).astype(np.uint8)).save(
        tmp_path / "0.jpg", quality=95
    )
    images = datasets.Dataset.from_dict({"image": [{"path": str(tmp_path / "0.jpg"), "bytes": None}]})
    read = loaders.ViewDataset(images, view)
    (image,) = read.read(0)
    assert image.size == size
    whole = decode_image(images[0]["image"], 0)
    with seeded(0, 0, 0, VIEW):
        expected = view(whole)
    for name, pixels in expected.items():
        assert (read[0, 0][name].float() - pixels.float()).abs().mean() < 4


def make_loader(images, *, accumulation=1, **options):
    options = {"batch_size": 4, "view": SmallDataView(FORMAT, padding=2)} | options
    return TrainingLoader(Accelerator(), images, accumulation_steps=accumulation, **options)


def batches(loader, *position):
    return [{name: tensor.clone() for name, tensor in batch.items()} for batch in loader.epoch(*position)]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_repeats_groups_of_batches_and_resumes_anywhere(write_parquet, monkeypatch, accumulation):
    monkeypatch.setattr(loaders, "REPEATED_TOGETHER", 3)
    images = load_images(write_parquet(count=20))
    once = make_loader(images, accumulation=accumulation)
    twice = make_loader(images, accumulation=accumulation, repeats=2)
    assert (once.steps_per_epoch, twice.steps_per_epoch) == (5, 10)
    single = batches(once, 1)
    steps = [single[i : i + accumulation] for i in range(0, len(single), accumulation)]
    expected = [steps[i] for i in (0, 1, 2, 0, 1, 2, 3, 4, 3, 4)]
    for start in range(10):
        assert_equal(batches(twice, 1, start), [part for step in expected[start:] for part in step])
    first, *_, again = itertools.islice(twice.epoch(0), 3 * accumulation + 1)
    assert first is again


def assert_equal(batches, expected):
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert batch.keys() == other.keys()
        assert all(torch.equal(batch[name], other[name]) for name in batch)


@pytest.fixture(params=["map", "stream"])
def source(request, write_parquet):
    """14 images, read at random or streamed, as `load_images` and the loader take them."""
    streams = request.param == "stream"
    images = load_images(write_parquet(count=14), streaming=streams)
    return images, {"steps_per_epoch": 3, "shuffle_buffer": 5} if streams else {}


def test_batches_depend_on_seed_and_epoch_alone(source):
    images, options = source
    mix = Mix(2, 0.5, 0.5, seed=1)
    expected = batches(make_loader(images, mix=mix, seed=1, **options), 2)
    assert [len(batch["labels"]) for batch in expected] == [4, 4, 4]
    assert expected[0].keys() == {"pixel_values", "labels", "index", "epoch", "targets"}
    for workers in (0, 1, 2):
        loader = make_loader(images, mix=mix, seed=1, num_workers=workers, **options)
        batches(loader, 0)
        assert_equal(batches(loader, 2), expected)
        assert_equal(batches(loader, 2, 1), expected[1:])
    halves = batches(make_loader(images, mix=mix, seed=1, accumulation=2, **options), 2)
    assert_equal(
        [{k: torch.cat([a[k], b[k]]) for k in a} for a, b in zip(halves[::2], halves[1::2], strict=True)], expected
    )
    for other in (
        batches(make_loader(images, mix=mix, seed=2, **options), 2),
        batches(make_loader(images, mix=mix, seed=1, **options), 1),
    ):
        assert not torch.equal(other[0]["pixel_values"], expected[0]["pixel_values"])


def test_an_image_comes_once_an_epoch_and_only_when_needed(write_parquet):
    images = load_images(write_parquet(count=14))
    seen = []

    class Spy(EvalView):
        def __call__(self, image):
            seen.append(np.asarray(image)[0, 0, 0] // 10)
            return super().__call__(image)

    loader = make_loader(images, view=Spy(FORMAT))
    order = torch.cat([batch["index"] for batch in batches(loader, 3)]).tolist()
    assert seen == order and len(set(order)) == 12
    seen.clear()
    batches(loader, 3, 2)
    assert seen == order[8:]


def test_repeated_augmentation_shows_fewer_images_more_often(write_parquet, monkeypatch):
    monkeypatch.setattr(loaders.EpochSampler, "TOGETHER", 4)
    images = load_images(write_parquet(count=16))
    loader = make_loader(images, repeated_augmentation=3)
    given = batches(loader, 1)
    indices = torch.cat([batch["index"] for batch in given]).tolist()
    assert len(indices) == 16 and len(set(indices)) == 6
    assert indices[:4] == indices[4:8] == indices[8:12]  # four together, three times
    pixels = torch.cat([batch["pixel_values"] for batch in given])
    assert not torch.equal(pixels[:4], pixels[4:8])
    epochs = torch.cat([batch["epoch"] for batch in given]).tolist()
    assert len(set(zip(epochs, indices, strict=True))) == 16
    assert_equal(batches(loader, 1, 2), given[2:])
    assert not set(epochs) & {epoch for batch in batches(loader, 2) for epoch in batch["epoch"].tolist()}


def test_a_stream_is_shuffled_and_begins_anew(write_parquet):
    images = load_images([write_parquet("a.parquet", 3), write_parquet("b.parquet", 5)], streaming=True)
    loader = make_loader(images, view=EvalView(FORMAT), steps_per_epoch=4, shuffle_buffer=3)
    colors = [
        torch.cat([(batch["pixel_values"][:, 0, 0, 0] + 1) * 12.75 for batch in batches(loader, epoch)]).round().int()
        for epoch in range(3)
    ]
    for epoch in colors:
        assert sorted(epoch[:8].tolist()) == sorted(epoch[8:].tolist()) == [0, 0, 1, 1, 2, 2, 3, 4]
    assert len({tuple(epoch.tolist()) for epoch in colors}) == 3
    assert torch.equal(
        loader.sampler.images.features["label"].encode_example("odd") + torch.tensor(0), torch.tensor(1)
    )


def test_a_stream_goes_on_within_an_epoch(write_parquet):
    """In which it begins anew, in one process and in each of two."""
    images = load_images([write_parquet(f"{count}.parquet", count) for count in (3, 5, 8, 9)], streaming=True)

    def keys(process, processes, position):
        own = own_shards(images, SimpleNamespace(num_processes=processes, process_index=process))
        sampler = StreamSampler(own, 4, 50, 7, process, processes)
        sampler.start_at(3, position * processes)
        return list(sampler)

    for process, processes in ((0, 1), (0, 2), (1, 2)):
        whole = keys(process, processes, 0)
        assert [index for _, index, _ in whole] == list(range(process, 50, processes))
        for position in (3, 4, 24):
            assert keys(process, processes, position) == whole[position:]


def test_shards_are_shared_out_if_evenly(write_parquet, tmp_path, capsys):
    def shards(processes):
        ranks = [{"num_processes": processes, "process_index": rank} for rank in range(processes)]
        return [own_shards(images, SimpleNamespace(**rank, print=print)) for rank in ranks]

    files = [write_parquet(f"{index}.parquet", 6) for index in range(3)]
    images = load_images(files, streaming=True)
    assert [len(list(own)) for own in shards(3)] == [6, 6, 6] and shards(2) == [None, None]
    assert "2 processes cannot share out the 3 shards of the stream evenly" in capsys.readouterr().out
    # Files of several row groups are shared out by these.
    pq.write_table(pq.read_table(files[0]), tmp_path / "groups.parquet", row_group_size=3)
    images = load_images([str(tmp_path / "groups.parquet")], streaming=True)
    assert images.num_shards == 1 and [len(list(own)) for own in shards(2)] == [3, 3]


def test_streams_need_a_length_and_names(write_parquet, tmp_path):
    images = load_images(write_parquet(), streaming=True)
    with pytest.raises(ValueError, match="--steps-per-epoch"):
        make_loader(images)
    pq.write_table(pq.read_table(write_parquet()).replace_schema_metadata(None), tmp_path / "plain.parquet")
    with pytest.raises(ValueError, match="--class-names"):
        load_images(str(tmp_path / "plain.parquet"), streaming=True)


def test_batches_that_cannot_be_are_refused(write_parquet):
    images = load_images(write_parquet())
    for options, message in (
        ({"batch_size": 5, "accumulation": 2}, "--batch-size 5 cannot be shared evenly; expected a multiple of 2 "),
        ({"batch_size": 6, "accumulation": 2, "mix": Mix(2, 0.2)}, "expected a multiple of 4 .*mix in pairs"),
        ({"batch_size": 16}, "12 training images make 0 batches of --batch-size 16"),
        ({"steps_per_epoch": 4}, "12 training images make 3 batches of --batch-size 4, and an epoch takes 4"),
    ):
        with pytest.raises(ValueError, match=message):
            make_loader(images, **options)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corrupt_image_is_named(source, write_parquet, workers):
    options = source[1]
    images = load_images(write_parquet(count=12, corrupt=[7]), streaming=bool(options))
    loader = make_loader(images, num_workers=workers, **options)
    position = r"\d+" if options else "7"
    message = rf"^Image {position} of the data set cannot be read \(.+\). Repair or remove it.*--skip-corrupt\.$"
    with pytest.raises(CorruptImageError, match=message):
        batches(loader, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_images_give_way_and_are_counted(write_parquet, workers):
    images = load_images(write_parquet(count=12, corrupt=[3, 4, 11]))
    loader = make_loader(images, view=EvalView(FORMAT), num_workers=workers, skip_corrupt=True)
    for epoch in (0, 1):
        index = torch.cat([batch["index"] for batch in batches(loader, epoch)])
        # 3 and 4 give way to 5, 11 to 0.
        assert sorted(index.tolist()) == [0, 0, 1, 2, 5, 5, 5, 6, 7, 8, 9, 10]
        assert loader.take_skipped(Accelerator()) == 4 and loader.take_skipped(Accelerator()) == 0


def test_a_stream_skips_within_the_batch(write_parquet):
    images = load_images(write_parquet(count=12, corrupt=[3, 4, 11]), streaming=True)
    options = {"view": EvalView(FORMAT), "steps_per_epoch": 3, "skip_corrupt": True}
    loader = make_loader(images, **options)
    found = batches(loader, 0)
    assert all(len(batch["labels"]) == 4 for batch in found) and loader.take_skipped(Accelerator()) == 3
    assert_equal(batches(make_loader(images, num_workers=2, **options), 0), found)


def test_nothing_readable_is_an_error(write_parquet):
    for streaming in (False, True):
        images = load_images(write_parquet(count=4, corrupt=range(4)), streaming=streaming)
        with pytest.raises(ValueError, match="None of "):
            batches(make_loader(images, skip_corrupt=True, steps_per_epoch=1), 0)
    with pytest.raises(ValueError, match="no images to evaluate on"):
        evaluation_loader(Accelerator(), load_images(write_parquet()).select([]), EvalView(FORMAT))


def test_loading_leaves_the_models_random_numbers_alone(source):
    images, options = source
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    batches(make_loader(images, **options), 0)
    assert torch.equal(torch.rand(3), expected)
