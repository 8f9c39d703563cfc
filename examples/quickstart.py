"""A regression with a gap in the inputs, and a predictive band that widens there. Under a minute on a CPU.

pip install -c constraints.txt -e ".[plots]" && python examples/quickstart.py [--out quickstart.png]
"""

import argparse

import matplotlib
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

matplotlib.use("Agg")
NOISE = 0.1


def truth(x):
    return 0.5 * torch.sin(2 * x) + 0.3 * x


def data():
    """80 observations on [−3, −1] ∪ [1, 3]."""
    x = torch.cat([torch.linspace(-3, -1, 40), torch.linspace(1, 3, 40)]).unsqueeze(-1)
    return x, truth(x) + NOISE * torch.randn_like(x)


def train(net, x, t, steps=1500):
    """Ordinary training: where most people stop."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), t).backward()
        optimizer.step()


def fit(steps=2500):
    """From there, a posterior with structured precision of rank 10 over all 73 weights."""
    torch.manual_seed(0)
    x, t = data()
    net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))
    train(net, x, t)
    bayes = vi.variationalize(
        net,
        likelihood=vi.likelihoods.Gaussian(noise=NOISE),
        family=vi.LowRankPrecision(rank=10),
        prior=vi.priors.NormalPrior(2.0),
    )
    result = bayes.fit(
        DataLoader(TensorDataset(x, t), batch_size=len(x)),
        steps=steps,
        estimator=vi.Estimator(groups=4),
    )
    print(result)
    return x, t, bayes


def picture(x, t, bayes, path):
    grid = torch.linspace(-4.5, 4.5, 200).unsqueeze(-1)
    predictive = bayes.predict(grid, draws=400, generator=torch.Generator().manual_seed(0))
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    vi.plots.predictive_band(grid, predictive, data=(x, t), ax=axes)
    axes.plot(grid, predictive.outputs[:8].squeeze(-1).T, color="#2f6db5", lw=0.6, alpha=0.6)
    axes.plot(grid, truth(grid), color="black", lw=1.2, ls="--")
    axes.annotate(
        "truth", (4.0, truth(torch.tensor(4.0)).item()), (3.7, 0.7), arrowprops={"arrowstyle": "-", "lw": 0.6}
    )
    axes.set(xlim=(-4.5, 4.5), ylim=(-3, 3))
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="quickstart.png")
    parser.add_argument("--steps", type=int, default=2500)
    arguments = parser.parse_args()
    picture(*fit(arguments.steps), arguments.out)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
