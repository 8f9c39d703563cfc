"""Simulation-based calibration of eight schools, written with `positive`: draws of q, and corrected ones.

python -m benchmarks.schools_calibration [--replications 200] [--schools 8]
"""

import argparse
import time
from typing import Any

import torch
from torch import Tensor
from torch.distributions import HalfNormal, Normal

import structvi as vi
from structvi.diagnostics import Unavailable, sbc

#: standard errors of the schools' effects
ERRORS = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18], dtype=torch.float64)


def simulate(generator: torch.Generator, schools: int = 8) -> tuple[dict[str, Tensor], Tensor]:
    """μ ~ N(0, 5²), τ ~ N⁺(5²), θ ~ N(μ, τ²), and y ~ N(θ, s²)."""
    mu, tau, *z = torch.randn(2 + schools, generator=generator, dtype=torch.float64)
    mu, tau = 5 * mu, 5 * tau.abs()
    theta = mu + tau * torch.stack(z)
    noise = torch.randn(schools, generator=generator, dtype=torch.float64)
    return {"mu": mu, "tau": tau, "theta": theta}, theta + ERRORS[:schools] * noise


def model(y: Tensor) -> vi.LogDensity:
    """The posterior of μ, τ and z = (θ − μ)/τ."""
    space = vi.Parameters({"mu": torch.zeros(()), "tau": vi.constraints.positive(5.0), "z": torch.zeros(len(y))})

    def log_density(p):
        prior = Normal(0.0, 5.0).log_prob(p["mu"]) + HalfNormal(5.0).log_prob(p["tau"])
        prior = prior + Normal(0.0, 1.0).log_prob(p["z"]).sum()
        return prior + Normal(p["mu"] + p["tau"] * p["z"], ERRORS[: len(y)]).log_prob(y).sum()

    return vi.LogDensity(log_density, space)


class Draws:
    """Of one data set after another, each fitted once; counts those for which k̂ refused to correct."""

    def __init__(self, fits: dict[tuple[float, ...], vi.DensityFit], corrected: bool, count: int = 99, **options: Any):
        self.fits, self.corrected, self.count, self.options = fits, corrected, count, options
        self.generator = torch.Generator().manual_seed(1)
        self.refused = 0

    def __call__(self, y: Tensor) -> dict[str, Tensor]:
        key = tuple(y.tolist())
        if key not in self.fits:
            self.fits[key] = vi.fit_density(model(y), vi.FullNormal(), progress=False, **self.options)
        result = self.fits[key]
        try:
            drawn = result.sample(self.count, corrected=self.corrected, generator=self.generator)
        except Unavailable:
            self.refused += 1
            drawn = result.sample(self.count, generator=self.generator)
        mu, tau = drawn["mu"].unsqueeze(-1), drawn["tau"].unsqueeze(-1)
        return {"mu": drawn["mu"], "tau": drawn["tau"], "theta": mu + tau * drawn["z"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replications", type=int, default=200)
    parser.add_argument("--schools", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    fits: dict[tuple[float, ...], vi.DensityFit] = {}
    for corrected in (False, True):
        began = time.perf_counter()
        draws = Draws(fits, corrected)
        found = sbc(
            lambda generator: simulate(generator, arguments.schools), draws, replications=arguments.replications
        )
        print(f"{'corrected draws' if corrected else 'draws of q'}: {found}")
        smallest = ", ".join(f"{name} {p:.2g}" for name, p in zip(found.names, found.p_values.tolist(), strict=True))
        print(f"  p-values: {smallest}")
        print(f"  {draws.refused} fits not corrected, {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
