"""Many fits of small networks as one computation: vmap over the posteriors, one Adam over their stacked tensors."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf, nan
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from ..couplings import Noise
from ..distributed.ranks import Ranks, Taken
from ..families.numerics import unread
from ..models.bayesian_model import batch_size, split_batch
from ..networks.vmap_or_loop import Evaluation
from ..objective import Estimator, NonFiniteError, log_q_at, terms_at
from ..posterior import Posterior
from ..result import Status
from ..train.compare import finish
from ..train.data import Batches
from ..train.fit import FAILURES, Fit, Options, fit, release
from ..train.result import FitResult
from ..util.interrupts import Interrupts
from ..util.progress import Progress

#: values at once and alone may differ by this many roots of the rounding: sums are taken in another order
CLOSE = 3.0

#: a posterior, its data and its options
Job = tuple[Posterior, Iterable[Any], Options]


def fit_many(
    posteriors: Sequence[Posterior],
    loaders: Sequence[Iterable[Any]] | Iterable[Any],
    *,
    each: Mapping[str, Sequence[Any]] | None = None,
    **options: Any,
) -> list[FitResult]:
    """Fit each posterior to its own data, and return the result of each: splits, seeds, simulated data sets.

    Posteriors of one form (network, family, likelihood and prior made with the same arguments) with fits of one length
    are fitted as one computation. Noise, order of the data, clipping and the end are each fit's own. Data sets may
    differ in size: shorter batches are padded with rows that count nothing. Single fits have the same results up to
    rounding, with one exception: a step that is not finite still ages Adam's moments.

    Large networks, and options that cannot be stacked (an optimizer of your own, `accumulate`, mixed
    precision, several ranks), are fitted one after another; `result.notes` says why.

    Args:
        posteriors: what `variationalize` returns, each with a network of its own.
        loaders: the data of each, or one for all.
        each: options of `posterior.fit` that differ, one value for each: `each={"kl_weight": [1.0, 0.3]}`, or
            `each={"validation": [..]}`. "seed" is `range(len(posteriors))` if not given.
        **options: of `posterior.fit`, the same for all; `checkpoint=` belongs to one fit: give it with `each`.

    Example:
        >>> import torch
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> nets = [torch.nn.Linear(3, 1) for _ in range(4)]
        >>> data = [[(torch.randn(n, 3), torch.randn(n, 1))] for n in (5, 6, 7, 8)]
        >>> made = [
        ...     variationalize(net, likelihoods.Gaussian(1.0), MeanField(), num_data=len(own[0][0]))
        ...     for net, own in zip(nets, data)
        ... ]
        >>> [result.steps for result in fit_many(made, data, steps=3, progress=False)]
        [3, 3, 3, 3]
    """
    M = len(posteriors)
    parts = [id(part) for one in posteriors for part in (one.net, *one.parameters())]
    if len(set(parts)) < len(parts):
        raise ValueError(
            "two of the posteriors share a network or something that is learned, a likelihood's noise or a prior's "
            "scales: make a network, a likelihood and a prior for each"
        )
    data = list(loaders) if isinstance(loaders, list | tuple) and len(loaders) == M else [loaders] * M
    jobs = list(zip(posteriors, data, _options(M, each or {}, options), strict=True))
    results: dict[int, FitResult] = {}
    for members in _forms(jobs):
        chosen = [jobs[m] for m in members]
        reason = next(filter(None, map(_reason_against, chosen)), None) if len(members) > 1 else "no other has its form"
        found, reason = _fit_at_once(chosen) if reason is None else (None, reason)
        if found is None:
            found = [fit(posterior, loader, **vars(own)) for posterior, loader, own in chosen]
            for result in found:
                result.notes.append(f"one of {M} fits, made one after another: {reason}")
        results |= dict(zip(members, found, strict=True))
    return [results[m] for m in range(M)]


def _options(M: int, each: Mapping[str, Sequence[Any]], options: dict[str, Any]) -> list[Options]:
    """Return the options of each fit."""
    own: dict[str, Sequence[Any]] = {"seed": range(M), **each}
    for name, values in own.items():
        if not isinstance(values, list | tuple | range) or len(values) != M or name in options:
            raise ValueError(
                f"each={{{name!r}: ..}} must be a list with one value for each of the {M} posteriors, and {name}= is "
                "then not given for all"
            )
    rows = zip(*own.values(), strict=True)
    return [Options(**options, **dict(zip(own, row, strict=True))) for row in rows]


def _forms(jobs: Sequence[Job]) -> list[list[int]]:
    """Return which fits have one form."""
    forms: dict[str, list[int]] = {}
    for m, (posterior, loader, options) in enumerate(jobs):
        model = posterior.model
        tensors = [(name, p.shape, p.dtype, p.requires_grad) for name, p in posterior.named_parameters()]
        parts = (posterior.net, posterior.family, model.likelihood, model.prior, posterior.batch_norm, tensors)
        modes = (model.evaluation.mode, model.evaluation.chunk, posterior.fit_status is None)
        length = options.steps or (options.epochs, Batches(loader).length)
        shared = (options.estimator, options.clip, options.schedule, posterior.device, length)
        forms.setdefault(repr((*parts, *modes, *shared)), []).append(m)
    return list(forms.values())


def _reason_against(job: Job) -> str | None:
    """Return what speaks against making this fit at once with others; what vmap cannot run is found out later."""
    posterior, _, options = job
    computing = options.compute
    reasons = {
        "the optimizer is your own": options.optimizer is not None,
        "checkpoint= and callback= are for one fit": options.checkpoint is not None or options.callback is not None,
        f"accumulate={options.accumulate}": options.accumulate != 1,
        "mixed precision or compilation": computing.precision is not None or computing.compile,
        "the work is shared with other ranks": Ranks(computing.parallel).size > 1,
        "the network is linearised": posterior.model.is_linearised,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _fit_at_once(jobs: Sequence[Job]) -> tuple[list[FitResult] | None, str | None]:
    """Return the results; or None and what speaks against it, before any step."""
    fits, options = [Fit(*job, Ranks(None)) for job in jobs], jobs[0][2]
    stacked, stopped = StackedFits(fits, options), False
    try:
        reason = stacked.reason_against()
        if reason is None:
            stopped = stacked.loop(options.progress)
    finally:
        stacked.release()
        for one in fits:
            release(one.posterior)
    return ([_result(one, stopped) for one in fits], None) if reason is None else (None, reason)


def _result(fit: Fit, stopped: bool) -> FitResult:
    failed = fit.failures >= FAILURES
    fit.stopped = stopped or failed
    result = finish(fit)
    if failed:
        why = f"{FAILURES} batches in a row gave no finite loss: the posterior is as it was before them"
        result = replace(result, status=Status.DIVERGED, verdict=why)
    result.notes.append("one of several fits that were made at once")
    fit.posterior.last_fit = result
    return result


class Objective(nn.Module):
    """Fit and complexity of one posterior at given noise, [groups] each: the function that is vmapped.

    Args:
        posterior: with the form and modes of all.
        estimator: of the ELBO.
    """

    def __init__(self, posterior: Posterior, estimator: Estimator):
        super().__init__()
        self.posterior, self.estimator = posterior, estimator

    def forward(self, noise: Sequence[Noise], batch: Any) -> tuple[Tensor, Tensor]:
        density, given, kind = self.posterior.family(), iter(noise), self.estimator.kind
        draws = density.draw(self.estimator.groups, lambda *_, **__: Noise(*next(given)))
        log_q = None
        if density.has_density and kind != "entropy":
            log_q = log_q_at(density, draws.theta, path=kind == "path")
        terms = terms_at(density, draws, log_q, self.posterior.model, batch, self.estimator)
        return terms.fit, terms.complexity

    def at(self, tensors: dict[str, Tensor], noise: Sequence[Noise], batch: Any) -> tuple[Tensor, Tensor]:
        """Evaluate with these tensors in place of the posterior's own."""
        with self.posterior.network_mode(), unread():
            return functional_call(self, {f"posterior.{name}": x for name, x in tensors.items()}, (noise, batch))


class StackedFits:
    """M fits of one form, step by step; meanwhile what the posteriors learn are rows of stacked tensors [M, ..].

    Args:
        fits: each at its first step.
        options: of `fit`; all share estimator and clip.
    """

    def __init__(self, fits: Sequence[Fit], options: Options):
        self.fits, self.clip = fits, options.clip or inf
        self.readers, self.taken = [one.batches() for one in fits], dict[int, Taken]()
        # no padded batch is larger than the data of this one
        largest = max(fits, key=lambda one: one.settings["num_data"]).posterior
        self.objective, self.device = Objective(largest, options.estimator), largest.device
        self.calls: list[tuple[int, int, int]] = []  # (groups, P, K) of every call of the coupling in one draw
        with torch.no_grad():
            draws = largest.family().draw(options.estimator.groups, self._recorded, torch.Generator(self.device))
        for one in fits:
            one.make_step.draws = len(draws.weight)
        self.stacked = {name: torch.stack([one.learned[name].detach() for one in fits]) for name in fits[0].learned}
        #: all other tensors: held weights, buffers
        every = [dict((*nn.Module.named_parameters(one.posterior), *one.posterior.named_buffers())) for one in fits]
        rest = [name for name in every[0] if name not in self.stacked]
        self.rest = {name: torch.stack([own[name].detach() for own in every]) for name in rest}
        self.own = [(tensor, tensor.data) for one in fits for tensor in one.learned.values()]
        for m, one in enumerate(fits):
            for name, tensor in one.learned.items():
                tensor.data = self.stacked[name][m]
        names, highest = {id(tensor): name for name, tensor in fits[0].named.items()}, fits[0].highest
        groups = [
            {"params": [self.stacked[names[id(own)]] for own in group["params"]], "relative": rate / highest[0]}
            for group, rate in zip(fits[0].optimizer.param_groups, highest, strict=True)
        ]
        self.optimizer = torch.optim.Adam(groups, fused=True)
        self._see_what_learns()

    def _recorded(self, groups: int, P: int, K: int, *rest: Any, **more: Any) -> Noise:
        self.calls.append((groups, P, K))
        return self.objective.estimator.coupling(groups, P, K, *rest, **more)

    def _see_what_learns(self) -> None:
        for name, parameter in self.fits[0].named.items():
            self.stacked[name].requires_grad_(parameter.requires_grad)

    def noise(self, generators: Sequence[torch.Generator]) -> tuple[Noise, ...]:
        """Return the noise of every fit's draw, each from its own generator: [M, S, P] and [M, S, K] for every call."""
        coupling, dtype = self.objective.estimator.coupling, self.objective.posterior.space.dtype
        made = [[coupling(*call, one, dtype, self.device) for call in self.calls] for one in generators]
        return tuple(Noise(*map(torch.stack, zip(*own, strict=True))) for own in zip(*made, strict=True))

    def read(self, active: Iterable[int]) -> None:
        """Take the batches of the next step of these fits; the others keep their last ones."""
        for m in active:
            self.taken[m] = next(self.readers[m])
        every = [self.taken[m] for m in range(len(self.fits))]
        self.batches, self.rows = [one.batches[0] for one in every], [one.whole for one in every]

    def evaluate(self, noise: tuple[Noise, ...], more: int = 0) -> tuple[Tensor, Tensor]:
        """Return fit and complexity of every posterior on its present batch, [M, groups] each."""
        model = self.objective.posterior.model
        batch, B = stacked_batch(self.batches, self.rows, more)
        own, model.evaluation = model.evaluation, Evaluation("vmap")  # draws inside fits: nothing to try out there
        try:
            fit, complexity = vmap(self.objective.at)({**self.stacked, **self.rest}, noise, batch)
        finally:
            model.evaluation = own
        scale = B / model.num_data  # back to a sum over the batch, then N/B of each fit
        ratio = [scale * one.settings["num_data"] / count for one, count in zip(self.fits, self.rows, strict=True)]
        return fit * _per_fit(ratio, fit), complexity

    @torch.no_grad()
    def reason_against(self) -> str | None:
        """Return what speaks against fits at once, found at first batches, which are given back.

        Networks may differ in code, and padded rows may change the others: every posterior is compared with itself
        alone, on its own rows.
        """
        model = self.objective.posterior.model
        sizes = {(one.settings["num_data"], one.mean_rows) for one in self.fits}
        uneven = len(sizes) > 1 or None in next(iter(sizes))
        noise = self.noise([torch.Generator(self.device).manual_seed(m) for m in range(len(self.fits))])
        try:
            self.read(range(len(self.fits)))
            alone = torch.stack([self._alone(m, noise) for m in range(len(self.fits))])
            if model.evaluation.choice == "loop":
                return model.evaluation.reason
            fit, complexity = self.evaluate(noise, more=int(uneven and max(self.rows) < model.num_data))
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            return f"vmap cannot run them: {(str(error).strip() or repr(error)).splitlines()[0][:200]}"
        finally:
            self.readers = [one.batches() for one in self.fits]
        tolerance = CLOSE * torch.finfo(alone.dtype).eps ** 0.5
        if torch.allclose(fit - complexity, alone, rtol=tolerance, atol=tolerance, equal_nan=True):
            return None
        return "all at once gives other values than each with its own network on its own rows"

    def _alone(self, m: int, noise: tuple[Noise, ...]) -> Tensor:
        """Return the ELBO of one posterior with its own network on its own rows, [groups]."""
        own = pytree.tree_map(lambda x: x[m], noise)
        objective = Objective(self.fits[m].posterior, self.objective.estimator)
        fit, complexity = objective.at({}, own, self.batches[m])
        return fit - complexity

    def loop(self, progress: bool) -> bool:
        """Make all steps; return whether the user ended them early."""
        bar = Progress(max(one.end for one in self.fits), 0, f"{len(self.fits)} fits") if progress else None
        try:
            while active := [m for m, one in enumerate(self.fits) if one.goes_on and one.failures < FAILURES]:
                with Interrupts():
                    elbo = self.step(active)
                if bar is not None:
                    bar.update(fmean(elbo), nan, None, max(one.end for one in self.fits))
            return False
        except KeyboardInterrupt:
            return True
        finally:
            if bar is not None:
                bar.close()

    def step(self, active: Sequence[int]) -> list[float]:
        """Move every active posterior as a step of its own fit would, up to rounding; return their ELBOs."""
        started, going = time.monotonic(), [self.fits[m] for m in active]
        self.read(active)
        self.optimizer.zero_grad()
        fit, complexity = self.evaluate(self.noise([one.generator for one in self.fits]))
        kl_weight = _per_fit([one.kl_weight for one in self.fits], fit)
        every = [one.weighted(self.taken[m])[1][0] / one.settings["num_data"] for m, one in enumerate(self.fits)]
        weight = _per_fit(every, fit)
        (weight * (kl_weight * complexity - fit)).mean(-1).sum().backward()
        with torch.no_grad():
            elbo = (fit - complexity).double()
            error = elbo.std(-1) / elbo.shape[1] ** 0.5 if elbo.shape[1] > 1 else torch.full_like(elbo[:, 0], nan)
            norm, finite = self._clip(elbo)
            told = torch.stack([elbo.mean(-1), error, norm, finite.double()], 1).tolist()  # the host waits once
            rates = [one.highest[0] * one.rate_factor for one in self.fits]
            moving = zip(self.fits, rates, told, strict=True)
            self._move([rate * row[3] * one.goes_on for one, rate, row in moving], max(rates))
        seconds = time.monotonic() - started
        for m, one in zip(active, going, strict=True):
            self._record(one, told[m], rates[m], seconds)
            one.end_step(self.taken[m])
        self._see_what_learns()
        return [told[m][0] for m in active]

    def _clip(self, elbo: Tensor) -> tuple[Tensor, Tensor]:
        """Clip every posterior's gradient, which is zero if something is not finite; return norms, and which are."""
        gradients = [x.grad for x in self.stacked.values() if x.grad is not None]
        norm = torch.stack([x.double().reshape(len(x), -1).square().sum(1) for x in gradients]).sum(0).sqrt()
        finite = norm.isfinite() & elbo.isfinite().all(-1)
        factor = (self.clip / norm.clamp(min=1e-30)).clamp(max=1)
        for x in gradients:
            shape = -1, *[1] * (x.ndim - 1)
            x.copy_(torch.where(finite.view(shape), x * factor.to(x).view(shape), 0.0))
        return norm, finite

    def _move(self, rates: Sequence[float], highest: float) -> None:
        """Make one step of Adam at the highest rate; posteriors at a lower one go that part of the way."""
        share = [rate / highest if highest else 0.0 for rate in rates]
        before = {} if set(share) == {1.0} else {name: self.stacked[name].clone() for name in self.fits[0].named}
        for group in self.optimizer.param_groups:
            group["lr"] = group["relative"] * highest
        self.optimizer.step()
        for name, x in before.items():
            part = torch.tensor(share, dtype=torch.float64).to(x).view(-1, *[1] * (x.ndim - 1))
            self.stacked[name].copy_(x.lerp(self.stacked[name], part))

    def _record(self, fit: Fit, told: Sequence[float], lr: float, seconds: float) -> None:
        """Write a step into the history: its ELBO, standard error, norm of the gradient, and whether it was finite."""
        elbo, error, norm, finite = told
        if finite:
            fit.record(elbo, error, norm, lr, seconds)
            return
        with suppress(NonFiniteError):  # the others go on
            fit.leave_out(NonFiniteError("the loss or its gradient is not finite"))

    def release(self) -> None:
        """Give the posteriors their own tensors back, with the values of now."""
        for tensor, own in self.own:
            tensor.data = own.copy_(tensor.data)


def stacked_batch(batches: Sequence[Any], counts: Sequence[int], more: int = 0) -> tuple[Any, int]:
    """Return batches as one with a leading axis, the shorter ones padded, and their common size.

    Args:
        batches: of all fits.
        counts: how many rows each has.
        more: rows by which the largest is padded too.
    """
    B = max(counts) + more
    if min(counts) < B:
        batches = [padded(batch, B) for batch in batches]
    return pytree.tree_map(lambda *x: torch.stack(x) if isinstance(x[0], Tensor) else x[0], *batches), B


def padded(batch: Any, size: int) -> Any:
    """Return a batch padded to this size with its first row, which is masked and counts nothing.

    Example:
        >>> x, (t, mask) = padded((torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 4.0])), 3)
        >>> t, mask
        (tensor([3., 4., 3.]), tensor([ True,  True, False]))
    """
    inputs, target = split_batch(batch)
    B = batch_size(target)
    at = torch.arange(size)
    at[B:] = 0

    def longer(x: Any) -> Any:
        return x[at.to(x.device)] if isinstance(x, Tensor) else x

    t, mask = target if isinstance(target, tuple | list) else (target, torch.ones_like(target, dtype=torch.bool))
    own = (torch.arange(size, device=mask.device) < B).view(-1, *[1] * (mask.ndim - 1))
    return pytree.tree_map(longer, inputs), (longer(t), longer(mask) & own)


def _per_fit(values: Sequence[float], like: Tensor) -> Tensor:
    """Return a number for each fit as a column [M, 1]."""
    return torch.tensor(values, dtype=torch.float64).to(like).unsqueeze(-1)
