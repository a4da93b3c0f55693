"""Run code of tests in other processes and in threads."""

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
    """Run an action of `without_frugalvit.py` in `directory`, offline."""
    error = ask_server(directory, [str(argument) for argument in arguments])
    assert error is None, error[-4000:]


def compute_without_frugalvit(directory: Path, folder: Path | str, loader: str, inputs: dict) -> list:
    """Load a model in a process without frugalvit, save it, and load the saved copy. Return the logits of the model
    and of the copy.

    `folder` is a `Path` or a hub id. For a `Path`, check that saving keeps the code files unchanged.
    """
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
    """Run an action of `without_frugalvit.py` in a forked process. Return None, or the output if the action failed."""
    server = serving()
    server.stdin.write(json.dumps({"directory": str(directory), "arguments": arguments}) + "\n")
    server.stdin.flush()
    log = json.loads(server.stdout.readline())
    return log and Path(log).read_text(encoding="utf-8")


def run_in_server(command: list[str], cwd: str, **_) -> subprocess.CompletedProcess:
    """Replacement for `subprocess.run` that runs `python -c SOURCE …` in a fork of the server process."""
    executable, option, *source = command
    assert (executable, option) == (sys.executable, "-c")
    error = ask_server(cwd, ["run_source", *source])
    return subprocess.CompletedProcess(command, int(error is not None), "", error or "")


@contextmanager
def web_server(command: list[str], home: Path, environment: dict[str, str]):
    """Start a web server in `home`. Yield the address that the server prints. Finally, terminate the server."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = environment | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, **streams, cwd=home, env=environment) as process:
        try:
            output = []
            address = None
            while not address and (line := process.stdout.readline()):
                output.append(line)
                address = re.search(r"(?:running|Serving HTTP) on .*?(http://[^\s)]+)", line)
            assert address, "".join(output)
            yield address[1]
        finally:
            process.terminate()


@functools.cache
def serving() -> subprocess.Popen:
    """Return a server process of `without_frugalvit.py serve`. The first call starts this process."""
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
    """Return environment variables for an offline process whose Hugging Face caches are in `home`."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
    return others | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}


def first_answers(application, images: list) -> list:
    """Return the outputs of a `Classifier` or an `Embedder`. Tests run this function in another process."""
    return list(application(images))


def answers_of_threads(applications: list, images: list, calls: int = 160) -> list[tuple[int, int, object]]:
    """Call `applications` from eight threads. Return (index of application, index of image, output) of each call."""

    def ask(number: int) -> tuple[int, int, object]:
        which, index = number % len(applications), number % len(images)
        return which, index, next(iter(applications[which]([images[index]])))

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, range(calls)))
