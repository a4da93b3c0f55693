"""Run by test_sparseformer.py as a program: forward and backward passes of models that diverged, which must not end
the process. Prints what was seen of each."""

import torch

from frugalvit import SparseFormerConfig, SparseFormerForImageClassification
from frugalvit.modeling.focusing import sample_features


SMALL = {"image_size": 64, "num_latent_tokens": 4, "stem_channels": 8, "focusing_hidden_size": 64, "hidden_size": 64}
SMALL |= {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_labels": 3,
    "num_mixed_points": 4,
}

for variant in ("v1-tiny", "augreg-base-49-224"):
    for name in ("stem.convolution.weight", "latents.initial_rois", "latents.token_embedding"):
        for value in (torch.nan, torch.inf):
            torch.manual_seed(0)
            config = SparseFormerConfig.from_variant(variant, **SMALL)
            model = SparseFormerForImageClassification(config).train()
            with torch.no_grad():
                model.base_model.get_parameter(name).fill_(value)
            loss = model(torch.randn(8, 3, 64, 64), labels=torch.arange(8) % 3).loss
            loss.backward()
            print(variant, name, value, loss.item())

features = torch.randn(2, 3, 8, 8, requires_grad=True)
points = torch.rand(2, 5, 4, 2)
points[0, 1, 2, 0] = points[1, 4, 3] = torch.nan
points[1, 0, 0] = torch.inf
for padding_mode in ("border", "zeros"):
    sampled = sample_features(features, points.requires_grad_(), padding_mode)
    sampled.sum().backward()
    print(padding_mode, sampled.isnan().any(-1).nonzero().tolist(), sampled.isnan().all(-1).sum().item())
