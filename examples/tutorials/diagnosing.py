"""Diagnosing a fit.

One minute on two cores; needs the extra "diagnostics". A fit that ends is not yet a good fit. Is it near the posterior?
Does it still improve? Does the model describe the data?
"""

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

STEPS = 1500  # quick: 12
DATASETS = 500  # quick: 20

# ## A log density: two answers
#
# Eight correlated normals, wide in one direction. The full normal is exact, mean field too narrow.

space = vi.Parameters({"z": torch.zeros(8, dtype=torch.float64)})
shared = torch.ones(8, 8, dtype=torch.float64) * 0.8 + 0.2 * torch.eye(8, dtype=torch.float64)
posterior = torch.distributions.MultivariateNormal(torch.arange(8.0).double(), shared)
target = vi.LogDensity(lambda p: posterior.log_prob(p["z"]), space)

full = vi.fit_density(target, vi.FullNormal(), progress=False)
mean_field = vi.fit_density(target, vi.MeanField(), progress=False)
print(vi.diagnostics.diagnose(full.family, target))

# Now mean field: the fit has converged, and the answer is still wrong. The report shows it.

print(mean_field.verdict)
print(vi.diagnostics.diagnose(mean_field.family, target))

# Importance weights turn draws of q into draws of the posterior. Below k̂ = 0.7 the corrected moments can be used. Here
# k̂ is higher, because draws of q do not reach far enough. `importance` adds draws with longer tails, and these do: the
# true standard deviations are 1.

weighted = vi.diagnostics.importance(mean_field.family, target, draws=4000)
moments = weighted.moments()
print(f"k̂ {weighted.k:.2f}, effective draws {weighted.effective:.0f}")
print(f"mean field's sd {mean_field.family().variance.sqrt().mean():.2f}, corrected {moments.sd.mean():.2f}")

# ## A network
#
# A regression, and two fits of it: one long enough, one stopped at the beginning.

torch.manual_seed(0)
x = torch.linspace(-2, 2, 200).unsqueeze(-1)
t = torch.sin(2 * x) + 0.1 * torch.randn_like(x)
loader = DataLoader(TensorDataset(x, t), batch_size=50, shuffle=True)
net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))


def fitted(steps):
    bayes = vi.variationalize(net, vi.likelihoods.Gaussian("point"), vi.LowRankPrecision(rank=4))
    return bayes, bayes.fit(loader, steps=steps, progress=False)


bayes, result = fitted(STEPS)
report = bayes.diagnose(loader, result=result)
print(report)

# ✓ is good, · a note, ✗ bad, – not available. For a network k̂ is nearly always far above 0.7, because no tractable
# family is the posterior of hundreds of weights. Predictions may still be good. If a fit still improves, there is no
# verdict yet. The early fit:

early, result_early = fitted(max(STEPS // 50, 2))
print(early.diagnose(loader, result=result_early).verdict)
print(result_early.verdict)

# The history shows it: the ELBO in nats over the steps of the long fit.

axes = plt.figure(figsize=(7, 3), layout="constrained").gca()
result.history.plot(ax=axes)
plt.show()

# ## Does the model describe the data?
#
# Data sets drawn from the posterior predictive are compared with the data. p-values near 0 or 1 show a misfit.

print(vi.diagnostics.predictive_check(bayes, loader))

# ## Is the whole method right? Simulation-based calibration
#
# Draw θ from the prior and data from θ, fit, and note the rank of θ among posterior draws. Here a method halves the
# variance, and the test finds it.


def simulate(generator):  # θ ~ N(0, 1), t | θ ~ N(θ, 1): the posterior is N(t/2, 1/2)
    theta = torch.randn(1, generator=generator)
    return theta, theta + torch.randn(1, generator=generator)


def exact(t):
    return t / 2 + 0.5**0.5 * torch.randn(99, 1)


def too_narrow(t):
    return t / 2 + 0.5 * torch.randn(99, 1)


figure, panels = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
for axes, method in zip(panels, (exact, too_narrow), strict=True):
    ranks = vi.diagnostics.sbc(simulate, method, replications=DATASETS)
    print(f"{method.__name__}: {ranks.verdict}")
    ranks.plot(ax=axes)
    axes.set_title(method.__name__)
plt.show()

# [Diagnostics](../diagnostics.md) lists all of them with their thresholds. [`structvi check`](../check.md) compares a
# method with known posteriors.
