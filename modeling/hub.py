"""Base class of models that are saved as complete hub repositories. The models can be loaded without this package."""

import importlib.util
import inspect
import json
import re
import sys
import tempfile
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData
from transformers import PreTrainedModel
from transformers.utils import logging

from ..configuration.configuration_base import HubMixin, pair


logger = logging.get_logger(__name__)
_RELATIVE_IMPORT = re.compile(r"^from\s+(\.+[\w.]*)\s+import\s", re.MULTILINE)
_CONFIGURATION_IMPORT = re.compile(r"^(from )\.\.configuration\.", re.MULTILINE)
# Task on the Hugging Face Hub for each Auto class.
TASKS = {
    "AutoModel": "image-feature-extraction",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForSemanticSegmentation": "image-segmentation",
    "AutoModelForZeroShotImageClassification": "zero-shot-image-classification",
}


def source_files(module_name: str) -> dict[str, str]:
    """Return the names and contents of the source files of a module and of its relative imports. The imports in these
    files are rewritten, so that all files can be in one folder. The module may be part of the installed package or
    remote code."""
    sources = {}
    pending = [module_name]
    while pending:
        module = sys.modules[pending.pop()]
        path = Path(inspect.getsourcefile(module))
        if path.name not in sources:
            text = path.read_text(encoding="utf-8")
            sources[path.name] = _CONFIGURATION_IMPORT.sub(r"\1.", text)
            package = module.__name__.rpartition(".")[0]
            pending += [importlib.util.resolve_name(name, package) for name in _RELATIVE_IMPORT.findall(text)]
    return sources


def image_processor_config(config) -> dict:
    """Return the content of `preprocessor_config.json` for a model. If `config.resize_size` is set, the file describes
    a `CLIPImageProcessor`, which crops the center. Otherwise, the file describes a `ViTImageProcessor`."""
    # The import is local, because loading a model needs no image processor. `Pil` classes do not need torchvision.
    from transformers import CLIPImageProcessorPil, ViTImageProcessorPil

    height, width = pair(config.image_size)
    size = {"height": height, "width": width}
    fields = {
        "do_convert_rgb": config.num_channels == 3,
        "image_mean": config.image_mean,
        "image_std": config.image_std,
        "resample": config.resample,
    }
    if config.resize_size is None:
        return ViTImageProcessorPil(size=size, **fields).to_dict()
    return CLIPImageProcessorPil(size={"shortest_edge": config.resize_size}, crop_size=size, **fields).to_dict()


class HubModel(HubMixin, PreTrainedModel):
    """Base class of all models. `save_pretrained` writes a folder that can be loaded without frugalvit, if
    `trust_remote_code=True` is passed to `from_pretrained`.

    Class attributes:
        auto_classes (`dict[str, str]`): Map from an Auto class name to a model class name, for `auto_map`.
        embeds (`dict[str, tuple[str, str]]`):
            Settings for sentence-transformers. The keys are kinds of input, "image" or "text". A value has the name
            of the method that computes the embedding, and the name of the embedding in the method's output.
        embedding_arguments (`tuple[str, ...]`): Names of arguments that `SentenceTransformer.encode` passes to the
            methods in `embeds`.
    """

    auto_classes: dict[str, str] = {}
    embeds: dict[str, tuple[str, str]] = {}
    embedding_arguments: tuple[str, ...] = ()

    def _initialize_weights(self, module, is_custom_code: bool = False):
        # If `is_custom_code` were passed on, Transformers would skip modules without direct parameters. Some of these
        # modules need `_init_weights`. Loaded parameters are safe, because `transformers.initialization` does not
        # change loaded parameters.
        super()._initialize_weights(module)

    def save_pretrained(self, save_directory, is_main_process=True, push_to_hub=False, repo_id=None, **kwargs):
        """Save the source files of the model and everything that `PreTrainedModel.save_pretrained` saves.

        An image processor configuration, files for sentence-transformers and a model card are added. Existing files
        of these kinds are kept. If the model has adapters, only the adapters are saved.
        """
        folder = Path(save_directory)
        names = ("commit_message", "commit_description", "private", "revision", "create_pr")
        upload = {name: kwargs.pop(name) for name in names if name in kwargs}
        is_adapter = getattr(self, "_hf_peft_config_loaded", False)
        if is_adapter or not is_main_process or folder.is_file():
            super().save_pretrained(folder, is_main_process=is_main_process, **kwargs)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            # A user's subclass is saved as the base class that defines `auto_classes`.
            family = next(base for base in type(self).__mro__ if "auto_classes" in vars(base))
            module = family.__module__.rpartition(".")[2]
            for name, source in source_files(family.__module__).items():
                (folder / name).write_text(source, encoding="utf-8", newline="\n")
            # `AutoConfig` is mapped to the modeling file, so that `AutoConfig` returns the model's `config_class`.
            classes = {"AutoConfig": family.config_class.__name__, **self.auto_classes}
            self.config.auto_map = {auto_class: f"{module}.{name}" for auto_class, name in classes.items()}
            super().save_pretrained(folder, **kwargs)
            files = {"preprocessor_config.json": self.image_processor_config(), **self.sentence_transformers_config()}
            for name, content in files.items():
                if content and not (folder / name).exists():
                    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
                    (folder / name).write_text(text, encoding="utf-8")
            if not (folder / "README.md").exists():
                model_card(self).save(folder / "README.md")
        if push_to_hub and is_main_process:
            self.push_to_hub(repo_id or folder.name, token=kwargs.get("token"), **upload)

    def image_processor_config(self) -> dict | None:
        """Return the content of `preprocessor_config.json`, or `None` if the configuration has no image format."""
        config = getattr(self.config, "vision_config", self.config)
        if config.image_mean is not None:
            return image_processor_config(config)
        logger.warning_once(
            "No image processor is saved, because the configuration has no `image_mean`. Pass the teacher's to "
            "`from_teacher(…, image_processor=…)`, or save an image processor to the same folder."
        )
        return None

    def sentence_transformers_config(self) -> dict[str, object]:
        """Return the names and contents of the files that `SentenceTransformer` needs to use the model's embeddings.
        Without these files, `SentenceTransformer` averages all tokens."""
        if not self.embeds:
            return {}
        inputs = {
            kind: {"method": method, "method_output_name": output} for kind, (method, output) in self.embeds.items()
        }
        module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
        config = {"transformer_task": "feature-extraction", "module_output_name": "sentence_embedding"}
        return {
            "modules.json": [module | {"kwargs": list(self.embedding_arguments)}],
            "sentence_bert_config.json": config | {"modality_config": inputs},
        }

    def push_to_hub(self, repo_id: str, *, private=None, token=None, revision=None, **commit):
        """Upload the files of `save_pretrained` and, if frugalvit is installed, a notebook. An existing model card or
        notebook on the hub is kept.

        Args:
            repo_id (`str`): Repository to upload to. A missing repository is created.
            private, token, revision: Arguments of `PreTrainedModel.push_to_hub`.
            commit: Further arguments of `HfApi.upload_folder`, for example `commit_message`.
        """
        # `PreTrainedModel.push_to_hub` would replace the model card by a template, so it is not used.
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        names = ("README.md", "notebook.ipynb")
        keeps = [name for name in names if api.file_exists(repo_id, name, revision=revision)]
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            try:
                from frugalvit.modeling.notebook import write_notebook

                write_notebook(self, folder, repo_id)
            except ModuleNotFoundError:
                pass
            commit |= {"repo_id": repo_id, "folder_path": folder, "revision": revision, "ignore_patterns": keeps}
            return api.upload_folder(**{"commit_message": "Upload model"} | commit)


def auto_class(model: PreTrainedModel) -> str:
    """Return the most specific Auto class that loads a model from a folder or the hub. For a backbone, return
    `AutoModel`, which loads the base model, because `AutoBackbone.from_pretrained` accepts no folders."""
    # FSDP2 adds the prefix `FSDP` to the names of classes.
    name = type(model).__name__.removeprefix("FSDP")
    if not isinstance(model, HubModel):
        if name.endswith("ForSemanticSegmentation"):
            return "AutoModelForSemanticSegmentation"
        is_clip = hasattr(model, "get_text_features")
        return "AutoModelForZeroShotImageClassification" if is_clip else "AutoModelForImageClassification"
    names = [auto for auto, own in model.auto_classes.items() if own == name and auto in TASKS]
    return names[-1] if names else "AutoModel"


def code_examples(model: PreTrainedModel) -> list[str]:
    """Return Python code that loads a model and its processor. For models with an embedding, also return code that
    computes embeddings with sentence-transformers. `model` is a model of this package, or an image classifier or CLIP
    of Transformers."""
    name = type(model).__name__.removeprefix("FSDP")
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


def model_card(model: PreTrainedModel, title: str = "", *paragraphs: str, **metadata) -> ModelCard:
    """Return a model card.

    Args:
        model (`PreTrainedModel`): A model of this package, or an image classifier or CLIP of Transformers.
        title (`str`, *optional*): Default: the name of the model's class.
        paragraphs (`str`, *optional*): Text of the card. Empty paragraphs are left out. By default, the card has the
            model's size and code examples, without measured results.
        metadata: Fields of `ModelCardData`.
    """
    model_type = model.config.model_type
    if not paragraphs:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        paragraphs = [
            f"A {model_type} model with {parameters:,} parameters. This card has no measured results.",
            inspect.getdoc(type(model)) or "" if isinstance(model, HubModel) else "",
            *(f"```python\n{code}\n```" for code in code_examples(model)),
        ]
    data = {"library_name": "transformers", "pipeline_tag": TASKS[auto_class(model)]} | metadata
    data["tags"] = ["frugalvit", model_type, *data.get("tags", ())]
    title = title or type(model).__name__.removeprefix("FSDP")
    text = "\n\n".join(filter(None, (f"# {title}", *paragraphs)))
    return ModelCard(f"---\n{ModelCardData(**data).to_yaml()}\n---\n\n{text}\n")
