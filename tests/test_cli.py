"""The `frugalvit` command: fast help, clear errors, exit codes."""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import time
import types

import pytest
from tqdm import tqdm

from frugalvit import checkpoint_path, cli
from frugalvit.common import command_line
from frugalvit.common.files import whole_file, whole_folder
from frugalvit.training.components.arguments import ArgumentParser, RunArguments, run_as_program
from frugalvit.version import __version__


def run(*arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    command = [sys.executable, *options, "-m", "frugalvit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def command(monkeypatch):
    """Makes `frugalvit fake` call the function that a test gives."""

    def install(function):
        module = types.ModuleType("frugalvit.fake")
        module.main = function
        options = types.ModuleType("frugalvit.options.fake")
        options.parse = lambda argv: None
        monkeypatch.setitem(sys.modules, "frugalvit.fake", module)
        monkeypatch.setitem(sys.modules, "frugalvit.options.fake", options)
        monkeypatch.setitem(cli.COMMANDS, "fake", ("frugalvit.fake", "a command for tests"))

    monkeypatch.delenv("FRUGALVIT_DEBUG", raising=False)
    return install


@pytest.mark.parametrize("argument", ["--help", "--version", "no-such-command"])
def test_answers_at_once(argument):
    result = run(argument, options=("-X", "importtime"))
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "import time:" in line}
    assert "frugalvit.cli" in imported
    assert imported.isdisjoint({"torch", "transformers", "numpy", "huggingface_hub"})
    printed, code = result.stdout.splitlines(), result.returncode
    if argument == "--version":
        assert (printed, code) == ([f"frugalvit {__version__}"], 0)
    if argument == "--help":
        assert code == 0 and max(map(len, printed)) <= 119
        for name, (_, text) in cli.COMMANDS.items():
            assert any(line.split()[:1] == [name] and line.endswith(text) for line in printed)


# Run in a process of its own, commands of `frugalvit` before training commands, whose parser is Transformers'.
HELP = """
import contextlib, io, sys
from frugalvit import cli
heavy = {"torch", "torchvision", "datasets", "accelerate", "evaluate", "timm", "matplotlib", "pyarrow"}
for name in sorted(cli.COMMANDS, key=lambda name: cli.COMMANDS[name][0]):
    is_recipe = ".training." in cli.COMMANDS[name][0]
    for argv in ([name, "--help"], [name, "--no-such-option"]):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                cli.main(argv)
            except SystemExit as stop:
                code = stop.code
        others = set() if is_recipe else {"transformers", "numpy", "huggingface_hub", "PIL"}
        imported = (heavy | others) & set(sys.modules)
        print(argv[0], code, sorted(imported), f"frugalvit {name}: error: " in said.getvalue())
"""


def test_help_and_wrong_options_wait_for_nothing():
    ran = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=120)
    lines = ran.stdout.splitlines()
    assert sorted(lines) == sorted(f"{name} {code} [] {code == 2}" for name in cli.COMMANDS for code in (0, 2)), (
        ran.stderr
    )


def test_choices_are_all_that_there_are():
    """Names that options list without importing what defines them."""
    from frugalvit import compare, contenders
    from frugalvit.common import choices
    from frugalvit.configuration import (
        configuration_base,
        configuration_bootstrapped_vit,
        configuration_patch_sparseformer,
    )
    from frugalvit.modeling import conversion, inheritance, initialization, reference_initialization
    from frugalvit.options import compare as compared

    assert tuple(initialization.INITIALIZATIONS) == choices.INITIALIZATIONS
    assert reference_initialization.REFERENCE == choices.REFERENCE
    assert inheritance.FOCUSINGS == choices.FOCUSINGS
    assert configuration_patch_sparseformer.PLACEMENTS == choices.PLACEMENTS
    assert configuration_patch_sparseformer.PLACEMENT_RULES == choices.PLACEMENT_RULES
    assert configuration_base.CONTEXT_BROADCASTS == choices.CONTEXT_BROADCASTS
    assert configuration_base.CONTEXT_BROADCAST_POSITIONS == choices.CONTEXT_BROADCAST_POSITIONS
    assert tuple(configuration_bootstrapped_vit.VARIANTS) == choices.JOINT_VARIANTS
    assert tuple(conversion.TEMPLATES) == choices.CONVERTED_VARIANTS
    assert contenders.BASELINES == compared.BASELINES
    assert tuple(compare.PRECISIONS) == compared.PRECISIONS


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["bootstrap", "--imagesize", "32"], "--image-size"),
        (["train", "--learing-rate", "1", "--output", "out"], "--learning-rate"),
        (["predict", "a.png", "--modle", "x"], "--model"),
        (["evaluate", "knn", "--neigbors=3"], "--neighbors"),
        (["export", "--page_", "x"], "--page"),
        (["train", "--epoch-s", "1"], "--epochs"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_nearest_option_is_named(argv, meant, capsys):
    """Also where something is missing besides."""
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and f"did you mean {meant}?" in error and error.count("\n") == 1


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_breaks_no_words_and_says_a_default_once(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parser = cli.options_of(name).make_parser()
    words = set(parser.format_help().split())
    for action in parser._actions:
        if action.help in (None, argparse.SUPPRESS) or action.choices and isinstance(action.choices, dict):
            continue
        help = parser._get_formatter()._expand_help(action)
        assert not set(help.split()) - words
        assert len(re.findall(r"\bdefault:|Default:|\(default\)", help)) <= 1 and "default: None" not in help


def test_recipes_group_their_options(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bootstrap", "--help"])
    help = capsys.readouterr().out
    titles = ["Teacher and student:", "Images to train and evaluate on:", "How long, how and where to train:"]
    assert [help.index(title) for title in titles] == sorted(help.index(title) for title in titles)


@pytest.mark.parametrize("command", ["export", "budget"])
def test_a_model_is_named_by_an_option_or_by_its_place(command, capsys):
    parse, rest = cli.options_of(command).parse, ["--output", "out"] if command == "export" else []
    assert vars(parse(["--model", "m", *rest])) == vars(parse(["m", *rest])) == vars(parse([*rest, "m"]))
    for wrong in ([], ["m", "--model", "n"]):
        with pytest.raises(SystemExit):
            parse([*wrong, *rest])
    errors = capsys.readouterr().err.splitlines()
    assert "required: --model" in errors[0] and "there is no argument 'm'; the model is 'n'" in errors[1]


def test_shells_complete_commands_and_options(tmp_path):
    script = run("--print-completion", "bash")
    assert script.returncode == 0, script.stderr
    (tmp_path / "completion").write_text(script.stdout, encoding="utf-8")

    def completed(*words: str) -> list[str]:
        code = f"""source {tmp_path}/completion
        COMP_WORDS=(frugalvit {" ".join(words)}) COMP_CWORD={len(words)}
        $(complete -p frugalvit | sed 's/.*-F \\([^ ]*\\).*/\\1/') frugalvit "{words[-1]}" && echo "${{COMPREPLY[@]}}"
        """
        return subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60).stdout.split()

    assert completed("boot") == ["bootstrap"]
    assert completed("bootstrap", "--image-s") == ["--image-size"]
    assert completed("evaluate", "kn") == ["knn"]
    refused = run("--print-completion", "korn")
    assert refused.returncode == 2 and "expected one of bash" in refused.stderr and refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [[name] for name in cli.COMMANDS]
    + [["evaluate", task] for task in ("classification", "knn", "linear", "segmentation", "zero-shot", "retrieval")]
    + [["evaluate", "scienceqa"], ["convert", "showlab"]],
    ids=" ".join,
)
def test_options_have_one_spelling(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, "--help"])
    help = capsys.readouterr().out
    assert stop.value.code == 0 and help.startswith(f"usage: frugalvit {' '.join(command)} ")
    options = re.findall(r"(?<![\w-])--[\w-]+", help)
    assert "--help" in options
    assert not [option for option in options if "_" in option or option in command_line.EARLIER]


@pytest.mark.parametrize(
    "given",
    ["--output out --batch-size 2", "--output_dir out --batch_size 2", "--output-dir=out --batch_size=2"],
)
def test_all_spellings_are_taken(given, monkeypatch):
    parser = command_line.CommandParser()
    parser.add_argument("--output")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--batch-size", type=int)
    arguments = parser.parse_args(given.split())
    assert (arguments.output, arguments.batch_size, arguments.json) == ("out", 2, False)
    monkeypatch.setattr("sys.argv", ["frugalvit", *given.split()])
    assert parser.parse_args() == arguments
    assert vars(parser.parse_args(["--json", "a_b.json"])) == {"output": "a_b.json", "json": False, "batch_size": None}
    assert parser.parse_args(["--json", "--output", "a.json"]).json
    (run,) = ArgumentParser([RunArguments], "frugalvit train", "").parse(given.split())
    assert (run.output_dir, run.batch_size) == ("out", 2)


def test_no_command_prints_the_help_and_fails(capsys):
    assert cli.main([]) == 2
    assert capsys.readouterr().err == cli.usage() + "\n"


@pytest.mark.parametrize(("word", "hint"), [("quikstart", "did you mean 'quickstart'?"), ("xyz", "the commands are ")])
def test_unknown_command(word, hint, capsys):
    assert cli.main([word]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"frugalvit: error: there is no command {word!r}; ")
    assert hint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("expected this,\n  got that"), "expected this, got that"),
        (FileNotFoundError(2, "No such file or directory", "a.png"), "[Errno 2] No such file or directory: 'a.png'"),
        (NotADirectoryError(20, "Not a directory", "a"), "[Errno 20] Not a directory: 'a'"),
        (PermissionError(13, "Permission denied", "a"), "[Errno 13] Permission denied: 'a'"),
        (OSError(), "OSError"),
    ],
)
def test_user_errors_are_one_line(command, error, line, capsys):
    def fail(argv):
        raise error

    command(fail)
    assert cli.main(["fake"]) == 1
    assert capsys.readouterr() == ("", f"frugalvit fake: error: {line}\n")


def test_configuration_errors_are_one_line(command, capsys):
    from frugalvit import SparseFormerConfig

    command(lambda argv: SparseFormerConfig(hidden_size="wide"))
    assert cli.main(["fake"]) == 1
    error = capsys.readouterr().err
    assert "hidden_size" in error
    assert error.count("\n") == 1
    command(lambda argv: SparseFormerConfig(hidden_size=30, num_attention_heads=4))
    assert cli.main(["fake"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("frugalvit fake: error: ") and "30" in error and "validat" not in error


def test_defects_keep_their_traceback(command):
    def fail(argv):
        raise TypeError("a defect")

    command(fail)
    with pytest.raises(TypeError, match="a defect"):
        cli.main(["fake"])


@pytest.mark.parametrize("how", ["before", "after", "environment"])
def test_debug_shows_the_traceback_of_user_errors(command, how, monkeypatch):
    def fail(argv):
        assert "--debug" not in argv
        raise ValueError("what was given")

    command(fail)
    if how == "environment":
        monkeypatch.setenv("FRUGALVIT_DEBUG", "1")
    with pytest.raises(ValueError, match="what was given"):
        cli.main({"before": ["--debug", "fake"], "after": ["fake", "--debug"], "environment": ["fake"]}[how])


def swallowing(function):
    """A library that makes an error of its own of whatever ends it."""
    try:
        function()
    except BaseException as error:
        raise ImportError("It could not be imported.") from error


ENDINGS = {"SIGINT": (130, "interrupted"), "SIGTERM": (143, "terminated"), "SIGHUP": (129, "its terminal was closed")}


@pytest.mark.parametrize("through", [lambda function: function(), swallowing], ids=["as it is", "swallowed"])
@pytest.mark.parametrize("name", ENDINGS)
def test_signals_end_a_command_in_one_line_and_leave_nothing(name, through, command, tmp_path, capsys):
    number, (code, said) = getattr(signal, name), ENDINGS[name]
    before = signal.getsignal(number)

    def work(argv):
        with whole_folder(tmp_path / "out") as folder, whole_file(tmp_path / "out.json") as file:
            for path in (folder / "half", file):
                path.write_text("half")
            through(lambda: os.kill(os.getpid(), number))

    command(work)
    assert cli.main(["fake"]) == code
    assert capsys.readouterr().err == f"\nfrugalvit fake: {said}\n"
    assert not list(tmp_path.iterdir()) and signal.getsignal(number) == before
    with pytest.raises(SystemExit) as stop:
        run_as_program(lambda: work([]), "fake")
    assert stop.value.code == code and capsys.readouterr().err == f"fake: {said}\n"
    assert not list(tmp_path.iterdir()) and signal.getsignal(number) == before


@pytest.mark.reliability
@pytest.mark.timeout(7200)
def test_signals_at_random_moments_leave_all_or_nothing(tmp_path):
    """The command writes a folder and starts another process."""
    chance, output = random.Random(int(os.environ.get("FRUGALVIT_SEED", "0"))), tmp_path / "out"
    command = [sys.executable, "-m", "frugalvit", "publish", str(checkpoint_path("cifar10-agent-cnn"))]
    command += ["--license", "mit", "--output", str(output), "--overwrite"]
    for _ in range(int(os.environ.get("FRUGALVIT_SIGNALS", "1"))):
        name = chance.choice(list(ENDINGS))
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
            while process.poll() is None and not list(tmp_path.glob(".out.*.partial")):
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 3))
            process.send_signal(getattr(signal, name))
            said = process.communicate(timeout=600)[1]
        code, text = ENDINGS[name]
        # Where all is written, the process may be about to end.
        assert process.returncode in (code, 0, -getattr(signal, name)), said
        assert process.returncode != code or said.endswith(f"\nfrugalvit publish: {text}\n")
        assert [path.name for path in tmp_path.iterdir()] == ["out"] * output.exists()
        assert process.returncode == code or (output / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ENDINGS)
def test_signals_that_are_ignored_stay_so(name, command):
    """`nohup` and shells leave such signals to processes in the background."""
    number, received = getattr(signal, name), []
    before = signal.signal(number, signal.SIG_IGN)
    try:
        command(lambda argv: received.append(os.kill(os.getpid(), number)))
        assert cli.main(["fake"]) == 0 and received == [None]
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (3, 3)])
def test_arguments_and_exit_codes_pass_through(command, returned, code):
    received = []

    def record(argv):
        received.append(argv)
        return returned

    command(record)
    assert cli.main(["fake", "--epochs", "2", "folder"]) == code
    assert received == [["--epochs", "2", "folder"]]


def test_a_reader_that_stops_reading_is_no_error():
    code = """
import sys, types
from frugalvit import cli
fake, options = types.ModuleType("frugalvit.fake"), types.ModuleType("frugalvit.options.fake")
fake.main, options.parse = lambda argv: print("It is written when Python flushes it."), lambda argv: None
sys.modules |= {module.__name__: module for module in (fake, options)}
cli.COMMANDS["fake"] = ("frugalvit.fake", "a command for tests")
sys.exit(cli.main(["fake"]))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_an_error_has_a_line_of_its_own_beside_a_progress_bar(monkeypatch, capsys):
    def fail(argv):
        progress = tqdm(total=4, mininterval=0)
        progress.update(2)
        raise ValueError("boom")

    monkeypatch.setattr("frugalvit.info.main", fail)
    assert cli.main(["info"]) == 1
    assert re.search(r"\| 2/4 [^\n]*\nfrugalvit info: error: boom\n$", capsys.readouterr().err)
    with pytest.raises(SystemExit, match="^info: error: boom$"):
        run_as_program(lambda: fail([]), "info")
    assert re.search(r"\| 2/4 [^\n]*\n$", capsys.readouterr().err)
