"""A teacher's embeddings on disk, so that no view of an image is embedded twice.

As in TinyViT (Wu et al. 2022), views are not stored: a view is a function of (seed, epoch, image), see
`augmentation.py`. A second run that shows the same views, with another student or another learning rate, finds the
embeddings and trains with the very same targets.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable
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
    """Embeddings `(image, width)` in float32, a file for each epoch of views, which all processes share.

    Beside each embedding stands its checksum, so that one that was never written, or only in part by a run that was
    killed, is computed again.

    Args:
        folder (`str` or `Path`): Folder of the cache; made if it is not there.
        accelerator (`Accelerator`): Processes and precision.
        teacher (`nn.Module`): The model that embeds.
        width (`int`): Numbers that are kept for a view.
        view (`BootstrapView`), images (`datasets.Dataset`), seed (`int`): The views that are embedded.
        attention (`bool`): Whether the teacher's attention to patches stands beside the embeddings.

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
    ):
        if isinstance(images, datasets.IterableDataset):
            raise ValueError("--teacher-cache knows images by their numbers, and a stream has none.")
        self.folder, self.accelerator, self.shape = Path(folder), accelerator, (len(images), width)
        # Student and teacher see the same part of an image; the student's pixels are its own affair.
        pixels = view.formats.get("teacher_pixel_values", view.formats["pixel_values"])
        about = {
            "teacher": fingerprint(teacher),
            "precision": accelerator.mixed_precision,
            "pixels": repr(replace(pixels, resize=None)),
            "views": repr((list(view.crop.scale), list(view.crop.ratio), view.flip)),
            "images": images._fingerprint,
            "seed": seed,
        }
        if attention:
            about["attention"] = True
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
        shapes = {"embeddings": (self.shape, np.float32), "checksums": (self.shape[:1], np.uint32)}
        files = {what: self.folder / f"epoch-{epoch:05d}-{what}.npy" for what in shapes}
        with self.accelerator.main_process_first():
            for what, (shape, dtype) in shapes.items():
                if not files[what].is_file():
                    with whole_file(files[what]) as aside:
                        np.lib.format.open_memmap(aside, "w+", dtype, shape)
                        reserve(aside)
        self.embeddings, self.checksums = (np.load(files[what], mmap_mode="r+") for what in shapes)

    def __call__(self, index: torch.Tensor, embed: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Embeddings of a batch of views, `(batch, width)` in float32.

        Args:
            index (`torch.Tensor`): The images' numbers, `(batch,)`, on the CPU.
            embed (`Callable`): Computes the embeddings, `(batch, width)`; called if any of them is not known.
        """
        rows = index.numpy()
        found = self.embeddings[rows]
        if (self.checksums[rows] == row_checksums(found)).all():
            return torch.from_numpy(found).to(self.accelerator.device, non_blocking=True)
        computed = embed().float()
        values = computed.cpu().numpy()
        self.embeddings[rows], self.checksums[rows] = values, row_checksums(values)
        return computed


def row_checksums(embeddings: np.ndarray) -> np.ndarray:
    """CRC-32 of each row; never 0, which a new file is full of."""
    return np.array([zlib.crc32(row.tobytes()) or 1 for row in embeddings], dtype=np.uint32)


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
