"""Can it be normalised? What the check after a fit costs, and what it says, for log densities that can and cannot.

    python -m benchmarks.normalised [--seed 0] [--out results.json]

`vi.fit(target, vi.FullNormal())` with its defaults, of improper ones with at most 10,000 evaluations. These have no
prior where they would need one: two classes that a plane separates, a scale with the density 1/τ, a number that
nothing depends on.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

import structvi as vi
from benchmarks.hard_densities import Known, normals, show

#: of evaluations, for those without an optimum to end at
LIMIT = 10_000
EFFECTS = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12], dtype=torch.float64)
ERRORS = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18], dtype=torch.float64)


class Case(NamedTuple):
    name: str
    P: int
    log_density: Callable[[Tensor], Tensor]
    proper: bool = True


def gaussian(P: int, sds: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
    """N(0, Q diag(sds²) Qᵀ), Q a rotation."""
    turn = torch.linalg.qr(normals(torch.Generator().manual_seed(seed), P, P)).Q
    return lambda theta: -0.5 * ((theta @ turn) / sds).square().sum(-1)


def powers(low: float, high: float, P: int) -> Tensor:
    return torch.logspace(low, high, P, dtype=torch.float64)


def logistic(P: int, prior: float | None, seed: int) -> Callable[[Tensor], Tensor]:
    """Of 10P rows; with the prior N(0, prior²) or, without one, classes that a plane separates."""
    generator = torch.Generator().manual_seed(seed)
    X, weights = normals(generator, 10 * P, P), normals(generator, P)
    chance = torch.rand(10 * P, generator=generator, dtype=torch.float64) if prior else 0.5
    y = ((X @ weights).sigmoid() > chance).double()

    def log_density(theta: Tensor) -> Tensor:
        logits = theta @ X.mT
        likelihood = logits @ y - softplus(logits).sum(-1)
        return likelihood - 0.5 * (theta / prior).square().sum(-1) if prior else likelihood

    return log_density


def schools(centred: bool, prior: bool) -> Callable[[Tensor], Tensor]:
    """(z or θ, μ, log τ), τ half Cauchy or of density 1/τ, which is flat in log τ."""

    def log_density(u: Tensor) -> Tensor:
        z, mu, log_tau = u[:, :8], u[:, 8:9], u[:, 9:]
        tau = log_tau.exp()
        theta = z if centred else mu + tau * z
        spread = -0.5 * ((z - mu) / tau).square() - log_tau if centred else -0.5 * z.square()
        of_tau = log_tau - torch.log1p((tau / 5).square()) if prior else torch.zeros_like(log_tau)
        fit = -0.5 * ((EFFECTS - theta) / ERRORS).square()
        return (spread + fit).sum(-1) + (of_tau - 0.5 * (mu / 5).square()).squeeze(-1)

    return log_density


def student(theta: Tensor) -> Tensor:
    return -0.5 * (3 + theta.shape[1]) * torch.log1p(theta.square().sum(-1) / 3)


def funnel(theta: Tensor) -> Tensor:
    """Neal's: v ~ N(0, 3²), nine numbers N(0, eᵛ)."""
    v, x = theta[:, 0], theta[:, 1:]
    return -v.square() / 18 - 0.5 * x.square().sum(-1) * (-v).exp() - 4.5 * v


def cases() -> list[Case]:
    return [
        Case("Gaussian, scales 10⁻³ to 10⁴", 3, lambda theta: -0.5 * (theta / powers(-3, 4, 3)).square().sum(-1)),
        Case("Gaussian, condition 10⁸", 5, gaussian(5, powers(-2, 2, 5), 0)),
        Case("Gaussian, condition 10⁴", 30, gaussian(30, powers(-1, 1, 30), 1)),
        Case("Student-t, 3 degrees of freedom", 3, student),
        Case("logistic regression, prior N(0, 10²)", 3, logistic(3, 10.0, 2)),
        Case("logistic regression, prior N(0, 10²)", 30, logistic(30, 10.0, 3)),
        Case("eight schools, not centred", 10, schools(False, True)),
        Case("eight schools, centred", 10, schools(True, True)),
        Case("Neal's funnel", 10, funnel),
        Case("separable logistic regression, no prior", 2, logistic(2, None, 4), False),
        Case("separable logistic regression, no prior", 10, logistic(10, None, 5), False),
        Case("eight schools, not centred, τ of density 1/τ", 10, schools(False, False), False),
        Case("a number that nothing depends on", 3, lambda theta: -0.5 * theta[:, :2].square().sum(-1), False),
    ]


def run(chosen: list[Case], seed: int) -> list[dict]:
    rows = []
    for case in chosen:
        began = time.perf_counter()
        limit = None if case.proper else LIMIT
        target = Known(case.P, case.log_density)
        result = vi.fit(target, vi.FullNormal(), seed=seed, max_evaluations=limit, progress=False)
        row = {"target, full normal": case.name, "P": case.P, "proper": case.proper}
        row |= {"called improper": result.status is vi.Status.DIVERGED, "evaluations": result.evaluations}
        row |= {"of the check": result.check_evaluations, "seconds": time.perf_counter() - began}
        show(row, first=not rows)
        rows.append(row | {"verdict": result.verdict})
    return rows


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = run(cases(), options.seed)
    wrong = [row["target, full normal"] for row in rows if row["called improper"] is row["proper"]]
    print(f"wrong: {', '.join(wrong) or 'none'}")
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))
    return rows


if __name__ == "__main__":
    main()
