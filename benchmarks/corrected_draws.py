"""Importance-corrected moments where the truth is known: how far q is off, how far the corrected ones, and k̂.

python -m benchmarks.corrected_draws [--draws 4000] [--seeds 5] [--mean-field] [--annealed]

One row a target: the least and the largest k̂ over seeds, how many `sample` refuses, the effective part of the draws,
and errors, root mean squares over all seeds, refused ones too: of a mean, in standard deviations, and of a standard
deviation, relative; the largest of all numbers. With --annealed instead draws that are led from q to the posterior:
R̂, the share of paths that broke off, evaluations, how many fits warn, and the same errors.
"""

import argparse
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Dirichlet, HalfCauchy, MultivariateNormal, Normal, StudentT

import structvi as vi
from structvi.searching.drawing import annealed_draws, weighted_draws


class Case(NamedTuple):
    name: str
    target: vi.LogDensity
    value: Callable[[dict[str, Tensor]], Tensor]
    mean: Tensor
    sd: Tensor


def tensor(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def vector(name: str, log_density, P: int, mean: Tensor, sd: Tensor) -> Case:
    space = vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)})
    return Case(name, vi.LogDensity(lambda p: log_density(p["z"]), space), lambda p: p["z"], mean, sd)


def gamma(shape: float) -> Case:
    target = vi.LogDensity(lambda p: (shape - 1) * p["s"].log() - p["s"], vi.Parameters({"s": vi.positive(1.0)}))
    return Case(f"Gamma({shape:g}, 1)", target, lambda p: p["s"], tensor(shape), tensor(sqrt(shape)))


def dirichlet(alpha: list[float]) -> Case:
    exact = Dirichlet(tensor(alpha))
    target = vi.LogDensity(lambda p: exact.log_prob(p["p"]), vi.Parameters({"p": vi.simplex(len(alpha))}))
    shown = ", ".join(f"{a:g}" for a in alpha[:3]) + (f", .. of {len(alpha)}" if len(alpha) > 3 else "")
    return Case(f"Dirichlet({shown})", target, lambda p: p["p"], exact.mean, exact.stddev)


def normal(P: int, correlation: float) -> Case:
    covariance = torch.full((P, P), correlation, dtype=torch.float64)
    covariance.fill_diagonal_(1.0)
    zero = torch.zeros(P, dtype=torch.float64)
    exact = MultivariateNormal(zero, covariance)
    return vector(f"normal of {P}, correlation {correlation:g}", exact.log_prob, P, zero, torch.ones_like(zero))


def banana(bend: float) -> Case:
    def log_density(z):
        return -0.5 * z[0].square() - 0.5 * (z[1] - bend * (z[0].square() - 1)).square()

    return vector(f"banana, bend {bend:g}", log_density, 2, tensor([0.0, 0.0]), tensor([1.0, sqrt(1 + 2 * bend**2)]))


def funnel(P: int, spread: float) -> Case:
    space = vi.Parameters({"v": torch.zeros((), dtype=torch.float64), "x": torch.zeros(P - 1, dtype=torch.float64)})

    def log_density(p):
        return Normal(0.0, spread).log_prob(p["v"]) + Normal(0.0, (p["v"] / 2).exp()).log_prob(p["x"]).sum()

    name = f"funnel of {P}, log-variance N(0, {spread:g}²)"
    return Case(name, vi.LogDensity(log_density, space), lambda p: p["v"], tensor(0.0), tensor(spread))


def student(df: float) -> Case:
    zero = torch.zeros(5, dtype=torch.float64)
    sd = torch.full_like(zero, sqrt(df / (df - 2)))
    return vector(f"Student-t of 5, {df:g} degrees", lambda z: StudentT(df).log_prob(z).sum(), 5, zero, sd)


def schools(centred: bool) -> Case:
    """Eight schools: τ, whose moments are integrals over log τ; given τ all else is normal."""
    y = tensor([28.0, 8, -3, 7, -1, 1, 18, 12])
    s = tensor([15.0, 10, 16, 11, 9, 11, 10, 18])
    space = vi.Parameters({"mu": torch.zeros(()), "tau": vi.positive(1.0), "z": torch.zeros(8)})

    def log_density(p):
        mu, tau, z = p["mu"], p["tau"], p["z"]
        prior = Normal(0.0, 5.0).log_prob(mu) + HalfCauchy(5.0).log_prob(tau)
        effects = Normal(mu, tau).log_prob(z) if centred else Normal(0.0, 1.0).log_prob(z)
        return prior + effects.sum() + Normal(z if centred else mu + tau * z, s).log_prob(y).sum()

    u = torch.linspace(-12, 8, 4001, dtype=torch.float64)
    tau = u.exp()
    v = s.square() + tau.square().unsqueeze(-1)
    precision = (1 / v).sum(-1) + 1 / 25
    log_p = HalfCauchy(5.0).log_prob(tau) + u - 0.5 * (v.log() + y.square() / v).sum(-1) - 0.5 * precision.log()
    w = (log_p + 0.5 * (y / v).sum(-1).square() / precision).softmax(0)
    mean = w @ tau
    sd = (w @ (tau - mean).square()).sqrt()
    name = f"eight schools, {'' if centred else 'not '}centred"
    return Case(name, vi.LogDensity(log_density, space), lambda p: p["tau"], mean, sd)


CASES: list[Callable[[], Case]] = [
    *(partial(gamma, shape) for shape in (0.15, 0.3, 1.0, 5.0)),
    *(partial(dirichlet, alpha) for alpha in ([0.2] * 4, [0.5] * 6, [1.0] * 20, [0.1, 3.0, 30.0])),
    *(partial(normal, P, correlation) for P in (2, 10, 30) for correlation in (0.9, 0.99)),
    *(partial(banana, bend) for bend in (0.25, 1.0, 3.0)),
    *(partial(funnel, P, spread) for P in (3, 10) for spread in (1.0, 3.0)),
    *(partial(student, df) for df in (2.5, 4.0)),
    partial(schools, centred=False),
    partial(schools, centred=True),
]


def rows(family: vi.Family, draws: int, cases: list[Callable[[], Case]] = CASES, seeds: int = 1) -> Iterator[str]:
    yield "| target | k̂ | refused | effective | q: mean, sd off | corrected: mean, sd off |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for make in cases:
        case = make()
        result = vi.fit(case.target, family, progress=False)
        found = [
            weighted_draws(result.family, case.target, draws, torch.Generator().manual_seed(seed))
            for seed in range(seeds)
        ]
        ks = ", ".join(f"{one.k:.2f}" for one in sorted(found, key=lambda one: one.k)[:: max(1, seeds - 1)])
        refused = f"{sum(not one.trusted for one in found)} of {seeds}"
        values = case.target.space.constrain
        of_q = [vi.Summary({"x": case.value(values(one.of_q))}) for one in found]
        corrected = [vi.Summary({"x": case.value(values(one.theta))}, one.weights) for one in found]
        said = " | ".join(off(case, each) for each in (of_q, corrected))
        effective = sum(one.effective / len(one.weights) for one in found) / seeds
        yield f"| {case.name} | {ks} | {refused} | {100 * effective:.0f} % | {said} |"


def annealed_rows(family: vi.Family, draws: int, seeds: int) -> Iterator[str]:
    yield "| target | R̂ | paths broken | evaluations, mean | warned | annealed: mean, sd off |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for make in CASES:
        case = make()
        result, space = vi.fit(case.target, family, progress=False), case.target.space
        found = [
            annealed_draws(result.family, case.target, draws, torch.Generator().manual_seed(seed))
            for seed in range(seeds)
        ]
        said = off(case, [vi.Summary({"x": case.value(space.constrain(one.theta))}) for one in found])
        warned = sum(one.doubts(space) != "" for one in found)
        cost = sum(one.evaluations for one in found) / seeds
        share = 100 * sum(one.broken for one in found) / seeds
        largest = max(one.r_hat for one in found)
        yield f"| {case.name} | {largest:.3f} | {share:.1f} % | {cost:.0f} | {warned} of {seeds} | {said} |"


def off(case: Case, summaries: list[vi.Summary]) -> str:
    """The root mean square over seeds of the largest errors."""
    shifts = [((one.mean["x"] - case.mean) / case.sd).abs().max().item() for one in summaries]
    spreads = [(one.sd["x"] / case.sd - 1).abs().max().item() for one in summaries]
    shift, spread = (sqrt(sum(x * x for x in column) / len(column)) for column in (shifts, spreads))
    return f"{shift:.3f}, {100 * spread:.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--mean-field", action="store_true")
    parser.add_argument("--annealed", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "annealed draws")
    family = vi.MeanField() if arguments.mean_field else vi.FullNormal()
    if arguments.annealed:
        made = annealed_rows(family, arguments.draws, arguments.seeds)
    else:
        made = rows(family, arguments.draws, seeds=arguments.seeds)
    for row in made:
        print(row, flush=True)


if __name__ == "__main__":
    main()
