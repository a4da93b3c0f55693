"""Check that numbers in README, docs and model cards agree with `results/`."""

import functools
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import CARDS, PAGES, ROOT


# Each list has the numbers of one table in a paper.
QUOTED = [
    [*table.values()]
    for tables in json.loads((ROOT / "docs" / "paper_numbers.json").read_text(encoding="utf-8")).values()
    for table in tables.values()
]
SCALES = {"%": 1e2, "GB": 1e-9, "MB": 1e-6, "ms": 1e3, "G": 1e-9, "M": 1e-6, "T": 1e-12}


def numbers(value: str | float | bool | None) -> list[float]:
    if isinstance(value, str):
        return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", value)]
    return [] if isinstance(value, bool) or value is None else [value]


@functools.cache
def leaves(file: Path) -> list[tuple[set[str], list[float]]]:
    """Return the address and the numbers of each value of a results file.

    An address is a set of strings. It contains the file's stem, and the keys and indices that lead to the value. It
    also contains each number and string of the dicts that the value is in, once alone and once with its key. In
    `{"rows": [{"method": "ToMe", "macs": [1, 2]}]}` of speed.json, the address of 2 contains `speed`, `rows`,
    `rows[0]`, `ToMe`, `method=ToMe`, `macs` and `macs[1]`.
    """

    def walk(content, name, address):
        if isinstance(content, list):
            content = {f"{name}[{index}]": value for index, value in enumerate(content)}
        elif isinstance(content, dict):
            fields = [(key, value) for key, value in content.items() if not isinstance(value, dict | list)]
            address = address | {str(value) for _, value in fields} | {f"{key}={value}" for key, value in fields}
        else:
            return [(address, numbers(content))]
        return [leaf for key, value in content.items() for leaf in walk(value, key, address | {key})]

    return walk(json.loads(file.read_text(encoding="utf-8")), file.stem, {file.stem})


def tables(text: str) -> list[tuple[str, str]]:
    """Find each table below an HTML comment that names results files. Return the comment and the table's lines."""
    return re.findall(r"^<!-- (results/.*?) -->\n(\|.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)


def split_comment(cell: str) -> tuple[str, str]:
    text, _, comment = cell.partition("<!-- ")
    return text.strip(), comment.removesuffix(" -->")


def cells(comment: str, table: str) -> Iterator[tuple[str, str, set[str], list[str], str]]:
    """Yield the column's title, the row's name, the address, the keys and the text of each cell that has an address.
    An address names a place in the results files:

    - The comment above a table lists the results files, and then one address for each column after the first.
    - ` / ` separates the parts of an address. The last part of a column's address lists the keys of the numbers in the
      column's cells. In `student=elastic / accuracy ± spread`, the keys are `accuracy` and `spread`.
    - A row's address is the comment in the row's first cell. If this cell has no comment, the address is its text.
    - A cell's address has the parts of its column's address and of its row's address.
    - `*` in a column's address is replaced by the first part of the row's address.
    - If a cell after the first has a comment, this comment is used instead of the addresses of column and row.
    """
    _, *columns = [column.strip() for column in comment.split("|")]
    header, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()]
    for first, *others in rows:
        name, row = split_comment(first)
        word, *more = (row or name.replace("`", "")).split(" / ")
        for title, column, cell in zip(header[1:], columns, others, strict=True):
            text, own = split_comment(cell)
            if text and column:
                *words, keys = (own or column.replace("*", word)).split(" / ")
                inherited = [] if own else more if "*" in column else [word, *more]
                yield title, name, {*words, *inherited}, keys.split(" ± "), text


@pytest.mark.parametrize(("comment", "table"), [table for page in PAGES.values() for table in tables(page)])
def test_tables_have_the_numbers_at_their_addresses(comment, table):
    """Every value of the results files that matches a cell's address equals the cell's number, up to rounding."""
    files = [file for name in comment.split("|")[0].split() for file in ROOT.glob(name)]
    known = [leaf for file in files for leaf in leaves(file)]
    for title, name, words, keys, text in cells(comment, table):
        # Numbers in brackets are skipped. The unit may be in the column's title.
        text = re.sub(r"\(.*?\)", "", text)
        unit = re.search(rf"(?:^|\W)({'|'.join(SCALES)})(?!\w)", f"{text} {title}")
        parts = text.split("±")
        assert len(parts) <= len(keys), (name, title, text)
        for key, part in zip(keys, parts, strict=False):
            # A value whose key ends with the unit, as in `memory_mb`, already has this unit.
            scale = SCALES[unit[1]] if unit and not key.endswith(f"_{unit[1].lower()}") else 1
            found = [values for address, values in known if words | {key} <= address]
            assert found, (name, title, words, key)
            for values in found:
                for value, number in zip(values, re.findall(r"(?<!\w)[+-]?\d+(?:\.\d+)?", part), strict=True):
                    within = 0.501 * 10 ** -len(number.partition(".")[2])
                    assert abs(value * scale - float(number)) <= within, (name, title, words, key, value)


def test_each_comment_with_results_is_above_a_table():
    lost = {name: page.count("<!-- results/") - len(tables(page)) for name, page in PAGES.items()}
    assert not any(lost.values()), lost


class Section:
    """Text below a heading, with the numbers in its tables and in the results files that the text names."""

    def __init__(self, text: str, page: str):
        names = re.findall(r"results/[\w*-]+\.json", text) or re.findall(r"results/[\w*-]+\.json", page)
        text = re.sub("<!--.*?-->", "", text, flags=re.DOTALL)
        files = {file for name in names for file in ROOT.glob(name)}
        self.known = [n for file in sorted(files) for _, values in leaves(file) for n in values]
        paragraphs = re.split(r"\n\s*\n", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL))
        tables = [paragraph for paragraph in paragraphs if re.search(r"^\|", paragraph, re.MULTILINE)]
        running = "\n".join(paragraph for paragraph in paragraphs if paragraph not in tables)
        running = re.sub(r"`[^`]*`|\]\([^)]*\)|^#.*$", "", running, flags=re.MULTILINE)
        running = re.sub(r"\s+", " ", running)
        self.sentences = re.split(r"(?<=[.:;]) (?=[\"A-Z(*])", running)
        self.tests = [number(n) for n in re.findall(r"(\d[\d,]*) (?:\w+ )?(?:test|held-back) (?:images|ph)", running)]
        in_text = [measure for sentence in self.sentences for measure in measures(sentence)]
        # Two numbers form a pair if one of them is in the running text, or both are in one row or column of a table.
        lines = [in_text]
        for table in tables:
            header, _, *rows = [line[1:-1].split("|") for line in table.splitlines() if line.startswith("|")]
            cells = [[printed(*pair) for pair in zip(header, row, strict=True)] for row in rows]
            lines += [[*itertools.chain(*line), *in_text] for line in [*cells, *zip(*cells, strict=True)]]
        self.printed = {measure for line in lines for measure in line}
        self.pairs = {pair for line in lines for pair in itertools.product({*line}, repeat=2)}

    def supports(self, text: str, unit: str, sentence: str) -> bool:
        """Return whether a number is in the results files or can be computed from two other numbers of the section."""
        value = number(text)
        digit = 10 ** -len(text.partition(".")[2])
        pairs = [(number(a), number(b)) for (a, of_a), (b, of_b) in self.pairs if of_a == of_b]
        if unit.startswith("point") and re.search(r"\berrors?\b", sentence):
            shares = [number(share) for share, of in self.printed if of == "%" and number(share) < 100]
            found = [math.sqrt(share * (100 - share) / images) for share in shares for images in self.tests]
        elif unit.startswith("point"):
            pairs = [(number(a), number(b)) for (a, of_a), (b, of_b) in self.pairs if of_a == of_b == "%"]
            found = [abs(a - b) for a, b in pairs]
            # Both numbers of a pair were rounded, so their difference may have twice the rounding error of one number.
            digit *= 2
        elif unit == "%" and f"{text} % of the" in sentence:
            found = self.known + [100 * a / b for a, b in pairs if b]
        elif unit == "times":
            found = self.known + [a / b for a, b in pairs if b]
        else:
            found = [abs(known) * SCALES.get(unit, 1) for known in self.known]
        return any(abs(other - value) <= 0.51 * digit for other in found)


def number(text: str) -> float:
    return float(text.replace(",", ""))


def is_quoted(text: str, unit: str) -> bool:
    """If the unit is a percentage, return whether a paper's table has this number. If the unit is points, return
    whether two numbers of such a table differ by this number."""
    within = 0.51 * 10 ** -len(text.partition(".")[2])
    for table in QUOTED:
        found = [abs(a - b) for a, b in itertools.combinations(table, 2)] if unit.startswith("point") else table
        if any(abs(value - number(text)) <= within for value in found):
            return True
    return False


def measures(sentence: str) -> list[tuple[str, str]]:
    """Return each number of a sentence with its unit. In "2 and 3 %", both numbers are percentages."""
    pattern = r"(?<![\w.-])(\d[\d,]*(?:\.\d+)?)(?=(?:(?: ?%)?(?:,| and| to| or|, and) [\d.,]*\d)* (\S+))"
    units = {*SCALES, "point", "points", "times", "s", "images/s", "minutes", "hours"}
    found = [(text.rstrip(","), unit.rstrip(".,:;)")) for text, unit in re.findall(pattern, sentence)]
    return [(text, unit) for text, unit in found if unit in units]


def printed(title: str, cell: str) -> list[tuple[str, str]]:
    """Return each number of a table cell with its unit. Skip standard errors and numbers in brackets."""
    units = re.search(rf"(?:{'|'.join(SCALES)}|images/s)(?!\w)", f"{cell} {title}")
    unit = units[0] if units else "%" if "accuracy" in title else title
    return [(text, unit) for text in re.findall(r"\d[\d,]*(?:\.\d+)?", re.sub(r"± [\d.]+|\(.*?\)", "", cell))]


@pytest.mark.parametrize(("name", "page"), [*PAGES.items(), *CARDS.items()], ids=[*PAGES, *CARDS])
def test_numbers_in_running_text_follow_from_the_results(name, page):
    """A number may also come from a paper if its sentence mentions a paper."""
    page = re.sub(r"\A---\n.*?^---$", "", page, flags=re.MULTILINE | re.DOTALL)
    # Pages are split into sections. A model card is one section.
    for text in re.split(r"^(?=#)", page, flags=re.MULTILINE) if name in PAGES else [page]:
        section = Section(text, page)
        for sentence in section.sentences:
            for text, unit in measures(sentence):
                about_paper = re.search("[Pp]aper", sentence) and (unit == "times" or is_quoted(text, unit))
                assert about_paper or section.supports(text, unit, sentence), (text, unit, sentence)


def test_quoted_numbers_are_those_of_the_papers():
    table = PAGES["docs/results.md"].rpartition("| claim | paper |")[2]
    cells = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    quotes = [
        (text, "points" if sign else "%")
        for cell in cells
        for sign, text in re.findall(r"(?<![\w.])([+-]?)(\d+\.\d+)", cell)
    ]
    assert len(quotes) > 20 and [quote for quote in quotes if not is_quoted(*quote)] == []


def find(content, name: str) -> list:
    """Return all values of a field, at any depth of a results file."""
    values = content.values() if isinstance(content, dict) else content if isinstance(content, list) else []
    own = [content[name]] if isinstance(content, dict) and name in content else []
    return own + [found for value in values for found in find(value, name)]


def test_results_name_their_commit_and_machine():
    for file in (ROOT / "results").glob("*.json"):
        content = json.loads(file.read_text(encoding="utf-8"))
        assert all(find(content, name) for name in ("commit", "machine")), file
