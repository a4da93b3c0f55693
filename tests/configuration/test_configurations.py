"""Tests of configurations: errors for wrong fields, and saving of variants and unknown fields."""

import pytest
from huggingface_hub.errors import StrictDataclassError

from frugalvit import (
    AgentCNNConfig,
    BootstrappedViTConfig,
    PatchSparseFormerConfig,
    PatchSparseFormerVisionModel,
    SparseFormerConfig,
    SparseFormerForImageClassification,
    SparseFormerModel,
    checkpoint_path,
)
from kinds import KINDS
from tiny import PATCHES


def bootstrapped_vit(vit=(), agent=(), **fields):
    sizes = {"hidden_size": 36, "num_hidden_layers": 3, "intermediate_size": 40, "patch_size": 4}
    vit = {**sizes, "image_size": 32, "num_attention_heads": 6, **dict(vit)}
    return BootstrappedViTConfig(vit_config=vit, agent_config={**sizes, "num_positions": 6, **dict(agent)}, **fields)


MAKE = {
    "sparseformer": SparseFormerConfig,
    "patches": lambda **fields: PatchSparseFormerConfig(**PATCHES | fields),
    "elastic": lambda **fields: SparseFormerConfig(num_latent_tokens=9, **fields),
    "vit_impulse_init": KINDS["vit_impulse_init"].config,
    "vit_context_broadcast": KINDS["vit_context_broadcast"].config,
    "convmixer": KINDS["convmixer"].config,
    "agent_cnn": AgentCNNConfig,
    "bootstrapped_vit": bootstrapped_vit,
}
BAD_FIELDS = {
    "sparseformer": [
        ({"hidden_size": 96, "num_attention_heads": 5}, "`hidden_size`=96 .* `num_attention_heads`=5"),
        ({"num_sampling_points": 1}, "'num_sampling_points'.* expected at least 2, got 1"),
        ({"generation": "v2"}, r"'generation' expected one of \('bootstrapped', 'v1'\), got v2"),
        ({"generation": "v1"}, "set `num_class_tokens=0`"),
        ({"pooled_class_tokens": [3]}, r"`pooled_class_tokens` is \[3\], expected indices of the 1 class tokens"),
    ],
    "patches": [
        ({"token_grid": [3, 4]}, r"`token_grid`=\(3, 4\) has 12 cells, expected `num_latent_tokens`=16"),
        ({"num_latent_tokens": 17}, "`num_latent_tokens` is 17, which makes no grid"),
    ],
    "elastic": [({"elastic_token_counts": [4, 4, 9]}, "expected increasing counts")],
    "vit_impulse_init": [({"patch_size": 5}, "Patches of `patch_size`=5 do not tile images of `image_size`=32")],
    "vit_context_broadcast": [
        ({"context_broadcast_position": ["mlp_end", "mlp_end"]}, "expected one or several different names"),
    ],
    "convmixer": [({"spatial_filters": "gabor"}, r"'spatial_filters' expected one of \('trained', .* got gabor")],
    "agent_cnn": [
        ({"downsample_after": [6]}, r"`downsample_after` is \[6\], expected blocks from 0 to 5"),
        ({"image_size": 16, "stem": "res", "downsample_after": [0, 1]}, "expected at least 32, the stride"),
    ],
    "bootstrapped_vit": [
        ({"vit": {"num_hidden_layers": 2}}, "`num_hidden_layers`=2, `agent_config` `num_hidden_layers`=3"),
        ({"sharing": "weights", "agent": {"num_positions": 9}}, "`num_attention_heads`=6.*`num_positions`=9"),
        ({"hint_layers": [0, 3]}, r"`hint_layers` is \[0, 3\], expected blocks from 0 to 2"),
    ],
}
BAD_FIELDS_OF_ALL = [
    ({"num_hidden_layers": 0}, "'num_hidden_layers'.* expected at least 1, got 0"),
    ({"image_size": [8, 8, 8]}, r"'image_size'.* expected one or two numbers, got \[8, 8, 8\]"),
    ({"hidden_size": "768"}, "'hidden_size' expected int, got str"),
    ({"num_hiden_layers": 6}, "no field `num_hiden_layers`; did you mean one of `num_hidden_layers`"),
]


@pytest.mark.parametrize("family", BAD_FIELDS)
def test_wrong_fields_of_a_family_are_refused(family):
    for fields, message in BAD_FIELDS[family]:
        with pytest.raises((StrictDataclassError, ValueError), match=f"(?s){message}"):
            MAKE[family](**fields)


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_fields_of_every_family_are_refused(kind):
    for fields, message in BAD_FIELDS_OF_ALL:
        with pytest.raises((StrictDataclassError, ValueError), match=f"(?s){message}"):
            KINDS[kind].config(**fields)


def test_assigned_fields_are_checked(tmp_path):
    """Assigning a field checks this field. Building a model or saving a configuration checks all fields together."""
    config = SparseFormerConfig(hidden_size=64, focusing_hidden_size=32)
    with pytest.raises(StrictDataclassError, match="(?s)'num_sampling_points'.* expected at least 2, got 1"):
        config.num_sampling_points = 1
    config.num_attention_heads = 5
    for use in (lambda: SparseFormerModel(config), lambda: config.save_pretrained(tmp_path / "config")):
        with pytest.raises(StrictDataclassError, match="`num_attention_heads`=5"):
            use()
    assert not list(tmp_path.glob("config/*"))


@pytest.mark.parametrize(
    ("model_class", "name", "right"),
    [
        (SparseFormerForImageClassification, "caltech101-sparseformer", "PatchSparseFormerForImageClassification"),
        (PatchSparseFormerVisionModel, "cifar10-sparseformer", "SparseFormerForImageClassification"),
    ],
)
def test_a_class_of_the_other_start_is_refused(model_class, name, right):
    """Most weights of the model would be random."""
    with pytest.raises(ValueError, match=f"`model_type` is .*; load the model by {right}, "):
        model_class.from_pretrained(checkpoint_path(name))


@pytest.mark.parametrize("kind", KINDS)
def test_variants_and_unknown_fields(kind, tmp_path):
    """Serialization keeps the fields of variants, and unknown fields such as `dataset`."""
    KINDS[kind].config(dataset="cifar10").save_pretrained(tmp_path)
    config_class = KINDS[kind].config_class
    assert config_class.from_pretrained(tmp_path).dataset == "cifar10"
    for variant in config_class.variants():
        config = config_class.from_variant(variant)
        assert config_class.from_dict(config.to_dict()).to_diff_dict() == config.to_diff_dict()
    if variant := KINDS[kind].variant:
        with pytest.raises(ValueError, match=f"variant '{variant}x'. Did you mean: .*{variant}"):
            config_class.from_variant(f"{variant}x")
