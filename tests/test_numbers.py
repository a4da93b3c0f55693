"""Numbers in README, docs and cards of shipped models are those of `results/`, which say how they were measured."""

import itertools
import json
import math
import re
import shlex
from pathlib import Path

import pytest

from frugalvit.training import bootstrap, joint, train


ROOT = Path(__file__).resolve().parents[1]


def texts(*patterns: str) -> dict[str, str]:
    files = [file for pattern in patterns for file in sorted(ROOT.glob(pattern))]
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}


PAGES = texts("README.md", "docs/*.md")
CARDS = texts("checkpoints/*/README.md")
# The numbers of the papers that are quoted, by table.
QUOTED = [
    [*table.values()]
    for tables in json.loads((ROOT / "docs" / "paper_numbers.json").read_text(encoding="utf-8")).values()
    for table in tables.values()
]
SCALES = {"%": 1e2, "GB": 1e-9, "MB": 1e-6, "ms": 1e3, "G": 1e-9, "M": 1e-6, "T": 1e-12}


def numbers(content) -> list[float]:
    """All numbers in a results file."""
    if isinstance(content, bool) or content is None:
        return []
    if isinstance(content, int | float):
        return [content]
    if isinstance(content, str):
        return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", content)]
    values = content.values() if isinstance(content, dict) else content
    return [number for value in values for number in numbers(value)]


def tables(text: str) -> list[tuple[str, str]]:
    """Results files and rows of every table whose numbers a comment before it says to be measured."""
    return re.findall(r"^<!-- (results/.*?) -->\n(\|.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_numbers_are_those_of_the_results(page):
    for files, table in tables(PAGES[page]):
        check_table(files, table)


def check_table(files: str, table: str):
    known = [n for file in files.split() for n in numbers(json.loads((ROOT / file).read_text(encoding="utf-8")))]
    header, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()]
    for row in rows:
        for title, cell in zip(header[1:], row[1:], strict=True):
            # What is in brackets follows from others. A number has the unit after it, or that of its column.
            units = re.search(rf"(?:^|\W)({'|'.join(SCALES)}) ", title)
            for number, rest in re.findall(r"(\d+(?:\.\d+)?)(?=(.*))", re.sub(r"\(.*?\)", "", cell)):
                unit = re.search(rf" ({'|'.join(SCALES)})(?!\w)", rest) or units
                # Some files have the unit in the name of a field.
                scales = {SCALES[unit[1]], 1.0} if unit else {1.0}
                # Half a digit more: what is printed may have been rounded twice.
                within = 0.51 * 10 ** -len(number.partition(".")[2])
                found = (abs(abs(value) * scale - float(number)) <= within for value in known for scale in scales)
                assert any(found), (row, number)


class Section:
    """The content below a heading: its running text, the numbers of its tables, and the results that it names."""

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
        said = [measure for sentence in self.sentences for measure in measures(sentence)]
        # What may be compared: what is said with all that is printed, and the cells of a row or a column.
        lines = [said]
        for table in tables:
            header, _, *rows = [line[1:-1].split("|") for line in table.splitlines() if line.startswith("|")]
            cells = [[printed(*pair) for pair in zip(header, row, strict=True)] for row in rows]
            lines += [[*itertools.chain(*line), *said] for line in [*cells, *zip(*cells, strict=True)]]
        self.printed = {measure for line in lines for measure in line}
        self.pairs = {pair for line in lines for pair in itertools.product({*line}, repeat=2)}

    def has(self, said: str, unit: str, sentence: str) -> bool:
        """Whether a number is one of the results or follows from what is printed beside it."""
        value, digit = number(said), 10 ** -len(said.partition(".")[2])
        pairs = [(number(a), number(b)) for (a, of_a), (b, of_b) in self.pairs if of_a == of_b]
        if unit.startswith("point") and re.search(r"\berrors?\b", sentence):
            shares = [number(share) for share, of in self.printed if of == "%" and number(share) < 100]
            found = [math.sqrt(share * (100 - share) / images) for share in shares for images in self.tests]
        elif unit.startswith("point"):
            pairs = [(number(a), number(b)) for (a, of_a), (b, of_b) in self.pairs if of_a == of_b == "%"]
            # Both were rounded.
            found, digit = [abs(a - b) for a, b in pairs], 2 * digit
        elif unit == "%" and f"{said} % of the" in sentence:
            found = self.known + [100 * a / b for a, b in pairs if b]
        elif unit == "times":
            found = self.known + [a / b for a, b in pairs if b]
        else:
            found = [abs(known) * scale for known in self.known for scale in (1, SCALES.get(unit, 1))]
        return any(abs(other - value) <= 0.51 * digit for other in found)


def number(said: str) -> float:
    return float(said.replace(",", ""))


def is_quoted(said: str, unit: str) -> bool:
    """Whether a percentage is one of the papers' numbers, or points are the difference of two numbers of one table."""
    within = 0.51 * 10 ** -len(said.partition(".")[2])
    for table in QUOTED:
        found = [abs(a - b) for a, b in itertools.combinations(table, 2)] if unit.startswith("point") else table
        if any(abs(value - number(said)) <= within for value in found):
            return True
    return False


def measures(sentence: str) -> list[tuple[str, str]]:
    """Numbers and units; in "2 and 3 %", both are percentages."""
    pattern = r"(?<![\w.-])(\d[\d,]*(?:\.\d+)?)(?=(?:(?: ?%)?(?:,| and| to| or|, and) [\d.,]*\d)* (\S+))"
    units = {*SCALES, "point", "points", "times", "s", "images/s", "minutes", "hours"}
    found = [(said.rstrip(","), unit.rstrip(".,:;)")) for said, unit in re.findall(pattern, sentence)]
    return [(said, unit) for said, unit in found if unit in units]


def printed(title: str, cell: str) -> list[tuple[str, str]]:
    """Numbers and units of a cell, without the errors of others."""
    units = re.search(rf"(?:{'|'.join(SCALES)}|images/s)(?!\w)", f"{cell} {title}")
    unit = units[0] if units else "%" if "accuracy" in title else title
    return [(said, unit) for said in re.findall(r"\d[\d,]*(?:\.\d+)?", re.sub(r"± [\d.]+|\(.*?\)", "", cell))]


@pytest.mark.parametrize(("name", "page"), [*PAGES.items(), *CARDS.items()], ids=[*PAGES, *CARDS])
def test_numbers_in_running_text_follow_from_the_results(name, page):
    """Or, in sentences about a paper, are quoted."""
    page = re.sub(r"\A---\n.*?^---$", "", page, flags=re.MULTILINE | re.DOTALL)
    # A card's section is all of it.
    for text in re.split(r"^(?=#)", page, flags=re.MULTILINE) if name in PAGES else [page]:
        section = Section(text, page)
        for sentence in section.sentences:
            for said, unit in measures(sentence):
                about_paper = re.search("[Pp]aper", sentence) and (unit == "times" or is_quoted(said, unit))
                assert about_paper or section.has(said, unit, sentence), (said, unit, sentence)


def test_numbers_beside_ours_are_the_papers():
    table = PAGES["docs/results.md"].rpartition("| claim | paper |")[2]
    cells = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    quotes = [
        (said, "points" if sign else "%")
        for cell in cells
        for sign, said in re.findall(r"(?<![\w.])([+-]?)(\d+\.\d+)", cell)
    ]
    assert len(quotes) > 20 and [quote for quote in quotes if not is_quoted(*quote)] == []


def find(content, name: str) -> list:
    """All values of this name in a results file."""
    values = content.values() if isinstance(content, dict) else content if isinstance(content, list) else []
    own = [content[name]] if isinstance(content, dict) and name in content else []
    return own + [found for value in values for found in find(value, name)]


def test_commands_of_cards_parse_or_say_of_which_commit_they_are():
    trainings = {"bootstrap": bootstrap, "joint": joint, "train": train}
    found = 0
    for card, text in CARDS.items():
        dated = re.search(r"at the commit that `(results/[\w-]+\.json)` names", text)
        for name, options in re.findall(rf"^frugalvit ({'|'.join(trainings)}) (.*)$", text, re.MULTILINE):
            found += 1
            if dated:
                assert find(json.loads((ROOT / dated[1]).read_text(encoding="utf-8")), "commit"), card
            else:
                trainings[name].make_parser().parse(shlex.split(options))
    assert found > 9


def test_results_say_by_what_they_were_measured():
    """Results name the commit and the machine. Older ones say that these were not noted yet."""
    for file in (ROOT / "results").glob("*.json"):
        content = json.loads(file.read_text(encoding="utf-8"))
        assert all(find(content, name) for name in ("commit", "machine")), file
