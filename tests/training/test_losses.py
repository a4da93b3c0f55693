"""Test losses against brute force, and with inputs for which the losses are zero."""

from types import SimpleNamespace

import pytest
import timm
import torch
import torch.nn.functional as F
from trainings import STUDENT
from vision_transformers import KINDS, of_transformers

from frugalvit import BootstrapArguments, PatchSparseFormerModel, SparseFormerForImageClassification
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.modeling.hosts.running import compute_hidden_states, make_example
from frugalvit.training import losses
from frugalvit.training.losses import MapAlignment, MapAlignmentLoss, TokenAlignment
from tiny import make_vit


def maps(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*(shape or (2, 8, 3, 4)), generator=torch.Generator().manual_seed(seed))


def test_map_loss_compares_direction_and_length_after_the_mean_is_subtracted():
    found, target, shared = maps(), maps(seed=1), maps(2, 8, 1, 1, seed=2)
    loss = MapAlignmentLoss(0.5)([found + shared], [target + shared])
    torch.testing.assert_close(loss, MapAlignmentLoss(0.5)([found], [target]))
    common, expected = target.mean((2, 3), keepdim=True), 0.0
    found, target = found - common, target - common
    for image, row, column in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(4)).tolist():
        one, other = found[image, :, row, column], target[image, :, row, column]
        cosine = one @ other / one.norm() / other.norm()
        expected += (1 - cosine + 0.5 * (one.norm() / other.norm()).log() ** 2) / 24
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(MapAlignmentLoss(0.5)([found, target], [target, target]), expected / 2)
    larger = maps(2, 8, 6, 8, seed=1)
    expected = MapAlignmentLoss()([F.interpolate(found, (6, 8), mode="bilinear")], [larger])
    torch.testing.assert_close(MapAlignmentLoss()([found], [larger]), expected)


@pytest.fixture(scope="module")
def patches():
    """Return the `Anatomy` of a ViT with 16 patches."""
    torch.manual_seed(0)
    return read_anatomy(of_transformers("ViT", image_size=32, patch_size=8, num_hidden_layers=3)())


@pytest.mark.parametrize("placement", ["grid", "content"])
def test_maps_equal_the_teachers_if_each_patch_has_a_token(placement, patches):
    images, found = maps(2, 3, 32, 32), []
    student = PatchSparseFormerModel.from_teacher(patches, 16, placement=placement)
    with torch.no_grad():
        states = compute_hidden_states(patches, images)
        for count, layers in ((16, [-1, -2]), (4, [-1, -2]), (4, [-1])):
            align = MapAlignment(student, patches, layers)
            outputs = student(images, num_tokens=count, **TokenAlignment.arguments)
            found.append(align(outputs, align.teacher_maps(states)).item())
    assert found[0] < 1e-6 < 0.01 < found[1] and found[1] != found[2]
    for layers in ([0], [-5]):
        with pytest.raises(ValueError, match=f"dense_layers has {layers[0]}, expected -1, the last, to -4"):
            MapAlignment(student, patches, layers)


def transformers_vit():
    return make_vit(image_size=(32, 48), num_hidden_layers=3, num_labels=5)


def timm_vit():
    sizes = {"img_size": (32, 48), "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
    return timm.models.vision_transformer.VisionTransformer(global_pool="avg", **sizes)


def make_pair(make_teacher, truncate=1):
    """Return a student with 5 tokens and its teacher's `Anatomy`."""
    torch.manual_seed(0)
    teacher = make_teacher().eval().requires_grad_(False)
    student = SparseFormerForImageClassification.from_teacher(teacher, 5, truncate=truncate, **STUDENT)
    return student.eval(), read_anatomy(teacher)


@pytest.mark.parametrize("truncate", [0, 1])
@pytest.mark.parametrize("make_teacher", [transformers_vit, timm_vit])
def test_tokens_are_compared_at_every_depth_with_the_teachers_in_their_rois(make_teacher, truncate):
    student, anatomy = make_pair(make_teacher, truncate)
    alignment = TokenAlignment(student, anatomy)
    # Each of the 4 x 6 patches has two features: the row and the column of its center.
    y, x = torch.meshgrid((torch.arange(4) + 0.5) / 4, (torch.arange(6) + 0.5) / 6, indexing="ij")
    rois = torch.tensor([[[0.25, 0.25, 0.75, 0.5], [0.5, 0.5, 0.5, 0.5], [-5.0, -5.0, -4.0, -4.0], [0.0, 0.0, 1, 1]]])
    read = alignment.patch_weights(rois) @ torch.stack([y.flatten(), x.flatten()], dim=-1)[None]
    torch.testing.assert_close(read, torch.tensor([[[0.375, 0.5], [0.5, 0.5], [0.125, 1 / 12], [0.5, 0.5]]]))
    images = maps(2, 3, 32, 48)
    outputs, held = student.base_model(images, **alignment.arguments), compute_hidden_states(anatomy, images)
    assert len(held) == 4 and len(outputs.hidden_states) == 4 - truncate
    loss = alignment(outputs, held)
    loss.backward()
    assert loss > 0 and student.base_model.stem.convolution.weight.grad.any()
    # Each token becomes 3 * target + 1. The loss is then zero, because it ignores scale and shift.
    shares = alignment.patch_weights(outputs.rois[-1])
    outputs.hidden_states = [
        torch.cat([states[:, : alignment.num_prefix_tokens], 3 * shares @ expected[:, -shares.shape[-1] :] + 1], dim=1)
        for states, expected in zip(outputs.hidden_states, held[truncate:], strict=True)
    ]
    assert alignment(outputs, held).item() == pytest.approx(0, abs=1e-4)


def test_raw_distance_of_one_layer():
    """A LLaVA does not normalize hidden states, so the raw distance depends on their scale and mean."""
    (student, anatomy), images = make_pair(transformers_vit), maps(2, 3, 32, 48)
    alignment = TokenAlignment(student, anatomy, layers=[-2], distance="raw")
    outputs, held = student.base_model(images, **alignment.arguments), compute_hidden_states(anatomy, images)
    shares, states = alignment.patch_weights(outputs.rois[-1]), outputs.hidden_states[-2]
    patches = held[-2][:, -shares.shape[-1] :]
    tokens = states[:, alignment.num_prefix_tokens :]
    expected = (tokens - shares @ patches).square().mean() / patches.var((0, 1)).mean()
    torch.testing.assert_close(alignment(outputs, held), expected)
    for scale, shift, far in ((1, 0, False), (3, 0, True), (1, 1, True)):
        tokens = scale * shares @ patches + shift
        outputs.hidden_states = [*outputs.hidden_states[:-2], torch.cat([states[:, :1], tokens], 1), None]
        assert (alignment(outputs, held) > 0.1) == far
    with pytest.raises(ValueError, match="token_layers has 3, .* -3 to 2"):
        TokenAlignment(student, anatomy, layers=[3])


@pytest.mark.parametrize("name", ["deit", "dinov2-registers", "dinov3", "siglip-vision"])
def test_attention_to_patches_equals_the_models(name):
    model = KINDS[name].make()
    model.set_attn_implementation("eager")
    anatomy = read_anatomy(model)
    images = make_example(anatomy)
    prefix_tokens = anatomy.num_prefix_tokens
    with torch.no_grad():
        states, expected = compute_hidden_states(anatomy, images), model(images, output_attentions=True).attentions
    queries = slice(0, anatomy.num_class_tokens) if anatomy.num_class_tokens else slice(prefix_tokens, None)
    for block, tokens, weights in zip(anatomy.blocks, states, expected, strict=False):
        weights = weights[:, :, queries, prefix_tokens:]
        weights = (weights / weights.sum(-1, keepdim=True)).mean((1, 2))
        found = losses.attention_to_patches(anatomy, block, tokens)
        torch.testing.assert_close(found, weights, atol=1e-5, rtol=1e-3)


def test_a_forecast_is_compared_with_attention_by_area():
    attention, logits = torch.tensor([[[0.5, 0.1], [0.25, 0.15]]]), maps(1, 2, 2)
    expected = (attention * (attention.log() - logits.flatten(1).log_softmax(1).view(1, 2, 2))).sum()
    torch.testing.assert_close(losses.attention_loss(logits, attention), expected)
    spread = attention.repeat_interleave(2, 1).repeat_interleave(2, 2) / 4
    torch.testing.assert_close(losses.attention_loss(logits, spread), expected)


def test_embeddings_and_labels_are_compared():
    student, anatomy = make_pair(transformers_vit)
    own, target, labels = maps(2, 32), maps(2, 32, seed=1), torch.tensor([3, 1])
    scores, of_teacher = student.classifier(own), anatomy.classifier(target)
    cosine = 1 - F.cosine_similarity(own, target).mean()
    kl = 4 * F.kl_div((scores / 2).log_softmax(1), (of_teacher / 2).softmax(1), reduction="batchmean")
    for options, expected in (
        ({}, cosine),
        ({"loss": "kl", "temperature": 2.0}, kl),
        ({"label_loss_weight": 0.5}, cosine + 0.5 * F.cross_entropy(scores, labels)),
    ):
        args = BootstrapArguments(output_dir="unused", use_cpu=True, token_loss_weight=0, **options)
        align = losses.AlignmentLoss(student, anatomy, args)
        found = align(SimpleNamespace(pooler_output=own), target, labels)
        torch.testing.assert_close(found, expected)
    align.args.token_loss_weight, align.args.dense_loss_weight = 0.1, 0.01
    align.align_tokens = align.align_maps = lambda *_: 3.0
    found = align(SimpleNamespace(pooler_output=own), target, labels)
    torch.testing.assert_close(found, expected + 0.33)
