"""A normalising flow from zuko as a family of one's own, on a curved target. Under a minute on a CPU.

pip install zuko matplotlib && python examples/flow.py [--out flow.png]
"""

import argparse
from math import log, pi

import torch
import zuko

import structvi as vi


class Flow(vi.Family):
    """A neural spline flow: `forward` returns a torch distribution, and that is all."""

    def __init__(self, transforms: int = 2, hidden: int = 32):
        super().__init__()
        self.transforms, self.hidden = transforms, hidden

    def initialise(self, parameters, generator):
        layers = (self.hidden, self.hidden)
        self.flow = zuko.flows.NSF(parameters.size, transforms=self.transforms, hidden_features=layers)

    def forward(self):
        return self.flow()


def banana():
    """x ~ N(0, 2²), y | x ~ N(x²/4 − 1, ½²): normalised, so that the best ELBO is 0."""
    space = vi.Parameters({"x": torch.zeros(()), "y": torch.zeros(())})

    def log_density(p):
        x, y = p["x"], (p["y"] - p["x"].square() / 4 + 1) / 0.5
        return -0.5 * (x / 2).square() - 0.5 * y.square() - log(2 * 0.5) - log(2 * pi)

    return vi.LogDensity(log_density, space)


def fit(recipe, target, steps, seed=0):
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    q = recipe.bind(target.space, generator)
    optimizer = torch.optim.Adam(q.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        (
            -vi.elbo(q, target, estimator=vi.Estimator(groups=32, coupling=vi.couplings.naive), generator=generator)
        ).backward()
        optimizer.step()
        schedule.step()
    values = (
        vi.objective.elbo_terms(
            q, target, estimator=vi.Estimator(groups=4000, coupling=vi.couplings.naive), generator=generator
        )
        .objective()
        .detach()
    )
    return q, values.mean().item(), values.std().item() / 4000**0.5


def picture(fits, target, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    x, y = torch.meshgrid(torch.linspace(-6, 6, 160), torch.linspace(-3.5, 7, 160), indexing="xy")
    grid = torch.stack([x, y], dim=-1).reshape(-1, 2)
    density = target.log_joint(grid).exp().reshape(x.shape)
    figure, panels = plt.subplots(1, len(fits), figsize=(4 * len(fits), 3.8), sharey=True, layout="constrained")
    for axes, (name, (q, value, _)) in zip(panels, fits.items(), strict=True):
        draws = q().draw(1500, generator=torch.Generator().manual_seed(1)).theta.detach()
        axes.contourf(x, y, density, levels=12, cmap="Blues")
        axes.plot(*draws.T, ".", ms=2, alpha=0.5, color="#b4572f")
        axes.set(title=f"{name}: ELBO {value:.2f} (best 0)", xlim=(-6, 6), ylim=(-3.5, 7), xlabel="x")
    panels[0].set_ylabel("y")
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="flow.png")
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    target = banana()
    fits = {}
    for name, recipe in {"mean field": vi.MeanField(), "full normal": vi.FullNormal(), "spline flow": Flow()}.items():
        fits[name] = fit(recipe, target, arguments.steps)
        print(f"{name:>12}: ELBO {fits[name][1]:7.3f} ± {fits[name][2]:.3f} nats", flush=True)
    picture(fits, target, arguments.out)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
