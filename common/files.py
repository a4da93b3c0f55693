"""Files and folders that appear whole or not at all, whenever the process dies, and take the place of nothing else."""

import errno
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib.resources import files
from pathlib import Path

from safetensors import SafetensorError


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# What `save_pretrained` and the commands write into a model folder, besides source files and the card's pictures.
MODEL_FILES = (
    *("config.json", "generation_config.json", "README.md", "model*.safetensors", "model.safetensors.index.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.*"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    # Files of exported models and of their page.
    *("export.json", "report.json", "*.onnx", "*.onnx.data", "openvino_*.xml", "openvino_*.bin", "*.pte", "*.pt2"),
    *("index.html", "ort*.mjs", "ort*.wasm"),
)
# Reasons for which nothing more can be written to a disk.
DISK_ERRORS = {
    getattr(errno, name): text
    for name, text in {
        "ENOSPC": "the disk is full",
        "EDQUOT": "the disk quota is used up",
        "EFBIG": "the file would be larger than is allowed",
        "EROFS": "the disk can only be read",
        "EIO": "the disk fails",
    }.items()
    if hasattr(errno, name)
}
LOCK = ".lock"


def check_file_path(path: str | os.PathLike) -> Path:
    """The path, if a file can be written there, which is tried.

    Raises:
        ValueError: if it is a folder.
        FileNotFoundError: if its folder does not exist.
        OSError: if nothing can be written there.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"Cannot write {str(path)!r}: it is a folder, expected a file name.")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"Cannot write {str(path)!r}: the folder {str(path.parent)!r} does not exist; create it."
        )
    try:
        if is_stream(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            target, aside = _beside(path)
            try:
                aside.write_bytes(bytes(4096))
            finally:
                aside.unlink(missing_ok=True)
    except OSError as error:
        reason = DISK_ERRORS.get(error.errno, error.strerror)
        raise OSError(f"Cannot write {str(path)!r}: {reason}. Choose another place.") from error
    return path


def is_stream(path: str | os.PathLike) -> bool:
    """Whether a path is a device, a pipe, a socket, or a file that the process has open (`/dev/stdout`): what is
    written there goes through it, and nothing takes its place."""
    path = Path(path)
    opened = str(path.parent) in ("/dev", "/dev/fd") or Path("/proc") in path.parents
    return path.exists() and (opened or not path.is_file())


def resolved(path: Path) -> Path:
    """Where a path leads to, through symbolic links.

    Raises:
        OSError: if a link leads to itself.
    """
    try:
        return path.resolve()
    except RuntimeError as error:
        # Python 3.13 raises what an open file would.
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error


def _beside(path: Path) -> tuple[Path, Path]:
    """The file that a path leads to, through symbolic links, and one beside it with its ending."""
    target = resolved(path)
    return target, target.with_name(f".{target.stem}.{os.getpid()}{path.suffix}")


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """A path to write to, with the ending of `path`; what is there takes its name if the block succeeds.

    A symbolic link stays and leads to the new file, whose permissions are those of the old one. Into what is no
    regular file (`/dev/stdout`, a pipe) it is written.
    """
    path = Path(path)
    if is_stream(path):
        with tempfile.TemporaryDirectory() as folder:
            aside = Path(folder) / f"output{path.suffix}"
            yield aside
            with aside.open("rb") as source, path.open("ab") as stream:
                shutil.copyfileobj(source, stream)
        return
    target, aside = _beside(check_file_path(path))
    try:
        with disk_errors(target.parent):
            yield aside
            if target.exists():
                shutil.copymode(target, aside)
            aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def read_text(path: str | os.PathLike) -> str:
    """The text of a file.

    Raises:
        OSError: if it is none: a pipe that nobody writes to would be waited for.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise OSError(f"{str(path)!r} is no file, expected one with text.")
    return path.read_text(encoding="utf-8")


def write_text(path: str | os.PathLike, text: str):
    with whole_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike, content):
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def forget_code(folder: Path):
    """Let the configuration of a model folder, and of its processor, point at no source files (`auto_map`): none lie
    beside it."""
    for name in ("config.json", "processor_config.json"):
        if not (folder / name).exists():
            continue
        configuration = json.loads((folder / name).read_text(encoding="utf-8"))
        for part in (configuration, *(part for part in configuration.values() if isinstance(part, dict))):
            part.pop("auto_map", None)
        write_json(folder / name, configuration)


@contextmanager
def disk_errors(folder: str | os.PathLike) -> Iterator[None]:
    """Says of what a disk does not take why, and how much room there is: libraries hide that.

    Raises:
        OSError: in place of what was raised.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, OSError):
            reason = DISK_ERRORS.get(error.errno)
        else:
            reason = next((text for code, text in DISK_ERRORS.items() if f"(os error {code})" in str(error)), None)
            # torch.save reports neither the number nor the text.
            if "inline_container" in str(error) or "PytorchStreamWriter" in str(error):
                reason = "the disk takes no more"
        if reason is None:
            raise
        free = shutil.disk_usage(folder).free
        raise OSError(
            f"Cannot write to {str(folder)!r}: {reason}, {free / 1e6:,.1f} MB are free. What was complete before is "
            "kept; make room or choose another place, and start again."
        ) from error


@contextmanager
def locked(folder: str | os.PathLike) -> Iterator[None]:
    """Keeps other processes that ask for the same out of a folder, until this one leaves it or ends, killed or not.

    Raises:
        ValueError: if another process is in there; it says which.
    """
    path = Path(folder) / LOCK
    while True:
        with path.open("a+", encoding="utf-8") as file:
            try:
                if fcntl:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                file.seek(0)
                raise ValueError(
                    f"{str(folder)!r} is in use by {file.read() or 'another process'}; wait until that ends or give "
                    "another folder."
                ) from None
            except OSError:
                # This disk does not support locks.
                pass
            # The process that left may have removed the file meanwhile.
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                continue
            file.truncate(0)
            file.write(f"process {os.getpid()} of {socket.gethostname()}")
            file.flush()
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


@contextmanager
def whole_folder(output: str | Path, overwrite: bool = False):
    """A new folder beside `output` that takes its name if the block succeeds and is removed if it does not.

    A process that is killed just between the two renames of overwriting leaves the old folder as `.NAME.replaced`; the
    next call gives it its name back.

    Raises:
        ValueError: if `output` is a file or a folder with something in it, unless `overwrite` is set and all in there
            is what a model folder consists of.
    """
    # A symbolic link stays.
    output = resolved(Path(output))
    partial, replaced = (output.with_name(f".{output.name}.{state}") for state in ("partial", "replaced"))
    _give_back(replaced, output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"The output {str(output)!r} is a file, expected a folder to write; choose another name.")
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            raise ValueError(
                f"The output folder {str(output)!r} exists and is not empty; choose another one or pass --overwrite."
            )
        if not (output / "config.json").is_file():
            raise ValueError(
                f"The output folder {str(output)!r} has no config.json, so it is no model folder and is not "
                "overwritten; choose another one."
            )
        if others := strangers(output):
            raise ValueError(
                f"The output folder {str(output)!r} has more than a model in it ({', '.join(others[:3])}"
                f"{', …' if len(others) > 3 else ''}) and is not overwritten, so that nothing is lost; choose another."
            )
    output.parent.mkdir(parents=True, exist_ok=True)
    # A run that was killed may have left them.
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)
    partial.mkdir()
    try:
        with disk_errors(output.parent):
            yield partial
        if output.exists():
            output.rename(replaced)
        partial.rename(output)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        _give_back(replaced, output)


def strangers(folder: Path) -> list[str]:
    """Names of what is in a folder and is no part of a model: notes, checkpoints, results, other folders."""
    card = folder / "README.md"
    card = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    rooms = (files(f"frugalvit.{room}") for room in ("configuration", "modeling"))
    sources = {path.name for room in rooms for path in Path(str(room)).rglob("*.py")}

    def belongs(path: Path) -> bool:
        if path.is_symlink() or not path.is_file():
            return False
        known = path.name in sources or any(fnmatch(path.name, pattern) for pattern in MODEL_FILES)
        return known or (path.suffix == ".png" and path.name in card)

    return sorted(path.name for path in folder.iterdir() if not belongs(path))


def _give_back(replaced: Path, output: Path):
    """Its name to a folder that was to be replaced and was not."""
    if replaced.exists() and not output.exists():
        replaced.rename(output)
