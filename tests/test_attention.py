"""`frugalvit attention`: the numbers are those of the maps, and the maps those of the models."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image
from transformers import (
    AutoModelForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from frugalvit import ConvMixerConfig, ConvMixerForImageClassification, ViTImpulseInitConfig, ViTImpulseInitModel
from frugalvit.attention import draw_attention, draw_entropy, measure_attention, own_start, stable_rank
from frugalvit.cli import main
from frugalvit.training import joint, train


SIZES = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def batches(count: int = 2) -> list[torch.Tensor]:
    return list(torch.randn(count, 3, 3, 32, 32, generator=torch.Generator().manual_seed(0)))


def vit(**fields) -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(image_size=32, patch_size=4, num_labels=5, **{**SIZES, **fields})
    return ViTForImageClassification(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "trained-vit"
    vit().save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


@torch.no_grad()
def test_averages_over_images_and_leaves_the_model_as_it_is():
    model, images = vit(), batches()
    statistics = measure_attention(model, images)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    outputs = model(torch.cat(images), output_attentions=True, output_hidden_states=True)
    for layer, (own, weights) in enumerate(zip(statistics, outputs.attentions, strict=True)):
        assert own.layer == layer + 1
        torch.testing.assert_close(own.maps, weights.mean(0))
        entropy = -(weights * weights.log()).sum(-1).mean((0, 2))
        torch.testing.assert_close(torch.tensor(own.entropy), entropy)
        singular = torch.linalg.svdvals(outputs.hidden_states[layer + 1])
        expected = ((singular**2).sum(1) / singular[:, 0] ** 2).mean().item()
        assert own.stable_rank == pytest.approx(expected, rel=1e-4)


def test_finds_the_impulses_of_the_initialization():
    torch.manual_seed(0)
    config = ViTImpulseInitConfig(image_size=32, patch_size=4, impulse_mass=0.8, **SIZES)
    model = ViTImpulseInitModel(config).eval()
    with torch.no_grad():
        model.embeddings.patch_embeddings.projection.weight.zero_()  # positions alone
    first = measure_attention(model, batches())[0]
    assert len(set(first.offset)) == 4 and all(abs(dy) <= 1 and abs(dx) <= 1 for dy, dx in first.offset)
    assert first.mass == pytest.approx([0.8] * 4, abs=0.1)
    uniform = measure_attention(ViTImpulseInitModel(config), batches())[0]
    assert max(first.entropy) < min(max(uniform.entropy), math.log(64))


def test_convolutional_models_have_a_stable_rank_alone():
    model = ConvMixerForImageClassification(ConvMixerConfig(hidden_size=8, num_hidden_layers=2)).eval()
    statistics = measure_attention(model, batches())
    assert len(statistics) == 2 and all(1 <= layer.stable_rank <= 8 for layer in statistics)
    assert all(layer.maps is None and not layer.entropy and not layer.mass for layer in statistics)
    with pytest.raises(ValueError, match="conv has no attention to draw"):
        draw_attention({"conv": statistics}, [1])


def test_windows_of_an_image_count_as_one():
    torch.manual_seed(0)
    config = SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4)
    model = SwinForImageClassification(config).eval()
    statistics = measure_attention(model, batches())
    for layer in statistics:
        assert all(0 < entropy <= math.log(16) + 1e-5 for entropy in layer.entropy)
        torch.testing.assert_close(layer.maps.sum(-1), torch.ones(2, 16))


def test_entropy_is_drawn(folder, tmp_path, capsys):
    file = tmp_path / "entropy.svg"
    options = ["--initialization", "impulse", "--images", "2", "--names", "mine", "--entropy", str(file)]
    assert main(["attention", str(folder), *options]) == 0
    assert "mine" in capsys.readouterr().out
    measured = {"one": measure_attention(vit(), batches())}
    axes = draw_entropy(measured).axes[0]
    mean, uniform = axes.get_lines()
    assert mean.get_ydata().tolist() == pytest.approx([np.mean(layer.entropy) for layer in measured["one"]])
    assert uniform.get_ydata()[0] == pytest.approx(math.log(65))
    dots = [value for dots in axes.collections for value in dots.get_offsets()[:, 1].tolist()]
    assert dots == pytest.approx([entropy for layer in measured["one"] for entropy in layer.entropy])
    assert file.read_text().count("<use ") > 10
    conv = ConvMixerForImageClassification(ConvMixerConfig(hidden_size=8, num_hidden_layers=2)).eval()
    with pytest.raises(ValueError, match="conv has no attention to draw"):
        draw_entropy({"conv": measure_attention(conv, batches())})


def test_stable_rank():
    assert stable_rank(torch.eye(5)).item() == pytest.approx(5)
    assert stable_rank(torch.ones(2, 4, 3)).tolist() == pytest.approx([1, 1])


def test_command_compares_initializations_with_a_trained_model(folder, tmp_path, capsys):
    arguments = ["attention", str(folder), "--initialization", "impulse", "trunc_normal", "--images", "3"]
    outputs = ["--picture", str(tmp_path / "maps.png"), "--output", str(tmp_path / "numbers.json")]
    assert main([*arguments, *outputs, "--layers", "2", "--heads", "1", "3"]) == 0
    text = capsys.readouterr().out
    for name in ("impulse, before training", "trunc_normal, before training", "trained-vit"):
        assert name in text
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["images"] == 3 and list(numbers["models"])[-1] == "trained-vit"
    masses = {name: layers[0]["mass"] for name, layers in numbers["models"].items()}
    assert min(masses["impulse, before training"]) > 3 * max(masses["trunc_normal, before training"])
    picture = np.asarray(Image.open(tmp_path / "maps.png").convert("L"))
    assert picture.std() > 10
    assert main([*arguments[:2], "--images", "1", "--seed", "1"]) == 0


def test_heads_are_averaged_over_given_images(folder, tmp_path, capsys):
    measured = {"one": measure_attention(vit(), batches())}
    maps = [axes.get_images()[0].get_array() for axes in draw_attention(measured, [1], None).axes]
    np.testing.assert_allclose(maps[0], measured["one"][0].maps.mean(0))
    for index in range(2):
        Image.new("RGB", (32, 32), (90 * index, 80, 70)).save(tmp_path / f"{index}.png")
    outputs = ["--picture", str(tmp_path / "maps.svg"), "--output", str(tmp_path / "numbers.json")]
    images = ["--image", str(tmp_path / "0.png"), str(tmp_path / "1.png"), "--average-heads"]
    assert main(["attention", str(folder), *images, *outputs]) == 0
    assert json.loads((tmp_path / "numbers.json").read_text())["images"] == 2
    assert main(["attention", str(folder), *images, *outputs, "--images", "1"]) == 0
    assert json.loads((tmp_path / "numbers.json").read_text())["images"] == 1


@pytest.mark.parametrize("recipe", ["train", "unnamed", "joint"])
def test_a_trained_model_beside_its_own_start(recipe, tmp_path, capsys):
    """Drawn again, the start is what a run that learned nothing has saved."""
    sizes = "patch_size=8,hidden_size=36,num_hidden_layers=2,intermediate_size=48"
    images = ["--train-split", "train[:64]", "--eval-split", "test[:8]", "--batch-size", "8", "--epochs", "1"]
    images += ["--steps-per-epoch", "1"]
    still = ["--learning-rate", "1e-12", "--warmup-epochs", "0", "--seed", "3", "--output", str(tmp_path / "run")]
    vit = f"image_size=32,{sizes}"
    chosen = {
        "train": ["--config-overrides", f"{vit},num_attention_heads=4", "--initialization", "mimetic"],
        "unnamed": [],
        "joint": ["--vit", vit, "--agent", sizes],
    }[recipe]
    module = joint if recipe == "joint" else train
    module.main([*images, *still, *chosen, "--mixed-precision", "no"])
    AcceleratorState._reset_state(True)
    for part in ("agent", "vit") if recipe == "joint" else ("",):
        folder = tmp_path / "run" / part
        model = AutoModelForImageClassification.from_pretrained(folder)
        start, weights = own_start(str(folder), model), model.state_dict()
        assert start.state_dict().keys() == weights.keys()
        for name, tensor in start.state_dict().items():
            # Statistics of batches are no weights.
            if "running" not in name and "num_batches" not in name:
                torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-6)
    if recipe == "train":
        assert main(["attention", str(folder), "--start", "--images", "2"]) == 0
        assert "run, at its start" in capsys.readouterr().out


def test_a_start_runs_no_code_that_the_user_does_not_trust(folder, tmp_path, monkeypatch, capsys):
    """The run.json of a folder may say that code is trusted; only the command's own option counts."""
    ran, remote, trained = tmp_path / "ran", tmp_path / "remote", tmp_path / "trained"
    remote.mkdir()
    (remote / "code.py").write_text(f"import pathlib\n\npathlib.Path({str(ran)!r}).touch()\n")
    (remote / "config.json").write_text('{"model_type": "of_its_own", "auto_map": {"AutoConfig": "code.Config"}}')
    shutil.copytree(folder, trained)
    arguments = {"model": str(remote), "trust_remote_code": True, "seed": 0}
    (trained / "run.json").write_text(json.dumps({"command": "frugalvit train --seed 0", "arguments": arguments}))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    command = ["attention", str(trained), "--start", "--images", "1"]
    assert main(command) == 1 and not ran.exists()
    assert "--trust-remote-code" in capsys.readouterr().err
    assert main([*command, "--trust-remote-code"]) == 1 and ran.exists()


def test_a_folder_within_a_run_is_not_the_run(folder, tmp_path):
    (tmp_path / "run.json").write_text('{"command": "frugalvit train --seed 0", "arguments": {"seed": 0}}')
    shutil.copytree(folder, tmp_path / "vit")
    with pytest.raises(ValueError, match="has no run.json of frugalvit train or frugalvit joint"):
        own_start(str(tmp_path / "vit"), AutoModelForImageClassification.from_pretrained(tmp_path / "vit"))


@pytest.mark.parametrize(
    "run",
    [
        *("{", "[]", "5", "[" * 100_000, '{"command": 5, "arguments": {}}', '{"arguments": {}}'),
        *(f'{{"command": "frugalvit train --seed 0", "arguments": {text}}}' for text in ("[]", "{}", '{"seed": "x"}')),
        '{"command": "frugalvit train --seed 0", "arguments": {"seed": 0, "config_overrides": 5}}',
    ],
)
def test_a_start_of_an_odd_run_is_one_line(run, folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "trained")
    (tmp_path / "trained" / "run.json").write_text(run)
    assert main(["attention", str(tmp_path / "trained"), "--start", "--images", "1"]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("frugalvit attention: error: ") and "run.json" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--start"], "has no run.json of frugalvit train or frugalvit joint, so that its start is not known"),
        (["--layers", "3"], "--layers has 3, expected 1 to 2"),
        (["--heads", "5", "--picture", "maps.png"], "trained-vit has no head 5, expected 1 to 4"),
        (["--images", "0"], "--images is 0, expected at least 1"),
        (["--picture", "maps.txt"], "expected a file name ending in"),
    ],
)
def test_bad_input(arguments, message, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["attention", str(folder), "--images", "1", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_no_images():
    with pytest.raises(ValueError, match="Got no images"):
        measure_attention(vit(), [])
