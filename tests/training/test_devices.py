"""Trainings and commands on an accelerator, which none of the machines that run the tests needs to have: no tensor of
the CPU meets one of the device, and in a step nothing waits for the device."""

import importlib
import math
import shlex

import pytest
import torch
from accelerate import Accelerator, dispatch_model
from PIL import Image
from torch._subclasses import fake_tensor
from transformers import AutoModelForImageClassification

from fake_cuda import fake_cuda
from frugalvit import (
    SparseFormerForImageClassification,
    checkpoint_path,
    cli,
)
from frugalvit.common.loading import load_llava
from frugalvit.training import align_llava
from frugalvit.training.components import checkpoints, side_by_side
from frugalvit.training.components.loaders import TrainingLoader
from tiny import make_llava, save_to_swap


if not hasattr(fake_tensor, "FakeTensorDeviceMismatchError"):
    pytest.skip("what stands in for a device needs a newer PyTorch than 2.11", allow_module_level=True)

VIT = "image_size=32,patch_size=8,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
SMALL = "stem_channels=8,num_sampling_points=4,num_mixed_points=4,num_focusing_iterations=2,mixing_hidden_size=8"
SIZES = "hidden_size=36,num_hidden_layers=2,intermediate_size=48,patch_size=8"


@pytest.fixture
def device():
    with fake_cuda() as mode:
        yield mode


@pytest.fixture
def run(device, tmp_path, monkeypatch):
    """Runs a training for two steps an epoch, and its evaluation, and returns where each step but the last waited."""

    def read_weights(self, model):
        return {name: value.cpu() for name, value in model.state_dict().items()}

    # A fake tensor has nothing to write.
    for name in ("save", "update"):
        monkeypatch.setattr(checkpoints.Checkpoints, name, lambda self, state, write=None: None)
    monkeypatch.setattr(Accelerator, "get_state_dict", read_weights)
    # Two passes of each batch are measured.
    monkeypatch.setattr(side_by_side, "LIMIT", 0.0)
    waits, epoch = [], TrainingLoader.epoch

    def watched(self, *position):
        for batch in epoch(self, *position):
            waits.append(device.waits.copy())
            yield batch

    monkeypatch.setattr(TrainingLoader, "epoch", watched)

    def run(recipe, options):
        options = {
            "output_dir": tmp_path / "out",
            "train_split": "train[:32]",
            "eval_split": "test[:16]",
            "epochs": 1,
            "batch_size": 16,
            "logging_steps": 2,
        } | options
        texts = [text for name, value in options.items() if value is not None for text in (f"--{name}", str(value))]
        assert not importlib.import_module(f"frugalvit.training.{recipe}").main(texts)
        return [after - before for before, after in zip(waits, waits[1:], strict=False)]

    return run


def test_what_a_device_refuses(device):
    """Tensors of the CPU, also as gradients; and that reading is seen."""

    class Leaves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient.cpu()

    own, other = torch.ones(2, device="cuda", requires_grad=True), torch.ones(2)
    with pytest.raises(fake_tensor.FakeTensorDeviceMismatchError):
        own + other
    (own * other.to("cuda") * torch.tensor(3.0)).sum().backward()
    assert own.grad.device == own.device and not device.waits
    with pytest.raises(AssertionError, match="cpu"):
        Leaves.apply(own).sum().backward()
    assert device.waits.total() == 1 and own.sum().item() == 0 and device.waits.total() == 2


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("train", {"config_overrides": VIT, "mixup": 0.8, "cutmix": 1}),
        ("joint", {"vit": f"{SIZES},image_size=32", "agent": SIZES}),
    ],
)
def test_recipe(recipe, options, run):
    steps = run(recipe, options)
    assert len(steps) == 1 and not any(steps), steps


def test_the_first_loss_that_is_no_number_is_told_when_it_is_read(run, device):
    """The losses of both steps are read after the second step."""
    device.number = math.nan
    with pytest.raises(ValueError, match="The loss is nan at step 1"):
        run("train", {"config_overrides": VIT})


@pytest.mark.parametrize("options", [{"distill_kind": "soft"}, {"distill_kind": "hard", "mixed_precision": "no"}])
def test_distilling(options, run, teacher):
    steps = run("train", {"config_overrides": VIT, "distill_from": teacher} | options)
    assert len(steps) == 1 and not any(steps), steps


@pytest.mark.parametrize(
    ("new", "options"),
    [
        (True, {"compare": True}),
        (False, {"loss": "kl", "label_loss_weight": 0.5, "token_loss_weight": 1, "mixed_precision": "no"}),
    ],
)
def test_bootstrap(new, options, run, teacher, student):
    options = {"compare": False} | options
    options |= {"config_overrides": SMALL, "recipe": "paper"} if new else {"student": student}
    steps = run("bootstrap", {"teacher": teacher} | options)
    assert len(steps) == 1 and not any(steps), steps


def test_a_teacher_that_is_known(run, teacher, student, tmp_path):
    """The second epoch does not wait for the teacher, as the first has noted the teacher's embeddings of views."""
    options = {"teacher": teacher, "student": student, "teacher_cache": tmp_path / "cache", "view_epochs": 1}
    options["compare"] = False
    steps = run("bootstrap", options | {"epochs": 2, "logging_steps": 4})
    assert [bool(waits) for waits in steps] == [True, True, False], steps


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """A folder with a LLaVA and one with a tower for it."""
    folder = tmp_path_factory.mktemp("llava")
    save_to_swap(folder, make_llava(vision_layers=3))
    return folder


def shared_out(name, device, dtype, quantize, device_map):
    """A LLaVA of which a half is on the device and a half on a second one, as Accelerate shares out larger ones."""
    model, processor = load_llava(name, "cpu", dtype, quantize)
    if not device_map:
        return model.to(device), processor
    layers = ("embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb")
    places = {f"model.language_model.{layer}": int(layer != "layers.0") for layer in layers}
    places |= {"model.vision_tower": 0, "model.multi_modal_projector": 1, "lm_head": 1}
    return dispatch_model(model, places, main_device=0), processor


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # as Accelerate does
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"device_map": "auto"}, marks=pytest.mark.nightly),
        {"device_map": "auto", "lora_rank": 2},
    ],
)
def test_align_llava(options, run, llava, monkeypatch):
    monkeypatch.setattr(align_llava, "load_llava", shared_out)
    whole_state = align_llava.Learner.whole_state
    # A fake tensor has nothing to write.
    monkeypatch.setattr(
        align_llava.Learner,
        "whole_state",
        lambda *given: {name: value.cpu() for name, value in whole_state(*given).items()},
    )
    options = {"model": llava / "llava", "vision_model": llava / "tower", "prompt": "{image}{question}"} | options
    (waits,) = run("align_llava", options | {"answer_tokens": 2})
    # An answer is waited for, word by word, and Transformers counts places of image tokens; what is learned is not.
    assert not [line for line in waits if not line.startswith(("answers.py", "modeling_sparseformer_llava.py"))], waits


@pytest.mark.parametrize(
    "model", [None, {"model_type": "segformer", "config_overrides": "hidden_sizes=[8,16,24,32],depths=[1,1,1,1]"}]
)
def test_segment(model, run, student, tmp_path):
    for folder in ("images", "masks"):
        (tmp_path / "data" / folder).mkdir(parents=True)
    for index in range(32):
        Image.new("RGB", (40, 48), (index, 0, 0)).save(tmp_path / "data" / "images" / f"{index}.png")
        Image.new("L", (40, 48), index % 3).save(tmp_path / "data" / "masks" / f"{index}.png")
    options = {"dataset": tmp_path / "data", "num_labels": 3, "image_size": 32, "warmup_steps": 1}
    # Masks that are all of one class are drawn anew for long.
    options |= {"train_split": "train", "eval_split": "train[:16]", "max_share": 1}
    model = model or {"model": student, "num_latent_tokens": 9}
    steps = run("segment", options | model)
    assert len(steps) == 1 and not any(steps), steps


@pytest.fixture(scope="module")
def student(teacher, tmp_path_factory):
    """A folder with a SparseFormer that has the teacher's blocks, made on the CPU."""
    folder = tmp_path_factory.mktemp("student")
    values = {name: int(value) for name, value in (pair.split("=") for pair in SMALL.split(","))}
    model = SparseFormerForImageClassification.from_teacher(
        AutoModelForImageClassification.from_pretrained(teacher), image_std=[0.25] * 3, resample=2, **values
    )
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "command",
    [
        "predict {image} --model {student} --rois {out}/rois.png",
        "info {student}",
        "evaluate classification --model {student} --limit 4",
        "evaluate zero-shot --model {cifar10-sparseformer-clip} --limit 4 --templates simple",
    ],
    ids=lambda command: " ".join(command.split()[:2]),
)
def test_command(command, device, student, tmp_path):
    folders = {folder.name: folder for folder in checkpoint_path("cifar10-vit").parent.iterdir()}
    Image.new("RGB", (32, 32), (90, 60, 30)).save(tmp_path / "image.png")
    folders |= {"image": tmp_path / "image.png", "student": student, "out": tmp_path}
    assert not cli.main(shlex.split(command.format(**folders)))
