"""Configurations that families of vision transformers share: how attention starts, and a plain ViT."""

from huggingface_hub.dataclasses import strict

from .configuration_base import FrugalViTConfig, pair


INITIALIZATIONS = ("impulse", "mimetic", "trunc_normal", "kaiming_uniform")
SOLVERS = ("closed_form", "adam", "adam_bounded", "pinv")
PSEUDO_INPUTS = ("pe", "uniform", "gaussian", "pe+uniform")
VALUE_INITS = ("default", "mimetic")


@strict
class AttentionStartConfig(FrugalViTConfig):
    r"""
    Base configuration of families whose attention may start with structure. The start of a model travels with it.

    Args:
        initialization (`str`, *optional*, defaults to `"default"`):
            How weights of a fresh model are drawn: `"default"`, as the family has them; with `"impulse"` or
            `"mimetic"` attention; or all linear layers of the blocks `"trunc_normal"` (timm's way) or
            `"kaiming_uniform"` (PyTorch's).
        impulse_solver, impulse_kernel_size, impulse_mass, impulse_steps, impulse_pseudo_input, impulse_per_layer:
            Arguments of `impulse_init_`.
        impulse_value_init (`str`, *optional*):
            Start of values and output projections: `"mimetic"`, the default with impulses and with mimetic attention,
            or `"default"`, as all linear layers start and as the paper leaves them.
    """

    initialization: str = "default"
    impulse_solver: str = "closed_form"
    impulse_kernel_size: int = 3
    impulse_mass: float | int | None = 0.2
    impulse_steps: int = 10_000
    impulse_pseudo_input: str | list[str] | tuple[str, ...] = "pe"
    impulse_per_layer: bool = True
    impulse_value_init: str | None = None

    @staticmethod
    def _starts() -> tuple[str, ...]:
        """Values of `initialization`."""
        return "default", *INITIALIZATIONS

    def validate_start(self):
        """The start is a known one; `impulse_init_` checks the rest."""
        self._check_choices(
            initialization=self._starts(),
            impulse_solver=SOLVERS,
            impulse_value_init=(None, *VALUE_INITS),
        )


@strict
class PlainViTConfig(AttentionStartConfig):
    r"""
    Base configuration of plain vision transformers, as Transformers' `ViTConfig`.

    Args:
        image_size (`int` or pair of `int`, *optional*, defaults to 224): Image size in pixels, or height and width.
        patch_size (`int` or pair of `int`, *optional*, defaults to 16): Patch size in pixels; divides the image.
        intermediate_size (`int`, *optional*): Width inside the MLP; four times `hidden_size` if not given.
        drop_path_rate (`float`, *optional*, defaults to 0.0):
            Largest stochastic depth rate; rises linearly over the blocks.
        initializer_range (`float`, *optional*, defaults to 0.02): Std of truncated normal weights.
        image_mean, image_std, resize_size, resample: Fields of the image processor.
    """

    attribute_map = {"layer_norm_epsilon": "layer_norm_eps"}

    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    num_channels: int = 3
    hidden_size: int = 384
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    intermediate_size: int | None = None
    hidden_act: str = "gelu"
    qkv_bias: bool = True
    layer_norm_eps: float | int = 1e-6
    drop_path_rate: float | int = 0.0
    initializer_range: float | int = 0.02
    image_mean: float | list[float] | tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: float | list[float] | tuple[float, ...] = (0.5, 0.5, 0.5)
    resize_size: int | None = None
    resample: int = 2

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
        self._check_sizes("image_size", "patch_size")
        self._check_rates("drop_path_rate")
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
