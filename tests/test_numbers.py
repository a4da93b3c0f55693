"""Check that numbers in README, docs and model cards agree with `results/`."""

import itertools
import json
import math
import re
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]


def texts(*patterns: str) -> dict[str, str]:
    files = [file for pattern in patterns for file in sorted(ROOT.glob(pattern))]
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}


PAGES = texts("README.md", "docs/*.md")
CARDS = texts("checkpoints/*/README.md")
# Each list has the numbers of one table in a paper.
QUOTED = [
    [*table.values()]
    for tables in json.loads((ROOT / "docs" / "paper_numbers.json").read_text(encoding="utf-8")).values()
    for table in tables.values()
]
SCALES = {"%": 1e2, "GB": 1e-9, "MB": 1e-6, "ms": 1e3, "G": 1e-9, "M": 1e-6, "T": 1e-12}


def numbers(content) -> list[float]:
    """Return all numbers in the content of a results file."""
    if isinstance(content, bool) or content is None:
        return []
    if isinstance(content, int | float):
        return [content]
    if isinstance(content, str):
        return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", content)]
    values = content.values() if isinstance(content, dict) else content
    return [number for value in values for number in numbers(value)]


def tables(text: str) -> list[tuple[str, str]]:
    """Find each table below an HTML comment that names results files. Return the file names and the table's lines."""
    return re.findall(r"^<!-- (results/.*?) -->\n(\|.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("files", "table"), [table for page in PAGES.values() for table in tables(page)])
def test_numbers_are_those_of_the_results(files, table):
    known = [n for file in files.split() for n in numbers(json.loads((ROOT / file).read_text(encoding="utf-8")))]
    header, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()]
    for row in rows:
        for title, cell in zip(header[1:], row[1:], strict=True):
            # Numbers in brackets follow from other numbers and are skipped. The unit may be in the column's title.
            units = re.search(rf"(?:^|\W)({'|'.join(SCALES)}) ", title)
            for number, rest in re.findall(r"(\d+(?:\.\d+)?)(?=(.*))", re.sub(r"\(.*?\)", "", cell)):
                unit = re.search(rf" ({'|'.join(SCALES)})(?!\w)", rest) or units
                # Some results files store values in the table's unit, so values are also compared without scaling.
                scales = {SCALES[unit[1]], 1.0} if unit else {1.0}
                # The tolerance is 0.51 of the last digit instead of 0.5, because numbers may have been rounded twice.
                within = 0.51 * 10 ** -len(number.partition(".")[2])
                found = (abs(abs(value) * scale - float(number)) <= within for value in known for scale in scales)
                assert any(found), (row, number)


class Section:
    """Text below a heading, with the numbers in its tables and in the results files that the text names."""

    def __init__(self, text: str, page: str):
        names = re.findall(r"results/[\w*-]+\.json", text) or re.findall(r"results/[\w*-]+\.json", page)
        files = {file for name in names for file in ROOT.glob(name)}
        self.known = [n for file in sorted(files) for n in numbers(json.loads(file.read_text(encoding="utf-8")))]
        paragraphs = re.split(r"\n\s*\n", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL))
        tables = [paragraph for paragraph in paragraphs if re.search(r"^\|", paragraph, re.MULTILINE)]
        running = "\n".join(paragraph for paragraph in paragraphs if paragraph not in tables)
        running = re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->|^#.*$", "", running, flags=re.MULTILINE)
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
            # Both numbers were rounded, so the tolerance of their difference is twice as large.
            digit *= 2
        elif unit == "%" and f"{text} % of the" in sentence:
            found = self.known + [100 * a / b for a, b in pairs if b]
        elif unit == "times":
            found = self.known + [a / b for a, b in pairs if b]
        else:
            found = [abs(known) * scale for known in self.known for scale in (1, SCALES.get(unit, 1))]
        return any(abs(other - value) <= 0.51 * digit for other in found)


def number(text: str) -> float:
    return float(text.replace(",", ""))


def is_quoted(text: str, unit: str) -> bool:
    """Return whether a paper's table has this percentage, or has two numbers that differ by this many points."""
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
    """In a sentence that mentions a paper, a number may also be quoted from the paper."""
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
