"""Many fits of small networks as one computation: vmap over the posteriors, one Adam over their stacked tensors."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf, nan
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from ..couplings import Noise
from ..distributed.ranks import Ranks
from ..distributed.sharding import Sharded
from ..families.numerics import unread
from ..models.bayesian_model import batch_size, rows, split_batch
from ..models.likelihoods import Likelihood
from ..networks.vmap_or_loop import Evaluation
from ..objective import Estimator, NonFiniteError, log_q_at, terms_at
from ..posterior import Posterior
from ..result import Status
from ..train.checkpoint import assign, copied
from ..train.compare import finish
from ..train.data import Batches
from ..train.fit import FAILURES, Fit, Options, fit, release
from ..train.result import FitResult
from ..util.interrupts import Interrupts
from ..util.progress import Progress

#: values at once and alone may differ by this many roots of the rounding: sums are taken in another order
CLOSE = 3.0


def fit_many(
    posteriors: Sequence[Posterior],
    loaders: Sequence[Iterable[Any]] | Iterable[Any],
    *,
    each: Mapping[str, Sequence[Any]] | None = None,
    at_once: bool | None = None,
    **options: Any,
) -> list[FitResult]:
    """Fit each posterior to its own data, and return the result of each: splits, seeds, simulated data sets.

    Posteriors of one form (network, family, likelihood and prior made with the same arguments) with fits of one length
    are fitted as one computation. Noise, order of the data, clipping and the end are each fit's own. Data sets may
    differ in size: shorter batches are padded with rows that count nothing. Single fits have the same results up to
    rounding, with two exceptions. A step that is not finite still ages Adam's moments, and held-out data are read only
    at the end.

    Large networks, and options that cannot be stacked (an optimizer of your own, `accumulate`, mixed
    precision, several ranks), are fitted one after another; `result.notes` says why.

    Args:
        posteriors: what `variationalize` returns, each with a network of its own.
        loaders: the data of each, or one for all.
        each: options of `posterior.fit` that differ, one value for each: `each={"kl_weight": [1.0, 0.3]}`, or
            `each={"validation": [..]}`. "seed" is `range(len(posteriors))` if not given.
        at_once: False for one after another; True for an error where the fits cannot be made at once.
        **options: of `posterior.fit`, the same for all; `checkpoint=` and `callback=` belong to one fit.

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
    if len({id(one.net) for one in posteriors}) < M:
        raise ValueError("two of the posteriors are of the same network: each fit has a network of its own")
    learned = [id(parameter) for one in posteriors for parameter in one.parameters()]
    if len(set(learned)) < len(learned):
        raise ValueError(
            "two of the posteriors share something that is learned, a likelihood's noise or a prior's scales: make a "
            "likelihood and a prior for each"
        )
    data = list(loaders) if isinstance(loaders, list | tuple) and len(loaders) == M else [loaders] * M
    jobs = [Job(*own) for own in zip(posteriors, data, _options(M, each or {}, options), strict=True)]
    results: dict[int, FitResult] = {}
    for members, reason in _groups(jobs, at_once):
        chosen = [jobs[m] for m in members]
        found = None
        if reason is None:
            found, reason = _fit_at_once(chosen)
        if found is None:
            if at_once:
                raise ValueError(f"at_once=True, but these fits cannot be made at once: {reason}")
            found = [fit(one, loader, **vars(options)) for one, loader, options in chosen]
            for result in found:
                result.notes.append(f"one of {M} fits, made one after another: {reason}")
        results |= dict(zip(members, found, strict=True))
    return [results[m] for m in range(M)]


class Job(NamedTuple):
    """A posterior, its data and its options."""

    posterior: Posterior
    loader: Iterable[Any]
    options: Options


def _options(M: int, each: Mapping[str, Sequence[Any]], options: dict[str, Any]) -> list[Options]:
    """Return the options of each fit."""
    own: dict[str, Sequence[Any]] = {"seed": range(M), **each}
    for name, values in own.items():
        if not isinstance(values, list | tuple | range) or len(values) != M:
            raise ValueError(f"each={{{name!r}: ..}} must be a list with one value for each of the {M} posteriors")
        if name in options:
            raise ValueError(f"{name} is given for all and for each: give one of them")
    for name in ("checkpoint", "callback"):
        if options.get(name) is not None:
            raise ValueError(f"{name}= is for one fit, and these are {M}: fit one after another, each with its own")
    rows = zip(*own.values(), strict=True)
    return [Options(**options, **dict(zip(own, row, strict=True))) for row in rows]


def _groups(jobs: Sequence[Job], at_once: bool | None) -> list[tuple[list[int], str | None]]:
    """Return which fits have one form, and what speaks against making those at once."""
    everyone = list(range(len(jobs)))
    if at_once is False:
        return [(everyone, "as asked")]
    if (reason := next(filter(None, map(_reason_against, jobs)), None)) is not None:
        return [(everyone, reason)]
    forms: dict[tuple[str, ...], list[int]] = {}
    for m, (posterior, loader, options) in enumerate(jobs):
        model = posterior.model
        tensors = [(name, p.shape, p.dtype, p.requires_grad) for name, p in posterior.named_parameters()]
        parts = (posterior.net, posterior.family, model.likelihood, model.prior, posterior.batch_norm, tensors)
        modes = (model.evaluation.mode, model.evaluation.chunk, posterior.fit_status is None)
        length = options.steps or (options.epochs, Batches(loader).length)
        shared = (options.estimator, options.clip, options.schedule, posterior.device, length)
        forms.setdefault(tuple(map(repr, (*parts, *modes, *shared))), []).append(m)
    return [(members, None if len(members) > 1 else "no other has its form") for members in forms.values()]


def _reason_against(job: Job) -> str | None:
    """Return what speaks against making this fit at once with others; what vmap cannot run is found out later."""
    options, computing = job.options, job.options.compute
    is_shared = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    reasons = {
        "the optimizer is your own": options.optimizer is not None,
        f"accumulate={options.accumulate}": options.accumulate != 1,
        "mixed precision or compilation": computing.precision is not None or computing.compile,
        "the work is shared with other ranks": (is_shared and computing.parallel is not None)
        or isinstance(job.posterior.family, Sharded),
        "the network is linearised": job.posterior.model.is_linearised,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _fit_at_once(jobs: Sequence[Job]) -> tuple[list[FitResult] | None, str | None]:
    """Return the results; or None and what speaks against it, the posteriors being as they were."""
    posteriors = [job.posterior for job in jobs]
    untouched = [copied(one.learned()) for one in posteriors]
    fits = [Fit(job.posterior, job.loader, job.options, Ranks(None)) for job in jobs]
    stacked, stopped = StackedFits(fits, jobs[0].options), False
    try:
        reason = stacked.reason_against()
        if reason is None:
            stopped = stacked.loop(jobs[0].options.progress)
    finally:
        stacked.release()
        for one in posteriors:
            release(one)
    if reason is None:
        return [_result(one, stopped) for one in fits], None
    for one, values in zip(posteriors, untouched, strict=True):
        assign(one.learned(), values)
    return None, reason


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


class Reader:
    """The batches of one fit, in the order of a single fit and with as many numbers from its stream.

    Args:
        fit: its epoch and index are moved on.
    """

    def __init__(self, fit: Fit):
        self.fit = fit
        self.iterator: Iterator[Any] | None = None
        #: the last batch, and how many rows it has
        self.batch, self.rows = None, 0

    def read(self) -> None:
        """Read the next batch."""
        fit = self.fit
        while True:
            if self.iterator is None:
                self.iterator = fit.data.epoch(fit.epoch)
            with fit.reading():
                batch = next(self.iterator, None)
            if batch is not None:
                self.batch, self.rows, fit.index = batch, rows(batch), fit.index + 1
                return
            if not fit.index:
                raise ValueError("the loader gave no batch in an epoch; can it be read more than once?")
            fit.epoch, fit.index, self.iterator = fit.epoch + 1, 0, None

    def weight(self) -> float:
        """Return the weight of −elbo: all observations count the same, also in a short last batch."""
        mean = self.fit.mean_rows or (self.fit.rows + self.rows) / (self.fit.step + 1)
        return self.rows / mean / self.fit.settings["num_data"]


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
        self.fits, self.readers, self.clip = fits, [Reader(one) for one in fits], options.clip or inf
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

    def evaluate(self, noise: tuple[Noise, ...], more: int = 0) -> tuple[Tensor, Tensor]:
        """Return fit and complexity of every posterior on its present batch, [M, groups] each."""
        counts, model = [one.rows for one in self.readers], self.objective.posterior.model
        batch, B = stacked_batch([one.batch for one in self.readers], counts, more)
        own, model.evaluation = model.evaluation, Evaluation("vmap")  # draws inside fits: nothing to try out there
        try:
            fit, complexity = vmap(self.objective.at)({**self.stacked, **self.rest}, noise, batch)
        finally:
            model.evaluation = own
        scale = B / model.num_data  # back to a sum over the batch, then N/B of each fit
        ratio = [scale * one.settings["num_data"] / count for one, count in zip(self.fits, counts, strict=True)]
        return fit * _per_fit(ratio, fit), complexity

    def reason_against(self) -> str | None:
        """Return what speaks against fits at once, found at first batches, which are given back.

        Networks may differ in code, and padded rows may change the others: every posterior is compared with itself
        alone, on its own rows.
        """
        model, streams = self.objective.posterior.model, [one.generator.get_state() for one in self.fits]
        sizes = {(one.settings["num_data"], one.mean_rows) for one in self.fits}
        uneven = len(sizes) > 1 or None in next(iter(sizes))
        if uneven and (model.user_forward is not None or not isinstance(model.likelihood, Likelihood)):
            return "batches are of unequal sizes, and a function of your own does not know which rows are padding"
        noise = self.noise([torch.Generator(self.device).manual_seed(m) for m in range(len(self.fits))])
        try:
            for one in self.readers:
                one.read()
            with torch.no_grad():
                alone = torch.stack([self._alone(m, noise) for m in range(len(self.fits))])
                if model.evaluation.choice == "loop":
                    return model.evaluation.reason
                more = uneven and max(one.rows for one in self.readers) < model.num_data
                fit, complexity = self.evaluate(noise, more=int(more))
            if not _close(fit - complexity, alone):
                return "all at once gives other values than each with its own network on its own rows"
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            return f"vmap cannot run them: {(str(error).strip() or repr(error)).splitlines()[0][:200]}"
        finally:
            for one, reader, stream in zip(self.fits, self.readers, streams, strict=True):
                one.generator.set_state(stream)
                one.index, reader.iterator = 0, None
        return None

    def _alone(self, m: int, noise: tuple[Noise, ...]) -> Tensor:
        """Return the ELBO of one posterior with its own network on its own rows, [groups]."""
        own = pytree.tree_map(lambda x: x[m], noise)
        objective = Objective(self.fits[m].posterior, self.objective.estimator)
        fit, complexity = objective.at({}, own, self.readers[m].batch)
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
        if going[0].stage_two_is_due:
            for one in going:
                one.begin_stage_two()
            self._see_what_learns()
        for m in active:
            self.readers[m].read()
        self.optimizer.zero_grad()
        fit, complexity = self.evaluate(self.noise([one.generator for one in self.fits]))
        kl_weight = _per_fit([one.kl_weight for one in self.fits], fit)
        weight = _per_fit([one.weight() for one in self.readers], fit)
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
            one.rows, one.step = one.rows + self.readers[m].rows, one.step + 1
            one.settle()
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
        fit.index -= 1  # of the batch that is named
        with suppress(NonFiniteError):  # the others go on
            fit.leave_out(NonFiniteError("the loss or its gradient is not finite"))
        fit.index += 1

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


def _close(a: Tensor, b: Tensor) -> bool:
    tolerance = CLOSE * torch.finfo(a.dtype).eps ** 0.5
    size = b.where(b.isfinite(), 0.0).abs().amax(-1, keepdim=True)
    return bool(((a - b).abs() <= tolerance * size).where(b.isfinite(), a.isfinite() == b.isfinite()).all())
