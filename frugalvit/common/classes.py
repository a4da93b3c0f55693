"""The classes of a data set among those of a model."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence


IMAGENET_CLASSES = 1000
# What Transformers calls classes that have no names, and numbers.
_NO_NAME = re.compile(r"(LABEL_)?\d+", re.IGNORECASE)


def match_labels(names: Sequence[str], id2label: Mapping[int, str]) -> list[int]:
    """Return the model's index of each class of a data set.

    Classes are matched by name: exactly, or else without regard to case, to marks between words and to the way in
    which Unicode writes accents. Those of ImageNet are matched by WordNet's numbers ("n01440764"), too. Names that are
    numbers of the model's classes mean these. If the model's classes have no names, the data set's are the first ones.

    Raises:
        ValueError: if the data set has classes that the model does not know, or one that could be several of its, as
            ImageNet's two cranes.
    """
    known = [defaultdict(list) for _ in _FORMS]
    for index, label in id2label.items():
        for form, indices in zip(_FORMS, known, strict=True):
            indices[form(label)].append(index)

    def find(name: str) -> list[int]:
        return next(
            (indices[form(name)] for form, indices in zip(_FORMS, known, strict=True) if form(name) in indices), []
        )

    found = [find(name) for name in names]
    if all(found):
        if double := [(name, indices) for name, indices in zip(names, found, strict=True) if len(indices) > 1]:
            name, indices = double[0]
            raise ValueError(
                f"The model has {len(indices)} classes called {name!r} ({', '.join(map(str, indices))}). Name the "
                "data set's classes by the model's numbers, in the order of the labels (evaluate: --class-names)."
            )
        return [indices[0] for indices in found]
    if len(id2label) == IMAGENET_CLASSES:
        from timm.data import ImageNetInfo

        synsets = {synset: index for index, synset in enumerate(ImageNetInfo().label_names())}
        if all(name in synsets for name in names):
            return [synsets[name] for name in names]
    if all(name.isdecimal() and int(name) < len(id2label) for name in names):
        return [int(name) for name in names]
    if len(names) > len(id2label):
        raise ValueError(
            f"The data set has {len(names)} classes ({', '.join(names[:3])}, …), the model only {len(id2label)} "
            f"({', '.join(list(id2label.values())[:3])}, …); choose a model for this data set."
        )
    if all(_NO_NAME.fullmatch(label) for label in id2label.values()):
        return list(range(len(names)))
    unknown = [name for name, indices in zip(names, found, strict=True) if not indices]
    raise ValueError(
        f"The model does not know {len(unknown)} of the data set's {len(names)} classes ({', '.join(unknown[:3])}"
        f"{', …' if len(unknown) > 3 else ''}); its own are {', '.join(list(id2label.values())[:3])}, …. Name those "
        "of the data set as the model does, or by its numbers, in the order of the labels (evaluate: --class-names)."
    )


def compose(text: str) -> str:
    """Write letters and their accents in one character each: macOS writes them apart in names of files."""
    return unicodedata.normalize("NFC", text)


def _plain(name: str) -> str:
    return compose(re.sub(r"[\s_-]+", " ", name).strip().casefold())


# Forms in which names are compared, the strictest first.
_FORMS = compose, _plain
