"""Fit random 8-dimensional Gaussians with every Gaussian family: the excess of KL[q‖p] over the best of the family.

    python -m benchmarks.gaussian_fit [--targets 10] [--seed 0] [--steps 1000] [--out results.json]

Adam at 0.1 with cosine decay, one unscented group a step, float64, the families' default starts. The best known
optimum of a family is the least of 32 deterministic starts (structvi.reproduce.optima) and of all runs. About two
minutes on one core.
"""

import argparse
import json
import platform
import time
from pathlib import Path

import torch

import structvi as vi
from structvi.families.full import FullNormalDensity
from structvi.reproduce.optima import best_kl, random_gaussians

P = 8


class Normal:
    """The target: a Gaussian log density at all draws at once."""

    def __init__(self, mean, covariance):
        self.space = vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)})
        self.density = FullNormalDensity(mean, torch.linalg.cholesky(covariance))
        self.evaluations = 0

    def log_joint(self, theta, batch=None):
        self.evaluations += len(theta)
        return self.density.log_prob(theta)


def fit(recipe, target, seed, steps, groups=1):
    """KL[q‖p] after `steps` of Adam, and the seconds it took."""
    generator = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    q = recipe.bind(target.space, generator)
    optimizer = torch.optim.Adam(q.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        (-vi.elbo(q, target, groups=groups, coupling=vi.unscented, generator=generator)).backward()
        optimizer.step()
        schedule.step()
    return vi.kl(q(), target.density).item(), time.perf_counter() - start


def run(targets=10, seed=0, steps=1000):
    means, covariances = random_gaussians(targets, P, torch.Generator().manual_seed(seed))
    rows = []
    cases = [("mean field", vi.MeanField(), 0, "covariance", 1)]
    cases += [("covariance", vi.StructuredNormal(rank), rank, "covariance", 1) for rank in (1, 2, 4, 8)]
    cases += [("precision", vi.StructuredPrecision(rank), rank, "precision", 1) for rank in (1, 2, 4, 8)]
    cases += [("full", vi.FullNormal(), P, "covariance", 16)]  # as many draws a step as rank 8 has
    for name, recipe, rank, form, groups in cases:
        problems = [Normal(mean, covariance) for mean, covariance in zip(means, covariances, strict=True)]
        results = [fit(recipe, problem, seed + i, steps, groups) for i, problem in enumerate(problems)]
        found = torch.tensor([value for value, _ in results], dtype=torch.float64)
        best = torch.minimum(best_kl(covariances, rank, form), found)
        excess = found - best
        rows.append(
            {
                "family": name,
                "rank": rank,
                "optimum_kl_q_p": best.median().item(),
                "kl_q_p": found.median().item(),
                "excess_median": excess.median().item(),
                "excess_max": excess.max().item(),
                "evaluations": problems[0].evaluations,
                "seconds": sorted(seconds for _, seconds in results)[len(results) // 2],
            }
        )
        print(
            "{family:>11} {rank:>4}   optimum {optimum_kl_q_p:8.4f}   found {kl_q_p:8.4f}   excess: median "
            "{excess_median:9.2e}, max {excess_max:9.2e}   {evaluations:>6} evaluations, {seconds:5.2f} s".format(
                **rows[-1]
            ),
            flush=True,
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"structvi {vi.__version__}, torch {torch.__version__}, {platform.machine()}, seed {arguments.seed}")
    rows = run(arguments.targets, arguments.seed, arguments.steps)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
