"""Tests of `frugalvit convert`."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

from frugalvit import SparseFormerConfig, SparseFormerProjectionConfig, SparseFormerVisionModelWithProjection
from frugalvit.convert import main
from frugalvit.modeling.conversion import (
    config_from_showlab,
    convert_showlab,
    infer_showlab_variant,
    our_name,
    showlab_model_class,
)


FIXTURES = {
    name: Path(__file__).parent / f"fixtures/sparseformer_{name}.safetensors" for name in ("v1", "bootstrapped")
}
COMPLETE = {"README.md", "config.json", "model.safetensors", "modeling_sparseformer.py", "preprocessor_config.json"}


def checkpoint_of(variant: str) -> dict[str, torch.Tensor]:
    tensors = load_file(FIXTURES[variant.removesuffix("-clip")])
    state_dict = {name.removeprefix("state."): tensor for name, tensor in tensors.items() if name.startswith("state.")}
    if variant == "bootstrapped-clip":
        del state_dict["proj.bias"]
    return state_dict


def config_class(variant: str) -> type:
    return SparseFormerProjectionConfig if variant.startswith("clip") else SparseFormerConfig


def to_showlab(model) -> dict[str, torch.Tensor]:
    """Return a model's weights with the parameter names of the reference implementation."""
    weights = model.state_dict()
    names = list(checkpoint_of("v1" if model.config.is_v1 else "bootstrapped"))
    # The fixtures have few blocks, but variants have more. Names for further blocks are copied from the last block of
    # the fixture, and only the block's number is replaced.
    last = max(name.split(".")[1] for name in names if name.startswith("layers."))
    block = [name.partition(f"layers.{last}.")[2] for name in names if name.startswith(f"layers.{last}.")]
    names += [f"layers.{index}.{name}" for index in range(int(last) + 1, 60) for name in block]
    state_dict = {}
    for theirs in names:
        ours = our_name(theirs, model.config)
        if ours.replace("qkv", "q") not in weights:
            continue
        if "qkv_proj" in ours:
            state_dict[theirs] = torch.cat([weights[ours.replace("qkv", letter)] for letter in "qkv"])
        elif ours.endswith("point_bias"):
            state_dict[theirs] = weights[ours].squeeze(-1)
        else:
            state_dict[theirs] = weights[ours]
    return state_dict


def run(checkpoint, output, *arguments):
    main([str(checkpoint), "--output", str(output), *map(str, arguments)])


class TestInference:
    @pytest.mark.parametrize(
        "name", ["v1-tiny", "augreg-base-80-320", "augreg-base-49-224-untruncated", "clip-large-144-336"]
    )
    def test_variants_of_the_papers(self, name):
        """The configuration that is inferred from a variant's weights equals the variant's configuration."""
        expected = config_class(name).from_variant(name)
        with torch.device("meta"):
            state_dict = to_showlab(showlab_model_class(expected)(expected))
        config = config_from_showlab(state_dict, image_size=expected.image_size)
        assert config.to_dict() == expected.to_dict()
        kinds = {"v1": "v1", "augreg": "bootstrapped", "clip": "bootstrapped-clip"}
        assert infer_showlab_variant(state_dict) == kinds[name.split("-")[0]]

    def test_one_focusing_iteration(self):
        """A checkpoint with one focusing iteration has no stage embedding."""
        expected = SparseFormerConfig.from_variant("augreg-base-49-224", num_focusing_iterations=1)
        with torch.device("meta"):
            state_dict = to_showlab(showlab_model_class(expected)(expected))
        assert "layers.0.stage_embedding.weight" not in state_dict
        config = config_from_showlab(state_dict)
        assert config.to_dict() == expected.to_dict()
        assert convert_showlab(state_dict, config).keys() == showlab_model_class(config)(config).state_dict().keys()
        with pytest.raises(ValueError, match="`iterations` is 4, expected 1"):
            config_from_showlab(state_dict, iterations=4)


class TestCommand:
    @pytest.mark.parametrize(("variant", "suffix"), [("v1", ".safetensors"), ("bootstrapped", ".pth")])
    @torch.no_grad()
    def test_classifiers(self, tmp_path, capsys, variant, suffix):
        source = tmp_path / f"checkpoint{suffix}"
        if suffix == ".pth":
            torch.save({"model": checkpoint_of(variant)}, source)
        else:
            save_file(checkpoint_of(variant), source)
        out = tmp_path / "deep" / "out"
        run(source, out, *([] if suffix == ".pth" else ["--variant", variant]))

        printed = capsys.readouterr().out
        assert {"v1": "596,002", "bootstrapped": "813,294"}[variant] in printed
        assert {path.name for path in out.iterdir()} >= COMPLETE
        assert [path.name for path in out.parent.iterdir()] == ["out"]

        reference = load_file(FIXTURES[variant])
        model, info = AutoModelForImageClassification.from_pretrained(out, output_loading_info=True)
        assert not any(info.values())
        torch.testing.assert_close(model(reference["input"]).logits, reference["logits"], atol=1e-5, rtol=0)
        tokens = AutoModel.from_pretrained(out)(reference["input"]).last_hidden_state
        torch.testing.assert_close(tokens, reference["token_embedding"], atol=1e-5, rtol=0)

    @torch.no_grad()
    def test_clip(self, tmp_path, capsys):
        save_file(checkpoint_of("bootstrapped-clip"), tmp_path / "clip.safetensors")
        run(tmp_path / "clip.safetensors", tmp_path / "out")
        assert "projection to 10" in capsys.readouterr().out
        config = AutoConfig.from_pretrained(tmp_path / "out")
        assert config.architectures == ["SparseFormerVisionModelWithProjection"]
        assert (config.projection_dim, config.hidden_act) == (10, "quick_gelu")
        # The fixture's logits come from a classifier with GELU and a bias. A projection has no bias, so the bias is
        # subtracted from these logits.
        model = SparseFormerVisionModelWithProjection.from_pretrained(tmp_path / "out", hidden_act="gelu")
        reference = load_file(FIXTURES["bootstrapped"])
        expected = reference["logits"] - reference["state.proj.bias"]
        torch.testing.assert_close(model(reference["input"]).image_embeds, expected, atol=1e-5, rtol=0)


REFUSED = {
    # Each value holds a checkpoint, command arguments, and a part of the expected error message.
    "bootstrapped as v1": (checkpoint_of("bootstrapped"), ["--variant", "v1"], "does not fit a v1 SparseFormer"),
    "objects": ({"model": Path("x")}, [], "Cannot read tensors"),
}


@pytest.mark.parametrize(("content", "arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_other_checkpoints_are_refused(tmp_path, content, arguments, message):
    torch.save(content, tmp_path / "checkpoint.pth")
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "checkpoint.pth", tmp_path / "out", *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pth"]
