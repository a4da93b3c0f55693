"""What every configuration of the project shares."""

import difflib
from dataclasses import fields

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

# Keyword arguments that `PreTrainedConfig` takes without declaring them as fields.
_KEYWORDS_OF_TRANSFORMERS = {"attn_implementation", "auto_map", "name_or_path", "num_labels", "torch_dtype"}


@strict
class FrugalViTConfig(PreTrainedConfig):
    """Base configuration: a misspelled field is an error, and saving is left to the models.

    Transformers keeps unknown keyword arguments as attributes, so that `num_hiden_layers=6` would silently build the
    default model. Here a key that is close to the name of a field raises.
    """

    def __post_init__(self, **kwargs):
        names = {field.name for field in fields(self)}
        for key in kwargs:
            if key in names or key in _KEYWORDS_OF_TRANSFORMERS or key.startswith("_") or hasattr(type(self), key):
                continue
            if close := difflib.get_close_matches(key, names, n=1, cutoff=0.85):
                raise ValueError(
                    f"{type(self).__name__} has no field `{key}`; did you mean `{close[0]}`? "
                    f"The fields are: {', '.join(sorted(names))}."
                )
        super().__post_init__(**kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Does nothing: the models' `save_pretrained` writes the source files of model and configuration together."""
