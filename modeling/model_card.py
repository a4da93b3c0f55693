"""Model cards: what a model is, and how it is loaded."""

import inspect

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from .hub import HubModel


_LOADING_BY_AUTO_CLASS = """\
from transformers import {names}

processor = {processor}.from_pretrained("path/or/id"{processor_remote})
model = {auto_class}.from_pretrained("path/or/id"{remote})"""

_LOADING_BY_CLASS_NAME = """\
from transformers import AutoImageProcessor
from transformers.dynamic_module_utils import get_class_from_dynamic_module

processor = AutoImageProcessor.from_pretrained("path/or/id")
model_class = get_class_from_dynamic_module("{module}.{name}", "path/or/id")
model = model_class.from_pretrained("path/or/id")"""

_USING_A_BACKBONE = """

# (1, channels, rows, columns), one for each of `out_indices`; frugalvit has the same class, {name}.
feature_maps = model(**processor(image, return_tensors="pt")).feature_maps"""


_PIPELINES = {
    "AutoModel": "image-feature-extraction",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForSemanticSegmentation": "image-segmentation",
    "AutoModelForZeroShotImageClassification": "zero-shot-image-classification",
}


def class_name(model: PreTrainedModel) -> str:
    """The name of a model's class; FSDP2 puts `FSDP` before it."""
    return type(model).__name__.removeprefix("FSDP")


def auto_class(model: PreTrainedModel) -> str | None:
    """The Auto class that loads a model from a folder or the hub, the most special one."""
    if not isinstance(model, HubModel):
        if class_name(model).endswith("ForSemanticSegmentation"):
            return "AutoModelForSemanticSegmentation"
        is_clip = hasattr(model, "get_text_features")
        return "AutoModelForZeroShotImageClassification" if is_clip else "AutoModelForImageClassification"
    # `AutoBackbone.from_pretrained` takes no folders.
    names = reversed([(auto, own) for auto, own in model.auto_classes.items() if auto != "AutoBackbone"])
    return next((auto for auto, own in names if own == class_name(model)), model.loads_with)


def pipeline_tag(model: PreTrainedModel) -> str | None:
    """The hub's name for the task of a model, which may be an image classifier or a CLIP of Transformers."""
    # `AutoModel` reads the base model out of a backbone's folder.
    backbone = class_name(model).endswith("Backbone")
    return _PIPELINES.get("AutoModel" if backbone else auto_class(model))


def loading_example(model: PreTrainedModel) -> str:
    """Lines of Python that load a model, or an image classifier or CLIP of Transformers, and its image processor."""
    if (loader := auto_class(model)) is not None:
        remote = ", trust_remote_code=True" if isinstance(model, HubModel) else ""
        # A LLaVA's processor brings code, too; a CLIP's has a tokenizer.
        llava = loader == "AutoModelForImageTextToText"
        both = llava or loader == "AutoModelForZeroShotImageClassification"
        processor = "AutoProcessor" if both else "AutoImageProcessor"
        return _LOADING_BY_AUTO_CLASS.format(
            names=", ".join(sorted([loader, processor])),
            auto_class=loader,
            processor=processor,
            processor_remote=remote if llava else "",
            remote=remote,
        )
    module, name = model.family_class().__module__.rpartition(".")[2], class_name(model)
    using = _USING_A_BACKBONE if name.endswith("Backbone") else ""
    return (_LOADING_BY_CLASS_NAME + using).format(module=module, name=name)


def embedding_example(model: PreTrainedModel) -> str:
    """Lines of Python that embed with a CLIP, a backbone or a vision model by sentence-transformers, else none."""
    searches = pipeline_tag(model) in ("image-feature-extraction", "zero-shot-image-classification")
    if not (searches and getattr(model, "embeds", None)):
        return ""
    inputs = 'image, "a photo of a ship"' if "text" in model.embeds else "image"
    return f"""from sentence_transformers import SentenceTransformer

searcher = SentenceTransformer("path/or/id", trust_remote_code=True)
embeddings = searcher.encode([{inputs}])  # for a search, with the stores of vectors that know sentence-transformers"""


def make_card(model: PreTrainedModel, title: str, *paragraphs: str, **metadata) -> ModelCard:
    """Return a card of a model: metadata for the hub, a title and paragraphs.

    Args:
        model (`PreTrainedModel`): The model, or an image classifier or CLIP of Transformers.
        title (`str`): Title of the card.
        paragraphs (`str`): Markdown; empty ones are left out.
        metadata: Fields of `ModelCardData`, besides library, task and tags or in their place.
    """
    data = {"library_name": "transformers", "pipeline_tag": pipeline_tag(model)} | metadata
    data["tags"] = ["frugalvit", model.config.model_type, *data.get("tags", ())]
    text = "\n\n".join(filter(None, (f"# {title}", *paragraphs)))
    return ModelCard(f"---\n{ModelCardData(**data).to_yaml()}\n---\n\n{text}\n")


def model_card(model: PreTrainedModel) -> ModelCard:
    """A card that says what the model is and how to load it; trainers write theirs with measured results instead."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return make_card(
        *(model, class_name(model)),
        f"A {model.config.model_type} model with {parameters:,} parameters. No measurement is noted here.",
        inspect.getdoc(type(model)) or "" if isinstance(model, HubModel) else "",
        *(f"```python\n{code}\n```" for code in (loading_example(model), embedding_example(model)) if code),
    )
