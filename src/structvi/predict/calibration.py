"""`bayes.calibrate`: a temperature or a scale from held-out cases, and the scores of conformal sets from others.

The losses of every case are kept at a grid of temperatures (`grid_fit.py`): the network sees the data once, and no
pixel is held. A value is applied only where it gains two paired standard errors on cases that took no part in fitting
it, and does not lie at the end of the search.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b
from math import exp
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Normal

from ..couplings import naive
from ..models.calibration import Calibration, Conformal, Kind
from ..util.checks import check_iterable, check_seed
from . import conformal as scoring
from .cases import COMMON, case_hashes, fingerprint, share_in
from .draws import on_device
from .grid_fit import GRID, fitted, label_losses
from .member_chunks import Chunks, chunks_for
from .predictive import Predictive, observed_target
from .recalibrated import kind_for, log_average, log_probabilities

if TYPE_CHECKING:
    from ..posterior import EnsembleBase, Posterior


def calibrate(
    posterior: "Posterior | EnsembleBase",
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
            is applied only where it gains two paired standard errors over cases. Without it, the one that there is
            stays.
        conformal: other held-out batches, for `predict(x).conformal(level)`. They must be used for no other choice:
            those that are also in `validation`, or that a fit has chosen on, are refused. True: one half of the cases
            of `validation` is taken for this, and the other for the temperature.
        draws: S, over which predictions are averaged; None as in `predict`, by the first batch.
        reference: as in `predict`.
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
            _check_loader(loader)
    split = conformal is True
    others = validation if split else None if conformal is False else conformal
    if validation is None and others is None:
        raise ValueError("give held-out data: calibrate(validation), calibrate(validation, conformal=other)")
    for one in posterior.posteriors:
        one.check_whole()
    first = others if validation is None else validation
    assert first is not None
    chunks = chunks_for(
        lambda: _inputs(posterior, first), posterior, draws, naive, 16, reference, torch.Generator().manual_seed(seed)
    )
    assert not isinstance(others, bool)
    with torch.no_grad():
        kind = kind_for(_first(chunks, first).components)
        if kind is None and others is None:
            what = type(posterior.model.likelihood).__name__
            raise ValueError(f"{what} has neither a temperature nor a scale: conformal=held_out gives intervals")
        data = _Data(validation if kind is not None else None, others, split and kind is not None, seed)
        notes = data.check(posterior.chosen_on)
        # without data for another the one that there is stays: a fit around a network may have put it on top
        before = posterior.calibration
        adjustment = before.adjustment if before is not None and validation is None else None
        if data.validation is not None and kind is not None:
            adjustment = fitted(kind, *_losses(chunks, kind, data.of_validation()))
        elif validation is not None:
            notes += ("this likelihood has neither a temperature nor a scale: validation was not used for one",)
        found = Calibration(adjustment, None, chunks.draws, notes)
        if data.others is not None:
            chunks.calibration = found
            found = replace(found, conformal=_conformal(chunks, data.of_others()))
    posterior.calibration = found
    return found


class _Data:
    """The held-out cases: those for the temperature, and those for conformal scores."""

    def __init__(self, validation: Iterable[Any] | None, others: Iterable[Any] | None, split: bool, seed: int):
        self.validation, self.others, self.split, self.seed = validation, others, split, seed
        self.first_half: frozenset[str] = frozenset()
        if split:
            assert validation is not None
            hashes = sorted({code for batch in validation for code in case_hashes(batch)}, key=self.shuffled)
            self.first_half = frozenset(hashes[: len(hashes) // 2])

    def shuffled(self, code: str) -> str:
        """A text whose order has nothing to do with the data."""
        return blake2b(f"{self.seed} {code}".encode(), digest_size=8).hexdigest()

    def check(self, chosen_on: str | None) -> tuple[str, ...]:
        """Conformal data are used for no other choice; returned is what there is to say."""
        notes: tuple[str, ...] = ()
        mine = None if self.validation is None else fingerprint(self.validation)
        if self.others is not None:
            theirs = mine if self.split and mine is not None else fingerprint(self.others)
            if chosen_on is not None and share_in(theirs, chosen_on) > COMMON:
                raise ValueError(
                    "the conformal data are those that the fit chose on, validation=, and the guarantee would not "
                    "hold: give cases that were used for nothing, conformal=others"
                )
            if self.split:
                notes = (
                    "one half of the cases was taken for the temperature or scale, the other for conformal scores",
                )
            elif mine is not None and share_in(theirs, mine) > COMMON:
                raise ValueError(
                    "validation and conformal have cases in common, and conformal data are to be used for no other "
                    "choice: give other cases, or conformal=True, which splits validation in two"
                )
        if mine is not None and chosen_on is not None and share_in(mine, chosen_on) > COMMON:
            notes += ("the fit chose on these data too: the gain above is optimistic",)
        return notes

    def of_validation(self) -> Iterator[tuple[Any, list[str], Tensor]]:
        """Batches, their cases, and which of them count."""
        return self._read(self.validation, True)

    def of_others(self) -> Iterator[tuple[Any, list[str], Tensor]]:
        return self._read(self.others, False)

    def _read(self, loader: Iterable[Any] | None, first: bool) -> Iterator[tuple[Any, list[str], Tensor]]:
        assert loader is not None
        for batch in loader:
            codes = case_hashes(batch)
            keep = [not self.split or (code in self.first_half) == first for code in codes]
            if any(keep):
                yield batch, [self.shuffled(code) for code in codes], torch.tensor(keep)


class _Rows(NamedTuple):
    losses: Tensor
    count: Tensor
    order: list[str]


def _losses(chunks: Chunks, kind: Kind, batches: Iterable[tuple[Any, list[str], Tensor]]) -> _Rows:
    """−log p of every case that has observed elements, at every point of the grid."""
    losses, counts, order = [], [], []
    for batch, codes, keep in batches:
        inputs, target = chunks.split(on_device(batch, chunks.device))
        element = (
            _label_losses(chunks, inputs, target) if kind == "temperature" else _number_losses(chunks, inputs, target)
        )
        _, observed = observed_target(chunks.posterior.model.likelihood, target)
        rows = []
        for loss in element:  # [B, ..]
            seen = torch.ones_like(loss, dtype=torch.bool) if observed is None else observed
            rows.append(loss.masked_fill(~seen, 0.0).reshape(len(loss), -1).sum(1).cpu())
            number = seen.reshape(len(seen), -1).sum(1).double().cpu()
        B = len(number)
        keep = keep.expand(B) & (number > 0)  # a batch whose rows cannot be told apart is one case of B
        losses.append(torch.stack(rows, 1)[keep])
        counts.append(number[keep])
        order += [
            code for code, kept in zip(codes if len(codes) == B else codes * B, keep.tolist(), strict=True) if kept
        ]
    if not order:
        raise ValueError("the held-out data have no observed target: there is nothing to calibrate on")
    return _Rows(torch.cat(losses), torch.cat(counts), order)


def _label_losses(chunks: Chunks, inputs: Any, target: Any) -> Iterator[Tensor]:
    """`label_losses` of p̄, which is collected chunk by chunk."""
    log_mean, binary = torch.tensor(-torch.inf, device=chunks.device), False
    for index in range(len(chunks)):
        part = chunks.predictive(index, inputs)
        if index == 0:
            part.log_prob(target)  # its checks of shapes and labels
            binary = isinstance(part.components, Bernoulli)
        own = log_average(log_probabilities(part.components).double(), part.weights)
        log_mean = torch.logaddexp(log_mean, own + torch.tensor(chunks.share(index), dtype=torch.float64).log())
    t, _ = observed_target(chunks.posterior.model.likelihood, target)
    return label_losses(log_mean, t, binary)


def _number_losses(chunks: Chunks, inputs: Any, target: Any) -> Iterator[Tensor]:
    """At every scale c −log p, [B, ..], of the mixture stretched around its mean: log p(m + (t − m)/c) − log c."""
    pred = chunks.uncalibrated(inputs)
    pred.log_prob(target)
    weights, d = pred.mixture
    weights = weights.double()
    assert isinstance(d, Normal)
    wide = Normal(d.loc.double(), d.scale.double(), validate_args=False)
    mean = torch.tensordot(weights, wide.loc, dims=1)
    t = observed_target(pred.likelihood, target)[0].double()
    for u in GRID.tolist():
        yield u - log_average(wide.log_prob(mean + (t - mean) * exp(-u)), weights)


def _conformal(chunks: Chunks, batches: Iterable[tuple[Any, list[str], Tensor]]) -> Conformal:
    """The scores of all cases, of the calibrated predictive."""
    parts, form = [], None
    for batch, _, keep in batches:
        inputs, target = chunks.split(on_device(batch, chunks.device))
        pred = chunks.whole(inputs)
        pred.log_prob(target)  # its checks of shapes and labels
        t, observed = observed_target(pred.likelihood, target)
        keep = keep.to(t.device).expand(len(t))
        t, observed = t[keep], None if observed is None else observed[keep]
        labels = kind_for(pred.components) == "temperature"
        form = scoring.form_of(labels, t)
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


def _first(chunks: Chunks, loader: Iterable[Any]) -> Predictive:
    for batch in loader:
        return chunks.predictive(0, chunks.split(on_device(batch, chunks.device))[0])
    raise ValueError("the loader gave no batch")


def _inputs(posterior: "Posterior | EnsembleBase", loader: Iterable[Any]) -> Any:
    return next((posterior.model.split(batch)[0] for batch in loader), None)


def _check_loader(loader: Any) -> None:
    check_iterable(loader)
    if iter(loader) is loader:
        raise TypeError("calibrate reads its data several times: give a DataLoader or a list of batches, no generator")
