"""A LLaVA learns to read a SparseFormer, from its own answers or from conversations."""

import functools
import json
import re

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from runs import check_resumes, error_of
from runs import make as make_trainer
from safetensors.torch import load_file
from trainings import logged, run_command
from transformers import AutoModelForImageTextToText, AutoProcessor, Dinov2Config, Dinov2Model

from frugalvit import SparseFormerVisionModel
from frugalvit.common.loading import load_llava
from frugalvit.training import align_llava
from tiny import (
    SMALL,
    make_llava,
    make_paligemma,
    save_to_swap,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The folder of a LLaVA and of a tower for it."""
    folder = tmp_path_factory.mktemp("pair")
    save_to_swap(folder, make_llava(), elastic_token_counts=[4, 7])
    return folder


@pytest.fixture(scope="module")
def options(pair) -> dict:
    asked = {"prompt": "{image}{question}", "questions": ["what is this ?", "is dog and cat ?"], "answer_tokens": 2}
    return {"model": pair / "llava", "vision_model": pair / "tower", "learning_rate": 3e-3, **asked}


def load(folder):
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    return model.eval()


def changed(model, original) -> set[str]:
    """Names of weights that are not the original's; the tower is another one."""
    old = original.state_dict()
    return {name for name, value in model.state_dict().items() if not torch.equal(value, old.get(name, value))}


@pytest.mark.parametrize("make", [make_llava, make_paligemma])
def test_the_projector_alone_learns_to_give_the_same_answers(make, options, tmp_path, capsys):
    original = make()
    kind, out = original.config.model_type, tmp_path / "out"
    save_to_swap(tmp_path, original)
    models = {"model": tmp_path / kind, "vision_model": tmp_path / "tower", "train_split": "train[:128]"}
    # A PaliGemma's prompt is known.
    models |= {"prompt": None} if make is make_paligemma else {}
    own = run_command("align_llava", out, **options | models | {"num_train_epochs": 3})
    agreements, losses = logged(own, "eval_agreement"), logged(own, "loss")
    # Before training, and after each epoch.
    assert len(agreements) == 4 and own.metrics["agreement"] == max(agreements) > agreements[0] + 0.1
    assert sum(losses[-8:]) < 0.6 * sum(losses[:8])
    model = load(out)
    assert changed(model, original) == {name for name in original.state_dict() if "projector" in name}
    card = ModelCard.load(out / "README.md")
    assert f"{kind} with 7 tokens an image, those of tower; the projector learned from answers" in card.text
    assert f"{max(agreements):.2%} of the answers' tokens are right, {agreements[0]:.2%} before" in card.text
    assert str(tmp_path) not in card.text and f"\n{model.num_parameters():,} parameters" in card.text
    # What is kept is what learns.
    checkpoint, *_ = out.glob("checkpoint-*")
    learned = load_file(checkpoint / "model.safetensors")
    assert {"projector" in name for name in learned} == {True} and len(learned) == (4 if make is make_llava else 2)
    capsys.readouterr()
    [code] = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    exec(code.replace("path/or/id", str(out)), {"image": Image.effect_noise((48, 40), 90).convert("RGB")})
    assert capsys.readouterr().out.strip()
    if make is make_llava:
        assert AutoProcessor.from_pretrained(out).num_additional_image_tokens == 7 + 1


def test_a_run_that_was_stopped_goes_on(options, tmp_path):
    again = check_resumes("align_llava", tmp_path, 5, **options, lora_rank=2)
    # What goes on is not measured again.
    assert [record["step"] for record in again.state.log_history if "eval_agreement" in record] == [0, 4, 8]


def test_a_tower_of_another_family_has_a_new_first_layer(options, tmp_path):
    sizes = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    dinov2 = Dinov2Model(Dinov2Config(image_size=32, patch_size=4, mlp_ratio=2, **sizes)).eval()
    SparseFormerVisionModel.from_teacher(dinov2, 7, **SMALL).save_pretrained(tmp_path / "dinov2")
    own = run_command("align_llava", tmp_path / "out", **options | {"vision_model": tmp_path / "dinov2"})
    losses = logged(own, "loss")
    assert sum(losses[-4:]) < sum(losses[:4])
    assert load(tmp_path / "out").model.multi_modal_projector.linear_1.in_features == 48
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "the projector, its first layer a new one, learned from answers" in card


def test_the_language_model_may_learn_too(options, pair, tmp_path):
    own = run_command("align_llava", tmp_path / "out", **options, lora_rank=4, num_tokens=4)
    model, (old, _) = load(tmp_path / "out"), load_llava(pair / "llava", "cpu")
    assert model.config.image_seq_length == 4
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert f"\n{model.num_parameters():,} parameters" in card and "the language model (LoRA of rank 4)" in card
    names = old.state_dict()
    matrices = {name for name in names if "language_model.layers" in name and name.endswith("proj.weight")}
    assert len(matrices) == 14 and changed(model, old) == matrices | {name for name in names if "projector" in name}
    # Its rate is a fifth.
    rates = {weight: group["initial_lr"] for group in own.optimizer.param_groups for weight in group["params"]}
    of_name = {name: rates[weight] for name, weight in own.model.named_parameters() if weight in rates}
    shares = {name: 0.2 if "lora" in name else 1.0 for name in of_name}
    assert {name: rate / 3e-3 for name, rate in of_name.items()} == pytest.approx(shares) and len(
        {*shares.values()}
    ) == 2


def test_learns_from_conversations(options, tmp_path):
    """The color of an image, asked for twice."""
    records = []
    for number in range(20):
        color, name = [((250, 10, 10), "cat"), ((10, 10, 250), "ship")][number % 2]
        Image.new("RGB", (32, 32), color).save(tmp_path / f"{number}.png")
        turns = [("human", "<image>\nwhat is this ?"), ("gpt", name), ("human", "what ?"), ("gpt", "dog")]
        said = [{"from": who, "value": text} for who, text in turns]
        records.append({"image": f"{number}.png", "conversations": said})
    (tmp_path / "said.json").write_text(json.dumps(records), encoding="utf-8")
    options = options | {"dataset": tmp_path / "said.json", "train_split": None, "eval_split": None, "lora_rank": 8}
    options |= {"num_train_epochs": 8, "per_device_train_batch_size": 3, "learning_rate": 1e-2}
    own = run_command("align_llava", tmp_path / "out", **options)
    assert own.metrics["agreement"] == 1.0 and len(own.eval_dataset) == 2
    assert "learned from conversations" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    other = make_trainer("align_llava", tmp_path / "other", **options | {"eval_dataset": tmp_path / "said.json"})
    assert len(other.eval_dataset) == len(other.train_dataset) == 20


def test_half_precision(options, tmp_path):
    own = run_command("align_llava", tmp_path / "out", **options, bf16=True, eval_split="none", max_steps=2)
    learned = {weight.dtype for weight in own.model.parameters() if weight.requires_grad}
    assert learned == {torch.float32} and own.original.dtype == torch.bfloat16
    kept = {name for name, value in load(tmp_path / "out").state_dict().items() if value.dtype != torch.bfloat16}
    assert kept == {"model.vision_tower.latents.initial_rois"}


def test_a_quantized_language_model_is_written_as_it_was(options, pair, tmp_path):
    run_command("align_llava", tmp_path / "out", **options, quantize="8bit", max_steps=2, eval_split="none")
    names = changed(load(tmp_path / "out"), load_llava(pair / "llava", "cpu")[0])
    assert names and all("projector" in name for name in names)


PLACES = {"model.vision_tower": "cpu", "model.multi_modal_projector": "cpu", "model.language_model": "disk"}


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")  # for large ones
def test_a_language_model_on_disk_teaches_the_same(options, tmp_path, capsys, monkeypatch):
    """Where memory is short, `device_map` keeps it there."""

    def load_in_parts(name, device, dtype, quantize, device_map):
        return load_llava(name, device, dtype, quantize, device_map and PLACES | {"lm_head": "cpu"})

    monkeypatch.setattr(align_llava, "load_llava", load_in_parts)
    options = options | {"max_steps": 2, "eval_split": "none"}
    whole = run_command("align_llava", tmp_path / "whole", **options)
    parts = run_command("align_llava", tmp_path / "parts", **options, device_map="auto")
    assert logged(parts, "loss") == logged(whole, "loss")
    files = [tmp_path / name / "model.safetensors" for name in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()
    wrong = error_of("align_llava", tmp_path / "wrong", capsys, **options, device_map="auto", lora_rank=2)
    assert "offloaded, which lora_rank cannot change" in wrong


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": "{question}"}, "prompt is '{question}', expected a text with {image}, {question}"),
        ({"lora_rank": -1}, "lora_rank is -1, expected 0 or more"),
        ({"num_tokens": 8}, "8"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is 0.1, expected 0, as answers have no"),
        ({"quantize": "2bit"}, "argument --quantize: invalid choice: '2bit'"),
        ({"vision_model": "nowhere"}, "nowhere"),
    ],
)
def test_wrong_calls_are_one_line(wrong, message, options, tmp_path, capsys):
    assert message in error_of("align_llava", tmp_path / "out", capsys, **options | wrong)


def test_quantizing_needs_a_library_and_sharing_out_one_process(options, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("frugalvit.common.loading.is_bitsandbytes_available", lambda: False)
    said_of = functools.partial(error_of, "align_llava", tmp_path / "out", capsys, **options)
    assert "quantize is bitsandbytes', which is not installed" in said_of(quantize="4bit")
    monkeypatch.setattr(align_llava.AlignLlavaArguments, "world_size", 2)
    assert "device_map is 'auto', expected none with several processes" in said_of(device_map="auto")
