"""A teacher's embeddings and maps on disk, so that no view of an image is embedded twice.

As in TinyViT (Wu et al. 2022), views are not stored: a view is a function of (seed, epoch, image), see
`augmentation.py`. A second run that shows the same views, with another student or another learning rate, finds the
embeddings and trains with the very same targets.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from ...common.files import read_json, whole_file, write_json
from .augmentation import BootstrapView


class TeacherCache:
    """Embeddings `(image, width)` in float32, and feature maps `(image, map_width)` in bfloat16, a file of each for
    each epoch of views, which all processes share.

    Beside each embedding stands its checksum, with that of its maps, so that one that was never written, or only in
    part by a run that was killed, is computed again.

    Args:
        folder (`str` or `Path`): Folder of the cache; made if it is not there.
        accelerator (`Accelerator`): Processes and precision.
        teacher (`nn.Module`): The model that embeds.
        width (`int`): Numbers of an embedding, and of what else is kept in float32.
        view (`BootstrapView`), images (`datasets.Dataset`), seed (`int`): The views that are embedded.
        attention (`bool`): Whether the teacher's attention to patches stands beside the embeddings.
        map_width (`int`): Numbers of all maps of an image.
        map_layers (`list[int]`): Layers of these maps.

    Raises:
        ValueError: if the folder holds something else, or the images are streamed.
    """

    def __init__(
        self,
        folder: str | Path,
        accelerator: Accelerator,
        teacher: nn.Module,
        width: int,
        view: BootstrapView,
        images: datasets.Dataset,
        seed: int,
        attention: bool = False,
        map_width: int = 0,
        map_layers: Sequence[int] = (),
    ):
        if isinstance(images, datasets.IterableDataset):
            raise ValueError("--teacher-cache knows images by their numbers, and a stream has none.")
        self.folder, self.accelerator = Path(folder), accelerator
        # NumPy has no bfloat16; what has its bits is an integer there.
        self.tables = {"embeddings": ((len(images), width), np.float32), "checksums": ((len(images),), np.uint32)}
        if map_width:
            self.tables["maps"] = (len(images), map_width), np.int16
        # Student and teacher see the same part of an image; the student's pixels are its own affair.
        pixels = view.formats.get("teacher_pixel_values", view.formats["pixel_values"])
        about = {
            "teacher": fingerprint(teacher),
            "precision": accelerator.mixed_precision,
            "pixels": repr(replace(pixels, resize=None)),
            "views": repr((list(view.crop.scale), list(view.crop.ratio), view.flip)),
            "images": fingerprint_images(images),
            "seed": seed,
        }
        if attention:
            about["attention"] = True
        if map_width:
            about["maps"] = list(map_layers)
        if pixels.reverse_channels:
            about["reverse_channels"] = True
        if view.zoom_out:
            about["zoom_out"] = view.zoom_out.side_range[1]
        if view.canvas_images:
            about["canvas_images"] = view.canvas_images
        file = self.folder / "cache.json"
        with accelerator.main_process_first():
            if not file.is_file():
                # Another run that starts now may be writing a file, whose name begins with a dot.
                if self.folder.is_file() or any(self.folder.glob("[!.]*")):
                    raise ValueError(f"--teacher-cache {folder} holds something else; give another folder.")
                self.folder.mkdir(parents=True, exist_ok=True)
                write_json(file, about)
        there = read_json(file)
        if different := [name for name in {**about, **there} if about.get(name) != there.get(name)]:
            raise ValueError(
                f"--teacher-cache {folder} holds embeddings for other {', '.join(different)}; give another folder."
            )

    def open(self, epoch: int):
        """Go to an epoch of views, in all processes."""
        files = {what: self.folder / f"epoch-{epoch:05d}-{what}.npy" for what in self.tables}
        with self.accelerator.main_process_first():
            for what, (shape, dtype) in self.tables.items():
                if not files[what].is_file():
                    with whole_file(files[what]) as aside:
                        np.lib.format.open_memmap(aside, "w+", dtype, shape)
                        reserve(aside)
        kept = {what: np.load(file, mmap_mode="r+") for what, file in files.items()}
        self.checksums = kept.pop("checksums")
        self.kept = [*kept.values()]

    def __call__(self, index: torch.Tensor, embed: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Embeddings of a batch of views and their maps, `(batch, width + map_width)` in float32.

        Args:
            index (`torch.Tensor`): The images' numbers, `(batch,)`, on the CPU.
            embed (`Callable`): Computes them; called if any of them is not known.
        """
        rows = index.numpy()
        found = [table[rows] for table in self.kept]
        if not (self.checksums[rows] == row_checksums(*found)).all():
            embeddings, *maps = embed().float().cpu().tensor_split([self.kept[0].shape[1]], dim=1)
            found = [embeddings.numpy()]
            if len(self.kept) > 1:
                found.append(maps[0].bfloat16().view(torch.int16).numpy())
            for table, values in zip(self.kept, found, strict=True):
                table[rows] = values
            self.checksums[rows] = row_checksums(*found)
        embeddings, *maps = map(torch.from_numpy, found)
        # Rounded to bfloat16 in the first run, too, which so trains with what a second one finds.
        parts = [embeddings, *(each.view(torch.bfloat16).float() for each in maps)]
        return torch.cat(parts, dim=1).to(self.accelerator.device, non_blocking=True)


def fingerprint_images(images: datasets.Dataset) -> str:
    """Fingerprint of images; of files, of their folders' and own names, as each run unpacks a zip file elsewhere."""
    first = images[0]["image"] if isinstance(images, datasets.Dataset) else None
    if not isinstance(first, dict) or first["bytes"] is not None:
        return images._fingerprint
    names = "\n".join("/".join(Path(record["path"]).parts[-2:]) for record in images["image"])
    return hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest()


def row_checksums(*tables: np.ndarray) -> np.ndarray:
    """CRC-32 of each row of all tables; never 0, which a new file is full of."""
    rows = (b"".join(row.tobytes() for row in parts) for parts in zip(*tables, strict=True))
    return np.array([zlib.crc32(row) or 1 for row in rows], dtype=np.uint32)


def reserve(path: Path):
    """Take a file's space on the disk now: where it is full, writing through a map would kill the process later."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def fingerprint(model: nn.Module) -> str:
    """A hash of a model's weights, layers and configuration."""
    config = model.config.to_dict() if isinstance(model, PreTrainedModel) else {}
    what = {name: value for name, value in config.items() if name not in ("_name_or_path", "transformers_version")}
    digest = hashlib.sha256(f"{model!r}{json.dumps(what, sort_keys=True, default=str)}".encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
