"""Importance-corrected moments where the truth is known: how far q is off, how far the corrected ones, and k̂.

python -m benchmarks.corrected_draws [--draws 4000] [--mean-field]

One row a target: k̂ of q's own draws and of the weights that are used, effective draws, and the largest error of a mean,
in standard deviations, and of a standard deviation, relative. Rows with k̂ ≥ 0.7 are those that `sample` refuses.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Dirichlet, MultivariateNormal, Normal, StudentT

import structvi as vi
from structvi.diagnostics import importance


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


CASES: list[Callable[[], Case]] = [
    *(partial(gamma, shape) for shape in (0.15, 0.3, 1.0, 5.0)),
    *(partial(dirichlet, alpha) for alpha in ([0.2] * 4, [0.5] * 6, [1.0] * 20, [0.1, 3.0, 30.0])),
    *(partial(normal, P, correlation) for P in (2, 10, 30) for correlation in (0.9, 0.99)),
    *(partial(banana, bend) for bend in (0.25, 1.0, 3.0)),
    *(partial(funnel, P, spread) for P in (3, 10) for spread in (1.0, 3.0)),
    *(partial(student, df) for df in (2.5, 4.0)),
]


def rows(family: vi.Family, draws: int, cases: list[Callable[[], Case]] = CASES) -> Iterator[str]:
    yield "| target | k̂ of q | k̂ used | effective | q: mean, sd off | corrected: mean, sd off |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for make in cases:
        case = make()
        result = vi.fit(case.target, family, progress=False)
        weighted = importance(result.family, case.target, draws)
        moments = weighted.moments(case.value)
        errors = [
            (((mean - case.mean) / case.sd).abs().max().item(), (sd / case.sd - 1).abs().max().item())
            for mean, sd in ((moments.q_mean, moments.q_sd), (moments.mean, moments.sd))
        ]
        said = " | ".join(f"{shift:.3f}, {100 * spread:.1f} %" for shift, spread in errors)
        yield f"| {case.name} | {weighted.k:.2f} | {weighted.k_weights:.2f} | {weighted.effective:.0f} | {said} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--mean-field", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for row in rows(vi.MeanField() if arguments.mean_field else vi.FullNormal(), arguments.draws):
        print(row, flush=True)


if __name__ == "__main__":
    main()
