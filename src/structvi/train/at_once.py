"""Several fits: at once where they have one form and that is right, one after another elsewhere."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..couplings import naive
from ..distributed.ranks import Ranks
from ..models.likelihoods import Likelihood
from ..networks.modes import BATCH_NORMS
from ..util.random_streams import borrowed_stream
from .averaging import assign, copied
from .batches import Batches
from .before import notes_before, with_held_out
from .begin import begin, leave
from .fingerprint import form_of
from .loop import Run
from .many import Together
from .options import FitOptions
from .progress import Progress
from .result import FitResult
from .running import run_fit

if TYPE_CHECKING:
    from ..posterior import Posterior

#: What is refused: it belongs to one fit.
OF_ONE = ("checkpoint", "callback")
#: Options that fits at once have the same; the others are each one's own.
SHARED = ("estimator", "clip", "compute")
#: Options under which fits are made one after another, and the values at which they are not.
ALONE: dict[str, tuple[Any, ...]] = {
    "optimizer": (None,), "scheduler": (None,), "accumulate": (1,),
}  # fmt: skip


def fit_each(
    posteriors: "Sequence[Posterior]",
    loaders: Sequence[Iterable[Any]],
    options: Sequence[FitOptions],
    at_once: bool | None = None,
    label: str = "",
) -> list[FitResult]:
    """Fit each posterior to its own data, in groups of one form.

    Args:
        posteriors: each with a network of its own.
        loaders: the data of each.
        options: of each; fits at once share those of `SHARED`.
        at_once: False for one after another, True for an error where that is needed, None for what is right.
        label: for the progress bar.
    """
    for name in OF_ONE:
        if any(getattr(own, name) is not None for own in options):
            raise ValueError(
                f"{name}= is for one fit, and these are {len(posteriors)}: fit one after another, each with its own"
            )
    learned = [id(parameter) for one in posteriors for parameter in one.parameters()]
    if len(set(learned)) < len(learned):
        raise ValueError(
            "two of the posteriors share something that is learned, a likelihood's noise or a prior's scales: make a "
            "likelihood and a prior for each"
        )
    results: list[FitResult | None] = [None] * len(posteriors)
    for members, reason in _groups(posteriors, options, at_once):
        chosen = [(posteriors[m], loaders[m], options[m]) for m in members]
        found = None
        if reason is None:
            found, reason = _at_once(chosen, label)
        if found is None:
            if at_once:
                raise ValueError(f"at_once=True, but these fits cannot be made at once: {reason}")
            found = [
                run_fit(one, data, own, f"{label} {m + 1} of {len(posteriors)}".strip())
                for m, (one, data, own) in zip(members, chosen, strict=True)
            ]
            for result in found:
                result.notes.append(f"one of {len(posteriors)} fits, made one after another: {reason}")
        for m, result in zip(members, found, strict=True):
            results[m] = result
    return [result for result in results if result is not None]


def _groups(
    posteriors: "Sequence[Posterior]", options: Sequence[FitOptions], at_once: bool | None
) -> list[tuple[list[int], str | None]]:
    """Which members have one form, and what speaks against fitting those at once."""
    everyone = list(range(len(posteriors)))
    if at_once is False:
        return [(everyone, "as asked")]
    reasons = [*map(_against_options, options), *map(_against_posterior, posteriors)]
    if (reason := next(filter(None, reasons), None)) is not None:
        return [(everyone, reason)]
    forms: dict[Any, list[int]] = {}
    for m, one in enumerate(posteriors):
        form = form_of(one)
        parts = {
            "the likelihood": one.model.likelihood,
            "the prior": one.model.prior,
            "forward=": one.model.user_forward,
        }
        # a family of your own is told apart by what it prints; its tensors are each member's own
        unknown = [part for name, part in parts.items() if any(name in text for text in form.unchecked)]
        shared = [repr(getattr(options[m], name)) for name in SHARED]
        shared += [name for name, parameter in one.named_parameters() if not parameter.requires_grad]  # what is held
        forms.setdefault((*form.parts.values(), *shared, str(one.device), *map(id, unknown)), []).append(m)
    return [(members, None if len(members) > 1 else "no other has its form") for members in forms.values()]


def _against_options(options: FitOptions) -> str | None:
    computing = options.computing
    if computing.compile or computing.precision is not None:
        return f"compute={computing!r}"
    for name, usual in ALONE.items():
        if getattr(options, name) not in usual:
            return f"{name}={getattr(options, name)!r}"
    if computing.parallel is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return "the work is shared with other ranks"
    return None


def _against_posterior(one: "Posterior") -> str | None:
    model, normalised = one.model, any(isinstance(module, BATCH_NORMS) for module in one.net.modules())
    reasons = {
        "the network's own dropout is on": one.dropout == "on",
        "batch norm is reestimated": one.batch_norm == "reestimated" and normalised,
        "the network is linearised": model.is_linearised,
        "the network is called one draw at a time": model.checkpoint_activations or model.evaluation.mode == "loop",
        "the family draws by itself": not one.family().coupled or one.family.shard is not None,
        "the likelihood is a function of your own": not isinstance(model.likelihood, Likelihood),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class Prepared(NamedTuple):
    """A fit before its first step."""

    run: Run
    loader: Iterable[Any]
    options: FitOptions
    #: what it learns, as it was
    before: dict[str, Tensor]


def _prepared(posterior: "Posterior", loader: Iterable[Any], options: FitOptions) -> Prepared:
    with_held_out(posterior, loader, options)
    batches = Batches(loader, options.seed, posterior.device)
    notes = notes_before(posterior, batches, options)
    before = copied(posterior.learned())
    run = begin(posterior, batches, options, Ranks(None), None)
    run.notes = notes + run.notes
    return Prepared(run, loader, options, before)


def _at_once(
    chosen: "Sequence[tuple[Posterior, Iterable[Any], FitOptions]]", label: str
) -> tuple[list[FitResult] | None, str | None]:
    """The results, or what speaks against it; the posteriors are then as they were."""
    if not torch.is_grad_enabled():
        raise ValueError("a fit needs gradients: call it outside torch.no_grad() and torch.inference_mode()")
    fits = [_prepared(*one) for one in chosen]
    runs = [one.run for one in fits]
    together, why = Together(runs), "it failed"
    try:
        why = _vmap_cannot(runs[together.step.largest], runs) or together.why_not()
        if why is not None:
            return None, why
        bar = Progress(max(one.end for one in together.members), 0, fits[0].options.progress, label)
        try:
            stopped = together.loop(bar)
        finally:
            bar.close()
        together.close(stopped)
    finally:
        together.step.stack.release()
        for one in fits:
            leave(one.run.posterior)
            if why is not None:  # nothing has been fitted
                assign(one.run.posterior.learned(), one.before)
    return together.finish(stopped), None


def _vmap_cannot(run: Run, others: Sequence[Run]) -> str | None:
    """Why the network is called one draw at a time; None where it need not be."""
    posterior, model = run.posterior, run.posterior.model
    batch = next(iter(run.batches.everything(1)))
    with borrowed_stream(torch.Generator().manual_seed(0)), posterior.network_mode():
        theta, _, fixed, _ = posterior.family().draw(2, naive, torch.Generator(posterior.device).manual_seed(0))
        model.batch_log_likelihood(theta, batch, fixed)
    for one in others:
        one.posterior.model.evaluation._proven |= model.evaluation._proven
        one.posterior.model.evaluation._sizes |= model.evaluation._sizes
    chosen, reason = model.evaluation.choice, model.evaluation.reason or ""
    return None if chosen == "vmap" else reason
