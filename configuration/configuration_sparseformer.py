"""SparseFormer configuration: both generations, every variant of the papers by name."""

import contextlib
import math

from huggingface_hub.dataclasses import strict
from transformers.backbone_utils import BackboneConfigMixin

from .configuration_base import FrugalViTConfig, pair


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
INCEPTION_MEAN, INCEPTION_STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def stretch_of_cells(grid: tuple[int, int], image_size: tuple[int, int]) -> float:
    """Return how far the cells of a grid are from squares: the absolute log of their aspect ratio.

    Args:
        grid (pair of `int`): Rows and columns.
        image_size (pair of `int`): Height and width in pixels.
    """
    return abs(math.log(image_size[0] * grid[1] / (image_size[1] * grid[0])))


def choose_grid(num_cells: int, image_size: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns of the grid whose cells are most nearly square.

    Args:
        num_cells (`int`): Cells of the grid.
        image_size (pair of `int`): Height and width in pixels.

    Raises:
        ValueError: if cells would be more than twice as long one way as the other; the message names counts that fit.
    """

    def length(count: int) -> tuple[float, tuple[int, int]]:
        grids = [(rows, count // rows) for rows in range(1, count + 1) if count % rows == 0]
        ratios = {grid: stretch_of_cells(grid, image_size) for grid in grids}
        best = min(grids, key=ratios.get)
        return ratios[best], best

    ratio, grid = length(num_cells)
    if ratio > math.log(2) + 1e-6:
        fitting = [n for n in range(1, 4 * num_cells + 8) if length(n)[0] <= math.log(2) + 1e-6]
        nearest = sorted(sorted(fitting, key=lambda n: abs(n - num_cells))[:3])
        raise ValueError(
            f"{num_cells} tokens make no grid of cells that are nearly square in images of "
            f"{image_size[0]} x {image_size[1]} pixels; {', '.join(map(str, nearest))} do."
        )
    return grid


def coarsest_grid(image_size: tuple[int, int], most: int = 4) -> tuple[int, int]:
    """Return the rows and columns of the grid whose cells are most nearly square, of those with few cells.

    Args:
        image_size (pair of `int`): Height and width in pixels.
        most (`int`, *optional*, defaults to 4): Most cells of the grid, which has at least half as many.
    """
    grids = [
        (rows, columns)
        for rows in range(1, most + 1)
        for columns in range(1, most // rows + 1)
        if 2 * rows * columns >= most
    ]
    # Of equally square ones that with more cells.
    return min(grids, key=lambda grid: (round(stretch_of_cells(grid, image_size), 6), -math.prod(grid)))


def _one_or_pair(size: int | list[int] | tuple[int, ...]) -> int | tuple[int, ...]:
    """One number where height and width are alike: heads of Transformers divide by a backbone's `patch_size`."""
    sides = pair(size)
    return sides[0] if len(sides) == 2 and sides[0] == sides[1] else sides


# The papers' orders of operations, and those of the focusing layer in folders from before they had names.
GENERATIONS = {
    "bootstrapped": ("sampling", "position_encoding", "attention", "mlp", "roi_adjustment"),
    "v1": ("attention", "roi_adjustment", "sampling", "mlp"),
}
# Where tokens that embed patches look, and what says which cells of a tree are split.
PLACEMENTS = ("grid", "content")
PLACEMENT_RULES = ("detail", "contrast", "entropy", "learned")
# How a segmentation model makes a map of its tokens: by the paper's head, or of its feature maps.
DECODERS = ("attention", "linear")


@strict
class SparseFormerConfig(BackboneConfigMixin, FrugalViTConfig):
    r"""
    Configuration of a SparseFormer. The defaults are the base model bootstrapped from AugReg ViT-B/16 with 49 tokens
    (Gao et al., *Bootstrapping SparseFormers from Vision Foundation Models*, table 1); `from_variant` has the rest.

    A SparseFormer is a stem, a focusing stage and a cortex. The focusing stage is one layer of width
    `focusing_hidden_size`, executed `num_focusing_iterations` times, and one at full width, executed once; the cortex
    is a plain transformer encoder. The fields below say where the two generations differ.

    With `patch_size`, the focusing stage is inherited, too: each token embeds the pixels at a grid of points in its
    RoI as the teacher embeds a patch, so that a new student is its teacher at a lower resolution.

    Args:
        image_size (`int` or pair of `int`, *optional*, defaults to 224):
            Image size in pixels (or height and width) for preprocessing. The model itself takes any size: RoIs are
            relative to the image.
        num_channels (`int`, *optional*, defaults to 3): Channels of the image.
        num_latent_tokens (`int`, *optional*, defaults to 48):
            Latent tokens, [CLS] not counted (the papers count it: 49).
        elastic_token_counts (sequence of `int`, *optional*):
            Counts of latent tokens that the model is made for, increasing, with `num_latent_tokens` as the last. Every
            call may choose one (`num_tokens`). A smaller count takes the first tokens, which see the whole image; with
            `patch_size`, it has a coarser grid, for which tokens are interpolated.
        num_tokens (`int`, *optional*):
            Latent tokens of a call that chooses none; all of them by default.
        calibration (`dict`, *optional*):
            The promise of `frugalvit calibrate` for `classify_adaptively`. An image is looked at with one of
            `token_counts` after the other, until its likeliest class has a probability of `confidence`. With a
            probability of `certainty`, a share of at most `disagreement` of images then gets another label than from
            the `reference`, a `str`. These three numbers are 0 to 1. They were found on so many `images`.
        num_sampling_points (`int`, *optional*, defaults to 16): Points that a token samples in its RoI, at least 2.
        num_mixed_points (`int`, *optional*):
            Points after mixing; `max(num_sampling_points, 32)` if not given, as in the reference implementation.
        stem_channels (`int`, *optional*, defaults to 64): Channels of the early convolution.
        patch_size (`int` or pair of `int`, *optional*):
            Rows and columns of points whose pixels a token embeds by a linear layer. There is then no early
            convolution, no focusing layer and no adaptive mixing: `num_focusing_iterations` is 0.
        patch_norm (`bool`, *optional*, defaults to `False`): A norm follows that layer, before positions are added.
        embedding_norm (`bool`, *optional*, defaults to `False`): A norm of all tokens before the cortex (CLIP).
        token_grid (`int` or pair of `int`, *optional*):
            With `patch_size`, rows and columns of the cells that are the tokens' first RoIs, in row order. By default,
            those with `num_latent_tokens` cells that are most nearly square in an image of `image_size`.
        placement (`str`, *optional*, defaults to `"grid"`):
            With `patch_size`, where tokens look: in the cells of a `"grid"`, or, by `"content"`, in those of a
            quadtree that is chosen for each image, see `frugalvit.modeling.placement`. Trees have the coarsest grid's
            cells and three more for each split; other counts are rounded down.
        placement_rule (`str`, *optional*, defaults to `"detail"`):
            Which cells of a tree are split. `"detail"`: those that lose most when they have the resolution of a patch,
            the mean squared difference times the cell's area. `"contrast"`: the same with the root of the difference.
            `"entropy"`: those whose gray values have the largest entropy. `"learned"`: the root of the difference
            times the attention of a teacher to the cell, which a few convolutions predict.
        placement_grid (`int` or pair of `int`, *optional*):
            The coarsest grid of trees in images of `image_size`; up to four nearly square cells by default.
        num_placement_levels (`int`, *optional*):
            Number of sizes of a tree's cells, at least two, each half of the one before. By default, as many as it
            takes until the smallest cells have no more pixels than a patch has points.
        placement_random_share (`float`, *optional*, defaults to 0.0):
            Share of images that have a random tree while training.
        focusing_hidden_size (`int`, *optional*, defaults to 384): Width of the iterated focusing layer.
        num_focusing_iterations (`int`, *optional*, defaults to 4):
            Executions of the focusing layer; the one at full width comes on top ("4+1" in the paper).
        generation (`str`, *optional*, defaults to `"bootstrapped"`):
            Order of operations of the focusing layers. `"bootstrapped"`: sampling, position encoding, attention, MLP,
            adjustment of RoIs; at full width the first two alone. `"v1"`: attention, adjustment of RoIs, sampling,
            MLP; the layer at full width is a whole transformer block and counts as the first of the
            `num_hidden_layers`.
        roi_encoding (`str`, *optional*, defaults to `"reference"`):
            Frequencies and order of the sinusoidal encoding of RoIs: `"reference"`, as the authors' code has them, or
            `"paper"`, as the supplement prints them, see `encode_rois`.
        focusing_num_attention_heads (`int`, *optional*): Heads of the focusing layer; one per 64 channels by default.
        focusing_intermediate_size (`int`, *optional*): MLP width of the focusing layer; 4 times its width by default.
        focusing_hidden_act (`str`, *optional*, defaults to `"gelu"`): Activation of the focusing layer's MLP.
        hidden_size (`int`, *optional*, defaults to 768): Width of the cortex.
        num_hidden_layers (`int`, *optional*, defaults to 8): Blocks of the cortex that exist, after truncation.
        num_attention_heads (`int`, *optional*): Heads of the cortex; one per 64 channels by default.
        intermediate_size (`int`, *optional*): MLP width of the cortex; 4 times its width by default.
        hidden_act (`str`, *optional*, defaults to `"gelu"`): Activation of the cortex ("quick_gelu" for CLIP).
        qkv_bias (`bool`, *optional*, defaults to `True`): Biases on queries, keys and values of the cortex.
        gated_mlp (`bool`, *optional*, defaults to `False`):
            MLPs of the cortex have a gate: activated, it multiplies their first layer (SwiGLU with "silu").
        mlp_norm (`bool`, *optional*, defaults to `False`):
            A norm before the second layer of MLPs of the cortex (EVA-02).
        query_key_norm (`bool`, *optional*, defaults to `False`): Norms of each head's queries and keys in the cortex.
        attention_norm (`bool`, *optional*, defaults to `False`):
            A norm before the output projection of attention in the cortex.
        norm_type (`str`, *optional*, defaults to `"layer_norm"`): Norms of the cortex, or `"rms_norm"`.
        layer_norm_eps (`float`, *optional*, defaults to 1e-5): Epsilon of the cortex's norms, and of the others unless
            `focusing_layer_norm_eps` is given.
        focusing_layer_norm_eps (`float`, *optional*): Epsilon of every LayerNorm before the cortex.
        final_norm (`bool`, *optional*, defaults to `True`): Whether a norm follows the cortex.
        rope_theta (`float`, *optional*):
            Base of the frequencies by which the cortex rotates queries and keys of latent tokens, each according to
            the center of its RoI (`frugalvit.modeling.layers.rotary_table`). `None` rotates none.
        rope_scale, rope_shift (pair of `float`, *optional*):
            Factor and offset that take centers, 0 to 1 across the image, to coordinates, y first. DINOv3's by default.
        shared_token_embedding (`bool`, *optional*, defaults to `True`):
            All latent tokens start from one learned embedding (v1: one each).
        stage_embedding (`bool`, *optional*, defaults to `True`):
            A learned embedding joins the tokens at the start of every focusing iteration.
        transition_layer_norm (`bool`, *optional*, defaults to `False`):
            LayerNorm after the linear layer that takes the tokens to full width.
        mixing_bias (`bool`, *optional*, defaults to `False`):
            Biases and a GELU after each of the two mixing products (v1); otherwise one GELU after both.
        mixing_hidden_size (`int`, *optional*, defaults to 128):
            Bottleneck of the generator of mixing parameters; `None` is a quarter of the token width (v1).
        num_roi_delta_layers (`int`, *optional*, defaults to 2): Linear layers that produce the RoI deltas, 1 or 2.
        sampling_padding_mode (`str`, *optional*, defaults to `"border"`):
            Values that a point outside the image reads: "border" or "zeros".
        clip_sampling_gradients (`bool`, *optional*, defaults to `False`):
            Clamp the gradient on sampling points to +-1 / height of the feature map (v1's training code).
        use_cls_token (`bool`, *optional*, defaults to `True`): A learned [CLS] joins the tokens before the cortex.
        num_class_tokens (`int`, *optional*, defaults to 1): Number of class tokens, with `use_cls_token`.
        num_register_tokens (`int`, *optional*, defaults to 0):
            Number of learned tokens that join after the class tokens and stand for nothing.
        pooling (`str`, *optional*, defaults to `"cls"`):
            `"cls"`, class tokens, side by side if there are several; `"class_mean"`, their mean; `"mean"`, that of all
            tokens, or `"latent_mean"`, of all but those in front; `"cls_and_latent_mean"`, both side by side (DINOv2's
            classifiers); `"attention"` to all tokens or `"latent_attention"`, by a learned query (SigLIP, AIMv2).
        pooled_class_tokens (sequence of `int`, *optional*): Indices of the class tokens that `"cls"` takes; all by
            default.
        pool_before_norm (`bool`, *optional*, defaults to `False`): Pool before the final norm (v1).
        pooling_num_attention_heads (`int`, *optional*): Heads of attention pooling; the cortex's by default.
        pooling_intermediate_size (`int`, *optional*): MLP width of attention pooling; the cortex's by default, 0 for
            no MLP (AIMv2).
        pooling_hidden_act (`str`, *optional*): Activation of that MLP; the cortex's by default.
        projection_dim (`int`, *optional*): Width of the projected embedding of CLIP-like models.
        projection_bias (`bool`, *optional*, defaults to `False`): A bias on that projection.
        out_features (`list[str]`, *optional*):
            Layers whose feature maps a backbone returns, in order: `"stem"`, before the cortex's first block,
            `"stage1"`, after it, and so on. The last by default; with several `feature_scales`, as many layers, evenly
            spaced.
        out_indices (`list[int]`, *optional*): The same layers by number, from 0, or from -1 for the last.
        apply_layernorm (`bool`, *optional*, defaults to `True`): Whether the final norm is applied to feature maps.
        reshape_hidden_states (`bool`, *optional*, defaults to `True`):
            Whether feature maps have rows and columns. If not, their cells follow [CLS], or the mean token where there
            is none, `(batch, 1 + cells, hidden_size)`, as DPT and Depth Anything take them.
        feature_stride (`int` or pair of `int`, *optional*):
            Height and width in pixels of a cell of feature maps: a patch of the teacher. By default `patch_size`, or
            16 without one.
        feature_scales (sequence of `float`, *optional*):
            Factor for the rows and columns of each map, for heads that want several strides, for example
            `[4, 2, 1, 0.5]` as in ViTDet's pyramid. All are 1 by default.
        upsampler_hidden_size (`int`, *optional*):
            Width of the convolutions that see the image and refine feature maps; `None` for no such convolutions.
        decoder_type (`str`, *optional*, defaults to `"attention"`):
            How a segmentation model makes a map of its tokens: by the head of the paper, or with a `"linear"`
            classifier of its feature maps.
        decoder_hidden_size (`int`, *optional*, defaults to 256): Width of the segmentation head.
        decoder_num_hidden_layers (`int`, *optional*, defaults to 2): Transformer blocks of the segmentation head.
        semantic_loss_ignore_index (`int`, *optional*, defaults to 255): Label of pixels that do not count.
        context_broadcast (`str`, *optional*):
            Context Broadcasting in every block of the cortex: `"cb"`, `"cb_s"`, `"cb_gate"` or `"cb_hybrid"`, see
            `insert_context_broadcast`.
        context_broadcast_position (`str` or several, *optional*, defaults to `"mlp_end"`):
            Where in a block: `"mlp_front"`, `"mlp_mid"`, `"mlp_end"`, `"attention_end"`.
        context_broadcast_scale_init (`float`, *optional*, defaults to 0.0): Start of the scale of `"cb_s"`.
        context_broadcast_blend (`bool`, *optional*, defaults to `False`):
            Whether a learned number leads from a plain transformer to Context Broadcasting, see `ContextBroadcast`.
        drop_path_rate (`float`, *optional*, defaults to 0.0):
            Largest stochastic depth rate; rises linearly over all layer executions.
        initializer_range (`float`, *optional*, defaults to 0.02): Std of truncated normal weights.
        image_mean, image_std (`float` or sequence of `float`, *optional*):
            Normalization written into the image processor, for all channels or each.
        resize_size (`int`, *optional*):
            Shorter side to resize to before a center crop of `image_size`; `None` resizes straight to `image_size`.
        resample (`int`, *optional*, defaults to 2): PIL's resampling filter (2 bilinear, 3 bicubic).

    Raises:
        huggingface_hub.errors.StrictDataclassError: if a value has the wrong type, if values contradict each other, or
            if a name looks like a misspelled field; the message says what was given and what would fit.
    """

    model_type = "sparseformer"
    # Of a CLIP or a LLaVA with a SparseFormer, the configuration of that.
    base_config_key = "vision_config"
    attribute_map = {"layer_norm_epsilon": "layer_norm_eps"}
    keys_to_ignore_at_inference = [
        "rois",
        "sampling_points",
        "focusing_hidden_states",
        "stem_features",
        "token_maps",
    ]

    image_size: int | list[int] | tuple[int, int] = 224
    num_channels: int = 3
    num_latent_tokens: int = 48
    elastic_token_counts: list[int] | tuple[int, ...] | None = None
    num_tokens: int | None = None
    calibration: dict | None = None
    num_sampling_points: int = 16
    num_mixed_points: int | None = None
    stem_channels: int = 64
    patch_size: int | list[int] | tuple[int, int] | None = None
    patch_norm: bool = False
    embedding_norm: bool = False
    token_grid: int | list[int] | tuple[int, int] | None = None
    placement: str = "grid"
    placement_rule: str = "detail"
    placement_grid: int | list[int] | tuple[int, int] | None = None
    num_placement_levels: int | None = None
    placement_random_share: float | int = 0.0
    focusing_hidden_size: int = 384
    num_focusing_iterations: int = 4
    generation: str = "bootstrapped"
    roi_encoding: str = "reference"
    focusing_num_attention_heads: int | None = None
    focusing_intermediate_size: int | None = None
    focusing_hidden_act: str = "gelu"
    hidden_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int | None = None
    intermediate_size: int | None = None
    hidden_act: str = "gelu"
    qkv_bias: bool = True
    gated_mlp: bool = False
    mlp_norm: bool = False
    query_key_norm: bool = False
    attention_norm: bool = False
    norm_type: str = "layer_norm"
    layer_norm_eps: float | int = 1e-5
    focusing_layer_norm_eps: float | int | None = None
    final_norm: bool = True
    rope_theta: float | int | None = None
    rope_scale: list[float] | tuple[float, ...] = (4 * math.pi, 4 * math.pi)
    rope_shift: list[float] | tuple[float, ...] = (-2 * math.pi, -2 * math.pi)
    shared_token_embedding: bool = True
    stage_embedding: bool = True
    transition_layer_norm: bool = False
    mixing_bias: bool = False
    mixing_hidden_size: int | None = 128
    num_roi_delta_layers: int = 2
    sampling_padding_mode: str = "border"
    clip_sampling_gradients: bool = False
    use_cls_token: bool = True
    num_class_tokens: int = 1
    num_register_tokens: int = 0
    pooling: str = "cls"
    pooled_class_tokens: list[int] | tuple[int, ...] | None = None
    pool_before_norm: bool = False
    pooling_num_attention_heads: int | None = None
    pooling_intermediate_size: int | None = None
    pooling_hidden_act: str | None = None
    projection_dim: int | None = None
    projection_bias: bool = False
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None
    apply_layernorm: bool = True
    reshape_hidden_states: bool = True
    feature_stride: int | list[int] | tuple[int, int] | None = None
    feature_scales: list[float | int] | tuple[float | int, ...] | None = None
    upsampler_hidden_size: int | None = None
    decoder_type: str = "attention"
    decoder_hidden_size: int = 256
    decoder_num_hidden_layers: int = 2
    semantic_loss_ignore_index: int = 255
    context_broadcast: str | None = None
    context_broadcast_position: str | list[str] | tuple[str, ...] = "mlp_end"
    context_broadcast_scale_init: float | int = 0.0
    context_broadcast_blend: bool = False
    drop_path_rate: float | int = 0.0
    initializer_range: float | int = 0.02
    image_mean: float | list[float] | tuple[float, ...] = INCEPTION_MEAN
    image_std: float | list[float] | tuple[float, ...] = INCEPTION_STD
    resize_size: int | None = None
    resample: int = 2

    def __post_init__(self, **kwargs):
        # Of students that glanced at the image first, which trees have replaced; their folders cannot be computed.
        if kwargs.pop("glance_grid", None):
            raise ValueError("`glance_grid` is gone; tokens that choose where to look have `placement='content'`.")
        for name in ("num_glance_layers", "num_pyramid_levels"):
            kwargs.pop(name, None)
        if steps := kwargs.pop("focusing_steps", None):
            known = [name for name, of_generation in GENERATIONS.items() if of_generation == tuple(steps)]
            if not known:
                raise ValueError(f"`focusing_steps` is {steps}, expected one of {[*GENERATIONS.values()]}.")
            self.generation = known[0]
        kwargs.pop("final_focusing_steps", None)
        if self.num_mixed_points is None:
            self.num_mixed_points = max(self.num_sampling_points, 32)
        if self.num_attention_heads is None:
            self.num_attention_heads = max(self.hidden_size // 64, 1)
        if self.focusing_num_attention_heads is None:
            self.focusing_num_attention_heads = max(self.focusing_hidden_size // 64, 1)
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.focusing_intermediate_size is None:
            self.focusing_intermediate_size = 4 * self.focusing_hidden_size
        if self.feature_stride is None:
            self.feature_stride = self.patch_size or 16
        self.feature_stride = _one_or_pair(self.feature_stride)
        if self.patch_size is not None:
            self.patch_size = _one_or_pair(self.patch_size)
            self.stem_channels = 16 * self.num_channels
            self.num_focusing_iterations = 0
            self.shared_token_embedding = False
            # `validate` refuses values that make no sense.
            with contextlib.suppress(TypeError, ValueError, IndexError, ZeroDivisionError):
                self.num_sampling_points = math.prod(pair(self.patch_size))
                if self.placement == "content":
                    self._round_token_counts()
                else:
                    grid = self.token_grid or choose_grid(self.num_latent_tokens, pair(self.image_size))
                    self.token_grid = pair(grid)
        self.rope_scale, self.rope_shift = tuple(self.rope_scale), tuple(self.rope_shift)
        names, numbers = kwargs.pop("out_features", None), kwargs.pop("out_indices", None)
        if names is None and numbers is None and self.feature_scales:
            count = len(self.feature_scales)
            numbers = [(place + 1) * self.num_hidden_layers // count for place in range(count)]
        self.set_output_features_output_indices(names, numbers)
        super().__post_init__(**kwargs)

    @property
    def stage_names(self) -> list[str]:
        """Layers that have feature maps."""
        return ["stem", *(f"stage{number}" for number in range(1, self.num_hidden_layers + 1))]

    def set_output_features_output_indices(self, out_features: list | None, out_indices: list | tuple | None):
        """Choose the layers of which a backbone returns feature maps, by name or by number.

        Raises:
            ValueError: if there are no such layers, or they are not in order.
        """
        names = self.stage_names
        if unknown := [name for name in out_features or () if name not in names]:
            raise ValueError(f"`out_features` has {unknown}, expected some of {', '.join(names)}.")
        if unknown := [number for number in out_indices or () if not -len(names) <= number < len(names)]:
            raise ValueError(
                f"`out_indices` has {unknown}, expected numbers from 0, the stem, to {len(names) - 1}, the last "
                "layer, or from -1 backwards."
            )
        super().set_output_features_output_indices(out_features, out_indices)

    def to_dict(self) -> dict:
        """As in Transformers; `out_features` and `out_indices` are left out where they are the default."""
        fields = super().to_dict()
        if not self.feature_scales and self.out_features == self.stage_names[-1:]:
            del fields["out_features"], fields["out_indices"]
        return fields

    def _round_token_counts(self):
        self.placement_grid = pair(self.placement_grid or coarsest_grid(pair(self.image_size)))
        self.num_latent_tokens = self.tokens_of_tree(self.num_latent_tokens)
        if self.elastic_token_counts:
            self.elastic_token_counts = sorted({*map(self.tokens_of_tree, self.elastic_token_counts)})
        if self.num_tokens is not None:
            self.num_tokens = self.tokens_of_tree(self.num_tokens)

    def cell_grids(self, image_size: tuple[int, int] | None = None) -> list[tuple[int, int]]:
        """Return the grids of a tree's cells, coarsest first, each as rows and columns.

        Args:
            image_size (pair of `int`, *optional*): Height and width in pixels; the configuration's if not given.
        """
        own, (rows, columns) = pair(self.image_size), self.placement_grid
        height, width = image_size or own
        if own[0] * width != own[1] * height:
            # An image of another shape has cells of about the same shape.
            rows, columns = coarsest_grid((height, width), rows * columns)
        levels, points = self.num_placement_levels, pair(self.patch_size)
        if levels is None:
            # Two at least, as there is nothing to choose in one.
            finer = max(height / (rows * points[0]), width / (columns * points[1]), 2)
            levels = 1 + math.ceil(math.log2(finer) - 1e-9)
        return [(rows << level, columns << level) for level in range(levels)]

    def tokens_of_tree(self, num_tokens: int, image_size: tuple[int, int] | None = None) -> int:
        """Round a count of tokens down to one that a tree can have.

        Args:
            num_tokens (`int`): Latent tokens.
            image_size (pair of `int`, *optional*): Height and width in pixels; the configuration's if not given.

        Raises:
            ValueError: if the coarsest grid has more cells.
        """
        grids = self.cell_grids(image_size)
        base, most = math.prod(grids[0]), math.prod(grids[-1])
        if num_tokens < base:
            raise ValueError(
                f"{num_tokens} tokens are fewer than the {base} cells of the coarsest grid, {grids[0][0]} x "
                f"{grids[0][1]}; expected {base} or more, or give a coarser `placement_grid`."
            )
        return min(base + (num_tokens - base) // 3 * 3, most)

    def round_tokens(self, num_tokens: int) -> int:
        """Return the count of latent tokens that the model computes with when `num_tokens` are asked for: that of
        `tokens_of_tree`, with its errors, if tokens are placed by content, else `num_tokens`."""
        return self.tokens_of_tree(num_tokens) if self.placement == "content" else num_tokens

    @property
    def default_num_tokens(self) -> int:
        """Latent tokens of a call that chooses none."""
        return self.num_latent_tokens if self.num_tokens is None else self.num_tokens

    @property
    def trained_token_counts(self) -> tuple[int, ...]:
        """Counts of latent tokens that the model is made for."""
        return tuple(self.elastic_token_counts or [self.num_latent_tokens])

    @property
    def holding_calibration(self) -> dict | None:
        """`calibration` if it holds, else None. It holds if its last count is `default_num_tokens`, as it was when the
        model was calibrated."""
        calibrated = self.calibration
        holds = calibrated and self.round_tokens(calibrated["token_counts"][-1]) == self.default_num_tokens
        return calibrated if holds else None

    @property
    def adaptive_token_counts(self) -> list[int]:
        """Counts of latent tokens with which an image is looked at, one after the other until its class is sure."""
        if self.holding_calibration:
            return list(self.holding_calibration["token_counts"])
        return sorted({min(self.trained_token_counts[0], self.default_num_tokens), self.default_num_tokens})

    def grid_of(self, num_tokens: int) -> tuple[int, int]:
        """Return the rows and columns of the grid of `num_tokens` tokens that embed patches.

        Raises:
            ValueError: if so many tokens make no grid.
        """
        if num_tokens == self.num_latent_tokens:
            return self.token_grid
        return choose_grid(num_tokens, pair(self.image_size))

    @property
    def latent_size(self) -> int:
        """Channels of the tokens that images start from."""
        return self.focusing_hidden_size if self.num_focusing_iterations else self.hidden_size

    @property
    def num_prefix_tokens(self) -> int:
        """Number of class and register tokens, in front of the latent ones."""
        return self.use_cls_token * self.num_class_tokens + self.num_register_tokens

    @property
    def pooled_size(self) -> int:
        """Channels of the pooled embedding."""
        if self.pooling == "cls":
            return len(self.pooled_class_tokens or range(self.num_class_tokens)) * self.hidden_size
        return 2 * self.hidden_size if self.pooling == "cls_and_latent_mean" else self.hidden_size

    @property
    def final_focusing_is_block(self) -> bool:
        """Whether the layer that focuses at full width is the first block of the cortex."""
        return self.generation == "v1" and self.patch_size is None

    def validate_counts(self):
        """Counts and sizes are positive."""
        self._check_counts(
            "num_channels",
            "num_latent_tokens",
            "num_mixed_points",
            "stem_channels",
            "focusing_hidden_size",
            "num_placement_levels",
            "focusing_num_attention_heads",
            "focusing_intermediate_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "mixing_hidden_size",
            "num_class_tokens",
            "pooling_num_attention_heads",
            "projection_dim",
            "upsampler_hidden_size",
            "decoder_hidden_size",
            "resize_size",
        )
        if self.num_sampling_points < 2:
            raise ValueError(
                f"`num_sampling_points` is {self.num_sampling_points}, expected at least 2: "
                "sampling offsets are standardized over the points of a token."
            )
        if self.patch_size is None:
            self._check_counts("num_focusing_iterations")
        for name in ("decoder_num_hidden_layers", "num_register_tokens", "pooling_intermediate_size"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}, expected at least 0.")
        self._check_sizes("image_size", low=4, reason=", each at least 4 (the stride of the stem)")
        for name in ("patch_size", "token_grid", "placement_grid", "feature_stride"):
            if getattr(self, name) is not None:
                self._check_sizes(name)

    def validate_widths(self):
        """Heads divide widths, and the positional encoding divides into sines and cosines of four coordinates."""
        for width, heads in (
            ("focusing_hidden_size", "focusing_num_attention_heads"),
            ("hidden_size", "num_attention_heads"),
        ):
            size, count = getattr(self, width), getattr(self, heads)
            if size % count:
                raise ValueError(
                    f"`{width}`={size} is not divisible by `{heads}`={count}; choose heads that divide the width."
                )
            if size % 8:
                raise ValueError(
                    f"`{width}`={size} is not a multiple of 8, as the RoI position encoding (sine and cosine of "
                    "four coordinates) wants it."
                )
        if self.decoder_hidden_size % max(self.decoder_hidden_size // 64, 1):
            raise ValueError(
                f"`decoder_hidden_size` is {self.decoder_hidden_size}, expected up to 64 or a multiple of 64, the "
                "width of its attention heads."
            )

    def validate_generation(self):
        """v1 has nothing that joins after the focusing stage, as its first block is in there."""
        if self.final_focusing_is_block and (self.num_prefix_tokens or self.rope_theta is not None):
            raise ValueError(
                "[CLS] and registers have no RoI and join after the focusing stage, and rotary positions are those of "
                "its last RoIs, but the full-width focusing layer of `generation='v1'` is a cortex block: set "
                "`use_cls_token=False`, no `num_register_tokens` and no `rope_theta`, or choose 'bootstrapped'."
            )

    def validate_patches(self):
        """Tokens fill their grid, and fields for tokens that embed patches are given with `patch_size` alone."""
        if self.patch_size is None:
            for name in ("token_grid", "placement_grid", "num_placement_levels"):
                if getattr(self, name) is not None:
                    raise ValueError(f"`{name}` is {getattr(self, name)} without `patch_size`; give both or neither.")
            if self.placement != "grid":
                raise ValueError(
                    "`placement` is 'content' without `patch_size`: only tokens that embed patches do so."
                )
            return
        if self.placement == "content":
            if self.token_grid is not None:
                raise ValueError(f"`token_grid` is {self.token_grid} with `placement='content'`; leave it out.")
            if self.num_placement_levels == 1:
                raise ValueError("`num_placement_levels` is 1, expected 2 or more; `placement='grid'` has one.")
            return
        # Raises where there is none.
        grid = self.token_grid or choose_grid(self.num_latent_tokens, pair(self.image_size))
        if math.prod(grid) != self.num_latent_tokens:
            raise ValueError(
                f"`token_grid`={self.token_grid} has {math.prod(grid)} cells, expected "
                f"`num_latent_tokens`={self.num_latent_tokens}."
            )

    def validate_feature_maps(self):
        """There is a positive scale for each map."""
        scales, names = self.feature_scales, self.out_features
        if scales is not None and (len(scales) != len(names) or any(scale <= 0 for scale in scales)):
            raise ValueError(
                f"`feature_scales` is {list(scales)}, expected a positive number for each of the {len(names)} layers "
                f"of `out_features`, {', '.join(names)}."
            )

    def validate_token_counts(self):
        """Counts of tokens increase up to the largest, and the model can compute with each."""
        counts = self.elastic_token_counts
        if counts is not None:
            ordered = all(low < high for low, high in zip([0, *counts], counts, strict=False))
            if not counts or not ordered or counts[-1] != self.num_latent_tokens:
                raise ValueError(
                    f"`elastic_token_counts` is {list(counts)}, expected increasing counts from 1, of which the last "
                    f"is `num_latent_tokens`={self.num_latent_tokens}."
                )
        if self.num_tokens is not None and not 1 <= self.num_tokens <= self.num_latent_tokens:
            raise ValueError(
                f"`num_tokens` is {self.num_tokens}, expected 1 to `num_latent_tokens`={self.num_latent_tokens}."
            )
        if self.patch_size is not None:
            # Raises where there is none.
            for count in (*(counts or ()), self.default_num_tokens):
                self.grid_of(count) if self.placement == "grid" else self.tokens_of_tree(count)

    def validate_calibration(self):
        """`calibration` has every field, and its numbers fit each other and the model."""
        found = self.calibration
        if found is None:
            return
        expected = {
            "token_counts": (list, tuple),
            "confidence": (float, int),
            "disagreement": (float, int),
            "certainty": (float, int),
            "images": (int,),
            "reference": (str,),
        }
        for name, types in expected.items():
            if not isinstance(found.get(name), types):
                raise ValueError(f"`calibration` has {name}={found.get(name)!r}, expected a {types[0].__name__}.")
        for name in ("confidence", "disagreement", "certainty"):
            if not 0 <= found[name] <= 1:
                raise ValueError(f"`calibration` has {name}={found[name]}, expected a number from 0 to 1.")
        counts = found["token_counts"]
        ordered = all(isinstance(count, int) for count in counts) and sorted({*counts}) == [*counts]
        if len(counts) < 2 or not ordered or not 1 <= counts[0] <= counts[-1] <= self.num_latent_tokens:
            raise ValueError(
                f"`calibration` has token_counts={list(counts)}, expected two or more increasing counts up to "
                f"`num_latent_tokens`={self.num_latent_tokens}."
            )

    def validate_rotation(self):
        """Rotary positions have two axes, and two channels for each frequency of both."""
        for name in ("rope_scale", "rope_shift"):
            if len(getattr(self, name)) != 2:
                raise ValueError(f"`{name}` is {getattr(self, name)}, expected two numbers, for y and x.")
        if self.rope_theta is not None and self.hidden_size // self.num_attention_heads % 4:
            raise ValueError(
                f"Attention heads have {self.hidden_size // self.num_attention_heads} channels, expected a multiple "
                "of 4 where `rope_theta` rotates them."
            )

    def validate_choices(self):
        """Fields with a fixed set of values have one of them, and rates and epsilons are in range."""
        self._check_choices(
            pooling=(
                *("cls", "class_mean", "mean", "latent_mean", "cls_and_latent_mean"),
                *("attention", "latent_attention"),
            ),
            norm_type=("layer_norm", "rms_norm"),
            sampling_padding_mode=("border", "zeros"),
            roi_encoding=("reference", "paper"),
            generation=tuple(GENERATIONS),
            placement=PLACEMENTS,
            placement_rule=PLACEMENT_RULES,
            decoder_type=DECODERS,
            num_roi_delta_layers=(1, 2),
        )
        if self.pooling in ("cls", "class_mean", "cls_and_latent_mean") and not self.use_cls_token:
            raise ValueError(
                f"`pooling={self.pooling!r}` needs `use_cls_token=True`; without [CLS] choose `pooling='mean'`."
            )
        if any(not 0 <= index < self.num_class_tokens for index in self.pooled_class_tokens or ()):
            raise ValueError(
                f"`pooled_class_tokens` is {self.pooled_class_tokens}, expected numbers below `num_class_tokens`="
                f"{self.num_class_tokens}."
            )
        self._check_rates("drop_path_rate", "placement_random_share")
        self._check_positive("layer_norm_eps", "initializer_range")
        for name in ("focusing_layer_norm_eps", "rope_theta"):
            if getattr(self, name) is not None:
                self._check_positive(name)

    @staticmethod
    def _variants() -> dict[str, dict]:
        return VARIANTS


def _v1(width: int, layers: int, tokens: int, drop_path_rate: float) -> dict:
    """SparseFormer as first published (Gao et al., *SparseFormer: Sparse Visual Recognition via Limited Latent
    Tokens*), where the layer that focuses at full width is a cortex block."""
    return {
        "num_latent_tokens": tokens,
        "num_sampling_points": 36,
        "stem_channels": 96,
        "focusing_hidden_size": width // 2,
        "generation": "v1",
        "focusing_num_attention_heads": 64,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "layer_norm_eps": 1e-6,
        "shared_token_embedding": False,
        "stage_embedding": False,
        "transition_layer_norm": True,
        "mixing_bias": True,
        "mixing_hidden_size": None,
        "num_roi_delta_layers": 1,
        "sampling_padding_mode": "zeros",
        "clip_sampling_gradients": True,
        "use_cls_token": False,
        "pooling": "mean",
        "pool_before_norm": True,
        "drop_path_rate": drop_path_rate,
        "image_mean": IMAGENET_MEAN,
        "image_std": IMAGENET_STD,
        "resize_size": 256,
        "num_labels": 1000,
    }


def _bootstrapped(size: str, tokens: int, image_size: int = 224, truncated: bool = True, **fields) -> dict:
    """SparseFormer bootstrapped from a ViT of that size (table 1 of the bootstrapping paper); `tokens` with [CLS]."""
    width, focusing_width, blocks = {"base": (768, 384, 12), "large": (1024, 512, 24)}[size]
    return {
        "image_size": image_size,
        "num_latent_tokens": tokens - 1,
        "focusing_hidden_size": focusing_width,
        "hidden_size": width,
        "num_hidden_layers": blocks - blocks // 3 if truncated else blocks,
        "resize_size": image_size * 256 // 224,
        "num_labels": 1000,
        **fields,
    }


def _clip(size: str, tokens: int, image_size: int = 224) -> dict:
    return _bootstrapped(
        size,
        tokens,
        image_size,
        hidden_act="quick_gelu",
        projection_dim={"base": 512, "large": 768}[size],
        image_mean=CLIP_MEAN,
        image_std=CLIP_STD,
    )


# Names read family, size, tokens as the papers count them (latent + [CLS]) and image size; `-untruncated` keeps all of
# the teacher's blocks.
VARIANTS = {
    "v1-tiny": _v1(512, 8, 49, 0.2),
    "v1-small": _v1(640, 8, 64, 0.3),
    "v1-base": _v1(768, 10, 81, 0.4),
    **{
        f"augreg-{size}-{tokens}-{image_size}": _bootstrapped(size, tokens, image_size)
        for size in ("base", "large")
        for tokens in (49, 80, 100, 144, 196)
        for image_size in (224, 320, 384)
    },
    **{f"augreg-{size}-49-224-untruncated": _bootstrapped(size, 49, truncated=False) for size in ("base", "large")},
    "clip-base-49-224": _clip("base", 49),
    "clip-large-64-224": _clip("large", 64),
    "clip-large-128-224": _clip("large", 128),
    "clip-large-144-336": _clip("large", 144, 336),
}


def read_vision_config(value: SparseFormerConfig | dict) -> SparseFormerConfig:
    """Return the `vision_config` of a model whose vision tower is a SparseFormer.

    Args:
        value (`SparseFormerConfig` or `dict`): The configuration or its fields.

    Raises:
        ValueError: if it is that of another model.
    """
    if isinstance(value, dict):
        return SparseFormerConfig(**value)
    # Never by class: remote code has another one of the same name.
    if value.model_type != SparseFormerConfig.model_type:
        raise ValueError(f"`vision_config` is a {type(value).__name__}, expected a SparseFormerConfig.")
    return value


def check_feature_layers(layers: int | list[int], vision: SparseFormerConfig):
    """Raise a ValueError unless a SparseFormer has the states that are read of it, as a LLaVA counts them."""
    states = vision.num_hidden_layers + 1
    for layer in [layers] if isinstance(layers, int) else layers:
        if not -states <= layer < states:
            raise ValueError(
                f"`vision_feature_layer` asks for {layer}, the SparseFormer has {states} (the input of its first "
                f"block and the output of each): {-states} to {states - 1}."
            )


__all__ = ["SparseFormerConfig"]
