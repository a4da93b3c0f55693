"""`frugalvit search`: images of an index by words, or by an image that is like them."""

import functools
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .common.decoding import is_image_file, is_unread_picture, open_image
from .common.image_files import decode_file
from .common.reading import Reader
from .common.tables import printable
from .evaluation.two_towers import TwoTowers, load_two_towers
from .index import Shard, describe, read_about, read_shards
from .options.search import parse
from .pictures import CAPTION_SIZE, TEXT_COLOR, check_picture_path, save_figure


try:
    import faiss
except ImportError:
    faiss = None

COLUMNS, PANEL = 4, 2.0


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    if arguments.picture:
        check_picture_path(arguments.picture)
    index = Path(arguments.index).expanduser()
    about = read_about(index)
    towers = load_two_towers(about["model"], about.get("vision_model"), arguments.device, arguments.trust_remote_code)
    folder = Path(about["folder"])
    found = search(embed_query(towers, arguments.query), read_shards(index), arguments.top, folder)
    paths = [str(folder / each.name) for each in found]
    if arguments.json:
        rows = [{"image": path, "cosine": each.cosine} for path, each in zip(paths, found, strict=True)]
        print(json.dumps(rows, indent=2))
    else:
        for path, each in zip(paths, found, strict=True):
            print(f"{each.cosine:7.4f}  {printable(path)}")
    if arguments.picture:
        save_figure(draw_found(paths, found, arguments.query), arguments.picture)


@dataclass(frozen=True)
class Found:
    """An image of an index: its name in the folder, and the cosine of its embedding with the query's."""

    name: str
    cosine: float


@torch.inference_mode()
def embed_query(towers: TwoTowers, query: str) -> torch.Tensor:
    """Return the embedding `(width,)` of words or, if the query names a file with an image (see `image_called`), of
    that image."""
    file = image_called(query)
    if file is not None:
        reader = Reader(towers.image_processor, towers.share_read)
        image = decode_file(file, query, hint="", at_least=reader.at_least)
        pixel_values = reader.batch([reader.pixels(image)])
        return towers.embed_images(pixel_values.to(towers.device))[0].cpu()
    return towers.embed_texts([query])[0].cpu()


def image_called(query: str) -> Path | None:
    """Return the file with an image that a query names, or `None` if the query is words.

    A file counts if its name ends as images' names do, if the query names its folder, too, or if it holds an image.

    Raises:
        FileNotFoundError: if a query ends as images' names do, but there is no such file.
    """
    try:
        file = Path(query).expanduser()
        exists = file.is_file()
    # Too long for a name, or a "~" that is nobody's home.
    except (OSError, RuntimeError):
        file, exists = Path(query), False
    called_so = is_image_file(file) or is_unread_picture(file)
    if exists and (called_so or os.sep in query or _holds_image(file)):
        return file
    if called_so:
        raise FileNotFoundError(f"There is no file {query!r}; give an image that is there, or words.")
    return None


def _holds_image(file: Path) -> bool:
    try:
        open_image(file).close()
    # Whatever a file that is none leads Pillow to.
    except Exception:
        return False
    return True


def search(query: torch.Tensor, shards: Iterable[Shard], top: int, folder: Path | None = None) -> list[Found]:
    """Return the images that are most like a query, the best first.

    An image may have been embedded several times. The embedding counts whose bytes and time are those of the file that
    is there now; if there is none, or no folder is given, the last one counts.

    Args:
        query (`torch.Tensor`): `(width,)` of norm 1.
        shards (iterable of `Shard`): The index, in the order in which it was made.
        top (`int`): Images, at most.
        folder (`Path`, *optional*): The folder of the images; those that are gone are left out.

    Raises:
        ValueError: if nothing is left to find, or the embeddings have another width.
    """
    files, embeddings = [], []
    for shard in shards:
        if shard.embeddings.shape[1] != len(query):
            raise ValueError(
                f"The index has embeddings of {shard.embeddings.shape[1]} numbers, the model makes {len(query)}."
            )
        files += shard.files
        embeddings.append(shard.embeddings)
    rows = {}
    for number, (name, *_) in enumerate(files):
        rows.setdefault(name, []).append(number)

    @functools.cache
    def row_of(name: str) -> int | None:
        """Return the row of the embedding that counts; `None` if the image is gone."""
        there = describe(folder / name) if folder else files[rows[name][-1]][1:]
        return there and next((row for row in reversed(rows[name]) if files[row][1:] == there), rows[name][-1])

    found, seen = [], 0
    # More of them, as long as what was found is gone or has changed since.
    while len(found) < top and seen < len(files):
        count = min(len(files), max(top, 2 * seen))
        for cosine, number in list(zip(*nearest(embeddings, query, count), strict=True))[seen:]:
            name = files[number][0]
            if row_of(name) == number:
                found.append(Found(name, cosine))
        seen = count
    if not found:
        raise ValueError(f"The index has no images, or none of its {len(rows):,} is there any more.")
    return found[:top]


def nearest(embeddings: list[torch.Tensor], query: torch.Tensor, count: int) -> tuple[list[float], list[int]]:
    """Return the largest products with a query and the numbers of their rows, the largest first. All rows are
    compared, by faiss where it is installed.

    Args:
        embeddings (`list[torch.Tensor]`): `(rows, width)` float32 each; rows are counted through all of them.
        query (`torch.Tensor`): `(width,)` float32.
        count (`int`): Number of products, at most the number of rows.
    """
    products, rows, first = [], [], 0
    for part in embeddings:
        best = min(count, len(part))
        if faiss is None:
            values, indices = (part @ query).topk(best)
        else:
            found = faiss.knn(query[None].numpy(), part.numpy(), best, metric=faiss.METRIC_INNER_PRODUCT)
            values, indices = (torch.from_numpy(each[0]) for each in found)
        products.append(values)
        rows.append(indices + first)
        first += len(part)
    products, order = torch.cat(products).topk(count)
    return products.tolist(), torch.cat(rows)[order].tolist()


def draw_found(paths: list[str], found: list[Found], query: str) -> Figure:
    """Draw the images in rows, the best first."""
    rows = math.ceil(len(paths) / COLUMNS)
    figure = Figure(figsize=(COLUMNS * PANEL, rows * (PANEL + 0.3) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    style = {"color": TEXT_COLOR, "parse_math": False}
    figure.suptitle(printable(query), fontsize=CAPTION_SIZE + 2, **style)
    panels = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axes in panels:
        axes.set_axis_off()
    for axes, path, each in zip(panels, paths, found, strict=False):
        axes.imshow(decode_file(Path(path), path, hint=""))
        axes.set_title(f"{printable(Path(path).name)}, {each.cosine:.3f}", fontsize=CAPTION_SIZE, **style)
    return figure
