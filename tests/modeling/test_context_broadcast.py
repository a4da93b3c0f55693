"""Tests of Context Broadcasting: definitions, host models, positions, saving and loading, parameters and cost."""

import copy
import pickle

import pytest
import timm
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import frugalvit
from frugalvit import (
    ContextBroadcast,
    count_context_broadcast,
    insert_context_broadcast,
    load_context_broadcast,
    remove_context_broadcast,
)
from tiny import randomize


KINDS = ("cb", "cb_s", "cb_gate", "cb_hybrid")
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SMALL |= {"image_size": 32, "patch_size": 8}
TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
SWIN = {"embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "image_size": 32, "patch_size": 4, "window_size": 4}
TINY_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


def make_transformers(name: str, fields: dict, ending: str = "ForImageClassification"):
    config = getattr(transformers, f"{name}Config")(**fields)
    return getattr(transformers, f"{name}{ending}")(config)


def small_family(**fields) -> frugalvit.ViTContextBroadcastForImageClassification:
    config = frugalvit.ViTContextBroadcastConfig(**SMALL | {"num_labels": 3, "resize_size": None} | fields)
    return frugalvit.ViTContextBroadcastForImageClassification(config)


def small_sparseformer() -> frugalvit.SparseFormerForImageClassification:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "focusing_hidden_size": 32, "num_latent_tokens": 5}
    config = frugalvit.SparseFormerConfig(image_size=32, num_labels=3, **sizes)
    return frugalvit.SparseFormerForImageClassification(config)


def wrapped_timm() -> transformers.TimmWrapperForImageClassification:
    config = transformers.TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args=TINY_VIT)
    return transformers.TimmWrapperForImageClassification(config)


# Each value contains a function that builds a host model, and the host model's number of blocks. `test_hosts.py` has
# more host models.
HOSTS = {
    "ViT": (lambda: make_transformers("ViT", SMALL), 2),
    "Swin": (lambda: make_transformers("Swin", SWIN), 3),
    "CLIP": (lambda: make_transformers("CLIP", {"text_config": TEXT, "vision_config": SMALL}, "Model"), 2),
    "timm ViT": (lambda: timm.create_model("vit_tiny_patch16_224", num_classes=3, **TINY_VIT), 2),
    "timm in Transformers": (wrapped_timm, 2),
    "SparseFormer": (small_sparseformer, 2),
}


def make(host: str) -> nn.Module:
    torch.manual_seed(0)
    return randomize(HOSTS[host][0](), 0.2)


@torch.no_grad()
def output_of(model: nn.Module) -> torch.Tensor:
    pixel_values = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    if not isinstance(model, transformers.PreTrainedModel):
        return model(pixel_values)
    text = {"input_ids": torch.tensor([[1, 2, 3]] * 2)} if hasattr(model, "text_model") else {}
    # A SparseFormer's last block computes only [CLS] by default. `output_tokens` makes it compute all tokens.
    all_tokens = {"output_tokens": True} if hasattr(model, "sparseformer") else {}
    outputs = model(pixel_values=pixel_values, **text, **all_tokens)
    return next(outputs[name] for name in ("logits", "logits_per_image", "pooler_output") if name in outputs)


def set_scales(model: nn.Module):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "context_broadcast" in name:
                parameter += torch.linspace(-1, 1, len(parameter))


def by_hand(kind: str, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Apply Context Broadcasting to an image's tokens one by one. `x` has the shape `(tokens, channels)`."""
    mean = sum(x) / len(x)
    rows = {
        "cb": lambda token: (token + mean) / 2,
        "cb_s": lambda token: token + scale * mean,
        "cb_gate": lambda token: token * (x[0] + 1),
        "cb_hybrid": lambda token: token * x[0] + (token + mean) / 2,
    }
    return torch.stack([rows[kind](token) for token in x])


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 3), st.integers(1, 7), st.integers(1, 5), st.integers(0, 99))
def test_follows_the_definition(kind, batch, tokens, channels, seed):
    torch.manual_seed(seed)
    module, x = ContextBroadcast(kind, channels), torch.randn(batch, tokens, channels)
    if kind == "cb_s":
        nn.init.normal_(module.scale)
    torch.testing.assert_close(module(x), torch.stack([by_hand(kind, image, module.scale) for image in x]))


@pytest.mark.parametrize("kind", ["cb", "cb_s"])
def test_a_map_is_a_sequence_of_tokens(kind):
    tokens, x = randomize(ContextBroadcast(kind, 5)), torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(tokens(x), tokens(x.flatten(1, 2)).view_as(x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_blend_interpolates_between_tokens_and_broadcast_tokens(kind):
    torch.manual_seed(0)
    module, x = ContextBroadcast(kind, 4, scale_init=0.5, blend=True), torch.randn(2, 6, 4)
    assert torch.equal(module(x), x)
    module(x).square().sum().backward()
    assert module.blend.grad.abs() > 0.1
    plain = ContextBroadcast(kind, 4, scale_init=0.5)
    for share in (0.25, 1.0):
        nn.init.constant_(module.blend, share)
        torch.testing.assert_close(module(x), x + share * (plain(x) - x))


@pytest.mark.parametrize("host", HOSTS)
def test_insertion_equals_wrapping_every_mlp(host):
    """Inserted `ContextBroadcast` modules give the same outputs as wrapped MLPs. Removal restores the model."""
    model = make(host)
    before, weights = output_of(model), set(model.state_dict())
    inserted = insert_context_broadcast(model)
    assert len(inserted) == HOSTS[host][1]
    broadcast = output_of(model)
    remove_context_broadcast(model)
    assert set(model.state_dict()) == weights and torch.equal(output_of(model), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert getattr(getattr(model, "base_model", model), "skips_unread_tokens", True)
    for name in inserted:
        mlp = model.get_submodule(name.rpartition(".")[0])

        def forward(*args, original=mlp.forward):
            tokens = original(*args)
            mean = tokens.flatten(1, -2).mean(1)
            return (tokens + mean.view(len(tokens), *[1] * (tokens.ndim - 2), -1)) / 2

        mlp.forward = forward
    torch.testing.assert_close(output_of(model), broadcast, atol=1e-5, rtol=1e-5)
    assert (broadcast - before).abs().max() > 1e-3


# Swin's attention returns windows of tokens. The attention of both ViTs returns all tokens of an image together.
@pytest.mark.parametrize("host", ["ViT", "Swin", "timm ViT"])
def test_positions_and_copies(host):
    model, outputs = make(host), {}
    before = output_of(model)
    for position in ("mlp_mid", "mlp_end", "mlp_front"):
        insert_context_broadcast(model, "cb", position)
        outputs[position] = output_of(model) / before.abs().max()
        remove_context_broadcast(model)
    torch.testing.assert_close(outputs["mlp_mid"], outputs["mlp_end"], atol=1e-4, rtol=1e-4)
    assert (outputs["mlp_end"] - outputs["mlp_front"]).abs().max() > 1e-3
    inserted = insert_context_broadcast(model, "cb_s", ["mlp_end", "attention_end"])
    assert len(inserted) == 2 * HOSTS[host][1] and torch.equal(output_of(model), before)
    set_scales(model)
    after = output_of(model)
    assert (after - before).abs().max() > 1e-3
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(output_of(each), after)


@pytest.mark.parametrize(
    ("host", "options"),
    [
        ("ViT", {}),
        ("ViT", {"save_original_format": False}),
        ("ViT", {"max_shard_size": "10KB"}),
        ("CLIP", {}),
        ("timm in Transformers", {}),
        ("SparseFormer", {}),
    ],
)
def test_a_saved_host_loads_with_its_modules(host, options, tmp_path):
    """A saved host model loads as its own class. `load_context_broadcast` adds the modules and may be called twice."""
    model = make(host)
    model_class = type(model)
    insert_context_broadcast(model, "cb_s", ["mlp_mid", "attention_end"], scale_init=0.5, blend=True)
    set_scales(model)
    model.save_pretrained(tmp_path, **options)
    loaded = model_class.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model) is model_class
    assert not torch.allclose(output_of(loaded), output_of(model))
    load_context_broadcast(loaded, tmp_path)
    load_context_broadcast(loaded, tmp_path)
    assert torch.equal(output_of(loaded), output_of(model))


def test_a_family_saves_inserted_modules_in_its_configuration(tmp_path):
    model = randomize(small_family(context_broadcast=None))
    insert_context_broadcast(model, "cb_s", ["mlp_mid", "attention_end"], scale_init=0.5, blend=True)
    set_scales(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(output_of(loaded), output_of(model))
    remove_context_broadcast(loaded)
    assert loaded.config.context_broadcast is None


class TestFamily:
    def test_patch_embeddings_start_at_pytorchs_default_as_in_deit(self):
        embeddings = small_family(patch_size=4, hidden_size=192, num_attention_heads=3).vit.embeddings
        assert embeddings.patch_embeddings.projection.weight.abs().max().item() == pytest.approx(48**-0.5, rel=0.01)
        assert embeddings.position_embeddings.std() < 0.03

    @pytest.mark.parametrize(("distilled", "parameters"), [("", 5_717_416), ("-distilled", 5_910_800)])
    def test_has_as_many_parameters_as_deit(self, distilled, parameters):
        sizes = {}
        for kind in ("plain", "cb", "cb_s"):
            config = frugalvit.ViTContextBroadcastConfig.from_variant(f"vit-tiny{distilled}-{kind}-224")
            with torch.device("meta"):
                sizes[kind] = frugalvit.ViTContextBroadcastForImageClassification(config).num_parameters()
        assert sizes == {"plain": parameters, "cb": parameters, "cb_s": parameters + 12 * config.hidden_size}

    def test_without_context_broadcast_it_equals_deit(self):
        deit = transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**SMALL, num_labels=3))
        deit = randomize(deit)
        fields = {"context_broadcast": None, "use_distillation_token": True}
        model = small_family(**fields, layer_norm_eps=deit.config.layer_norm_eps).eval()
        state = deit.state_dict()
        model.load_state_dict(
            {name.replace("deit.", "vit.").replace("cls_classifier", "classifier"): state[name] for name in state}
        )
        torch.testing.assert_close(output_of(model), output_of(deit), atol=1e-5, rtol=1e-5)

    def test_a_distilled_model_has_two_heads(self):
        model = randomize(small_family(use_distillation_token=True))
        labels = torch.tensor([0, 2])
        outputs = model(torch.randn(2, 3, 32, 32), labels=labels)
        torch.testing.assert_close(outputs.logits, (outputs.cls_logits + outputs.distillation_logits) / 2)
        heads = (outputs.cls_logits, outputs.distillation_logits)
        torch.testing.assert_close(outputs.loss, sum(nn.functional.cross_entropy(each, labels) for each in heads) / 2)


@pytest.mark.parametrize(
    ("kind", "position", "millions"),
    [("cb", "mlp_end", 0.9), ("cb_gate", "mlp_mid", 3.6), ("cb_hybrid", ["mlp_end", "attention_end"], 3.6)],
)
def test_costs_are_those_of_tables_s5_and_s6(kind, position, millions):
    config = frugalvit.ViTContextBroadcastConfig.from_variant(
        "vit-small-cb-224", context_broadcast=kind, context_broadcast_position=position
    )
    with torch.device("meta"):
        model = frugalvit.ViTContextBroadcastForImageClassification(config)
    assert count_context_broadcast(model, 224) / 1e6 == pytest.approx(millions, abs=0.05)
