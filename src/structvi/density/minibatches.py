"""A family fitted to a log density that is seen in minibatches: Adam on fresh draws and one batch a step."""

from collections.abc import Iterable, Iterator
from math import cos, pi
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ..couplings import paired
from ..families.family import Family
from ..models.batch import rows_of
from ..models.target import Target
from ..objective import Estimate, Estimator, NonFiniteError, elbo, elbo_terms, not_finite
from ..result import Status
from ..util.checks import check_integer, check_iterable, check_positive
from ..util.progress import is_live

#: pairs of draws a step
GROUPS = 4
#: of the steps, in which the rate rises, in which a factor waits, and whose iterates are averaged
WARMUP, FIRST_STAGE, AVERAGED = 0.05, 0.4, 0.25
#: largest norm of a gradient, relative to the median of those so far
CLIP = 10.0
#: draws of the ELBO on all batches
FRESH_GROUPS = 256
#: nats that the last quarter of the steps may still gain, in standard errors and at least
ERRORS, LEAST = 3.0, 0.02


class OverBatches:
    """A log density of all data, the mean over batches of its estimates: `log_joint` reads all of them.

    Estimates of batches count as their rows do: with (N/B) Σ in each, the mean over unequal ones is not the whole.

    Example:
        >>> from structvi import LogDensity, Parameters
        >>> target = LogDensity(lambda p, x: p["z"] * 3 / len(x) * x.sum(), Parameters({"z": torch.zeros(())}))
        >>> OverBatches(target, [torch.tensor([1.0, 2.0]), torch.tensor([4.0])]).log_joint(torch.ones(1, 1))
        tensor([7.])
    """

    def __init__(self, target: Target, loader: Iterable[Any]):
        self.target, self.loader, self.space = target, loader, target.space

    def log_joint(self, theta: Tensor, batch: Any = None, **options: Any) -> Tensor:
        if batch is not None:
            return self.target.log_joint(theta, batch, **options)
        values, rows = [], []
        for own in self.loader:
            values.append(self.target.log_joint(theta, own, **options))
            rows.append(rows_of(own))
        return torch.stack([share * value for share, value in zip(shares(rows), values, strict=True)]).mean(0)


class Weighted:
    """A log density times a number."""

    def __init__(self, target: Target, weight: float):
        self.target, self.weight, self.space = target, weight, target.space

    def log_joint(self, theta: Tensor, batch: Any = None, **options: Any) -> Tensor:
        return self.weight * self.target.log_joint(theta, batch, **options)


def shares(rows: list[int | None]) -> list[float]:
    """Rows of batches relative to their mean: 1 where all are equal, or some are not known.

    Example:
        >>> shares([32, 32, 32, 4])
        [1.28, 1.28, 1.28, 0.16]
    """
    known = [n for n in rows if n]
    if len(known) < len(rows):
        return [1.0] * len(rows)
    return [n * len(known) / sum(known) for n in known]


class Fitted(NamedTuple):
    """Where the steps ended."""

    family: Family
    elbo: Estimate
    status: Status
    verdict: str
    evaluations: int


def fit_minibatches(
    target: Target, family: Family, loader: Iterable[Any], *, steps: int, lr: float, seed: int, progress: bool
) -> Fitted:
    """Maximise E_q log p − E_q log q, log p of a batch an unbiased estimate of the whole: see `fit`."""
    check_integer("steps", steps, 8)
    check_positive(lr, "lr")
    check_iterable(loader)
    if isinstance(loader, Iterator):
        raise TypeError("a generator can be read only once: give a DataLoader or a list of batches")
    generator = torch.Generator(target.space.device).manual_seed(seed)
    q = family if family.is_bound else family.bind(target.space, torch.Generator().manual_seed(seed))
    run = _Run(q, target, generator, steps, lr)
    batches = _endless(loader)
    bar = tqdm(range(steps), unit=" steps", disable=not (progress and is_live()))
    for step in bar:
        run.step(step, *next(batches))
    for part in q.families():
        part.learn_all()
    last, half = run.values(), run.averaged()
    before, found = (run.on_all(loader, values) for values in (half.before, half.mean))
    end = run.on_all(loader, last)
    best, values = max(((found, half.mean), (end, last)), key=lambda one: one[0].value)
    run.load(values)
    gain = best.value - before.value
    error = (best.per_group - before.per_group).std().item() / FRESH_GROUPS**0.5
    words = f"ELBO {best}, {steps} steps of minibatches"
    if not best.value > -float("inf"):
        status, words = Status.DIVERGED, f"not sound: the log density is not finite at some draws; {words}"
    elif gain > ERRORS * error + LEAST:
        still = f"still improving, by {gain:.3g} nats over the last quarter of the steps"
        status, words = Status.IMPROVING, f"{still}; {words}; raise steps= or lr="
    else:
        status, words = Status.CONVERGED, f"converged: {words}"
    return Fitted(q, best, status, words, run.evaluations)


class _Averages(NamedTuple):
    """Of the third quarter of the steps, and of the last."""

    before: list[Tensor]
    mean: list[Tensor]


class _Run:
    """The family, Adam on it, and the averages of its iterates."""

    def __init__(self, q: Family, target: Target, generator: torch.Generator, steps: int, lr: float):
        self.q, self.target, self.generator, self.steps, self.lr = q, target, generator, steps, lr
        self.parameters = [p for p in q.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(self.parameters, lr=lr)
        self.evaluations, self.norms = 0, []
        self.sums = [[torch.zeros_like(p) for p in self.parameters] for _ in range(2)]
        self.counts = [0, 0]
        self.waits = any(part.has_stages for part in q.families())
        if self.waits:
            for part in q.families():
                part.first_stage()

    def step(self, index: int, batch: Any, weight: float) -> None:
        if self.waits and index == int(FIRST_STAGE * self.steps):
            for part in self.q.families():
                if part.has_stages:
                    part.second_stage()
        done = index / self.steps
        rate = min(1.0, done / WARMUP + 1 / self.steps) * 0.5 * (1 + cos(pi * done))
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * rate
        self.optimizer.zero_grad()
        target = self.target if weight == 1 else Weighted(self.target, weight)
        value = elbo(
            self.q, target, batch, estimator=Estimator(groups=GROUPS, coupling=paired), generator=self.generator
        )
        if bool(value.isfinite()):
            (-value).backward()
            self.clip()
            self.optimizer.step()
        self.evaluations += 2 * GROUPS
        quarter = int(4 * done) - 2
        if quarter >= 0:
            self.counts[quarter] += 1
            for total, p in zip(self.sums[quarter], self.parameters, strict=True):
                total.add_(p.detach())

    def clip(self) -> None:
        """A gradient from far out in a tail does not move the family more than ten of the others."""
        norm = torch.stack([p.grad.norm() for p in self.parameters if p.grad is not None]).norm().item()
        self.norms.append(norm)
        median = sorted(self.norms[-100:])[len(self.norms[-100:]) // 2]
        if norm > CLIP * median > 0:
            for p in self.parameters:
                if p.grad is not None:
                    p.grad.mul_(CLIP * median / norm)

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.parameters]

    def averaged(self) -> _Averages:
        means = [[x / max(1, n) for x in total] for total, n in zip(self.sums, self.counts, strict=True)]
        return _Averages(*means)

    def load(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(self.parameters, values, strict=True):
                p.copy_(value)

    @torch.no_grad()
    def on_all(self, loader: Iterable[Any], values: list[Tensor]) -> Estimate:
        """The mean over all batches, on draws that are the same for all."""
        self.load(values)
        values_of, rows = [], []
        try:
            for batch in loader:
                generator = torch.Generator(self.target.space.device).manual_seed(1)
                own = elbo_terms(
                    self.q, self.target, batch, estimator=Estimator("log_q", groups=FRESH_GROUPS, coupling=paired),
                    generator=generator,
                ).objective()  # fmt: skip
                values_of.append(own.double().cpu())
                rows.append(rows_of(batch))
                self.evaluations += 2 * FRESH_GROUPS
        except NonFiniteError:
            return not_finite(FRESH_GROUPS)
        total = torch.zeros(FRESH_GROUPS, dtype=torch.float64)
        for share, value in zip(shares(rows), values_of, strict=True):  # log q is the same for all
            total = total + share * value
        return Estimate.of(total / max(1, len(rows)))


def _endless(loader: Iterable[Any]) -> Iterator[tuple[Any, float]]:
    """Batches, and what each counts: its rows relative to the mean of the last time, at first of those so far."""
    mean = None
    while True:
        rows = []
        for batch in loader:
            rows.append(rows_of(batch))
            yield batch, shares(rows)[-1] if mean is None or not rows[-1] else rows[-1] / mean
        known = [n for n in rows if n]
        mean = sum(known) / len(known) if known and len(known) == len(rows) else None
        if not rows:
            raise ValueError("the loader gives no batch; is the data set empty?")
