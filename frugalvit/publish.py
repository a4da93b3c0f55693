"""`frugalvit publish`: uploads a trained model, in half the bytes, after everything about it was checked."""

import argparse
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import jinja2
import torch
from huggingface_hub import ModelCard

# `HTTPError` is that of the client that huggingface_hub uses, httpx or httpx2; what has no answer raises it.
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel

from .architectures import load_model
from .common.exported import is_exported
from .common.files import forget_code, read_json, strangers, whole_folder
from .common.licenses import check_license
from .common.resources import locate_model
from .common.tables import format_table
from .modeling.hub import model_card, upload_folder
from .options.publish import parse
from .validation import read_metadata, validate_exported, validate_repository


# What goes along as it is, besides weights, configuration and code: cards, pictures in them, processors, tokenizers.
COMPANIONS = (
    "README.md",
    "*.png",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)
# The name that cards give to a model without a name on the hub.
UNNAMED = "path/or/id"


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    arguments.model = locate_model(arguments.model)

    if arguments.results and not arguments.card:
        raise ValueError("--results has numbers for a template; name it with --card.")
    if arguments.card and not Path(arguments.card).is_file():
        raise ValueError(f"--card: there is no file {arguments.card!r}; expected a model card in Markdown.")
    if arguments.license:
        check_license(arguments.license)
    if arguments.repo_id:
        check_repo_id(arguments.repo_id)
    if not (arguments.repo_id or arguments.output or arguments.dry_run):
        raise ValueError(
            "Give a REPO_ID to upload to, --output to write a folder, or --dry-run to look at everything."
        )
    if arguments.no_code and arguments.repo_id:
        raise ValueError("--no-code is for folders: models of a hub repository load where frugalvit is not installed.")
    with prepared(arguments) as folder:
        model = folder / "model" if arguments.space else folder
        checked = validate_exported(model) if is_exported(model) else validate_repository(model)
        if arguments.no_code or arguments.space:
            remove_code(model)
        if arguments.space:
            from .space import write_space

            write_space(folder, Path(arguments.model).resolve().name, read_metadata(model).license)
        sizes = {path.name: size_of(path) for path in folder.iterdir()}
        rows = [{"file": name, "bytes": sizes[name]} for name in sorted(sizes, key=sizes.get, reverse=True)]
        print(f"{format_table(rows)}\n\n{len(rows)} files and folders, {sum(sizes.values()) / 1e6:.1f} MB.")
        print("\n".join(f"ok: {line}." for line in checked))
        if not (arguments.space or read_metadata(folder).eval_results):
            print("Note: the card lists no measured results (model-index), so the hub shows none.")
        if arguments.repo_id and not arguments.dry_run:
            upload(folder, arguments.repo_id, arguments.private, arguments.space)
            print(f"Uploaded to {arguments.repo_id}.")
    if arguments.output:
        print(f"Wrote {arguments.output}.")
    if arguments.dry_run:
        print("Nothing was uploaded.")


def check_repo_id(repo_id: str):
    """Raise a ValueError if the hub takes no repository of that name, or if the name lacks the owner, which the card's
    code needs."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"REPO_ID is {repo_id!r}, expected owner/name: {error}") from error
    if "/" not in repo_id:
        raise ValueError(f"REPO_ID is {repo_id!r}, expected owner/name, your name on the hub or an organization's.")


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())


def upload(folder: Path, repo_id: str, private: bool, space: bool = False):
    """Upload a folder in one commit, to a model repository or a Space.

    Raises:
        OSError: if there is no way to the hub, or it refuses.
    """
    try:
        upload_folder(folder, repo_id, private=private or None, repo_type="space" if space else "model")
    except (HTTPError, OfflineModeIsEnabled) as error:
        refused = isinstance(error, HfHubHTTPError)
        hint = (
            "Is the token of `hf auth login` one that may write"
            if refused
            else "Is there a network, and HF_HUB_OFFLINE unset"
        )
        reason = " ".join(str(error).split()) or type(error).__name__
        raise OSError(f"Cannot upload to {repo_id}: {reason}. {hint}?") from error


@contextmanager
def prepared(arguments: argparse.Namespace):
    """The folder to upload, which stays if it has a name and all goes well."""
    exported = is_exported(arguments.model)
    if exported and (others := strangers(Path(arguments.model))):
        raise ValueError(f"{arguments.model!r} holds {', '.join(others[:3])} besides an exported model; move it away.")
    model = None if exported else load_model(arguments.model)
    with tempfile.TemporaryDirectory() as aside:
        whole = whole_folder(arguments.output or Path(aside) / "model", arguments.overwrite)
        with whole as whole:
            folder = whole / "model" if arguments.space else whole
            folder.mkdir(exist_ok=True)
            if not exported:
                save_compact(model, folder)
            for pattern in ["*"] if exported else COMPANIONS:
                for path in Path(arguments.model).glob(pattern):
                    shutil.copyfile(path, folder / path.name)
            if arguments.card and arguments.results:
                (folder / "README.md").write_text(render_card(arguments.card, arguments.results), encoding="utf-8")
            elif arguments.card:
                shutil.copyfile(arguments.card, folder / "README.md")
            if not exported and not (folder / "README.md").is_file():
                # What `Trainer` and `save_pretrained` wrote of a model of Transformers.
                model_card(model).save(folder / "README.md")
            if arguments.license and not isinstance(read_metadata(folder), str):
                card = ModelCard.load(folder / "README.md")
                card.data.license = arguments.license
                card.save(folder / "README.md")
            if arguments.repo_id and not arguments.space and (readme := folder / "README.md").is_file():
                text = readme.read_text(encoding="utf-8")
                readme.write_text(text.replace(UNNAMED, arguments.repo_id), encoding="utf-8")
            yield whole


def remove_code(folder: Path):
    """Remove source files and the `auto_map` that points at them, so that registered classes load the folder."""
    for path in folder.glob("*.py"):
        path.unlink()
    forget_code(folder)


def render_card(template: str | Path, results: str | Path) -> str:
    """Render a model card with its numbers.

    Args:
        template (`str` or `Path`): A Jinja template. `results("name")` is the content of `name.json`, `row("name",
            "row")` a row of the table in it, or `row("name", "value", "column")` the first with that value, and the
            filter `percent` writes 0.5 as 50.00 %. The card's own name is `name`.
        results (`str` or `Path`): The folder with the JSON files.

    Raises:
        ValueError: if the template is wrong, or a number that it names does not exist.
    """
    template, results = Path(template), Path(results)

    def read(name: str) -> dict:
        return read_json(results / f"{name}.json")

    def find_row(name: str, row: str, column: str = "row") -> dict:
        for each in read(name)["rows"]:
            if each.get(column) == row:
                return each
        raise ValueError(f"{name}.json has no row {row!r}, which {str(template)!r} names.")

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["percent"] = lambda share: f"{100 * share:.2f} %"
    environment.globals |= {
        "name": template.stem,
        "results": read,
        "row": find_row,
    }
    try:
        return environment.get_template(template.name).render()
    except jinja2.TemplateError as error:
        raise ValueError(f"The card {str(template)!r} cannot be written: {error}.") from error


def save_compact(model: PreTrainedModel, folder: Path):
    """Save a float32 model with half-precision tensors that load as float32.

    Half-precision weights that also compute in half precision would be several times slower on CPUs. Tensors that the
    model keeps in float32 stay float32.
    """
    strict = tuple(model._keep_in_fp32_modules_strict or ())
    weights = {
        name: tensor.to(torch.float16) if tensor.is_floating_point() and not name.endswith(strict) else tensor
        for name, tensor in model.state_dict().items()
    }
    # Where the parts of a model came from is a folder of this machine.
    for name in getattr(model.config, "sub_configs", ()):
        getattr(model.config, name)._name_or_path = ""
    # The configuration's dtype is that of the model, which stays float32.
    model.save_pretrained(folder, state_dict=weights)
