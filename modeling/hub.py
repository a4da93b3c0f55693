"""Models that save themselves as complete hub repositories, which load without this package."""

import importlib
import importlib.util
import inspect
import json
import re
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from huggingface_hub import HfApi, ModelCard, ModelCardData
from transformers import PreTrainedModel

from ..configuration.configuration_base import HubConfigMixin, pair


_RELATIVE_IMPORT = re.compile(r"^\s*from\s+(\.+[\w.]*)\s+import\s", re.MULTILINE)
_CONFIGURATION_IMPORT = re.compile(r"^(\s*from )\.\.configuration\.", re.MULTILINE)

# Arguments of `save_pretrained` that are meant for the upload.
_UPLOAD_ARGUMENTS = ("repo_id", "commit_message", "commit_description", "private", "revision", "create_pr")


def flatten_imports(source: str) -> str:
    """Source text of a module with the imports it needs when all files of a family lie side by side."""
    return _CONFIGURATION_IMPORT.sub(r"\1.", source)


def source_files(model_class: type) -> dict[str, str]:
    """File names and flattened sources of the module that defines a class and of all that it imports relatively.

    Works on an installed package and on remote code alike, as it follows the modules that are really loaded.
    """
    sources, pending = {}, [model_class.__module__]
    while pending:
        module = importlib.import_module(pending.pop())
        path = Path(inspect.getsourcefile(module))
        if path.name in sources:
            continue
        text = path.read_text(encoding="utf-8")
        sources[path.name] = flatten_imports(text)
        package = module.__spec__.parent if module.__spec__ else module.__name__.rpartition(".")[0]
        pending += [importlib.util.resolve_name(name, package) for name in _RELATIVE_IMPORT.findall(text)]
    return sources


def image_processor_config(config) -> dict:
    """Return the content of `preprocessor_config.json` for a model: the image processor of Transformers that it needs.

    With `config.resize_size`, that resizes the shorter side and crops the center (CLIPImageProcessor); otherwise it
    resizes to `config.image_size` (ViTImageProcessor).
    """
    height, width = pair(config.image_size)
    shared = {
        "do_convert_rgb": config.num_channels == 3,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": config.image_mean,
        "image_std": config.image_std,
        "resample": config.resample,
        "rescale_factor": 1 / 255,
    }
    if config.resize_size is None:
        return {"image_processor_type": "ViTImageProcessor", "size": {"height": height, "width": width}, **shared}
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "size": {"shortest_edge": config.resize_size},
        **shared,
    }


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


def import_from_package(module: str, purpose: str):
    """Import a module that saved models do not carry, from the installed frugalvit.

    Args:
        module (`str`): Its name within `frugalvit.modeling`.
        purpose (`str`): The action that needs it, for the message.

    Raises:
        ImportError: if frugalvit is not installed.
    """
    try:
        return importlib.import_module(f"frugalvit.modeling.{module}")
    except ModuleNotFoundError as error:
        if error.name and not error.name.startswith("frugalvit"):
            raise
        raise ImportError(f"{purpose} needs frugalvit, which is not installed here: pip install frugalvit.") from None


class HubModel(PreTrainedModel):
    """A `PreTrainedModel` whose `save_pretrained` (and so `Trainer` and `push_to_hub`) writes a folder that loads with
    `trust_remote_code=True` where frugalvit is not installed.

    Families set `auto_classes`, Auto class name to class name, for `auto_map`. A class that is not in there, but that
    an Auto class loads, names that in `loads_with`. `embeds` tells sentence-transformers what embeds images and texts:
    by the kind of input, a method of what `AutoModel` reads from the folder, and one of its outputs. It may be given
    what `embedding_arguments` names, too.
    """

    auto_classes: dict[str, str] = {}
    loads_with: str | None = None
    embeds: dict[str, tuple[str, str]] = {}
    embedding_arguments: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "auto_classes" in vars(cls):
            # Read at import: what a long run saves is what it ran, whatever happened to the files in the meantime.
            cls._sources = source_files(cls)

    def _initialize_weights(self, module, is_custom_code: bool = False):
        # In custom code Transformers passes over modules whose own parameters are all loaded, and that is every module
        # without parameters of its own. `transformers.initialization` looks at each parameter, so none needs it.
        super()._initialize_weights(module)

    @classmethod
    def _from_config(cls, config, **kwargs):
        """A model with fresh weights, those of `config.initialization_seed` where there is one."""
        seed = getattr(config, "initialization_seed", None)
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.default_generator.manual_seed(seed)
            return super()._from_config(config, **kwargs)

    @classmethod
    def family_class(cls) -> type:
        """The class that sets `auto_classes`. Its module is what a folder ships, also for classes that were derived
        from the family's elsewhere, for example in a notebook."""
        return next(base for base in cls.__mro__ if "auto_classes" in vars(base))

    def save_pretrained(self, save_directory, is_main_process: bool = True, push_to_hub: bool = False, **kwargs):
        """As in Transformers; besides weights and configuration it writes the family's source files and, where they do
        not exist yet, the image processor's configuration, what sentence-transformers embeds with, and a model card.

        If the model has adapters, only these are saved.
        """
        if getattr(self, "_hf_peft_config_loaded", False):
            super().save_pretrained(save_directory, is_main_process=is_main_process, push_to_hub=push_to_hub, **kwargs)
            return
        folder = Path(save_directory)
        upload = {name: kwargs.pop(name) for name in _UPLOAD_ARGUMENTS if name in kwargs}
        writes = is_main_process and not folder.is_file()
        before = {path: path.stat().st_mtime_ns for path in folder.glob("*")}
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            self.write_code(folder)
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if writes:
            companions = self.sentence_transformers_config()
            if (values := self.image_processor_config()) is not None:
                companions["preprocessor_config.json"] = values
            for name, content in companions.items():
                if not (folder / name).exists():
                    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
                    (folder / name).write_text(text, encoding="utf-8")
            if not (folder / "README.md").exists():
                model_card(self).save(folder / "README.md")
            if push_to_hub:
                # The folder may hold what is no part of the model, for example a `Trainer`'s checkpoints.
                written = [path.name for path in folder.glob("*") if before.get(path) != path.stat().st_mtime_ns]
                upload_folder(
                    folder,
                    upload.pop("repo_id", folder.name),
                    token=kwargs.get("token"),
                    allow_patterns=[*written, *companions, "README.md"],
                    **upload,
                )

    def image_processor_config(self) -> dict | None:
        """The content of `preprocessor_config.json`, or `None` where the model does not say."""
        return image_processor_config(getattr(self.config, "vision_config", self.config))

    def sentence_transformers_config(self) -> dict[str, object]:
        """The contents of the files by which `SentenceTransformer` gives the embeddings of the model, by their names;
        of a folder without them it takes the mean of all tokens. Empty where the model has none."""
        if not self.embeds:
            return {}
        config = {
            "transformer_task": "feature-extraction",
            "modality_config": {
                kind: {"method": method, "method_output_name": output}
                for kind, (method, output) in self.embeds.items()
            },
            "module_output_name": "sentence_embedding",
        }
        module = {
            **{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            "kwargs": list(self.embedding_arguments),
        }
        return {"modules.json": [module], "sentence_bert_config.json": config}

    def write_code(self, folder: Path):
        """Write the source files of the model's family and point the configuration's `auto_map` at them."""
        family = self.family_class()
        module_name = family.__module__.rpartition(".")[2]
        # A configuration class imported through the modeling file is the one that the model itself uses.
        self.config.auto_map = {
            "AutoConfig": f"{module_name}.{family.config_class.__name__}",
            **{auto_class: f"{module_name}.{name}" for auto_class, name in self.auto_classes.items()},
        }
        for name, source in family._sources.items():
            (folder / name).write_text(source, encoding="utf-8", newline="\n")

    def push_to_hub(self, repo_id: str, *, private=None, token=None, tags=None, max_shard_size="50GB", **commit):
        """Save the complete repository and upload it in one commit; a model card that is already there stays.

        Args:
            repo_id (`str`): Repository on the hub, created if it does not exist.
            private (`bool`, *optional*): Whether to create a private repository.
            token (`str`, *optional*): Access token; the one of `hf auth login` by default.
            tags (list of `str`, *optional*): Tags to add to the model card.
            max_shard_size (`int` or `str`, *optional*, defaults to `"50GB"`): Largest file of weights.
            commit: `commit_message`, `commit_description`, `revision` and `create_pr`.

        Returns:
            `huggingface_hub.CommitInfo`: The commit.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            readme = Path(folder) / "README.md"
            if tags and readme.exists():  # adapters come without one
                card = ModelCard.load(readme)
                card.data.tags += tags
                card.save(readme)
            return upload_folder(folder, repo_id, private=private, token=token, keep_card=True, **commit)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """Does nothing: `save_pretrained` writes the source files itself."""


class AlteredConfigMixin(HubConfigMixin):
    """A configuration of Transformers for an `AlteredModel`."""

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        # Where this configuration was registered, its models follow when one is loaded.
        module = sys.modules[type(self).__module__]
        for name in self.architectures or ():
            model = getattr(module, name, None)
            if isinstance(model, type) and issubclass(model, AlteredModel):
                model.register()


class AlteredModel(HubModel):
    """A model of Transformers with something of this package in it. Its module makes a class for each of Transformers'
    when it is first asked for one."""

    def save_pretrained(self, save_directory, **kwargs):
        """As `HubModel.save_pretrained`. Weights keep the names that they have here, as Transformers does not know
        that the names of older checkpoints of the host belong to this model type."""
        super().save_pretrained(save_directory, **{"save_original_format": False} | kwargs)

    def image_processor_config(self):
        """None: the host's image processor is saved beside it, as always."""

    @classmethod
    def register(cls):
        """Let Transformers' Auto classes load the class and its base model, whose code this process has."""
        transformers.AutoConfig.register(cls.config_class.model_type, cls.config_class, exist_ok=True)
        module = sys.modules[cls.family_class().__module__]
        for auto_class, name in cls.auto_classes.items():
            getattr(transformers, auto_class).register(cls.config_class, getattr(module, name), exist_ok=True)


def upload_folder(
    folder,
    repo_id: str,
    private=None,
    token=None,
    commit_message=None,
    revision=None,
    keep_card=False,
    **commit,
):
    """Upload a folder to a model repository on the hub, created if it does not exist, in one commit.

    With `keep_card`, a model card that is already in the repository is not replaced.
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    keeps = keep_card and api.file_exists(repo_id, "README.md", revision=revision)
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        commit_message=commit_message or "Upload model",
        revision=revision,
        ignore_patterns=["README.md"] if keeps else None,
        **commit,
    )
