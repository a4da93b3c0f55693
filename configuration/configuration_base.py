"""What every configuration of the project shares."""

import difflib
from dataclasses import fields

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict
class FrugalViTConfig(PreTrainedConfig):
    """Base configuration: a misspelled field is an error, and saving is left to the models.

    Transformers keeps unknown keyword arguments as attributes, so that `num_hiden_layers=6` would silently build the
    default model. Here a name that is close to that of a field raises, also if it was assigned to the configuration.
    """

    def validate_names(self):
        """No attribute looks like a misspelled field."""
        names = {field.name for field in fields(self)}
        for key in vars(self):
            if key in names or key.startswith("_") or hasattr(type(self), key):
                continue
            if close := difflib.get_close_matches(key, names, n=1, cutoff=0.85):
                raise ValueError(
                    f"{type(self).__name__} has no field `{key}`; did you mean `{close[0]}`? "
                    f"The fields are: {', '.join(sorted(names))}."
                )

    def validate_preprocessing(self):
        """Mean and standard deviation are there for every channel, where a family prepares images at all."""
        for name in ("image_mean", "image_std"):
            value = getattr(self, name, None)
            if isinstance(value, (list, tuple)) and len(value) != self.num_channels:
                raise ValueError(
                    f"`{name}` has {len(value)} values, expected one number or one for each of the "
                    f"`num_channels`={self.num_channels} channels."
                )
        std = getattr(self, "image_std", 1.0)
        if 0 in (std if isinstance(std, (list, tuple)) else (std,)):
            raise ValueError(f"`image_std` is {std}, expected numbers to divide by.")

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Does nothing: the models' `save_pretrained` writes the source files of model and configuration together."""
