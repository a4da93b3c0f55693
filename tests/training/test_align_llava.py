"""A LLaVA learns to read a SparseFormer, from its own answers or from conversations."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, Dinov2Config, Dinov2Model

from frugalvit import SparseFormerVisionModel
from frugalvit.cli import main
from frugalvit.common import conversations
from frugalvit.common.loading import load_llava
from frugalvit.training import align_llava
from frugalvit.training.components.answers import Answers, answer
from frugalvit.training.trainer import Progress
from tiny import SMALL, make_llava, make_paligemma, make_paligemma_processor, save_to_swap


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of a LLaVA and of a tower for it."""
    folder = tmp_path_factory.mktemp("pair")
    save_to_swap(folder, make_llava(), elastic_token_counts=[4, 7])
    return folder


@pytest.fixture
def align(pair, tmp_path):
    models = ["--model", str(pair / "llava"), "--vision-model", str(pair / "tower"), "--prompt", "{image}{question}"]

    def run(*arguments, name="out", train=128, models=models):
        argv = [*models, "--output", str(tmp_path / name)]
        if "--dataset" not in arguments:
            argv += ["--train-split", f"train[:{train}]", "--eval-split", "test[:32]"]
        argv += ["--questions", "what is this ?", "is dog and cat ?"]
        align_llava.main([*argv, "--answer-tokens", "2", "--learning-rate", "3e-3", *arguments])
        return json.loads((tmp_path / name / "results.json").read_text(encoding="utf-8"))

    return run


@pytest.mark.parametrize("make", [make_llava, make_paligemma])
def test_the_projector_alone_learns_to_give_the_same_answers(make, align, tmp_path, capsys):
    original = make()
    models = save_to_swap(tmp_path, original)
    if make is make_llava:
        # A PaliGemma's is known.
        models += ["--prompt", "{image}{question}"]
    results = align("--epochs", "3", models=models)
    before = float(capsys.readouterr().out.split("Before: ")[1].split("%")[0]) / 100
    assert results["best"]["agreement"] > before + 0.1
    assert results["epochs"][-1]["train_loss"] < 0.6 * results["epochs"][0]["train_loss"]
    model, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    old = original.state_dict()
    for name, value in model.state_dict().items():
        if "vision_tower" not in name:
            assert torch.equal(value, old[name]) == ("projector" not in name), name
    card = ModelCard.load(tmp_path / "out" / "README.md")
    kind = original.config.model_type
    assert f"{kind} with 7 tokens an image, those of tower; the projector learned from answers" in card.text
    assert str(tmp_path) not in card.text.partition("Made by")[0]
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    image = Image.effect_noise((48, 40), 90).convert("RGB")
    exec(code.replace("path/or/id", str(tmp_path / "out")), {"image": image})
    assert capsys.readouterr().out.strip()
    assert f"\n{model.num_parameters():,} parameters" in card.text
    if make is make_llava:
        assert AutoProcessor.from_pretrained(tmp_path / "out").num_latent_tokens == 7
    # What is kept is what learns.
    (newest,) = (tmp_path / "out" / "checkpoints").glob("step-00000012")
    assert (newest / "model.safetensors").stat().st_size < 20_000


def test_a_tower_of_another_family_has_a_new_first_layer(align, tmp_path, capsys):
    sizes = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    dinov2 = Dinov2Model(Dinov2Config(image_size=32, patch_size=4, mlp_ratio=2, **sizes)).eval()
    SparseFormerVisionModel.from_teacher(dinov2, 7, **SMALL).save_pretrained(tmp_path / "dinov2")
    results = align("--vision-model", str(tmp_path / "dinov2"), "--epochs", "2")
    assert "first layer is new: the tower has 48 channels, the old one 64" in capsys.readouterr().out
    assert results["epochs"][-1]["train_loss"] < results["epochs"][0]["train_loss"]
    model, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()) and model.model.multi_modal_projector.linear_1.in_features == 48
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "the projector, its first layer a new one, learned from answers" in card


def test_a_run_that_was_stopped_goes_on(align, tmp_path):
    arguments = ("--epochs", "2", "--batch-size", "16", "--train-split", "train[:64]")
    whole = align(*arguments, name="whole")

    def stop(self, args, state, control, **_):
        if state.global_step == 6:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Progress, "on_step_begin", stop)
        align(*arguments)
    again = align(*arguments)
    assert [epoch["train_loss"] for epoch in again["epochs"]] == [epoch["train_loss"] for epoch in whole["epochs"]]
    files = [tmp_path / name / "model.safetensors" for name in ("whole", "out")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_language_model_may_learn_too(align, pair, tmp_path):
    align("--epochs", "2", "--lora-rank", "4", "--num-tokens", "4")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    model, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()) and model.config.image_seq_length == 4
    assert f"\n{model.num_parameters():,} parameters" in card
    old = load_llava(pair / "llava", "cpu")[0].state_dict()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, old.get(name, value))}
    matrices = {name for name in old if "language_model.layers" in name and name.endswith("proj.weight")}
    assert len(matrices) == 14 and changed == matrices | {name for name in old if "projector" in name}


@torch.no_grad()
def test_what_was_learned_of_the_language_model_is_added_to_it(pair):
    llava, processor = load_llava(pair / "llava", "cpu")
    inputs = processor(images=Image.new("RGB", (32, 32), "red"), text="<image> what ?", return_tensors="pt")
    before = llava(**inputs).logits
    learner = align_llava.Learner(llava)
    learner.add_lora(4)
    for layer in learner.lora_layers.values():
        layer.lora_B["default"].weight.normal_(std=0.3)
    learned = llava(**inputs).logits
    assert (learned - before).abs().max() > 0.1
    with learner.as_it_was():
        assert torch.equal(llava(**inputs).logits, before)
    plain, _ = load_llava(pair / "llava", "cpu")
    plain.load_state_dict(learner.whole_state())
    torch.testing.assert_close(plain(**inputs).logits, learned, rtol=1e-4, atol=1e-4)


def test_learns_from_conversations(align, tmp_path):
    """The color of an image, asked for twice."""
    records = []
    for number in range(20):
        color, name = [((250, 10, 10), "cat"), ((10, 10, 250), "ship")][number % 2]
        Image.new("RGB", (32, 32), color).save(tmp_path / f"{number}.png")
        said = [("human", "<image>\nwhat is this ?"), ("gpt", name), ("human", "what ?"), ("gpt", "dog")]
        turns = [{"from": who, "value": text} for who, text in said]
        records.append({"image": f"{number}.png", "conversations": turns})
    (tmp_path / "said.json").write_text(json.dumps(records), encoding="utf-8")
    data = ("--dataset", str(tmp_path / "said.json"))
    results = align(*data, "--epochs", "8", "--batch-size", "3", "--lora-rank", "8", "--learning-rate", "1e-2")
    assert results["best"]["agreement"] == 1.0
    assert "learned from conversations" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    results = align(*data, "--eval-dataset", data[1], "--batch-size", "4", name="other")
    assert results["images"]["evaluation images"] == 20


def test_answers_are_those_that_generate_gives(pair):
    llava, processor = load_llava(pair / "llava", "cpu")
    images = [Image.effect_noise((32, 32), 60 + seed).convert("RGB") for seed in range(6)]
    pixel_values = processor.image_processor(images, return_tensors="pt")["pixel_values"]
    questions = ["what is this ?", "what ?", "is this cat and dog ?"] * 2
    unended = answer(llava, processor, pixel_values, questions, "{image}{question}", 4)
    # What ends one of them before its last token.
    llava.generation_config.eos_token_id = end = unended.conversations[0][0][1][1]
    answers = answer(llava, processor, pixel_values, questions, "{image}{question}", 4)
    assert len(answers.logits) < len(unended.logits)
    count = 0
    for (turn,), question, image in zip(answers.conversations, questions, images, strict=True):
        inputs = processor(images=image, text=f"<image>{question}", return_tensors="pt")
        given = llava.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)
        expected = given[0, inputs["input_ids"].shape[1] :].tolist()
        assert turn == (question, expected)
        assert end not in expected[:-1]
        tokens = answers.logits[count : count + len(expected)].argmax(-1).tolist()
        assert tokens == expected
        count += len(expected)
    assert count == len(answers.logits)
    # As a student is asked for them: all end together, and labels are the answers alone.
    inputs, labels = Answers(answers.conversations).inputs(processor, 64, "{image}{question}")
    assert (inputs["attention_mask"][:, -1] == 1).all() and (inputs["attention_mask"] == 0).any()
    assert labels[labels != -100].tolist() == answers.logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", "{question}"), "--prompt is '{question}', expected {image} and {question} in it"),
        (("--dtype", "bfloat16", "--mixed-precision", "no"), "--mixed-precision is 'no', expected bf16"),
        (("--lora-rank", "-1"), "--lora-rank is -1, expected 0 or more"),
        (("--num-tokens", "8"), "8"),
    ],
)
def test_bad_arguments_are_one_line(pair, tmp_path, capsys, arguments, message):
    argv = ["--model", str(pair / "llava"), "--vision-model", str(pair / "tower"), "--output", str(tmp_path / "out")]
    try:
        code = main(["align-llava", *argv, *arguments])
    except SystemExit as end:
        code = end.code
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert code in (1, 2) and message in error and error.startswith("frugalvit align-llava: error: ")
    assert not (tmp_path / "out").exists()


def test_half_precision(align, tmp_path):
    align("--dtype", "bfloat16", "--eval-split", "none", train=32)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    kept = {name for name, value in model.state_dict().items() if value.dtype != torch.bfloat16}
    assert kept == {"model.vision_tower.latents.initial_rois"}


def test_a_quantized_language_model_is_written_as_it_was(align, pair, tmp_path):
    align("--quantize", "8bit", train=32)
    old = load_llava(pair / "llava", "cpu")[0].state_dict()
    model, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    for name, value in model.state_dict().items():
        if "language_model" in name or "lm_head" in name:
            assert torch.equal(value, old[name])


@pytest.fixture
def offloaded(monkeypatch):
    """Let `--device-map` keep the language model on disk, as it does where memory is short."""

    def load(name, device, dtype, quantize, device_map):
        return load_llava(name, device, dtype, quantize, device_map and PLACES)

    monkeypatch.setattr(align_llava, "load_llava", load)


PLACES = {"model.vision_tower": "cpu", "model.multi_modal_projector": "cpu", "model.language_model": "disk"} | {
    "lm_head": "cpu"
}


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")  # for large ones
def test_a_language_model_on_disk_teaches_the_same(align, offloaded, tmp_path):
    whole = align("--batch-size", "32", name="whole")
    results = align("--batch-size", "32", "--device-map", "auto")
    assert results["epochs"][0]["train_loss"] == whole["epochs"][0]["train_loss"]
    files = [tmp_path / name / "model.safetensors" for name in ("whole", "out")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_what_is_on_disk_cannot_have_lora(align, offloaded, tmp_path):
    with pytest.raises(ValueError, match="offloaded, which --lora-rank cannot change"):
        align("--device-map", "auto", "--lora-rank", "2")


def test_sharing_out_is_for_one_process(align, monkeypatch):
    monkeypatch.setattr(align_llava, "PartialState", lambda: SimpleNamespace(num_processes=2))
    with pytest.raises(ValueError, match="--device-map is 'auto', expected none"):
        align("--device-map", "auto")


def test_quantizing_needs_a_library(align, monkeypatch):
    monkeypatch.setattr("frugalvit.common.loading.is_bitsandbytes_available", lambda: False)
    with pytest.raises(ValueError, match="--quantize is bitsandbytes', which is not installed"):
        align("--quantize", "4bit")


@torch.no_grad()
def test_a_paligemma_is_asked_as_its_processor_does():
    """The tokens that a PaliGemma is given are its processor's, and so are the types of tokens, which say that those
    of a question look at each other."""
    paligemma, processor = make_paligemma(), make_paligemma_processor()
    prompt = conversations.default_prompt(processor)
    asked = Answers([[("what is this ?", "cat")], [("is this cat and dog ?", "ship")]])
    inputs, labels = asked.inputs(processor, 64, prompt)
    pictures = [[Image.new("RGB", (32, 32), color)] for color in ("red", "blue")]
    expected = processor(
        images=pictures,
        text=["<image>what is this ?", "<image>is this cat and dog ?"],
        suffix=["cat", "ship"],
        padding=True,
        return_tensors="pt",
    )
    mask = inputs["attention_mask"].bool()
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(inputs[name][mask], expected[name][mask]), name
    assert torch.equal(labels, expected["labels"].where(mask, -100))
    pixel_values = expected["pixel_values"]
    given = answer(paligemma, processor, pixel_values, ["what is this ?"] * 2, prompt, 3)
    prompts = processor(images=pictures, text=["<image>what is this ?"] * 2, return_tensors="pt")
    prompts.pop("labels")
    tokens = paligemma.generate(**prompts, max_new_tokens=3, do_sample=False)[:, -3:]
    assert [turns[0][1] for turns in given.conversations] == tokens.tolist()
