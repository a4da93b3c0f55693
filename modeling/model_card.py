"""Model cards: what a model is, and how it is loaded."""

import inspect

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from .hub import HubModel


# Tasks of the hub, by the Auto class that loads a model.
TASKS = {
    "AutoModel": "image-feature-extraction",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForSemanticSegmentation": "image-segmentation",
    "AutoModelForZeroShotImageClassification": "zero-shot-image-classification",
}


def class_name(model: PreTrainedModel) -> str:
    """The name of a model's class; FSDP2 puts `FSDP` before it."""
    return type(model).__name__.removeprefix("FSDP")


def auto_class(model: PreTrainedModel) -> str:
    """The Auto class that loads a model from a folder or the hub, the most special one; `AutoModel` reads the base
    model out of a backbone's folder, as `AutoBackbone.from_pretrained` takes none."""
    if not isinstance(model, HubModel):
        if class_name(model).endswith("ForSemanticSegmentation"):
            return "AutoModelForSemanticSegmentation"
        is_clip = hasattr(model, "get_text_features")
        return "AutoModelForZeroShotImageClassification" if is_clip else "AutoModelForImageClassification"
    names = [auto for auto, own in model.auto_classes.items() if own == class_name(model) and auto in TASKS]
    return names[-1] if names else "AutoModel"


def code_examples(model: PreTrainedModel) -> list[str]:
    """Lines of Python that load a model, or an image classifier or CLIP of Transformers, and its image processor; then
    those that embed with a CLIP, a backbone or a vision model by sentence-transformers."""
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
    # A LLaVA's processor is frugalvit's own.
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
embeddings = searcher.encode([image])  # for any store of vectors that knows sentence-transformers{texts}""")
    return examples


def make_card(model: PreTrainedModel, title: str, *paragraphs: str, **metadata) -> ModelCard:
    """Return a card of a model: `metadata` are fields of `ModelCardData`; empty paragraphs are left out."""
    data = {"library_name": "transformers", "pipeline_tag": TASKS[auto_class(model)]} | metadata
    data["tags"] = ["frugalvit", model.config.model_type, *data.get("tags", ())]
    text = "\n\n".join(filter(None, (f"# {title}", *paragraphs)))
    return ModelCard(f"---\n{ModelCardData(**data).to_yaml()}\n---\n\n{text}\n")


def model_card(model: PreTrainedModel) -> ModelCard:
    """A card that says what the model is and how to load it; trainers write theirs with measured results instead."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return make_card(
        model,
        class_name(model),
        f"A {model.config.model_type} model with {parameters:,} parameters. No measurement is noted here.",
        inspect.getdoc(type(model)) or "" if isinstance(model, HubModel) else "",
        *(f"```python\n{code}\n```" for code in code_examples(model)),
    )
