"""`frugalvit swap` and `swap_vision_tower`: a SparseFormer takes the place of a tower, whatever the model."""

import pytest
import torch
from frugalvit_cli import main
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForImageTextToText,
    AutoProcessor,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
)

import frugalvit
from drawn import noise
from frugalvit import (
    SparseFormerVisionModel,
    matching_processor,
    swap_vision_tower,
)
from frugalvit.common.loading import load_vision_model
from frugalvit.modeling.swap import first_layer, input_device, match_channels_, read_by_projector
from tiny import IMAGE, SMALL, make_llava, make_paligemma, make_processor, make_tower, save_to_swap


def test_the_tower_takes_the_old_ones_precision():
    llava = make_llava().to(torch.bfloat16)
    model = swap_vision_tower(llava, make_tower(make_llava()))
    tower = model.model.vision_tower
    assert tower.stem.convolution.weight.dtype == torch.bfloat16
    assert tower.latents.initial_rois.dtype == torch.float32
    inputs = {"input_ids": torch.tensor([[*[IMAGE] * 7, 3]]), "pixel_values": torch.randn(1, 3, 32, 32)}
    assert model(**inputs).logits.isfinite().all()


def test_what_does_not_fit_is_refused():
    llava = make_llava()
    tower = make_tower(llava)
    with pytest.raises(ValueError, match="Got a LlamaModel, expected a Llava"):
        swap_vision_tower(llava.model.language_model, tower)
    with pytest.raises(ValueError, match="`image_grid` is 4, .* `set_num_tokens`"):
        swap_vision_tower(llava, tower, image_grid=4)
    with pytest.raises(ValueError, match="Got a CLIPVisionModel as vision model"):
        swap_vision_tower(llava, llava.model.vision_tower)


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_command_swaps_as_the_function_does(dtype, tmp_path, capsys):
    llava = make_llava()
    command = ["swap", *save_to_swap(tmp_path, llava), "--output", str(tmp_path / "out")]
    assert main([*command, "--dtype", dtype]) == 0
    assert f"7 tokens an image instead of 64 patches, in {dtype}" in capsys.readouterr().out
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == getattr(torch, dtype)
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    inputs = processor(images=noise(), text="<image> what is this ?", return_tensors="pt")
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    expected = swap_vision_tower(llava, load_vision_model(tmp_path / "tower")[0]).to(model.dtype)
    # In half precision, RoIs were rounded at another place.
    close = {} if dtype == "float32" else {"atol": 0.02, "rtol": 0.1}
    torch.testing.assert_close(model(**inputs).logits, expected(**inputs).logits, **close)
    assert "AutoProcessor" in (tmp_path / "out" / "README.md").read_text()
    # What it is bootstrapped from is found in there.
    teacher, _ = load_vision_model(tmp_path / "llava")
    pixel_values = torch.randn(1, 3, 32, 32)
    states = make_llava().model.vision_tower(pixel_values).last_hidden_state
    torch.testing.assert_close(teacher(pixel_values).last_hidden_state, states)


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize(("bits", "layer"), [("4bit", "Linear4bit"), ("8bit", "Linear8bitLt")])
def test_the_command_writes_a_quantized_language_model(bits, layer, tmp_path, capsys):
    command = ["swap", *save_to_swap(tmp_path, make_llava())]
    assert main([*command, "--output", str(tmp_path / "plain")]) == 0
    assert main([*command, "--quantize", bits, "--output", str(tmp_path / "out")]) == 0
    assert f"its language model in {bits}" in capsys.readouterr().out
    plain, model = (AutoModelForImageTextToText.from_pretrained(tmp_path / name) for name in ("plain", "out"))
    # The language model alone.
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {name for name, kind in kinds.items() if kind == layer} == {n for n in kinds if "language_model" in n}
    inputs = AutoProcessor.from_pretrained(tmp_path / "out")(
        images=noise(), text="<image> what ?", return_tensors="pt"
    )
    # With gradients: without, bitsandbytes packs matrices for AVX-512, and these are too narrow.
    given, expected = (each(**inputs).logits.flatten().float() for each in (model, plain))
    assert torch.cosine_similarity(given, expected, dim=0) > 0.9


def test_an_output_with_something_in_it_is_refused_before_anything_is_loaded(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    command = ["swap", "--model", "nothing", "--vision-model", "nothing", "--output", str(tmp_path / "out")]
    assert main(command) == 1
    assert "exists and is not empty" in capsys.readouterr().err


def test_what_has_a_tower_of_another_kind_is_refused(tmp_path, capsys):
    make_tower(make_llava()).save_pretrained(tmp_path / "tower")
    Qwen2_5_VLConfig().save_pretrained(tmp_path / "qwen")
    command = ["swap", "--model", str(tmp_path / "qwen"), "--vision-model", str(tmp_path / "tower")]
    assert main([*command, "--output", str(tmp_path / "out")]) == 1
    message = "it is a qwen2_5_vl, expected one of llava, paligemma, gemma3"
    assert message in capsys.readouterr().err
    command[2] = str(frugalvit.checkpoint_path("cifar10-sparseformer-llava"))
    assert main([*command, "--output", str(tmp_path / "out")]) == 1
    assert "expected one of llava" in capsys.readouterr().err


@torch.no_grad()
def test_a_tower_of_another_width_and_family_has_a_new_first_layer(tmp_path):
    llava = make_llava()
    sizes = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_register_tokens": 2}
    dinov2 = Dinov2WithRegistersModel(Dinov2WithRegistersConfig(image_size=32, patch_size=4, mlp_ratio=2, **sizes))
    tower = SparseFormerVisionModel.from_teacher(dinov2.eval(), 7, **SMALL)
    with pytest.raises(ValueError, match="takes 64 channels, .* 48; .* frugalvit align-llava"):
        swap_vision_tower(llava, tower)
    model = swap_vision_tower(llava, tower, new_first_layer=True)
    projector, old = model.model.multi_modal_projector, llava.model.multi_modal_projector
    assert (projector.linear_1.in_features, old.linear_1.in_features) == (48, 64)
    assert torch.equal(projector.linear_2.weight, old.linear_2.weight)
    model.save_pretrained(tmp_path)
    processor = matching_processor(make_processor(llava), model)
    inputs = processor(images=noise(), text="<image> what is this ?", return_tensors="pt")
    # Registers are tokens, too.
    assert int((inputs["input_ids"] == IMAGE).sum()) == 7 + 2
    loaded, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


def test_a_server_builds_it_of_a_configuration_from_another_process():
    """vLLM pickles configurations by value, with copies of their classes."""
    llava = make_llava()
    model = swap_vision_tower(llava, make_tower(llava))

    class SparseFormerConfig(frugalvit.SparseFormerConfig):
        pass

    model.config.vision_config = SparseFormerConfig(**model.config.vision_config.to_dict())
    assert {*AutoModel.from_config(model.config).state_dict()} == {*model.model.state_dict()}


@pytest.mark.parametrize("make", [make_llava, make_paligemma])
@torch.no_grad()
def test_channels_are_matched(make):
    """The first layer of the projector returns the mean that it had before, and each channel its old spread."""
    original = make()
    old = original.model.multi_modal_projector
    before = {name: value.clone() for name, value in original.state_dict().items()}
    model = swap_vision_tower(original, make_tower(original))
    batches = [(torch.randn(4, 3, 32, 32), torch.randn(4, 3, 32, 32)) for _ in range(2)]
    match_channels_(model, original, batches)
    assert all(torch.equal(value, before[name]) for name, value in original.state_dict().items())
    assert model.model.multi_modal_projector is not old and not model.training

    def read(part, side):
        return torch.cat([read_by_projector(part, pair[side]).flatten(0, -2) for pair in batches])

    ours, theirs = read(model, 0), read(original, 1)
    matched = (ours - ours.mean(0)) / ours.std(0, correction=0) * theirs.std(0, correction=0) + theirs.mean(0)
    given = first_layer(model.model.multi_modal_projector)(ours)
    torch.testing.assert_close(given, first_layer(original.model.multi_modal_projector)(matched), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        given.mean(0), first_layer(original.model.multi_modal_projector)(theirs).mean(0), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(ValueError, match="There are no images to match"):
        match_channels_(model, original, [])


def test_a_projector_without_biases_cannot_match_means():
    llava = make_llava(multimodal_projector_bias=False)
    with pytest.raises(ValueError, match="The projector has no bias"):
        match_channels_(swap_vision_tower(llava, make_tower(llava)), llava, [])


@torch.no_grad()
@pytest.mark.parametrize("options", [(), ("--device-map", "auto")])
def test_the_command_matches_channels(options, tmp_path, capsys):
    llava = make_llava()
    command = ["swap", *save_to_swap(tmp_path, llava), "--output", str(tmp_path / "out"), *options]
    (tmp_path / "images").mkdir()
    for number in range(5):
        noise((40 + number, 33), number).save(tmp_path / "images" / f"{number}.png")
    assert main([*command, "--dataset", str(tmp_path / "images"), "--images", "4"]) == 0
    assert "its channels matched on 4 images" in capsys.readouterr().out
    state, old = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").state_dict(), llava.state_dict()
    changed = {
        name for name, value in state.items() if "vision_tower" not in name and not torch.equal(value, old[name])
    }
    assert changed == {f"model.multi_modal_projector.linear_1.{part}" for part in ("weight", "bias")}


PARTS = {f"model.{name}": "cpu" for name in ("vision_tower", "multi_modal_projector", "language_model")} | {
    "lm_head": "cpu"
}


LAYERS = ("embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb")


@torch.no_grad()
@pytest.mark.parametrize(
    "device_map",
    [
        # A PaliGemma's head has the weights of the embeddings.
        PARTS | {"model.language_model": "disk", "lm_head": "disk"},
        {name: place for name, place in PARTS.items() if name != "model.language_model"}
        | {f"model.language_model.{name}": "disk" if name == "layers.0" else "cpu" for name in LAYERS}
        | {"model.vision_tower": "disk"},
        {"": "disk"},
        "auto",
    ],
    ids=["language model on disk", "layers on disk", "all on disk", "auto"],
)
@pytest.mark.parametrize("make", [make_llava, make_paligemma])
@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")  # for large ones
def test_a_model_that_is_shared_out_is_swapped_as_one_that_is_not(make, device_map, tmp_path):
    original = make()
    tower = make_tower(original)
    original.save_pretrained(tmp_path / "whole")
    shared_out = type(original).from_pretrained(
        tmp_path / "whole", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    model, expected = (swap_vision_tower(each.eval(), tower) for each in (shared_out, original))
    assert input_device(model) == torch.device("cpu")
    text = torch.tensor([[IMAGE] * model.config.image_seq_length + [2, 3, 4]])
    inputs = {"input_ids": text, "attention_mask": torch.ones_like(text), "pixel_values": torch.randn(1, 3, 32, 32)}
    assert torch.equal(model(**inputs).logits, expected(**inputs).logits)
    answers = [
        each.generate(**inputs, max_new_tokens=3, do_sample=False, pad_token_id=0) for each in (model, expected)
    ]
    assert torch.equal(*answers)
    model.save_pretrained(tmp_path / "out")
    again, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(again(**inputs).logits, expected(**inputs).logits)


def test_channels_of_an_offloaded_projector_are_not_matched(tmp_path):
    make_llava().save_pretrained(tmp_path / "llava")
    llava = LlavaForConditionalGeneration.from_pretrained(
        tmp_path / "llava", device_map={"": "disk"}, offload_folder=tmp_path / "offload"
    )
    batches = [(torch.randn(1, 3, 32, 32), torch.randn(1, 3, 32, 32))]
    with pytest.raises(ValueError, match="The projector is offloaded, .* `device_map`"):
        match_channels_(swap_vision_tower(llava, make_tower(make_llava())), llava, batches)
