"""The page of an exported model: a static folder that labels images in the browser and asks no other host."""

import html
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from .common.files import write_text


# The browser's runtime: the package of npm, and what the page takes of it.
PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
HINT = f"Install npm, or give an unpacked {PACKAGE} with --onnxruntime-web."
RUNTIME_FILES = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")


def check_page(name: str, package: str | Path | None = None):
    """Raise a ValueError if browsers cannot run a format, or if their runtime cannot be had. `package` is as in
    `write_page`."""
    if name != "onnx":
        raise ValueError(f"--page runs ONNX in the browser; got --format {name}, expected onnx.")
    if package is not None:
        for source in _runtime_files(Path(package).expanduser()):
            if not source.is_file():
                raise ValueError(f"There is no {source}; expected {PACKAGE} {VERSION} of npm, unpacked.")
    elif shutil.which("npm") is None:
        raise ValueError(f"--page needs {PACKAGE} from npm, and there is no npm here. {HINT}")


def write_page(folder: Path, title: str, package: str | Path | None = None):
    """Write the page and the runtime beside an exported model.

    Args:
        folder (`Path`): A folder that `frugalvit export --format onnx` wrote.
        title (`str`): The page's title.
        package (`str` or `Path`, *optional*): The unpacked npm package; fetched by npm if not given.

    Raises:
        ValueError: if npm cannot fetch it.
    """
    page = Path(__file__).with_name("page").joinpath("index.html").read_text(encoding="utf-8")
    write_text(folder / "index.html", page.replace("TITLE", html.escape(title)))
    with tempfile.TemporaryDirectory() as aside:
        package = _fetch(Path(aside)) if package is None else Path(package).expanduser()
        for source in _runtime_files(package):
            shutil.copyfile(source, folder / source.name)


def _fetch(folder: Path) -> Path:
    """Fetch the npm package and unpack it in a folder."""
    # npm itself looks for updates and asks for money unless told otherwise.
    command = [shutil.which("npm"), "pack", f"{PACKAGE}@{VERSION}", "--silent", "--no-update-notifier", "--no-fund"]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    archives = list(folder.glob("*.tgz"))
    if process.returncode or not archives:
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"npm cannot fetch {PACKAGE} {VERSION} ({last}). {HINT}")
    with tarfile.open(archives[0]) as archive:
        wanted = {f"package/dist/{name}" for name in RUNTIME_FILES}
        archive.extractall(folder, [member for member in archive if member.name in wanted], filter="data")
    return folder / "package"


def _runtime_files(package: Path) -> list[Path]:
    return [package / "dist" / name for name in RUNTIME_FILES]
