"""`fit`: from its options to a run, and from the run to a result."""

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.func import functional_call
from torch.optim.lr_scheduler import LRScheduler

from ..basics.folder_lock import folder_lock
from ..couplings import Coupling, paired
from ..distributed.collectives import LostRankError
from ..distributed.ranks import Parallel, Ranks
from ..models.priors.base import learns
from ..networks.mixed_precision import check_precision
from ..objective import Estimator
from ..posterior import PosteriorBase
from ..storing import fit_checkpoint
from ..storing.fit_checkpoint import Found
from . import checkpoints
from .around import fit_around
from .averaging import copied
from .batches import Batches, Reread
from .before import check_around, remember_choice, set_num_data, unused_batch_norm
from .fingerprint import fingerprint
from .held_mean import fit_around_held_mean
from .loop import Run
from .optimizers import OptimizerLike
from .options import FEWEST_STAGED, KL_WARMUP, FitOptions, Settings
from .progress import Progress
from .restarts import again_if_stuck, folder
from .result import FitResult, History
from .schedule import SchedulerLike
from .temperature_path import fit_path
from .validation import Watch, elements_of, split_off
from .warm_start import start_trained, takes_directions, trained_values


def fit(
    posterior: PosteriorBase,
    loader: Iterable[Any],
    *,
    epochs: int | None = None,
    steps: int | None = None,
    lr: float | None = None,
    optimizer: OptimizerLike | None = None,
    scheduler: SchedulerLike | None = None,
    warmup: float = 0.05,
    clip: float | None = 10.0,
    accumulate: int = 1,
    kl_warmup: float | Literal["auto"] = "auto",
    temperature: float | Literal["validated"] = 1.0,
    groups: int = 1,
    coupling: Coupling = paired,
    estimator: Estimator = "path",
    staged: bool | Literal["auto"] = "auto",
    average: bool = True,
    precision: torch.dtype | None = None,
    device: torch.device | str | None = None,
    parallel: Parallel = "auto",
    capture: bool = True,
    compile: bool = False,
    stop: bool = True,
    restarts: int = 1,
    start: Literal["trained"] | None = None,
    mean: Literal["learned", "held"] = "learned",
    validation: Iterable[Any] | float | None = None,
    validation_groups: Sequence[Hashable] | None = None,
    keep: Literal["widest", "best"] = "widest",
    compare: float | None = None,
    checkpoint: str | os.PathLike | None = None,
    every: int | None = None,
    resume: str | os.PathLike | None = None,
    resume_anyway: bool = False,
    data_id: str | None = None,
    progress: bool = True,
    seed: int = 0,
    callback: Callable[[History], None] | None = None,
) -> FitResult:
    """Maximise E log lik − λ KL[q‖prior] over minibatches: `posterior.fit(loader, epochs=20)`.

    What is learned is `posterior.parameters()`: the variational parameters, and those of likelihood and prior. The
    last step, the average over the last quarter of the steps and, of a staged fit, the posterior without its factor
    are compared on common draws, and the best is kept. Ctrl-C ends the fit with what there is.

    Args:
        posterior: what to fit.
        loader: a `DataLoader`, or any re-iterable of batches. N is the length of its data set unless the model has it.
        epochs, steps: how long: one of them. A step takes `accumulate` batches. With neither, the network is taken to
            be trained, and the posterior is placed around it without a step: `fit(loader, validation=held_out)`.
        lr: the highest learning rate of the default optimizer, Adam; 0.02 if not given.
        optimizer: a torch optimizer, or a function from parameters to one; without weight decay. Or `Soap()`, which
            preconditions the means: for deep networks that are trained from scratch.
        scheduler: a torch scheduler of that optimizer, or a function from it to one, called after every step;
            by default a linear warm-up and a cosine decay to zero.
        warmup: the fraction of the steps in which the learning rate rises.
        clip: the largest norm of the gradient of −elbo/N; None for no limit.
        accumulate: how many batches share one step.
        kl_warmup: the fraction of the steps in which λ rises from zero. "auto": a quarter where nothing has been
            learned yet, none otherwise. At λ = 1 from the start, units are switched off before they have learned.
        temperature: λ. Other than one, what is found is not the posterior; the reported ELBO is always at λ = 1.
            "validated": a path of fits from λ = 0.01 through 1, each from the one before and of as many steps; for
            likelihoods of pixels on to their number. The best by held-out density is kept, and `result.at_one`.
        groups, coupling, estimator: as in `elbo`.
        staged: of families with a low-rank factor first mean and scales, then after 40 % of the steps the factor too.
            "auto": where nothing has been learned yet.
        average: average the last quarter of the iterates, and keep that where its ELBO is not lower.
        precision: `torch.bfloat16` or `torch.float16` runs the network, and nothing else, in mixed precision. A step
            whose gradient overflows in float16 is left out, and halves the scale of the gradients in the network.
        device: where the posterior is moved; batches follow it.
        parallel: over the ranks of a `torch.distributed` process group. "data": each takes its part of every batch,
            of w times the loader's batch size; "draws": each draws weights of its own for the same batch; None: they
            know nothing of each other. "auto" is "data" where there is a group. See docs/distributed.md.
        capture: on a GPU, with the default optimizer, run the whole step as one CUDA graph where the network allows.
        compile: run the network through `torch.compile`, one draw at a time: pays where steps are many and large.
        stop: where the ELBO no longer rises over a quarter of the steps, looked at twice, let the learning rate fall
            and end the fit a quarter of the steps later.
        restarts: how often a fit that ends stuck, with predictions that hardly depend on the input or noise at the
            targets' own spread, is begun again at a fresh draw of the network's initialisation; the best by ELBO is
            kept. Each takes as many steps again; the progress bar says so. Not where the posterior was fitted before,
            nor over several ranks.
        start: "trained" starts at the network's present values with the curvature's scales, see `start_trained`.
        mean: "held" keeps the mean where it is, at the trained weights of a fit with start="trained" or of a linearised
            network, and fits the rest: predictions lie around the network's own. A prior that learns its scales
            then learns them in a first half of the steps, at the optimum with a free mean, and never from the
            trained weights, whose leftover noise of initialisation it would read as signal.
        validation: held-out data, as `loader`: they take no part in the fit, and choose what is kept. Their log
            density, of the average over draws, is in the history once an epoch. Where the network is not trained yet,
            also a fraction of the loader's data set, which is then held out.
        validation_groups: with a fraction, for each item what must stay on one side: its patient.
        keep: with validation, the "widest" posterior within 0.005 nats of the best held-out log density, or the "best".
        compare: how many passes over the data, of one draw each, the comparison at the end may take, of all candidates
            together. By default a tenth of the fit's own, of which each step's draws count three times, or as many as
            10⁷ products of weights and observations; `result.comparison` says what was read.
        checkpoint: a directory to which all of the fit's state is written, atomically, every `every` steps (an epoch
            by default) and at its end.
            The directory belongs to this fit: one that holds checkpoints of another is refused.
        resume: a directory of checkpoints, or one of them, to go on from: give the same posterior, loader and options.
            Where the directory holds none, the fit starts from the beginning. Another problem (data, likelihood, prior,
            network, family) is refused with what differs. A finished fit goes on where more epochs or steps are asked
            for than it made, with a new cycle of the learning rate.
        resume_anyway: go on where the problem differs.
        data_id: what you call the data: a stream cannot be known by anything else.
        progress: show a bar, or lines where there is no terminal.
        seed: of all randomness: draws, the order of the data, dropout.
        callback: called with the history after every step; it may raise KeyboardInterrupt to end the fit.

    Example:
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        >>> bayes = variationalize(torch.nn.Linear(3, 1), likelihoods.Gaussian(noise=1.0), MeanField())
        >>> result = bayes.fit(loader, epochs=2, progress=False)
        >>> result.steps, result.verdict
        (8, 'too few steps to tell whether it has converged')
    """
    given = {name: value for name, value in locals().items() if name not in ("posterior", "loader", "device")}
    options = FitOptions(**given)
    if device is not None:
        posterior.to(device)
    return run_fit(posterior, loader, options)


def run_fit(posterior: PosteriorBase, loader: Iterable[Any], options: FitOptions, label: str = "") -> FitResult:
    """A fit, and where it ends stuck others; `label` says in the progress bar what it is for."""
    if not torch.is_grad_enabled():
        raise ValueError("a fit needs gradients: call it outside torch.no_grad() and torch.inference_mode()")
    if options.is_around:
        check_around(posterior, options)
    if options.compile and posterior.model.linearised_at is not None:
        raise ValueError("compile=True is for the network itself: a linearised one needs its derivatives; leave it out")
    # before anything has changed
    check_precision(options.precision, posterior.net, posterior.space.dtype, posterior.device)
    if isinstance(options.validation, int | float):
        loader, held_out = split_off(loader, options.validation, options.validation_groups, options.seed)
        options = replace(options, validation=held_out, validation_groups=None)
    remember_choice(posterior, options)
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
            notes = set_num_data(posterior, batches) + unused_batch_norm(posterior)
            if options.is_around:
                posterior.last_fit = fit_around(posterior, batches, options, notes)
                return posterior.last_fit
            may_restart = ranks.size == 1 and _may_restart(posterior, options, found)
            begun = copied(posterior.outside_family())
            run = _begin(posterior, batches, options, ranks, found)
            run.notes = notes + run.notes
            stopped = _loop(run, options, label)
            if options.checkpoint is not None:
                checkpoints.save(run, options.checkpoint)
            result = run.finish(stopped)
    finally:
        ranks.close()
    posterior.last_fit = result
    if may_restart and not stopped:
        settings = run.settings

        def fit_again(seed: int, name: str, label: str) -> FitResult:
            where = {key: folder(getattr(options, key), name) for key in ("checkpoint", "resume")}
            again = replace(
                options, epochs=None, steps=settings.total, kl_warmup=settings.kl_warmup, staged=settings.staged,
                restarts=0, seed=seed, **where,
            )  # fmt: skip
            return run_fit(posterior, loader, again, label)

        seen = Reread(batches, run.compared)
        posterior.last_fit = again_if_stuck(posterior, result, begun, seen, options.restarts, options.seed, fit_again)
    return posterior.last_fit


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


def _begin(posterior: PosteriorBase, batches: Batches, options: FitOptions, ranks: Ranks, found: Found | None) -> Run:
    """A run at its first step, or at the one that a checkpoint has."""
    settings = _settings(posterior, batches, options, found)
    known = None
    if options.checkpoint is not None or found is not None:
        known = fingerprint(posterior, batches, options.data_id)
    if options.start == "trained" and found is None:
        start_trained(posterior, batches, options.number(), options.seed)
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
        for family in posterior.family.families():
            family.learn_all()
        for parameter in posterior.family.parameters():
            parameter.requires_grad_(True)


def _settings(posterior: PosteriorBase, batches: Batches, options: FitOptions, found: Found | None) -> Settings:
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
    staged = bool(staged and families and steps >= FEWEST_STAGED)
    return options.settings(steps, kl_warmup, staged, posterior.model.num_data)


def _may_restart(posterior: PosteriorBase, options: FitOptions, found: Found | None) -> bool:
    if not options.restarts or options.start is not None or (found is None and not _fresh(posterior)):
        return False
    # an optimizer that is made already remembers the first fit
    return not isinstance(options.optimizer, torch.optim.Optimizer) and not isinstance(options.scheduler, LRScheduler)


def _fresh(posterior: PosteriorBase) -> bool:
    """Whether all scales are still those that the family starts with; False where it has none."""
    said = [fresh for family in posterior.family.families() if (fresh := family.is_fresh()) is not None]
    return bool(said) and all(said)
