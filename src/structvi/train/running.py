"""A fit from its options to its result."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch.func import functional_call

from ..distributed.collectives import LostRankError
from ..distributed.ranks import Ranks
from ..files import fit_checkpoint
from . import checkpoints
from .batches import Batches
from .before import notes_before, with_held_out
from .begin import begin, leave
from .loop import Run
from .options import Checkpoint, FitOptions
from .progress import Progress
from .result import FitResult

if TYPE_CHECKING:
    from ..posterior import Posterior


def run_fit(posterior: "Posterior", loader: Iterable[Any], options: FitOptions, label: str = "") -> FitResult:
    """Run a fit and return its result; `label` says in the progress bar what it is for."""
    if not torch.is_grad_enabled():
        raise ValueError("a fit needs gradients: call it outside torch.no_grad() and torch.inference_mode()")
    if options.computing.compile and posterior.model.linearised_at is not None:
        raise ValueError("compile=True is for the network itself: a linearised one needs its derivatives; leave it out")
    with_held_out(posterior, loader, options)
    ranks = Ranks(options.computing.parallel, posterior.family)
    kept = options.checkpoint
    try:
        if kept is not None and ranks.rank == 0:
            _check_folder(kept)
        batches = Batches(loader, options.seed, posterior.device, ranks.part)
        if ranks.mode == "data" and not batches.splits:  # each rank has a sampler of its own
            batches.restrict(sorted({index for own in ranks.tell(batches.indices) for index in own}))
        found = None if kept is None or not kept.resume else fit_checkpoint.latest(kept.directory)
        notes = notes_before(posterior, batches, options)
        run = begin(posterior, batches, options, ranks, found)
        run.notes = notes + run.notes
        stopped = _loop(run, options, label)
        if kept is not None:
            checkpoints.save(run, kept.directory)
        result = run.finish(stopped)
    finally:
        ranks.close()
    posterior.last_fit = result
    return result


def _check_folder(kept: Checkpoint) -> None:
    """A folder of checkpoints belongs to one fit."""
    there = fit_checkpoint.files(kept.directory)
    if there and not kept.resume:
        raise ValueError(
            f"the folder {kept.directory} holds checkpoints of another fit, up to {there[0].name}: a folder "
            "belongs to one fit. Give another folder, go on with that fit (resume=True), or remove its files"
        )


def _loop(run: Run, options: FitOptions, label: str) -> bool:
    """All steps; whether the user ended them before their end. Whatever happens, the posterior can be used again."""
    posterior, ranks = run.posterior, run.ranks
    kept, computing = options.checkpoint, options.computing
    directory = None if kept is None else kept.directory
    every = (kept and kept.every) or run.steps_an_epoch or 500
    told = {
        **asdict(run.settings),
        "optimizer": run.state.optimizer,
        "learning rates": run.schedule.highest,
        "step resumed from": run.state.step,
        "family": repr(posterior.family),
        "steps between checkpoints": every if ranks.sharded and kept is not None else None,
    }
    ranks.start(told, run.state.learned, [*posterior.net.parameters(), *posterior.net.buffers()])
    bar = Progress(run.state.end, run.state.step, options.progress and ranks.rank == 0, label)
    model = posterior.model
    if computing.compile:
        model.compiled = torch.compile(functional_call)
    before, model.precision = model.precision, computing.precision or model.precision
    try:
        with ranks.interruptible():
            run.loop(bar, directory, every, options.callback)
        return False
    except KeyboardInterrupt:
        run.back_to_step()
        return True
    except torch.OutOfMemoryError as error:
        run.back_to_step()
        step = f"the posterior is as it was after step {run.state.step}"
        if directory is not None and ranks.size == 1:
            checkpoints.save(run, directory)
            step += f", and so is the checkpoint in {directory}"
        error.add_note(step)
        raise
    except LostRankError as error:
        run.back_to_step()
        if directory is not None:
            error.add_note(checkpoints.save_alone(run, directory))
        raise
    finally:
        bar.close()
        model.precision = before
        model.compiled = None
        run.schedule.reset()
        leave(posterior)
