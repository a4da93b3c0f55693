"""docs/papers.md, line by line: all that it names exists, and no item of the papers is left out."""

import ast
import functools
import importlib
import io
import json
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import frugalvit_cli as cli
import pytest


ROOT = Path(__file__).resolve().parents[1]
HEADER = ["item", "what it says", "place", "command", "results", "where paper, code and ours differ"]
# What the last numbers of equations, tables and figures are, by the headings of docs/papers.md.
NUMBERED = {
    "Bootstrapping SparseFormers from Vision Foundation Models": {"Eq. ": 7, "Table ": 8, "Figure ": 7},
    "Its supplement": {"Table ": 1, "Figure ": 4},
    "Structured Initialization for Attention in Vision Transformers": {
        "Eq. ": 14,
        "Algorithm ": 1,
        "Table ": 7,
        "Figure ": 6,
        "Corollary ": 3,
    },
    "Bootstrapping ViTs, supplement": {"Eq. ": 6, "Table ": 6, "Figure ": 2},
    "Scratching Visual Transformer's Back with Uniform Attention, supplement": {"Table S": 6, "Figure S": 2},
}
# What has no number, or is the only one.
NAMED = {
    "Bootstrapping SparseFormers from Vision Foundation Models": ["Eq. of A.2"],
    "Its supplement": ["Eq. of A.2"],
    "Structured Initialization for Attention in Vision Transformers": ["Remark 1", "Definition 1", "Proposition 1"],
    "Bootstrapping ViTs, supplement": ["Joint", "Shared"],
    "Scratching Visual Transformer's Back with Uniform Attention, supplement": ["CB", "CB_S", "CB_gate", "CB_hybrid"],
}


def read_tables() -> dict[str, list[dict[str, str]]]:
    """Heading -> lines, each a dict of its cells."""
    found = {}
    for section in (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        title, *rest = section.splitlines()
        rows = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in rest if line.startswith("|")]
        if rows:
            assert rows[0] == HEADER, title
            found[title] = [dict(zip(HEADER, row, strict=True)) for row in rows[2:]]
    return found


TABLES = read_tables()
LINES = [line for lines in TABLES.values() for line in lines]


def named(cell: str) -> list[str]:
    """The names that stand in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def made_by() -> dict[str, list[str]]:
    """Command of benchmarks/, without its options -> results files that it wrote."""
    found = {}
    for file in sorted((ROOT / "results").glob("*.json")):
        command = json.loads(file.read_text(encoding="utf-8")).get("command") or ""
        found.setdefault(command.split(" --")[0], []).append(f"results/{file.name}")
    return found


MADE_BY = made_by()


@functools.cache
def symbols(file: Path) -> set[str]:
    """Names that a file's statements give, those within a class with its name and a dot before."""
    found = set()

    def read(statements, prefix=""):
        for statement in statements:
            if isinstance(statement, ast.ClassDef | ast.FunctionDef):
                found.add(prefix + statement.name)
            if isinstance(statement, ast.ClassDef):
                read(statement.body, f"{prefix}{statement.name}.")
            targets = getattr(statement, "targets", [getattr(statement, "target", None)])
            found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    read(ast.parse(file.read_text(encoding="utf-8")).body)
    return found


@pytest.fixture(scope="module")
def explain():
    """Return a command's help. Arguments before `--help` are checked: a table that it does not know is an error."""

    @functools.cache
    def explain_once(command: tuple[str, ...]) -> str:
        program, *words = command
        with pytest.MonkeyPatch.context() as patch:
            output = io.StringIO()
            patch.setenv("COLUMNS", "1000")
            with redirect_stdout(output), redirect_stderr(output), pytest.raises(SystemExit) as stop:
                if program == "python":
                    file = ROOT / words[0]
                    assert file.is_file() and file.parent.name == "benchmarks", words
                    patch.syspath_prepend(str(file.parent))
                    patch.setattr("sys.argv", [*words, "--help"])
                    importlib.import_module(file.stem).main()
                else:
                    raise SystemExit(cli.main([*words, "--help"]))
        assert stop.value.code in (0, None), (command, output.getvalue())
        return output.getvalue()

    return explain_once


@pytest.mark.parametrize("title", NUMBERED)
def test_every_item_has_its_line(title):
    expected = [f"{kind}{n}" for kind, last in NUMBERED[title].items() for n in range(1, last + 1)] + NAMED[title]
    items = [line["item"] for line in TABLES[title]]
    assert not {*expected} - {*items} and len({*items}) == len(items)
    assert {*TABLES} == {*NUMBERED}


def test_places_exist():
    for place in {place for line in LINES for place in named(line["place"])}:
        file, _, symbol = place.partition(":")
        assert symbol in symbols(ROOT / file), place


def test_commands_know_what_they_are_given(explain):
    for command in {command for line in LINES for command in named(line["command"])}:
        program, *words = shlex.split(command)
        if program == "pytest":
            file, option, name = words
            names = {symbol.rpartition(".")[2] for symbol in symbols(ROOT / file)}
            assert option == "-k" and name in names, command
            continue
        # Words up to the first option: the command or file, and a table or task. Of other commands, models.
        options = [index for index, word in enumerate(words) if word.startswith("-")]
        plain = words[: options[0]] if options else words
        taken = 1 if program == "frugalvit" and words[0] != "evaluate" else 2
        text = explain((program, *plain[:taken]))
        for index in options:
            assert re.search(rf"{words[index]}\b", text), (command, words[index])
        if "--config" in words:
            assert (ROOT / "training" / "recipes" / f"{words[words.index('--config') + 1]}.yaml").is_file(), command


def test_results_exist_and_none_is_left_out():
    for line in LINES:
        files, commands = named(line["results"]), named(line["command"])
        assert all((ROOT / file).is_file() for file in files), files
        if not files:
            fitting = "asserted" if any(command.startswith("pytest ") for command in commands) else "not measured"
            assert line["results"] == fitting or (line["results"] == "nothing to measure" and not commands), line
        for command in commands:
            made = MADE_BY.get(command, [])
            assert not made or {*made} & {*files}, (command, made)
