"""What a SparseFormer inherits from Transformers and timm teachers, and what it refuses."""

import pytest
import timm
import torch
from torch import nn
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    Dinov2Config,
    Dinov2ForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from frugalvit import SparseFormerForImageClassification, SparseFormerModel
from frugalvit.modeling.teachers import classifier_of, embed, read_teacher


SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 80}


def randomize(model: nn.Module) -> nn.Module:
    """Weights far from their initialization, so that nothing is equal by being zero or one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + 0.1)
    return model.eval()


def transformers_vit(**fields) -> ViTForImageClassification:
    config = ViTConfig(image_size=32, patch_size=4, num_labels=5, layer_norm_eps=1e-4, **{**SIZES, **fields})
    return randomize(ViTForImageClassification(config))


def timm_vit(**arguments) -> nn.Module:
    arguments = {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 4} | arguments
    return randomize(timm.models.vision_transformer.VisionTransformer(num_classes=5, mlp_ratio=2, **arguments))


def deit() -> nn.Module:
    return randomize(DeiTForImageClassification(DeiTConfig(image_size=32, patch_size=4, num_labels=5, **SIZES)))


TEACHERS = {
    "transformers-vit": transformers_vit,
    "transformers-vit-quick-gelu": lambda: transformers_vit(hidden_act="quick_gelu"),
    "transformers-vit-without-qkv-bias": lambda: transformers_vit(qkv_bias=False),
    "transformers-deit": deit,
    "timm-vit": timm_vit,
    "timm-vit-without-qkv-bias": lambda: timm_vit(qkv_bias=False),
    "timm-vit-mean-pooled": lambda: timm_vit(global_pool="avg"),
    "timm-vit-mean-pooled-after-norm": lambda: timm_vit(global_pool="avg", fc_norm=False),
    "timm-vit-layer-scale": lambda: timm_vit(init_values=0.5),
    "timm-vit-eight-heads": lambda: timm_vit(num_heads=8),
}


def blocks_and_norm(teacher: nn.Module):
    if hasattr(teacher, "blocks"):
        norm = teacher.fc_norm if isinstance(teacher.norm, nn.Identity) else teacher.norm
        return list(teacher.blocks), norm
    return list(teacher.base_model.layers), teacher.base_model.layernorm


@pytest.mark.parametrize("name", TEACHERS)
def test_inherited_blocks_norm_and_classifier_compute_what_the_teachers_do(name):
    teacher = TEACHERS[name]()
    student = SparseFormerForImageClassification.from_teacher(teacher, num_latent_tokens=6, truncate=0)
    blocks, norm = blocks_and_norm(teacher)
    tokens = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(1))
    ours = theirs = tokens
    with torch.no_grad():
        for layer, block in zip(student.sparseformer.layers, blocks, strict=True):
            ours, theirs = layer(ours)[0], block(theirs)
            theirs = theirs[0] if isinstance(theirs, tuple) else theirs
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())
        torch.testing.assert_close(student.sparseformer.layernorm(tokens), norm(tokens), rtol=0, atol=1e-6)
        torch.testing.assert_close(student.classifier(tokens), classifier_of(teacher)(tokens), rtol=0, atol=0)


@pytest.mark.parametrize("name", TEACHERS)
def test_the_embedding_is_what_the_classifier_reads(name):
    teacher = TEACHERS[name]()
    pixel_values = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = teacher(pixel_values)
        logits = logits if isinstance(logits, torch.Tensor) else logits.logits
        torch.testing.assert_close(classifier_of(teacher)(embed(teacher, pixel_values)), logits)


def test_a_sparseformer_embeds_what_its_classifier_reads():
    student = SparseFormerForImageClassification.from_teacher(transformers_vit())
    pixel_values = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(
            student.classifier(embed(student, pixel_values)), student(pixel_values).logits, rtol=1e-5, atol=1e-5
        )


def test_defaults_are_the_papers():
    teacher = transformers_vit(num_hidden_layers=6, hidden_size=128, num_attention_heads=2)
    student = SparseFormerForImageClassification.from_teacher(teacher)
    config = student.config
    # 64 image tokens; a quarter, [CLS] counted, is 15 latent ones.
    assert (config.num_latent_tokens, config.use_cls_token, config.pooling) == (15, True, "cls")
    assert (config.num_hidden_layers, config.hidden_size, config.focusing_hidden_size) == (4, 128, 64)
    assert config.layer_norm_eps == 1e-4
    assert config.id2label == teacher.config.id2label
    assert not student.training
    # The leading third is left out: the first block is the teacher's third.
    torch.testing.assert_close(
        student.sparseformer.layers[0].mlp.fc1.weight, teacher.vit.layers[2].mlp.fc1.weight, rtol=0, atol=0
    )


def test_a_mean_pooled_teacher_gives_a_mean_pooled_student():
    config = SparseFormerForImageClassification.from_teacher(timm_vit(global_pool="avg")).config
    assert (config.pooling, config.pool_before_norm, config.use_cls_token, config.num_latent_tokens) == (
        "mean",
        True,
        False,
        16,
    )
    config = SparseFormerForImageClassification.from_teacher(timm_vit(global_pool="avg", fc_norm=False)).config
    assert (config.pooling, config.pool_before_norm) == ("mean", False)


@pytest.mark.parametrize(("truncate", "left"), [(0, 3), (1, 2), (1 / 3, 2), (0.5, 1), (2, 1)])
def test_truncate_counts_or_shares(truncate, left):
    student = SparseFormerForImageClassification.from_teacher(transformers_vit(), truncate=truncate)
    assert len(student.sparseformer.layers) == student.config.num_hidden_layers == left


def test_without_inherited_blocks_only_the_classifier_is_the_teachers():
    teacher = transformers_vit()
    student = SparseFormerForImageClassification.from_teacher(teacher, inherit_blocks=False)
    torch.testing.assert_close(student.classifier.weight, teacher.classifier.weight, rtol=0, atol=0)
    assert not torch.equal(student.sparseformer.layers[0].mlp.fc1.weight, teacher.vit.layers[1].mlp.fc1.weight)
    assert torch.equal(student.sparseformer.layernorm.weight, torch.ones(48))


def test_a_headless_teacher_gives_a_headless_student():
    teacher = randomize(ViTModel(ViTConfig(image_size=32, patch_size=4, **SIZES)))
    student = SparseFormerModel.from_teacher(teacher)
    assert student(torch.randn(1, 3, 32, 32)).pooler_output.shape == (1, 48)


def test_changing_the_student_leaves_the_teacher_alone():
    teacher = transformers_vit()
    before = teacher.vit.layers[1].mlp.fc1.weight.clone()
    student = SparseFormerForImageClassification.from_teacher(teacher)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.zero_()
    assert torch.equal(teacher.vit.layers[1].mlp.fc1.weight, before)


def test_tokens_that_start_on_one_roi_are_moved_apart():
    """With one embedding for all they would get equal gradients and stay copies of each other."""
    student = SparseFormerForImageClassification.from_teacher(transformers_vit(), num_latent_tokens=15)
    rois = student.sparseformer.latents.initial_rois
    assert len(rois.unique(dim=0)) == 15
    pixel_values = torch.randn(1, 3, 32, 32)
    tokens = student.sparseformer(pixel_values).last_hidden_state[0]
    assert len(tokens.unique(dim=0)) == 16


class ScaledBlock(timm.models.vision_transformer.Block):
    """Has the parameters of a plain block and computes something else."""

    def forward(self, x):
        return 2 * super().forward(x)


REFUSED = {
    "no module": (lambda: "google/vit-base-patch16-224", "load it first"),
    "a convolutional network of timm": (lambda: timm.create_model("resnet10t"), "no list of transformer blocks"),
    "a convolutional network of Transformers": (
        lambda: ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])),
        "no list of transformer layers",
    ),
    "a hierarchical transformer": (
        lambda: SwinForImageClassification(SwinConfig(depths=[1], num_heads=[2], embed_dim=16)),
        "do not begin with a LayerNorm",
    ),
    "another family of pre-norm transformers": (
        lambda: Dinov2ForImageClassification(Dinov2Config(**SIZES)),
        "do not begin with a LayerNorm",
    ),
    "post-norm blocks of the same names": (
        lambda: timm_vit(block_fn=timm.models.vision_transformer.ResPostBlock),
        "computes something else",
    ),
    "blocks with a twist in forward": (lambda: timm_vit(block_fn=ScaledBlock), "computes something else"),
    "normalized queries and keys": (lambda: timm_vit(qk_norm=True), "unexpected"),
    "pooling by attention": (lambda: timm_vit(global_pool="map"), "pools by 'map'"),
    "a LayerNorm before the blocks": (lambda: timm_vit(pre_norm=True), "LayerNorm before its blocks"),
    "two classifiers": (
        lambda: DeiTForImageClassificationWithTeacher(DeiTConfig(image_size=32, patch_size=4, **SIZES)),
        "averages two classifiers",
    ),
    "no classifier": (lambda: ViTModel(ViTConfig(image_size=32, patch_size=4, **SIZES)), "no linear classifier"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        SparseFormerForImageClassification.from_teacher(make())


@pytest.mark.parametrize("truncate", [3, 1.0, -1, True])
def test_refuses_to_leave_out_all_blocks(truncate):
    with pytest.raises(ValueError, match="`truncate`"):
        SparseFormerForImageClassification.from_teacher(transformers_vit(), truncate=truncate)


def test_refuses_other_classes_than_the_teachers():
    with pytest.raises(ValueError, match="5 classes"):
        SparseFormerForImageClassification.from_teacher(transformers_vit(), num_labels=7)


def test_reading_counts_image_tokens_on_rectangles():
    teacher = randomize(ViTForImageClassification(ViTConfig(image_size=[24, 32], patch_size=[4, 8], **SIZES)))
    source = read_teacher(teacher)
    assert source.num_tokens == 6 * 4
    assert source.fields["image_size"] == [24, 32]
