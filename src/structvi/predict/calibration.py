"""`bayes.calibrate`: a temperature or a scale from held-out cases, and the scores of conformal sets from others.

A temperature above one is applied; another value only if it gains on left-out cases, and does not
lie at the end of the search.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b
from math import exp, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Normal
from torch.utils._pytree import tree_leaves

from ..models.bayesian_model import plain, rows
from ..models.calibration import LOG_BOUND, Adjustment, Calibration, Conformal, Kind
from ..util.checks import check_iterable, check_seed
from . import conformal as scoring
from .predict import draws_for
from .predictive import Predictive, PredictiveDraws, log_average, log_probabilities, observed_target, on_device

if TYPE_CHECKING:
    from ..ensemble.ensemble import Ensemble
    from ..posterior import Posterior

#: log T at which losses are tabulated; a parabola between its points is within 0.2 % of a fine search
GRID = torch.linspace(-LOG_BOUND, LOG_BOUND, 101, dtype=torch.float64)
#: the point of the grid with T = 1
ONE = int(GRID.abs().argmin())
#: folds of the cross-fit
FOLDS = 5
#: fewer held-out cases say nothing of a temperature
FEWEST = 10
#: hashes that a fingerprint has
KEPT = 512
#: a share of common cases above this means that two loaders have the same data; a few may be equal by chance
COMMON = 0.1


def calibrate(
    posterior: "Posterior | Ensemble",
    validation: Iterable[Any] | None = None,
    *,
    conformal: Iterable[Any] | None = None,
    draws: int | None = None,
    reference: Any = None,
    seed: int = 0,
) -> Calibration:
    """Put a temperature (classes) or a scale (Gaussian noise) on top of predictions, and conformal sets: `print` it.

    `predict`, `evaluate` and `predict_tiles` use it from then on; `predict(x, calibrated=False)` does not. It is saved
    with the posterior, and a new fit drops it.

    Args:
        posterior: what `variationalize` returns, fitted.
        validation: held-out batches, as `fit` takes them, for the temperature or scale: read twice, so no generator. It
            is applied if it gains on left-out cases, or is a temperature above one. Without it, the one that there is
            stays.
        conformal: other held-out batches, for `predict(x).conformal(level)`. They must be used for no other choice:
            those that are also in `validation`, or that a fit has chosen on, are refused.
        draws, reference: as in `predict`.
        seed: of the draws, and of the folds.

    Example:
        >>> from torch import nn
        >>> from structvi import likelihoods, variationalize
        >>> x, t = torch.randn(64, 3), torch.randint(2, (64,))
        >>> bayes = variationalize(nn.Linear(3, 2), likelihoods.Categorical(), num_data=10)
        >>> found = calibrate(bayes, [(x[:32], t[:32])], conformal=[(x[32:], t[32:])])
        >>> found.conformal.cases, bayes.predict(x).conformal(0.9).shape
        (32, torch.Size([64, 2]))
    """
    check_seed(seed)
    loaders = [loader for loader in (validation, conformal) if loader is not None]
    if not loaders:
        raise ValueError("give held-out data: calibrate(validation), calibrate(validation, conformal=other)")
    for loader in loaders:
        check_iterable(loader)
        if iter(loader) is loader:
            raise TypeError("calibrate reads its data several times: give a DataLoader or a list of batches")
    inputs = posterior.model.split(next(iter(loaders[0])))[0]
    generator = torch.Generator().manual_seed(seed)
    predict = draws_for(posterior, inputs, draws, reference=reference, generator=generator, calibrated=False)
    kind = _adjustable(predict.mixture(on_device(inputs, predict.device)))
    if kind is None and conformal is None:
        what = type(posterior.model.likelihood).__name__
        raise ValueError(f"{what} has neither a temperature nor a scale: conformal=held_out gives intervals")
    notes = _checked(posterior.chosen_on, validation, conformal)
    # without data for another the one that there is stays: a fit around a network may have put it on top
    before = posterior.calibration
    adjustment = before.adjustment if before is not None and validation is None else None
    if validation is not None and kind is not None:
        adjustment = _adjustment(predict, kind, validation, seed)
    found = Calibration(adjustment, None, predict.draws, notes)
    if conformal is not None:
        predict.calibration = found
        found = replace(found, conformal=_conformal(predict, conformal))
    posterior.calibration = found
    return found


def _adjustable(predictive: Predictive) -> Kind | None:
    """Return what can be fitted on top of a predictive: a temperature of labels, a scale of normals."""
    if predictive.is_of_labels:
        return "temperature"
    return "scale" if type(predictive.components) is Normal else None


def _checked(
    chosen_on: str | None, validation: Iterable[Any] | None, conformal: Iterable[Any] | None
) -> tuple[str, ...]:
    """Return notes on the data; conformal ones that are used for another choice are refused."""
    mine = "" if validation is None else fingerprint(validation)
    theirs = "" if conformal is None else fingerprint(conformal)
    for name, used in (("that the fit chose on", chosen_on or ""), ("of validation=", mine)):
        if share_in(theirs, used) > COMMON:
            raise ValueError(
                f"the conformal data have cases {name}, and the guarantee would not hold: give cases that were used "
                "for nothing; torch.utils.data.random_split makes two data sets of one"
            )
    if share_in(mine, chosen_on or "") > COMMON:
        return ("the fit chose on these data too: the gain above is optimistic",)
    return ()


def _predicted(predict: PredictiveDraws, batches: Iterable[Any]) -> Iterator[tuple[Predictive, Tensor, Tensor]]:
    """The calibrated predictive of each batch, its target, and which elements of that were observed."""
    for batch in batches:
        inputs, target = predict.split(batch)
        pred = predict(inputs)
        pred.log_prob(target)  # its checks of shapes and labels
        t, observed = observed_target(pred.likelihood, target)
        yield pred, t, torch.ones_like(t, dtype=torch.bool) if observed is None else observed


def _adjustment(predict: PredictiveDraws, kind: Kind, batches: Iterable[Any], seed: int) -> Adjustment:
    """Return the value with the least loss, and what it gains on cases that took no part in its fit."""
    losses, counts = [torch.zeros(0, len(GRID))], [torch.zeros(0)]
    for pred, t, observed in _predicted(predict, batches):
        each = _label_losses(pred, t) if kind == "temperature" else _number_losses(pred, t)  # [B, ..] at every point
        losses.append(torch.stack([(loss * observed).reshape(len(t), -1).sum(1).cpu() for loss in each], 1))
        counts.append(observed.reshape(len(t), -1).sum(1).double().cpu())
    table, count = torch.cat(losses), torch.cat(counts)
    table, count = table[count > 0], count[count > 0]
    n, total = len(table), float(count.sum())
    if n < FEWEST:
        raise ValueError(f"a {kind} is fitted on at least {FEWEST} held-out cases with observed targets, got {n}")
    if not bool(table.isfinite().all()):
        raise ValueError("the log probability of some held-out cases is not finite: look at predict(x).outputs there")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    table, count = table[order], count[order]
    gains = table[:, ONE] - cross_fitted_losses(table)
    gain = float(gains.sum()) / total
    error = sqrt(float((gains - gain * count).square().sum()) * n / (n - 1)) / total
    return Adjustment(kind, fit_temperature(table), gain, error, n)


def _label_losses(pred: Predictive, t: Tensor) -> Iterator[Tensor]:
    """−log q_t at every temperature, q ∝ p̄^(1/T)."""
    log_mean = log_average(log_probabilities(pred.components).double(), pred.weights)
    return each_temperature(log_mean, t > 0.5 if isinstance(pred.components, Bernoulli) else t)


def _number_losses(pred: Predictive, t: Tensor) -> Iterator[Tensor]:
    """−log p of the mixture stretched around its mean by every scale c: log c − log p(m + (t − m)/c)."""
    d, weights = pred.components, pred.weights.double()
    assert isinstance(d, Normal)
    wide = Normal(d.loc.double(), d.scale.double(), validate_args=False)
    mean = torch.tensordot(weights, wide.loc, dims=1)
    for u in GRID.tolist():
        yield u - log_average(wide.log_prob(mean + (t.double() - mean) * exp(-u)), weights)


def _conformal(predict: PredictiveDraws, batches: Iterable[Any]) -> Conformal:
    """The scores of all cases, of the calibrated predictive."""
    parts, form = [torch.zeros(0)], None
    for pred, t, observed in _predicted(predict, batches):
        form = scoring.form_of(pred.is_of_labels, t)
        if form == "number":
            own = scoring.number_scores(pred.mean, pred.std, t, observed)
        else:
            own = (scoring.label_scores if form == "label" else scoring.mask_losses)(pred.mean, t, observed)
        parts = [one for one in (*parts, own.cpu()) if len(one)]
    if form is None or not parts:
        raise ValueError("the conformal data have no observed target, or of masks none with a label to miss")
    return scoring.joined(form, parts)


# a temperature or a scale, fitted on a table of losses: the network sees the data once and no pixel is kept


def each_temperature(log_p: Tensor, labels: Tensor) -> Iterator[Tensor]:
    """Yield −log q_t [..] of q ∝ p^(1/T) at every temperature of `GRID`: log p [.., C], labels [..], in float64.

    Example:
        >>> log_p = torch.tensor([[0.9, 0.1]]).log()
        >>> round(float(list(each_temperature(log_p, torch.tensor([0])))[ONE].exp()), 3)
        1.111
    """
    log_p = log_p.double().clamp(min=-1e4)  # an impossible label stays impossible at every temperature
    labels = labels.long().unsqueeze(-1)
    for u in GRID.tolist():
        scaled = log_p * exp(-u)
        yield scaled.logsumexp(-1) - scaled.gather(-1, labels).squeeze(-1)


def fit_temperature(losses: Tensor) -> float:
    """Return the temperature with the least sum of losses [n, G], tabulated at the log temperatures `GRID`.

    Example:
        >>> log_p = torch.tensor([[0.9, 0.1]]).log().expand(3, 2)  # right in two cases of three: 9^(1/T) = 2
        >>> losses = torch.stack(list(each_temperature(log_p, torch.tensor([0, 0, 1]))), -1)
        >>> round(fit_temperature(losses), 2)
        3.17
    """
    total = losses.sum(0)
    best = int(total.argmin().clamp(1, len(GRID) - 2))
    below, at, above = total[best - 1 : best + 2].tolist()
    bend, step = below - 2 * at + above, float(GRID[1] - GRID[0])
    shift = 0.5 * (below - above) / bend if bend > 0 else float(below > above) - float(below < above)
    return exp(float(GRID[best]) + step * min(1.0, max(-1.0, shift)))


def cross_fitted_losses(losses: Tensor) -> Tensor:
    """Return every case's loss [n] at the point of the grid that the cases of all other folds ask for.

    Case i is in fold i mod 5: shuffle the rows of losses [n, G] first where their order means something.
    """
    found, fold = losses.new_empty(len(losses)), torch.arange(len(losses), device=losses.device) % FOLDS
    for out in (fold == own for own in range(FOLDS)):
        found[out] = losses[out, losses[~out].sum(0).argmin()]
    return found


# which cases a loader has, whatever their order and the size of its batches


def fingerprint(loader: Iterable[Any]) -> str:
    """Return the cases of a loader, in so few digits that it can be told later whether another has them too.

    A case is a row of a batch, input and target of one image. It is known by a hash of its tensors, and a loader by the
    512 smallest of these hashes. Data that are made anew at each reading, by augmentation, are not known again.

    Example:
        >>> x, t = torch.arange(6.0).reshape(6, 1), torch.arange(6)
        >>> fingerprint([(x, t)]) == fingerprint([(x[3:], t[3:]), (x[:3], t[:3])])
        True
    """
    return ",".join(sorted({code for batch in loader for code in _case_hashes(batch)})[:KEPT])


def share_in(one: str, other: str) -> float:
    """Return the share of the first fingerprint's cases that are in the second's too, estimated from what both know.

    Example:
        >>> x, t = torch.arange(6.0).reshape(6, 1), torch.arange(6)
        >>> share_in(fingerprint([(x[:2], t[:2])]), fingerprint([(x, t)]))
        1.0
    """
    a, b = one.split(","), other.split(",")
    # up to here both know all of their cases
    bound = min([codes[-1] for codes in (a, b) if len(codes) >= KEPT], default="g")
    known = {code for code in a if code and code <= bound}
    return len(known & set(b)) / len(known) if known else 0.0


def _case_hashes(batch: Any) -> list[str]:
    """8 digits for each row of a batch."""
    B, parts = rows(batch), []
    for leaf in tree_leaves(plain(batch)):
        is_array = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiub"
        if (is_array or isinstance(leaf, Tensor)) and leaf.shape[:1] == (B,):
            flat = torch.as_tensor(leaf).detach().reshape(B, -1)
            parts.append(flat.cpu().contiguous().view(torch.uint8).numpy())
    return [blake2b(b"|".join(part[b].tobytes() for part in parts), digest_size=4).hexdigest() for b in range(B)]
