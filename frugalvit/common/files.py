"""Files and folders that appear whole or not at all, whenever the process dies, and replace nothing else."""

import errno
import glob
import json
import os
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from importlib.resources import files
from pathlib import Path

from huggingface_hub.dataclasses import type_validator
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
    *("modules.json", "sentence_bert_config.json"),
    # Files of exported models and of their page.
    *("export.json", "report.json", "*.onnx", "*.onnx.data", "openvino_*.xml", "openvino_*.bin"),
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
# What a lock says begins so.
OWNER = "process "
# Locks of this process, which the operating system keeps from other processes alone: who holds each file.
_HELD: dict[str, tuple[int, object]] = {}


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
    """Whether a path is a device, a pipe, a socket, or a file that the process has open (`/dev/stdout`): it is written
    to, and not replaced."""
    path = Path(path)
    opened = str(path.parent) in ("/dev", "/dev/fd") or Path("/proc") in path.parents
    return path.exists() and (opened or not path.is_file())


def resolved(path: Path) -> Path:
    """The path that a path leads to, through symbolic links.

    Raises:
        OSError: if a link leads to itself.
    """
    try:
        return path.resolve()
    except RuntimeError as error:
        # Python 3.13 raises what an open file would.
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error


def _beside(path: Path) -> tuple[Path, Path]:
    """The file that a path leads to, through symbolic links, and a new one beside it with its ending."""
    target = resolved(path)
    return target, target.with_name(f".{target.stem}.{secrets.token_hex(4)}{path.suffix}")


def permit_as_usual(*files: Path):
    """Give files the permissions that new files get in their folder: safetensors 0.8 leaves its files to the owner
    alone, whatever the umask."""
    usual = {}
    for folder in {file.parent for file in files}:
        probe = folder / f".{secrets.token_hex(4)}"
        probe.touch()
        usual[folder] = stat.S_IMODE(probe.stat().st_mode)
        probe.unlink()
    for file in files:
        # Some disks know no permissions.
        with suppress(OSError):
            file.chmod(usual[file.parent])


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """A path to write to, with the ending of `path`. The file there takes the name `path` if the block succeeds.

    A symbolic link stays and leads to the new file, whose permissions are those of the old one. A `path` that is no
    regular file (`/dev/stdout`, a pipe) is written to.
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
            else:
                permit_as_usual(aside)
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


def read_json(path: str | os.PathLike, expected: type | dict = dict):
    """Read a JSON file, and check that its content has the shape that is expected.

    Args:
        path (`str` or `os.PathLike`): The file.
        expected (type or mapping, *optional*): A type such as `list[str]`, or those of an object's fields, by name,
            each of which may be such a mapping again. Other fields may be there, too, and one that may be `None` may
            be missing.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is no JSON, or has another shape.
    """
    content = _parse(read_text(path), repr(str(path)))
    if problem := misshapen(content, expected):
        raise ValueError(f"{str(path)!r} has another content than expected: {problem}.")
    return content


def read_json_lines(path: str | os.PathLike, expected: type | dict = dict) -> list:
    """Read a file with JSON in each line, empty lines aside, as a list; arguments and errors as of `read_json`."""
    records = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            where = f"line {number} of {str(path)!r}"
            records.append(_parse(line, where))
            if problem := misshapen(records[-1], expected):
                raise ValueError(f"{where} has another content than expected: {problem}.")
    return records


def _parse(text: str, where: str):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON ({error}).") from error


def misshapen(content, expected: type | dict) -> str | None:
    """The reason why the content of a JSON file has another shape than expected, see `read_json`, or None."""
    fields = expected if isinstance(expected, dict) else {}
    if fields and not isinstance(content, dict):
        return f"it is a {type(content).__name__}, not an object of names and values"
    values = {name: content.get(name) for name in fields} if fields else {"it": content}
    for name, value in values.items():
        wanted = fields.get(name, expected)
        if isinstance(wanted, dict):
            if problem := misshapen({} if value is None else value, wanted):
                return f"in {name}, {problem}"
            continue
        try:
            type_validator(name, value, wanted)
        except TypeError:
            return f"{name} is not {getattr(wanted, '__name__', None) if type(wanted) is type else wanted}"
    return None


def refuse_links(folder: str | os.PathLike, *names: str):
    """Raise a ValueError if a file that the program writes into a folder by itself is a link: it would lead to a file
    that nobody named."""
    for path in (Path(folder) / name for name in names):
        if path.is_symlink():
            raise ValueError(
                f"{str(path)!r} is a link, and what is written there would take the place of something elsewhere. "
                "Remove it or give another folder."
            )


def write_text(path: str | os.PathLike, text: str):
    with whole_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike, content):
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def forget_code(folder: Path):
    """Remove `auto_map`, which points at source files, from the configurations of a model folder and its processor: no
    source files lie beside them."""
    for name in ("config.json", "processor_config.json"):
        if not (folder / name).exists():
            continue
        configuration = json.loads((folder / name).read_text(encoding="utf-8"))
        for part in (configuration, *(part for part in configuration.values() if isinstance(part, dict))):
            part.pop("auto_map", None)
        write_json(folder / name, configuration)


@contextmanager
def disk_errors(folder: str | os.PathLike) -> Iterator[None]:
    """Within, an error in writing to a disk says why, and how much room there is: libraries hide that.

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
def locked(folder: str | os.PathLike, lock: Path | None = None) -> Iterator[bool]:
    """Within, other processes that ask for the same are kept out of a folder. The lock ends with the process at the
    latest, also if that is killed.

    Args:
        folder (`str` or `os.PathLike`): The folder.
        lock (`Path`, *optional*): The file to lock, if not one in the folder.

    Yields:
        `bool`: Whether others are kept out; some disks cannot.

    Raises:
        ValueError: if another process is in there, which the message names; or if the file's name leads elsewhere.
        OSError: if the file cannot be made.
    """
    path = lock or Path(folder) / LOCK
    key, me = str(path.absolute()), (os.getpid(), object())
    # What a process that forked held, its child does not.
    if _HELD.setdefault(key, me)[0] != os.getpid():
        _HELD[key] = me
    if _HELD[key] is not me:
        raise _in_use(folder, f"{OWNER}{os.getpid()}")
    try:
        while True:
            with _open_lock(path) as file:
                holds = fcntl is not None
                try:
                    if holds:
                        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):
                    raise _in_use(folder, file.read()) from None
                except OSError:
                    # This disk does not support locks.
                    holds = False
                # The process that left may have removed the file meanwhile.
                if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.lstat()):
                    continue
                file.truncate(0)
                file.write(f"{OWNER}{os.getpid()} of {socket.gethostname()}")
                file.flush()
                try:
                    yield holds
                finally:
                    path.unlink(missing_ok=True)
                return
    finally:
        del _HELD[key]


def _in_use(folder: str | os.PathLike, owner: str) -> ValueError:
    return ValueError(
        f"{str(folder)!r} is in use by {owner or 'another process'}; wait until that ends or give another folder."
    )


def _open_lock(path: Path):
    """The file of a lock, made if it is not there.

    Raises:
        ValueError: if there is something else under its name: a link to a file of the user's, for example.
    """
    refuse_links(path.parent, path.name)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o666)
    status = os.fstat(descriptor)
    # A second name of a file elsewhere, too, would have that emptied.
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        file = os.fdopen(descriptor, "a+", encoding="utf-8", errors="replace")
        file.seek(0)
        if file.read(len(OWNER)) in ("", OWNER):
            file.seek(0)
            return file
        file.close()
    else:
        os.close(descriptor)
    raise ValueError(f"{str(path)!r} is no lock that this program made; remove it or give another folder.")


@contextmanager
def whole_folder(output: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """A new folder beside `output` that takes its name if the block succeeds and is removed if it does not.

    A process that is killed just between the two renames of overwriting leaves the old folder as `.NAME.replaced`; the
    next call gives it its name back.

    Raises:
        ValueError: if `output` is a file or a folder with something in it, unless `overwrite` is set and all in there
            is what a model folder consists of; or if another process writes the same.
    """
    # A symbolic link stays.
    output = resolved(Path(output))
    replaced = output.with_name(f".{output.name}.replaced")
    partial = output.with_name(f".{output.name}.{secrets.token_hex(4)}.partial")
    _check_free(output, overwrite)
    output.parent.mkdir(parents=True, exist_ok=True)
    with disk_errors(output.parent), locked(output, output.with_name(f".{output.name}.lock")) as alone:
        _give_back(replaced, output)
        _check_free(output, overwrite)
        shutil.rmtree(replaced, ignore_errors=True)
        # Runs that were killed may have left some.
        for left in output.parent.glob(f".{glob.escape(output.name)}.*.partial") if alone else ():
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            permit_as_usual(*(path for path in partial.rglob("*") if path.is_file() and not path.is_symlink()))
            # Someone may have put something there meanwhile.
            _check_free(output, overwrite)
            if output.exists():
                output.rename(replaced)
            partial.rename(output)
            shutil.rmtree(replaced, ignore_errors=True)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            _give_back(replaced, output)


def _check_free(output: Path, overwrite: bool):
    """Raise a ValueError if a folder cannot be written, see `whole_folder`."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"The output {str(output)!r} is a file, expected a folder to write; choose another name.")
    if not output.is_dir() or not any(output.iterdir()):
        return
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


def strangers(folder: Path) -> list[str]:
    """Names of files and folders in a folder that are no part of a model: notes, checkpoints, results, others."""
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
    """Give its name back to a folder that was to be replaced and was not."""
    if replaced.exists() and not output.exists():
        replaced.rename(output)
