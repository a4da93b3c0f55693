"""Files and folders that appear whole or not at all, and take the place of nothing else."""

import os
import resource
import shutil
import signal
import stat
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from frugalvit.common.files import check_file_path, disk_errors, locked, whole_folder, write_text


def write(output: Path, content: str, overwrite: bool = True):
    with whole_folder(output, overwrite) as folder:
        (folder / "config.json").write_text(content)
        (folder / "model.safetensors").write_text(content)


def write_and_die(output: Path, before: str, count: int):
    """Write in a process that is killed before it calls `os.rename` or removes a folder for the count-th time."""
    child = os.fork()
    if not child:
        original, calls = (Path.rename if before == "rename" else shutil.rmtree), []

        def die(path, *arguments, **options):
            calls.append(path)
            if len(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(path, *arguments, **options)

        (setattr(Path, "rename", die) if before == "rename" else setattr(shutil, "rmtree", die))
        write(output, "new")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("before", "count", "left"),
    [("rename", 1, "old"), ("rename", 2, None), ("rmtree", 2, "new")],
    ids=["before the old one goes", "before the new one comes", "before the old one is removed"],
)
def test_a_process_that_is_killed_loses_no_folder(before, count, left, tmp_path):
    output = tmp_path / "model"
    write(output, "old")
    assert write_and_die(output, before, count) == -signal.SIGKILL
    assert (output / "model.safetensors").read_text() == left if left else not output.exists()
    # The next writing begins with what was there.
    with pytest.raises(ValueError, match="exists and is not empty"):
        write(output, "newer", overwrite=False)
    assert (output / "model.safetensors").read_text() == (left or "old")
    with pytest.raises(ZeroDivisionError), whole_folder(output, overwrite=True):
        assert (output / "model.safetensors").read_text() == (left or "old")
        raise ZeroDivisionError
    write(output, "newest")
    assert (output / "model.safetensors").read_text() == "newest" and os.listdir(tmp_path) == ["model"]


def test_a_folder_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    output, rename = tmp_path / "model", Path.rename
    write(output, "old")

    def fail(path, target):
        if path.name.endswith(".partial"):
            raise PermissionError
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(PermissionError):
        write(output, "new")
    assert (output / "model.safetensors").read_text() == "old" and os.listdir(tmp_path) == ["model"]


def forked(function) -> int:
    """Exit code of a process that calls the function: 0, or 1 where it raises an AssertionError or the like."""
    child = os.fork()
    if not child:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def pipe(path: Path):
    os.mkfifo(path)


def link_to_a_pipe(path: Path):
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def link_to_a_file(path: Path):
    path.with_name("elsewhere").mkdir()
    (path.with_name("elsewhere") / "target.json").write_text("old")
    (path.with_name("elsewhere") / "target.json").chmod(0o640)
    path.symlink_to("elsewhere/target.json")


def link_to_nothing_yet(path: Path):
    path.symlink_to("target.json")


def private_file(path: Path):
    path.write_text("old")
    path.chmod(0o600)


@pytest.mark.parametrize("node", [pipe, link_to_a_pipe, link_to_a_file, link_to_nothing_yet, private_file])
def test_what_is_written_goes_through_what_is_there(node, tmp_path):
    path = tmp_path / "results.json"
    node(path)
    kind, mode = stat.S_IFMT(path.lstat().st_mode), path.stat().st_mode if path.exists() else None
    received = []
    if "pipe" in node.__name__:
        reader = threading.Thread(target=lambda: received.append(path.read_text()))
        reader.start()
    write_text(check_file_path(path), "new")
    if received or "pipe" in node.__name__:
        reader.join()
    else:
        received.append(path.read_text())
    assert received == ["new"]
    assert stat.S_IFMT(path.lstat().st_mode) == kind and mode in (None, path.stat().st_mode)
    assert not list(tmp_path.rglob(".*"))


def test_open_files_are_written_into(tmp_path):
    """As `>(command)` and `/dev/stdout` name them."""
    file = tmp_path / "output"
    with file.open("w") as opened:
        opened.write("before ")
        opened.flush()
        write_text(f"/dev/fd/{opened.fileno()}", "after")
    assert file.read_text() == "before after"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="a disk in memory, of Linux")
def test_a_disk_in_memory_is_a_disk():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for content in ("old", "new"):
            write_text(Path(folder) / "file", content)
        assert (Path(folder) / "file").read_text() == "new"


def too_large(write):
    """A writer where files may have 4 kB, as on a full disk."""

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        write()

    return limited


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_text(path, "x" * 10_000),
        lambda path: save_file({"weight": torch.zeros(10_000)}, path),
        lambda path: torch.save(torch.zeros(10_000), path),
    ],
    ids=["text", "safetensors", "torch"],
)
def test_a_disk_that_takes_no_more_is_said(write, tmp_path):
    def check():
        message = r"Cannot write to .*(larger than|takes no more).* MB are free"
        with pytest.raises(OSError, match=message), disk_errors(tmp_path):
            write(tmp_path / "file")

    assert forked(too_large(check)) == 0


@pytest.mark.parametrize("place", ["/proc/results.json", "no/results.json", "folder"])
def test_what_cannot_be_written_is_known_before(place, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises((ValueError, OSError), match="Cannot write"):
        check_file_path(tmp_path / place)


def test_no_room_is_known_before(tmp_path):
    def check():
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        with pytest.raises(OSError, match="Cannot write .*larger than is allowed. Choose another place"):
            check_file_path(tmp_path / "results.json")

    assert forked(too_large(check)) == 0 and not os.listdir(tmp_path)


def make_folder(path: Path):
    path.mkdir()
    (path / "step-1").touch()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("checkpoints", make_folder),
        ("results.json", Path.touch),
        ("run.json", Path.touch),
        ("metrics.jsonl", Path.touch),
        ("notes.md", Path.touch),
        ("photo.png", Path.touch),
        ("experiment.py", Path.touch),
        (".git", make_folder),
        ("model.safetensors", lambda path: path.symlink_to("/dev/null")),
    ],
)
def test_what_no_model_consists_of_is_not_overwritten(name, make, tmp_path):
    output = tmp_path / "model"
    output.mkdir()
    (output / "config.json").touch()
    make(output / name)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=f"more than a model in it .*{name}"):
        write(output, "new")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_with_code_and_pictures_is_overwritten_behind_its_link(tmp_path):
    output = tmp_path / "model"
    write(output, "old")
    (output / "README.md").write_text("![picture](tokens.png)")
    (output / "tokens.png").touch()
    (output / "modeling_sparseformer.py").touch()
    (tmp_path / "link").symlink_to("model")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (output / "model.safetensors").read_text() == "new"


def test_a_folder_is_of_one_process(tmp_path):
    def refused():
        with pytest.raises(ValueError, match=f"in use by process {owner} of "), locked(tmp_path):
            pass

    def leave():
        with locked(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)

    owner = os.getpid()
    with locked(tmp_path):
        assert forked(refused) == 0
    assert not os.listdir(tmp_path)
    # What a killed process leaves is no lock.
    assert forked(leave) == -signal.SIGKILL and os.listdir(tmp_path) == [".lock"]
    with locked(tmp_path):
        pass
    assert not os.listdir(tmp_path)
