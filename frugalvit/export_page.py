"""Write a static web page that labels images in the browser with an exported model."""

import html
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from .training.files import write_text


# npm package of the browser's runtime, and the package's files that the page loads.
PACKAGE = "onnxruntime-web@1.30.0"
RUNTIME_FILES = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")


def check_page(name: str):
    """Raise a ValueError if browsers cannot run the format, or if npm is not installed."""
    if name != "onnx":
        raise ValueError(f"page runs ONNX in the browser; format is {name}, expected onnx.")
    if shutil.which("npm") is None:
        raise ValueError(f"page needs {PACKAGE} from npm, and there is no npm here; install it.")


def write_page(folder: Path, title: str, program: str):
    """Write the page and the runtime into the folder of an exported model. npm downloads the runtime."""
    page = Path(__file__).with_name("page").joinpath("index.html").read_text(encoding="utf-8")
    write_text(folder / "index.html", page.replace("TITLE", html.escape(title)).replace("PROGRAM", program))
    command = [shutil.which("npm"), "pack", PACKAGE, "--silent", "--no-update-notifier", "--no-fund"]
    with tempfile.TemporaryDirectory() as aside:
        process = subprocess.run(command, cwd=aside, capture_output=True, text=True, check=False)
        archives = list(Path(aside).glob("*.tgz"))
        if process.returncode or not archives:
            raise ValueError(f"npm cannot fetch {PACKAGE}: {process.stderr.strip() or 'no message'}")
        with tarfile.open(archives[0]) as archive:
            for name in RUNTIME_FILES:
                (folder / name).write_bytes(archive.extractfile(f"package/dist/{name}").read())
