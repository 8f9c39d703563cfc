"""A family fitted to a log density that is seen in minibatches: Adam on fresh draws and one batch a step."""

from collections.abc import Iterable, Iterator
from math import cos, pi
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ..couplings import paired
from ..families.family import Family
from ..families.low_rank import hold_factors, release_factors
from ..models.bayesian_model import rows_of
from ..models.target import Target
from ..objective import Estimate, Estimator, NonFiniteError, elbo, elbo_terms, not_finite
from ..result import Status
from ..util.checks import check_integer, check_iterable, check_positive
from ..util.progress import is_live

#: pairs of draws a step
GROUPS = 4
#: shares of the steps: the rate rises, a factor waits
WARMUP, FIRST_STAGE = 0.05, 0.4
#: size of a factor when its wait ends, relative to the scales
FACTOR = 0.01
#: greatest norm of a gradient, relative to the median of the last hundred
CLIP = 10.0
#: pairs of draws of the ELBO on all batches
FRESH_GROUPS = 256
#: nats that the last quarter of the steps may still gain, in standard errors and at least
ERRORS, LEAST = 3.0, 0.02


class OverBatches:
    """A log density of all data, the mean over batches of its estimates: `log_joint` reads all of them.

    Estimates of batches count by their rows: with (N/B) Σ in each, the mean over unequal ones is not the whole.

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
        return _mean((self.target.log_joint(theta, own, **options), rows_of(own)) for own in self.loader)


def _mean(parts: Iterable[tuple[Tensor, int | None]]) -> Tensor:
    """Return the mean of values, weighted by rows where all are known."""
    values, rows = zip(*parts, strict=True)
    if not all(rows):
        rows = [1] * len(rows)
    weights = torch.tensor(rows, dtype=values[0].dtype, device=values[0].device) / sum(rows)
    return torch.tensordot(weights, torch.stack(values), dims=1)


class Weighted:
    """A log density times a number."""

    def __init__(self, target: Target, weight: float):
        self.target, self.weight, self.space = target, weight, target.space

    def log_joint(self, theta: Tensor, batch: Any = None, **options: Any) -> Tensor:
        return self.weight * self.target.log_joint(theta, batch, **options)


class Fitted(NamedTuple):
    """The end of the steps."""

    family: Family
    elbo: Estimate
    status: Status
    verdict: str
    evaluations: int


def fit_minibatches(
    target: Target, family: Family, loader: Iterable[Any], *, steps: int, lr: float, seed: int, progress: bool
) -> Fitted:
    """Maximise E_q log p − E_q log q, log p of a batch an unbiased estimate of the whole: see `fit_density`.

    The average of the last quarter of the steps is taken, or the last step if that is better.
    """
    check_integer("steps", steps, 8)
    check_positive(lr, "lr")
    check_iterable(loader)
    if isinstance(loader, Iterator):
        raise TypeError("a generator can be read only once: give a DataLoader or a list of batches")
    generator = torch.Generator(target.space.device).manual_seed(seed)
    q = family if family.is_bound else family.bind(target.space, torch.Generator().manual_seed(seed))
    hold_factors(q)
    parameters = [p for p in q.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=lr)
    batches, norms, evaluations = _endless(loader), [], 0
    sums, counts = [[torch.zeros_like(p) for p in parameters] for _ in range(2)], [0, 0]
    for step in tqdm(range(steps), unit=" steps", disable=not (progress and is_live())):
        if step == int(FIRST_STAGE * steps):
            release_factors(q, torch.Generator().manual_seed(seed + 1), FACTOR)
        done = step / steps
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, done / WARMUP + 1 / steps) * 0.5 * (1 + cos(pi * done))
        optimizer.zero_grad()
        batch, weight = next(batches)
        estimator = Estimator(groups=GROUPS, coupling=paired)
        value = elbo(q, target if weight == 1 else Weighted(target, weight), batch, estimator, generator)
        evaluations += 2 * GROUPS
        if bool(value.isfinite()):
            (-value).backward()
            norms = [*norms[-99:], torch.nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None)]
            median = torch.stack(norms).median()
            torch.nn.utils.clip_grad_norm_(parameters, max(1e-30, float(CLIP * median)))
            optimizer.step()
        quarter = int(4 * done) - 2
        if quarter >= 0:
            counts[quarter] += 1
            for total, p in zip(sums[quarter], parameters, strict=True):
                total.add_(p.detach())

    def load(values: list[Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(parameters, values, strict=True):
                p.copy_(value)

    last = [p.detach().clone() for p in parameters]
    third, fourth = ([x / max(1, n) for x in total] for total, n in zip(sums, counts, strict=True))
    found = []
    for values in (third, fourth, last):
        load(values)
        estimate, spent = _on_all(q, target, loader)
        found.append((estimate, values))
        evaluations += spent
    best, values = max(found[1:], key=lambda one: one[0].value)
    load(values)
    gain = best.value - found[0][0].value
    error = (best.per_group - found[0][0].per_group).std().item() / FRESH_GROUPS**0.5
    words = f"ELBO {best}, {steps} steps of minibatches"
    if not best.value > -float("inf"):
        status, words = Status.DIVERGED, f"not sound: the log density is not finite at some draws; {words}"
    elif gain > ERRORS * error + LEAST:
        still = f"still improving, by {gain:.3g} nats over the last quarter of the steps"
        status, words = Status.IMPROVING, f"{still}; {words}; raise steps= or lr="
    else:
        status, words = Status.CONVERGED, f"converged: {words}"
    return Fitted(q, best, status, words, evaluations)


@torch.no_grad()
def _on_all(q: Family, target: Target, loader: Iterable[Any]) -> tuple[Estimate, int]:
    """Return the ELBO over all batches, on draws that are the same for all, and the evaluations."""
    parts, estimator = [], Estimator("log_q", groups=FRESH_GROUPS, coupling=paired)
    try:
        for batch in loader:
            generator = torch.Generator(target.space.device).manual_seed(1)
            own = elbo_terms(q, target, batch, estimator, generator).objective()
            parts.append((own.double().cpu(), rows_of(batch)))  # log q is the same for all
    except NonFiniteError:
        return not_finite(FRESH_GROUPS), 2 * FRESH_GROUPS * (len(parts) + 1)
    return Estimate.of(_mean(parts)), 2 * FRESH_GROUPS * len(parts)


def _endless(loader: Iterable[Any]) -> Iterator[tuple[Any, float]]:
    """Yield batches, and what each counts: its rows relative to the mean of the last time, at first of those so far."""
    mean = None
    while True:
        rows = []
        for batch in loader:
            rows.append(rows_of(batch))
            known = rows if mean is None and all(rows) else []
            yield batch, rows[-1] / (mean or sum(known) / len(known)) if rows[-1] and (mean or known) else 1.0
        if not rows:
            raise ValueError("the loader gives no batch; is the data set empty?")
        mean = sum(rows) / len(rows) if all(rows) else None
