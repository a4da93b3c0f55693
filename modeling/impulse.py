"""Query and key weights for impulse initialization, which makes attention maps impulse filters.

Zheng et al., *Structured Initialization for Attention in Vision Transformers* (arXiv 2404.01139). A head with query
weight Q and key weight K has the attention map softmax(X Q K' X' / sqrt(head_dim)). The pseudo input X, `(positions,
hidden_size)`, takes the place of the layer's tokens. Positions are the cells of a grid in row-major order.
"""

import math

import torch
import torch.nn.functional as F


# `solve_closed_form` treats a singular value of the pseudo input as zero if its ratio to the largest singular value is
# below this tolerance. The singular values of the sinusoidal encoding span 5 orders of magnitude. If all of them were
# inverted, the norms of the weights would be up to 50 times as large, and the attention of real tokens would have no
# peaks. Tolerances from 3e-3 to 3e-2 lead to similar results.
RELATIVE_TOLERANCE = 1e-2
# `solve_closed_form` uses this tolerance if `mass` is None. With a larger tolerance, the error (eq. 8) is larger than
# the error of Algorithm 1.
SHARP_TOLERANCE = 1e-3
# `solve_closed_form` uses this attention at the target if `mass` is None. Algorithm 1 reaches 0.97 to 0.997 on grids
# of 8 x 8 to 16 x 16 positions.
SHARP_MASS = 0.985


def sincos_position_encoding(height: int, width: int, hidden_size: int) -> torch.Tensor:
    """Return the sinusoidal position encoding of Simple ViT (Beyer et al. 2022), `(height * width, hidden_size)`.

    The channels are sin x, cos x, sin y and cos y. Each of them has the frequencies 10000^(-i / (n - 1)), i = 0, …, n
    - 1, where n is hidden_size / 4.
    """
    if hidden_size % 4:
        raise ValueError(f"`hidden_size` is {hidden_size}, expected a multiple of 4 (sine and cosine of x and y).")
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    omega = torch.logspace(0, -4, hidden_size // 4)
    x = x.reshape(-1, 1) * omega
    y = y.reshape(-1, 1) * omega
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)


def kernel_offsets(kernel_size: int) -> list[tuple[int, int]]:
    """Return the offsets (dy, dx) of a kernel's positions from its center, row by row. The center of an even kernel is
    the lower right of its four middle positions."""
    reach = range(-(kernel_size // 2), kernel_size - kernel_size // 2)
    return [(dy, dx) for dy in reach for dx in reach]


def draw_offsets(kernel_size: int, num_heads: int, generator: torch.Generator | None = None) -> list[tuple[int, int]]:
    """Draw a random offset of `kernel_offsets` for each head. An offset repeats only after all offsets were drawn."""
    offsets = kernel_offsets(kernel_size)
    drawn = []
    while len(drawn) < num_heads:
        drawn += [offsets[i] for i in torch.randperm(len(offsets), generator=generator).tolist()]
    return drawn[:num_heads]


def pinv_offsets(num_heads: int) -> list[tuple[int, int]]:
    """Return the offset of each head in a 3 x 3 kernel, as in the code of Zheng et al. for NeurIPS 2025."""
    offsets = kernel_offsets(3)
    order = (4, 1, 5, 3, 7, 0, 2, 6, 8)
    return [offsets[order[head % len(order)]] for head in range(num_heads)]


def impulse_matrix(height: int, width: int, offset: tuple[int, int]) -> torch.Tensor:
    """Return the matrix of a convolution with an impulse, `(height * width, height * width)`. Row i has a one at its
    target, the position at `offset` from position i. If the target lies outside of the grid, the row is zero."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    target_y = (y + offset[0]).flatten()
    target_x = (x + offset[1]).flatten()
    inside = (target_y >= 0) & (target_y < height) & (target_x >= 0) & (target_x < width)
    matrix = torch.zeros(height * width, height * width)
    matrix[inside.nonzero()[:, 0], (target_y * width + target_x)[inside]] = 1.0
    return matrix


def attention_map(inputs: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the attention map softmax(X Q K' X' / sqrt(head_dim)), `(…, positions, positions)`."""
    return attention_logits(inputs, query, key).softmax(-1)


def attention_logits(inputs: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the logits whose softmax is `attention_map`, `(…, positions, positions)`."""
    return (inputs @ query) @ (inputs @ key).mT / query.shape[-1] ** 0.5


def interior_mass(attention: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the attention of a position to its target, averaged over the positions whose target lies on the grid."""
    return (attention * target).sum((-2, -1)) / target.sum((-2, -1)).clamp(min=1)


def solve_closed_form(
    inputs: torch.Tensor, target: torch.Tensor, head_dim: int, mass: float | None = 0.2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Solve for Q and K in closed form: Q K' has rank `head_dim` and approximately shifts the pseudo input.

    A shift of a sinusoidal encoding rotates each pair of sine and cosine. If X is the encoding before the LayerNorm,
    there is therefore a matrix R with X R = S X, where S is `target`. Row i of X R X' has the dot products of all
    positions with the target of position i. The product of the target with itself is the largest.

    R is computed by least squares. Directions of X are left out if their singular values are small
    (`RELATIVE_TOLERANCE`). An SVD reduces R to rank `head_dim` and is split evenly between Q and K. Finally, Q and K
    are multiplied by a factor that sets the sharpness of the softmax.

    If `head_dim` is at least 16, each position whose target lies on the grid attends most to its target. If `head_dim`
    is below 16, the attention map is a blur around the target.

    If `mass` is a number, R is computed only from positions whose target lies on the grid. If `mass` is None, R is
    computed from all positions, and the maps are as sharp as those of `solve_adam`. In this case, positions whose
    target lies outside of the grid attend evenly to all positions, as in the minimum of eq. 8
    (`results/impulse_speed.json`).

    Args:
        inputs (`torch.Tensor`): `(positions, hidden_size)` float, the pseudo input after the layer's LayerNorm.
        target (`torch.Tensor`): Result of `impulse_matrix`, `(positions, positions)`.
        head_dim (`int`): Width of the head.
        mass (`float`, *optional*, defaults to 0.2): Attention at the target, averaged over the positions whose target
            lies on the grid. If this value is out of reach, 95 % of the largest possible value is used.

    Returns:
        Two tensors `(hidden_size, head_dim)`.
    """
    inside = target.sum(1) > 0
    if not inside.any() or len(target) == 1:
        # If the grid has only one position, or if no target lies on the grid, there is no shift. Q and K are zero.
        zeros = inputs.new_zeros(inputs.shape[1], head_dim)
        return zeros, zeros.clone()
    solved = slice(None) if mass is None else inside
    tolerance = SHARP_TOLERANCE if mass is None else RELATIVE_TOLERANCE
    u, s, vh = torch.linalg.svd(inputs[solved], full_matrices=False)
    kept = s > tolerance * s[0]
    shift = (u[:, kept].mT @ (target @ inputs)[solved]) / s[kept, None]
    left, values, right = torch.linalg.svd(shift, full_matrices=False)
    rank = min(head_dim, len(values))
    root = values[:rank].sqrt()
    query = F.pad(vh[kept].mT @ left[:, :rank] * root, (0, head_dim - rank))
    key = F.pad(right[:rank].mT * root, (0, head_dim - rank))

    factor = _sharpness(attention_logits(inputs, query, key), target, mass or SHARP_MASS) ** 0.5
    return factor * query, factor * key


def _sharpness(logits: torch.Tensor, target: torch.Tensor, mass: float) -> float:
    """Return the smallest factor on the logits that gives an attention of `mass` at the target. If no factor reaches
    `mass`, return the smallest factor that gives 95 % of the largest possible attention."""
    low = -2.0
    high = 3.0
    wanted = None
    scaled = logits / logits.std()
    for _ in range(3):
        exponents = torch.linspace(low, high, 32, dtype=logits.dtype, device=logits.device)
        masses = interior_mass((scaled * 10 ** exponents[:, None, None]).softmax(-1), target)
        most = masses.max().item()
        wanted = wanted or (mass if mass <= most else 0.95 * most)
        first = int((masses >= wanted).int().argmax())
        low = exponents[max(first - 1, 0)].item()
        high = exponents[first].item()
    return 10**high / logits.std().item()


def solve_pinv(
    inputs: torch.Tensor, target: torch.Tensor, head_dim: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Solve for Q and K by pseudo-inverse and SVD, as in the code of Zheng et al. for NeurIPS 2025.

    The wanted logits W are 1000 at the target and noise of standard deviation 1.8 elsewhere. The SVD of X+ W X+' is
    split evenly between Q and K, which are then scaled to a Frobenius norm of 7. X+ is the pseudo-inverse of X,
    restricted to the `head_dim` eigenvectors of X'X with the largest eigenvalues. In the code of Zheng et al.,
    position embeddings are random, and the eigenvalues have similar sizes. With the sinusoidal encoding, the inverses
    of the smallest eigenvalues dominate, and the attention maps have hardly any peaks.

    `generator` draws the noise. Other arguments and the results are those of `solve_closed_form`.
    """
    noise = torch.nn.init.trunc_normal_(torch.empty_like(target), std=0.6, generator=generator)
    wanted = torch.where(target > 0, torch.full_like(target, 1000.0), 3 * noise)
    values, vectors = torch.linalg.eigh(inputs.mT @ inputs)
    values = values[-head_dim:].clamp(min=1e-12)
    vectors = vectors[:, -head_dim:]
    # X+ = V diag(1 / values) V' X', so that X+ W X+' = V B V'. Only B, a `(head_dim, head_dim)` matrix, needs an SVD.
    reduced = (vectors.mT @ inputs.mT) / values[:, None]
    u, s, vh = torch.linalg.svd(reduced @ wanted @ reduced.mT)
    root = s.sqrt()
    query = F.pad(vectors @ (u * root), (0, head_dim - len(root)))
    key = F.pad(vectors @ (vh.mT * root), (0, head_dim - len(root)))
    return 7 * query / query.norm(), 7 * key / key.norm()


def solve_adam(
    inputs: torch.Tensor,
    targets: torch.Tensor,
    head_dim: int,
    steps: int = 10_000,
    learning_rate: float = 1e-4,
    generator: torch.Generator | None = None,
    renormalize_every: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Solve for Q and K by Algorithm 1 of Zheng et al.: Adam on the mean squared error of the attention map (eq. 8).

    The paper does not specify the initial weights. Here, they are uniform in +-1 / sqrt(hidden_size), PyTorch's
    default. Algorithm 1 as printed trains until the softmax is saturated.

    The authors' code differs from Algorithm 1. It averages the error over heads. Every 100 steps
    (`renormalize_every`), it scales each column of Q and each row of K to a fixed length, which is the mean length of
    the columns of Q before the first step. It multiplies logits by 0.1 for any `head_dim`. Here, logits are divided by
    sqrt(head_dim), as in a model.

    Args:
        inputs (`torch.Tensor`): `(positions, hidden_size)` float, the pseudo input after the layer's LayerNorm.
        targets (`torch.Tensor`): Results of `impulse_matrix`, `(heads, positions, positions)`.
        head_dim (`int`): Width of a head.
        steps (`int`), learning_rate (`float`): Steps and learning rate of Adam.
        generator (`torch.Generator`, *optional*): Generator of the random initial weights.
        renormalize_every (`int`, *optional*): Number of steps between two scalings. By default, there is no scaling.

    Returns:
        Two tensors `(heads, hidden_size, head_dim)`.
    """
    bound = inputs.shape[1] ** -0.5
    query, key = (
        torch.empty(len(targets), inputs.shape[1], head_dim).uniform_(-bound, bound, generator=generator)
        for _ in range(2)
    )
    with torch.enable_grad():
        parameters = [part.to(inputs).requires_grad_() for part in (query, key)]
        optimizer = torch.optim.Adam(parameters, lr=learning_rate)
        length = parameters[0].detach().norm(dim=1).mean()
        for step in range(steps):
            if renormalize_every and step % renormalize_every == 0:
                with torch.no_grad():
                    for part, axis in zip(parameters, (1, 2), strict=True):
                        part.mul_(length / part.norm(dim=axis, keepdim=True))
            optimizer.zero_grad()
            losses = ((attention_map(inputs, *parameters) - targets) ** 2).mean((-2, -1))
            # With a sum over heads, Adam's steps do not depend on the number of heads. The authors' mean divides the
            # gradients by this number, and Adam's epsilon then shortens the steps.
            (losses.mean() if renormalize_every else losses.sum()).backward()
            optimizer.step()
    return tuple(part.detach() for part in parameters)


def rotate_head(
    query: torch.Tensor, key: torch.Tensor, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Q O and K O with a random orthogonal matrix O. Attention does not change: Q O (K O)' equals Q K'."""
    rotation, triangle = torch.linalg.qr(torch.randn(2 * [query.shape[-1]], generator=generator, dtype=torch.float32))
    rotation = (rotation * triangle.diagonal().sign()).to(query)
    return query @ rotation, key @ rotation


def mimetic_factors(
    size: int, noise: float, identity: float, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two factors of the matrix noise * Z + identity * I, each `(size, size)` (Trockman & Kolter 2023). Z is
    random, uniform with variance 1 / size. The SVD of the matrix is split evenly between the factors."""
    bound = math.sqrt(3 / size)
    z = torch.empty(size, size, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
    u, s, vh = torch.linalg.svd(noise * z + identity * torch.eye(size, dtype=torch.float32))
    return u * s.sqrt(), s.sqrt()[:, None] * vh
