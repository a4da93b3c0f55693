"""Every kind of vision transformer of docs/models.md: read exactly, and of use to every method that its row says."""

import inspect
import math
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
from open_clip.model import resize_pos_embed
from timm.layers import Attention
from timm.models.cait import Cait
from timm.models.eva import Eva
from timm.models.vision_transformer import ResPostBlock
from torch import nn
from vision_transformers import KINDS, of_timm, of_transformers, randomize

import frugalvit
from frugalvit import impulse_init_, insert_context_broadcast, mimetic_init_
from frugalvit.common.macs import count_macs
from frugalvit.contenders import as_teacher
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.modeling.hosts.anatomy import TOLERANCE, difference
from frugalvit.modeling.hosts.transformers import tower_of
from frugalvit.modeling.inheritance import student_discrepancies
from frugalvit.training.losses import TokenAlignment


TINY_FOCUS = {
    **{"stem_channels": 4, "num_sampling_points": 4, "num_mixed_points": 4, "mixing_hidden_size": 8},
    **{"num_focusing_iterations": 2, "num_latent_tokens": 5},
}


def student_class(anatomy) -> type:
    if anatomy.classifier is not None:
        return frugalvit.SparseFormerForImageClassification
    if anatomy.projection is not None:
        return frugalvit.SparseFormerVisionModelWithProjection
    return frugalvit.SparseFormerVisionModel


def make_student(anatomy, **options):
    return student_class(anatomy).from_teacher(anatomy, **TINY_FOCUS | options)


# What is one piece of code for all hosts is tested on one of each library.
FEW = ("dinov2-registers-classifier", "timm-eva02", "open_clip")


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def anatomy(kind):
    read = read_anatomy(kind.make())
    read.model.requires_grad_(False)
    return read


class TestReading:
    def test_what_was_read_is_what_the_model_computes(self, anatomy):
        assert anatomy.obstacle is None and anatomy.embedding_obstacle is None
        found = anatomy.discrepancies()
        # Blocks, the embedding twice, the pooling, and the classifier where there is one.
        assert len(found) == len(anatomy.blocks) + 2 + (anatomy.classifier is not None)
        assert max(found.values()) < TOLERANCE
        anatomy.check()

    def test_the_embedding_is_what_the_model_itself_gives(self, kind, anatomy):
        model, images = anatomy.source, anatomy.example()
        embedding = anatomy.embed(images)
        assert embedding.shape == (2, anatomy.embedding_size)
        assert anatomy.patch_tokens(images).shape == (2, anatomy.num_patches, anatomy.hidden_size)
        if kind.row == "SigLIP 2 NaFlex":
            return  # it takes patches; `discrepancies` compares
        if hasattr(model, "encode_image"):
            torch.testing.assert_close(embedding, model.encode_image(images))
        elif hasattr(model, "get_image_features"):
            torch.testing.assert_close(embedding, model.get_image_features(images).pooler_output)
        elif anatomy.classifier is not None:
            logits = model(images)
            logits = logits if isinstance(logits, torch.Tensor) else logits.logits
            torch.testing.assert_close(anatomy.classifier(embedding), logits, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("name", FEW)
    def test_reading_leaves_the_model_as_it_was(self, name):
        model = KINDS[name].make().train()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        read_anatomy(model).check()
        assert all(module.training for module in model.modules())
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    def test_in_half_precision_it_is_checked_in_float32(self):
        read_anatomy(KINDS["dinov2-registers-classifier"].make().to(torch.bfloat16)).check()

    @pytest.mark.parametrize("name", ["dinov2-registers-classifier", "dinov3", "radio", "pixio"])
    def test_it_may_see_other_images_than_its_configuration_says(self, name):
        anatomy = read_anatomy(KINDS[name].make(), image_size=(24, 32) if name != "pixio" else (24, 24))
        assert anatomy.grid == ((6, 8) if name != "pixio" else (6, 6))
        anatomy.check()
        assert max(student_discrepancies(anatomy, make_student(anatomy)).values()) < TOLERANCE

    def test_what_was_read_comes_back_as_it_is(self):
        anatomy = read_anatomy(KINDS["vit"].make())
        assert read_anatomy(anatomy) is anatomy


def at_another_size(model, size):
    """The model itself, as its own library takes images of another size."""
    visual = getattr(model, "visual", model)
    if hasattr(visual, "set_input_size"):
        visual.set_input_size(size)
    elif hasattr(visual, "ln_post"):
        # Positions are resized when weights are loaded.
        visual.image_size, visual.grid_size = size, (size[0] // 4, size[1] // 4)
        state = {"visual.positional_embedding": visual.positional_embedding}
        resize_pos_embed(state, SimpleNamespace(visual=visual))
        visual.positional_embedding = nn.Parameter(state["visual.positional_embedding"])
    elif "interpolate_pos_encoding" in inspect.signature(tower_of(model).embeddings.forward).parameters:
        tower_of(model).embeddings.register_forward_pre_hook(
            lambda module, inputs, keywords: (inputs[:1], keywords | {"interpolate_pos_encoding": True}),
            with_kwargs=True,
        )
    return read_anatomy(model, image_size=size)


def logits_of(anatomy, images):
    logits = anatomy.run_classifier(images)
    return getattr(logits, "logits", logits)


def assert_same(found, expected):
    """Two anatomies see the same, from the tokens before the first block on."""
    images = expected.example()
    assert found.example().shape == images.shape and found.grid == expected.grid
    for ours, theirs in zip(found.states(images), expected.states(images), strict=True):
        assert difference(ours, theirs) < TOLERANCE
    assert difference(found.embed(images), expected.embed(images)) < TOLERANCE
    assert difference(found.patch_tokens(images), expected.patch_tokens(images)) < TOLERANCE
    if expected.classifier is not None:
        assert difference(logits_of(found, images), logits_of(expected, images)) < TOLERANCE


SMALL = {"image_size": 32, "patch_size": 4, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OWN = {
    "impulses": lambda: frugalvit.ViTImpulseInitForImageClassification(frugalvit.ViTImpulseInitConfig(**SMALL)),
    "fixed positions": lambda: frugalvit.ViTImpulseInitModel(
        frugalvit.ViTImpulseInitConfig(**SMALL, position_embedding="sincos", pooling="mean")
    ),
    "broadcast, distilled": lambda: frugalvit.ViTContextBroadcastModel(
        frugalvit.ViTContextBroadcastConfig(**SMALL, context_broadcast=None, use_distillation_token=True)
    ),
}


class TestResolutions:
    def test_tokens_before_the_first_block_are_the_models(self, kind, anatomy):
        if not kind.patches:
            assert anatomy.patch_embedding is None
            for ask in (anatomy.check_tokens, anatomy.front_tokens, lambda: anatomy.resized((32, 32))):
                with pytest.raises(ValueError, match=r"Cannot [\w ]+: its patches are embedded by the layers"):
                    ask()
            return
        assert anatomy.patch_obstacle is None
        images = anatomy.example()
        assert difference(anatomy.tokens(images), anatomy.states(images)[0]) < TOLERANCE
        anatomy.check_tokens()
        assert anatomy.front_tokens().shape == (anatomy.num_prefix_tokens, anatomy.hidden_size)
        positions = anatomy.positions_of((3, 5))
        if anatomy.patch_positions is None:
            assert positions is None and anatomy.rotary is not None
        else:
            assert positions.shape == (15, anatomy.hidden_size)
        assert_same(anatomy.resized(anatomy.image_size), anatomy)

    # A side that shrinks and one that grows; square ones, students are compared at.
    @pytest.mark.parametrize("size", [(24, 16), (16, 48)])
    def test_at_another_size_it_is_what_its_library_makes_of_it(self, kind, size):
        if not kind.patches:
            return
        resized = read_anatomy(kind.make()).resized(size)
        assert resized.grid == (size[0] // 4, size[1] // 4) and resized.image_size == size
        assert resized.states(resized.example())[0].shape[1] == resized.num_prefix_tokens + resized.num_patches
        if not kind.resizes:
            return
        expected = at_another_size(kind.make(), size)
        if kind.counts_patches:
            # Angles stay relative to the image here; there they follow from the number of patches.
            assert resized.rotary.fields != expected.rotary.fields
            resized.rotary = expected.rotary
        assert_same(resized, expected)
        if resized.patch_positions is not None:
            assert difference(resized.positions, resized._table_of(resized.grid)) == 0

    @pytest.mark.parametrize("name", ["vit", "siglip2-vision", "radio", "timm-registers", "open_clip-layer-scale"])
    def test_it_follows_a_model_that_is_cast_or_counted(self, name):
        model = KINDS[name].make()
        resized = read_anatomy(model).resized((24, 16))
        images = resized.example()
        expected = resized.embed(images)
        assert count_macs(as_teacher(resized).model, (24, 16)).macs_with_attention > 0
        model.double()
        found = resized.embed(images.double())
        assert found.dtype == torch.float64 and difference(found, expected) < TOLERANCE
        model.float()
        assert difference(resized.embed(images), expected) < TOLERANCE

    def test_multiply_accumulates_are_those_of_the_model_at_that_size(self):
        model = KINDS["dinov2"].make()
        macs = count_macs(as_teacher(read_anatomy(model).resized((24, 16))).model, (24, 16))
        assert macs.macs_with_attention == count_macs(model, (24, 16)).macs_with_attention

    def test_it_compiles_and_is_watched(self):
        torch._dynamo.reset()
        resized = read_anatomy(KINDS["timm-dinov3"].make().requires_grad_(False)).resized((24, 16))
        images = resized.example()
        compiled = torch.compile(resized.embed, backend="eager", fullgraph=True)
        expected = resized.states(images)
        with resized.watch() as states:
            torch.testing.assert_close(compiled(images), resized.embed(images))
            assert len(states) == 4
            compiled(2 * images), compiled(images)
            for ours, theirs in zip(states, expected, strict=True):
                torch.testing.assert_close(ours, theirs)
        assert not resized._watching

    @pytest.mark.parametrize("name", OWN)
    def test_this_packages_own_are_read_too(self, name):
        anatomy, expected = (read_anatomy(randomize(OWN[name]())) for _ in range(2))
        anatomy.check_tokens()
        assert_same(anatomy.resized(anatomy.image_size), anatomy)
        assert_same(anatomy.resized((24, 16)), at_another_size(expected.source, (24, 16)))

    def test_what_is_read_wrongly_is_found(self):
        anatomy = read_anatomy(KINDS["dinov2-registers"].make())
        anatomy.front.reverse()
        with pytest.raises(ValueError, match="Cannot try Dinov2.*: its tokens before the first block"):
            anatomy.check_tokens("try")
        anatomy.check()

    def test_overlapping_patches_are_an_obstacle_to_this_alone(self):
        model = of_timm()()
        model.patch_embed.proj = randomize(nn.Conv2d(3, 48, 6, stride=4, padding=1))
        anatomy = read_anatomy(model)
        anatomy.check()
        assert max(student_discrepancies(anatomy, make_student(anatomy)).values()) < TOLERANCE
        with pytest.raises(ValueError, match="its patches overlap or leave gaps"):
            anatomy.resized((16, 16))

    @pytest.mark.parametrize("size", [(30, 32), (32, 2), (0, 32)])
    def test_patches_must_divide_the_size(self, size):
        with pytest.raises(ValueError, match=r"do not divide into patches of 4 x 4"):
            read_anatomy(KINDS["vit"].make()).resized(size)

    def test_images_of_no_such_size_are_refused(self):
        resized = read_anatomy(KINDS["vit"].make()).resized((16, 16))
        with pytest.raises(ValueError, match=r"Got images of 32 x 32 pixels, expected 16 x 16"):
            resized.embed(torch.zeros(1, 3, 32, 32))


class TestInheritedStarts:
    """Students that begin as their teacher at a lower resolution."""

    @pytest.fixture
    def anatomy(self, kind, anatomy):
        if not kind.patches:
            pytest.skip("it has a convolutional stem")
        return anatomy

    @staticmethod
    def assert_is(outputs, teacher, images):
        """A student's outputs are what its teacher gives for images that are as small as the teacher is."""
        images = F.interpolate(images, teacher.image_size, mode="bilinear", antialias=True)
        if teacher.classifier is not None:
            assert difference(outputs.logits, teacher.run_classifier(images)) < TOLERANCE
        else:
            embedding = outputs.get("image_embeds", outputs.get("pooler_output"))
            assert difference(embedding, teacher.embed(images)) < TOLERANCE

    @torch.no_grad()
    def test_before_training_a_student_is_its_teacher_at_a_lower_resolution(self, anatomy):
        """With as many tokens as patches, it is the teacher itself."""
        images = anatomy.example()
        for teacher in (anatomy.resized(tuple(pixels // 2 for pixels in anatomy.image_size)), anatomy):
            options = {"focusing": "inherited", "num_latent_tokens": teacher.num_patches}
            student = student_class(anatomy).from_teacher(anatomy, **options)
            assert student.config.token_grid == teacher.grid
            self.assert_is(student(images), teacher, images)

    @pytest.mark.parametrize("name", FEW)
    def test_trees_are_the_teacher_at_both_ends(self, name):
        """No cell split, and all of them."""
        anatomy = read_anatomy(KINDS[name].make())
        images = anatomy.example()
        student = student_class(anatomy).from_teacher(anatomy, 10_000, focusing="inherited", placement="content")
        coarse, *_, fine = student.config.cell_grids()
        assert student.config.num_latent_tokens == math.prod(fine) >= anatomy.num_patches
        student.config.elastic_token_counts = [math.prod(coarse), math.prod(fine)]
        for grid in (coarse, fine):
            size = tuple(cells * points for cells, points in zip(grid, anatomy.patch_size, strict=True))
            self.assert_is(student(images, num_tokens=math.prod(grid)), anatomy.resized(size), images)

    @torch.no_grad()
    @pytest.mark.parametrize("name", FEW)
    def test_with_a_token_for_each_patch_maps_are_the_teachers(self, name):
        anatomy = read_anatomy(KINDS[name].make())
        images, layers = anatomy.example(), [0, 1, len(anatomy.blocks)]
        student = frugalvit.SparseFormerBackbone.from_teacher(
            anatomy, anatomy.num_patches, focusing="inherited", out_indices=layers
        )
        for found, expected in zip(student(images).feature_maps, anatomy.feature_maps(images, layers), strict=True):
            assert found.shape == (2, anatomy.hidden_size, *anatomy.grid)
            assert difference(found, expected) < TOLERANCE

    def test_more_points_than_pixels_begin_as_their_means(self):
        anatomy = read_anatomy(KINDS["vit-classifier"].make())
        student = student_class(anatomy).from_teacher(anatomy, 16, focusing="inherited", patch_size=8)
        images = anatomy.example()
        expected = anatomy.resized((16, 16)).run_classifier(F.avg_pool2d(images, 2))
        assert difference(student(images).logits, expected) < TOLERANCE
        with pytest.raises(ValueError, match=r"`patch_size` is \(6, 6\), expected a multiple of \(4, 4\)"):
            student_class(anatomy).from_teacher(anatomy, 16, focusing="inherited", patch_size=6)

    def test_what_cannot_be_inherited_is_refused(self):
        anatomy = read_anatomy(KINDS["timm-mobileclip-b"].make())
        with pytest.raises(ValueError, match="Cannot inherit the patch embedding"):
            student_class(anatomy).from_teacher(anatomy, 4, focusing="inherited")
        # Its blocks can be.
        make_student(anatomy)


class TestStudents:
    @pytest.mark.parametrize("truncate", [0, 1])
    def test_with_its_teachers_tokens_a_student_gives_what_its_teacher_does(self, truncate, anatomy):
        """Positions, registers, prefix, norms and pooling in one: RoIs are exactly the patches' cells."""
        student = make_student(anatomy, truncate=truncate)
        assert len(student.base_model.layers) == 3 - truncate
        found = student_discrepancies(anatomy, student)
        assert found["tokens"] < TOLERANCE and found["embedding"] < TOLERANCE

    @pytest.mark.parametrize("name", FEW)
    def test_a_student_is_a_model_like_the_others(self, name, tmp_path):
        anatomy = read_anatomy(KINDS[name].make())
        student = make_student(anatomy)
        images = torch.randn(2, 3, 32, 32)
        outputs = student(images)
        embedding = outputs.get("image_embeds", outputs.get("pooler_output"))
        if embedding is not None:
            assert embedding.shape == (2, anatomy.embedding_size)
        student.save_pretrained(tmp_path)
        loaded = type(student).from_pretrained(tmp_path)
        torch.testing.assert_close(loaded(images)[0], outputs[0], rtol=0, atol=0)

    @pytest.mark.parametrize("name", ["dinov3-gated", "aimv2", "radio", "timm-pe-core", "timm-query-key-norm"])
    def test_a_student_compiles_and_exports_whole(self, name):
        student = make_student(read_anatomy(KINDS[name].make()), truncate=2)
        images = torch.randn(2, 3, 32, 32)
        with torch.no_grad():
            expected = student(images)[0]
            torch._dynamo.reset()
            compiled = torch.compile(student, backend="eager", fullgraph=True)
            torch.testing.assert_close(compiled(images)[0], expected)
            exported = torch.export.export(student, (images,))
            torch.testing.assert_close(exported.module()(images)[0], expected)

    @pytest.mark.parametrize("name", ["dinov3", "radio", "timm-eva02-clip"])
    def test_a_last_block_for_class_tokens_alone_computes_the_same(self, name):
        student = frugalvit.SparseFormerModel.from_teacher(KINDS[name].make(), **TINY_FOCUS)
        images = torch.randn(2, 3, 32, 32)
        outputs = student(images, output_tokens=False)
        torch.testing.assert_close(outputs.pooler_output, student(images).pooler_output)
        assert outputs.last_hidden_state.shape[1] == student.config.num_class_tokens

    @pytest.mark.parametrize("size", [(32, 32), (24, 16)])
    @pytest.mark.parametrize("name", FEW)
    def test_tokens_align_with_the_teachers(self, name, size):
        anatomy = read_anatomy(KINDS[name].make()).resized(size)
        anatomy.model.requires_grad_(False)
        student = make_student(anatomy)
        alignment = TokenAlignment(student, anatomy)
        outputs = student.base_model(anatomy.example(), **alignment.arguments)
        loss = alignment(outputs, anatomy.states(anatomy.example()))
        loss.backward()
        assert loss > 0 and student.base_model.transition.weight.grad.any()

    @pytest.mark.parametrize("name", ["dinov3", "timm-eva02", "timm-pe-core", "timm-dinov3"])
    @pytest.mark.parametrize("field", ["theta", "scale", "shift", "channels"])
    def test_rotary_positions_read_wrongly_are_found(self, name, field):
        anatomy = read_anatomy(KINDS[name].make())
        rotary = anatomy.rotary
        wrong = {
            "theta": rotary.theta * 2,
            "scale": (rotary.scale[0], rotary.scale[1] * 1.1),
            "shift": (rotary.shift[0] + 0.1, rotary.shift[1] - 0.1),
            "channels": rotary.channels.flip(0),
        }
        # A shift of all patches rotates none against another, only against what is not rotated.
        setattr(anatomy.rotary, field, wrong[field])
        with pytest.raises(ValueError, match="computes something else"):
            anatomy.check()

    @pytest.mark.parametrize(
        ("name", "fields"),
        [
            ("dinov3", {"rope_theta": 50.0}),
            ("dinov2-registers", {"layer_norm_eps": 1.0}),
            ("radio", {"pooled_class_tokens": [0, 1]}),
            ("pixio", {"pooling": "cls", "pooled_class_tokens": [0]}),
            ("dinov2-swiglu", {"hidden_act": "gelu"}),
        ],
    )
    def test_a_student_that_differs_is_found(self, name, fields):
        anatomy = read_anatomy(KINDS[name].make())
        student = make_student(anatomy, **fields)
        assert max(student_discrepancies(anatomy, student).values()) > TOLERANCE

    def test_focusing_norms_keep_the_references_epsilon(self):
        config = make_student(read_anatomy(of_transformers("ViT", layer_norm_eps=1e-3)())).config
        assert (config.layer_norm_eps, config.focusing_layer_norm_eps) == (1e-3, 1e-5)

    @pytest.mark.parametrize(
        ("pixels", "patch", "tokens"), [(224, 16, 48), (384, 16, 48), (336, 14, 143), (32, 4, 15)]
    )
    def test_default_tokens_are_the_papers(self, pixels, patch, tokens):
        teacher = of_transformers("ViT", image_size=pixels, patch_size=patch, num_hidden_layers=1)()
        student = frugalvit.SparseFormerModel.from_teacher(teacher, truncate=0, check=False)
        assert student.config.num_latent_tokens == tokens


class TestOtherMethods:
    def test_attention_can_be_initialized(self, kind):
        model = kind.make()
        if not kind.impulses:
            with pytest.raises(ValueError, match=r"Cannot initialize \w+: it (rotates|normalizes|adds no positions)"):
                impulse_init_(model)
            return
        report = impulse_init_(model, mass=0.8, generator=torch.Generator().manual_seed(0))
        anatomy = read_anatomy(model)
        assert len(report.heads) == sum(block.attention.num_heads for block in anatomy.blocks)
        # Twelve channels a head are few.
        assert report.mean("peak_rate") > 0.6
        mimetic_init_(model)
        anatomy.check()

    def test_context_broadcasting_can_be_inserted(self, kind):
        kinds = ("cb", "cb_s", "cb_gate", "cb_hybrid") if kind.class_token else ("cb", "cb_s")
        for each in kinds:
            report = insert_context_broadcast(kind.make(), each, ["mlp_end", "attention_end"])
            assert len(report.places) == 6
        model = kind.make()
        images = read_anatomy(model).example()
        before = read_anatomy(model).embed(images)
        if not kind.class_token:
            with pytest.raises(ValueError, match="needs a class token"):
                insert_context_broadcast(model, "cb_gate")
        insert_context_broadcast(model)
        assert not torch.allclose(read_anatomy(model).embed(images), before)


SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 24, "depths": [1], "num_heads": [2], "window_size": 4}


class GatedAttention(Attention):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options | {"gated": True})


REFUSED = {
    "swin": (lambda: transformers.SwinModel(transformers.SwinConfig(**SWIN)), "it is hierarchical"),
    "convnext": (
        lambda: transformers.ConvNextModel(transformers.ConvNextConfig(hidden_sizes=[8] * 4, depths=[1] * 4)),
        "hierarchical|no list of transformer blocks",
    ),
    "timm swin": (partial(timm.create_model, "swin_tiny_patch4_window7_224", embed_dim=24), "hierarchical"),
    "timm mobileclip-s": (partial(timm.create_model, "fastvit_mci0"), "hierarchical"),
    "post-norm blocks": (of_timm(block_fn=ResPostBlock), "computes something else"),
    "talking heads": (of_timm(Cait, img_size=32, patch_size=4), "mixes attention heads"),
    "relative position biases": (
        partial(timm.create_model, "beit_base_patch16_224", img_size=32, embed_dim=48, depth=2, num_heads=4),
        "relative position biases",
    ),
    "relative position biases of Transformers": (
        of_transformers("Beit", use_relative_position_bias=True),
        "relative position biases|no plain pre-norm block",
    ),
    "gated attention": (of_timm(attn_layer=GatedAttention), "gates the output"),
    "a backbone, which gives maps": (of_transformers("Dinov2", "Backbone", mlp_ratio=2), "does not run as a plain"),
    "tokens in windows": (of_transformers("Sam3ViT", intermediate_size=96), "does not run as a plain"),
    "mixed rotary positions": (of_timm(Eva, use_rot_pos_emb=True, rope_type="mixed"), "rotary positions"),
    "shared keys and values": (
        of_timm(Eva, attn_type="rope", qkv_fused=False, num_kv_heads=2),
        "shares keys and values among heads",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_vision_transformer_is_refused_by_every_method(name):
    make, message = REFUSED[name]
    model = randomize(make(), 0.05)
    with pytest.raises(ValueError, match=rf"Cannot bootstrap from \w+: .*({message})"):
        frugalvit.SparseFormerModel.from_teacher(model)
    with pytest.raises(ValueError, match=r"Cannot initialize \w+: "):
        impulse_init_(model)


def test_the_documentation_has_every_row():
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+ \| [^|]+ \| [^|]+) \|$", text, re.MULTILINE))
    tested = {kind.row for kind in KINDS.values()}
    assert tested <= rows.keys()
    assert rows.keys() - tested == {"model", "---", "Swin, PVT, PVTv2 of Transformers or timm"}
    for row in tested:
        kinds = [kind for kind in KINDS.values() if kind.row == row]
        bootstrap, initialize, broadcast = rows[row].split(" | ")
        assert bootstrap.startswith("yes")
        methods = ((initialize, {kind.impulses for kind in kinds}), (broadcast, {kind.class_token for kind in kinds}))
        for said, holds in methods:
            if said == "yes":
                assert holds == {True}
            elif said == "`cb`, `cb_s`" or said.startswith("no"):
                assert holds == {False}
            else:
                assert holds == {True, False}
