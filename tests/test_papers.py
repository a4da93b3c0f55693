"""Check that functions named in docs/ exist, and that commands and files named in docs/papers.md exist."""

import ast
import functools
import re
import shlex
from pathlib import Path

import pytest

from frugalvit.cli import COMMANDS


ROOT = Path(__file__).resolve().parents[1]
PLACE = "file and function"
DIFFERENCES = "differences between the paper, its authors' code and ours"
HEADER = ["item", "content of the item", PLACE, "command", "results", DIFFERENCES]


def read_lines() -> list[dict[str, str]]:
    """Return the rows of all tables in docs/papers.md. A row is a dict from column to cell."""
    found = []
    for section in (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        rows = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in section.splitlines() if line[:1] == "|"]
        if rows:
            assert rows[0] == HEADER
        found += [dict(zip(HEADER, row, strict=True)) for row in rows[2:]]
    return found


LINES = read_lines()


def named(cell: str) -> list[str]:
    """Return the names in backticks in a table cell."""
    return re.findall(r"`([^`]+)`", cell)


@functools.cache
def symbols(file: Path) -> set[str]:
    """Return the names that a file defines. A name in a class is written as `Class.name`."""
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


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")), ids=lambda page: page.stem)
def test_places_exist(page):
    for file, symbol in re.findall(r"`([\w/]+\.py):([\w.]+)`", page.read_text(encoding="utf-8")):
        assert symbol in symbols(ROOT / file), (file, symbol)


def test_places_are_named_as_file_and_symbol():
    for place in {place for line in LINES for place in named(line[PLACE])}:
        assert re.fullmatch(r"[\w/]+\.py:[\w.]+", place), place


def test_commands_and_results_exist():
    for command in {command for line in LINES for command in named(line["command"])}:
        program, name, *words = shlex.split(command)
        if program == "pytest":
            assert words[1] in {symbol.rpartition(".")[2] for symbol in symbols(ROOT / name)}, command
        elif program == "python":
            assert (ROOT / name).is_file() and name.startswith("benchmarks/"), command
        else:
            assert name in COMMANDS, command
        if "--config" in words:
            assert (ROOT / "training" / "recipes" / f"{words[words.index('--config') + 1]}.yaml").is_file(), command
    assert all((ROOT / file).is_file() for line in LINES for file in named(line["results"]))
