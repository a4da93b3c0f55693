"""Columns of tables that hold images."""

import re
from collections.abc import Mapping
from contextlib import suppress

import datasets
import pyarrow as pa


# Columns of images that have no type of their own, and columns of their files.
IMAGE_COLUMNS = re.compile(r"(image|img|picture|photo)s?(_bytes)?|jpe?g|png|webp", re.IGNORECASE)
PATH_COLUMNS = re.compile(r"((image|img)_)?(file|path)|file_?(name|path)", re.IGNORECASE)


def image_columns(features: Mapping, sure: bool = False) -> list[str]:
    """The columns of images: those of that type; or else of bytes, if possible with a name that says so; or else of
    texts that are named as paths of images. With `sure`, only those whose type or name says that they are images."""
    binary = [name for name, feature in features.items() if holds(feature, "binary")]
    texts = [name for name, feature in features.items() if holds(feature, "string")]
    signs = [
        [name for name, feature in features.items() if is_image(feature)],
        [name for name in binary if IMAGE_COLUMNS.fullmatch(name)],
        binary,
        [name for name in texts if IMAGE_COLUMNS.fullmatch(name)],
        [name for name in texts if PATH_COLUMNS.fullmatch(name)],
    ]
    return next(filter(None, signs[:2] if sure else signs), [])


def find_image_column(features: Mapping, given: str | None, dataset) -> str:
    """The only column of images, or the one that is given.

    Raises:
        ValueError: if there is none or several, or no column is called so.
    """
    return find_column(features, given, image_columns(features), "image", dataset)


def find_column(features: Mapping, given: str | None, found: list[str], what: str, dataset) -> str | None:
    if given is not None:
        if given not in features:
            raise ValueError(f"{dataset!r} has no column {given!r} (--{what}-column); it has {', '.join(features)}.")
        return given
    if len(found) > 1 or (what == "image" and not found):
        raise ValueError(
            f"{dataset!r} has {len(found) or 'no'} {what} columns among {', '.join(features)}; expected one. "
            f"Name it with --{what}-column."
        )
    return found[0] if found else None


def check_image_column(features: datasets.Features, column: str, dataset):
    """Raise a ValueError if a column holds neither images nor what they could be read from: bytes, or paths."""
    if not (is_image(features[column]) or holds(features[column], "binary", "string")):
        raise ValueError(f"The column {column!r} of {dataset!r} holds {features[column]}, expected images.")


def is_image(feature) -> bool:
    # Parquet files that were not written by `datasets` hold images as structures of bytes and path.
    return isinstance(feature, datasets.Image) or (
        isinstance(feature, dict) and "bytes" in feature and feature.keys() <= {"bytes", "path"}
    )


def holds(feature, *types: str) -> bool:
    return isinstance(feature, datasets.Value) and feature.dtype.removeprefix("large_").startswith(types)


def features_of(schema: pa.Schema) -> dict:
    """The columns that `datasets` has types for."""
    features = {}
    for field in schema:
        with suppress(ValueError):
            features[field.name] = datasets.features.features.generate_from_arrow_type(field.type)
    return features
