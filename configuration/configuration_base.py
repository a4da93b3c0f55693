"""What every configuration of the project shares."""

import difflib
from dataclasses import fields

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


def pair(size) -> tuple[int, ...]:
    """Height and width of a size, which may be one number for both."""
    return tuple(size) if isinstance(size, (list, tuple)) else (size, size)


class HubConfigMixin:
    """What configurations of `HubModel`s share."""

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Does nothing: the models' `save_pretrained` writes the source files of model and configuration together."""


@strict
class FrugalViTConfig(HubConfigMixin, PreTrainedConfig):
    """Base configuration: a misspelled field is an error, and saving is left to the models.

    Transformers keeps unknown keyword arguments as attributes, so that `num_hiden_layers=6` would silently build the
    default model. Here a name that is close to that of a field raises, also if it was assigned to the configuration.
    """

    def __post_init__(self, **kwargs):
        for name in ("image_mean", "image_std"):
            if not isinstance(getattr(self, name, 0.0), float):
                setattr(self, name, tuple(getattr(self, name)))
        super().__post_init__(**kwargs)

    @staticmethod
    def _variants() -> dict[str, dict]:
        """Fields of the papers' models by name."""
        return {}

    @classmethod
    def variants(cls) -> list[str]:
        """Names of the papers' models, for `from_variant`."""
        return list(cls._variants())

    @classmethod
    def from_variant(cls, name: str, **overrides):
        """The configuration of one of the papers' models.

        Args:
            name (`str`): One of `variants()`.
            overrides: Fields to set differently, for example `num_labels=10`.

        Raises:
            ValueError: if there is no variant of that name; the message lists the names.
        """
        variants = cls._variants()
        if name not in variants:
            close = ", ".join(difflib.get_close_matches(name, variants, n=4, cutoff=0.5) or variants)
            family = cls.__name__.removesuffix("Config")
            raise ValueError(f"There is no {family} variant {name!r}. Did you mean: {close}?")
        return cls(**{**variants[name], **overrides})

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
        if getattr(self, "resample", 2) not in range(6):
            raise ValueError(f"`resample` is {self.resample!r}, expected one of {list(range(6))}.")

    def validate_problem_type(self):
        """The loss is one of Transformers'."""
        types = (None, "regression", "single_label_classification", "multi_label_classification")
        self._check_choices(problem_type=types)

    def _check_counts(self, *names: str):
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is {value}, expected at least 1.")

    def _check_choices(self, **choices: tuple):
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}, expected one of {list(allowed)}.")

    def _check_positive(self, *names: str):
        for name in names:
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}, expected a positive number.")

    def _check_rates(self, *names: str):
        for name in names:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}, expected 0 <= rate < 1.")

    def _check_sizes(self, *names: str, low: int = 1, reason: str = ""):
        for name in names:
            size = pair(getattr(self, name))
            if len(size) != 2 or min(size) < low:
                raise ValueError(
                    f"`{name}` is {getattr(self, name)}, expected one size or a height and a width{reason}."
                )
