"""What the table of token merging stands on, without the peers' code."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

import frugalvit


@pytest.fixture(scope="module")
def token_merging():
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "token_merging.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_vit(**options) -> ViTForImageClassification:
    torch.manual_seed(0)
    sizes = {"image_size": 16, "patch_size": 4, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    return ViTForImageClassification(ViTConfig(**sizes, num_hidden_layers=2, initializer_range=0.2, **options)).eval()


def test_timm_copy_gives_the_logits_of_the_shipped_teacher(token_merging):
    teacher = ViTForImageClassification.from_pretrained(frugalvit.checkpoint_path("cifar10-vit")).eval()
    vit, pixel_values = token_merging.as_timm(teacher), torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(vit(pixel_values), teacher(pixel_values).logits, rtol=0, atol=1e-4)
    assert frugalvit.count_macs(vit, 32) == frugalvit.count_macs(teacher, 32)


def test_timm_copy_without_biases(token_merging):
    token_merging.as_timm(tiny_vit(qkv_bias=False))


def test_refuses_a_copy_that_computes_something_else(token_merging):
    with pytest.raises(ValueError, match="logits that differ"):
        token_merging.as_timm(tiny_vit(hidden_act="relu"))


def test_recipe_tunes_what_a_peer_patched(token_merging, tmp_path, monkeypatch):
    package = tmp_path / "checkout" / "tome"
    package.mkdir(parents=True)
    # Stands in for ToMe: the call by which it patches a model.
    (package / "__init__.py").write_text("class patch:\n    timm = staticmethod(lambda vit: vit)\n")
    teacher = frugalvit.checkpoint_path("cifar10-vit")
    data = ["--train_split", "train[:32]", "--eval_split", "test[:8]", "--batch_size", "16", "--epochs", "1"]
    output_dir = tmp_path / "run"
    argv = ["--tome", str(package.parent), "--teacher", str(teacher), "--output_dir", str(output_dir), *data]
    token_merging.main(argv)
    vit = token_merging.as_timm(ViTForImageClassification.from_pretrained(teacher).eval())
    before = {name: tensor.clone() for name, tensor in vit.state_dict().items()}
    vit.load_state_dict(token_merging.load_last(output_dir))
    assert all(not torch.equal(before[name], tensor) for name, tensor in vit.state_dict().items())


def test_refuses_a_folder_without_the_package(token_merging, tmp_path):
    with pytest.raises(ValueError, match="no checkout with a package 'tome'"):
        token_merging.apply_tome(torch.nn.Identity(), str(tmp_path), 8)
