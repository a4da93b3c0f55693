"""From photographs in files to labels, end to end: images a second, the parts of the time, and memory.

    python benchmarks/photographs_per_second.py --photographs TEST --teacher TEACHER

Photographs of TEST, enlarged to as many megapixels where they are smaller, lie as JPEGs in a folder. Labels are
asked of `frugalvit.Classifier`, of the teacher, of the student with several numbers of tokens, with and without
`exact`, beside `pipeline("image-classification")`, and, with random weights, beside a ViT-S/14 of timm after
`create_transform` and a ViT-B/16 of open_clip after its own preprocessing, each with a `DataLoader`. All take turns in
rounds, of which the median counts. `stages` are the milliseconds of an image in one thread, one stage after the other.
Without --teacher, there is none. Writes photographs_per_second.json.
"""

import argparse
import io
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from transformers import pipeline

from frugalvit import Classifier
from frugalvit.common.command_line import CommandParser, positive
from frugalvit.common.data import load_images, sample
from frugalvit.common.decoding import decode_image, read_image
from frugalvit.common.num_tokens import using_tokens
from frugalvit.common.precision import bfloat16_is_fast
from frugalvit.common.reading import count_threads
from frugalvit.common.resources import checkpoint_path
from frugalvit.common.speed import median_seconds
from frugalvit.common.tables import format_table
from shared import add_results_argument, write_table


STUDENT = "caltech101-sparseformer"
QUALITY = 90
BATCH_SIZE = 32


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photographs", required=True, help="parquet file of photographs")
    parser.add_argument("--teacher", help="folder of the teacher")
    parser.add_argument("--megapixels", type=float, nargs="+", default=[0.21, 1.5, 12], help="default: 0.21 1.5 12")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[64, 36, 16, 9], help="default: 64 36 16 9")
    parser.add_argument("--images", type=positive, default=128, help="of each size, a round (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=5, help="default: %(default)s")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "auto"], default="float32", help="of weights (default: %(default)s)"
    )
    parser.add_argument("--others", action="store_true", help="timm's and open_clip's, too, which takes time")
    parser.add_argument(
        "--memory-images", type=int, default=10_000, help="for which memory is watched, 0 for none (default: 10000)"
    )
    add_results_argument(parser)
    arguments = parser.parse_args()
    records = sample(load_images([arguments.photographs], "train"), arguments.images, seed=0)
    rows, memory = [], None
    with tempfile.TemporaryDirectory() as folder:
        for megapixels in arguments.megapixels:
            paths = write_photographs(records, megapixels, Path(folder))
            contenders = make_contenders(arguments)
            calls = {name: partial(count_labels, label, paths) for name, (_, label) in contenders.items()}
            seconds = median_seconds(calls, arguments.rounds, warmup=1)
            for name, (classify, _) in contenders.items():
                row = {"megapixels": megapixels, "contender": name, "images_per_second": len(paths) / seconds[name]}
                rows.append(row | (stages(classify, paths) if isinstance(classify, Classifier) else {}))
                print(format_table(rows[-1:]), flush=True)
            if memory is None and arguments.memory_images:
                memory = watch_memory(make_classifier(arguments, 16), paths, arguments.memory_images)
    print(format_table(rows))
    settings = {name: getattr(arguments, name) for name in ("images", "rounds", "dtype", "megapixels", "tokens")}
    settings |= {"batch_size": BATCH_SIZE, "quality": QUALITY, "threads": torch.get_num_threads()}
    settings |= {"threads_that_decode": count_threads(), "bfloat16_is_fast": bfloat16_is_fast()}
    write_table(arguments.results_dir / "photographs_per_second.json", settings, rows, memory=memory)


def write_photographs(records, megapixels: float, folder: Path) -> list[str]:
    """JPEGs of so many pixels."""
    paths = []
    for index, record in enumerate(records):
        image = decode_image(record["image"], index)
        factor = (1e6 * megapixels / (image.width * image.height)) ** 0.5
        size = [round(factor * length) for length in image.size]
        paths.append(str(folder / f"{megapixels:g}-{index}.jpg"))
        image.resize(size, Image.Resampling.BICUBIC).save(paths[-1], quality=QUALITY)
    return paths


def make_classifier(arguments, tokens: int | None = None, **options) -> Classifier:
    """The student with so many tokens, or the teacher."""
    model = arguments.teacher if tokens is None else STUDENT
    return Classifier(model, num_tokens=tokens, batch_size=BATCH_SIZE, dtype=arguments.dtype, device="cpu", **options)


def make_contenders(arguments) -> dict[str, tuple[object, Callable[[list[str]], Iterator]]]:
    """Make the contenders, by name: a classifier, and a function that labels files."""
    classifiers = {f"student, {tokens} tokens": make_classifier(arguments, tokens) for tokens in arguments.tokens}
    classifiers |= {
        f"student, {tokens} tokens, exact": make_classifier(arguments, tokens, exact=True)
        for tokens in arguments.tokens[:1]
    }
    if arguments.teacher:
        classifiers = {
            "teacher": make_classifier(arguments),
            "teacher, exact": make_classifier(arguments, exact=True),
        } | classifiers
    found = {name: (classify, classify) for name, classify in classifiers.items()}
    models = {"pipeline, student": checkpoint_path(STUDENT)} | (
        {"pipeline, teacher": arguments.teacher} if arguments.teacher else {}
    )
    for name, model in models.items():
        label = pipeline("image-classification", str(model), device="cpu", batch_size=BATCH_SIZE)
        found[name] = (label, label)
    if arguments.others:
        found["timm, ViT-S/14"] = (None, timm_labels())
        found["open_clip, ViT-B/16"] = (None, open_clip_labels())
    return found


class Files(Dataset):
    """Files as a preprocessing makes tensors of them."""

    def __init__(self, paths: list[str], transform: Callable):
        self.paths, self.transform = paths, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self.paths[index]) as image:
            return self.transform(image.convert("RGB"))


def in_batches(model: Callable, transform: Callable) -> Callable[[list[str]], Iterator]:
    """Return a function that labels files with a `DataLoader`, with as many processes as CPUs."""

    @torch.inference_mode()
    def label(paths: list[str]) -> Iterator:
        for pixel_values in DataLoader(Files(paths, transform), BATCH_SIZE, num_workers=count_threads()):
            yield from model(pixel_values).argmax(-1).tolist()

    return label


def timm_labels() -> Callable[[list[str]], Iterator]:
    import timm
    from timm.data import create_transform, resolve_model_data_config

    model = timm.create_model("vit_small_patch14_dinov2", img_size=224, num_classes=101).eval()
    # Its own are for 518 pixels.
    config = resolve_model_data_config(model) | {"input_size": (3, 224, 224), "crop_pct": 0.875}
    return in_batches(model, create_transform(**config, is_training=False))


def open_clip_labels() -> Callable[[list[str]], Iterator]:
    import open_clip

    model, _, transform = open_clip.create_model_and_transforms("ViT-B-16")
    return in_batches(model.eval().encode_image, transform)


def count_labels(label: Callable[[list[str]], Iterator], paths: list[str]):
    """Label all photographs."""
    found = sum(1 for _ in label(paths))
    assert found == len(paths), f"{label}: {found} of {len(paths)}"


@torch.inference_mode()
def stages(classify: Classifier, paths: list[str], images: int = 32) -> dict[str, float]:
    """Milliseconds of an image in one thread, stage by stage: reading into memory, decoding, resizing, normalizing and
    computing; and the share of all but the last."""
    threads, reader, paths = torch.get_num_threads(), classify.reader, list(islice(cycle(paths), images))
    torch.set_num_threads(1)
    clock = [time.perf_counter()]

    def lap(result):
        clock.append(time.perf_counter())
        return result

    contents = lap([Path(path).read_bytes() for path in paths])
    decoded = lap([read_image(io.BytesIO(content), at_least=reader.at_least) for content in contents])
    pixels = lap([reader.pixels(image) for image in decoded])
    pixel_values = lap(reader.batch(pixels))
    with using_tokens(classify.model, classify.num_tokens) if classify.num_tokens else nullcontext():
        lap(classify.model(pixel_values.to(classify.dtype)))
    torch.set_num_threads(threads)
    laps = [1000 * (end - start) / images for start, end in zip(clock, clock[1:], strict=False)]
    names = ("read", "decode", "resize", "normalize", "compute")
    return dict(zip(names, laps, strict=True)) | {"share_before_compute": sum(laps[:4]) / sum(laps)}


def watch_memory(classify: Classifier, paths: list[str], images: int) -> dict[str, float]:
    """The largest memory of this process in MB after a tenth of so many photographs, and after all."""
    peaks = {}
    for number, _ in enumerate(classify(islice(cycle(paths), images)), 1):
        if number in (images // 10, images):
            peaks[f"MB after {number}"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return peaks


if __name__ == "__main__":
    main()
