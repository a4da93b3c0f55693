"""Tests of in-place initializations of a ViT's attention, and of resized position embeddings."""

import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import DeiTConfig, DeiTForImageClassification, ViTConfig, ViTForImageClassification, ViTModel
from vision_transformers import KINDS

from frugalvit import ViTImpulseInitConfig, ViTImpulseInitModel
from frugalvit.modeling.hosts.transformers import resize_positions_
from frugalvit.modeling.impulse import (
    attention_map,
    draw_offsets,
    impulse_matrix,
    interior_mass,
    kernel_offsets,
    pinv_offsets,
    rotate_head,
    sincos_position_encoding,
    solve_adam,
    solve_pinv,
)
from frugalvit.modeling.initialization import (
    impulse_init_,
    kaiming_uniform_init_,
    mimetic_init_,
    read_parts,
    trunc_normal_init_,
)


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 1, "hidden_size": 96, "intermediate_size": 64}
HEADS = {"num_attention_heads": 4}


def vit(model_class=ViTForImageClassification, config_class=ViTConfig, **fields):
    torch.manual_seed(0)
    return model_class(config_class(image_size=32, patch_size=4, **{**SIZES, **fields})).eval()


def own_vit(**fields):
    return ViTImpulseInitModel(ViTImpulseInitConfig(image_size=32, patch_size=4, **{**SIZES, **fields})).eval()


def test_mimetic_initialization_puts_the_identity_into_attention():
    model = vit()
    mimetic_init_(model, generator=seeded())
    attention = model.vit.layers[0].attention
    with torch.no_grad():
        queries_keys = attention.q_proj.weight.T @ attention.k_proj.weight
        values_outputs = attention.v_proj.weight.T @ attention.o_proj.weight.T
    # `queries_keys` is about 0.7 I + 0.7 Z, and `values_outputs` is about -0.4 I + 0.4 Z. The elements of Z are random
    # with mean 0 and variance 1 / 96.
    assert queries_keys.diagonal().mean().item() == pytest.approx(0.7, abs=0.05)
    assert values_outputs.diagonal().mean().item() == pytest.approx(-0.4, abs=0.05)
    off_diagonal = queries_keys - queries_keys.diagonal().diag()
    assert off_diagonal.std().item() == pytest.approx(0.7 / 96**0.5, rel=0.1)
    positions = model.vit.embeddings.position_embeddings[0]
    torch.testing.assert_close(positions[1:], sincos_position_encoding(8, 8, 96), rtol=0, atol=0)
    with pytest.raises(ValueError, match="Expected a plain pre-norm vision transformer"):
        mimetic_init_(timm.create_model("resnet10t"))


def test_sincos_positions_follow_the_formula():
    encoding = sincos_position_encoding(2, 3, 8)
    x, y, omega = 2, 1, 10000 ** -(1 / 1)
    expected = torch.tensor([x, x * omega]), torch.tensor([y, y * omega])
    row = torch.cat([expected[0].sin(), expected[0].cos(), expected[1].sin(), expected[1].cos()])
    torch.testing.assert_close(encoding[y * 3 + x], row)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def encoding(height, width, hidden_size):
    return F.layer_norm(sincos_position_encoding(height, width, hidden_size), (hidden_size,))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(-3, 3), st.integers(-3, 3), st.integers(0, 99))
def test_an_impulse_matrix_is_the_convolution_with_an_impulse(height, width, dy, dx, seed):
    image = torch.randn(height, width, generator=seeded(seed))
    kernel = torch.zeros(1, 1, 7, 7)
    # `conv2d` does not flip the kernel, so the kernel's only 1 is at offset (dy, dx) from its center.
    kernel[0, 0, 3 + dy, 3 + dx] = 1
    expected = F.conv2d(image[None, None], kernel, padding=3)[0, 0]
    torch.testing.assert_close(
        (impulse_matrix(height, width, (dy, dx)) @ image.flatten()).view(height, width), expected
    )


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 99))
def test_heads_take_all_positions_of_the_kernel_before_one_again(kernel_size, num_heads, seed):
    drawn = draw_offsets(kernel_size, num_heads, seeded(seed))
    counts = [drawn.count(offset) for offset in kernel_offsets(kernel_size)]
    assert kernel_offsets(2) == [(-1, -1), (-1, 0), (0, -1), (0, 0)] and kernel_offsets(3)[5] == (0, 1)
    assert pinv_offsets(10) == [kernel_offsets(3)[i] for i in (4, 1, 5, 3, 7, 0, 2, 6, 8, 4)]
    assert sum(counts) == num_heads and max(counts) - min(counts) <= 1


def test_offsets_of_heads_can_be_given_for_all_layers_or_by_layer():
    offsets = torch.tensor([[0, 1], [-1, 0], [0, 0], [1, 1]])
    model = vit(num_hidden_layers=2, num_attention_heads=4)
    assert [head.offset for head in impulse_init_(model, offsets=offsets).heads] == 2 * [
        (0, 1),
        (-1, 0),
        (0, 0),
        (1, 1),
    ]
    report = impulse_init_(model, offsets=lambda layer: offsets.roll(layer, 0))
    assert [head.offset for head in report.heads][4:] == [(1, 1), (0, 1), (-1, 0), (0, 0)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"`offsets` of a layer are .* \(3, 2\), expected integers of shape \(4, 2\)"):
        impulse_init_(model, offsets=offsets[:3])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_adam_does_what_the_algorithm_says():
    inputs, offsets = encoding(3, 4, 16), [(0, 1), (1, 0)]
    targets = torch.stack([impulse_matrix(3, 4, offset) for offset in offsets])
    query, key = solve_adam(inputs, targets, 8, steps=3, learning_rate=0.01, generator=seeded())
    generator = seeded()
    starts = [torch.empty(2, 16, 8).uniform_(-0.25, 0.25, generator=generator) for _ in range(2)]
    for head, target in enumerate(targets):
        q, k = (start[head].clone().requires_grad_() for start in starts)
        optimizer = torch.optim.Adam([q, k], lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            attention = torch.softmax(inputs @ q @ k.T @ inputs.T / 8**0.5, dim=1)
            ((attention - target).norm() ** 2 / 12**2).backward()
            optimizer.step()
        torch.testing.assert_close(query[head], q.detach(), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(key[head], k.detach(), rtol=1e-3, atol=1e-4)


def test_bounded_adam_averages_over_heads_and_keeps_lengths():
    """With `renormalize_every`, `solve_adam` takes the same steps as the authors' code."""
    # Small inputs give gradients as small as Adam's epsilon. With such gradients, a loss that averages over heads and
    # a loss that sums over heads give different steps.
    inputs = 0.01 * encoding(3, 4, 16)
    targets = torch.stack([impulse_matrix(3, 4, offset) for offset in ((0, 1), (1, 0))])
    found = solve_adam(inputs, targets, 8, steps=4, learning_rate=0.01, generator=seeded(), renormalize_every=2)
    generator = seeded()
    query, key = (torch.empty(2, 16, 8).uniform_(-0.25, 0.25, generator=generator).requires_grad_() for _ in range(2))
    optimizer, length = torch.optim.Adam([query, key], lr=0.01), query.detach().norm(dim=1).mean()
    for step in range(4):
        if step in (0, 2):
            query.data *= length / query.data.norm(dim=1, keepdim=True)
            key.data *= length / key.data.norm(dim=2, keepdim=True)
        optimizer.zero_grad()
        attention = torch.softmax(inputs @ query @ key.mT @ inputs.T / 8**0.5, dim=-1)
        F.mse_loss(attention, targets).backward()
        optimizer.step()
    torch.testing.assert_close(found, (query.detach(), key.detach()), rtol=0, atol=1e-5)


def test_a_rotated_head_attends_as_before():
    query, key = torch.randn(2, 32, 8, generator=seeded()).unbind()
    rotated = rotate_head(query, key, seeded(1))
    torch.testing.assert_close(rotated[0] @ rotated[1].T, query @ key.T, rtol=1e-4, atol=1e-4)
    assert (rotated[0] - query).abs().max() > 0.1


def timm_vit(**arguments):
    arguments = {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": 2, "num_heads": 4} | arguments
    return timm.models.vision_transformer.VisionTransformer(num_classes=5, **arguments).eval()


HOSTS = {
    "vit": lambda: vit(num_attention_heads=4),
    "vit-rectangle": lambda: ViTModel(ViTConfig(image_size=[24, 32], patch_size=4, **SIZES | HEADS)).eval(),
    "vit_impulse_init": lambda: own_vit(num_attention_heads=4),
    "timm": timm_vit,
    "timm-no-embed-class": lambda: timm_vit(reg_tokens=2, no_embed_class=True),
}


def grid_attention(model, grid):
    """Return the first layer's attention between N patches, `(heads, N, N)`. Patch embeddings are set to zero."""
    found = {}
    read = read_parts(model)
    module = getattr(model, "base_model", model)
    if hasattr(module, "blocks"):
        attention = module.blocks[0].attn
        attention.fused_attn = False
        attention.attn_drop.register_forward_hook(lambda _module, inputs, _output: found.update(maps=inputs[0]))
        module.patch_embed.proj.weight.data.zero_()
        module.patch_embed.proj.bias.data.zero_()
        module(torch.zeros(1, 3, 4 * grid[0], 4 * grid[1]))
        maps = found["maps"][0]
    else:
        projection = module.embeddings.patch_embeddings.projection
        projection.weight.data.zero_()
        projection.bias.data.zero_()
        module.set_attn_implementation("eager")
        maps = module(torch.zeros(1, 3, 4 * grid[0], 4 * grid[1]), output_attentions=True).attentions[0][0]
    assert read.grid == grid
    patches = grid[0] * grid[1]
    maps = maps[:, -patches:, -patches:]
    return maps / maps.sum(-1, keepdim=True)


@torch.no_grad()
@pytest.mark.parametrize("name", HOSTS)
def test_every_head_of_every_host_attends_to_its_offset(name):
    torch.manual_seed(0)
    model = HOSTS[name]()
    report = impulse_init_(model, mass=0.8, generator=seeded())
    grid = (6, 8) if "rectangle" in name else (8, 8)
    maps = grid_attention(model, grid)
    for head, attention in zip(report.heads, maps, strict=False):
        target = impulse_matrix(*grid, head.offset)
        assert interior_mass(attention, target).item() == pytest.approx(head.mass, abs=5e-3)
        assert ((attention.argmax(1) == target.argmax(1)) | (target.sum(1) == 0)).all() and head.peak_rate == 1
        assert 0.7 < head.mass < 0.82
        assert 0.5 < head.query_norm < 8 and head.query_norm == pytest.approx(head.key_norm, rel=1e-3)


@torch.no_grad()
def test_a_trained_layer_norm_is_taken_into_account():
    model = timm_vit()
    for block in model.blocks:
        block.norm1.weight.uniform_(0.8, 1.25)
        block.norm1.bias.normal_(std=0.1)
    report = impulse_init_(model, mass=0.8, generator=seeded())
    maps = grid_attention(model, (8, 8))
    for head, attention in zip(report.heads, maps, strict=False):
        target = impulse_matrix(8, 8, head.offset)
        assert interior_mass(attention, target).item() == pytest.approx(head.mass, abs=5e-3)
    assert report.mean("peak_rate") > 0.99


def test_baselines_draw_from_their_distributions():
    model = vit(num_hidden_layers=1)
    trunc_normal_init_(model, generator=seeded())
    weight = model.vit.layers[0].mlp.fc1.weight
    # timm truncates at +-2, which is 100 standard deviations, so some values are beyond 3 standard deviations.
    assert weight.abs().max() > 0.06 and weight.std().item() == pytest.approx(0.02, rel=0.05)
    torch.manual_seed(0)
    expected = timm.layers.trunc_normal_(torch.empty_like(weight), std=0.02)
    assert weight.std().item() == pytest.approx(expected.std().item(), rel=0.03)
    assert not model.vit.layers[0].mlp.fc1.bias.any()
    report = kaiming_uniform_init_(model, generator=seeded())
    assert 0.9 * 96**-0.5 < weight.abs().max() <= 96**-0.5 and model.vit.layers[0].mlp.fc1.bias.any()
    assert all(head.offset == (0, 0) and head.mass < 0.1 for head in report.heads)
    assert str(report).startswith("1 heads; means: error")


@pytest.mark.parametrize("initialize", [trunc_normal_init_, kaiming_uniform_init_])
def test_baselines_draw_fused_queries_keys_and_values(initialize):
    # The mean of all weights is 0.1 before and 0 after the initialization.
    model = KINDS["open_clip"].make()
    initialize(model, generator=seeded())
    for block in model.visual.transformer.resblocks:
        assert block.attn.in_proj_weight.mean().abs() < 0.01 and block.attn.in_proj_bias.mean().abs() < 0.05


@pytest.mark.parametrize(
    ("model", "size"),
    [(vit(DeiTForImageClassification, DeiTConfig), 24), (own_vit(position_embedding="learned"), 48)],
    ids=["deit", "vit_impulse_init"],
)
def test_resized_positions_equal_interpolation_in_the_forward_pass(model, size, tmp_path):
    model = type(model).from_pretrained(save(model, tmp_path / "before"))
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(pixels, interpolate_pos_encoding=True)[0]
        assert resize_positions_(model, size) is model
        torch.testing.assert_close(model(pixels)[0], expected)
        loaded = type(model).from_pretrained(save(model, tmp_path / "after"))
        torch.testing.assert_close(loaded(pixels)[0], expected)


def save(model, folder):
    model.save_pretrained(folder)
    return folder


def test_pinv_peaks_on_random_positions():
    inputs = F.layer_norm(torch.randn(64, 192, generator=seeded()), (192,))
    target = impulse_matrix(8, 8, (1, 0))
    query, key = solve_pinv(inputs, target, 64, seeded())
    peaks = attention_map(inputs, query, key).argmax(1) == target.argmax(1)
    assert peaks[target.sum(1) > 0].all()
    assert query.norm().item() == pytest.approx(7) and key.norm().item() == pytest.approx(7)
