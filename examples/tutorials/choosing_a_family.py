"""Choosing a family: what each costs and buys.

Two minutes on two cores. A family is the set of shapes that the posterior approximation may take. At its optimum a
larger family is never further from the posterior. It costs parameters, time, and sometimes a harder fit.
"""

import time

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

STEPS = 2000  # quick: 12
DRAWS = 200  # quick: 10

# ## Shapes, in two dimensions
#
# A posterior with two correlated modes. `vi.fit_density` needs no settings for a log density.

space = vi.Parameters({"z": torch.zeros(2, dtype=torch.float64)})
tilt = torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=torch.float64)
modes = [torch.distributions.MultivariateNormal(c * torch.tensor([1.6, -1.6]).double(), tilt) for c in (-1, 1)]


def log_density(p):
    return torch.logsumexp(torch.stack([mode.log_prob(p["z"]) for mode in modes]), 0)


target = vi.LogDensity(log_density, space)
shapes = {
    "mean field": vi.MeanField(),
    "low rank, rank 1": vi.LowRankNormal(rank=1),
    "mixture of two": vi.Mixture(vi.LowRankNormal(rank=1), components=2),
}
fits = {name: vi.fit_density(target, family, progress=False) for name, family in shapes.items()}
for name, fit in fits.items():
    print(f"{name:>18}: ELBO {fit.elbo.value:6.3f} nats, {fit.evaluations} evaluations, {fit.verdict.split(':')[0]}")

# The mass of the posterior is 2, so the best possible ELBO is log 2 = 0.693. The picture shows the posterior as shades
# and 300 draws of each family as points.

a, b = torch.meshgrid(*2 * [torch.linspace(-6, 6, 120, dtype=torch.float64)], indexing="xy")
shade = target.log_joint(torch.stack([a, b], -1).reshape(-1, 2)).exp().reshape(a.shape)
figure, panels = plt.subplots(1, 3, figsize=(9, 3.1), sharey=True, layout="constrained")
for axes, (name, fit) in zip(panels, fits.items(), strict=True):
    draws = fit.family().draw(300, generator=torch.Generator().manual_seed(1)).theta.detach()
    axes.contourf(a, b, shade, levels=10, cmap="Blues")
    axes.plot(*draws.T, ".", ms=2.5, color="#b4572f", alpha=0.6)
    axes.set(title=name, xlim=(-6, 6), ylim=(-6, 6))
plt.show()

# Mean field and one normal sit on one mode: minimising KL[q‖p] rather misses a mode than covers the space between two.
# Mean field is also too narrow. Only the mixture finds both modes, and its ELBO reaches the best possible one.
#
# ## Costs, on a network
#
# All families fit the same regression: 49 weights, and 60 observations with a gap in the middle. In the gap the function
# cannot be guessed. Every family gets the same steps, with four antithetic pairs of draws each. The columns "near" and
# "gap" are log densities for each new observation, near the data and in the gap.

torch.manual_seed(0)


def observe(x):
    return x, 0.5 * torch.sin(3 * x) + 0.3 * x + 0.1 * torch.randn_like(x)


def batches(x, t):
    return DataLoader(TensorDataset(x, t), batch_size=len(x))


x, t = observe(torch.cat([torch.linspace(-3, -1, 30), torch.linspace(1, 3, 30)]).unsqueeze(-1))
near = batches(*observe(torch.cat([torch.linspace(-3, -1, 100), torch.linspace(1, 3, 100)]).unsqueeze(-1)))
gap = batches(*observe(torch.linspace(-0.9, 0.9, 100).unsqueeze(-1)))

net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for _ in range(STEPS // 2):
    optimizer.zero_grad()
    nn.functional.mse_loss(net(x), t).backward()
    optimizer.step()

families = {
    "MAP": vi.MAP(),
    "MC dropout": vi.MCDropout(keep=0.9),
    "mean field": vi.MeanField(),
    "low rank 8": vi.LowRankNormal(rank=8),
    "precision 8": vi.LowRankPrecision(rank=8),
    "full": vi.FullNormal(),
    "last layer only": vi.PerLayer({"0.*": vi.MAP(), "*": vi.FullNormal()}),
}
posteriors = {}
print(f"{'family':>15} {'learned':>8} {'ms a step':>10} {'ELBO':>7} {'near':>6} {'gap':>6}   90 % intervals hold")
for name, family in families.items():
    bayes = posteriors[name] = vi.variationalize(net, vi.likelihoods.Gaussian(0.1), family, vi.priors.NormalPrior(1.5))
    began = time.process_time()
    result = bayes.fit(batches(x, t), steps=STEPS, estimator=vi.Estimator(groups=4), progress=False)
    milliseconds = 1e3 * (time.process_time() - began) / STEPS
    learned = sum(p.numel() for p in bayes.parameters())
    elbo = f"{result.elbo.value:.1f}" if result.bound else "–"
    a, b = (bayes.evaluate(new, draws=DRAWS, generator=torch.Generator().manual_seed(0)) for new in (near, gap))
    held = f"{a.coverage[0.9]:.0%} near, {b.coverage[0.9]:.0%} in the gap"
    print(f"{name:>15} {learned:>8} {milliseconds:>10.1f} {elbo:>7} {-a.nlpd:>6.2f} {-b.nlpd:>6.2f}   {held}")

# The objective of point masses (MAP, MC dropout, parts that are MAP) is no bound, so the table leaves it out.
#
# Near the data a point estimate predicts about as well as a posterior. In the gap it is confident and wrong. No family
# is right there; the richer ones are less confident.

grid = torch.linspace(-4.5, 4.5, 120).unsqueeze(-1)
figure, panels = plt.subplots(2, 3, figsize=(9, 4.6), sharex=True, sharey=True, layout="constrained")
for axes, name in zip(panels.flat, [n for n in families if n != "low rank 8"], strict=True):
    predictive = posteriors[name].predict(grid, draws=DRAWS, generator=torch.Generator().manual_seed(0))
    mean, spread = predictive.mean.squeeze(-1), predictive.epistemic.sqrt().squeeze(-1)
    axes.fill_between(grid.squeeze(-1), mean - 2 * spread, mean + 2 * spread, color="#2f6db5", alpha=0.3, lw=0)
    axes.plot(grid, mean, color="#2f6db5")
    axes.plot(x, t, ".", ms=2, color="black")
    axes.set(title=name, ylim=(-2.5, 2.5))
plt.show()

# ## Which one?
#
# - **Start with `MeanField()`** if steps are expensive. It converges well, and is over-confident of combinations of
#   weights.
# - **`LowRankPrecision(rank=8)`** describes the few directions that the data determine. In over-parametrised networks
#   all others keep the prior's width.
# - **`LowRankNormal(rank=8)`** describes the few directions that vary together: strong correlations, log densities.
# - **`FullNormal()`** if P is at most some hundreds.
# - **`PerLayer({"backbone.*": MAP(), "*": ..})`** for a Bayesian head on a large network: about one pass a step.
# - **`Mixture(.., components=C)`** for several modes, `Ensemble.of(nets, ..)` for several networks.
# - **`MAP()` and `MCDropout()`** for comparison.
#
# If you doubt the rank, try `bayes.grow(loader, rank=16, steps=..)`. It continues the fit with a richer family and never
# makes it worse. [Diagnosing a fit](diagnosing.md) has more.
