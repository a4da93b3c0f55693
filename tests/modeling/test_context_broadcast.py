"""Context Broadcasting: the definitions, every host, saving and loading, what the positions do, what it costs."""

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
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
PYRAMID = {
    "depths": [1] * 4,
    "hidden_sizes": [8, 8, 16, 16],
    "num_attention_heads": [1, 1, 2, 2],
    "sr_ratios": [2, 2, 1, 1],
    "mlp_ratios": [2] * 4,
    "image_size": 64,
}
SWIN = {"embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "image_size": 32, "patch_size": 4, "window_size": 4}


def of_transformers(name: str, fields: dict, ending: str = "ForImageClassification"):
    config = getattr(transformers, f"{name}Config")(**fields)
    return getattr(transformers, f"{name}{ending}")(config)


def of_timm(name: str, **options):
    return timm.create_model(name, num_classes=3, **options)


TINY_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
# Name -> how to make it, and places at the end of an MLP. tests/modeling/test_hosts.py has more.
HOSTS = {
    "ViT": (lambda: of_transformers("ViT", SMALL), 2),
    "Dinov2 SwiGLU": (lambda: of_transformers("Dinov2", {**SMALL, "use_swiglu_ffn": True}, "Model"), 2),
    "Swin": (lambda: of_transformers("Swin", SWIN), 3),
    "PVT": (lambda: of_transformers("Pvt", {**PYRAMID, "patch_sizes": [4, 2, 2, 2], "strides": [4, 2, 2, 2]}), 4),
    "PVTv2": (lambda: of_transformers("PvtV2", PYRAMID), 4),
    "CLIP": (lambda: of_transformers("CLIP", {"text_config": TEXT, "vision_config": SMALL}, "Model"), 2),
    "timm ViT": (lambda: of_timm("vit_tiny_patch16_224", **TINY_VIT), 2),
    "timm Swin": (
        lambda: of_timm(
            "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=8, depths=(2, 1), num_heads=(2, 2)
        ),
        3,
    ),
    "timm SwinV2": (
        lambda: of_timm(
            "swinv2_tiny_window8_256", img_size=32, window_size=4, embed_dim=8, depths=(2, 1), num_heads=(2, 2)
        ),
        3,
    ),
    "timm PVTv2": (lambda: of_timm("pvt_v2_b0", depths=(1,) * 4, embed_dims=(8,) * 4, num_heads=(1,) * 4), 4),
    "timm in Transformers": (
        lambda: transformers.TimmWrapperForImageClassification(
            transformers.TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args=TINY_VIT)
        ),
        2,
    ),
    "ViTImpulseInit": (lambda: frugalvit.ViTImpulseInitForImageClassification(small_impulse()), 2),
    "ViTContextBroadcast": (lambda: small_family(context_broadcast=None), 2),
    "SparseFormer": (lambda: frugalvit.SparseFormerForImageClassification(small_sparseformer()), 2),
}


def small_impulse() -> frugalvit.ViTImpulseInitConfig:
    return frugalvit.ViTImpulseInitConfig(**{**SMALL, "num_attention_heads": 1}, num_labels=3)


def small_family(**fields) -> frugalvit.ViTContextBroadcastForImageClassification:
    config = frugalvit.ViTContextBroadcastConfig(**{**SMALL, "num_labels": 3, "resize_size": None, **fields})
    return frugalvit.ViTContextBroadcastForImageClassification(config)


def small_sparseformer() -> frugalvit.SparseFormerConfig:
    return frugalvit.SparseFormerConfig(
        image_size=32, num_latent_tokens=5, hidden_size=64, num_hidden_layers=2, focusing_hidden_size=32, num_labels=3
    )


def make(host: str) -> nn.Module:
    torch.manual_seed(0)
    return randomize(HOSTS[host][0](), 0.2)


@torch.no_grad()
def output_of(model: nn.Module) -> torch.Tensor:
    size = 64 if "PVT" in type(model).__name__.upper() or "PyramidVision" in type(model).__name__ else 32
    pixel_values = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    if not isinstance(model, transformers.PreTrainedModel):
        return model(pixel_values)
    text = {"input_ids": torch.tensor([[1, 2, 3]] * 2)} if hasattr(model, "text_model") else {}
    # Of all tokens, with Context Broadcasting and without.
    whole = {"output_tokens": True} if hasattr(model, "sparseformer") else {}
    outputs = model(pixel_values=pixel_values, **text, **whole)
    names = ("logits", "logits_per_image", "image_embeds", "pooler_output")
    return next(outputs[name] for name in names if name in outputs)


def set_scales(model: nn.Module):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "context_broadcast" in name:
                parameter += torch.linspace(-1, 1, len(parameter))


def brute_force(kind: str, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Tokens `(tokens, channels)`, one by one."""
    mean = sum(x) / len(x)
    return torch.stack(
        [
            {
                "cb": lambda i=i: (x[i] + mean) / 2,
                "cb_s": lambda i=i: x[i] + scale * mean,
                "cb_gate": lambda i=i: x[i] * (x[0] + 1),
                "cb_hybrid": lambda i=i: x[i] * x[0] + (x[i] + mean) / 2,
            }[kind]()
            for i in range(len(x))
        ]
    )


class TestDefinition:
    @settings(max_examples=40, deadline=None)
    @given(
        kind=st.sampled_from(KINDS),
        batch=st.integers(1, 3),
        tokens=st.integers(1, 7),
        channels=st.integers(1, 5),
        seed=st.integers(0, 99),
    )
    def test_tokens(self, kind, batch, tokens, channels, seed):
        torch.manual_seed(seed)
        module, x = ContextBroadcast(kind, channels), torch.randn(batch, tokens, channels)
        if kind == "cb_s":
            nn.init.normal_(module.scale)
        expected = torch.stack([brute_force(kind, image, module.scale) for image in x])
        torch.testing.assert_close(module(x), expected)

    @pytest.mark.parametrize("kind", ["cb", "cb_s"])
    @pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
    def test_maps(self, kind, data_format):
        module = randomize(ContextBroadcast(kind, 5, data_format))
        x = torch.randn(2, 3, 4, 5)
        tokens = ContextBroadcast(kind, 5)
        tokens.load_state_dict(module.state_dict())
        expected = tokens(x.flatten(1, 2)).view_as(x)
        given = x if data_format == "channels_last" else x.permute(0, 3, 1, 2)
        output = module(given)
        torch.testing.assert_close(output if data_format == "channels_last" else output.permute(0, 2, 3, 1), expected)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_blend_leads_from_the_tokens_to_what_the_kind_makes_of_them(self, kind):
        torch.manual_seed(0)
        module, x = ContextBroadcast(kind, 4, scale_init=0.5, blend=True), torch.randn(2, 6, 4)
        assert torch.equal(module(x), x)
        nn.init.constant_(module.blend, 9)
        module.reset_parameters()
        assert torch.equal(module(x), x)
        module(x).square().sum().backward()
        assert module.blend.grad.abs() > 0.1
        if kind == "cb_s":
            # With a scale of 0 it starts so, too.
            scaled = ContextBroadcast(kind, 4)
            assert torch.equal(scaled(x), x)
            scaled(x).square().sum().backward()
            assert scaled.scale.grad.abs().min() > 0.01
        plain = ContextBroadcast(kind, 4, scale_init=0.5)
        for share in (0.25, 1.0):
            nn.init.constant_(module.blend, share)
            torch.testing.assert_close(module(x), x + share * (plain(x) - x))

    def test_the_scale_starts_where_it_is_told_to(self):
        model = small_family(context_broadcast="cb_s", context_broadcast_scale_init=0.1)
        assert torch.equal(model.vit.layers[1].mlp.context_broadcast_out.scale, torch.full((16,), 0.1))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kind": "cbs"}, "`kind` is 'cbs', expected one of 'cb', 'cb_s'"),
            ({"kind": "cb_s", "hidden_size": 4, "blend": True}, "never learns"),
        ],
    )
    def test_bad_input(self, options, message):
        with pytest.raises(ValueError, match=message):
            ContextBroadcast(**options)


@pytest.mark.parametrize("host", HOSTS)
def test_is_what_one_would_write_by_hand(host):
    """The end of every MLP, by wrapping its forward; afterwards the model is as it was."""
    model = make(host)
    before, weights = output_of(model), set(model.state_dict())
    inserted = insert_context_broadcast(model)
    assert len(inserted) == HOSTS[host][1]
    assert all(isinstance(model.get_submodule(name), ContextBroadcast) for name in inserted)
    broadcast = output_of(model)
    remove_context_broadcast(model)
    assert set(model.state_dict()) == weights and torch.equal(output_of(model), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for name in inserted:
        mlp = model.get_submodule(name.rpartition(".")[0])

        def forward(*args, original=mlp.forward):
            tokens = original(*args)
            mean = tokens.flatten(1, -2).mean(1)
            return (tokens + mean.view(len(tokens), *[1] * (tokens.ndim - 2), -1)) / 2

        mlp.forward = forward
    torch.testing.assert_close(output_of(model), broadcast, atol=1e-5, rtol=1e-5)
    assert (broadcast - before).abs().max() > 1e-3


# How blocks are found differs from host to host, what is done with them does not.
@pytest.mark.parametrize("host", ["ViT", "Swin", "timm ViT"])
class TestInserted:
    def test_copies_have_it(self, host):
        model = make(host)
        before = output_of(model)
        inserted = insert_context_broadcast(model, "cb_s", ["mlp_end", "attention_end"])
        assert len(inserted) == 2 * HOSTS[host][1]
        assert torch.equal(output_of(model), before)  # scales of 0
        set_scales(model)
        after = output_of(model)
        assert (after - before).abs().max() > 1e-3
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        remove_context_broadcast(model)
        for each in copies:
            assert torch.equal(output_of(each), after)
        insert_context_broadcast(model, blend=True)
        assert torch.equal(output_of(model), before)

    def test_end_of_the_mlp_equals_its_middle(self, host):
        model, outputs = make(host), {}
        before = output_of(model)
        for position in ("mlp_mid", "mlp_end", "mlp_front"):
            insert_context_broadcast(model, "cb", position)
            outputs[position] = output_of(model) / before.abs().max()
            remove_context_broadcast(model)
        torch.testing.assert_close(outputs["mlp_mid"], outputs["mlp_end"], atol=1e-4, rtol=1e-4)
        assert (outputs["mlp_end"] - outputs["mlp_front"]).abs().max() > 1e-3


@pytest.mark.parametrize("original", [True, False], ids=["older names", "names"])
@pytest.mark.parametrize("host", ["ViT", "Swin", "CLIP", "timm in Transformers", "ViTImpulseInit", "SparseFormer"])
def test_is_loaded_again(host, original, tmp_path):
    """The host keeps its class; what was inserted is noted, and comes back when it is asked for."""
    model = make(host)
    model_class = type(model)
    insert_context_broadcast(model, "cb_s", ["mlp_mid", "attention_end"], scale_init=0.5, blend=True)
    set_scales(model)
    model.save_pretrained(tmp_path, save_original_format=original)
    loaded = model_class.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model) is model_class
    assert not torch.allclose(output_of(loaded), output_of(model))
    load_context_broadcast(loaded, tmp_path)
    load_context_broadcast(loaded, tmp_path)  # once
    assert torch.equal(output_of(loaded), output_of(model))


def test_a_family_builds_what_was_inserted(tmp_path):
    model = randomize(small_family(context_broadcast=None))
    insert_context_broadcast(model, "cb_s", ["mlp_mid", "attention_end"], scale_init=0.5, blend=True)
    set_scales(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(output_of(loaded), output_of(model))
    remove_context_broadcast(loaded)
    assert loaded.config.context_broadcast is None


class TestPlaces:
    def test_attention_within_windows_is_put_together_first(self):
        model = make("Swin")
        insert_context_broadcast(model, "cb", "attention_end")
        inserted = output_of(model)
        remove_context_broadcast(model)

        class Mean(nn.Module):
            def forward(self, tokens):
                assert tokens.shape[:2] in ((2, 64), (2, 16))
                return (tokens + tokens.mean(1, keepdim=True)) / 2

        for stage in model.swin.encoder.layers:
            for block in stage.blocks:
                block.drop_path = Mean()
        torch.testing.assert_close(output_of(model), inserted)

    @torch.no_grad()
    def test_of_all_tokens_of_a_sparseformer(self):
        """Without, its last block computes [CLS] alone."""
        model = make("SparseFormer")
        insert_context_broadcast(model)
        images = torch.randn(1, 3, 32, 32)
        torch.testing.assert_close(model(images).logits, model(images, output_tokens=True).logits)

    @pytest.mark.parametrize(("host", "part"), [("CLIP", "vision_model."), ("SparseFormer", "sparseformer.layers.")])
    def test_only_the_image_side_and_the_blocks(self, host, part):
        assert all(name.startswith(part) for name in insert_context_broadcast(make(host)))

    def test_of_a_llava_only_the_tower(self, tmp_path):
        text = transformers.LlamaConfig(**{**TEXT, "num_key_value_heads": 2})
        vision = transformers.CLIPVisionConfig(**SMALL)
        config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=4)
        torch.manual_seed(0)
        model = randomize(transformers.AutoModelForImageTextToText.from_config(config))
        inserted = insert_context_broadcast(model)
        assert len(inserted) == 2 and all(name.startswith("model.vision_tower.") for name in inserted)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
        load_context_broadcast(loaded, tmp_path)
        pixel_values = torch.randn(1, 3, 32, 32)
        with torch.no_grad():
            features = [each.get_image_features(pixel_values).pooler_output[0] for each in (model, loaded)]
        torch.testing.assert_close(*features)

    @pytest.mark.parametrize(
        ("host", "arguments", "message"),
        [
            ("ViT", {"position": "mlp"}, "`position` is 'mlp', expected one or several different ones of 'mlp_front'"),
            ("ViT", {"position": ["mlp_end", "mlp_end"]}, "several different ones"),
            ("ViT", {"position": []}, "expected one or several"),
            ("ViT", {"kind": "cbs"}, "`kind` is 'cbs'"),
            ("Swin", {"kind": "cb_gate"}, "needs a class token in front of the tokens"),
        ],
    )
    def test_bad_input_leaves_the_model_alone(self, host, arguments, message):
        model = make(host)
        before = output_of(model)
        with pytest.raises(ValueError, match=message):
            insert_context_broadcast(model, **arguments)
        assert torch.equal(output_of(model), before)
        insert_context_broadcast(model)
        with pytest.raises(ValueError, match="already has Context Broadcasting"):
            insert_context_broadcast(model)

    def test_models_without_known_blocks(self):
        with pytest.raises(ValueError, match="ResNet has no blocks"):
            insert_context_broadcast(timm.create_model("resnet10t"))

    def test_no_gate_where_the_class_token_comes_later(self):
        model = timm.create_model("cait_xxs24_224")
        with pytest.raises(ValueError, match="needs a class token"):
            insert_context_broadcast(model, "cb_gate")
        insert_context_broadcast(model, "cb")


@pytest.mark.parametrize(("host", "kind"), [*(("ViT", kind) for kind in KINDS), ("timm ViT", "cb")])
def test_compiles_in_one_graph(host, kind):
    model = make(host)
    insert_context_broadcast(model, kind, ["mlp_mid", "mlp_end", "attention_end"])
    compiled = copy.deepcopy(model)
    compiled.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(output_of(compiled), output_of(model))


class TestGradients:
    """Case 1 of the supplement (2.6): weights get gradients in every position, but along different paths."""

    def gradients(self, position: str, of_token: int, to_token: int) -> list[torch.Tensor]:
        """Gradients of the loss of one token by the weights of an MLP, as they act on another token alone."""
        torch.manual_seed(0)
        first, second, broadcast = nn.Linear(4, 8), nn.Linear(8, 4), ContextBroadcast()
        copies = [copy.deepcopy((first, second)) for _ in range(3)]  # of a token each
        x = torch.randn(1, 3, 4)
        x = broadcast(x) if position == "front" else x
        hidden = [torch.nn.functional.gelu(copies[token][0](x[:, token])) for token in range(3)]
        hidden = torch.stack(hidden, 1)
        hidden = broadcast(hidden) if position == "mid" else hidden
        output = torch.stack([copies[token][1](hidden[:, token]) for token in range(3)], 1)
        output = broadcast(output) if position == "end" else output
        weights = [copies[to_token][0].weight, copies[to_token][1].weight]
        gradients = torch.autograd.grad(output[:, of_token].square().sum(), weights, allow_unused=True)
        return [torch.zeros(1) if gradient is None else gradient for gradient in gradients]

    @pytest.mark.parametrize("position", ["front", "mid", "end"])
    def test_weights_get_gradients_wherever_it_stands(self, position):
        assert all(gradient.any() for gradient in self.gradients(position, 0, 0))

    def test_at_the_front_only_through_the_token_itself(self):
        assert not any(gradient.any() for gradient in self.gradients("front", 0, 1))
        assert all(gradient.any() for gradient in self.gradients("end", 0, 1))


class TestFamily:
    def test_patches_start_at_pytorchs_default_as_deits_do(self):
        model = small_family(patch_size=4, hidden_size=192, num_attention_heads=3)
        embeddings = model.vit.embeddings
        weight = embeddings.patch_embeddings.projection.weight
        assert weight.abs().max().item() == pytest.approx(48**-0.5, rel=0.01)
        assert embeddings.position_embeddings.std() < 0.03 and model.vit.layers[0].mlp.fc1.weight.std() < 0.03
        tokens = embeddings.patch_embeddings(torch.randn(8, 3, 32, 32))
        assert tokens.square().mean().sqrt().item() == pytest.approx(3**-0.5, rel=0.1)

    @pytest.mark.parametrize(
        ("variant", "name", "parameters"),
        [
            ("vit-tiny-plain-224", "deit_tiny_patch16_224", 5_717_416),
            ("vit-small-plain-224", "deit_small_patch16_224", 22_050_664),
            ("vit-base-plain-224", "deit_base_patch16_224", 86_567_656),
            ("vit-tiny-distilled-plain-224", "deit_tiny_distilled_patch16_224", 5_910_800),
            ("vit-small-distilled-plain-224", "deit_small_distilled_patch16_224", 22_436_432),
            ("vit-base-distilled-plain-224", "deit_base_distilled_patch16_224", 87_338_192),
        ],
    )
    def test_counts_are_deits(self, variant, name, parameters):
        with torch.device("meta"):
            sizes = {}
            for kind in ("plain", "cb", "cb_s"):
                config = frugalvit.ViTContextBroadcastConfig.from_variant(variant.replace("plain", kind))
                model = frugalvit.ViTContextBroadcastForImageClassification(config)
                sizes[kind] = model.num_parameters()
            assert sum(p.numel() for p in timm.create_model(name).parameters()) == parameters
        assert sizes["plain"] == sizes["cb"] == parameters
        assert sizes["cb_s"] == parameters + 12 * config.hidden_size

    @pytest.mark.parametrize("distilled", [False, True])
    def test_is_deit(self, distilled):
        torch.manual_seed(0)
        name = f"deit_tiny{'_distilled' * distilled}_patch16_224"
        theirs = randomize(of_timm(name, **TINY_VIT))
        ours = small_family(context_broadcast=None, use_distillation_token=distilled, intermediate_size=64).eval()
        renamed = {
            "cls_token": "embeddings.cls_token",
            "dist_token": "embeddings.distillation_token",
            "pos_embed": "embeddings.position_embeddings",
            "patch_embed.proj": "embeddings.patch_embeddings.projection",
            "blocks": "layers",
            "norm1": "layernorm_before",
            "norm2": "layernorm_after",
            "attn.proj": "attention.o_proj",
            "norm": "layernorm",
        }
        weights = {}
        for key, tensor in theirs.state_dict().items():
            if key.startswith("head"):
                key = key.replace("head_dist", "distillation_classifier").replace("head", "classifier")
                weights[key] = tensor
                continue
            for old, new in renamed.items():
                if old != "norm" or key.startswith("norm."):
                    key = key.replace(f"{old}.", f"{new}.") if f"{old}." in key else key.replace(old, new, key == old)
            if "attn.qkv" in key:
                for part, value in zip("qkv", tensor.chunk(3), strict=True):
                    weights["vit." + key.replace("attn.qkv", f"attention.{part}_proj")] = value
            else:
                weights[f"vit.{key}"] = tensor
        ours.load_state_dict(weights)
        torch.testing.assert_close(output_of(ours), output_of(theirs), atol=1e-5, rtol=1e-5)
        insert_context_broadcast(theirs, "cb_gate")
        insert_context_broadcast(ours, "cb_gate")
        torch.testing.assert_close(output_of(ours), output_of(theirs), atol=1e-5, rtol=1e-5)

    def test_a_distilled_model_has_two_heads(self):
        model = randomize(small_family(use_distillation_token=True))
        pixel_values, labels = torch.randn(2, 3, 32, 32), torch.tensor([0, 2])
        outputs = model(pixel_values, labels=labels)
        torch.testing.assert_close(outputs.logits, (outputs.cls_logits + outputs.distillation_logits) / 2)
        losses = [
            nn.functional.cross_entropy(each, labels) for each in (outputs.cls_logits, outputs.distillation_logits)
        ]
        torch.testing.assert_close(outputs.loss, sum(losses) / 2)
        plain = small_family()(pixel_values)
        assert plain.cls_logits is None and plain.distillation_logits is None

    def test_takes_images_of_other_sizes(self):
        model = randomize(small_family())
        images = torch.randn(1, 3, 48, 32)
        with pytest.raises(ValueError, match="Got images of 48 x 32 pixels, expected 32 x 32"):
            model(images)
        assert model(images, interpolate_pos_encoding=True).logits.shape == (1, 3)


class TestCosts:
    @pytest.mark.parametrize(
        ("kind", "position", "millions"),
        [
            ("cb", "mlp_end", 0.9),
            ("cb", "mlp_front", 0.9),
            ("cb", "mlp_mid", 3.6),
            ("cb", "attention_end", 0.9),
            ("cb", ["mlp_end", "attention_end"], 1.8),
            ("cb_gate", "mlp_mid", 3.6),
            ("cb_hybrid", "mlp_end", 1.8),
            ("cb_hybrid", "mlp_mid", 7.3),
            ("cb_hybrid", ["mlp_end", "attention_end"], 3.6),
        ],
    )
    def test_are_those_of_tables_s5_and_s6(self, kind, position, millions):
        config = frugalvit.ViTContextBroadcastConfig.from_variant(
            "vit-small-cb-224", context_broadcast=kind, context_broadcast_position=position
        )
        with torch.device("meta"):
            model = frugalvit.ViTContextBroadcastForImageClassification(config)
        assert count_context_broadcast(model, 224) / 1e6 == pytest.approx(millions, abs=0.05)

    def test_a_model_without_has_none(self):
        assert count_context_broadcast(make("ViT"), 32) == 0
