"""Compare time and memory of `GeneralizedConv2d` and of the matrix form of generalized convolution (eq. 5).

    python benchmarks/generalized_convolution_speed.py

Equations are those of Zhang et al., *Bootstrapping ViTs* (CVPR 2022). Layers have 64 channels and kernels with 9
positions. The time to compute the constant matrices of the matrix form does not count. The memory of these matrices
counts, because a model would store them. Memory is the peak memory of a forward pass in a new process (Linux). The
output is generalized_convolution_speed.json.
"""

from collections.abc import Callable

import torch
from torch import nn

from frugalvit import GeneralizedConv2d
from frugalvit.modeling.generalized_convolution import window_size
from frugalvit.speed import images_per_second
from shared import add_results_argument, make_parser, peak_memory, write_table


CHANNELS = 64
POSITIONS = 9


def shift_matrices(height: int, width: int, num_positions: int) -> torch.Tensor:
    """Return the constant matrices Φ of eqs. 4 and 6, `(positions, height * width, height * width)`. Row q of Φ_i is 1
    at the i-th position of the window around q, and 0 elsewhere. If this position is outside the map, the row is 0."""
    side = window_size(num_positions)
    matrices = torch.zeros(num_positions, height, width, height, width)
    for index in range(num_positions):
        dy = index // side - side // 2
        dx = index % side - side // 2
        for y in range(max(0, -dy), min(height, height - dy)):
            for x in range(max(0, -dx), min(width, width - dx)):
                matrices[index, y, x, y + dy, x + dx] = 1
    return matrices.flatten(3).flatten(1, 2)


def generalized_convolution_in_matrix_form(
    feature_map: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    matrices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `generalized_conv2d` in matrix form, Y = Σ Φ_i X W_i (eq. 5). Time and memory grow with the square of
    the number of positions in the map. `matrices` defaults to the result of `shift_matrices`."""
    height, width = feature_map.shape[-2:]
    if matrices is None:
        matrices = shift_matrices(height, width, weight.shape[-1]).to(feature_map)
    projected = torch.einsum("bcp,oci->ipbo", feature_map.flatten(2), weight)
    output = torch.einsum("iqp,ipbo->boq", matrices, projected)
    output = output if bias is None else output + bias[:, None]
    return output.unflatten(-1, (height, width))


class MatrixForm(nn.Module):
    """A generalized convolution in matrix form, for square maps of one size."""

    def __init__(self, layer: GeneralizedConv2d, side: int):
        super().__init__()
        self.layer = layer
        self.register_buffer("matrices", shift_matrices(side, side, POSITIONS))

    def forward(self, feature_map: torch.Tensor) -> torch.Tensor:
        return generalized_convolution_in_matrix_form(feature_map, self.layer.weight, self.layer.bias, self.matrices)


def main():
    parser = make_parser(__doc__)
    parser.add_argument(
        "--sides", type=int, nargs="+", default=[14, 28, 56], help="sides of the maps (default: 14 28 56)"
    )
    parser.add_argument("--batch-size", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=20, help="timed passes of each (default: %(default)s)")
    add_results_argument(parser)
    arguments = parser.parse_args()

    rows = []
    for side in arguments.sides:
        torch.manual_seed(0)
        feature_map = torch.randn(arguments.batch_size, CHANNELS, side, side)
        layer = GeneralizedConv2d(CHANNELS, CHANNELS, POSITIONS)
        models = {"convolution": layer, "matrix_form": MatrixForm(layer, side)}
        torch.testing.assert_close(*(model(feature_map) for model in models.values()), atol=1e-4, rtol=1e-4)
        speeds = images_per_second(models, feature_map, arguments.rounds)
        row = {"map": f"{side} x {side}"}
        row |= {f"{name}_ms": 1000 * arguments.batch_size / speed for name, speed in speeds.items()}
        row["times_faster"] = speeds["convolution"] / speeds["matrix_form"]
        for name in models:
            row[f"{name}_mb"] = peak_memory(make_pass, name, side, arguments.batch_size)
        rows.append(row)
    write_table(
        arguments.results_dir / "generalized_convolution_speed.json",
        {"channels": CHANNELS, "positions": POSITIONS, "batch_size": arguments.batch_size, "rounds": arguments.rounds},
        rows,
    )


def make_pass(name: str, side: int, batch_size: int) -> Callable[[], torch.Tensor]:
    """Return a function that builds a layer and runs the layer. For the matrix form, the function also builds the
    constant matrices, so that their memory counts."""
    feature_map = torch.randn(batch_size, CHANNELS, side, side)
    # The first convolution and the first matrix product allocate memory inside libraries. This memory must not count.
    with torch.inference_mode():
        nn.Conv2d(CHANNELS, CHANNELS, 3)(torch.randn(1, CHANNELS, 8, 8))
        torch.randn(64, 64) @ torch.randn(64, 64)

    def compute() -> torch.Tensor:
        layer = GeneralizedConv2d(CHANNELS, CHANNELS, POSITIONS)
        return (layer if name == "convolution" else MatrixForm(layer, side))(feature_map)

    return compute


if __name__ == "__main__":
    main()
