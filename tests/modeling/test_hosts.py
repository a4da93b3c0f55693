"""Tests of the host models in docs/models.md: `read_anatomy`, `from_teacher`, and the other methods in its tables."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
from timm.models.eva import Eva
from torch import nn
from vision_transformers import KINDS, of_timm, randomize

import frugalvit
from frugalvit import impulse_init_, insert_context_broadcast, mimetic_init_
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.modeling.hosts.running import (
    compute_feature_maps,
    compute_hidden_states,
    compute_queries_and_keys,
    make_example,
    relative_difference,
)


# The tolerance is below the error of GELU's tanh approximation (5e-5), so that a wrong activation is found.
TOLERANCE = 1e-5
TINY_FOCUS = {
    "stem_channels": 4,
    "num_sampling_points": 4,
    "num_mixed_points": 4,
    "mixing_hidden_size": 8,
    "num_focusing_iterations": 2,
    "num_latent_tokens": 5,
}
# One host model of each library, for tests of code that all host models share.
FEW = ("dinov2-registers-classifier", "timm-registers", "open_clip")
WITH_PATCHES = [name for name, kind in KINDS.items() if kind.patches]
OF_TRANSFORMERS = [name for name in WITH_PATCHES if not name.startswith(("timm", "open_clip"))]


@torch.no_grad()
def make(name: str) -> nn.Module:
    """Return a small random model. Its matrices have mean 0, because otherwise attention would be nearly uniform."""
    model = KINDS[name].make().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter -= 0.1
    return model


def student_class(anatomy, family: str) -> type:
    ending = "VisionModel"
    if anatomy.projection is not None:
        ending = "VisionModelWithProjection"
    if anatomy.classifier is not None:
        ending = "ForImageClassification"
    return getattr(frugalvit, f"{family}{ending}")


def inherit(anatomy, num_tokens: int | None = None, **options) -> nn.Module:
    num_tokens = num_tokens or anatomy.num_patches
    return student_class(anatomy, "PatchSparseFormer").from_teacher(anatomy, num_tokens, **options)


@torch.no_grad()
def changed(student: nn.Module) -> nn.Module:
    """Add noise to all trainable parameters, in place, to simulate training."""
    generator = torch.Generator().manual_seed(0)
    for parameter in student.parameters():
        if parameter.requires_grad:
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return student


@torch.no_grad()
def difference_from(anatomy, outputs, images: torch.Tensor) -> float:
    """Return the relative difference between the logits or embeddings of a student and its teacher."""
    if anatomy.classifier is not None:
        return relative_difference(outputs.logits, anatomy.run_classifier(images)).item()
    return relative_difference(outputs.get("image_embeds", outputs.get("pooler_output")), anatomy.embed(images)).item()


@torch.no_grad()
def parity(anatomy) -> float:
    """Return the relative difference between the outputs of a teacher and of its student with one token per patch."""
    images = make_example(anatomy)
    return difference_from(anatomy, inherit(anatomy)(images), images)


@pytest.mark.parametrize("name", WITH_PATCHES)
def test_a_student_with_all_patches_equals_its_teacher(name):
    anatomy = read_anatomy(make(name))
    anatomy.require_plain("try", embeds=True, patches=True)
    assert parity(anatomy) < TOLERANCE


@pytest.mark.nightly
@pytest.mark.parametrize("name", KINDS)
def test_every_method_on_every_host(name):
    kind, anatomy = KINDS[name], read_anatomy(make(name))
    if kind.patches:
        images = make_example(anatomy)
        assert anatomy.embed(images).shape == (2, anatomy.embedding_size)
        assert compute_feature_maps(anatomy, images)[0].shape == (2, 48, *anatomy.grid)
        if kind.resizes:
            resized = read_anatomy(make(name), (24, 16))
            assert (resized.image_size, resized.grid) == ((24, 16), (6, 4)) and parity(resized) < TOLERANCE
    check_other_methods(name)


@pytest.mark.parametrize("name", [*FEW, "siglip", "timm-dinov3"])
def test_other_methods(name):
    check_other_methods(name)


def check_other_methods(name: str):
    model, anatomy = make(name), read_anatomy(make(name))
    if KINDS[name].impulses:
        report = impulse_init_(model, mass=0.8, generator=torch.Generator().manual_seed(0))
        assert len(report.heads) == sum(block.attention.num_heads for block in anatomy.blocks)
        # Attention heads have only 12 channels, so some attention peaks are not at their targets.
        assert report.mean("peak_rate") > 0.6
        mimetic_init_(model)
    else:
        with pytest.raises(ValueError, match=r"Cannot initialize \w+: it (rotates|normalizes|adds no positions)"):
            impulse_init_(model)
    has_class_token = KINDS[name].class_token
    for kind in ("cb", "cb_s", "cb_gate", "cb_hybrid") if has_class_token else ("cb", "cb_s"):
        assert len(insert_context_broadcast(make(name), kind, ["mlp_end", "attention_end"])) == 6
    model = make(name)
    images = make_example(read_anatomy(model))
    before = read_anatomy(model).embed(images)
    if not has_class_token:
        with pytest.raises(ValueError, match="needs a class token"):
            insert_context_broadcast(model, "cb_gate")
    insert_context_broadcast(model)
    assert not torch.allclose(read_anatomy(model).embed(images), before)


class TestReading:
    @pytest.mark.parametrize("name", ["vit", "dinov3", "timm-registers", "open_clip-timm-siglip"])
    def test_a_host_is_read_at_another_image_size(self, name):
        """Position embeddings for a different image size equal those of the model's own library."""
        assert parity(read_anatomy(make(name), (24, 16))) < TOLERANCE

    @pytest.mark.parametrize("name", ["dinov3", "timm-eva02", "timm-pe-core"])
    def test_wrong_rotary_embeddings_are_found(self, name):
        rotary = read_anatomy(make(name)).rotary
        wrong = {
            "theta": rotary.theta * 2,
            "scale": (rotary.scale[0], rotary.scale[1] * 1.1),
            # Prefix tokens are not rotated. So a shift of all patches changes only the angles between patches and
            # prefix tokens.
            "shift": (rotary.shift[0] + 0.1, rotary.shift[1] - 0.1),
            "channels": rotary.channels.flip(0),
        }
        for field, value in wrong.items():
            anatomy = read_anatomy(make(name))
            anatomy = replace(anatomy, rotary=replace(anatomy.rotary, **{field: value}))
            with pytest.raises(ValueError, match="differs from the teacher's"):
                inherit(anatomy)

    @pytest.mark.parametrize("name", ["timm-vit", "timm-query-key-norm", "timm-eva02", "timm-dinov3"])
    def test_queries_and_keys_are_those_of_the_host_s_attention(self, name):
        anatomy = read_anatomy(make(name))
        attention = anatomy.blocks[1].module.attn
        attention.fused_attn, weights = False, []
        attention.attn_drop.register_forward_hook(lambda module, inputs, output: weights.append(output))
        states = compute_hidden_states(anatomy, make_example(anatomy))
        queries, keys = compute_queries_and_keys(anatomy, anatomy.blocks[1], states[1])
        scores = queries @ keys.mT * anatomy.blocks[1].attention.head_dim ** -0.5
        assert relative_difference(scores.softmax(-1), weights[0]) < TOLERANCE

    def test_only_inheriting_patches_needs_linear_patch_embeddings(self):
        overlapping = of_timm()()
        overlapping.patch_embed.proj = randomize(nn.Conv2d(3, 48, 6, stride=4, padding=1))
        for model, reason in ((overlapping, "overlap or leave gaps"), (make("timm-mobileclip-b"), "a ConvStem")):
            anatomy = read_anatomy(model)
            with pytest.raises(ValueError, match=f"Cannot .* VisionTransformer: its patches.* {reason}"):
                inherit(anatomy)
            # The papers' SparseFormer inherits only encoder blocks, so teachers can have any patch embeddings.
            student_class(anatomy, "SparseFormer").from_teacher(anatomy, **TINY_FOCUS)


@pytest.mark.parametrize("name", ["vit", "radio", "siglip2-vision", "timm-registers", "timm-dinov3"])
def test_before_training_a_student_equals_its_teacher_at_a_lower_resolution(name):
    small = read_anatomy(make(name), (16, 16))
    student = inherit(read_anatomy(make(name)), small.num_patches)
    images = torch.randn(2, 3, 32, 32)
    resized = F.interpolate(images, (16, 16), mode="bilinear", antialias=True)
    assert student.config.token_grid == (4, 4)
    assert difference_from(small, student(images), resized) < TOLERANCE


class TestPlainViTs:
    """`to_plain_vit` converts students to models of their teachers' classes."""

    @pytest.mark.parametrize("name", [name for name in OF_TRANSFORMERS if name != "aimv2-with-projection"])
    def test_a_trained_student_becomes_a_model_of_its_teachers_class(self, name, tmp_path):
        student = changed(inherit(read_anatomy(make(name))))
        host = student.to_plain_vit(16)
        # A student of a whole CLIP or SigLIP becomes a vision model, whose class is not the teacher's class.
        assert type(host) is type(make(name)) or name in ("clip", "siglip", "siglip2")
        host.save_pretrained(tmp_path)
        anatomy = read_anatomy(type(host).from_pretrained(tmp_path))
        images = make_example(anatomy)
        assert anatomy.grid == (4, 4)
        assert difference_from(anatomy, student(images, num_tokens=16), images) < 1e-4

    def test_a_student_of_a_timm_model_needs_an_architecture(self):
        student = changed(inherit(read_anatomy(make("timm-vit"))))
        with pytest.raises(ValueError, match="no `teacher_config`.*give `like`"):
            student.to_plain_vit(16)
        host = student.to_plain_vit(16, like=transformers.ViTConfig())
        assert type(host) is transformers.ViTForImageClassification and host.config.num_labels == 5
        with pytest.raises(ValueError, match="A CLIPVisionModel with the student's weights differs"):
            student.to_plain_vit(16, like=transformers.CLIPConfig())

    @pytest.mark.parametrize("name", [name for name in OF_TRANSFORMERS if name in FEW or name.startswith("vit")])
    @torch.no_grad()
    def test_a_grid_that_is_not_square_needs_a_class_that_takes_it(self, name):
        """20 tokens form a 5 x 4 grid. Some classes of Transformers accept only square grids."""
        student = inherit(read_anatomy(make(name)))
        if name.startswith("vit"):
            host = student.to_plain_vit(20)
            images = torch.randn(2, 3, *host.config.image_size)
            anatomy = read_anatomy(host)
            assert difference_from(anatomy, student(images, num_tokens=20), images) < 1e-4
            return
        for each in (student, student.bfloat16()):
            message = "`num_tokens` is 20, a grid of 5 x 4, but .* square grids alone; expected one of 1, 4, 9, .* 64"
            with pytest.raises(ValueError, match=message):
                each.to_plain_vit(20)

    def test_students_that_no_class_of_transformers_computes_are_refused(self):
        with pytest.raises(ValueError, match="cells of several sizes"):
            inherit(read_anatomy(make("dinov2")), placement="content").to_plain_vit()
        with pytest.raises(ValueError, match="no aimv2_vision_model with a projection"):
            inherit(read_anatomy(make("aimv2-with-projection"))).to_plain_vit(16)
        with pytest.raises(ValueError, match="has 0 class tokens and registers, a CLIPVisionModel has 1; expected"):
            inherit(read_anatomy(make("siglip-vision"))).to_plain_vit(16, like=transformers.CLIPConfig())
        with pytest.raises(ValueError, match="do not fit a dinov2: .*. Expected its teacher's architecture"):
            inherit(read_anatomy(make("dinov2-swiglu"))).to_plain_vit(16, like=transformers.Dinov2Config())
        student = inherit(read_anatomy(make("dinov3")))
        torch.nn.init.normal_(student.embeddings.position_embeddings)
        with pytest.raises(ValueError, match="differs from the student .* no place for all"):
            student.to_plain_vit(16)


SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 24, "depths": [1], "num_heads": [2], "window_size": 4}


REFUSED = {
    "swin": (lambda: transformers.SwinModel(transformers.SwinConfig(**SWIN)), "its model type 'swin' is not known"),
    "relative position biases": (
        partial(timm.create_model, "beit_base_patch16_224", img_size=32, embed_dim=48, depth=2, num_heads=4),
        "attn.relative_position_bias_table",
    ),
    "shared keys and values": (
        of_timm(Eva, attn_type="rope", qkv_fused=False, num_kv_heads=2),
        "shares keys and values among heads",
    ),
}


def test_models_other_than_plain_vision_transformers_are_refused_by_every_method():
    for build, message in REFUSED.values():
        model = build()
        with pytest.raises(ValueError, match=rf"Cannot bootstrap from \w+: .*{message}"):
            frugalvit.SparseFormerModel.from_teacher(model)
        with pytest.raises(ValueError, match=r"Cannot initialize \w+: "):
            impulse_init_(model)
    # Context Broadcasting needs the number of class tokens of a BEiT, too.
    build, _ = REFUSED["relative position biases"]
    assert read_anatomy(build()).num_class_tokens == 1


def test_the_documentation_has_a_row_for_each_host():
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+ \| [^|]+ \| [^|]+) \|$", text, re.MULTILINE))
    tested = {kind.row for kind in KINDS.values()}
    assert rows.keys() - tested == {"model", "---", "Swin, PVT, PVTv2 of Transformers or timm"}
    for row in tested:
        kinds = [kind for kind in KINDS.values() if kind.row == row]
        bootstrap, initialize, broadcast = rows[row].split(" | ")
        assert bootstrap.startswith("yes")
        methods = ((initialize, {kind.impulses for kind in kinds}), (broadcast, {kind.class_token for kind in kinds}))
        for cell, supported in methods:
            no = cell == "`cb`, `cb_s`" or cell.startswith("no")
            assert supported == ({True} if cell == "yes" else {False} if no else {True, False})
