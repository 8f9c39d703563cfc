"""Writing a prior.

Half a minute on two cores. A prior is any callable `(parameters, theta [S, P]) → [S]` that gives log p(θ). Look at the
functions that it implies before you trust it.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

STEPS = 1500  # quick: 12
SCALES = (0.03, 0.1, 0.2, 0.4, 0.8, 1.6)  # quick: (0.3,)

# ## Functions from a prior
#
# Draw weights from N(0, scale²), and plot the functions of the network. The scale of the weights sets the steepness of
# the functions.

torch.manual_seed(0)
grid = torch.linspace(-2, 2, 100).unsqueeze(-1)
net = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))
space = vi.Parameters.of(net)

figure, panels = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
for axes, scale in zip(panels, (0.3, 1.0, 3.0), strict=True):
    for theta in scale * torch.randn(12, space.size):
        axes.plot(grid, functional_call(net, space.unravel(theta), (grid,)).detach(), lw=0.8, color="#2f6db5")
    axes.set_title(f"NormalPrior({scale})")
plt.show()

# ## Built-in priors
#
# Scales may follow name patterns or the fan-in. Priors may be heavy-tailed, or any torch distribution.

theta = torch.zeros(1, space.size)
for prior in (
    vi.priors.NormalPrior(1.0),
    vi.priors.NormalPrior({"*.bias": 2.0, "*.weight": 1.0}),
    vi.priors.NormalPrior(1.5, by_fan_in=True),
    vi.priors.StudentTPrior(df=3.0),
    vi.priors.DistributionPrior({"*": torch.distributions.Cauchy(0.0, 1.0)}),
):
    print(f"{prior(space, theta).item():9.2f}  {type(prior).__name__}")

# ## One of your own: a function
#
# The model has radial basis functions on a line, with 25 weights and 12 observations. We believe that neighbouring
# weights are alike: a random walk, log p(w) = −½ Σ (w_{i+1} − w_i)²/τ² − ½ w₁² + constant. With its constants it is
# normalised, and the ELBO is a bound.

centres = torch.linspace(-2, 2, 25, dtype=torch.float64)


class RBF(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(25, dtype=torch.float64))

    def forward(self, x):  # [B, 1] -> [B, 1]
        return torch.exp(-0.5 * ((x - centres) / 0.2) ** 2) @ self.weight.unsqueeze(-1)


class RandomWalk:
    def __init__(self, step):
        self.step = step

    def __call__(self, parameters, theta):  # [S, P] -> [S]
        w = parameters.unravel(theta)["weight"]  # [S, 25]
        steps = torch.distributions.Normal(0.0, self.step).log_prob(w.diff(dim=-1)).sum(-1)
        return steps + torch.distributions.Normal(0.0, 1.0).log_prob(w[:, 0])


x = torch.cat([torch.linspace(-2, -0.8, 6), torch.linspace(0.6, 2, 6)]).double().unsqueeze(-1)
t = torch.sin(x) + 0.1 * torch.randn_like(x)


class Target:
    """All data at once: whatever has `space` and `log_joint` can be fitted."""

    def __init__(self, prior):
        self.model = vi.BayesianModel(RBF(), vi.likelihoods.Gaussian(0.1), prior, num_data=len(x))
        self.space = self.model.space

    def log_joint(self, theta, batch=None):
        return self.model.log_joint(theta, (x, t))


# The model is linear and Gaussian, so a full normal is the exact posterior, and the ELBO equals log p(data | prior).
# This evidence selects the scale of each prior.

priors = {"independent": vi.priors.NormalPrior, "random walk": RandomWalk}
evidence = {name: {} for name in priors}
best = {}
for name, prior in priors.items():
    for scale in SCALES:
        fit = vi.fit_density(Target(prior(scale)), vi.FullNormal(), starts=1, progress=False)
        evidence[name][scale] = fit.elbo.value
        if name not in best or fit.elbo.value > best[name].elbo.value:
            best[name] = fit
    scale = max(evidence[name], key=evidence[name].get)
    print(f"{name:>12}: best scale {scale}, log evidence {evidence[name][scale]:.2f} nats")

# The left panel shows the evidence. The others show the posterior of the function at the best scale of each prior, ±2
# standard deviations.

figure, panels = plt.subplots(1, 3, figsize=(9.5, 2.8), layout="constrained")
for axes, (name, fit) in zip(panels[1:], best.items(), strict=True):
    panels[0].semilogx(list(evidence[name]), list(evidence[name].values()), "o-", ms=4, label=name)
    draws = fit.family().draw(300, generator=torch.Generator().manual_seed(0)).theta.detach()  # [S, P]
    functions = torch.exp(-0.5 * ((grid.double() - centres) / 0.2) ** 2) @ draws.T
    mean, spread = functions.mean(1), functions.std(1)
    axes.fill_between(grid.squeeze(-1), mean - 2 * spread, mean + 2 * spread, color="#2f6db5", alpha=0.3, lw=0)
    axes.plot(grid, mean, color="#2f6db5")
    axes.plot(grid, torch.sin(grid), "--", color="black", lw=0.8)
    axes.plot(x, t, ".", color="black")
    axes.set(title=name, ylim=(-2, 2))
panels[0].set(xlabel="scale", title="log evidence", ylim=(-25, 0))
panels[0].legend()
plt.show()

# Data and family are the same, so the prior alone decides about the gap. Independent weights know nothing there. The
# random walk bridges it, and the data prefer it by the difference of the two maxima.
#
# ## One that learns
#
# A network needs no scan: `learn=True` fits the scales of our priors along with the ELBO (empirical Bayes). If your own
# prior is an `nn.Module` with parameters, they are fitted too. Here each layer has a scale:

x = torch.linspace(-2, 2, 100).unsqueeze(-1)
t = torch.sin(3 * x) + 0.1 * torch.randn_like(x)
loader = DataLoader(TensorDataset(x, t), batch_size=100)
for prior in (vi.priors.NormalPrior(1.0), vi.priors.NormalPrior({"0.*": 1.0, "2.*": 1.0}, learn=True)):
    bayes = vi.variationalize(net, vi.likelihoods.Gaussian(0.1), vi.MeanField(), prior)
    result = bayes.fit(loader, steps=STEPS, progress=False)
    scales = {name: round(value, 2) for name, value in prior.scales(bayes.space).items()}
    print(f"ELBO {result.elbo}, scales {scales}")

# ## Two rules
#
# - Keep the constants. Without them the value is no bound, and a learned scale diverges. If a constant is unknown
#   (`LipschitzPrior`, sums of priors), set `normalised = False`; results then say so.
# - Weight decay is a prior and belongs here. `fit` refuses optimizers that have one.
