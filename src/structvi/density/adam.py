"""A family fitted to a log density that is seen in minibatches: Adam on fresh draws and one batch a step."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel
from tqdm import tqdm

from ..couplings import paired
from ..families.family import Family
from ..families.low_rank import hold_factors, release_factors
from ..models.bayesian_model import rows_of
from ..models.target import Target
from ..objective import Estimate, Estimator, NonFiniteError, elbo_terms, not_finite
from ..result import Status
from ..util.checks import check_integer, check_iterable
from ..util.progress import is_live
from .result import DensityFit
from .targets import OverBatches

#: pairs of draws a step
GROUPS = 4
#: share of the steps that a factor waits
FIRST_STAGE = 0.4
#: greatest norm of a gradient, relative to the median of the last hundred
CLIP = 10.0
#: pairs of draws of the ELBO on all batches
FRESH_GROUPS = 256
#: nats that the last quarter of the steps may still gain, if that is more than three standard errors
LEAST = 0.02


def fit_minibatches(
    target: Target, family: Family, loader: Iterable[Any], *, steps: int, lr: float, seed: int, progress: bool
) -> DensityFit:
    """Maximise E_q log p − E_q log q, log p of a batch an unbiased estimate of the whole: see `fit_density`.

    The average of the last quarter of the steps is taken. The fit has converged if it is no better than that of the
    quarter before, on the same draws.
    """
    check_integer("steps", steps, 8)
    check_iterable(loader)
    if isinstance(loader, Iterator):
        raise TypeError("a generator can be read only once: give a DataLoader or a list of batches")
    generator = torch.Generator(target.space.device).manual_seed(seed)
    own = torch.Generator().manual_seed(seed)
    q = copy.deepcopy(family) if family.is_bound else family.bind(target.space, own)
    hold_factors(q)
    parameters = list(q.parameters())
    optimizer = torch.optim.Adam(parameters, lr=lr)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    estimator, averages, norms = Estimator(groups=GROUPS, coupling=paired), [], []
    batches = _endless(loader)
    for step in tqdm(range(steps), unit=" steps", disable=not (progress and is_live())):
        if step == int(FIRST_STAGE * steps):
            release_factors(q, own)
        optimizer.zero_grad()
        batch, weight = next(batches)
        terms = elbo_terms(q, target, batch, estimator, generator)
        loss = (terms.complexity - weight * terms.fit).mean()
        if bool(loss.isfinite()):
            loss.backward()
            norms = [*norms[-99:], torch.nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None)]
            torch.nn.utils.clip_grad_norm_(parameters, float(CLIP * torch.stack(norms).median()))
            optimizer.step()
        rate.step()
        if step in (steps // 2, 3 * steps // 4):
            averages.append(AveragedModel(q))
        if averages:
            averages[-1].update_parameters(q)
    q, parts = averages[-1].module, [_on_all(one.module, target, loader) for one in averages]
    before, after = parts
    gain, error = after.value - before.value, (after.per_group - before.per_group).std().item() / FRESH_GROUPS**0.5
    words = f"ELBO {after}, {steps} steps of minibatches"
    if not after.value > -float("inf"):
        status, words = Status.DIVERGED, f"not sound: the log density is not finite at some draws; {words}"
    elif gain > max(3 * error, LEAST):
        still = f"still improving, by {gain:.3g} nats over the last quarter of the steps"
        status, words = Status.IMPROVING, f"{still}; {words}; raise steps= or lr="
    else:
        status, words = Status.CONVERGED, f"converged: {words}"
    return DensityFit(
        target=OverBatches(target, loader), status=status, verdict=words, elbo=after, family=q,
        evaluations=2 * GROUPS * steps, verdict_evaluations=2 * FRESH_GROUPS * len(averages), seconds=0.0, draws=0,
        starts=1, trace=[],
    )  # fmt: skip


@torch.no_grad()
def _on_all(q: Family, target: Target, loader: Iterable[Any]) -> Estimate:
    """Return the ELBO over all batches, on draws that are the same for all."""
    generator = torch.Generator(target.space.device).manual_seed(1)
    try:
        estimator = Estimator("log_q", groups=FRESH_GROUPS, coupling=paired)
        terms = elbo_terms(q, OverBatches(target, loader), None, estimator, generator)
    except NonFiniteError:
        return not_finite(FRESH_GROUPS)
    return terms.estimate()


def _endless(loader: Iterable[Any]) -> Iterator[tuple[Any, float]]:
    """Yield batches, and what each counts: its rows relative to the mean, or one where rows are not known."""
    rows = [rows_of(batch) for batch in loader]
    if not rows:
        raise ValueError("the loader gives no batch; is the data set empty?")
    mean = sum(filter(None, rows)) / len(rows) if all(rows) else None
    while True:
        for batch in loader:
            own = rows_of(batch)
            yield batch, own / mean if own and mean else 1.0
