"""Test that files and folders are written completely or not at all, and that only model folders are replaced."""

import os
import signal
from pathlib import Path

import pytest

from frugalvit.training.files import atomic_directory, atomic_file, write_text


def write(output: Path, content: str, overwrite: bool = True):
    with atomic_directory(output, overwrite) as folder:
        (folder / "config.json").write_text(content)
        (folder / "model.safetensors").write_text(content)


def test_a_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    output, rename = tmp_path / "model", Path.rename
    with pytest.raises(ZeroDivisionError), atomic_directory(output) as folder:
        (folder / "config.json").touch()
        raise ZeroDivisionError
    assert not os.listdir(tmp_path)
    write(output, "old")
    with pytest.raises(ValueError, match="exists and is not empty"):
        write(output, "new", overwrite=False)
    (output / "README.md").write_text("![picture](tokens.png)")
    for name in ("tokens.png", "modeling_sparseformer.py"):
        (output / name).touch()
    write(output, "new")
    assert sorted(os.listdir(output)) == ["config.json", "model.safetensors"] and os.listdir(tmp_path) == ["model"]

    child = os.fork()
    if not child:
        monkeypatch.setattr(Path, "rename", lambda path, target: os.kill(os.getpid(), signal.SIGKILL))
        write(output, "newer")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (output / "model.safetensors").read_text() == "new" and Path.rename is rename


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "results.json"
    with pytest.raises(ZeroDivisionError), atomic_file(path) as aside:
        aside.write_text("half")
        raise ZeroDivisionError
    assert not os.listdir(tmp_path)
    (tmp_path / "link.json").symlink_to(path.name)
    for content in ("old", "new"):
        write_text(tmp_path / "link.json", content)
        assert path.read_text() == content and (tmp_path / "link.json").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link.json", "results.json"]


def test_files_that_belong_to_no_model_are_not_overwritten(tmp_path):
    output = tmp_path / "model"
    output.mkdir()
    (output / "config.json").touch()
    (output / "README.md").write_text("![](banana.png)")
    for name in ("results.json", "na.png", "model_backup.safetensors"):
        (output / name).touch()
        with pytest.raises(ValueError, match=f"more than a model in it .*{name}"):
            write(output, "new")
        (output / name).unlink()
    # The file report.json marks the folder of an exported model. Other files in this folder are not overwritten.
    (output / "report.json").touch()
    for name in ("onnx/detector.onnx", "openvino_notes.txt"):
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).touch()
        with pytest.raises(ValueError, match=f"more than a model in it .*{name.partition('/')[0]}"):
            write(output, "new")
        (output / name).unlink()
    (output / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="more than a model in it .*checkpoints"):
        write(output, "new")
    with pytest.raises(ValueError, match="no config.json, so it is no model folder"):
        write(tmp_path, "new")
