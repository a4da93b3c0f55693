"""Tables for the terminal and for Markdown."""

from collections.abc import Mapping, Sequence


def format_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows under the keys of the first one; texts to the left, numbers to the right, `None` as a dash.

    Integers get thousands separators, floats four significant digits.
    """
    columns = list(rows[0])
    cells = [[_format(row[column]) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    texts = [isinstance(rows[0][column], str) for column in columns]

    def line(values: list[str]) -> str:
        padded = [v.ljust(w) if text else v.rjust(w) for v, w, text in zip(values, widths, texts, strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(columns), line(["-" * width for width in widths]), *map(line, cells)])


def format_markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """What `format_table` says, as a table of Markdown."""
    columns = list(rows[0])
    rule = [":---" if isinstance(rows[0][column], str) else "---:" for column in columns]
    lines = [columns, rule, *([_format(row[column]) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _format(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
