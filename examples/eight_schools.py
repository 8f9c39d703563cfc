"""Eight schools: a hierarchy of effects with an unknown spread. A few seconds on a CPU.

python examples/eight_schools.py
"""

import torch
from torch.distributions import HalfCauchy, Normal

import structvi as vi

# coaching effects of eight schools and their standard errors (Rubin, 1981)
EFFECT = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12], dtype=torch.float64)
ERROR = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18], dtype=torch.float64)

parameters = vi.Parameters({"mu": torch.zeros(()), "tau": vi.constraints.positive(1.0), "z": torch.zeros(8)})


def log_density(p):
    """θ = μ + τz: with z in place of θ the spread τ and the effects are nearly independent."""
    prior = Normal(0.0, 5.0).log_prob(p["mu"]) + HalfCauchy(5.0).log_prob(p["tau"])
    prior = prior + Normal(0.0, 1.0).log_prob(p["z"]).sum()
    return prior + Normal(p["mu"] + p["tau"] * p["z"], ERROR).log_prob(EFFECT).sum()


def main():
    result = vi.fit_density(vi.LogDensity(log_density, parameters), vi.FullNormal())
    print(result.verdict)
    print(result.summary(select=["mu", "tau"]))
    draws = result.sample(4000, corrected=True, generator=torch.Generator().manual_seed(0))
    theta = draws["mu"].unsqueeze(-1) + draws["tau"].unsqueeze(-1) * draws["z"]
    print(vi.Summary({"theta": theta}))
    print(f"probability that the first school is the best: {(theta.argmax(-1) == 0).double().mean():.2f}")


if __name__ == "__main__":
    main()
