"""`frugalvit index`: embed images once, to search them by words or by an image.

`accelerate launch -m frugalvit.index` shares the work between processes.
"""

import argparse
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from tqdm import tqdm

from .common.comparison import LIMIT
from .common.data import CorruptImageError, image_files, say_unread
from .common.files import whole_file, write_json
from .common.metrics import check_scores
from .common.speed import images_per_second
from .common.views import prepare_images
from .evaluation.two_towers import TwoTowers, load_two_towers, name_models
from .options.index import parse
from .predict import decode_file
from .training.components.arguments import run_as_program


ABOUT = "index.json"
# Images of a file: what a killed run has to embed again at most.
SHARD = 1_024


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)

    folder, output = Path(arguments.folder).expanduser(), Path(arguments.output)
    if not folder.is_dir():
        raise ValueError(f"There is no folder {arguments.folder!r}; give one with images.")
    # `frugalvit search` may run elsewhere.
    models = {
        name: str(Path(model).resolve()) if Path(model).is_dir() else model
        for name, model in name_models(arguments).items()
    }
    about = {"folder": str(folder.resolve()), **models}
    check_about(output, about)
    say_unread(folder)
    files = [describe(path, folder) for path in sorted(image_files(folder))]
    if not files:
        raise ValueError(f"There are no images in the folder {arguments.folder!r}.")
    known = {tuple(file) for shard in read_shards(output) for file in shard.files} if output.is_dir() else set()
    missing = [file for file in files if tuple(file) not in known]
    state = PartialState(cpu=arguments.device == "cpu")
    if missing:
        # Each process has an accelerator of its own.
        device = arguments.device or str(state.device)
        towers = load_two_towers(arguments.model, arguments.vision_model, device, arguments.trust_remote_code)
        if state.is_main_process:
            output.mkdir(parents=True, exist_ok=True)
            write_json(output / ABOUT, about)
        state.wait_for_everyone()
        own = missing[state.process_index :: state.num_processes]
        embed_files(towers, folder, own, output, arguments)
        state.wait_for_everyone()
        if arguments.vision_model and state.is_main_process:
            readable = [file for shard in read_shards(output) for file in shard.files]
            print(compare_speeds(towers, folder, readable[: arguments.batch_size], arguments))
    if state.is_main_process:
        found = len({tuple(file) for shard in read_shards(output) for file in shard.files} & set(map(tuple, files)))
        print(f"{found:,} images in {arguments.output}, {len(missing):,} of them looked at now.")


def compare_speeds(towers: TwoTowers, folder: Path, files: Sequence[list], arguments: argparse.Namespace) -> str:
    """Images a second, once they are decoded, of a CLIP with another image side and with its own."""
    own = load_two_towers(arguments.model, None, str(towers.device), arguments.trust_remote_code)
    calls = {}
    for name, side in (("new", towers), ("own", own)):
        pixel_values, *_ = _Collate(folder, side.image_processor, skip_corrupt=False)(files)
        calls[name] = functools.partial(_embed, side, pixel_values.to(side.device))
    speeds = images_per_second(calls, pixel_values.to(towers.device), limit=LIMIT)
    return (
        f"Without reading, in batches of {len(files)}: {speeds['new']:.4g} images/s, "
        f"{speeds['own']:.4g} with the CLIP's own image side."
    )


@torch.inference_mode()
def _embed(towers: TwoTowers, pixel_values: torch.Tensor, _) -> torch.Tensor:
    return towers.embed_images(pixel_values)


@dataclass
class Shard:
    """A file of embeddings.

    Args:
        files (`list[list]`): Name within the folder, bytes and time of change of each image.
        embeddings (`torch.Tensor`): `(images, width)` float32 of norm 1.
    """

    files: list[list]
    embeddings: torch.Tensor


def describe(path: Path, folder: Path) -> list:
    """What tells an image from a later one of the same name."""
    stat = path.stat()
    return [path.relative_to(folder).as_posix(), stat.st_size, stat.st_mtime_ns]


def check_about(output: Path, about: dict):
    """Raise a ValueError if a folder is no index, or one by another model or of other images."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    made = read_about(output)
    if different := [name for name in {**about, **made} if about.get(name) != made.get(name)]:
        name = different[0]
        raise ValueError(
            f"The index {str(output)!r} has {name} {made.get(name)!r}, got {about.get(name)!r}; choose another "
            "--output."
        )


def read_about(output: Path) -> dict:
    """Folder and models of an index.

    Raises:
        ValueError: if it is none.
    """
    try:
        about = json.loads((output / ABOUT).read_text(encoding="utf-8"))
        known = isinstance(about, dict) and {"folder", "model"} <= about.keys()
    except (OSError, ValueError):
        known = False
    if not known:
        raise ValueError(f"{str(output)!r} is no index; `frugalvit index FOLDER --output INDEX` makes one.")
    return about


def read_shards(output: Path) -> Iterator[Shard]:
    """The embeddings of an index.

    Raises:
        ValueError: if a file is damaged.
    """
    for path in sorted(output.glob("embeddings-*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                yield Shard(json.loads(file.metadata()["files"]), file.get_tensor("embeddings"))
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} is damaged; remove it and run `frugalvit index` again.") from error


def embed_files(towers: TwoTowers, folder: Path, files: Sequence[list], output: Path, arguments: argparse.Namespace):
    """Embed images and write them, a file for so many."""
    state = PartialState()
    collate = _Collate(folder, towers.image_processor, arguments.skip_corrupt)
    batches = DataLoader(files, arguments.batch_size, collate_fn=collate, num_workers=arguments.num_workers)
    number = sum(1 for _ in output.glob("embeddings-*.safetensors"))
    kept, embeddings = [], []

    def write():
        nonlocal number
        if kept:
            path = output / f"embeddings-{number:05d}-{state.process_index}.safetensors"
            with whole_file(path) as aside:
                save_file({"embeddings": torch.cat(embeddings)}, aside, {"files": json.dumps(kept)})
            number += 1
            kept.clear()
            embeddings.clear()

    disable = None if state.is_main_process else True
    with torch.inference_mode(), tqdm(total=len(files), desc="index", unit=" images", disable=disable) as progress:
        for pixel_values, readable, seen in batches:
            if readable:
                embeddings.append(towers.embed_images(pixel_values.to(towers.device)).cpu())
                check_scores(embeddings[-1], "embeddings")
                kept += readable
            progress.update(seen)
            if len(kept) >= SHARD:
                write()
    write()


class _Collate:
    """Files to pixel values of those that can be read, these files, and how many there were."""

    def __init__(self, folder: Path, image_processor, skip_corrupt: bool):
        self.folder, self.image_processor, self.skip_corrupt = folder, image_processor, skip_corrupt

    def __call__(self, files: list[list]) -> tuple[torch.Tensor | None, list[list], int]:
        images, readable = [], []
        for file in files:
            try:
                images.append(decode_file(self.folder / file[0], file[0]))
            except (ValueError, PermissionError) as error:
                if not self.skip_corrupt:
                    # In one line also where a worker found it.
                    raise CorruptImageError(str(error)) from error
                tqdm.write(f"Left out: {file[0]} ({error})", file=sys.stderr)
                continue
            readable.append(file)
        pixel_values = prepare_images(self.image_processor, images) if images else None
        return pixel_values, readable, len(files)


if __name__ == "__main__":
    run_as_program(main, "frugalvit index")
