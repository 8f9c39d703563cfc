"""The run of a fit at its first step, or at the one that a checkpoint has; and how its posterior is left."""

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from ..distributed.ranks import Ranks
from ..families.low_rank import factors
from ..files.fit_checkpoint import Found
from ..result import Status
from . import checkpoints
from .averaging import copied
from .batches import Batches
from .fingerprint import fingerprint
from .loop import Run
from .options import FEWEST_STAGED, KL_WARMUP, FitOptions, Settings
from .validation import Watch

if TYPE_CHECKING:
    from ..posterior import Posterior


def begin(posterior: "Posterior", batches: Batches, options: FitOptions, ranks: Ranks, found: Found | None) -> Run:
    """A run at its first step, or at the one that a checkpoint has."""
    settings = _settings(posterior, batches, options, found)
    known = None
    if options.checkpoint is not None:
        known = fingerprint(posterior, batches)
    watch = None
    if options.validation is not None:
        watch = Watch(options.validation, options.seed, posterior.device)
    run = Run(
        posterior, batches, settings, options.estimator, ranks, options.optimizer,
        options.scheduler, options.lr, options.computing.capture, watch,
    )  # fmt: skip
    run.show = options.progress and ranks.rank == 0
    if watch is not None and (posterior.fit_status is Status.PLACED or posterior.model.linearised_at is not None):
        run.trained = _network_values(posterior)
        run.begun = copied(run.state.learned) if found is None else {}
    if known is not None:
        run.state = replace(run.state, problem=known.parts)
    if found is not None:
        run.notes += checkpoints.restore(run, found)
        if known is not None and known.unchecked:
            run.notes.append(f"resumed without a look at {'; '.join(known.unchecked)}")
    elif options.checkpoint is not None and options.checkpoint.resume:
        run.notes.append(f"nothing to resume in {options.checkpoint.directory}: started from the beginning")
    return run


def leave(posterior: "Posterior") -> None:
    """After a fit, however it ended: all of the family learns again."""
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
    staged, kl_warmup, is_first = options.times.staged, options.times.kl_warmup, posterior.fit_status is None
    if staged == "auto":
        staged = then["staged"] if then else is_first
    if kl_warmup == "auto":
        kl_warmup = float(then["kl_warmup"] if then else KL_WARMUP if is_first else 0.0)
    staged = bool(staged and factors(posterior.family) and steps >= FEWEST_STAGED)
    return options.settings(steps, kl_warmup, staged, posterior.model.num_data)


def _network_values(posterior: "Posterior") -> Tensor:
    """Return θ [P]: where the network is linearised, or its present values; what is not the network's at its start."""
    model = posterior.model
    named = model.space.unravel(model.space.initial.clone())
    if model.linearised_at is not None:
        named |= model.net_space.unravel(model.linearised_at)
    else:
        named |= {name: p.detach() for name, p in model.net.named_parameters() if name in model.net_space}
    return model.space.ravel({name: tensor.to(posterior.device) for name, tensor in named.items()})
