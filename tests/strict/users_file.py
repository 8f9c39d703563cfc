# pyright: strict
"""A user's file, in pyright's strict mode: what the public interface hands back has a type, nowhere `Unknown`.

`make lint` checks it and `tests/test_public_types.py` runs it.
"""

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi import diagnostics, metrics, plots
from structvi.objective import Estimate
from structvi.train.result import History

Loader = DataLoader[tuple[Tensor, ...]]


def data() -> Loader:
    x = torch.linspace(-1, 1, 24).unsqueeze(-1)
    return DataLoader(TensorDataset(x, x.square()), batch_size=12)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))


def posteriors(folder: Path) -> None:
    loader, net = data(), network()
    bayes = vi.variationalize(net, vi.likelihoods.Gaussian("point"), vi.LowRankNormal(rank=1))
    assert_type(bayes, vi.Posterior)
    result = bayes.fit(loader, epochs=2, lr=0.01, progress=False)
    assert_type(result, vi.FitResult)
    assert_type(result.status, vi.Status)
    assert_type(result.elbo, Estimate)
    assert_type(result.history, History)
    assert_type(bayes.elbo(loader, groups=2), Estimate)
    assert_type(bayes.sample(3), dict[str, Tensor])
    assert_type(bayes.sample_network(), nn.Module)
    assert_type(bayes.family, vi.Family)
    bayes.save(folder / "posterior.safetensors")
    assert_type(vi.load(folder / "posterior.safetensors", net), vi.Posterior)
    predictions(bayes, loader)


def predictions(bayes: vi.Posterior, loader: Loader) -> None:
    predictive = bayes.predict(torch.zeros(2, 1), draws=4)
    assert_type(predictive, vi.Predictive)
    assert_type(predictive.mean, Tensor)
    assert_type(predictive.interval(0.9), tuple[Tensor, Tensor])
    assert_type(predictive.components, Distribution)
    measured = bayes.evaluate(loader, draws=4)
    assert_type(measured, metrics.Metrics)
    assert_type(measured.nlpd, float)
    predictor = bayes.predictor(draws=4)
    assert_type(predictor.predict(torch.zeros(2, 1)), vi.Predictive)


def own_loop() -> None:
    bayes = vi.variationalize(network(), likelihood=vi.likelihoods.Gaussian(0.1), num_data=24)
    optimizer = torch.optim.Adam(bayes.parameters(), 0.01)
    for batch in data():
        optimizer.zero_grad()
        loss = bayes.loss(batch)
        assert_type(loss, Tensor)
        loss.backward()  # pyright: ignore[reportUnknownMemberType] torch's own
        optimizer.step()  # pyright: ignore[reportUnknownMemberType] torch's own


def log_densities(folder: Path) -> None:
    space = vi.Parameters({"mu": torch.zeros(2), "sigma": vi.constraints.positive(1.0)})

    def log_density(p: dict[str, Tensor]) -> Tensor:
        return -0.5 * (p["mu"] / p["sigma"]).square().sum() - p["sigma"]

    target = vi.LogDensity(log_density, space)
    result = vi.fit_density(target, vi.FullNormal(), progress=False)
    assert_type(result, vi.DensityFit)
    result.save(folder / "fit.safetensors")
    assert_type(vi.load(folder / "fit.safetensors", target), vi.DensityFit)
    assert_type(result.family, vi.Family)
    assert_type(result.family().draw(2), vi.Draws)


class Own(vi.Family):
    """A family of one's own."""

    def __init__(self, width: float = 0.1):
        super().__init__()
        self.width = width

    def initialise(self, parameters: vi.Parameters, generator: torch.Generator | None) -> None:
        self.mean = nn.Parameter(parameters.initial.clone())

    def forward(self) -> Distribution:
        normal = torch.distributions.Normal(self.mean, self.width)
        return torch.distributions.Independent(normal, 1)


def choices() -> list[vi.Family]:
    assert_type(vi.couplings.naive(1, P=3, K=0), vi.couplings.Noise)
    return [vi.MAP(), vi.Mixture(vi.MeanField(), 2), vi.Rotated(vi.MeanField()), vi.MCDropout(0.1), Own()]


def looking(bayes: vi.Posterior, loader: Loader) -> None:
    assert_type(bayes.diagnose(loader, draws=16), diagnostics.Report)
    assert_type(diagnostics.psis(torch.zeros(8)), tuple[Tensor, float])
    assert_type(metrics.ood_auroc(bayes, loader, loader), float)
    plots.reliability_diagram(bayes.evaluate(loader))
