"""First posterior.

Half a minute on two cores. You have a network and a likelihood for its targets. A fit gives predictions that know
their own uncertainty.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

STEPS = 2000  # quick: 20

# ## Data, and a network trained as usual
#
# 80 noisy observations of a function, with a gap in the middle.

torch.manual_seed(0)
x = torch.cat([torch.linspace(-3, -1, 40), torch.linspace(1, 3, 40)]).unsqueeze(-1)
t = 0.5 * torch.sin(2 * x) + 0.3 * x + 0.1 * torch.randn_like(x)
loader = DataLoader(TensorDataset(x, t), batch_size=80)

net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for _ in range(STEPS // 2):
    optimizer.zero_grad()
    nn.functional.mse_loss(net(x), t).backward()
    optimizer.step()

# ## From a network to a posterior
#
# `variationalize` does not change the network. Its arguments say which weights are random (here all of them), how
# observations scatter around the output, the prior of the weights, and the shape of the posterior.

bayes = vi.variationalize(
    net,
    likelihood=vi.likelihoods.Gaussian(noise=0.1),  # unknown? "point" fits it, "random" gives it a posterior
    family=vi.LowRankPrecision(rank=10),
    prior=vi.priors.NormalPrior(2.0),
)
result = bayes.fit(loader, steps=STEPS, estimator=vi.Estimator(groups=4), progress=False)
print(result)

# The first words are the verdict: the fit converged, or still improves at some rate, or noise could hide an
# improvement. The ELBO is a lower bound of log p(data). Larger is better, so it compares two families.
#
# ## Predictions
#
# `predict` gives a mixture over draws of the weights. The dark band shows the uncertainty of the function. The light
# band shows where to expect observations. In the gap the dark band widens; the noise stays.

grid = torch.linspace(-4.5, 4.5, 150).unsqueeze(-1)
predictive = bayes.predict(grid, draws=300, generator=torch.Generator().manual_seed(0))

axes = plt.figure(figsize=(8, 3.6), layout="constrained").gca()
vi.plots.predictive_band(grid, predictive, data=(x, t), ax=axes)
axes.set_ylim(-3, 3)
plt.show()

# A prediction has attributes for everything that needs no argument.

for place, name in ((75, "in the gap"), (110, "among data"), (149, "far outside")):
    unknown, noise = predictive.epistemic[place].sqrt().item(), predictive.aleatoric[place].sqrt().item()
    print(f"{name:>12}: mean {predictive.mean[place].item():5.2f}, function ±{unknown:.2f}, noise ±{noise:.2f}")

low, high = bayes.predict(x[:1]).interval(0.9)
print(f"9 of 10 observations at x = {x[0].item():.0f} between {low.item():.2f} and {high.item():.2f}")

# ## How good is it?
#
# Evaluate it on test data, which the fit has not seen.

x_new = torch.cat([torch.rand(200, 1) * 2 - 3, torch.rand(200, 1) * 2 + 1])
t_new = 0.5 * torch.sin(2 * x_new) + 0.3 * x_new + 0.1 * torch.randn_like(x_new)
print(bayes.evaluate(DataLoader(TensorDataset(x_new, t_new), batch_size=100), draws=100))

# ## Save it
#
# The posterior is one safetensors file without pickle. Loading needs the network's architecture.

bayes.save("posterior.safetensors")
again = vi.load("posterior.safetensors", nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1)))
print(torch.equal(again.family().mean, bayes.family().mean))

# ## First mistakes
#
# An error states the expected value, the given value, and the remedy.

try:
    vi.variationalize(net, likelihood=nn.MSELoss())
except TypeError as error:
    print(error)
try:
    bayes.fit(loader, epochs=1, optimizer=lambda p: torch.optim.AdamW(p, weight_decay=0.01), progress=False)
except ValueError as error:
    print(error)

# Next: [choosing a family](choosing_a_family.md), [diagnosing a fit](diagnosing.md).
