"""Log densities as people get them wrong, or as they are: is what a fit misses told?

    python -m benchmarks.awkward_densities [--only NAME ..] [--families full mixture]

Each is fitted with its defaults and at most 200,000 evaluations, then `result.summary()` is asked for. A miss is a mean
more than 0.25 sd off or an sd more than 25 % off in the table, or a log density that cannot be fitted at all. It is
told where the status is not "converged", k̂ is 0.7 or more, a note speaks of it, or an error was raised. A false alarm
is told where nothing is missed.
"""

import argparse
import warnings
from collections.abc import Callable
from math import inf, log, pi, sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Beta, Dirichlet, Gamma, HalfCauchy, HalfNormal, LKJCholesky, Normal, StudentT

import structvi as vi
from benchmarks.hard_densities import normals

Named = dict[str, Tensor]
#: a miss: standard deviations that a mean is off, and part by which a standard deviation is
SHIFT, SPREAD = 0.25, 0.25
LIMIT = 200_000
SINGLE = torch.float32


class Case(NamedTuple):
    name: str
    log_density: Callable[[Named], Tensor]
    parameters: dict
    #: the parameter that is looked at, its exact mean and sd; None where there is no right answer
    truth: tuple[str, Tensor, Tensor] | None
    dtype: torch.dtype | None = None


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def zeros(*size: int) -> Tensor:
    return torch.zeros(*size, dtype=torch.float64)


def hierarchy() -> Case:
    """Centred, twelve groups of one observation: τ by integrals over a grid."""
    y = tensor([1.2, 0.3, -0.5, 2.0, 0.1, -0.2, 0.9, -1.1, 0.4, 0.0, 0.7, -0.3])
    u = torch.linspace(-12, 6, 6001, dtype=torch.float64)
    tau, n = u.exp(), len(y)
    v = 1 + tau.square()
    precision = n / v + 1 / 25
    log_p = HalfNormal(1.0).log_prob(tau) + u - (n * v.log() + y.square().sum() / v + precision.log()) / 2
    w = (log_p + (y.sum() / v).square() / precision / 2).softmax(0)
    mean = w @ tau

    def log_density(p: Named) -> Tensor:
        prior = HalfNormal(1.0).log_prob(p["tau"]) + Normal(0.0, 5.0).log_prob(p["mu"])
        return prior + Normal(p["mu"], p["tau"]).log_prob(p["theta"]).sum() + Normal(p["theta"], 1.0).log_prob(y).sum()

    parameters = {"mu": 0.0, "tau": vi.constraints.positive(1.0), "theta": torch.zeros(12)}
    return Case("centred hierarchy of 12", log_density, parameters, ("tau", mean, (w @ (tau - mean).square()).sqrt()))


def correlated() -> Case:
    generator = torch.Generator().manual_seed(77)
    basis, values = torch.linalg.qr(normals(generator, 50, 50)).Q, torch.logspace(-4, 4, 50, dtype=torch.float64)
    precision, mean = (basis * values) @ basis.mT, 3 * normals(generator, 50)
    sd = ((basis / values) @ basis.mT).diagonal().sqrt()
    return Case(
        "normal of 50, condition 10⁸", lambda p: -0.5 * (p["z"] - mean) @ precision @ (p["z"] - mean),
        {"z": zeros(50)}, ("z", mean, sd),
    )  # fmt: skip


def heavy() -> Case:
    truth = ("z", zeros(10), torch.full((10,), sqrt(3), dtype=torch.float64))
    return Case(
        "Student-t of 10, 3 degrees", lambda p: StudentT(tensor(3.0)).log_prob(p["z"]).sum(), {"z": zeros(10)}, truth
    )


def bounded() -> Case:
    exact = Beta(tensor(0.3), tensor(3.0))

    def log_density(p: Named) -> Tensor:
        parts = Dirichlet(tensor([0.2, 0.5, 4.0])).log_prob(p["p"])
        return exact.log_prob(p["u"]) + parts + LKJCholesky(3, tensor(1.0), validate_args=False).log_prob(p["L"])

    parameters = {
        "u": vi.constraints.interval(0, 1),
        "p": vi.constraints.simplex(3),
        "L": vi.constraints.cholesky_correlation(3),
    }
    return Case("interval, simplex, correlation", log_density, parameters, ("u", exact.mean, exact.stddev))


def labels() -> Case:
    """A mixture of two normals, labels summed out: by symmetry both means have the same mean."""
    y = torch.cat([torch.linspace(-4, 0, 30), torch.linspace(0, 4, 30)]).double()

    def log_density(p: Named) -> Tensor:
        each = Normal(p["m"], 1.0).log_prob(y.unsqueeze(-1)) + log(0.5)
        return each.logsumexp(-1).sum() + Normal(0.0, 5.0).log_prob(p["m"]).sum()

    x = torch.linspace(-6, 6, 601, dtype=torch.float64)
    each = (-0.5 * (y.view(-1, 1) - x).square()).exp()  # [n, x]
    value = (
        sum((row.unsqueeze(0) + row.unsqueeze(1)).log() for row in each) - (x.square() + x.square().unsqueeze(1)) / 50
    )
    w = value.flatten().softmax(0).view(601, 601).sum(0)
    sd = (w @ x.square()).sqrt()
    return Case("two labels", log_density, {"m": zeros(2)}, ("m", zeros(2), sd.expand(2)))


def improper() -> list[Case]:
    y = tensor([1.0, 2.0, 3.0])

    def flat_scale(p: Named) -> Tensor:
        effects = Normal(p["mu"], p["tau"]).log_prob(p["theta"]).sum() - p["tau"].log()
        return effects + Normal(p["theta"], 1.0).log_prob(y).sum()

    scale = {"mu": 0.0, "tau": vi.constraints.positive(1.0), "theta": torch.zeros(3)}
    unused = {"z": zeros(3), "w": zeros(2)}
    return [
        Case("improper: density 1/τ of a hierarchy's scale", flat_scale, scale, None),
        Case("improper: a parameter that is not used", lambda p: -0.5 * p["z"].square().sum(), unused, None),
        Case("improper: an angle without bounds", lambda p: 2 * (p["a"] - 1).cos().sum(), {"a": zeros(1)}, None),
    ]


def scales() -> Case:
    sd, mean = tensor([1e6, 1e-6, 1e6, 1e-6]), tensor([1e7, 3e-6, -5e6, 1.0])
    return Case(
        "scales of 10⁶ and 10⁻⁶",
        lambda p: -0.5 * ((p["z"] - mean) / sd).square().sum(),
        {"z": zeros(4)},
        ("z", mean, sd),
    )


def not_finite() -> list[Case]:
    gamma = Gamma(tensor(3.0), tensor(1.0), validate_args=False)
    start = {"z": torch.ones(1, dtype=torch.float64)}
    return [
        Case("NaN below zero", lambda p: (p["z"].log() / 2 - p["z"].square() / 2).sum(), start, None),
        Case("−∞ below zero", lambda p: torch.where(p["z"] > 0, -p["z"], -inf).sum(), start, None),
        Case("start outside of the support", lambda p: gamma.log_prob(p["z"]).sum(), {"z": -5 - zeros(2)}, None),
    ]


def precision_of_numbers() -> list[Case]:
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(3)) + 5
    mean, sd = x.double().mean(), x.double().std() / len(x) ** 0.5

    def sums(p: Named) -> Tensor:
        return -0.5 * ((x - p["m"]) / p["s"]).square().sum() - len(x) * p["s"].log()

    far = torch.randn(200, generator=torch.Generator().manual_seed(4)) + 1e4
    offset = ("z", torch.full((3,), 2.0).double(), torch.ones(3).double())
    return [
        Case("float32, 20,000 rows", sums, {"m": torch.zeros(()), "s": vi.constraints.positive(1.0)}, ("m", mean, sd), SINGLE),
        Case("float32, 10⁷ added", lambda p: -0.5 * (p["z"] - 2).square().sum() - 1e7, {"z": torch.zeros(3)}, offset),
        Case("float32 data at 10⁴", lambda p: -0.5 * (far - p["m"]).square().sum(), {"m": tensor(0.0)},
             ("m", far.double().mean(), tensor(1 / sqrt(200)))),
        Case("integer data and start", lambda p: -0.5 * (torch.arange(5) - p["m"]).square().sum(), {"m": 0},
             ("m", tensor(2.0), tensor(1 / sqrt(5)))),
    ]  # fmt: skip


def mistakes() -> list[Case]:
    def detached(p: Named) -> Tensor:
        return -0.5 * (p["z"] - 1).square().sum() - 0.5 * (p["z"].detach() - 4).square().sum()

    def dropout(p: Named) -> Tensor:
        return -0.5 * (p["z"] * (torch.rand(3) > 0.5) - 1).square().sum() - 0.5 * p["z"].square().sum()

    z = {"z": zeros(3)}
    half = torch.full((3,), 0.5, dtype=torch.float64)
    return [
        Case("half of the gradient detached", detached, z, ("z", 5 * half, half.sqrt())),
        Case("dropout inside", dropout, z, None),
        Case("not summed", lambda p: -0.5 * p["z"].square(), z, None),
        Case("floor inside", lambda p: -0.5 * ((10 * p["z"]).floor() / 10 - 1).square().sum(), z,
             ("z", 1.05 * torch.ones(3).double(), torch.ones(3).double())),
    ]  # fmt: skip


def bent() -> list[Case]:
    def ridge(p: Named) -> Tensor:
        return -0.5 * p["z"].square().sum() - 0.5 * ((p["z"][0] * p["z"][1] - 1) / 0.02).square()

    x = torch.linspace(-8, 8, 16_001, dtype=torch.float64)  # z₁; given it z₂ is normal, and is integrated out
    curvature = 1 + (x / 0.02).square()
    w = (-0.5 * x.square() + 0.5 * (x / 0.02**2).square() / curvature - 0.5 * curvature.log()).softmax(0)
    sd = (w @ x.square()).sqrt()

    def spike(p: Named) -> Tensor:
        narrow = log(0.001) - 5 * log(0.01) - 0.5 * (p["z"] / 0.01).square().sum()
        return torch.logaddexp(narrow, log(0.999) - 0.5 * (p["z"] - 2).square().sum()) - 2.5 * log(2 * pi)

    generator = torch.Generator().manual_seed(9)
    X = normals(generator, 40, 10)
    y = 2 * X[:, 0] + 0.5 * normals(generator, 40)

    def horseshoe(p: Named) -> Tensor:
        prior = HalfCauchy(1.0).log_prob(p["local"]).sum() + HalfCauchy(0.1).log_prob(p["tau"])
        fit = Normal(X @ (p["z"] * p["local"] * p["tau"]), 0.5).log_prob(y).sum()
        return prior + fit + Normal(0.0, 1.0).log_prob(p["z"]).sum()

    parameters = {
        "local": vi.constraints.positive(1.0, shape=10),
        "tau": vi.constraints.positive(0.1),
        "z": torch.zeros(10),
    }
    return [
        Case("z₁z₂ = 1, a ridge in two", ridge, {"z": zeros(2)}, ("z", zeros(2), sd.expand(2))),
        Case(
            "a spike that holds 0.001",
            spike,
            {"z": zeros(5)},
            ("z", 1.998 * torch.ones(5).double(), torch.ones(5).double()),
        ),
        Case("horseshoe", horseshoe, parameters, None),
    ]


def every() -> list[Case]:
    made = [hierarchy(), correlated(), heavy(), bounded(), labels(), *improper(), scales(), *not_finite()]
    return [*made, *precision_of_numbers(), *mistakes(), *bent()]


def judged(case: Case, family: vi.Family) -> tuple[str, str, str]:
    """Whether there is a miss, what was told, and the errors."""
    try:
        space = vi.Parameters(case.parameters, dtype=case.dtype) if case.dtype else vi.Parameters(case.parameters)
        result = vi.fit_density(vi.LogDensity(case.log_density, space), family, max_evaluations=LIMIT, progress=False)
        summary = result.summary()
    except (ValueError, TypeError, RuntimeError) as error:
        return "miss" if case.truth is None else "refused", type(error).__name__, "–"
    said = [] if result.converged else [str(result.status)]
    said += [f"k̂ {summary.k:.2f}"] if summary.k is not None and summary.k >= 0.7 else []
    said += ["no k̂"] if summary.k is None else []
    said += [note.split(",")[0].split(":")[0] for note in result.notes if "hills" in note or "random" in note]
    if case.truth is None:
        return "miss", "; ".join(said), "–"
    name, mean, sd = case.truth
    shift = ((summary.mean[name] - mean).abs() / sd).max().item()
    spread = (summary.sd[name] / sd - 1).abs().max().item()
    missed = "miss" if shift > SHIFT or spread > SPREAD else ""
    return missed, "; ".join(said), f"{shift:.2f} sd, {100 * spread:.0f} %"


def main(arguments: list[str] | None = None) -> None:
    families = {"full": vi.FullNormal(), "mixture": vi.Mixture(vi.FullNormal(), components="auto")}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--families", nargs="*", choices=[*families], default=[*families])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    count = {"misses": 0, "silent": 0, "right": 0, "false alarms": 0}
    print("| log density | family | miss | told | mean off, sd off |\n| --- | --- | --- | --- | --- |")
    for case in every():
        if options.only and not any(part in case.name for part in options.only):
            continue
        for family in options.families:
            missed, said, errors = judged(case, families[family])
            count["misses" if missed else "right"] += 1
            count["silent"] += bool(missed) and not said
            count["false alarms"] += bool(said) and not missed
            print(f"| {case.name} | {family} | {missed} | {said} | {errors} |", flush=True)
    print(", ".join(f"{name}: {number}" for name, number in count.items()))


if __name__ == "__main__":
    main()
