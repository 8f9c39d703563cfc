"""A level that drifts, seen through noise: a state-space model, its states integrated out. Some seconds on a CPU.

python examples/state_space.py
"""

import torch
from torch.distributions import HalfNormal, Normal

import structvi as vi

T = 30


def data():
    """Level: 0.9 of the one before and a step of sd 0.3. Noise of sd 0.3."""
    generator = torch.Generator().manual_seed(1)
    steps = 0.3 * torch.randn(T, generator=generator, dtype=torch.float64)
    level = torch.zeros(T, dtype=torch.float64)
    for t in range(1, T):
        level[t] = 0.9 * level[t - 1] + steps[t]
    return level + 0.3 * torch.randn(T, generator=generator, dtype=torch.float64)


y = data()
parameters = vi.Parameters(
    {
        "phi": vi.constraints.interval(-1, 1, 0.5),
        "step": vi.constraints.positive(0.3),
        "noise": vi.constraints.positive(0.5),
    }
)


def log_density(p):
    """Kalman's filter: given the past, y_t is normal."""
    prior = Normal(0.0, 1.0).log_prob(p["phi"])
    prior = prior + HalfNormal(1.0).log_prob(p["step"]) + HalfNormal(1.0).log_prob(p["noise"])
    total, mean, variance = prior, torch.zeros_like(p["phi"]), p["step"].square() / (1 - p["phi"].square())
    for t in range(T):
        spread = variance + p["noise"].square()
        total = total + Normal(mean, spread.sqrt()).log_prob(y[t])
        gain = variance / spread
        mean, variance = mean + gain * (y[t] - mean), (1 - gain) * variance
        mean, variance = p["phi"] * mean, p["phi"].square() * variance + p["step"].square()
    return total


def main():
    result = vi.fit_density(vi.LogDensity(log_density, parameters), vi.FullNormal())
    print(result.verdict)
    print(result.summary())


if __name__ == "__main__":
    main()
