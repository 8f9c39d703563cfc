"""Fit random 8-dimensional Gaussians with every Gaussian family, and with Pyro's low-rank guide: KL[q‖p] against
evaluations of the density and seconds, and its excess over the best of the family.

    python -m benchmarks.gaussian_fit [--targets 10] [--seed 0] [--steps 1000] [--out results.json]

Adam at 0.1 with cosine decay, float64, the default starts of each. Ours take one unscented group a step; Pyro's
AutoLowRankMultivariateNormal as many particles, drawn at once: the same number of evaluations. The best known optimum
of a family is the least of 32 deterministic starts (structvi_paper.optima) and of all runs. One thread; about
four minutes on one core, two of them Pyro's.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch

import structvi as vi
from structvi.families.full import FullNormalDensity
from structvi.families.low_rank import LowRankNormalDensity
from structvi_paper.optima import best_kl, random_gaussians

from . import peers, timing

P = 8
LR = 0.1
#: where in a run the KL is looked at, as fractions of the steps
LOOKS = (0.1, 0.25, 0.5, 1.0)


class Normal:
    """The target: a Gaussian log density at all draws at once."""

    def __init__(self, mean, covariance):
        self.space = vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)})
        self.density = FullNormalDensity(mean, torch.linalg.cholesky(covariance))
        self.evaluations = 0

    def log_joint(self, theta, batch=None):
        self.evaluations += len(theta)
        return self.density.log_prob(theta)


class Fit(NamedTuple):
    """A run under way: a step, and q as it stands."""

    step: Callable[[], None]
    density: Callable[[], vi.Density]


class Case(NamedTuple):
    name: str
    start: Callable[[Normal, int, int], Fit]  # (target, seed, steps)
    rank: int
    form: str = "covariance"


def ours(recipe, groups=1):
    def start(target, seed, steps):
        generator = torch.Generator().manual_seed(seed)
        q = recipe.bind(target.space, generator)
        optimizer = torch.optim.Adam(q.parameters(), lr=LR)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

        def step():
            optimizer.zero_grad()
            (
                -vi.elbo(
                    q,
                    target,
                    estimator=vi.Estimator(groups=groups, coupling=vi.couplings.unscented),
                    generator=generator,
                )
            ).backward()
            optimizer.step()
            schedule.step()

        return Fit(step, q)

    return start


def pyro_low_rank(rank):
    """As many particles a step as one unscented group has draws."""

    def start(target, seed, steps):
        import pyro
        from pyro.distributions import MultivariateNormal
        from pyro.infer import SVI, Trace_ELBO
        from pyro.infer.autoguide import AutoLowRankMultivariateNormal

        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        pyro.enable_validation(False)
        particles = vi.couplings.unscented.group_size(rank)
        prior = MultivariateNormal(target.density.mean, scale_tril=target.density.cholesky)

        def model():
            pyro.sample("z", prior)

        guide = AutoLowRankMultivariateNormal(model, rank=rank)
        settings = {"optimizer": torch.optim.Adam, "optim_args": {"lr": LR}, "T_max": steps}
        schedule = pyro.optim.CosineAnnealingLR(settings)  # pyright: ignore[reportAttributeAccessIssue]
        svi = SVI(model, guide, schedule, Trace_ELBO(particles, max_plate_nesting=0, vectorize_particles=True))

        def step():
            svi.step()
            schedule.step()
            target.evaluations += particles

        def density():
            q = guide.get_posterior()  # of covariance cov_diag + cov_factor cov_factorᵀ
            return LowRankNormalDensity(q.mean, q.cov_diag.log() / 2, q.cov_factor, torch.ones_like(q.mean))

        return Fit(step, density)

    return start


def fit(case, target, seed, steps):
    """KL[q‖p] along a run of `steps`: evaluations, seconds and nats at each look."""
    looks = {max(1, round(part * steps)) for part in LOOKS}
    curve, spent, since = [], 0.0, timing.clock()
    step, density = case.start(target, seed, steps)
    for number in range(1, steps + 1):
        step()
        if number in looks:
            spent += timing.clock() - since
            with torch.no_grad():
                kl = vi.kl(density(), target.density).item()
            curve.append({"evaluations": target.evaluations, "seconds": spent, "kl_q_p": kl})
            since = timing.clock()
    return curve


def cases():
    yield Case("mean field", ours(vi.MeanField()), 0)
    yield from (Case("covariance", ours(vi.LowRankNormal(rank)), rank) for rank in (1, 2, 4, 8))
    yield from (Case("precision", ours(vi.LowRankPrecision(rank)), rank, "precision") for rank in (1, 2, 4, 8))
    yield Case("full", ours(vi.FullNormal(), groups=16), P)  # as many draws a step as rank 8 has
    if peers.installed("pyro"):
        yield from (Case("Pyro", pyro_low_rank(rank), rank) for rank in (1, 2, 4, 8))
    else:
        print("Pyro: not installed", flush=True)


def run(targets=10, seed=0, steps=1000):
    means, covariances = random_gaussians(targets, P, torch.Generator().manual_seed(seed))
    optima, curves = {}, {}
    for case in cases():
        problems = [Normal(mean, covariance) for mean, covariance in zip(means, covariances, strict=True)]
        curves[case] = [fit(case, problem, seed + i, steps) for i, problem in enumerate(problems)]
        found = torch.tensor([curve[-1]["kl_q_p"] for curve in curves[case]], dtype=torch.float64)
        key = case.rank, case.form
        optima[key] = torch.minimum(optima[key] if key in optima else best_kl(covariances, *key), found)
        print(line(summary(case, curves[case], optima[key])), flush=True)
    return [summary(case, curve, optima[case.rank, case.form]) for case, curve in curves.items()]


def summary(case, curves, best):
    found = torch.tensor([curve[-1]["kl_q_p"] for curve in curves], dtype=torch.float64)
    excess = found - best
    looks = zip(*curves, strict=True)
    return {
        "family": case.name,
        "rank": case.rank,
        "optimum_kl_q_p": best.median().item(),
        "kl_q_p": found.median().item(),
        "excess_median": excess.median().item(),
        "excess_max": excess.max().item(),
        "evaluations": curves[0][-1]["evaluations"],
        "seconds": median(curve[-1]["seconds"] for curve in curves),
        "curve": [{name: median(point[name] for point in look) for name in look[0]} for look in looks],
    }


def line(row):
    return (
        "{family:>11} {rank:>4}   optimum {optimum_kl_q_p:8.4f}   found {kl_q_p:8.4f}   excess: median "
        "{excess_median:9.2e}, max {excess_max:9.2e}   {evaluations:>6} evaluations, {seconds:5.2f} s".format(**row)
    )


def table(rows):
    looks = [f"KL at {part:.0%}" for part in LOOKS]
    header = [
        "family",
        "rank",
        "optimum",
        *looks[-len(rows[0]["curve"]) :],
        "excess, median",
        "max",
        "evaluations",
        "s",
    ]
    lines = []
    for row in rows:
        kls = [f"{point['kl_q_p']:.4f}" for point in row["curve"]]
        lines.append([row["family"], str(row["rank"]), f"{row['optimum_kl_q_p']:.4f}", *kls])
        lines[-1] += [f"{row['excess_median']:.1e}", f"{row['excess_max']:.1e}"]
        lines[-1] += [str(row["evaluations"]), f"{row['seconds']:.2f}"]
    return timing.markdown(lines, header)


def main(arguments: Sequence[str] | None = None) -> dict:
    parser = timing.parser(__doc__ or "")
    parser.add_argument("--targets", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.set_defaults(threads=1)
    options = parser.parse_args(arguments)
    machine = timing.machine(timing.start(options))
    print(f"{timing.described(machine)}, seed {options.seed}")
    targets, steps = (1, 20) if options.quick else (options.targets, options.steps)
    rows = run(targets, options.seed, steps)
    results = {"machine": machine, "targets": targets, "steps": steps, "seed": options.seed, "rows": rows}
    results["table"] = f"{timing.described(machine)}; {targets} targets, {steps} steps; medians\n\n{table(rows)}"
    print(f"\n{table(rows)}")
    timing.write(results, options.out)
    return results


if __name__ == "__main__":
    main()
