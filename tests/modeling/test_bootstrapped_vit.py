"""Tests of the joint training of a ViT and its agent CNN: loss terms, their gradients, shared weights, loading."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import compute_without_frugalvit
from transformers import AutoModelForImageClassification

from frugalvit import BootstrappedViTConfig, BootstrappedViTForImageClassification
from frugalvit.modeling import modeling_bootstrapped_vit
from frugalvit.modeling.modeling_bootstrapped_vit import hint
from tiny import randomize


SIZES = {"hidden_size": 36, "num_hidden_layers": 3, "intermediate_size": 40}
VIT = {"image_size": 32, "patch_size": 4, "num_attention_heads": 6, **SIZES}
AGENT = {"patch_size": 4, "num_positions": 6, **SIZES}
LABELS = torch.tensor([2, 0, 1])
SHARINGS = ("none", "weights")


def make_config(sharing: str = "none", vit=(), agent=(), **fields) -> BootstrappedViTConfig:
    fields = {"num_labels": 3, "image_mean": [0.4, 0.5, 0.6]} | fields
    return BootstrappedViTConfig(
        vit_config={**VIT, **dict(vit)}, agent_config={**AGENT, **dict(agent)}, sharing=sharing, **fields
    )


@pytest.fixture
def make_model():
    def make(sharing: str = "none", **fields) -> BootstrappedViTForImageClassification:
        torch.manual_seed(0)
        return randomize(BootstrappedViTForImageClassification(make_config(sharing, **fields)), 0.05)

    return make


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def trained_parameters(model: torch.nn.Module) -> set[str]:
    """Return the names of the parameters that have a nonzero gradient."""
    return {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}


class TestLoss:
    @pytest.mark.parametrize("sharing", SHARINGS)
    def test_terms_by_hand(self, sharing, make_model, images):
        model = make_model(sharing)
        outputs = model(images, labels=LABELS, hint_share=0.25)
        vit = model.vit(images, output_hidden_states=True)
        agent = model.agent(images, output_hidden_states=True)
        torch.testing.assert_close(outputs.logits, vit.logits)
        torch.testing.assert_close(outputs.agent_logits, agent.logits)

        ours, theirs = vit.logits.double() / 4, agent.logits.double() / 4
        p, q = ours.softmax(1), theirs.softmax(1)
        expected = {
            "classification": F.cross_entropy(vit.logits, LABELS),
            "agent_classification": F.cross_entropy(agent.logits, LABELS),
            # The Kullback-Leibler divergence is KL(teacher || student).
            "divergence": 16 * (q * (q.log() - p.log())).sum(1).mean(),
            "agent_divergence": 16 * (p * (p.log() - q.log())).sum(1).mean(),
        }
        weight = {"none": 1, "weights": 0.5}[sharing]
        for name, value in expected.items():
            torch.testing.assert_close(outputs.losses[name], weight * value.float())

        def standardized(features):
            features = features - features.mean(-1, keepdim=True)
            return features / (features.square().mean(-1, keepdim=True) + 1e-5).sqrt()

        hints = [
            (standardized(tokens[:, 1:]) - standardized(feature_map.flatten(2).mT)).square().mean()
            for tokens, feature_map in zip(vit.hidden_states[1:], agent.hidden_states[1:], strict=True)
        ]
        torch.testing.assert_close(outputs.losses["hints"], 0.25 * 10 * weight * torch.stack(hints))
        total = weight * sum(expected.values()) + outputs.losses["hints"].sum()
        torch.testing.assert_close(outputs.loss, total.float())

    def test_each_term_trains_one_model(self, make_model, images):
        """Each loss term trains either the ViT or the agent. The hint loss trains the ViT."""
        vit_terms = {"classification", "divergence", "hints"}
        agent_terms = {"agent_classification", "agent_divergence"}
        model = make_model()
        for name in vit_terms | agent_terms:
            model.zero_grad()
            model(images, labels=LABELS).losses[name].sum().backward()
            parts = {parameter.partition(".")[0] for parameter in trained_parameters(model)}
            assert parts == ({"vit"} if name in vit_terms else {"twin"}), name

    @settings(max_examples=40, deadline=None)
    @given(
        rows=st.integers(1, 6),
        columns=st.integers(1, 6),
        factor=st.integers(1, 4),
        longer=st.sampled_from(["tokens", "map"]),
        seed=st.integers(0, 99),
    )
    def test_the_longer_sequence_is_averaged(self, rows, columns, factor, longer, seed):
        generator = torch.Generator().manual_seed(seed)
        length = rows * columns
        short = torch.randn(2, length, 8, generator=generator)
        long = torch.randn(2, length * factor, 8, generator=generator)
        averaged = long.unflatten(1, (length, factor)).mean(2)
        expected = F.mse_loss(F.layer_norm(short, (8,)), F.layer_norm(averaged, (8,)))
        if longer == "tokens":
            loss = hint(long, short.mT.unflatten(2, (rows, columns)))
        else:
            loss = hint(short, long.mT.unflatten(2, (rows, columns * factor)))
        torch.testing.assert_close(loss, expected)

    def test_hints_see_maps_before_they_are_halved(self, monkeypatch):
        """The hint loss uses the agent's maps before downsampling, as in the reference implementation."""
        seen = []

        def record(tokens, feature_map):
            seen.append((tokens.shape[1], tuple(feature_map.shape[2:])))
            return tokens.new_zeros(())

        monkeypatch.setattr(modeling_bootstrapped_vit, "hint", record)
        for size, maps in (("small", [28, 14, 7, 7, 7, 7]), ("base", [28, 28, 14, 14, *[7] * 8])):
            with torch.device("meta"):
                config = BootstrappedViTConfig.from_variant(f"joint-{size}-res")
                model = BootstrappedViTForImageClassification(config)
                model(torch.empty(2, 3, 224, 224), labels=torch.zeros(2, dtype=torch.long))
            assert seen == [(196, (side, side)) for side in maps]
            seen.clear()


class TestSharing:
    @pytest.mark.parametrize(
        ("variant", "dropout", "branch_dropout"),
        [
            ("joint-small", 0.1, 0.0),
            ("joint-base", 0.1, 0.0),
            ("shared-small", 0.1, 0.1),
            ("shared-small-res", 0.1, 0.1),
            ("shared-base", 0.0, 0.0),
        ],
    )
    def test_dropout_of_the_reference(self, variant, dropout, branch_dropout):
        """Agents with shared weights have the ViT's dropout in residual branches, as in the authors' code."""
        agent = BootstrappedViTConfig.from_variant(variant).agent_config
        assert (agent.dropout, agent.branch_dropout) == (dropout, branch_dropout)

    def test_the_agents_loss_trains_the_vits_weights(self, make_model, images):
        model = make_model("weights")
        model(images, labels=LABELS).losses["agent_classification"].backward()
        names = {name.removeprefix("vit.vit.layers.0.") for name in trained_parameters(model) if ".layers.0." in name}
        assert {"attention.v_proj.weight", "attention.o_proj.weight", "attention.o_proj.bias"} <= names
        assert {"mlp.fc1.weight", "mlp.fc2.bias"} <= names and "attention.q_proj.weight" not in names


def test_loads_with_and_without_the_package(make_model, images, tmp_path):
    model = make_model("weights")
    model.save_pretrained(tmp_path / "model")
    expected = model(images, labels=LABELS)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    assert torch.equal(loaded(images, labels=LABELS).loss, expected.loss)
    for found in compute_without_frugalvit(
        tmp_path,
        tmp_path / "model",
        "AutoModelForImageClassification",
        {"pixel_values": images},
    ):
        assert torch.equal(found, expected.logits)
