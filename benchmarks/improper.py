"""Which log densities are called improper, over seeds: 19 that cannot be normalised and 24 that can.

    python -m benchmarks.improper [--seeds 6] [--families "mean field" full] [--only NAME ..]

Each with `vi.fit_density`'s defaults, but for a limit of evaluations where the search of an improper one would go
far. A missed one is an improper log density that is not called so, a false alarm a proper one that is. The tests of
`structvi.density.properness` have these targets at seed 0.
"""

import argparse
import platform
from math import log

import torch
from torch.distributions import StudentT
from torch.nn.functional import logsigmoid, softplus

import structvi as vi

FAMILIES = {
    "mean field": vi.MeanField(),
    "full": vi.FullNormal(),
    "covariance": vi.LowRankNormal(1),
    "precision": vi.LowRankPrecision(1),
    "mixture": vi.Mixture(vi.MeanField(), 2),
}


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def normals(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fit(function, P, family="full", **options):
    """From zeros."""
    space = vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)})
    target = vi.LogDensity(lambda p: function(p["z"]), space)
    return vi.fit_density(target, FAMILIES[family], progress=False, **options)


def logistic(X, up, prior=None):
    signs = 2 * up.double() - 1

    def log_density(z):
        value = logsigmoid(signs * (X @ z)).sum()
        return value if prior is None else value - 0.5 * (z / prior).square().sum()

    return log_density


def separable(P, prior=None):
    X = normals(60, P)
    return logistic(X, X[:, 0] + 0.3 * X[:, -1] > 0, prior)


def quasi_separable(prior=None):
    """The intercept is determined, by the two at zero; the slope is not."""
    x = tensor(-2, -1, 0, 0, 1, 2)
    return logistic(torch.stack([torch.ones_like(x), x], dim=-1), tensor(0, 0, 0, 1, 1, 1), prior)


def overlapping(z):
    X = normals(60, 3)
    return logistic(X, normals(60, seed=1) < X[:, 0], 10.0)(z)


ROTATION = torch.linalg.qr(normals(5, 5, seed=5))[0]
Y = tensor(28, 8, -3, 7, -1, 1, 18, 12)
S = tensor(15, 10, 16, 11, 9, 11, 10, 18)


def flat(log_tau):
    return 0 * log_tau


def half_cauchy(log_tau):
    return log_tau - softplus(2 * (log_tau - log(5)))


def schools(prior, centred=True, groups=8, mu_scale=5.0):
    y, s = Y[:groups], S[:groups]

    def log_density(z):
        mu, log_tau, rest = z[0], z[1], z[2:]
        value = prior(log_tau) - 0.5 * (mu / mu_scale).square()
        if centred:
            value = value - (0.5 * ((rest - mu) * (-log_tau).exp()).square() + log_tau).sum()
            return value - 0.5 * ((y - rest) / s).square().sum()
        return value - 0.5 * rest.square().sum() - 0.5 * ((y - mu - log_tau.exp() * rest) / s).square().sum()

    return log_density


def funnel(prior):
    return lambda z: prior(z[0]) - 0.5 * ((z[1:] * (-z[0] / 2).exp()).square() + z[0]).sum()


def gaussian(P, low, high):
    """Scales 10^low to 10^high along rotated axes."""
    axes = torch.linalg.qr(normals(P, P, seed=3))[0] / torch.logspace(low, high, P, dtype=torch.float64)
    return lambda z: -0.5 * (z @ axes).square().sum()


#: log density, P, and what the verdict names; a limit where the search would go far
IMPROPER = {
    "separable, 2": (separable(2), 2, "z[0] → +∞", 5_000),
    "separable, 10": (separable(10), 10, "z[0] → +∞", 10_000),
    "quasi-separable": (quasi_separable(), 2, "z[1] → +∞", 5_000),
    "flat": (lambda z: 0 * z.sum(), 3, "z[0] → +∞", None),
    "one of five flat": (lambda z: -0.5 * z[1:].square().sum(), 5, "z[0] → ", None),
    "a rotated one of five flat": (lambda z: -0.5 * (z @ ROTATION)[1:].square().sum(), 5, "z[4] → ", 10_000),
    "a sum alone": (lambda z: -0.5 * ((z[0] + z[1] - 1).square() + z[2:].square().sum()), 4, "z[1] → ", 10_000),
    "funnel": (funnel(flat), 3, "z[0] → −∞", 10_000),
    "funnel, 10": (funnel(flat), 10, "z[0] → −∞", None),
    "exp": (lambda z: z.exp().sum(), 1, "z → +∞", None),
    "exp and normals": (lambda z: z[0].exp() - 0.5 * z[1:].square().sum(), 3, "z[0] → +∞", None),
    "rising": (lambda z: z[0] - 0.5 * z[1:].square().sum(), 4, "z[0] → +∞", None),
    "log τ flat, τ → 0": (schools(flat), 10, "z[1] → −∞", None),
    "log τ flat, not centred": (schools(flat, centred=False), 10, "z[1] → −∞", 10_000),
    "τ flat, one group, τ → ∞": (schools(lambda v: v, False, groups=1), 3, "z[1] → +∞", 10_000),
    "τ flat, two groups, μ flat": (schools(lambda v: v, groups=2, mu_scale=1e300), 4, "z[0] → ", 20_000),
    "a tail of 1/x": (lambda z: -0.5 * torch.log1p(z.square()).sum(), 1, "z → ", None),
    "a product alone": (lambda z: -0.5 * (z[0] * z[1] - 1).square(), 2, "∞", None),
    "an angle": (lambda z: 5 * (z[0] - 1).cos() - 0.5 * z[1:].square().sum(), 3, "z[0] → ", None),
}

PROPER = {
    "scale 1e-3": (lambda z: -0.5 * (z / 1e-3).square().sum(), 3),
    "scale 1e4": (lambda z: -0.5 * (z / 1e4).square().sum(), 3),
    "scales 1e-3 to 1e4": (lambda z: -0.5 * (z / tensor(1e-3, 1, 1e4)).square().sum(), 3),
    "mean 1e6": (lambda z: -0.5 * (z - 1e6).square().sum(), 2),
    "condition 1e8": (gaussian(5, -2, 2), 5),
    "30 numbers": (gaussian(30, -1, 1), 30),
    "Student-t, 3": (lambda z: StudentT(3.0).log_prob(z).sum(), 3),
    "Student-t, 3, of a radius": (lambda z: -3.5 * torch.log1p(z.square().sum() / 3), 4),
    "Cauchy": (lambda z: -torch.log1p(z.square()).sum(), 2),
    "waves with tails": (lambda z: (2 * (3 * z).cos() - 1.5 * torch.log1p(z.square())).sum(), 2),
    "Laplace": (lambda z: -z.abs().sum(), 3),
    "banana": (lambda z: -0.5 * ((z[0] / 2).square() + ((z[1] - z[0].square()) / 0.5).square()), 2),
    "Neal's funnel": (funnel(lambda v: -v.square() / 18), 10),
    "logistic": (overlapping, 3),
    "separable with a prior, 2": (separable(2, 10.0), 2),
    "separable with a prior, 10": (separable(10, 10.0), 10),
    "quasi-separable with a prior": (quasi_separable(10.0), 2),
    "eight schools": (schools(half_cauchy), 10),
    "eight schools, not centred": (schools(half_cauchy, centred=False), 10),
    "eight schools, τ flat": (schools(lambda v: v), 10),
    "log τ ~ N(0, 10²)": (schools(lambda v: -0.5 * (v / 10).square()), 10),
    "log τ ~ N(0, 100²)": (schools(lambda v: -0.5 * (v / 100).square()), 10),
    "two modes": (lambda z: torch.logaddexp(-0.5 * (z + 3).square().sum(), -(z - 3).square().sum()), 2),
    "modes far away": (lambda z: torch.logaddexp(-0.5 * (z + 10).square().sum(), -0.5 * (z - 10).square().sum()), 2),
}


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--families", nargs="*", default=["mean field", "full"], choices=list(FAMILIES))
    parser.add_argument("--only", nargs="*", default=[*IMPROPER, *PROPER], choices=[*IMPROPER, *PROPER], metavar="NAME")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"structvi {vi.__version__}, torch {torch.__version__}, {platform.machine()}")
    rows = []
    for name in options.only:
        log_density, P, *rest = IMPROPER[name] if name in IMPROPER else PROPER[name]
        for family in options.families:
            for seed in range(options.seeds):
                result = fit(log_density, P, family, seed=seed, max_evaluations=rest[1] if rest else None)
                told = result.status is vi.Status.DIVERGED
                rows.append({"name": name, "family": family, "seed": seed, "improper": name in IMPROPER, "told": told})
                if told != (name in IMPROPER):
                    print(f"{name}, {family}, seed {seed}: {result.verdict}", flush=True)
    for improper, words in ((True, "improper, told"), (False, "proper, left alone")):
        own = [row["told"] == improper for row in rows if row["improper"] == improper]
        print(f"{words}: {sum(own)} of {len(own)}")
    return rows


if __name__ == "__main__":
    main()
