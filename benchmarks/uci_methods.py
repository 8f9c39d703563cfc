"""The methods of `benchmarks.uci`: how each is fitted, by `vi.fit_many`, and what it predicts."""

from collections.abc import Callable, Sequence
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

from .uci_data import Split

#: noise → likelihood, and outputs of the network; targets have unit scale, and so log σ is held inside ±7
NOISE: dict[str, tuple[Callable[[], Any], int]] = {
    "normal": (lambda: vi.likelihoods.Gaussian("point"), 1),
    "Student-t": (lambda: vi.likelihoods.StudentT(), 1),
    "heteroscedastic": (lambda: vi.likelihoods.Gaussian("head", bound=7.0), 2),
}
#: λ of posteriors, drop rates, and prior scales of point estimates in units of 1/√fan_in: chosen on validation data
TEMPERATURES = (1.0, 0.3, 0.1)
RATES = (0.005, 0.01, 0.05, 0.1)
SCALES = (1.0, 4.0)
HIDDEN, MEMBERS, DRAWS = 50, 5, 200
#: sets with more data than this take minibatches
FULL_BATCH, BATCH = 1500, 512


class Job(NamedTuple):
    """One fit: of which split, with which λ, and which member of a mixture."""

    split: int
    temperature: float
    member: int = 0


class Predicted(NamedTuple):
    """On the test rows, in units of the standardised target: log density [n] and mean [n]."""

    log_density: Tensor
    mean: Tensor


class Method(NamedTuple):
    """How a posterior is made and fitted."""

    noise: str
    family: Callable[[], vi.Family]
    #: scales of the prior that maximise the ELBO, or fixed ones: point masses have none
    learned_prior: bool
    steps: int
    lr: float
    groups: int = 1
    draws: int = DRAWS


def network(inputs: int, outputs: int, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs))


def fit(splits: Sequence[Split], jobs: Sequence[Job], method: Method, device: str) -> list[tuple[Predicted, float]]:
    """Every job's prediction and ELBO, all of one computation. Seeds are those of split and member alone.

    A prior scale s of a point estimate is λ = 1/s² at scale one: the same objective, up to a constant.
    """
    make, outputs = NOISE[method.noise]
    tensors = {"0.weight": 1.0, "0.bias": 1.0, "2.weight": 1.0, "2.bias": 1.0}
    posteriors, seeds = [], []
    for job in jobs:
        seeds.append(100 * job.split + job.member)
        prior = vi.NormalPrior.fan_in(tensors if method.learned_prior else 1.0, learn=method.learned_prior)
        net = network(splits[job.split].x.shape[1], outputs, seeds[-1])
        posteriors.append(vi.variationalize(net, make(), method.family(), prior))
    data = {job.split: _loader(splits[job.split]) for job in jobs}
    results = vi.fit_many(
        posteriors, [data[job.split] for job in jobs], seeds=seeds, each={"temperature": [j.temperature for j in jobs]},
        steps=method.steps, lr=method.lr, groups=method.groups, kl_warmup=0.1, restarts=0, stop=False, progress=False,
        device=device,
    )  # fmt: skip
    found = [predict(one, splits[job.split], method.draws) for one, job in zip(posteriors, jobs, strict=True)]
    return [(one, result.elbo.value) for one, result in zip(found, results, strict=True)]


def _loader(split: Split) -> DataLoader:
    size = len(split.t) if len(split.t) <= FULL_BATCH else BATCH
    return DataLoader(TensorDataset(split.x, split.t), batch_size=size, shuffle=True)


@torch.no_grad()
def predict(posterior: vi.Posterior, split: Split, draws: int) -> Predicted:
    x, t = (tensor.to(posterior.device) for tensor in (split.x_test, split.t_test))
    generator = torch.Generator(posterior.device).manual_seed(7)
    found = posterior.predict(x, draws, chunk=draws, generator=generator)
    return Predicted(found.log_prob(t).view(-1).double().cpu(), found.mean.view(-1).double().cpu())


def mixed(parts: Sequence[Predicted]) -> Predicted:
    """The equal mixture."""
    log_density = torch.stack([part.log_density for part in parts]).logsumexp(0) - log(len(parts))
    return Predicted(log_density, torch.stack([part.mean for part in parts]).mean(0))


def scores(predicted: Predicted, split: Split) -> tuple[float, float]:
    """Mean test log-likelihood and root mean square error, in the data's own units."""
    error = (predicted.mean - split.t_test.view(-1).double()).square().mean().sqrt()
    return float(predicted.log_density.mean()) - log(split.unit), float(error) * split.unit


def chosen(
    splits: Sequence[Split], method: Method, temperatures: Sequence[float], device: str
) -> list[dict[float, float]]:
    """Of each split the log density of a held-out fifth of its training set, for every λ: one fit each."""
    held = [split.validation() for split in splits]
    jobs = [Job(r, temperature) for r in range(len(splits)) for temperature in temperatures]
    found: list[dict[float, float]] = [{} for _ in splits]
    for job, (predicted, _) in zip(jobs, fit(held, jobs, method, device), strict=True):
        found[job.split][job.temperature] = float(predicted.log_density.mean())
    return found
