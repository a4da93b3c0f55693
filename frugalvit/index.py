"""`frugalvit index`: embed images once, to search them by words or by an image.

`accelerate launch -m frugalvit.index` shares the work between processes.
"""

import argparse
import json
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from .common.files import LOCK, locked, misshapen, read_json, refuse_links, whole_file, write_json
from .common.folders import image_files, say_unread
from .common.image_files import SKIP_HINT, decode_file
from .common.reading import Reader, read_ahead
from .common.scores import check_scores
from .common.speed import LIMIT, images_per_second
from .common.tables import printable
from .evaluation.two_towers import TwoTowers, load_two_towers, name_models
from .options.index import parse
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
    described = {path.relative_to(folder).as_posix(): describe(path) for path in sorted(image_files(folder))}
    # Some may have been removed meanwhile.
    files = [[name, *description] for name, description in described.items() if description]
    if not files:
        raise ValueError(f"There are no images in the folder {arguments.folder!r}.")
    state, missing = PartialState(cpu=arguments.device == "cpu"), files_missing(output, files)
    if missing:
        # Each process has an accelerator of its own.
        device = arguments.device or str(state.device)
        towers = load_two_towers(arguments.model, arguments.vision_model, device, arguments.trust_remote_code)
        if state.is_main_process:
            output.mkdir(parents=True, exist_ok=True)
        with locked(output) if state.is_main_process else nullcontext():
            if state.is_main_process:
                refuse_links(output, ABOUT)
                write_json(output / ABOUT, about)
            state.wait_for_everyone()
            # Another command may have embedded some until now. All processes share out the same list.
            [missing] = broadcast_object_list([files_missing(output, files)])
            own = missing[state.process_index :: state.num_processes]
            embed_files(towers, folder, own, output, arguments)
            state.wait_for_everyone()
            if arguments.vision_model and state.is_main_process:
                readable = [file for shard in read_shards(output) for file in shard.files]
                print(compare_speeds(towers, folder, readable[: arguments.batch_size], arguments))
    if state.is_main_process:
        found = len(files) - len(files_missing(output, files))
        print(f"{found:,} images in {arguments.output}, {len(missing):,} of them looked at now.")


def files_missing(output: Path, files: Sequence[list]) -> list[list]:
    """Return the files, as in `Shard`, that an index does not know yet."""
    known = {tuple(file) for shard in read_shards(output) for file in shard.files} if output.is_dir() else set()
    return [file for file in files if tuple(file) not in known]


def compare_speeds(towers: TwoTowers, folder: Path, files: Sequence[list], arguments: argparse.Namespace) -> str:
    """Measure images a second, without decoding them, of a CLIP with another image side and with its own."""
    own = load_two_towers(arguments.model, None, str(towers.device), arguments.trust_remote_code)
    models, batches = {}, {}
    for name, side in (("new", towers), ("own", own)):
        reader = Reader(side.image_processor, side.share_read, arguments.exact)
        pixel_values = reader.batch([reader.pixels(_decode(folder, file, reader)) for file in files])
        batches[name] = pixel_values.to(side.device)
        models[name] = side.embed_images
    speeds = images_per_second(models, batches, limit=LIMIT)
    return (
        f"Without reading, in batches of {len(files)}: {speeds['new']:.4g} images/s, "
        f"{speeds['own']:.4g} with the CLIP's own image side."
    )


@dataclass
class Shard:
    """A file of embeddings.

    Args:
        files (`list[list]`): For each image its name within the folder, its bytes and its time of change.
        embeddings (`torch.Tensor`): `(images, width)` float32 of norm 1.
    """

    files: list[list]
    embeddings: torch.Tensor


def describe(path: Path) -> list[int] | None:
    """Return a file's bytes and its time of change in nanoseconds, or `None` if it is gone. They tell it from a later
    file of the same name."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return [status.st_size, status.st_mtime_ns] if stat.S_ISREG(status.st_mode) else None


def check_about(output: Path, about: dict):
    """Raise a ValueError if a folder is no index, or is an index by another model or of other images."""
    if not output.exists() or (output.is_dir() and not any(path.name != LOCK for path in output.iterdir())):
        return
    made = read_about(output)
    if different := [name for name in {**about, **made} if about.get(name) != made.get(name)]:
        name = different[0]
        raise ValueError(
            f"The index {str(output)!r} has {name} {made.get(name)!r}, got {about.get(name)!r}; choose another "
            "--output."
        )


def read_about(output: Path) -> dict:
    """Read the folder of images and the models of an index.

    Raises:
        ValueError: if the folder `output` is no index.
    """
    try:
        return read_json(output / ABOUT, {"folder": str, "model": str, "vision_model": str | None})
    except (ValueError, OSError) as error:
        raise ValueError(f"{str(output)!r} is no index; `frugalvit index FOLDER --output INDEX` makes one.") from error


def shard_files(output: Path) -> list[Path]:
    """The files of embeddings in an index, in the order in which they were written."""
    return sorted(output.glob("embeddings-*.safetensors"), key=lambda path: (shard_number(path), path))


def shard_number(path: Path) -> int:
    """The number in the name of a file of embeddings: later ones have higher numbers."""
    found = re.match(r"embeddings-(\d+)", path.name)
    return int(found[1]) if found else 0


def read_shards(output: Path) -> Iterator[Shard]:
    """Read the embeddings of an index, in the order in which they were made.

    Raises:
        ValueError: if a file is damaged, or is not from `frugalvit index`.
    """
    width = None
    for path in shard_files(output):
        try:
            with safe_open(path, "pt") as file:
                shard = Shard(json.loads(file.metadata()["files"]), file.get_tensor("embeddings"))
            width = width or shard.embeddings.shape[-1]
            check_shard(shard, width)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
            raise ValueError(f"{str(path)!r} is damaged; remove it and run `frugalvit index` again.") from error
        yield shard


def check_shard(shard: Shard, width: int):
    """Raise a ValueError unless a file of embeddings has one of this width for each image, and every image's name lies
    within the folder."""
    if problem := misshapen(shard.files, list[list]):
        raise ValueError(problem)
    for file in shard.files:
        if [type(value) for value in file] != [str, int, int] or not is_within(file[0]):
            raise ValueError(f"{file!r} is no name within the folder, bytes and time")
    embeddings = shard.embeddings
    if embeddings.dtype != torch.float32 or embeddings.shape != (len(shard.files), width):
        raise ValueError(f"{tuple(embeddings.shape)} {embeddings.dtype} for {len(shard.files)} images")
    check_scores(embeddings, "embeddings")


def is_within(name: str) -> bool:
    """Whether a file's name stays inside the folder that it is appended to."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def embed_files(towers: TwoTowers, folder: Path, files: Sequence[list], output: Path, arguments: argparse.Namespace):
    """Embed images and write the embeddings, at least `SHARD` images a file but in the last."""
    state = PartialState()
    reader = Reader(towers.image_processor, towers.share_read, arguments.exact)

    def read(file: list) -> torch.Tensor:
        return reader.pixels(_decode(folder, file, reader))

    images = read_ahead(read, files, 2 * arguments.batch_size, arguments.num_workers)
    # After all that is there, so that nothing is replaced, also where a damaged file was removed.
    number = max(map(shard_number, shard_files(output)), default=-1) + 1
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
        while batch := list(islice(images, arguments.batch_size)):
            if readable := list(_readable(folder, batch, arguments.skip_corrupt)):
                pixel_values = reader.batch([pixels for _, pixels in readable])
                embeddings.append(towers.embed_images(pixel_values.to(towers.device)).cpu())
                check_scores(embeddings[-1], "embeddings")
                kept += [file for file, _ in readable]
            progress.update(len(batch))
            if len(kept) >= SHARD:
                write()
    write()


def _decode(folder: Path, file: list, reader: Reader) -> Image.Image:
    return decode_file(folder / file[0], file[0], at_least=reader.at_least)


def _readable(
    folder: Path, batch: Sequence[tuple[list, Future]], skip_corrupt: bool
) -> Iterator[tuple[list, torch.Tensor]]:
    """Yield the files of a batch with their pixels. Files that are gone are left out; with `skip_corrupt`, those that
    cannot be read are, too."""
    for file, future in batch:
        try:
            yield file, future.result()
        except (ValueError, PermissionError) as error:
            if describe(folder / file[0]) is None:
                tqdm.write(f"Left out: {printable(file[0])} (it was removed meanwhile)", file=sys.stderr)
                continue
            if not skip_corrupt:
                raise
            reason = str(error).removesuffix(SKIP_HINT)
            tqdm.write(f"Left out: {printable(f'{file[0]} ({reason})')}", file=sys.stderr)


if __name__ == "__main__":
    run_as_program(main, "frugalvit index")
