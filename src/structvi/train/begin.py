"""The run of a fit at its first step, or at the one that a checkpoint has; and how its posterior is left."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..distributed.ranks import Ranks
from ..files.fit_checkpoint import Found
from . import checkpoints
from .averaging import copied
from .batches import Batches
from .fingerprint import fingerprint
from .loop import Run
from .options import FEWEST_STAGED, KL_WARMUP, FitOptions, Settings
from .pace import SLOWEST
from .validation import Watch
from .warm_start import ROUNDS, start_trained, takes_directions, trained_values

if TYPE_CHECKING:
    from ..posterior import Posterior


def begin(posterior: "Posterior", batches: Batches, options: FitOptions, ranks: Ranks, found: Found | None) -> Run:
    """A run at its first step, or at the one that a checkpoint has."""
    settings = _settings(posterior, batches, options, found)
    known = None
    if options.checkpoint is not None or found is not None:
        known = fingerprint(posterior, batches, options.data_id)
    if options.start == "trained" and found is None:
        start_trained(posterior, batches, options.number(), options.seed, ROUNDS if settings.total else 0)
    watch = None
    if options.validation is not None:
        assert not isinstance(options.validation, int | float)  # it has been split off
        watch = Watch(options.validation, options.seed, posterior.device)
    run = Run(
        posterior, batches, settings, options.coupling, options.estimator, ranks, options.optimizer,
        options.scheduler, options.lr, options.capture, watch, options.keep, options.compare,
    )  # fmt: skip
    run.show = options.progress and ranks.rank == 0
    if watch is not None and (options.start == "trained" or posterior.model.linearised_at is not None):
        run.trained = trained_values(posterior)
        run.begun = copied(run.state.learned) if found is None else {}
    if known is not None:
        run.state = replace(run.state, problem=known.parts)
    if found is not None:
        run.notes += checkpoints.restore(run, found, options.resume_anyway)
        if known is not None and known.unchecked:
            run.notes.append(f"resumed without a look at {'; '.join(known.unchecked)}")
    elif options.resume is not None:
        run.notes.append(f"nothing to resume in {options.resume}: started from the beginning")
    if options.mean == "held":
        for family in posterior.family.families():
            family.hold_mean()
    return run


def leave(posterior: "Posterior") -> None:
    """After a fit, however it ended: all of the family learns again."""
    for family in posterior.family.families():
        family.learn_all()
    for parameter in posterior.family.parameters():
        parameter.requires_grad_(True)


def _settings(posterior: "Posterior", batches: Batches, options: FitOptions, found: Found | None) -> Settings:
    """What was left to be found out: how many steps, and what a posterior that has learned nothing needs."""
    steps = options.steps
    if options.epochs is not None:
        if batches.length is None:
            raise ValueError("the loader does not know how many batches it has: give steps= instead of epochs=")
        steps = options.epochs * -(-batches.length // options.accumulate)
    assert steps
    then = {} if found is None else found.description["settings"]
    families = [family for family in posterior.family.families() if family.has_stages]
    staged, kl_warmup = options.staged, options.kl_warmup
    if staged == "auto":
        untouched = bool(families) and all(family.is_untouched() for family in families)
        placed = options.start == "trained" and takes_directions(posterior) > 0  # its factor too
        staged = then["staged"] if then else untouched and not placed
    if kl_warmup == "auto":
        fresh = then["kl_warmup"] if then else KL_WARMUP if options.start is None and _fresh(posterior) else 0.0
        kl_warmup = float(fresh)
    elif kl_warmup == "paced":
        kl_warmup = SLOWEST
    staged = bool(staged and families and steps >= FEWEST_STAGED)
    return options.settings(steps, kl_warmup, staged, posterior.model.num_data)


def may_restart(posterior: "Posterior", options: FitOptions, found: Found | None) -> bool:
    if not options.restarts or options.start is not None or (found is None and not _fresh(posterior)):
        return False
    # an optimizer that is made already remembers the first fit
    return not isinstance(options.optimizer, torch.optim.Optimizer) and not isinstance(options.scheduler, LRScheduler)


def _fresh(posterior: "Posterior") -> bool:
    """Whether all scales are still those that the family starts with; False where it has none."""
    said = [fresh for family in posterior.family.families() if (fresh := family.is_fresh()) is not None]
    return bool(said) and all(said)
