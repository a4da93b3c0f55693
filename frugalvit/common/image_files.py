"""Images that commands name: files, folders and patterns of them, and parquet files."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Features

from .data import METADATA_FILES, NOT_READ, files_within, find_column, kind_of, leave_out
from .decoding import IMAGE_ENDINGS, UNREAD_ENDINGS


def find_images(arguments: Sequence[str]) -> list[Path]:
    """Find the image and parquet files that arguments name: files, folders with all files in them, or patterns."""
    found = []
    for argument in arguments:
        path = Path(argument).expanduser()
        if path.is_dir():
            files = sorted(files_within(path, {*IMAGE_ENDINGS, *UNREAD_ENDINGS, ".parquet"}))
            if unread := [file for file in files if file.suffix.lower() in UNREAD_ENDINGS]:
                leave_out(unread, NOT_READ)
            files = [file for file in files if file not in unread and file.name not in METADATA_FILES]
        else:
            # Unlike `glob`, it follows no links at **, which may lead in circles.
            names = [path] if path.exists() else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
            # A pipe would be waited for; hidden files are those that are named.
            files = [name for name in names if name.is_file() and _hidden(name) <= _hidden(path)]
        if not files:
            raise FileNotFoundError(f"There are no images at {argument!r}; give image files, folders or patterns.")
        found += files
    return found


def _hidden(path: Path) -> set[str]:
    return {part for part in path.parts if part.startswith(".")}


def find_files(paths: Sequence[Path], image_column: str | None = None) -> Iterator[tuple[str, Path | dict]]:
    """Yield names of image files, and of the images in parquet files, each with the argument of `read_record`."""
    for path in paths:
        if path.suffix.lower() == ".parquet":
            for index, record in enumerate(_read_parquet(path, image_column)):
                yield f"{path}[{index}]", record
        else:
            yield str(path), path


def _read_parquet(path: Path, image_column: str | None) -> Iterator[dict]:
    """Yield undecoded images of a parquet file, of the column that training takes, too."""
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"Cannot read {str(path)!r}: it is no parquet file or is corrupt.") from error
    with file:
        features = Features.from_arrow_schema(file.schema_arrow)
        kinds = {name: kind_of(feature) for name, feature in features.items()}
        column = find_column(kinds, image_column, ("image", "bytes"), "image", str(path))
        for batch in file.iter_batches(64, columns=[column]):
            for value in batch.column(0).to_pylist():
                yield value if isinstance(value, dict) else {"path" if isinstance(value, str) else "bytes": value}
