"""Is an error of `vi.fit` the search's or the family's? The best full normal of a posterior by another way.

    python -m benchmarks.family_optimum --data DIR [--only NAME ..] [--steps 1000] [--draws 4000]

Natural gradient steps of length 1/t on independent draws, fresh ones each time, begun at the moments of the reference
draws themselves, with which a full normal has no error (correlations of the fit). At draws θ = m + Lz of q

    Λ ← (1 − ρ)Λ + ρ L⁻ᵀ A L⁻¹,  m ← m + ρ Λ⁻¹L⁻ᵀ b,  b = E g, A = −E g zᵀ symmetric, g = ∇_z log p, ρ = 1/t

whose fixed point is the optimum of the ELBO. Nothing of the library's search is used. Printed: the worst errors of mean
and standard deviation of the fit and at that optimum, and how many nats the fit is below it, on common draws.
"""

import argparse
import platform
from pathlib import Path

import torch
from torch import Tensor

import structvi as vi
from benchmarks.hard_densities import common, show
from benchmarks.posteriordb import errors
from benchmarks.posteriordb_models import MODELS, Posterior

#: steps of length 1/10 before those of length 1/t
FIRST = 100


def optimum(posterior: Posterior, root: Tensor, steps: int, draws: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Mean and a root of the covariance of the best full normal, from the reference's mean and `root` [P, P]."""
    generator = torch.Generator().manual_seed(seed)
    mean, precision = posterior.mean.clone(), torch.linalg.inv(root @ root.mT)
    for t in range(1, FIRST + steps + 1):
        half = torch.linalg.cholesky(precision)  # θ = m + half⁻ᵀ z
        z = torch.randn(draws // 2, len(mean), generator=generator, dtype=torch.float64)
        z = torch.cat([z, -z]).requires_grad_()
        theta = mean + torch.linalg.solve_triangular(half.mT, z.mT, upper=True).mT
        (gradient,) = torch.autograd.grad(posterior.log_density(theta).sum(), z)
        A = -(gradient.mT @ z.detach()) / draws
        share = 0.1 if t <= FIRST else 1 / (10 + t - FIRST)
        precision = (1 - share) * precision + share * half @ ((A + A.mT) / 2) @ half.mT
        slope = half @ gradient.mean(0)
        mean = mean + share * torch.linalg.solve(precision, slope)
    return mean, torch.linalg.cholesky(torch.linalg.inv(precision))


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds posteriordb/")
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=4000)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"structvi {vi.__version__}, torch {torch.__version__}, {platform.machine()}")
    rows = []
    for name in options.only:
        posterior = Posterior(name, options.data / "posteriordb")
        result = vi.fit(posterior, vi.FullNormal(), progress=False)
        with torch.no_grad():
            q = result.family()
            covariance = q.covariance()
            scale = posterior.sd / covariance.diagonal().sqrt()
        start = torch.linalg.cholesky(covariance * scale * scale.unsqueeze(-1))
        mean, root = optimum(posterior, start, options.steps, options.draws)
        best = vi.FullNormal().bind(posterior.space)
        best.standardise(None)
        best.change_coordinates(mean, root)
        row: dict = {"posterior": name}
        for whose, at, sd in (
            ("fit", q.mean, covariance.diagonal().sqrt()),
            ("optimum", mean, root.norm(dim=-1)),
        ):
            off = errors(posterior, "", at, sd)
            row |= {f"{whose}: mean, worst": off["mean max"], f"{whose}: sd, worst": off["sd max"]}
        row["fit below the optimum, nats"] = common(best, posterior) - common(result.family, posterior)
        show(row | {"evaluations of the fit": result.evaluations}, first=not rows)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
