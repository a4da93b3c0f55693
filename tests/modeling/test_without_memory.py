"""Models that are made without memory."""

import pytest
import torch

import frugalvit
from kinds import KINDS
from tiny import randomize


TWINS = frugalvit.BootstrappedViTConfig(
    vit_config={
        "image_size": 32,
        "patch_size": 4,
        "num_attention_heads": 6,
        "hidden_size": 36,
        "num_hidden_layers": 3,
    },
    agent_config={"patch_size": 4, "num_positions": 6, "hidden_size": 36, "num_hidden_layers": 3},
    sharing="none",
    num_labels=3,
)
FAMILIES = {
    **{name: (kind.config(), kind.classifier) for name, kind in KINDS.items()},
    "bootstrapped_vit": (TWINS, frugalvit.BootstrappedViTForImageClassification),
}


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@torch.no_grad()
@pytest.mark.parametrize("assign", [False, True], ids=["to_empty", "assign"])
def test_weights_that_are_loaded_are_all_there_is(assign, family):
    config, model_class = family
    torch.manual_seed(0)
    model = randomize(model_class(config))
    with torch.device("meta"):
        empty = model_class(config)
    if not assign:
        empty = empty.to_empty(device="cpu")
        for tensor in (*empty.parameters(), *empty.buffers()):
            # What memory may hold.
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
    empty.load_state_dict(model.state_dict(), strict=True, assign=assign)
    pixel_values = torch.randn(2, 3, 32, 32)
    expected = model(pixel_values).logits
    torch.testing.assert_close(empty.eval()(pixel_values).logits, expected, rtol=0, atol=0)
