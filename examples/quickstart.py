"""A regression with a gap in the inputs, and a predictive band that widens there. Under a minute on a CPU.

python examples/quickstart.py [--out quickstart.png]
"""

import argparse

import torch
from torch import nn

import structvi as vi

NOISE = 0.1


def data(generator):
    """sin(2x)/2 + 0.3 x on [−3, −1] ∪ [1, 3], and a grid that covers the gap and the outside."""
    x = torch.cat([torch.linspace(-3, -1, 40), torch.linspace(1, 3, 40)]).unsqueeze(-1)
    truth = lambda x: 0.5 * torch.sin(2 * x) + 0.3 * x  # noqa: E731
    t = truth(x) + NOISE * torch.randn(x.shape, generator=generator)
    grid = torch.linspace(-4.5, 4.5, 200).unsqueeze(-1)
    return x, t, grid, truth(grid)


def train(net, x, t, steps=1500):
    """Ordinary training with weight decay: where most people stop."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), t).backward()
        optimizer.step()


def fit(steps=2500, seed=0):
    """From there a posterior with structured precision of rank 10 over all weights: Adam on −elbo/N."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x, t, grid, truth = data(generator)
    net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))
    train(net, x, t)
    model = vi.BayesianModel(net, vi.likelihoods.Gaussian(noise=NOISE), vi.NormalPrior(2.0), num_data=len(x))
    q = vi.StructuredPrecision(rank=10).bind(model.space, generator)
    optimizer = torch.optim.Adam(q.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        optimizer.zero_grad()
        elbo = vi.elbo(q, model, (x, t), groups=4, generator=generator)
        (-elbo / len(x)).backward()
        optimizer.step()
        schedule.step()
        if step % 500 == 0 or step == steps - 1:
            print(f"step {step:5d}   elbo {elbo.item():10.1f} nats", flush=True)
    with torch.no_grad():
        draws = q().draw(groups=100, coupling=vi.paired, generator=generator)
        functions = model.outputs(draws.theta, grid).squeeze(-1)  # [S, B]
    return x, t, grid.squeeze(-1), truth.squeeze(-1), functions


def picture(x, t, grid, truth, functions, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    mean, spread = functions.mean(0), functions.std(0)
    total = (spread**2 + NOISE**2).sqrt()
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.fill_between(grid, mean - 2 * total, mean + 2 * total, color="#cfe0f3", label="± 2 sd, with noise", lw=0)
    axes.fill_between(grid, mean - 2 * spread, mean + 2 * spread, color="#8db8e2", label="± 2 sd of the function", lw=0)
    axes.plot(grid, functions[:8].T, color="#2b6cb0", lw=0.6, alpha=0.6)
    axes.plot(grid, mean, color="#1a4f8a", lw=2, label="posterior mean")
    axes.plot(grid, truth, color="black", lw=1.2, ls="--", label="true function")
    axes.plot(x, t, ".", color="#b4572f", ms=5, label="data")
    axes.set(xlabel="x", ylabel="t", xlim=(-4.5, 4.5), ylim=(-3, 3), title="Structured posterior over all weights")
    axes.legend(loc="upper left", frameon=False, fontsize=9)
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
