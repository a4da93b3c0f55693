"""Base class of all configurations, and choices that several of them share."""

import difflib
from dataclasses import fields

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


CONTEXT_BROADCASTS = ("cb", "cb_s", "cb_gate", "cb_hybrid")
CONTEXT_BROADCAST_POSITIONS = ("mlp_front", "mlp_mid", "mlp_end", "attention_end")
INITIALIZATIONS = ("impulse", "mimetic", "trunc_normal", "kaiming_uniform")
SOLVERS = ("closed_form", "adam", "adam_bounded", "pinv")
PSEUDO_INPUTS = ("pe", "uniform", "gaussian", "pe+uniform")
VALUE_INITS = ("default", "mimetic")


def pair(size) -> tuple[int, ...]:
    """Height and width of a size, which may be one number for both."""
    return tuple(size) if isinstance(size, (list, tuple)) else (size, size)


def set_image_size(config, image_size: int | list[int]):
    """Change the size of a model's images, in pixels; a center crop shows as much of them as it did."""
    if getattr(config, "resize_size", None) is not None:
        config.resize_size = round(config.resize_size * min(pair(image_size)) / min(pair(config.image_size)))
    config.image_size = image_size


class HubConfigMixin:
    """Mixin of the configurations of `HubModel`s."""

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Does nothing: the models' `save_pretrained` writes the source files of model and configuration together."""


@strict
class FrugalViTConfig(HubConfigMixin, PreTrainedConfig):
    """Base configuration: a misspelled field is an error, and saving is left to the models.

    Transformers keeps unknown keyword arguments as attributes, so that `num_hiden_layers=6` would silently build the
    default model. Here a name that is close to that of a field raises, also if it was assigned to the configuration.

    Args:
        initialization_seed (`int`, *optional*):
            Seed of the weights of a model that `from_config` makes. Without it, PyTorch's random numbers go on from
            where they are. Trainers note their seed here, so that `from_config` of a trained model's configuration
            draws again the weights that training started from, on the CPU.

    Raises:
        huggingface_hub.errors.StrictDataclassError: if a value has the wrong type, if values contradict each other, or
            if a name looks like a misspelled field; the message says what was given and what would fit.
    """

    initialization_seed: int | None = None

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
        """Return the configuration of one of the papers' models.

        Args:
            name (`str`): One of `variants()`.
            overrides: Fields to set differently, for example `num_labels=10`.

        Returns:
            A configuration of this class.

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
        """In families that prepare images, there is a mean and a standard deviation for every channel."""
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

    def validate_context_broadcast(self):
        """Kind and positions of Context Broadcasting exist, in families that can have it."""
        if hasattr(self, "context_broadcast"):
            self._check_choices(context_broadcast=(None, *CONTEXT_BROADCASTS))
            positions = self.context_broadcast_position
            for position in (positions,) if isinstance(positions, str) else positions:
                if position not in CONTEXT_BROADCAST_POSITIONS:
                    raise ValueError(
                        f"`context_broadcast_position` has {position!r}, expected some of "
                        f"{list(CONTEXT_BROADCAST_POSITIONS)}."
                    )

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


@strict
class AttentionStartConfig(FrugalViTConfig):
    r"""
    Base configuration of families whose attention may start with structure. The start of a model travels with it.

    Args:
        initialization (`str`, *optional*, defaults to `"default"`):
            How weights of a fresh model are drawn: `"default"`, as the family has them; with `"impulse"` or
            `"mimetic"` attention; or all linear layers of the blocks `"trunc_normal"` (timm's way) or
            `"kaiming_uniform"` (PyTorch's).
        impulse_solver (`str`, *optional*, defaults to `"closed_form"`):
            How impulses are found: `"closed_form"`, ours; by the paper's Algorithm 1, `"adam"` as printed or
            `"adam_bounded"` as in its authors' code; or by `"pinv"`, from their later code. `impulse_init_` explains
            this and the fields below.
        impulse_kernel_size (`int`, *optional*, defaults to 3): Size of the impulse filters.
        impulse_mass (`float`, *optional*, defaults to 0.2):
            For the closed form, the share of the initial attention that falls on the impulse, above 0 and below 1;
            `None` for the maps that Algorithm 1 reaches.
        impulse_steps (`int`, *optional*, defaults to 10,000): Steps of Algorithm 1.
        impulse_renormalize_every (`int`, *optional*, defaults to 100):
            For `"adam_bounded"`, steps between rescalings of queries and keys.
        impulse_pseudo_input (`str` or two of `str`, *optional*, defaults to `"pe"`):
            Inputs in the place of tokens, for the first and for the following layers (table 6).
        impulse_per_layer (`bool`, *optional*, defaults to `True`): Whether layers get different impulses.
        impulse_value_init (`str`, *optional*):
            Start of values and output projections: `"mimetic"`, the default with impulses and with mimetic attention,
            or `"default"`, as all linear layers start and as the paper leaves them.
    """

    initialization: str = "default"
    impulse_solver: str = "closed_form"
    impulse_kernel_size: int = 3
    impulse_mass: float | int | None = 0.2
    impulse_steps: int = 10_000
    impulse_renormalize_every: int = 100
    impulse_pseudo_input: str | list[str] | tuple[str, ...] = "pe"
    impulse_per_layer: bool = True
    impulse_value_init: str | None = None

    @staticmethod
    def _starts() -> tuple[str, ...]:
        """Values of `initialization`."""
        return "default", *INITIALIZATIONS

    def validate_start(self):
        """The start is known, and its options are in range."""
        self._check_choices(
            initialization=self._starts(),
            impulse_solver=SOLVERS,
            impulse_value_init=(None, *VALUE_INITS),
        )
        self._check_counts("impulse_kernel_size", "impulse_steps", "impulse_renormalize_every")
        if self.impulse_mass is not None and not 0 < self.impulse_mass < 1:
            raise ValueError(f"`impulse_mass` is {self.impulse_mass}, expected a number above 0 and below 1, or None.")
        kinds = self.impulse_pseudo_input
        first_and_later = (kinds, kinds) if isinstance(kinds, str) else tuple(kinds)
        if len(first_and_later) != 2 or not {*first_and_later} <= {*PSEUDO_INPUTS}:
            raise ValueError(f"`impulse_pseudo_input` is {kinds!r}, expected one or two of {list(PSEUDO_INPUTS)}.")
        if self.impulse_solver == "pinv" and self.impulse_kernel_size != 3:
            raise ValueError(
                f"`impulse_kernel_size` is {self.impulse_kernel_size}, but `impulse_solver`='pinv' has an order for "
                "3 x 3 kernels only."
            )


@strict
class PatchTransformerConfig(FrugalViTConfig):
    """Base configuration of vision transformers whose tokens are the patches of an image of one size.

    Subclasses have the fields `image_size`, `patch_size`, `num_channels`, `hidden_size`, `num_hidden_layers`,
    `num_attention_heads`, `intermediate_size`, `layer_norm_eps`, `initializer_range`, `drop_path_rate`, `resize_size`.
    """

    def __post_init__(self, **kwargs):
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        super().__post_init__(**kwargs)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        (height, width), (patch_height, patch_width) = pair(self.image_size), pair(self.patch_size)
        return height // patch_height, width // patch_width

    def validate_patches(self):
        """Counts and sizes are positive, patches tile the image, and heads divide the width."""
        self._check_counts("num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads")
        self._check_counts("intermediate_size", "resize_size")
        self._check_sizes("image_size", "patch_size")
        for size, patch in zip(pair(self.image_size), pair(self.patch_size), strict=True):
            if size % patch:
                raise ValueError(
                    f"Patches of `patch_size`={self.patch_size} do not tile images of `image_size`={self.image_size}."
                )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"`hidden_size`={self.hidden_size} is not divisible by `num_attention_heads`="
                f"{self.num_attention_heads}; choose heads that divide the width."
            )

    def validate_numbers(self):
        """Rates are rates, and epsilons and widths of distributions are positive."""
        self._check_rates("drop_path_rate")
        self._check_positive("layer_norm_eps", "initializer_range")
