"""The methods of `benchmarks.uci`: how each is fitted, by `vi.fit_many`, and what it predicts."""

import copy
from collections.abc import Callable, Mapping, Sequence
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.ensemble.ensemble import stacking as stacking

from .uci_data import Split

Splits = Mapping[int, Split]
#: noise → likelihood, and outputs of the network; targets have unit scale, and so log σ is held inside ±7
NOISE: dict[str, tuple[Callable[[], Any], int]] = {
    "normal": (lambda: vi.likelihoods.Gaussian("point"), 1),
    "Student-t": (lambda: vi.likelihoods.StudentT(), 1),
    "heteroscedastic": (lambda: vi.likelihoods.Gaussian("head", bound=7.0), 2),
}
HIDDEN, MEMBERS, DRAWS = 50, 5, 100
TENSORS = ("0.weight", "0.bias", "2.weight", "2.bias")
#: what is stacked besides a candidate itself: the same draws, their noise so many times as wide. Narrower too: noise is
#: learned from the residuals of every draw, and the mean of a mixture over draws and members is nearer to the data
WIDTHS = (0.7, 1.5, 3.0)
#: nats that a fit which is no number counts for a row
LOST = -1000.0
#: sets with more data than this take minibatches
FULL_BATCH, BATCH = 500, 256


class Candidate(NamedTuple):
    """What can be chosen: λ, the prior's scale in units of 1/√fan_in (None: by the ELBO, one a tensor), a drop rate.

    At λ = 0 it is a network of an ensemble: what mean field with the prior's variance λs²/fan_in comes to as λ falls.
    """

    temperature: float
    scale: float | None
    rate: float = 0.0


class Job(NamedTuple):
    """One fit: of which split, which candidate, which member of a mixture."""

    split: int
    candidate: Candidate
    member: int = 0


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
    #: the log density where the noise of every draw has another width, [len(WIDTHS), n]
    rescaled: Tensor

    @property
    def every(self) -> Tensor:
        """The log density with the noise as it was learned, and at every other width: [1 + len(WIDTHS), n]."""
        return torch.cat([self.log_density.unsqueeze(0), self.rescaled])


class Method(NamedTuple):
    """How a posterior is made and fitted."""

    noise: str
    family: Callable[[Candidate], vi.Family]
    steps: int
    lr: float
    groups: int = 1
    draws: int = DRAWS
    #: a point estimate, or masks of one
    is_point: bool = False

    def has_point(self, one: Candidate) -> bool:
        return self.is_point or one.temperature == 0

    def temperature(self, one: Candidate) -> float:
        return (one.temperature or 1.0) / (one.scale or 1.0) ** 2 if self.has_point(one) else one.temperature


class Members(NamedTuple):
    """The equal mixture of some members, of the first five, the first of them, and their ELBO on average."""

    predicted: Predicted
    five: Predicted
    first: Predicted
    elbo: float


def started(inputs: int, method: Method, one: Candidate, seed: int) -> vi.Posterior:
    """The posterior of a candidate around a network of its own.

    Fits at different scales have one form: scales that are held are parameters that do not learn. Point estimates
    have scale one, and 1/s² is part of their λ: the same objective but for a constant.
    """
    make, outputs = NOISE[method.noise]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs))
    is_point = method.has_point(one)
    prior = vi.priors.NormalPrior.fan_in(1.0 if is_point else dict.fromkeys(TENSORS, 1.0), learn=not is_point)
    if one.scale is not None and not is_point:
        prior.log_scale.requires_grad_(False).fill_(log(one.scale))
    family = method.family(one) if one.temperature else vi.MAP()
    return vi.variationalize(net, make(), family, prior, evaluation="vmap")


def fit(splits: Splits, jobs: Sequence[Job], method: Method, device: str) -> list[tuple[Predicted, float]]:
    """Every job's prediction and ELBO. Seeds are those of split and member alone.

    Fits of one form are one computation: those of one prior, whatever their λ.
    """
    inputs, seeds = next(iter(splits.values())).x.shape[1], [100 * job.split + job.member for job in jobs]
    posteriors = [
        started(inputs, method, job.candidate, seed).to(device) for job, seed in zip(jobs, seeds, strict=True)
    ]
    data = {r: _loader(splits[r]) for r in {job.split for job in jobs}}
    results = vi.fit_many(
        posteriors, [data[job.split] for job in jobs], seeds=seeds,
        each={"kl_weight": [method.temperature(job.candidate) for job in jobs]}, steps=method.steps, lr=method.lr,
        estimator=vi.Estimator(groups=method.groups), 
        schedule=vi.Schedule(kl_warmup=0.1, stop=False), progress=False,
    )  # fmt: skip
    found = [
        predict(one, splits[job.split], method.draws if job.candidate.temperature else 1)
        for one, job in zip(posteriors, jobs, strict=True)
    ]
    return [(one, result.elbo.value) for one, result in zip(found, results, strict=True)]


def members(
    splits: Splits, counts: Mapping[tuple[int, Candidate], int], method: Method, device: str
) -> dict[tuple[int, Candidate], Members]:
    """Of each split and candidate the equal mixture of so many fits."""
    jobs = [Job(r, one, m) for (r, one), count in counts.items() for m in range(count)]
    found = iter(fit(splits, jobs, method, device))
    parts = {key: [next(found) for _ in range(count)] for key, count in counts.items()}
    return {
        key: Members(_equal(own), _equal(own[:MEMBERS]), own[0][0], sum(elbo for _, elbo in own) / len(own))
        for key, own in parts.items()
    }


def _equal(own: Sequence[tuple[Predicted, float]]) -> Predicted:
    return mixed([(predicted, 1 / len(own)) for predicted, _ in own])


def _loader(split: Split) -> DataLoader:
    size = len(split.t) if len(split.t) <= FULL_BATCH else BATCH
    return DataLoader(TensorDataset(split.x, split.t), batch_size=size, shuffle=True)


@torch.no_grad()
def predict(posterior: vi.Posterior, split: Split, draws: int) -> Predicted:
    x, t = (tensor.to(posterior.device) for tensor in (split.x_test, split.t_test))
    generator = torch.Generator(posterior.device).manual_seed(7)
    found = posterior.predict(x, draws, generator=generator)
    rows = [found.log_prob(t), *(_rescaled(found, t, factor) for factor in WIDTHS)]
    every = torch.stack(rows).flatten(1).double().cpu().nan_to_num(nan=LOST)
    return Predicted(every[0], found.mean.view(-1).double().cpu().nan_to_num(), every[1:])


def _rescaled(found: vi.Predictive, t: Tensor, factor: float) -> Tensor:
    """log Σ_s w_s p(t | y_s) where the noise is so many times as wide."""
    made: Any = copy.copy(found.components)
    made.scale = factor * made.scale
    weights = found.weights.log().view(-1, *[1] * t.ndim)
    return (weights + made.log_prob(t)).logsumexp(0)


def mixed(parts: Sequence[tuple[Predicted, float]]) -> Predicted:
    """The mixture with these weights."""
    every = torch.stack([part.every + log(weight) for part, weight in parts]).logsumexp(0)
    mean = torch.stack([weight * part.mean for part, weight in parts]).sum(0)
    return Predicted(every[0], mean, every[1:])


def with_widths(predicted: Predicted, weights: Sequence[float]) -> Predicted:
    """The mixture of noise as it was learned and at other widths, with these weights, which sum to one."""
    mixture = (predicted.every + torch.tensor(weights).double().log().unsqueeze(-1)).logsumexp(0)
    return predicted._replace(log_density=mixture)


def scores(predicted: Predicted, split: Split) -> tuple[float, float]:
    """Mean test log-likelihood and root mean square error, in the data's own units."""
    error = (predicted.mean - split.t_test.view(-1).double()).square().mean().sqrt()
    return float(predicted.log_density.mean()) - log(split.unit), float(error) * split.unit
