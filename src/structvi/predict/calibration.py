"""`bayes.calibrate`: a temperature or a scale from held-out cases, and the scores of conformal sets from others.

A value is applied only if it gains on cases that took no part in fitting it, and does not
lie at the end of the search.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b
from math import exp
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Normal

from ..models.calibration import Adjustment, Calibration, Conformal, Kind
from ..util.checks import check_iterable, check_seed
from . import conformal as scoring
from .cases import COMMON, case_hashes, fingerprint, share_in
from .predict import draws_for
from .predictive import (
    Predictive,
    PredictiveDraws,
    adjustable,
    log_average,
    log_probabilities,
    observed_target,
    on_device,
)
from .temperature import GRID, adjust, each_temperature

if TYPE_CHECKING:
    from ..ensemble.ensemble import Ensemble
    from ..posterior import Posterior


def calibrate(
    posterior: "Posterior | Ensemble",
    validation: Iterable[Any] | None = None,
    *,
    conformal: Iterable[Any] | bool | None = None,
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
            is applied only if it gains on cases that took no part in its fit. Without it, the one that there is
            stays.
        conformal: other held-out batches, for `predict(x).conformal(level)`. They must be used for no other choice:
            those that are also in `validation`, or that a fit has chosen on, are refused. True: one half of the cases
            of `validation` is taken for this, and the other for the temperature.
        draws, reference: as in `predict`.
        seed: of the draws, and of the halves.

    Example:
        >>> from torch import nn
        >>> from structvi import likelihoods, variationalize
        >>> x, t = torch.randn(64, 3), torch.randint(2, (64,))
        >>> bayes = variationalize(nn.Linear(3, 2), likelihoods.Categorical(), num_data=10)
        >>> found = calibrate(bayes, [(x, t)], conformal=True)
        >>> found.conformal.cases, bayes.predict(x).conformal(0.9).shape
        (32, torch.Size([64, 2]))
    """
    check_seed(seed)
    for loader in (validation, conformal):
        if loader is not None and not isinstance(loader, bool):
            check_iterable(loader)
            if iter(loader) is loader:
                raise TypeError("calibrate reads its data several times: give a DataLoader or a list of batches")
    first = next((one for one in (validation, conformal) if one is not None and not isinstance(one, bool)), None)
    if first is None:
        raise ValueError("give held-out data: calibrate(validation), calibrate(validation, conformal=other)")
    inputs = next((posterior.model.split(batch)[0] for batch in first), None)
    if inputs is None:
        raise ValueError("the loader gave no batch")
    generator = torch.Generator().manual_seed(seed)
    predict = draws_for(posterior, inputs, draws, reference=reference, generator=generator, calibrated=False)
    kind = adjustable(predict.mixture(on_device(inputs, predict.device)))
    if kind is None and conformal in (None, False):
        what = type(posterior.model.likelihood).__name__
        raise ValueError(f"{what} has neither a temperature nor a scale: conformal=held_out gives intervals")
    halves: tuple[set[str], set[str]] | None = None
    if conformal is True and kind is not None:
        halves = _halves(first, seed)
    others = first if conformal is True else None if conformal is False else conformal
    notes = _checked(posterior.chosen_on, None if kind is None else validation, others, halves is not None)
    # without data for another the one that there is stays: a fit around a network may have put it on top
    before = posterior.calibration
    adjustment = before.adjustment if before is not None and validation is None else None
    if validation is not None and kind is not None:
        adjustment = _adjustment(predict, kind, _rows(validation, halves and halves[0]), seed)
    elif validation is not None:
        notes += ("this likelihood has neither a temperature nor a scale: validation was not used for one",)
    found = Calibration(adjustment, None, predict.draws, notes)
    if others is not None:
        predict.calibration = found
        found = replace(found, conformal=_conformal(predict, _rows(others, halves and halves[1])))
    posterior.calibration = found
    return found


def _halves(loader: Iterable[Any], seed: int) -> tuple[set[str], set[str]]:
    """The cases for the temperature, and those for conformal scores, in an order that the seed alone decides."""
    codes = sorted(
        {code for batch in loader for code in case_hashes(batch)},
        key=lambda code: blake2b(f"{seed} {code}".encode()).digest(),
    )
    return set(codes[: len(codes) // 2]), set(codes[len(codes) // 2 :])


def _checked(
    chosen_on: str | None, validation: Iterable[Any] | None, others: Iterable[Any] | None, split: bool
) -> tuple[str, ...]:
    """What there is to say of the data; conformal ones that are used for another choice are refused."""
    notes: tuple[str, ...] = ()
    mine = None if validation is None else fingerprint(validation)
    if others is not None:
        theirs = mine if split and mine is not None else fingerprint(others)
        if chosen_on is not None and share_in(theirs, chosen_on) > COMMON:
            raise ValueError(
                "the conformal data are those that the fit chose on, validation=, and the guarantee would not hold: "
                "give cases that were used for nothing, conformal=others"
            )
        if split:
            notes = ("one half of the cases was taken for the temperature or scale, the other for conformal scores",)
        elif mine is not None and share_in(theirs, mine) > COMMON:
            raise ValueError(
                "validation and conformal have cases in common, and conformal data are to be used for no other choice: "
                "give other cases, or conformal=True, which splits validation in two"
            )
    if mine is not None and chosen_on is not None and share_in(mine, chosen_on) > COMMON:
        notes += ("the fit chose on these data too: the gain above is optimistic",)
    return notes


def _rows(loader: Iterable[Any], only: set[str] | None) -> Iterator[tuple[Any, Tensor]]:
    """Batches, and which of their rows count."""
    for batch in loader:
        keep = torch.tensor([True] if only is None else [code in only for code in case_hashes(batch)])
        if bool(keep.any()):
            yield batch, keep


def _adjustment(predict: PredictiveDraws, kind: Kind, batches: Iterable[tuple[Any, Tensor]], seed: int) -> Adjustment:
    """`adjust` on the losses of every case, summed over its observed elements."""
    losses, counts = [], []
    for batch, keep in batches:
        inputs, target = predict.split(batch)
        pred = predict.mixture(inputs)
        pred.log_prob(target)  # its checks of shapes and labels
        t, observed = observed_target(pred.likelihood, target)
        seen = torch.ones(t.shape, dtype=torch.bool, device=t.device) if observed is None else observed
        each = _label_losses(pred, t) if kind == "temperature" else _number_losses(pred, t)  # [B, ..] at every point
        table = torch.stack([(loss * seen).reshape(len(t), -1).sum(1).cpu() for loss in each], 1)
        number = seen.reshape(len(t), -1).sum(1).double().cpu()
        keep = keep.expand(len(number)) & (number > 0)
        losses.append(table[keep])
        counts.append(number[keep])
    every, count = torch.cat(losses or [torch.zeros(0, len(GRID))]), torch.cat(counts or [torch.zeros(0)])
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))
    return adjust(kind, every[order], count[order])


def _label_losses(pred: Predictive, t: Tensor) -> Iterator[Tensor]:
    """−log q_t at every temperature, q ∝ p̄^(1/T)."""
    log_mean = log_average(log_probabilities(pred.components).double(), pred.weights)
    return each_temperature(log_mean, t > 0.5 if isinstance(pred.components, Bernoulli) else t)


def _number_losses(pred: Predictive, t: Tensor) -> Iterator[Tensor]:
    """−log p of the mixture stretched around its mean by every scale c: log c − log p(m + (t − m)/c)."""
    d = pred.components
    assert isinstance(d, Normal)
    wide, weights = Normal(d.loc.double(), d.scale.double(), validate_args=False), pred.weights.double()
    mean = torch.tensordot(weights, wide.loc, dims=1)
    for u in GRID.tolist():
        yield u - log_average(wide.log_prob(mean + (t.double() - mean) * exp(-u)), weights)


def _conformal(predict: PredictiveDraws, batches: Iterable[tuple[Any, Tensor]]) -> Conformal:
    """The scores of all cases, of the calibrated predictive."""
    parts, form = [], None
    for batch, keep in batches:
        inputs, target = predict.split(batch)
        pred = predict(inputs)
        pred.log_prob(target)  # its checks of shapes and labels
        t, observed = observed_target(pred.likelihood, target)
        keep = keep.to(t.device).expand(len(t))
        t, observed = t[keep], None if observed is None else observed[keep]
        form = scoring.form_of(pred.is_of_labels, t)
        p = pred.mean[keep]
        if form == "number":
            parts.append(scoring.number_scores(p, pred.std[keep], t, observed).cpu())
        else:
            parts.append((scoring.label_scores if form == "label" else scoring.mask_losses)(p, t, observed).cpu())
    if form is None or not sum(len(part) for part in parts):
        raise ValueError(
            "the conformal data have no case with an observed target, or of masks none with a label to miss"
        )
    return scoring.joined(form, parts)
