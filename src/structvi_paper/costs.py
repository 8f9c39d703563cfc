"""What each family costs as a function of P and K, counted on the code rather than written down."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from structvi.couplings import naive, paired, unscented
from structvi.families import (
    MAP,
    Family,
    FullNormal,
    LowRankNormal,
    LowRankPrecision,
    MCDropout,
    MeanField,
    Mixture,
)
from structvi.parameters import Parameters

#: name → recipe at rank K. PerLayer costs the sum of its parts.
FAMILIES: dict[str, Callable[[int], Family]] = {
    "MAP": lambda K: MAP(),
    "MCDropout": lambda K: MCDropout(),
    "MeanField": lambda K: MeanField(),
    "LowRankNormal(K)": lambda K: LowRankNormal(K),
    "LowRankPrecision(K)": lambda K: LowRankPrecision(K),
    "FullNormal": lambda K: FullNormal(),
    "Mixture, 2 × LowRankNormal(K)": lambda K: Mixture(LowRankNormal(K), components=2),
}
#: the terms that a count is made of
TERMS: dict[str, Callable[[int, int], int]] = {
    "P²": lambda P, K: P * P,
    "PK": lambda P, K: P * K,
    "P": lambda P, K: P,
    "K²": lambda P, K: K * K,
    "K": lambda P, K: K,
    "": lambda P, K: 1,
}
SIZES = [(P, K) for P in (32, 48, 80) for K in (2, 3, 5)]


@dataclass
class Cost:
    family: str
    parameters: str
    memory: str
    flops: str
    draws: str
    density: bool
    multimodal: bool
    covariance: bool


def costs() -> list[Cost]:
    """A row for each family."""
    return [_cost(name, recipe) for name, recipe in FAMILIES.items()]


def table() -> str:
    """The rows as text."""
    head = ("family", "parameters", "bytes with Adam", "flops a draw", "draws a group")
    rows: list[tuple[str, ...]] = [(*head, "density", "multimodal", "covariance")]
    for cost in costs():
        says = ["yes" if able else "no" for able in (cost.density, cost.multimodal, cost.covariance)]
        rows.append((cost.family, cost.parameters, cost.memory, cost.flops, cost.draws, *says))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("─" * width for width in widths))
    notes = (
        "",
        "P weights, rank K. Bytes: float32 parameters, their gradients, Adam's two moments, and the family's buffers.",
        "Flops: of matrix products in one more draw and its log q; elementwise work, a multiple of P, comes on top.",
        "Draws a group: naive / paired / unscented.",
        "Covariance: between different weights. Point masses have no density: the truth has probability zero.",
    )
    return "\n".join([*lines, *notes])


def _cost(name: str, recipe: Callable[[int], Family]) -> Cost:
    bound = {(P, K): recipe(K).bind(Parameters({"w": torch.ones(P)}), torch.Generator()) for P, K in SIZES}
    parameters = {size: sum(p.numel() for p in family.parameters()) for size, family in bound.items()}
    memory = {
        size: 16 * parameters[size] + 4 * sum(b.numel() for b in family.buffers()) for size, family in bound.items()
    }
    family = bound[SIZES[0]]
    density = family()
    return Cost(
        family=name,
        parameters=formula(parameters),
        memory=formula(memory),
        flops=formula({size: _flops(family) for size, family in bound.items()}),
        draws=_group(bound),
        density=density.has_density,
        multimodal=isinstance(family, Mixture | MCDropout),
        covariance=_correlates(family),
    )


def formula(counts: dict[tuple[int, int], int]) -> str:
    """The count as a polynomial of P and K, solved for and checked on all sizes.

    Example:
        >>> formula({(P, K): P * K + 2 * P for P, K in SIZES})
        'PK + 2P'
    """
    design = torch.tensor([[term(P, K) for term in TERMS.values()] for P, K in counts], dtype=torch.float64)
    values = torch.tensor(list(counts.values()), dtype=torch.float64)
    solution = torch.linalg.lstsq(design, values.unsqueeze(-1), driver="gelsd").solution.squeeze(-1)
    halves = (2 * solution).round() / 2
    if not torch.equal(design @ halves, values):
        raise ValueError(f"no polynomial in P and K gives {counts}")
    parts = []
    for coefficient, term in zip(halves.tolist(), TERMS, strict=True):
        if coefficient:
            size = f"{coefficient:g}" if coefficient != 1 or not term else ""
            parts.append(f"{size}{term}")
    return " + ".join(parts).replace("+ -", "− ") or "0"


def _flops(family: Family) -> int:
    """Of matrix products in one more draw of θ and its log q."""

    def count(groups: int) -> int:
        density = family()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            draws = density.draw(groups, generator=torch.Generator())
            if density.has_density:
                density.log_prob(draws.theta)
        return counter.get_total_flops()

    sizes = [family().draw(groups, generator=torch.Generator()).theta.shape[0] for groups in (8, 16)]
    return (count(16) - count(8)) // max(sizes[1] - sizes[0], 1)


def _group(bound: dict[tuple[int, int], Family]) -> str:
    """Draws in a group of each coupling."""

    def drawn(family: Family, coupling: Callable) -> int:
        few, more = (family().draw(g, coupling, torch.Generator()).theta.shape[0] for g in (2, 3))
        return more - few

    counts = [
        {size: drawn(family, coupling) for size, family in bound.items()} for coupling in (naive, paired, unscented)
    ]
    return " / ".join(formula(one) for one in counts)


def _correlates(family: Family) -> bool:
    """Whether different weights can covary under q: some off-diagonal covariance is not zero at random parameters."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in family.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    covariance = family().covariance()
    return bool((covariance - torch.diag(covariance.diagonal())).abs().max() > 1e-6)
