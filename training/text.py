"""Format texts and tables for the terminal and for Markdown."""

import unicodedata
from collections.abc import Mapping, Sequence


# Characters that change the direction of text in a terminal.
_REORDERING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str) -> str:
    """Escape control characters, line breaks and undecodable bytes in an untrusted text, such as a label or a file
    name. The result is one line that cannot control the terminal."""
    return "".join(
        character.encode("unicode_escape").decode()
        if character in _REORDERING or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
        else character
        for character in text
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of the error's type if the message is empty."""
    if isinstance(error, UnicodeEncodeError):
        return f"the name {printable(error.object)} is not UTF-8; rename it, for example by convmv"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def shortened(names: list[str]) -> str:
    """Join the first three names, and append the number of all names in parentheses."""
    return f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''} ({len(names)})"


def format_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Format rows as a text table with a column for each key. Texts are aligned left, numbers right."""
    columns, lines = _columns_and_lines(rows)
    widths = [max(map(len, column)) for column in zip(columns, *lines, strict=True)]
    lines = [list(columns), ["-" * width for width in widths], *lines]
    aligned = [f"{'<' if is_text else '>'}{width}" for is_text, width in zip(columns.values(), widths, strict=True)]
    return "\n".join("  ".join(map(format, line, aligned)).rstrip() for line in lines)


def format_markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Format rows as a Markdown table. Columns and number formats are the same as in `format_table`."""
    columns, lines = _columns_and_lines(rows)
    rule = [":---" if is_text else "---:" for is_text in columns.values()]
    # Pipes are escaped, because a pipe would end the cell.
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in (columns, rule, *lines))
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def _columns_and_lines(rows: Sequence[Mapping[str, object]]) -> tuple[dict[str, bool], list[list[str]]]:
    """Return a dict and a list. The keys of the dict are the names of the columns. The values of the dict tell whether
    the first value of a column is a text. The list has a list of formatted cells for each row."""
    columns: dict[str, bool] = {}
    for row in rows:
        for column, value in row.items():
            columns.setdefault(column, isinstance(value, str))
    return columns, [[_format(row.get(column)) for column in columns] for row in rows]


def _format(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))
