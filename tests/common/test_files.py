"""Files and folders that appear whole or not at all, and take the place of nothing else."""

import functools
import json
import os
import random
import resource
import shutil
import signal
import stat
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from frugalvit.common.files import (
    check_file_path,
    disk_errors,
    locked,
    read_json,
    read_json_lines,
    whole_file,
    whole_folder,
    write_text,
)
from frugalvit.training.components.runs import replace_files


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
    """Paths such as `>(command)` and `/dev/stdout` lead to open files."""
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


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002, 0o027])
def test_files_are_shared_as_the_user_wants(mask, tmp_path):
    """Weights, too: safetensors leaves its files to their owner alone."""
    before = os.umask(mask)
    try:
        with whole_folder(tmp_path / "model") as folder, whole_file(tmp_path / "x.safetensors") as file:
            save_file({"x": torch.ones(1)}, folder / "model.safetensors")
            save_file({"x": torch.ones(1)}, file)
            (folder / "config.json").touch()
        replace_files(tmp_path, lambda aside: save_file({"x": torch.ones(1)}, aside / "best.safetensors"))
    finally:
        os.umask(before)
    modes = {path.relative_to(tmp_path).as_posix(): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    files = ("model/model.safetensors", "model/config.json", "x.safetensors", "best.safetensors")
    assert modes == {"model": 0o777 & ~mask} | dict.fromkeys(files, 0o666 & ~mask)


@pytest.mark.parametrize("place", ["/proc/results.json", "no/results.json", "folder"])
def test_what_cannot_be_written_is_known_before(place, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises((ValueError, OSError), match="Cannot write"):
        check_file_path(tmp_path / place)


def test_no_room_is_known_before(tmp_path):
    def check():
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        with pytest.raises(OSError, match="Cannot write .*larger than is allowed"):
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


def in_a_process(function) -> threading.Thread:
    return in_a_thread(lambda: forked(function))


def in_a_thread(function) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


@pytest.mark.parametrize("start", [in_a_process, in_a_thread])
@pytest.mark.parametrize("before", ["nothing", "an old model", "what a killed one left"])
def test_two_writers_of_a_folder_are_not_mixed(before, start, tmp_path):
    """One writer is refused, and the folder has the files of the other alone."""
    output, said = tmp_path / "model", tmp_path / "said"
    if before == "an old model":
        write(output, "old")
    if before == "what a killed one left":
        (tmp_path / ".model.0123.partial").mkdir()
        (tmp_path / ".model.0123.partial" / "left").touch()

    def work(tag: str):
        try:
            with whole_folder(output, overwrite=True) as folder:
                for number in range(4):
                    (folder / f"{number}-{tag}").touch()
                    time.sleep(0.1)
                (folder / "config.json").touch()
        except ValueError as error:
            said.write_text(str(error))

    writers = [start(lambda: work("A"))]
    while not list(tmp_path.glob(".model.*.partial/0-A")):
        time.sleep(0.01)
    writers.append(start(lambda: work("B")))
    for writer in writers:
        writer.join()
    assert sorted(os.listdir(output)) == ["0-A", "1-A", "2-A", "3-A", "config.json"]
    assert "is in use by process" in said.read_text()
    assert sorted(os.listdir(tmp_path)) == ["model", "said"]


def test_writers_at_random_moments_leave_the_work_of_one(tmp_path):
    """Five at once, of which one is killed; FRUGALVIT_WRITERS=200 tries more often."""
    for attempt in range(int(os.environ.get("FRUGALVIT_WRITERS", "2"))):
        chance, folder = random.Random(attempt), tmp_path / str(attempt)
        folder.mkdir()
        overwrite, output = chance.random() < 0.5, folder / "model"

        def work(tag: int, delay: float, dies: bool, output=output, overwrite=overwrite):
            time.sleep(delay)
            with suppress(ValueError), whole_folder(output, overwrite) as partial:
                for number in range(3):
                    (partial / f"model-{number}-{tag}.safetensors").touch()
                    time.sleep(0.01)
                    if dies and number == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                (partial / "config.json").write_text(str(tag))

        dying = chance.randrange(5)
        writers = [in_a_process(functools.partial(work, tag, chance.random() * 0.1, tag == dying)) for tag in range(5)]
        for writer in writers:
            writer.join()
        work(5, 0, False)
        tag = (output / "config.json").read_text()
        names = [f"model-{number}-{tag}.safetensors" for number in range(3)]
        assert sorted(os.listdir(output)) == ["config.json", *names] and tag != str(dying)
        # Where the last one began, nothing of the killed one is left.
        assert not overwrite or os.listdir(folder) == ["model"]


def test_what_came_meanwhile_is_not_replaced(tmp_path):
    """Also of programs that know of no lock."""
    with pytest.raises(ValueError, match="exists and is not empty"), whole_folder(tmp_path / "model") as folder:
        (folder / "config.json").touch()
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "mine").touch()
    assert os.listdir(tmp_path / "model") == ["mine"]


@pytest.mark.parametrize(
    "place",
    [
        lambda lock, mine: lock.symlink_to(mine),
        lambda lock, mine: lock.symlink_to("../mine"),
        lambda lock, mine: os.link(mine, lock),
        lambda lock, mine: lock.write_text("precious"),
        lambda lock, mine: lock.symlink_to(mine.with_name("nothing")),
        lambda lock, mine: os.mkfifo(lock),
        lambda lock, mine: lock.mkdir(),
    ],
    ids=["link", "relative link", "hard link", "a file of the user's", "link to nothing", "pipe", "folder"],
)
@pytest.mark.parametrize("kind", ["in a folder", "beside one"])
def test_a_lock_takes_the_place_of_nothing(kind, place, tmp_path):
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.write_text("precious")
    run.mkdir()
    lock = run / ".lock" if kind == "in a folder" else run / ".model.lock"
    place(lock, mine)
    keeper = locked(run) if kind == "in a folder" else whole_folder(run / "model")
    before = lock.lstat()
    with pytest.raises((ValueError, OSError), match="lock"), keeper:
        pass
    assert mine.read_text() == "precious" and os.path.samestat(before, lock.lstat())
    assert sorted(os.listdir(tmp_path)) == ["mine", "run"] and os.listdir(run) == [lock.name]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"name": "x", "sizes": [1, 2]}', None),
        ('{"name": "x", "sizes": [], "note": "y", "more": 5}', None),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("9" * 5000, "is no JSON"),
        ("[]", "it is a list"),
        ("null", "it is a NoneType"),
        ('{"name": "x"}', "sizes is not"),
        ('{"name": 5, "sizes": []}', "name is not str"),
        ('{"name": "x", "sizes": [1, "2"]}', "sizes is not"),
        ('{"name": "x", "sizes": [true]}', "sizes is not"),
        ('{"name": "x", "sizes": {"0": 1}}', "sizes is not"),
        ('{"name": "x", "sizes": [], "note": []}', "note is not"),
        ('{"name": "x", "sizes": [], "about": {"count": 5}}', None),
        ('{"name": "x", "sizes": [], "about": {"count": "5"}}', "in about, count is not"),
        ('{"name": "x", "sizes": [], "about": []}', "in about, it is a list"),
    ],
)
def test_json_of_another_shape_is_said(text, problem, tmp_path):
    (tmp_path / "file.json").write_text(text)
    (tmp_path / "file.jsonl").write_text(f"{text}\n\n{text}\n")
    fields = {"name": str, "sizes": list[int], "note": str | None, "about": {"count": int | None}}
    if problem is None:
        content = json.loads(text)
        assert read_json(tmp_path / "file.json", fields) == content
        assert read_json_lines(tmp_path / "file.jsonl", fields) == [content, content]
        return
    with pytest.raises(ValueError, match=problem):
        read_json(tmp_path / "file.json", fields)
    with pytest.raises(ValueError, match=f"line 1 of .*{problem}"):
        read_json_lines(tmp_path / "file.jsonl", fields)
