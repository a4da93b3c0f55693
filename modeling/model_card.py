"""Model cards with a description and code examples."""

import inspect

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from .hub import HubModel


# Task on the Hugging Face Hub for each Auto class.
TASKS = {
    "AutoModel": "image-feature-extraction",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForSemanticSegmentation": "image-segmentation",
    "AutoModelForZeroShotImageClassification": "zero-shot-image-classification",
}


def class_name(model: PreTrainedModel) -> str:
    """Return the name of a model's class, without the prefix `FSDP` that FSDP2 adds."""
    return type(model).__name__.removeprefix("FSDP")


def auto_class(model: PreTrainedModel) -> str:
    """Return the most specific Auto class that loads a model from a folder or the hub. For a backbone, return
    `AutoModel`, which loads the base model, because `AutoBackbone.from_pretrained` accepts no folders."""
    if not isinstance(model, HubModel):
        if class_name(model).endswith("ForSemanticSegmentation"):
            return "AutoModelForSemanticSegmentation"
        is_clip = hasattr(model, "get_text_features")
        return "AutoModelForZeroShotImageClassification" if is_clip else "AutoModelForImageClassification"
    names = [auto for auto, own in model.auto_classes.items() if own == class_name(model) and auto in TASKS]
    return names[-1] if names else "AutoModel"


def code_examples(model: PreTrainedModel) -> list[str]:
    """Return Python code that loads a model and its processor. For models with an embedding, also return code that
    computes embeddings with sentence-transformers. `model` is a model of this package, or an image classifier or CLIP
    of Transformers."""
    name = class_name(model)
    loader = auto_class(model)
    both = loader in ("AutoModelForImageTextToText", "AutoModelForZeroShotImageClassification")
    processor = "AutoProcessor" if both else "AutoImageProcessor"
    remote = ", trust_remote_code=True" if isinstance(model, HubModel) else ""
    lines = [f"from transformers import {', '.join(sorted([loader, processor]))}", ""]
    if name.endswith("Backbone"):
        lines = [f"from frugalvit import {name}", f"from transformers import {processor}", ""]
        loader = name
        remote = ""
    # The processor class of a LLaVA is remote code, like the model class.
    own = remote if loader == "AutoModelForImageTextToText" else ""
    lines += [f'processor = {processor}.from_pretrained("path/or/id"{own})']
    lines += [f'model = {loader}.from_pretrained("path/or/id"{remote})']
    if name.endswith("Backbone"):
        lines += ['maps = model(**processor(image, return_tensors="pt")).feature_maps']
    examples = ["\n".join(lines)]
    searches = auto_class(model) in ("AutoModel", "AutoModelForZeroShotImageClassification")
    if searches and getattr(model, "embeds", None):
        texts = '\ntexts = searcher.encode(["a photo of a ship"])' if "text" in model.embeds else ""
        examples.append(f"""from sentence_transformers import SentenceTransformer

searcher = SentenceTransformer("path/or/id", trust_remote_code=True)
embeddings = searcher.encode([image]){texts}""")
    return examples


def make_card(model: PreTrainedModel, title: str, *paragraphs: str, **metadata) -> ModelCard:
    """Return a model card. `metadata` are fields of `ModelCardData`. Empty paragraphs are left out."""
    data = {"library_name": "transformers", "pipeline_tag": TASKS[auto_class(model)]} | metadata
    data["tags"] = ["frugalvit", model.config.model_type, *data.get("tags", ())]
    text = "\n\n".join(filter(None, (f"# {title}", *paragraphs)))
    return ModelCard(f"---\n{ModelCardData(**data).to_yaml()}\n---\n\n{text}\n")


def model_card(model: PreTrainedModel) -> ModelCard:
    """Return a card with the model's class, size and code examples, without measured results."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return make_card(
        model,
        class_name(model),
        f"A {model.config.model_type} model with {parameters:,} parameters. This card has no measured results.",
        inspect.getdoc(type(model)) or "" if isinstance(model, HubModel) else "",
        *(f"```python\n{code}\n```" for code in code_examples(model)),
    )
