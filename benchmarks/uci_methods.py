"""The methods of `benchmarks.uci`: how each is fitted, by `vi.fit_many`, and what it predicts."""

import copy
from collections.abc import Callable, Sequence
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.training.restarts import elsewhere

from .uci_data import Split

#: noise → likelihood, and outputs of the network; targets have unit scale, and so log σ is held inside ±7
NOISE: dict[str, tuple[Callable[[], Any], int]] = {
    "normal": (lambda: vi.likelihoods.Gaussian("point"), 1),
    "Student-t": (lambda: vi.likelihoods.StudentT(), 1),
    "heteroscedastic": (lambda: vi.likelihoods.Gaussian("head", bound=7.0), 2),
}
#: λ of posteriors, drop rates, and prior scales of point estimates in units of 1/√fan_in: chosen on validation data
TEMPERATURES = (1.0, 0.3, 0.1, 0.03)
RATES = (0.005, 0.01, 0.05, 0.1)
SCALES = (1.0, 4.0)
HIDDEN, MEMBERS, DRAWS = 50, 5, 200
#: sets with more data than this take minibatches
FULL_BATCH, BATCH = 1500, 512


class Job(NamedTuple):
    """One fit: of which split, with which λ, which member of a mixture, and with which drop rate."""

    split: int
    temperature: float
    member: int = 0
    rate: float = 0.0


class Dropout(vi.MCDropout):
    """MC dropout on inputs and hidden units with the drop rate as a buffer: fits at different rates have one form."""

    drop: Tensor

    def __init__(self, rate: float):
        super().__init__({"0.weight": 1 - rate, "2.weight": 1 - rate}, per="input")
        self.rate = rate

    def initialise(self, parameters, generator):
        super().initialise(parameters, generator)
        self.register_buffer("drop", torch.tensor(self.rate))

    def _keep(self, like: Tensor) -> Tensor:
        return (1 - self.drop).expand(self.layout.M)

    def extra_repr(self) -> str:
        return "at a rate of its own"


class Predicted(NamedTuple):
    """On the test rows, in units of the standardised target: log density [n] and mean [n]."""

    log_density: Tensor
    mean: Tensor


class Method(NamedTuple):
    """How a posterior is made and fitted."""

    noise: str
    family: Callable[[Job], vi.Family]
    #: scales of the prior that maximise the ELBO, or fixed ones: point masses have none
    learned_prior: bool
    steps: int
    lr: float
    groups: int = 1
    draws: int = DRAWS


def template(inputs: int, method: Method, job: Job) -> vi.Posterior:
    """The posterior of a job, before it is given a start."""
    make, outputs = NOISE[method.noise]
    net = nn.Sequential(nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs))
    tensors = {"0.weight": 1.0, "0.bias": 1.0, "2.weight": 1.0, "2.bias": 1.0}
    prior = vi.NormalPrior.fan_in(tensors if method.learned_prior else 1.0, learn=method.learned_prior)
    return vi.variationalize(net, make(), method.family(job), prior, evaluation="vmap")


def started(template: vi.Posterior, seed: int) -> vi.Posterior:
    """A copy at a fresh draw of the network's initialisation."""
    one = copy.deepcopy(template)
    elsewhere(one, {}, seed)
    return one


def fit(splits: Sequence[Split], jobs: Sequence[Job], method: Method, device: str) -> list[tuple[Predicted, float]]:
    """Every job's prediction and ELBO, all of one computation. Seeds are those of split and member alone.

    A prior scale s of a point estimate is λ = 1/s² at scale one: the same objective, up to a constant.
    """
    inputs, seeds = splits[0].x.shape[1], [100 * job.split + job.member for job in jobs]
    templates = {rate: template(inputs, method, job) for rate, job in {job.rate: job for job in jobs}.items()}
    posteriors = [started(templates[job.rate], seed) for job, seed in zip(jobs, seeds, strict=True)]
    data = {job.split: _loader(splits[job.split]) for job in jobs}
    results = vi.fit_many(
        posteriors, [data[job.split] for job in jobs], seeds=seeds, each={"temperature": [j.temperature for j in jobs]},
        steps=method.steps, lr=method.lr, groups=method.groups, kl_warmup=0.1, restarts=0, stop=False, progress=False,
        device=device, at_once=len(jobs) > 1 or None,
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


def tried(
    splits: Sequence[Split], method: Method, temperatures: Sequence[float], device: str, rates: Sequence[float] = (0.0,)
) -> list[dict[Job, float]]:
    """Of each split the log density of a held-out fifth of its training set, for every λ and rate: one fit each."""
    held = [split.validation() for split in splits]
    jobs = [Job(r, λ, 0, rate) for r in range(len(splits)) for λ in temperatures for rate in rates]
    found: list[dict[Job, float]] = [{} for _ in splits]
    for job, (predicted, _) in zip(jobs, fit(held, jobs, method, device), strict=True):
        found[job.split][job] = float(predicted.log_density.mean())
    return found


def best_of(tried: Sequence[dict[Job, float]]) -> list[tuple[Job, float]]:
    """Of each split the job with the highest log density of its held-out fifth, and that."""
    return [max(own.items(), key=lambda pair: pair[1]) for own in tried]
