"""Check commands, names and links in README, docs and results. tests/test_docs.py runs the code of the pages."""

import argparse
import contextlib
import importlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import CARDS, PAGES, ROOT, steps
from PIL import Image
from transformers import AutoConfig, AutoModel, AutoProcessor

import frugalvit
from frugalvit.cli import COMMANDS
from frugalvit.training.arguments import ArgumentParser
from frugalvit.training.files import shipped_checkpoints


# Model cards that name an older commit are left out, because their commands may not run at later commits.
CURRENT = [*PAGES.values(), *(card for card in CARDS.values() if "at the commit that" not in card)]
COMMAND_LINES = [code for page in CURRENT for _, code in steps(page) if code.startswith("frugalvit ")]


def test_code_of_every_card_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image = Image.new("RGB", (48, 40), "red")
    image.save("image.png")
    for auto_class in (AutoModel, AutoProcessor):
        auto_class.from_pretrained(frugalvit.checkpoint_path("cifar10-sparseformer-clip")).save_pretrained("clip")
    for folder in (Path("clip"), *map(frugalvit.checkpoint_path, shipped_checkpoints())):
        lines = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL)
        names = {"image": image}
        for code in lines:
            exec(code.replace("path/or/id", str(folder)), names)
        assert lines and ("embeddings" in names) == ("SentenceTransformer" in names) == ("clip" in folder.name)


class ParsedError(Exception):
    """Error that ends a command after its options are parsed."""


@pytest.fixture
def stop_after_parsing(monkeypatch):
    """Make commands raise `ParsedError` after their options are parsed."""

    def stopping(read):
        def read_and_stop(self, *args, **kwargs):
            read(self, *args, **kwargs)
            raise ParsedError

        return read_and_stop

    monkeypatch.setattr(ArgumentParser, "parse", stopping(ArgumentParser.parse))
    # Benchmarks use the parser of argparse instead of frugalvit's `ArgumentParser`.
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stopping(argparse.ArgumentParser.parse_args))


@pytest.mark.parametrize("line", COMMAND_LINES, ids=lambda line: line[:60])
def test_commands_accept_their_options(line, stop_after_parsing):
    _, name, *arguments = shlex.split(line, comments=True)
    if not arguments:
        assert name in COMMANDS
        return
    with pytest.raises(ParsedError):
        importlib.import_module(COMMANDS[name][0]).main(arguments)


def commands_of_results(content) -> Iterator[dict]:
    """Yield all dicts in a results file that have the key `command`."""
    if isinstance(content, dict) and "command" in content:
        yield content
    values = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    for value in values:
        yield from commands_of_results(value)


@pytest.mark.parametrize("file", sorted(ROOT.glob("results/*.json")), ids=lambda file: file.stem)
def test_commands_of_results_parse_or_name_their_commit(file, stop_after_parsing, monkeypatch, tmp_path):
    """A command is skipped if its dict has the key `as_of`, an older commit. The command may need this commit."""
    # Benchmarks create folders while they parse their options, so the test changes to a temporary folder.
    monkeypatch.chdir(tmp_path)
    for part in commands_of_results(json.loads(file.read_text(encoding="utf-8"))):
        if "as_of" not in part:
            program, name, *arguments = shlex.split(part["command"])
            monkeypatch.setattr("sys.argv", [name, *arguments])
            with pytest.raises(ParsedError):
                if program == "frugalvit":
                    importlib.import_module(COMMANDS[name][0]).main(arguments)
                else:
                    importlib.import_module(Path(name).stem).main()


@pytest.mark.parametrize("name", PAGES)
def test_targets_of_links_exist(name):
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[name]):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        if anchor:
            text = target.read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
            assert anchor in [*anchors, *re.findall(r'<a id="([\w-]+)">', text)], link


def test_names_and_commands_exist():
    # docs/papers.md is left out, because tests/test_papers.py checks this page.
    text = "\n".join(page for name, page in PAGES.items() if name != "docs/papers.md")
    families = r"\b(?:SparseFormer|ViTImpulseInit|ViTContextBroadcast|ConvMixer|AgentCNN|BootstrappedViT)[A-Z]\w+"
    assert {*re.findall(families, text)} <= {*frugalvit.__all__}
    assert {*re.findall(r"(?:^|`|&& )frugalvit ([a-z][a-z-]*)", text, re.MULTILINE)} <= {*COMMANDS}


def test_every_public_name_is_documented():
    assert not [name for name in frugalvit.__all__[1:] if not re.search(rf"\b{name}\b", PAGES["docs/api.md"])]


def test_every_shipped_model_loads_by_the_command(monkeypatch):
    """docs/models.md has a table of models, and a command that loads one of them. With the names of another model and
    its Auto class, the command loads the other model."""
    monkeypatch.chdir(ROOT)
    page = PAGES["docs/models.md"]
    rows = dict(re.findall(r"^\| `((?:cifar10|caltech101)-[\w-]+)` \| .*? \| `(AutoModel\w+)` \|", page, re.MULTILINE))
    assert sorted(rows) == sorted(shipped_checkpoints())
    (code,) = re.findall(r'^python -c "(.*)"$', page, re.MULTILINE)
    assert code.count("AutoModelForImageClassification") == code.count("cifar10-convmixer") == 1
    for name, class_name in rows.items():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code.replace("AutoModelForImageClassification", class_name).replace("cifar10-convmixer", name), {})
        assert printed.getvalue().startswith(AutoConfig.from_pretrained(f"checkpoints/{name}").architectures[0])
