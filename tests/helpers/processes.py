"""Processes that tests start."""

import atexit
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file, save_file


SCRIPT = Path(__file__).with_name("without_frugalvit.py")


def run_without_frugalvit(directory: Path, *arguments):
    """Run without_frugalvit.py in a directory, without a network."""
    error = ask_server(directory, [str(argument) for argument in arguments])
    assert error is None, error[-4000:]


def compute_without_frugalvit(directory: Path, folder: Path | str, loader: str, inputs: dict) -> list:
    """Logits of a saved model, loaded, and saved and loaded again; it ships the same code each time."""
    save_file(inputs, directory / "inputs")
    run_without_frugalvit(directory, "compute", folder, loader, directory / "inputs", directory / "outputs")
    if isinstance(folder, Path):
        code, *again = (
            {path.name: path.read_bytes() for path in saved.glob("*.py")}
            for saved in (folder, directory / "outputs-loaded", directory / "outputs-saved-again")
        )
        assert again == [code, code]
    return [*load_file(directory / "outputs").values()]


def ask_server(directory: str | Path, arguments: list[str]) -> str | None:
    """Let the server do something in a process of its own; returns what it said if it failed."""
    server = serving()
    server.stdin.write(json.dumps({"directory": str(directory), "arguments": arguments}) + "\n")
    server.stdin.flush()
    log = json.loads(server.stdout.readline())
    return log and Path(log).read_text(encoding="utf-8")


def run_in_server(command: list[str], cwd: str, **_) -> subprocess.CompletedProcess:
    """`subprocess.run` of `python -c SOURCE …`, without the seconds that importing Transformers takes."""
    executable, option, *source = command
    assert (executable, option) == (sys.executable, "-c")
    error = ask_server(cwd, ["run_source", *source])
    return subprocess.CompletedProcess(command, int(error is not None), "", error or "")


@contextmanager
def web_server(command: list[str], home: Path, environment: dict[str, str]):
    """Start a server in `home`, and give the address that it prints when it answers; it ends with the block."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = environment | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, **streams, cwd=home, env=environment) as process:
        try:
            said, address = [], None
            while not address and (line := process.stdout.readline()):
                said.append(line)
                address = re.search(r"(?:[Rr]unning|Serving HTTP) on .*?(http://[^\s)]+)", line)
            assert address, "".join(said)
            yield address[1]
        finally:
            process.terminate()


@functools.cache
def serving() -> subprocess.Popen:
    """The server of this process' tests; it ends with them."""
    home = tempfile.mkdtemp(prefix="without-frugalvit-")
    server = subprocess.Popen(
        [sys.executable, str(SCRIPT), "serve"],
        cwd=home,
        env=environment(home),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def end():
        server.stdin.close()
        server.wait()
        server.stdout.close()
        shutil.rmtree(home)

    atexit.register(end)
    return server


def environment(home: str | Path) -> dict[str, str]:
    """The environment of a process that has the hub's caches in `home`."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
    return others | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}


def first_answers(application, images: list) -> list:
    """Answers of a `Classifier` or an `Embedder`, for a process that gets it by pickle."""
    return list(application(images))


def answers_of_threads(applications: list, images: list, calls: int = 160) -> list[tuple[int, int, object]]:
    """Let eight threads ask about one image after the other; each call's application, image and answer."""

    def ask(number: int) -> tuple[int, int, object]:
        which, index = number % len(applications), number % len(images)
        return which, index, next(iter(applications[which]([images[index]])))

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, range(calls)))
