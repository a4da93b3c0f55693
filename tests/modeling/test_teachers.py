"""What a SparseFormer inherits from Transformers and timm teachers, and what it refuses."""

import open_clip
import pytest
import timm
import torch
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    Dinov2Config,
    Dinov2ForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    SiglipVisionConfig,
    SiglipVisionModel,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from frugalvit import (
    SparseFormerForImageClassification,
    SparseFormerModel,
    SparseFormerVisionModel,
    SparseFormerVisionModelWithProjection,
)
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


def clip_vision(model_class=CLIPVisionModelWithProjection, **fields) -> nn.Module:
    fields = {"image_size": 32, "patch_size": 4, "projection_dim": 24, "layer_norm_eps": 1e-4, **SIZES, **fields}
    return randomize(model_class(CLIPVisionConfig(**fields)))


def clip() -> CLIPModel:
    text = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"image_size": 32, "patch_size": 4, **SIZES}
    return randomize(CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)))


def siglip(**fields) -> nn.Module:
    return randomize(SiglipVisionModel(SiglipVisionConfig(image_size=32, patch_size=4, **{**SIZES, **fields})))


def open_clip_model(quick_gelu=False, **fields) -> nn.Module:
    vision = {"image_size": 32, "patch_size": 4, "width": 48, "layers": 3, "head_width": 12, "mlp_ratio": 2, **fields}
    text = {"context_length": 8, "vocab_size": 50, "width": 16, "heads": 2, "layers": 1}
    return randomize(open_clip.CLIP(24, vision, text, quick_gelu=quick_gelu))


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


# Teachers of an embedding: where their blocks and final norm are, and what projects what they pool.
EMBEDDERS = {
    "transformers-clip": (
        clip,
        lambda teacher: (teacher.vision_model.encoder.layers, teacher.vision_model.post_layernorm),
        lambda teacher: teacher.visual_projection,
    ),
    "transformers-clip-vision": (
        clip_vision,
        lambda teacher: (teacher.vision_model.encoder.layers, teacher.vision_model.post_layernorm),
        lambda teacher: teacher.visual_projection,
    ),
    "transformers-clip-vision-without-projection": (
        lambda: clip_vision(CLIPVisionModel, hidden_act="gelu"),
        lambda teacher: (teacher.encoder.layers, teacher.post_layernorm),
        None,
    ),
    "transformers-siglip": (siglip, lambda teacher: (teacher.encoder.layers, teacher.post_layernorm), None),
    "open_clip": (
        open_clip_model,
        lambda teacher: (teacher.visual.transformer.resblocks, teacher.visual.ln_post),
        lambda teacher: lambda pooled: pooled @ teacher.visual.proj,
    ),
    "open_clip-quick-gelu-layer-scale": (
        lambda: open_clip_model(quick_gelu=True, ls_init_value=0.5),
        lambda teacher: (teacher.visual.transformer.resblocks, teacher.visual.ln_post),
        lambda teacher: lambda pooled: pooled @ teacher.visual.proj,
    ),
    "open_clip-mean-pooled-without-pre-norm": (
        lambda: open_clip_model(pool_type="avg", final_ln_after_pool=True, no_ln_pre=True),
        lambda teacher: (teacher.visual.transformer.resblocks, teacher.visual.ln_post),
        lambda teacher: lambda pooled: pooled @ teacher.visual.proj,
    ),
    "open_clip-visual-tower": (
        lambda: open_clip_model().visual,
        lambda teacher: (teacher.transformer.resblocks, teacher.ln_post),
        lambda teacher: lambda pooled: pooled @ teacher.proj,
    ),
}


@pytest.mark.parametrize("name", EMBEDDERS)
def test_inherited_blocks_norm_and_projection_compute_what_a_clips_do(name):
    make, parts, project = EMBEDDERS[name]
    teacher = make()
    student_class = SparseFormerVisionModelWithProjection if project else SparseFormerVisionModel
    student = student_class.from_teacher(teacher, num_latent_tokens=6, truncate=0)
    blocks, norm = parts(teacher)
    tokens = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(1))
    ours = theirs = tokens
    with torch.no_grad():
        for layer, block in zip(student.base_model.layers, blocks, strict=True):
            ours = layer(ours)[0]
            theirs = block(theirs) if "open_clip" in name else block(theirs, attention_mask=None)
            theirs = theirs[0] if isinstance(theirs, tuple) else theirs
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())
        torch.testing.assert_close(student.base_model.layernorm(tokens), norm(tokens), rtol=0, atol=1e-6)
        if project:
            torch.testing.assert_close(student.visual_projection(tokens), project(teacher)(tokens))
        if name == "transformers-siglip":
            torch.testing.assert_close(student.pooling_head(tokens), teacher.head(tokens), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", EMBEDDERS)
def test_a_clips_embedding_is_what_it_compares_with_texts(name):
    teacher = EMBEDDERS[name][0]()
    pixel_values = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        if name == "transformers-clip":
            expected = teacher.get_image_features(pixel_values).pooler_output
        elif name == "transformers-clip-vision":
            expected = teacher(pixel_values).image_embeds
        elif name == "open_clip-visual-tower":
            expected = teacher(pixel_values)
        elif name.startswith("open_clip"):
            expected = teacher.encode_image(pixel_values)
        else:
            expected = teacher(pixel_values).pooler_output
        torch.testing.assert_close(embed(teacher, pixel_values), expected)


def test_siglips_pooling_head_stays_in_a_sparseformer():
    student = SparseFormerVisionModel.from_teacher(siglip(), num_latent_tokens=5)
    config = student.config
    assert (config.pooling, config.use_cls_token, config.num_hidden_layers) == ("attention", False, 2)
    outputs = student(torch.randn(2, 3, 32, 32))
    with torch.no_grad():
        torch.testing.assert_close(outputs.pooler_output, student.pooling_head(outputs.last_hidden_state))


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
    "a CLIP, as a classifier": (clip, "no linear classifier"),
    "a SigLIP without its head": (lambda: siglip(vision_use_head=False), "neither a .CLS. nor a pooling head"),
    "pooling by attention, of open_clip": (
        lambda: open_clip_model(attentional_pool=True, attn_pooler_heads=2),
        "pools by attention",
    ),
    "custom blocks of open_clip": (lambda: open_clip_model(scale_attn=True), "expected nn.MultiheadAttention"),
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
