"""Many fits of small networks as one computation: vmap over the posteriors, one Adam over their stacked tensors."""

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from math import inf, isfinite, nan
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from ..couplings import Noise
from ..distributed.ranks import Ranks
from ..distributed.sharding import Sharded
from ..models.batch import batch_size, rows, split_batch
from ..models.likelihoods import Likelihood
from ..networks.call import BATCH_NORMS
from ..networks.vmap_or_loop import Evaluation
from ..objective import Estimator, NonFiniteError, log_q_at, terms_at
from ..posterior import Posterior
from ..result import Status
from ..train.data import Batches
from ..train.fit import Options, begin, fit, leave, run
from ..train.loop import FAILURES, Fit, assign, copied
from ..train.progress import Progress
from ..train.result import FitResult
from ..util.checks import unread
from ..util.interrupts import uninterrupted
from ..util.random_streams import borrowed_stream, one_seed_on

#: values at once and alone may differ by this many roots of the rounding: sums are taken in another order
CLOSE = 3.0


def fit_many(
    posteriors: Sequence[Posterior],
    loaders: Sequence[Iterable[Any]] | Iterable[Any],
    *,
    seeds: Sequence[int] | None = None,
    validation: Sequence[Iterable[Any]] | None = None,
    each: Mapping[str, Sequence[Any]] | None = None,
    at_once: bool | None = None,
    **options: Any,
) -> list[FitResult]:
    """Fit each posterior to its own data, and return the result of each: splits, seeds, simulated data sets.

    Posteriors of one form (network, family, likelihood and prior made with the same arguments) with fits of one length
    are fitted as one computation. Noise, order of the data, clipping and the end are each fit's own. Data sets may
    differ in size: shorter batches are padded with rows that count nothing. The results are those of single fits up to
    rounding, but for two things: a step that is not finite still ages Adam's moments, and held-out data are read at the
    end only.

    Large networks, and options that cannot be stacked (an optimizer or scheduler of your own, `accumulate`, mixed
    precision, several ranks), are fitted one after another; `result.notes` says why.

    Args:
        posteriors: what `variationalize` returns, each with a network of its own.
        loaders: the data of each, or one for all.
        seeds: of each, `range(len(posteriors))` if not given.
        validation: held-out data of each.
        each: options of `posterior.fit` that differ, one value for each: `each={"kl_weight": [1.0, 0.3]}`.
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
    jobs = [Job(*own) for own in zip(posteriors, data, _options(M, seeds, validation, each, options), strict=True)]
    results: dict[int, FitResult] = {}
    for members, reason in _groups(jobs, at_once):
        chosen = [jobs[m] for m in members]
        found = None
        if reason is None:
            found, reason = _fit_at_once(chosen)
        if found is None:
            if at_once:
                raise ValueError(f"at_once=True, but these fits cannot be made at once: {reason}")
            found = [run(*job, f"{m + 1} of {M}") for m, job in zip(members, chosen, strict=True)]
            for result in found:
                result.notes.append(f"one of {M} fits, made one after another: {reason}")
        results |= dict(zip(members, found, strict=True))
    return [results[m] for m in range(M)]


class Job(NamedTuple):
    """What one fit is asked for."""

    posterior: Posterior
    loader: Iterable[Any]
    options: Options


def _options(
    M: int,
    seeds: Sequence[int] | None,
    validation: Sequence[Iterable[Any]] | None,
    each: Mapping[str, Sequence[Any]] | None,
    options: dict[str, Any],
) -> list[Options]:
    """Return the options of each fit."""
    own: dict[str, Sequence[Any]] = {"seed": range(M) if seeds is None else seeds, **(each or {})}
    if validation is not None:
        if not isinstance(validation, list | tuple):
            raise TypeError(f"validation must be a list of the held-out data of each, got {type(validation).__name__}")
        own["validation"] = validation
    for name, values in own.items():
        if len(values) != M:
            raise ValueError(f"{name} must have one entry for each of the {M} posteriors, got {len(values)}")
        if name in options:
            raise ValueError(f"{name} is given for all and for each: give one of them")
    known = {name: one.default for name, one in signature(fit).parameters.items() if one.kind is one.KEYWORD_ONLY}
    unknown = sorted({*own, *options} - set(known))
    if unknown:
        raise TypeError(f"fit has no option {', '.join(unknown)}")
    for name in ("checkpoint", "callback"):
        if options.get(name) is not None:
            raise ValueError(f"{name}= is for one fit, and these are {M}: fit one after another, each with its own")
    return [Options(**known | options | dict(zip(own, row, strict=True))) for row in zip(*own.values(), strict=True)]


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
        modes = (model.evaluation.mode, model.evaluation.chunk)
        length = options.steps or (options.epochs, Batches(loader).length)
        shared = (options.estimator, options.clip, options.schedule, posterior.device, length)
        forms.setdefault(tuple(map(repr, (*parts, *modes, *shared))), []).append(m)
    return [(members, None if len(members) > 1 else "no other has its form") for members in forms.values()]


def _reason_against(job: Job) -> str | None:
    """Return what speaks against making this fit at once with others."""
    posterior, options = job.posterior, job.options
    model, computing = posterior.model, options.computing
    normalised = any(isinstance(module, BATCH_NORMS) for module in posterior.net.modules())
    several = computing.parallel is not None and dist.is_available() and dist.is_initialized()
    reasons = {
        "the optimizer or scheduler is your own": options.optimizer is not None or options.scheduler is not None,
        f"accumulate={options.accumulate}": options.accumulate != 1,
        "mixed precision or compilation": computing.precision is not None or computing.compile,
        "the work is shared with other ranks": several and dist.get_world_size() > 1,
        "the network's own dropout is on": posterior.dropout == "on",
        "batch norm is reestimated": posterior.batch_norm == "reestimated" and normalised,
        "the network is linearised": model.is_linearised,
        "activations are not kept": model.checkpoint_activations,
        "the family draws by itself": not posterior.family().coupled or isinstance(posterior.family, Sharded),
        "the likelihood is a function of your own": not isinstance(model.likelihood, Likelihood),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _fit_at_once(jobs: Sequence[Job]) -> tuple[list[FitResult] | None, str | None]:
    """Return the results; or None and what speaks against it, the posteriors being as they were."""
    if not torch.is_grad_enabled():
        raise ValueError("a fit needs gradients: call it outside torch.no_grad() and torch.inference_mode()")
    posteriors = [job.posterior for job in jobs]
    untouched = [copied(one.learned()) for one in posteriors]
    evaluations = [one.model.evaluation for one in posteriors]
    begun = [_begun(job) for job in jobs]
    for one in posteriors:  # how draws are evaluated is found out once for all
        one.model.evaluation = evaluations[0]
    stacked, stopped = StackedFits(begun, jobs[0].options), False
    try:
        try:
            reason = stacked.reason_against()
            if reason is None:
                stopped = stacked.loop(jobs[0].options.progress)
        finally:
            stacked.release()
            for one in posteriors:
                leave(one)
        if reason is None:
            return [one.finish(stopped) for one in stacked.fits], None
        for one, values in zip(posteriors, untouched, strict=True):
            assign(one.learned(), values)
        return None, reason
    finally:
        for one, evaluation in zip(posteriors, evaluations, strict=True):
            one.model.evaluation = evaluation


def _begun(job: Job) -> Fit:
    """Return a fit before its first step."""
    return begin(job.posterior, job.loader, job.options, Ranks(None))


class OneFit:
    """One of many fits: its place in the data, beside where it is.

    Args:
        fit: at its first step.
    """

    def __init__(self, fit: Fit):
        self.fit, self.generator = fit, fit.generator
        self.elbo = nan  # of the last step
        self.batch, self.count = None, 0
        self.table, self.iterator = fit.data.table(), None

    @property
    def goes_on(self) -> bool:
        return self.fit.goes_on and self.fit.failures < FAILURES

    @property
    def kl_weight(self) -> float:
        return self.fit.kl_weight

    @property
    def lr(self) -> float:
        return self.fit.rate.highest[0] * self.fit.rate_factor

    def read(self) -> None:
        """Read the next batch, in the order of a single fit and with as many numbers from its stream."""
        while True:
            if self.iterator is None:
                self.iterator = self._epoch()
            if self.table is None:
                with borrowed_stream(self.generator):
                    batch = next(self.iterator, None)
            else:
                one_seed_on(self.generator)  # of a stream that nothing draws from
                batch = next(self.iterator, None)
            if batch is not None:
                self.batch, self.count, self.fit.index = batch, rows(batch), self.fit.index + 1
                return
            if not self.fit.index:
                raise ValueError("the loader gave no batch in an epoch; can it be read more than once?")
            self.fit.epoch, self.fit.index, self.iterator = self.fit.epoch + 1, 0, None

    def _epoch(self) -> Iterator[Any]:
        if self.table is None:
            return self.fit.data.epoch(self.fit.epoch)
        table = self.table
        return (tuple(column[at] for column in table) for at in self.fit.data.indices_of(self.fit.epoch))

    @property
    def weight(self) -> float:
        """The weight of −elbo: all observations count the same, those of a short last batch too."""
        mean = self.fit.mean_rows or (self.fit.rows + self.count) / (self.fit.step + 1)
        return self.count / mean / self.fit.settings["num_data"]

    def averaging(self, finite: float) -> float:
        """Return the share of this step in the average over the last steps; 0 where it has none."""
        if not (finite and self.goes_on and self.fit.averages):
            return 0.0
        self.fit.averaged += 1
        return 1 / self.fit.averaged

    def record(self, elbo: float, error: float, norm: float, finite: float, seconds: float) -> None:
        """Note what a step came to, and see whether the fit has converged."""
        fit, self.elbo = self.fit, elbo
        if finite:
            fit.record(elbo, error, norm, self.lr, seconds)
        else:
            fit.index -= 1  # of the batch that is named
            with suppress(NonFiniteError):  # the others go on
                fit.leave_out("the loss or its gradient is not finite")
            fit.index += 1
        fit.rows, fit.step = fit.rows + self.count, fit.step + 1
        fit.settle()

    def finish(self, stopped: bool) -> FitResult:
        """Return the result, as a single fit ends."""
        failed = self.fit.failures == FAILURES
        result = self.fit.finish(stopped or failed)
        if failed:
            why = f"{FAILURES} batches in a row gave no finite loss: the posterior is as it was before them"
            result = replace(result, status=Status.DIVERGED, verdict=why)
        result.notes.append("one of several fits that were made at once")
        self.fit.posterior.last_fit = result
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
        begun: the fits, each at its first step.
        options: of `fit`; its estimator and clip are those of all.
    """

    def __init__(self, begun: Sequence[Fit], options: Options):
        self.begun, self.fits, self.clip = begun, [OneFit(one) for one in begun], options.clip or inf
        largest = max(
            begun, key=lambda one: one.settings["num_data"]
        ).posterior  # no padded batch is larger than its data
        self.objective, self.device = Objective(largest, options.estimator), largest.device
        self.calls: list[tuple[int, int, int]] = []  # (groups, P, K) of every call of the coupling in one draw
        with torch.no_grad():
            draws = largest.family().draw(options.estimator.groups, self._recorded, torch.Generator(self.device))
        for one in begun:
            one.make_step.draws = len(draws.weight)
        learned = [one.learned for one in begun]
        self.stacked = {name: torch.stack([own[name].detach() for own in learned]) for name in learned[0]}
        #: all other tensors: held weights, buffers
        every = [dict((*nn.Module.named_parameters(one.posterior), *one.posterior.named_buffers())) for one in begun]
        rest = [name for name in every[0] if name not in self.stacked]
        self.rest = {name: torch.stack([own[name].detach() for own in every]) for name in rest}
        self.own = [(tensor, tensor.data) for tensors in learned for tensor in tensors.values()]
        for m, tensors in enumerate(learned):
            for name, tensor in tensors.items():
                tensor.data = self.stacked[name][m]
        names = {id(tensor): name for name, tensor in begun[0].named.items()}
        groups = [
            {"params": [self.stacked[names[id(own)]] for own in group["params"]], "relative": highest / self._highest}
            for group, highest in zip(begun[0].optimizer.param_groups, begun[0].rate.highest, strict=True)
        ]
        self.optimizer = torch.optim.Adam(groups, fused=True)
        self._see_what_learns()
        self.average = {name: torch.zeros_like(self.stacked[name], requires_grad=False) for name in begun[0].named}

    @property
    def _highest(self) -> float:
        return self.begun[0].rate.highest[0]

    def _recorded(self, groups: int, P: int, K: int, *rest: Any, **more: Any) -> Noise:
        self.calls.append((groups, P, K))
        return self.objective.estimator.coupling(groups, P, K, *rest, **more)

    def _see_what_learns(self) -> None:
        for name, parameter in self.begun[0].named.items():
            self.stacked[name].requires_grad_(parameter.requires_grad)

    def noise(self, generators: Sequence[torch.Generator]) -> tuple[Noise, ...]:
        """Return the noise of every fit's draw, each from its own generator: [M, S, P] and [M, S, K] for every call."""
        coupling, dtype = self.objective.estimator.coupling, self.objective.posterior.space.dtype
        made = [[coupling(*call, one, dtype, self.device) for call in self.calls] for one in generators]
        return tuple(Noise(*map(torch.stack, zip(*own, strict=True))) for own in zip(*made, strict=True))

    def evaluate(self, noise: tuple[Noise, ...], more: int = 0) -> tuple[Tensor, Tensor]:
        """Return fit and complexity of every posterior on its present batch, [M, groups] each."""
        batch, B = stacked_batch([one.batch for one in self.fits], [one.count for one in self.fits], more)
        batch = pytree.tree_map(lambda x: x.to(self.device) if isinstance(x, Tensor) else x, batch)
        model = self.objective.posterior.model
        own, model.evaluation = model.evaluation, Evaluation("vmap")  # draws inside fits: nothing to try out there
        try:
            fit, complexity = vmap(self.objective.at)({**self.stacked, **self.rest}, noise, batch)
        finally:
            model.evaluation = own
        scale = B / model.num_data  # back to a sum over the batch, then N/B of each fit
        ratio = [scale * one.fit.settings["num_data"] / one.count for one in self.fits]
        return fit * _column(ratio, fit), complexity

    def reason_against(self) -> str | None:
        """Return what speaks against fits at once, found at first batches, which are given back.

        Networks may differ in what no tensor shows, and padded rows may change the others: every posterior is compared
        with itself alone, on its own rows.
        """
        streams = [one.generator.get_state() for one in self.fits]
        sizes = {(one.fit.settings["num_data"], one.fit.mean_rows) for one in self.fits}
        uneven = len(sizes) > 1 or None in next(iter(sizes))
        if uneven and self.objective.posterior.model.user_forward is not None:
            return "batches are of unequal sizes, and forward= alone knows what of them is the target"
        noise = self.noise([torch.Generator(self.device).manual_seed(m) for m in range(len(self.fits))])
        try:
            for one in self.fits:
                one.read()
            with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                alone = torch.stack([self._alone(m, noise) for m in range(len(self.fits))])
                evaluation = self.objective.posterior.model.evaluation
                if evaluation.choice == "loop":
                    return evaluation.reason
                largest = max(one.count for one in self.fits)
                more = int(uneven and largest < self.objective.posterior.model.num_data)
                fit, complexity = self.evaluate(noise, more)
            if any("batching rule" in str(one.message) for one in caught):
                return "vmap does not pay: an operation of the network has no batching rule"
            if not _close(fit - complexity, alone):
                return "all at once gives other values than each with its own network on its own rows"
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            return f"vmap cannot run them: {(str(error).strip() or repr(error)).splitlines()[0][:200]}"
        finally:
            for one, stream in zip(self.fits, streams, strict=True):
                one.generator.set_state(stream)
                one.fit.index, one.iterator = 0, None
        return None

    def _alone(self, m: int, noise: tuple[Noise, ...]) -> Tensor:
        """Return the ELBO of one posterior with its own network on its own rows, [groups]."""
        posterior = self.begun[m].posterior
        own = pytree.tree_map(lambda x: x[m], noise)
        fit, complexity = Objective(posterior, self.objective.estimator).at({}, own, self.fits[m].batch)
        return fit - complexity

    def loop(self, progress: bool) -> bool:
        """Make all steps; return whether the user ended them early."""
        bar = Progress(max(one.fit.end for one in self.fits), 0, progress, f"{len(self.fits)} fits")
        try:
            while active := [one for one in self.fits if one.goes_on]:
                with uninterrupted():
                    self.step(active)
                elbo = [value for one in active if isfinite(value := one.elbo)]
                bar.update(fmean(elbo) if elbo else nan, stdev(elbo) / len(elbo) ** 0.5 if len(elbo) > 1 else nan)
                bar.shorten(max(one.fit.end for one in self.fits))
            return False
        except KeyboardInterrupt:
            return True
        finally:
            bar.close()
            for m, one in enumerate(self.fits):
                if one.fit.averaged:
                    one.fit.average = {name: x[m].clone() for name, x in self.average.items()}

    def step(self, active: Sequence[OneFit]) -> None:
        """Move every posterior that goes on as a step of its own fit would, up to rounding."""
        started = time.monotonic()
        if active[0].fit.stage_two_is_due:
            for one in active:
                one.fit.begin_stage_two()
            self._see_what_learns()
        for one in active:
            one.read()
        rates = [one.lr if one.goes_on else 0.0 for one in self.fits]
        self.optimizer.zero_grad()
        fit, complexity = self.evaluate(self.noise([one.generator for one in self.fits]))
        kl_weight, weight = ([getattr(one, name) for one in self.fits] for name in ("kl_weight", "weight"))
        (-_column(weight, fit) * (fit - _column(kl_weight, fit) * complexity)).mean(-1).sum().backward()
        with torch.no_grad():
            elbo = (fit - complexity).double()
            learning = [x for x in self.stacked.values() if x.grad is not None]
            norm = sum(x.grad.double().reshape(len(x), -1).square().sum(1) for x in learning).sqrt()
            finite = norm.isfinite() & elbo.isfinite().all(-1)
            coefficient = (self.clip / norm.clamp(min=1e-30)).clamp(max=1.0)
            for x in learning:
                rows = -1, *[1] * (x.ndim - 1)
                x.grad = torch.where(finite.view(rows), x.grad * coefficient.to(x).view(rows), 0.0)
            error = elbo.std(-1) / elbo.shape[1] ** 0.5 if elbo.shape[1] > 1 else torch.full_like(norm, nan)
            told = torch.stack([elbo.mean(-1), error, norm, finite.double()], 1).tolist()  # the host waits once
            self._move(rates, told)
            weights = [one.averaging(row[3]) for one, row in zip(self.fits, told, strict=True)]
            if any(weights):
                for name, mean in self.average.items():
                    mean.lerp_(self.stacked[name], torch.tensor(weights).to(mean).view(-1, *[1] * (mean.ndim - 1)))
        seconds = time.monotonic() - started
        for one, row in zip(self.fits, told, strict=True):
            if one.goes_on:
                one.record(*row, seconds)

    def _move(self, rates: Sequence[float], told: Sequence[Sequence[float]]) -> None:
        """Make one step of Adam at the highest rate; posteriors at a lower one go that part of the way."""
        highest = max(rates)
        share = [rate / highest * row[3] if highest else 1.0 for rate, row in zip(rates, told, strict=True)]
        before = {} if set(share) == {1.0} else {name: self.stacked[name].clone() for name in self.average}
        for group in self.optimizer.param_groups:
            group["lr"] = group["relative"] * highest
        self.optimizer.step()
        for name, x in before.items():
            part = torch.tensor(share, dtype=torch.float64).to(x).view(-1, *[1] * (x.ndim - 1))
            self.stacked[name].copy_(x.lerp(self.stacked[name], part))

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


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(like).unsqueeze(-1)


def _close(a: Tensor, b: Tensor) -> bool:
    tolerance = CLOSE * torch.finfo(a.dtype).eps ** 0.5
    size = b.where(b.isfinite(), 0.0).abs().amax(-1, keepdim=True)
    return bool(((a - b).abs() <= tolerance * size).where(b.isfinite(), a.isfinite() == b.isfinite()).all())
