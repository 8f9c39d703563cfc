"""100-dimensional Gaussians of condition number 10⁴: how far from the best of its family does `vi.fit` end?

    python -m benchmarks.gaussian_hundred [--targets 3] [--evaluations 200000] [--peers] [--out results.json]

Targets are N(μ, Q diag(d) Qᵀ) with Q a uniform rotation, d from 10⁻² to 10² evenly in the logarithm, μ ~ N(0, I). The
excess of KL[q‖p] over the least known (a search over the profile that sees the covariance, in
structvi.studies.paper.optima, and all fits) is a share of what the rank can gain, KL(mean field) − KL(optimum). Pyro
has Adam at the same evaluations,
each of two rates, and keeps the better by KL.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from statistics import median

import torch

import structvi as vi
from structvi.families.full import FullNormalDensity
from structvi.searching.fixed_draws import FixedDraws
from structvi.studies.paper.optima import best_kl

P = 100
CONDITION = 1e4
RANKS = (5, 20)
#: of Pyro: draws a step, and rates of Adam
PARTICLES, RATES = 32, (0.01, 0.03)


class Target:
    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        options = {"generator": generator, "dtype": torch.float64}
        q, r = torch.linalg.qr(torch.randn(P, P, **options))
        rotation = q * r.diagonal().sign()
        d = torch.logspace(-0.5, 0.5, P, base=CONDITION, dtype=torch.float64)
        self.covariance = (rotation * d) @ rotation.mT
        self.exact = FullNormalDensity(torch.randn(P, **options), torch.linalg.cholesky(self.covariance))
        self.space = vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)})

    def log_joint(self, theta, batch=None):
        return self.exact.log_prob(theta)


def exact_kl(q, target: Target) -> float:
    """E_q log q/p, exact on draws with exact second moments, also where a scale is near 0 or ∞."""
    theta = q.draw(1, FixedDraws(2 * q.noise_size, seed=0)).theta
    return (q.log_prob(theta) - target.log_joint(theta)).mean().item()


def ours(target: Target, seed: int, evaluations: int) -> list[dict]:
    cases = [("mean field", 0, "covariance", vi.MeanField())]
    cases += [("covariance", rank, "covariance", vi.StructuredNormal(rank)) for rank in RANKS]
    cases += [("precision", rank, "precision", vi.StructuredPrecision(rank)) for rank in RANKS]
    cases += [("full", P, "covariance", vi.FullNormal())]
    rows = []
    for family, rank, form, recipe in cases:
        result = vi.fit(target, recipe, seed=seed, max_evaluations=evaluations, progress=False)
        kl = exact_kl(result.family.requires_grad_(False)(), target)
        row = {"family": family, "rank": rank, "form": form, "kl": kl, "evaluations": result.evaluations}
        rows.append(row | {"seconds": result.seconds, "verdict": result.verdict})
    return rows


def pyro_fit(target: Target, rank: int, seed: int, evaluations: int) -> dict:
    import pyro
    from pyro.distributions import ImproperUniform, constraints
    from pyro.infer import SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoDiagonalNormal, AutoLowRankMultivariateNormal, init_to_value

    def model():
        z = pyro.sample("z", ImproperUniform(constraints.real_vector, (), (P,)))
        pyro.factor("log density", target.log_joint(z.reshape(-1, P)).reshape(z.shape[:-1]))

    pyro.enable_validation(False)
    found = []
    began = time.perf_counter()
    for rate in RATES:
        pyro.set_rng_seed(seed)
        pyro.clear_param_store()
        start = init_to_value(values={"z": target.space.initial})
        guide = (
            AutoLowRankMultivariateNormal(model, init_loc_fn=start, rank=rank)
            if rank
            else AutoDiagonalNormal(model, init_loc_fn=start)
        )
        objective = Trace_ELBO(num_particles=PARTICLES, vectorize_particles=True, max_plate_nesting=0)
        svi = SVI(model, guide, pyro.optim.Adam({"lr": rate}), objective)  # pyright: ignore
        for _ in range(evaluations // PARTICLES):
            svi.step()
        fitted = guide.get_posterior()
        covariance = fitted.covariance_matrix if rank else torch.diag(fitted.variance)
        q = FullNormalDensity(fitted.mean.detach(), torch.linalg.cholesky(covariance.detach()))
        found.append(vi.kl(q, target.exact).item())
    seconds = time.perf_counter() - began
    row = {"family": "Pyro", "rank": rank, "form": "covariance", "kl": min(found), "evaluations": evaluations}
    return row | {"seconds": seconds}


def run(targets: int, evaluations: int, peers: bool, starts: int = 6, steps: int = 600) -> list[dict]:
    rows = []
    for seed in range(targets):
        target = Target(seed)
        fits = ours(target, seed, evaluations)
        fits += [pyro_fit(target, rank, seed, evaluations) for rank in (0, *RANKS)] if peers else []
        least = {}
        for form, rank in {(row["form"], row["rank"]): None for row in fits}:
            known = 0.0 if rank == P else best_kl(target.covariance.unsqueeze(0), rank, form, starts, steps).item()
            least[form, rank] = min([known, *(r["kl"] for r in fits if (r["form"], r["rank"]) == (form, rank))])
        for row in fits:
            optimum = least[row["form"], row["rank"]]
            row |= {"seed": seed, "optimum": optimum, "excess": row["kl"] - optimum}
            gain = least["covariance", 0] - optimum
            row["share"] = row["excess"] / gain if row["rank"] else None
            print(
                "{seed} {family:>10} {rank:>3}   optimum {optimum:9.4f}   excess {excess:9.2e}   share {share}   "
                "{evaluations} evaluations, {seconds:.1f} s".format(**row),
                flush=True,
            )
        rows += fits
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", type=int, default=3)
    parser.add_argument("--evaluations", type=int, default=200_000)
    parser.add_argument("--peers", action="store_true", help="Pyro too")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"structvi {vi.__version__}, torch {torch.__version__}, {platform.machine()}")
    rows = run(options.targets, options.evaluations, options.peers)
    for family, rank in dict.fromkeys((row["family"], row["rank"]) for row in rows):
        own = [row for row in rows if (row["family"], row["rank"]) == (family, rank)]
        excess = median(row["excess"] for row in own)
        share = f", {100 * max(row['share'] for row in own):.2g} % of the gain at most" if rank else ""
        print(f"{family} {rank}: excess {excess:.2g} nats in the middle{share}")
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
