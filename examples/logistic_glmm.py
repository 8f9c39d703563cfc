"""A logistic regression with correlated intercepts and slopes of groups. A few seconds on a CPU.

python examples/logistic_glmm.py
"""

import torch
from torch.distributions import Bernoulli, HalfNormal, LKJCholesky, Normal

import structvi as vi

GROUPS, EACH = 6, 40


def data():
    """logit p = a_g + b_g x, (a, b) of a group normal around (−0.5, 1), sd (0.8, 0.5), correlation 0.6."""
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64}
    group = torch.arange(GROUPS).repeat_interleave(EACH)
    x = torch.randn(GROUPS * EACH, **options)
    root = torch.tensor([[0.8, 0.0], [0.3, 0.4]], dtype=torch.float64)
    effects = torch.tensor([-0.5, 1.0], dtype=torch.float64) + torch.randn(GROUPS, 2, **options) @ root.mT
    logits = effects[group, 0] + effects[group, 1] * x
    return group, x, (torch.rand(len(x), **options) < logits.sigmoid()).double()


group, x, y = data()
parameters = vi.Parameters(
    {
        "beta": torch.zeros(2),  # of an average group: intercept, slope
        "sd": vi.constraints.positive(0.5, shape=2),  # of the groups around it
        "L": vi.constraints.cholesky_correlation(2),  # LLᵀ is the correlation of intercept and slope
        "z": torch.zeros(GROUPS, 2),
    }
)


def log_density(p):
    prior = Normal(0.0, 2.0).log_prob(p["beta"]).sum() + HalfNormal(1.0).log_prob(p["sd"]).sum()
    prior = prior + LKJCholesky(2, 2.0).log_prob(p["L"])
    prior = prior + Normal(0.0, 1.0).log_prob(p["z"]).sum()
    effects = p["beta"] + p["z"] @ (p["sd"].unsqueeze(-1) * p["L"]).mT  # [groups, 2]
    logits = effects[group, 0] + effects[group, 1] * x
    return prior + Bernoulli(logits=logits).log_prob(y).sum()


def main():
    result = vi.fit_density(vi.LogDensity(log_density, parameters), vi.FullNormal())
    print(result.verdict)
    print(result.summary(select=["beta", "sd", "L"]))


if __name__ == "__main__":
    main()
