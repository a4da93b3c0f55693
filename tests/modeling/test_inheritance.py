"""Tests of `from_teacher`: inherited parts, new parts, image processors, and refused teachers."""

import pytest
import timm
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoImageProcessor,
    BitImageProcessor,
    DeiTConfig,
    DeiTForImageClassificationWithTeacher,
    ViTForImageClassification,
    ViTImageProcessor,
)
from vision_transformers import KINDS, of_timm, of_transformers

from drawn import noise
from frugalvit import (
    PatchSparseFormerBackbone,
    PatchSparseFormerForImageClassification,
    PatchSparseFormerModel,
    SparseFormerForImageClassification,
    SparseFormerModel,
    impulse_init_,
)
from frugalvit.modeling import hub
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.modeling.hosts.running import compute_hidden_states


SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}


def transformers_vit(**fields) -> ViTForImageClassification:
    return of_transformers("ViT", "ForImageClassification", num_labels=5, layer_norm_eps=1e-4, **fields)()


def timm_vit(**arguments) -> nn.Module:
    return of_timm(**arguments)()


def test_labels_and_the_problem_type_are_the_teachers():
    teacher = transformers_vit(problem_type="multi_label_classification")
    # A configuration that is made with only `id2label` has no `label2id`.
    teacher.config.label2id = None
    config = PatchSparseFormerForImageClassification.from_teacher(teacher).config
    assert config.label2id == {name: index for index, name in teacher.config.id2label.items()}
    assert config.problem_type == "multi_label_classification"


def test_defaults_are_the_papers():
    teacher = transformers_vit(num_hidden_layers=6, hidden_size=128, num_attention_heads=2)
    student = SparseFormerForImageClassification.from_teacher(teacher)
    config = student.config
    # The default number of tokens is a quarter of the teacher's 64 patches: [CLS] and 15 latent tokens.
    assert (config.num_latent_tokens, config.num_class_tokens, config.pooling) == (15, 1, "cls")
    assert (config.num_hidden_layers, config.hidden_size, config.focusing_hidden_size) == (4, 128, 64)
    assert config.layer_norm_eps == 1e-4
    assert config.id2label == teacher.config.id2label and not student.training
    # The first two of the teacher's six blocks are left out, so the student starts with the teacher's third block.
    torch.testing.assert_close(
        student.sparseformer.layers[0].mlp.fc1.weight, teacher.vit.layers[2].mlp.fc1.weight, rtol=0, atol=0
    )


@pytest.mark.parametrize("model_class", [SparseFormerForImageClassification, PatchSparseFormerBackbone])
def test_images_are_prepared_as_the_teachers(model_class, tmp_path):
    teacher = transformers_vit()
    square = {"height": 24, "width": 24}
    processors = {
        "crop": BitImageProcessor(size={"shortest_edge": 28}, crop_size=square),
        "squash": ViTImageProcessor(size=square, image_mean=[0.1, 0.2, 0.3], do_normalize=True),
    }
    for name, processor in processors.items():
        expected = processor(noise(), return_tensors="pt")["pixel_values"]
        teacher.save_pretrained(tmp_path / name)
        processor.save_pretrained(tmp_path / name)
        for student in (
            model_class.from_teacher(teacher, 4, image_processor=processor),
            model_class.from_teacher(str(tmp_path / name), 4),
        ):
            student.save_pretrained(tmp_path / f"{name}-student")
            loaded = AutoImageProcessor.from_pretrained(tmp_path / f"{name}-student")
            torch.testing.assert_close(loaded(noise(), return_tensors="pt")["pixel_values"], expected)


@pytest.mark.parametrize("channels", [1, 4])
@torch.no_grad()
def test_a_student_takes_the_teachers_number_of_channels(channels):
    images = torch.randn(2, channels, 32, 32)
    for teacher in (transformers_vit(num_channels=channels), timm_vit(in_chans=channels)):
        impulse_init_(teacher, kernel_size=3)
        normalization = dict.fromkeys(("image_mean", "image_std"), [0.5] * channels)
        student = PatchSparseFormerForImageClassification.from_teacher(teacher, 64, **normalization)
        expected = teacher(images)
        torch.testing.assert_close(student(images).logits, getattr(expected, "logits", expected), atol=1e-4, rtol=0)
        student = SparseFormerForImageClassification.from_teacher(teacher, 4, **normalization)
        assert student.config.num_channels == channels and student(images).logits.isfinite().all()


def test_a_student_of_a_teacher_without_an_image_processor_is_saved_without_one(tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr(hub.logger, "warning_once", messages.append)
    student = PatchSparseFormerForImageClassification.from_teacher(transformers_vit(), 4)
    student.save_pretrained(tmp_path)
    assert not (tmp_path / "preprocessor_config.json").exists()
    assert [message.split(",")[0] for message in messages] == ["No image processor is saved"]
    assert PatchSparseFormerForImageClassification.from_pretrained(tmp_path).config.image_mean is None


def test_a_mean_pooled_teacher_gives_a_mean_pooled_student():
    config = SparseFormerForImageClassification.from_teacher(timm_vit(global_pool="avg", class_token=False)).config
    assert (config.pooling, config.final_norm, config.num_class_tokens, config.num_latent_tokens) == (
        "mean",
        "after_pooling",
        0,
        16,
    )
    # A class token that is not pooled is kept, because other tokens attend to it.
    config = SparseFormerForImageClassification.from_teacher(timm_vit(global_pool="avg", fc_norm=False)).config
    assert (config.pooling, config.final_norm, config.num_class_tokens) == ("latent_mean", "before_pooling", 1)


def test_truncate_is_a_number_or_a_fraction_of_blocks():
    teacher = transformers_vit()
    for truncate, left in ((0, 3), (1, 2), (1.0, 2), (1 / 3, 2), (0.5, 1), (2, 1)):
        student = SparseFormerForImageClassification.from_teacher(teacher, truncate=truncate)
        assert len(student.sparseformer.layers) == student.config.num_hidden_layers == left
    with pytest.raises(ValueError, match="`truncate`"):
        SparseFormerForImageClassification.from_teacher(teacher, truncate=3)


@pytest.mark.parametrize("model_class", [SparseFormerModel, PatchSparseFormerModel])
def test_layer_scale_stays_a_parameter(model_class):
    """Layer scale is not folded into weights, because folding narrows the range of learning rates that work."""
    teacher = KINDS["dinov2"].make()
    student = model_class.from_teacher(teacher, 16, truncate=1)
    for layer, block in zip(student.layers, teacher.encoder.layer[1:], strict=True):
        pairs = ((layer.attention_scale, block.layer_scale1), (layer.mlp_scale, block.layer_scale2))
        for scale, inherited in pairs:
            assert isinstance(scale, nn.Parameter) and scale.requires_grad and torch.equal(scale, inherited.lambda1)
    student(torch.randn(2, 3, 32, 32)).pooler_output.sum().backward()
    assert all(layer.mlp_scale.grad.any() and layer.attention_scale.grad.any() for layer in student.layers)


class Block(timm.models.vision_transformer.Block):
    """Encoder block with the parameters of timm's `Block` but another `forward`."""

    def forward(self, x):
        return 2 * super().forward(x)


REFUSED = {
    "blocks with another forward": (lambda: timm_vit(block_fn=Block), "differs from the teacher's"),
    "two classifiers": (
        lambda: DeiTForImageClassificationWithTeacher(DeiTConfig(image_size=32, patch_size=4, **SIZES)),
        "averages two classifiers",
    ),
    "a CLIP, as a classifier": (KINDS["clip"].make, "no linear classifier"),
}


# `frugalvit bootstrap` passes the teacher's own image size.
@pytest.mark.parametrize("fields", [{}, {"image_size": 32}])
@pytest.mark.parametrize("name", REFUSED)
def test_teachers_that_no_student_equals_are_refused(name, fields):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        SparseFormerForImageClassification.from_teacher(make(), **fields)


@pytest.mark.parametrize("model_class", [SparseFormerForImageClassification, PatchSparseFormerForImageClassification])
def test_zero_tokens_and_other_classes_are_refused(model_class):
    with pytest.raises(
        (StrictDataclassError, ValueError), match="(?s)'num_latent_tokens'.*expected at least 1, got 0"
    ):
        model_class.from_teacher(transformers_vit(), num_latent_tokens=0)
    with pytest.raises(ValueError, match="5 classes"):
        model_class.from_teacher(transformers_vit(), num_labels=7)


def test_registers_start_as_the_teachers_of_a_blank_image():
    anatomy = read_anatomy(KINDS["dinov2-registers"].make())
    student = SparseFormerModel.from_teacher(anatomy, truncate=1)
    states = compute_hidden_states(anatomy, torch.zeros(1, 3, 32, 32))[1]
    torch.testing.assert_close(student.latents.register_tokens, states[0, 1:4])
    tokens = student(torch.randn(2, 3, 32, 32)).last_hidden_state
    assert tokens.shape[1] == 1 + 3 + student.config.num_latent_tokens


def test_tokens_that_start_on_one_roi_are_moved_apart():
    """Initial RoIs differ. Tokens with equal embeddings and equal RoIs would get equal gradients and stay equal."""
    student = SparseFormerForImageClassification.from_teacher(transformers_vit(), num_latent_tokens=15)
    rois = student.sparseformer.latents.initial_rois
    assert len(rois.unique(dim=0)) == 15
    pixel_values = torch.randn(1, 3, 32, 32)
    tokens = student.sparseformer(pixel_values).last_hidden_state[0]
    assert len(tokens.unique(dim=0)) == 16
