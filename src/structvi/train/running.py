"""A fit from its options to its result, and where it ends stuck others."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call

from ..distributed.collectives import LostRankError
from ..distributed.ranks import Ranks
from ..files import fit_checkpoint
from ..models.priors.base import learns
from ..util.folder_lock import folder_lock
from . import checkpoints
from .around import fit_around
from .averaging import copied
from .batches import Batches, Reread
from .before import check_around, notes_before, with_held_out
from .begin import begin, leave, may_restart
from .held_mean import fit_around_held_mean
from .loop import Run
from .options import FitOptions
from .progress import Progress
from .restarts import again_if_stuck, folder
from .result import FitResult
from .temperature_path import fit_path
from .validation import elements_of

if TYPE_CHECKING:
    from ..posterior import Posterior


def run_fit(posterior: "Posterior", loader: Iterable[Any], options: FitOptions, label: str = "") -> FitResult:
    """A fit, and where it ends stuck others; `label` says in the progress bar what it is for."""
    if not torch.is_grad_enabled():
        raise ValueError("a fit needs gradients: call it outside torch.no_grad() and torch.inference_mode()")
    if options.is_around:
        check_around(posterior, options)
    if options.compile and posterior.model.linearised_at is not None:
        raise ValueError("compile=True is for the network itself: a linearised one needs its derivatives; leave it out")
    loader, options = with_held_out(posterior, loader, options)
    if options.temperature == "validated" and not options.is_around:
        assert options.validation is not None
        assert not isinstance(options.validation, int | float)
        elements = elements_of(posterior, options.validation)
        return fit_path(posterior, options, elements, lambda own, name: run_fit(posterior, loader, own, name))
    if options.mean == "held" and learns(posterior.model.prior) and not options.is_around:
        return fit_around_held_mean(posterior, options, lambda own, name: run_fit(posterior, loader, own, name))
    ranks = Ranks(options.parallel, posterior.family)
    try:
        with _own_folder(options) if ranks.rank == 0 else nullcontext():
            batches = Batches(loader, options.seed, posterior.device, ranks.part)
            if ranks.mode == "data" and not batches.splits:  # each rank has a sampler of its own
                batches.restrict(sorted({index for own in ranks.tell(batches.indices) for index in own}))
            found = None if options.resume is None else fit_checkpoint.latest(options.resume)
            notes = notes_before(posterior, batches, options)
            if options.is_around:
                result = fit_around(posterior, batches, options, notes)
                posterior.last_fit, posterior.calibration = result, result.calibration
                return result
            may = ranks.size == 1 and may_restart(posterior, options, found)
            begun = copied(posterior.outside_family())
            run = begin(posterior, batches, options, ranks, found)
            run.notes = notes + run.notes
            stopped = _loop(run, options, label)
            if options.checkpoint is not None:
                checkpoints.save(run, options.checkpoint)
            result = run.finish(stopped)
    finally:
        ranks.close()
    posterior.last_fit = result
    return restarted(run, loader, options, begun) if may and not stopped else result


def restarted(run: Run, loader: Iterable[Any], options: FitOptions, begun: dict[str, Tensor]) -> FitResult:
    """The result of a run that has ended or, where it is stuck, of the best of it and others.

    Args:
        run: whose posterior has its result as its last fit.
        loader, options: of the fit.
        begun: the parameters of likelihood and prior before it.
    """
    posterior, settings, first = run.posterior, run.settings, run.posterior.last_fit
    assert isinstance(first, FitResult)

    def fit_again(seed: int, name: str, label: str) -> FitResult:
        where = {key: folder(getattr(options, key), name) for key in ("checkpoint", "resume")}
        again = replace(
            options, epochs=None, steps=settings.total, kl_warmup="paced" if settings.paced else settings.kl_warmup,
            staged=settings.staged, restarts=0, seed=seed, **where,
        )  # fmt: skip
        return run_fit(posterior, loader, again, label)

    seen = Reread(run.batches, run.compared)
    result = again_if_stuck(posterior, first, begun, seen, options.restarts, options.seed, fit_again)
    posterior.last_fit = result
    return result


@contextmanager
def _own_folder(options: FitOptions) -> Iterator[None]:
    """Inside, the folder of checkpoints is this fit's alone."""
    if options.checkpoint is None:
        yield
        return
    with folder_lock(options.checkpoint, "a fit"):
        there = fit_checkpoint.files(options.checkpoint)
        if there and (options.resume is None or not _same_folder(options.checkpoint, options.resume)):
            raise ValueError(
                f"the folder {options.checkpoint} holds checkpoints of another fit, up to {there[0].name}: a folder "
                "belongs to one fit. Give another folder, go on with that fit (resume=), or remove its files"
            )
        yield


def _same_folder(folder: Any, resumed: Any) -> bool:
    """Whether what is resumed is in the folder, or the folder itself."""
    resumed = Path(resumed).resolve()
    return Path(folder).resolve() in (resumed, resumed.parent if resumed.is_file() else resumed)


def _loop(run: Run, options: FitOptions, label: str) -> bool:
    """All steps; whether the user ended them before their end. Whatever happens, the posterior can be used again."""
    posterior, ranks = run.posterior, run.ranks
    every = options.every or run.steps_an_epoch or 500
    told = {
        **asdict(run.settings),
        "optimizer": run.state.optimizer,
        "learning rates": run.schedule.highest,
        "step resumed from": run.state.step,
        "family": repr(posterior.family),
        "steps between checkpoints": every if ranks.sharded and options.checkpoint is not None else None,
    }
    ranks.start(told, run.state.learned, [*posterior.net.parameters(), *posterior.net.buffers()])
    bar = Progress(run.state.end, run.state.step, options.progress and ranks.rank == 0, label)
    model = posterior.model
    if options.compile:
        model.compiled = torch.compile(functional_call)
    before, model.precision = model.precision, options.precision or model.precision
    try:
        with ranks.interruptible():
            run.loop(bar, options.checkpoint, every, options.callback)
        return False
    except KeyboardInterrupt:
        run.back_to_step()
        return True
    except torch.OutOfMemoryError as error:
        run.back_to_step()
        step = f"the posterior is as it was after step {run.state.step}"
        if options.checkpoint is not None and ranks.size == 1:
            checkpoints.save(run, options.checkpoint)
            step += f", and so is the checkpoint in {options.checkpoint}"
        error.add_note(step)
        raise
    except LostRankError as error:
        run.back_to_step()
        if options.checkpoint is not None:
            error.add_note(checkpoints.save_alone(run, options.checkpoint))
        raise
    finally:
        bar.close()
        model.precision = before
        model.compiled = None
        run.schedule.reset()
        leave(posterior)
