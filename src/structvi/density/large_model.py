"""The mean curvature of a log density under a normal, learned from few products: a diagonal plus low rank.

Gradients at θ ± δ tell y = −½(g₊ − g₋), which is Aδ for a quadratic of Hessian −A, and on average over draws by Stein's
identity. Directions that are chosen give the low-rank part, draws the diagonal of what that leaves.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .low_rank_matrix import LowRankMatrix

#: rounds between the diagonal and the low-rank part, and the greatest factor by which one changes a diagonal
ROUNDS, LIMIT = 4, 3.0
#: least curvature along a direction that is believed, relative to q's, and what stands for one that is not positive
LEAST, WIDER = 1e-8, 0.25
#: least part of q's precision that is not of low rank
FLOOR = 1e-3
#: of the square of a normal number; squared standard errors that make a correction by itself certain
MEDIAN, CERTAIN = 0.455, 4.0
#: least eigenvalue of the diagonal along the directions, relative to the greatest
HELD = 1e-12


class Products(NamedTuple):
    """Steps in θ, and what the mean curvature makes of them; one each row."""

    steps: Tensor  # [n, P]
    curved: Tensor  # [n, P]


class Directions(NamedTuple):
    """Steps along which the curvature is diagonal, with what it makes of them: rows, and the curvatures [k]."""

    steps: Tensor
    curved: Tensor
    values: Tensor


def sound_directions(chosen: Products, precision: LowRankMatrix) -> Directions:
    """Turned so that they do not mix; where the curvature is not positive q is made wider.

    Args:
        chosen: products with steps that are orthonormal in units of q.
        precision: that of q.
    """
    inner = chosen.steps @ chosen.curved.mT
    values, turn = torch.linalg.eigh((inner + inner.mT) / 2)
    steps, curved = turn.mT @ chosen.steps, turn.mT @ chosen.curved
    wrong = values < LEAST
    curved = torch.where(wrong.unsqueeze(-1), WIDER * precision.product(steps), curved)
    return Directions(steps, curved, torch.where(wrong, WIDER, values))


def updated(a: Tensor, precision: LowRankMatrix, draws: Products, chosen: Directions, rank: int) -> LowRankMatrix:
    """The model of what is now known: block BFGS along the directions, from a diagonal that draws correct.

    With steps T and products Y = AT the curvature is B − BT(TᵀBT)⁻¹TᵀB + Y(TᵀY)⁻¹Yᵀ for B = diag(a): right along the
    directions, and positive. For draws δ of N(m, Λ⁻¹) the diagonal of what is left is E (y − Âδ)∘Λδ; it is believed as
    far as it is above its noise (James and Stein). As B holds the diagonal both are repeated.

    Args:
        a: the diagonal that was known before, [P].
        precision: Λ.
        draws: steps δ and products.
        chosen: T and Y.
        rank: columns that are kept.
    """
    weight, least = precision.product(draws.steps), FLOOR * precision.diagonal()
    for _ in range(ROUNDS):
        before, inverse = _pieces(a, chosen)
        left = draws.curved - a * draws.steps + (draws.steps @ before.mT @ inverse) @ before
        left = left - (draws.steps @ chosen.curved.mT / chosen.values) @ chosen.curved
        a = torch.maximum(a * _correction(left, draws.steps, weight, a), least)
    before, inverse = _pieces(a, chosen)
    columns = torch.cat([before.mT, chosen.curved.mT], dim=-1)
    return LowRankMatrix.of(a, columns, torch.block_diag(-inverse, (1 / chosen.values).diag()), rank)


def _pieces(a: Tensor, chosen: Directions) -> tuple[Tensor, Tensor]:
    """Of B = diag(a): BT in rows, and (TᵀBT)⁻¹."""
    before = a * chosen.steps
    inner = chosen.steps @ before.mT
    values, vectors = torch.linalg.eigh((inner + inner.mT) / 2)
    return before, (vectors / values.clamp(min=HELD * float(values[-1]))) @ vectors.mT


def _correction(left: Tensor, steps: Tensor, weight: Tensor, a: Tensor) -> Tensor:
    """The factor [P] of the diagonal: believed as far as all numbers are above their noise, or one by itself is."""
    n, each = len(left), left * weight
    found = each.sum(0) / (steps * weight).sum(0).clamp(min=0.5 * n) / a
    noise, square = each.var(0) / n / a.square(), found.square().clamp(min=1e-300)
    all_of_them = 1 - noise.median() / (square.median() / MEDIAN)
    gain = torch.maximum(1 - CERTAIN * noise / square, all_of_them).clamp(min=0.0)
    return (1 + gain * found).clamp(1 / LIMIT, LIMIT)
