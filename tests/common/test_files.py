"""Files and folders that appear whole or not at all, and take the place of nothing else."""

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from frugalvit.common.files import (
    check_file_path,
    read_json,
    whole_file,
    whole_folder,
    write_text,
)


def write(output: Path, content: str, overwrite: bool = True):
    with whole_folder(output, overwrite) as folder:
        (folder / "config.json").write_text(content)
        (folder / "model.safetensors").write_text(content)


def test_a_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    output, rename = tmp_path / "model", Path.rename
    with pytest.raises(ZeroDivisionError), whole_folder(output) as folder:
        (folder / "config.json").touch()
        raise ZeroDivisionError
    assert not os.listdir(tmp_path)
    write(output, "old")
    with pytest.raises(ValueError, match="exists and is not empty"):
        write(output, "new", overwrite=False)
    write(output, "new")
    assert (output / "model.safetensors").read_text() == "new" and os.listdir(tmp_path) == ["model"]

    child = os.fork()
    if not child:
        monkeypatch.setattr(Path, "rename", lambda path, target: os.kill(os.getpid(), signal.SIGKILL))
        write(output, "newer")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (output / "model.safetensors").read_text() == "new" and Path.rename is rename


def test_an_overwritten_folder_comes_back_where_renaming_fails(tmp_path, monkeypatch):
    output, rename = tmp_path / "model", Path.rename
    write(output, "old")

    def fail(path, target):
        if path.suffix == ".partial":
            raise OSError("no room")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no room"):
        write(output, "new")
    assert (output / "model.safetensors").read_text() == "old" and os.listdir(tmp_path) == ["model"]


def test_two_folders_are_written_at_once(tmp_path):
    """The name of one begins as that of the other."""
    with whole_folder(tmp_path / "m.int8") as first:
        (first / "config.json").write_text("first")
        write(tmp_path / "m", "second")
    assert (tmp_path / "m.int8" / "config.json").read_text() == "first"
    assert sorted(os.listdir(tmp_path)) == ["m", "m.int8"]


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "results.json"
    with pytest.raises(ZeroDivisionError), whole_file(path) as aside:
        aside.write_text("half")
        raise ZeroDivisionError
    assert not os.listdir(tmp_path)
    (tmp_path / "link.json").symlink_to(path.name)
    for content in ("old", "new"):
        write_text(tmp_path / "link.json", content)
        assert path.read_text() == content and (tmp_path / "link.json").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link.json", "results.json"]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_are_shared_as_the_user_wants(mask, tmp_path):
    """Weights, too: safetensors leaves its files to their owner alone."""
    before = os.umask(mask)
    try:
        with whole_folder(tmp_path / "model") as folder, whole_file(tmp_path / "x.safetensors") as file:
            save_file({"x": torch.ones(1)}, folder / "model.safetensors")
            save_file({"x": torch.ones(1)}, file)
            (folder / "config.json").touch()
    finally:
        os.umask(before)
    modes = {path.relative_to(tmp_path).as_posix(): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    files = ("model/model.safetensors", "model/config.json", "x.safetensors")
    assert modes == {"model": 0o777 & ~mask} | dict.fromkeys(files, 0o666 & ~mask)


@pytest.mark.parametrize("place", ["no/results.json", "folder", "pipe"])
def test_what_cannot_be_written_is_known_before(place, tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((ValueError, OSError), match="Cannot write"):
        check_file_path(tmp_path / place)


@pytest.mark.parametrize(
    "name",
    ["checkpoints", "results.json", "notes.md", "photo.png", "na.png", "model_backup.safetensors", "detector.onnx"],
)
def test_what_no_model_consists_of_is_not_overwritten(name, tmp_path):
    output = tmp_path / "model"
    output.mkdir()
    (output / "config.json").touch()
    (output / "README.md").write_text("![](banana.png)")
    (output / name).touch() if "." in name else (output / name).mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=f"more than a model in it .*{name}"):
        write(output, "new")
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(ValueError, match="no config.json, so it is no model folder"):
        write(tmp_path, "new")


def test_a_model_with_code_and_pictures_is_overwritten(tmp_path):
    output = tmp_path / "model"
    write(output, "old")
    (output / "README.md").write_text("![picture](tokens.png)")
    (output / "tokens.png").touch()
    (output / "modeling_sparseformer.py").touch()
    write(output, "new")
    assert sorted(os.listdir(output)) == ["config.json", "model.safetensors"]


def test_what_came_meanwhile_is_not_replaced(tmp_path):
    with pytest.raises(ValueError, match="exists and is not empty"), whole_folder(tmp_path / "model") as folder:
        (folder / "config.json").touch()
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "mine").touch()
    assert os.listdir(tmp_path / "model") == ["mine"]


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_what_is_no_json_is_said(text, tmp_path):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(ValueError, match="file.json' is no JSON"):
        read_json(tmp_path / "file.json")


def test_permissions_stay(tmp_path):
    (tmp_path / "secret.json").touch(mode=0o600)
    write_text(tmp_path / "secret.json", "new")
    assert (tmp_path / "secret.json").stat().st_mode & 0o777 == 0o600
