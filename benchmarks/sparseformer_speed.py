"""Measure the speed of SparseFormers, of their reference implementation, and of ViTs.

    python benchmarks/sparseformer_speed.py --sparseformer CHECKOUT

CHECKOUT is a clone of github.com/showlab/sparseformer. Models are timed in turns on random images. Our model gets the
reference implementation's weights and must return the same logits. The output is sparseformer_speed.json.
"""

import importlib
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

from frugalvit.modeling.conversion import convert_showlab
from frugalvit.training.choices import DTYPES
from shared import add_results_argument, build_model, make_parser, measure_speeds, write_table


# For each size: our variant, its name in the reference implementation, and a ViT of the same size.
SIZES = {
    "base": ("augreg-base-49-224", "sparseformer_btsp_augreg_base", "vit-base"),
    "large": ("augreg-large-49-224", "sparseformer_btsp_augreg_large", "vit-large"),
}


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--sparseformer", type=Path, required=True, help="a clone of the reference implementation")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="default: base large")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32], help="default: 1 8 32")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"], help="default: float32")
    parser.add_argument("--rounds", type=int, default=10, help="passes of the largest batch (default: %(default)s)")
    add_results_argument(parser)
    arguments = parser.parse_args()

    rows = []
    for size in arguments.sizes:
        variant, theirs, vit = SIZES[size]
        models = {theirs: load_reference(arguments.sparseformer, theirs)}
        models |= {name: build_model(name) for name in (variant, vit)}
        check_same_logits(models[variant], models[theirs])
        dtypes = [getattr(torch, dtype) for dtype in arguments.dtype]
        rows += measure_speeds(models, 224, arguments.batch_size, dtypes, arguments.rounds)
    write_table(
        arguments.results_dir / "sparseformer_speed.json",
        {"batch_sizes": arguments.batch_size, "rounds": arguments.rounds},
        rows,
    )


def load_reference(checkout: Path, name: str) -> nn.Module:
    package = checkout / "sparseformer"
    if not (package / "sparseformer" / "modeling.py").is_file():
        raise SystemExit(f"--sparseformer {checkout}: no clone of github.com/showlab/sparseformer.")
    sys.path.insert(0, str(package))
    with warnings.catch_warnings():
        # The reference implementation uses a deprecated name of `autocast`, which causes a warning.
        warnings.simplefilter("ignore", FutureWarning)
        config = importlib.import_module("sparseformer.config").route_name_to_config(name)
        model_class = importlib.import_module("sparseformer.modeling").SparseFormer
    del config["normalization_factor"], config["model_type"]
    return model_class(**config).eval()


@torch.no_grad()
def check_same_logits(ours: nn.Module, reference: nn.Module) -> float:
    """Copy the weights of the reference implementation into our model, and return the largest difference of logits.
    Noise is added to the weights first, because errors could be hidden where weights are zero or one."""
    for parameter in reference.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))
    ours.load_state_dict(convert_showlab(reference.state_dict(), ours.config))
    pixel_values = torch.randn(2, 3, 224, 224)
    difference = (ours(pixel_values).logits - reference(pixel_values)).abs().max().item()
    if difference > 1e-3:
        raise SystemExit(f"Logits differ by {difference:.2g} from the reference implementation's.")
    return difference


if __name__ == "__main__":
    main()
