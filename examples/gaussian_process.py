"""A Gaussian process with unknown length, amplitude and noise. A few seconds on a CPU.

python examples/gaussian_process.py
"""

import torch
from torch.distributions import Gamma, HalfNormal, MultivariateNormal, Normal

import structvi as vi

N = 40


def kernel(a, b, length, amplitude):
    return amplitude.square() * torch.exp(-0.5 * ((a.unsqueeze(-1) - b) / length).square())


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(0, 10, N, dtype=torch.float64)
    f = torch.sin(x) + 0.3 * x
    return x, f + 0.3 * torch.randn(N, generator=generator, dtype=torch.float64)


x, y = data()
parameters = vi.Parameters(
    {
        "length": vi.constraints.positive(1.0),
        "amplitude": vi.constraints.positive(1.0),
        "noise": vi.constraints.positive(0.5),
    }
)


def log_density(p):
    prior = Gamma(5.0, 3.0).log_prob(p["length"]) + HalfNormal(3.0).log_prob(p["amplitude"])
    prior = prior + HalfNormal(1.0).log_prob(p["noise"])
    covariance = kernel(x, x, p["length"], p["amplitude"]) + p["noise"].square() * torch.eye(N, dtype=torch.float64)
    # validate_args=False: its check of the covariance keeps draws from being evaluated all at once
    return prior + MultivariateNormal(torch.zeros_like(y), covariance, validate_args=False).log_prob(y)


def predict(draws, at):
    """f at new points, one normal for each draw: means and variances, [S, points]."""
    length, amplitude, noise = (draws[name].reshape(-1, 1, 1) for name in ("length", "amplitude", "noise"))
    covariance = kernel(x, x, length, amplitude) + noise.square() * torch.eye(N, dtype=torch.float64)
    across = kernel(at, x, length, amplitude)  # [S, points, N]
    weights = torch.linalg.solve(covariance, across.mT)  # [S, N, points]
    variance = amplitude.square().squeeze(-1) - (across.mT * weights).sum(-2)
    return (weights * y.unsqueeze(-1)).sum(-2), variance.clamp_min(0)


def main():
    result = vi.fit_density(vi.LogDensity(log_density, parameters), vi.FullNormal())
    print(result.verdict)
    print(result.summary())
    draws = result.sample(500, corrected=True, generator=torch.Generator().manual_seed(0))
    mean, variance = predict(draws, torch.tensor([2.5, 7.5, 12.0], dtype=torch.float64))
    torch.manual_seed(0)
    f = Normal(mean, variance.sqrt() + 1e-9).sample()
    print(vi.Summary({"f(2.5)": f[:, 0], "f(7.5)": f[:, 1], "f(12)": f[:, 2]}))


if __name__ == "__main__":
    main()
