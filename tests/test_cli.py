"""Tests of the `frugalvit` command: help, errors and exit codes."""

import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from frugalvit import cli
from frugalvit.training.files import atomic_directory, atomic_file
from frugalvit.version import __version__


ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def command(monkeypatch):
    """Return a function that registers its argument as the command `frugalvit fake`."""

    def install(function):
        module = types.ModuleType("frugalvit.fake")
        module.main = function
        monkeypatch.setitem(sys.modules, "frugalvit.fake", module)
        monkeypatch.setitem(cli.COMMANDS, "fake", ("frugalvit.fake", "a command for tests"))

    monkeypatch.delenv("FRUGALVIT_DEBUG", raising=False)
    return install


@pytest.mark.parametrize(
    ("argument", "code", "message"),
    [
        ("--help", 0, "usage: frugalvit"),
        ("--version", 0, f"frugalvit {__version__}"),
        ("quikstart", 2, "there is no command 'quikstart'; did you mean quickstart?"),
        ("predict docs/dgo.png", 1, "There are no images at 'docs/dgo.png'"),
        ("predict docs/dog.png --model cifar10-sparsformer", 1, "did you mean cifar10-sparseformer"),
        ("bootstrap --teacher ./nowhere", 1, "There is no folder './nowhere'"),
    ],
)
def test_help_and_errors_of_the_program(argument, code, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(argument.split()) == code
    printed = capsys.readouterr()
    assert message in printed.out + printed.err


def test_the_program_lists_all_commands():
    command = [sys.executable, "-m", "frugalvit", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    printed = result.stdout.splitlines()
    assert result.returncode == 0 and max(map(len, printed)) <= 119
    for name, (_, text) in cli.COMMANDS.items():
        assert any(line.split()[:1] == [name] and line.endswith(text) for line in printed)


@pytest.mark.parametrize("command", [*([name] for name in cli.COMMANDS), ["evaluate", "classification"]], ids=" ".join)
def test_options_have_one_spelling_and_others_are_refused(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, "--help"])
    help = capsys.readouterr().out
    assert stop.value.code == 0 and help.startswith(f"usage: frugalvit {' '.join(command)} ")
    assert not [option for option in re.findall(r"(?<![\w-])--[\w-]+", help) if "-" in option[2:]]
    # `--no_code` of publish turns off no other option.
    assert len(re.findall(r"^  --no_(?!code)", help, re.MULTILINE)) == help.count("Turn off: ")
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, "--no-such-option"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith(f"frugalvit {command[0]}") and error.count("\n") == 1


def test_user_errors_are_one_line(command, capsys):
    def fail(argv):
        raise ValueError("expected this,\n  got that")

    command(fail)
    assert cli.main(["fake"]) == 1
    assert capsys.readouterr() == ("", "frugalvit fake: error: expected this, got that\n")
    with pytest.raises(ValueError):
        cli.main(["--debug", "fake"])


@pytest.mark.parametrize(("name", "code", "message"), [("SIGINT", 130, ["interrupted"]), ("SIGTERM", 143, [])])
def test_signals_end_a_command_without_partial_files(name, code, message, command, tmp_path, capsys):
    def work(argv):
        with atomic_directory(tmp_path / "out") as folder, atomic_file(tmp_path / "out.json") as file:
            for path in (folder / "half", file):
                path.write_text("half")
            os.kill(os.getpid(), getattr(signal, name))

    command(work)
    with pytest.raises(SystemExit) as stop:
        sys.exit(cli.main(["fake"]))
    assert stop.value.code == code and not list(tmp_path.iterdir())
    assert re.findall("interrupted", capsys.readouterr().err) == message
