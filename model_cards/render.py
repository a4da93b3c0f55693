"""Write a card for each recipe (`papers/NAME.md`) and each template (in `checkpoints/`), and a list of the cards.

python model_cards/render.py
"""

import json
import re
from pathlib import Path

import jinja2
import yaml
from huggingface_hub import ModelCard
from jinja2.sandbox import SandboxedEnvironment

from frugalvit.training.arguments import RECIPES


HERE = Path(__file__).resolve().parent
CHECKPOINTS, RESULTS = HERE.parent / "checkpoints", HERE.parent / "results"
# For each kind of model, the Auto class and code that runs the model.
KINDS = {
    "classifier": ("AutoModelForImageClassification", "logits = model(**inputs).logits  # (1, classes)"),
    "vision tower": (
        "AutoModel",
        "embedding = model(**inputs).image_embeds  # (1, channels), to compare with the CLIP's text embeddings",
    ),
    "vision model": (
        "AutoModel",
        "outputs = model(**inputs)\n"
        "tokens, embedding = outputs.last_hidden_state, outputs.pooler_output  # (1, tokens, channels), (1, channels)",
    ),
    "segmenter": (
        "AutoModelForSemanticSegmentation",
        "outputs = model(**inputs)\n"
        "[classes] = processor.post_process_semantic_segmentation(outputs)  # (height, width)",
    ),
}
COUNTED = re.compile(r"(?:has|have) ([\d,]+) parameters(?: and needs ([\d.]+) G multiply-accumulates)?")


def describe_recipe(file: Path) -> dict:
    """Read a recipe's arguments, and the description, commands and notes in the recipe's comments."""
    text = file.read_text(encoding="utf-8")
    lines = [line.removeprefix("#").removeprefix(" ") for line in text.splitlines() if line.startswith("#")]
    # Indented lines are commands.
    prose = "\n".join("" if line.startswith("  ") else line for line in lines)
    # Lines of a table stay separate. Lines of other paragraphs are joined.
    parts = [part.strip() for part in re.split(r"\n{2,}", prose)]
    about, *notes = (part if part.startswith("|") else " ".join(part.split()) for part in parts)
    return {
        "arguments": yaml.safe_load(text),
        "about": about,
        "commands": [line[2:] for line in lines if line.startswith("  ")],
        "notes": notes,
        "counted": COUNTED.search("\n".join(notes)),
    }


def kind_of(recipe: dict) -> str:
    """Return the kind of model that a recipe trains, as a key of `KINDS`."""
    command, arguments = recipe["commands"][0].split()[1], recipe["arguments"]
    if command == "segment":
        return "segmenter"
    if command != "bootstrap" or arguments["teacher"].startswith("timm/"):
        return "classifier"
    return "vision tower" if "clip" in arguments["teacher"] else "vision model"


def card_of(name: str, recipe: dict) -> str:
    """Return a recipe's card in Markdown."""
    auto_class, use = KINDS[kind_of(recipe)]
    several = len(recipe["commands"]) > 1
    does = "These commands train and evaluate the model" if several else "This command trains the model"
    about = [
        f"# {name}",
        recipe["about"],
        f"**The weights are not published.** {does}:",
        "```bash\n" + "\n".join(recipe["commands"]) + "\n```",
        *recipe["notes"],
        "**Use the model** after training:",
        f"```python\nimport frugalvit\nfrom transformers import AutoImageProcessor, {auto_class}\n\n"
        f'processor = AutoImageProcessor.from_pretrained("{name}")\n'
        f'model = {auto_class}.from_pretrained("{name}")\n'
        f'inputs = processor(image, return_tensors="pt")\n{use}\n```',
        f"**Arguments**: [`training/recipes/{name}.yaml`](../../training/recipes/{name}.yaml).",
    ]
    return "\n\n".join(about) + "\n"


def render_card(template: Path, results: Path = RESULTS) -> str:
    """Render the Jinja template of a shipped model's card.

    In a template, `results("name")` returns the contents of `name.json`. `row("name", "value", "column")` returns the
    first row of `name.json` that has the value in the column.
    """

    def read(name: str) -> dict:
        return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))

    def find_row(name: str, row: str, column: str = "row") -> dict:
        return next(each for each in read(name)["rows"] if each.get(column) == row)

    environment = SandboxedEnvironment(
        loader=jinja2.FileSystemLoader(template.parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["percent"] = lambda share: f"{100 * share:.2f} %"
    environment.globals |= {"name": template.stem, "results": read, "row": find_row}
    return environment.get_template(template.name).render()


def list_of(recipes: dict[str, dict]) -> str:
    """Return the list of all cards in Markdown."""
    shipped = []
    for folder in sorted(path for path in CHECKPOINTS.iterdir() if (path / "README.md").is_file()):
        [result] = ModelCard.load(folder / "README.md").data.eval_results
        measured = f"{100 * result.metric_value:.2f} % on {result.dataset_name}"
        shipped.append(f"| [{folder.name}](../checkpoints/{folder.name}/README.md) | {measured} |")
    rows = []
    for name, recipe in recipes.items():
        parameters, macs = recipe["counted"].groups() if recipe["counted"] else ("", "")
        macs = f"{macs} G" if macs else ""
        rows.append(f"| [{name}](papers/{name}.md) | {kind_of(recipe)} | {parameters} | {macs} |")
    return "\n".join(
        [
            "# Model cards\n",
            "These models ship with frugalvit. Their accuracy was measured here. Their cards are rendered from\n"
            "`templates/` and `results/`.\n",
            "| model | accuracy on test images |\n| --- | --- |",
            *shipped,
            "\nThe next cards describe recipes. They train students of recent backbones, and the papers' models.\n\n"
            "**The weights of these models are not published.** Accuracies in these cards are those of the papers.\n"
            "A test counts parameters and multiply-accumulates.\n",
            "`python model_cards/render.py` writes all cards and this list.\n",
            "| recipe | kind of model | parameters | multiply-accumulates |\n| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def render() -> dict[str, str]:
    """Return the texts of the list and of all cards, with their paths relative to this folder as keys."""
    recipes = {name: describe_recipe(file) for name, file in RECIPES.items()}
    cards = {f"papers/{name}.md": card_of(name, recipe) for name, recipe in recipes.items()}
    for template in HERE.glob("templates/c*.md"):
        cards[f"../checkpoints/{template.stem}/README.md"] = render_card(template)
    return {"README.md": list_of(recipes), **cards}


if __name__ == "__main__":
    for path, text in render().items():
        (HERE / path).write_text(text, encoding="utf-8")
