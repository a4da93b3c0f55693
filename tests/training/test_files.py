"""Folders that appear whole or not at all."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from frugalvit.training.files import whole_folder


def write(output: Path, content: str, overwrite: bool = True):
    with whole_folder(output, overwrite) as folder:
        (folder / "config.json").write_text(content)
        (folder / "weights").write_text(content)


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
    [("rename", 1, "old"), ("rename", 2, None), ("rmtree", 3, "new")],
    ids=["before the old one goes", "before the new one comes", "before the old one is removed"],
)
def test_a_process_that_is_killed_loses_no_folder(before, count, left, tmp_path):
    output = tmp_path / "model"
    write(output, "old")
    assert write_and_die(output, before, count) == -signal.SIGKILL
    assert (output / "weights").read_text() == left if left else not output.exists()
    # The next writing begins with what was there.
    with pytest.raises(ValueError, match="exists and is not empty"):
        write(output, "newer", overwrite=False)
    assert (output / "weights").read_text() == (left or "old")
    with pytest.raises(ZeroDivisionError), whole_folder(output, overwrite=True):
        assert (output / "weights").read_text() == (left or "old")
        raise ZeroDivisionError
    write(output, "newest")
    assert (output / "weights").read_text() == "newest" and os.listdir(tmp_path) == ["model"]


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
    assert (output / "weights").read_text() == "old" and os.listdir(tmp_path) == ["model"]
