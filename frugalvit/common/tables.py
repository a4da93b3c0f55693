"""Texts and tables for the terminal and for Markdown."""

import unicodedata
from collections.abc import Mapping, Sequence


# Marks that let a terminal show a text in another order than it has.
_REORDERING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str) -> str:
    """Escape control characters, line breaks and bytes that are no text in a text of others, such as a label or a
    file's name: it is then one line, and cannot command the terminal."""
    return "".join(
        character.encode("unicode_escape").decode()
        if character in _REORDERING or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
        else character
        for character in text
    )


def first_line(error: BaseException) -> str:
    """An error in one line: the first line of its message, or its type's name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def shortened(names: list[str]) -> str:
    """The first three names, and how many there are."""
    return f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''} ({len(names)})"


def format_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Format rows as a table under the keys of all rows. Texts stand at the left, numbers at the right.

    Integers have thousands separators, floats four significant digits. `None` and missing values are a dash.
    """
    texts = _columns(rows)
    cells = [[_format(row.get(column)) for column in texts] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(texts)]

    def line(values: list[str]) -> str:
        columns = zip(values, widths, texts.values(), strict=True)
        return "  ".join(v.ljust(w) if text else v.rjust(w) for v, w, text in columns).rstrip()

    return "\n".join([line(list(texts)), line(["-" * width for width in widths]), *map(line, cells)])


def format_markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as a table of Markdown, with the columns and numbers of `format_table`."""
    texts = _columns(rows)
    rule = [":---" if text else "---:" for text in texts.values()]
    lines = [texts, rule, *([_format(row.get(column)) for column in texts] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _columns(rows: Sequence[Mapping[str, object]]) -> dict[str, bool]:
    """Keys of all rows, and whether their first value is a text."""
    firsts: dict[str, object] = {}
    for row in rows:
        for column, value in row.items():
            firsts.setdefault(column, value)
    return {column: isinstance(value, str) for column, value in firsts.items()}


def _format(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))
