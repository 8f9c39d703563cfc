"""`fit`: train a posterior on minibatches."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from ..distributed.collectives import LostRankError
from ..distributed.ranks import Ranks
from ..families.low_rank import factors
from ..files import fit_checkpoint
from ..files.fit_checkpoint import Found
from ..objective import Estimator
from ..optim.adam import OptimizerLike, make_optimizer
from ..util.checks import check_integer, check_positive, check_seed, with_hints
from ..util.progress import Progress
from .checkpoint import Checkpoint, restore, save
from .checks import notes_on_data, remember_choice
from .data import Batches, warn_of_seen
from .fingerprint import fingerprint
from .finish import finish
from .loop import KL_WARMUP, Fit, MakeScheduler, Schedule, make_scheduler
from .result import FitResult, History
from .step import Compute, Step

if TYPE_CHECKING:
    from ..posterior import Posterior

#: steps below which a fit is not cut into stages
FEWEST_STAGED = 10
#: steps between checkpoints, if the loader does not know the length of an epoch
EVERY = 500


@with_hints
def fit(
    posterior: "Posterior",
    loader: Iterable[Any],
    *,
    epochs: int | None = None,
    steps: int | None = None,
    lr: float | None = None,
    optimizer: OptimizerLike | None = None,
    schedule: Schedule | MakeScheduler | None = None,
    clip: float | None = 10.0,
    accumulate: int = 1,
    kl_weight: float = 1.0,
    estimator: Estimator = Estimator(),
    validation: Iterable[Any] | None = None,
    checkpoint: Checkpoint | None = None,
    compute: Compute | None = None,
    progress: bool = True,
    seed: int = 0,
    callback: Callable[[History], None] | None = None,
) -> FitResult:
    """Maximise E log lik − λ KL[q‖prior] over minibatches, and return the result.

    A fit learns `posterior.parameters()`: the parameters of the family, of likelihood and prior. At the end it compares
    the last step with the average over the last quarter of the steps, on common draws, and keeps the better one. A
    staged fit also compares the posterior without its factor. Ctrl-C ends the fit with the posterior of the last step.
    Another fit starts from a fitted posterior.

    Args:
        posterior: what to fit.
        loader: a `DataLoader`, or any re-iterable of batches. N is the length of its data set unless the model has it.
        epochs, steps: the length: one of them. A step takes `accumulate` batches. Around a network that is trained
            already use `laplace(loader, validation=held_out)`; `fit` can train the result further.
        lr: the highest learning rate of the default optimizer, Adam; 0.02 if not given.
        optimizer: a torch optimizer, or a function from parameters to one; without weight decay. `vi.optim.Soap(bayes)`
            preconditions the means of deep networks from scratch; at λ = 1 `vi.optim.NaturalGradient(bayes)`.
        schedule: `vi.Schedule(..)` for learning rate, λ and stages; or a function from the optimizer to a torch
            scheduler, which is called after every step of the whole length.
        clip: the largest norm of the gradient of −elbo/N; None for no limit.
        accumulate: how many batches share one step.
        kl_weight: λ. For λ ≠ 1 the result is not the posterior; the reported ELBO is always at λ = 1.
        estimator: `vi.Estimator(kind, groups, coupling)` of the gradient.
        validation: held-out data, as `loader`: they take no part in the fit, and select what is kept. Their log density
            is in the history once an epoch.
        checkpoint: `vi.Checkpoint(directory)` to write the fit's state, and to resume.
        compute: `vi.Compute(..)` for mixed precision, compilation, CUDA graphs and several processes.
        progress: show one live line, in a terminal or a notebook; elsewhere ten plain ones.
        seed: of all randomness: draws, the order of the data, dropout.
        callback: called with the history after every step; it may raise KeyboardInterrupt to end the fit.

    Example:
        >>> import torch
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        >>> bayes = variationalize(torch.nn.Linear(3, 1), likelihoods.Gaussian(noise=1.0), MeanField())
        >>> result = bayes.fit(loader, epochs=2, progress=False)
        >>> result.steps, result.verdict
        (8, 'too few steps to tell whether it has converged')
    """
    given = locals()
    options = Options(**{one.name: given[one.name] for one in fields(Options)})
    ranks = Ranks(options.computing.parallel, posterior.family)
    try:
        found = None if checkpoint is None else checkpoint.found(ranks.rank)
        one = make_fit(posterior, loader, options, ranks, found)
        directory = None if checkpoint is None else checkpoint.directory
        every = (checkpoint and checkpoint.every) or one.steps_an_epoch or EVERY
        with recovering(one, options, every) as bar:
            one.loop(bar, directory, every, callback)
        if directory is not None:
            save(one, directory)
        posterior.last_fit = result = finish(one)
    finally:
        ranks.close()
    return result


@dataclass(frozen=True)
class Options:
    """The arguments of `fit`, checked."""

    epochs: int | None
    steps: int | None
    lr: float | None
    optimizer: OptimizerLike | None
    schedule: Schedule | MakeScheduler | None
    clip: float | None
    accumulate: int
    kl_weight: float
    estimator: Estimator
    validation: Iterable[Any] | None
    checkpoint: Checkpoint | None
    compute: Compute | None
    progress: bool
    seed: int
    callback: Callable[[History], None] | None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                f"a fit needs a length, got epochs={self.epochs!r} and steps={self.steps!r}: "
                "fit(loader, epochs=20) trains the posterior; around a network that is trained already use "
                "laplace(loader, validation=held_out)"
            )
        for name in ("epochs", "steps", "accumulate"):
            check_integer(name, getattr(self, name), optional=name != "accumulate")
        for name in ("clip", "kl_weight"):
            if getattr(self, name) is not None:
                check_positive(getattr(self, name), name)
        check_seed(self.seed)
        if isinstance(self.validation, int | float):
            raise TypeError(f"validation must be held-out data, as the loader, got {self.validation!r}: split the data")
        for name, kind in (("estimator", Estimator), ("checkpoint", Checkpoint), ("compute", Compute)):
            value = getattr(self, name)
            if not isinstance(value, kind | None):
                raise TypeError(f"{name} must be vi.{kind.__name__}(..), got {value!r}")
        if not isinstance(self.schedule, Schedule | None) and not callable(self.schedule):
            raise TypeError(
                f"schedule must be vi.Schedule(..) or a function from the optimizer to a torch scheduler, "
                f"got {self.schedule!r}"
            )

    @property
    def scheduler(self) -> MakeScheduler | None:
        return None if isinstance(self.schedule, Schedule | None) else self.schedule

    @property
    def times(self) -> Schedule:
        """The schedule; beside a scheduler of the user's, which has a course of its own, the default without a stop."""
        if self.schedule is None:
            return Schedule()
        return self.schedule if isinstance(self.schedule, Schedule) else Schedule(stop=False)

    @property
    def computing(self) -> Compute:
        return self.compute or Compute()


def make_fit(
    posterior: "Posterior", loader: Iterable[Any], options: Options, ranks: Ranks, found: Found | None = None
) -> Fit:
    """Return a fit at its first step, or at the one that a checkpoint has."""
    if not torch.is_grad_enabled():
        raise ValueError("a fit needs gradients: call it outside torch.no_grad() and torch.inference_mode()")
    options.computing.check(posterior)
    if options.validation is not None:
        warn_of_seen(loader, options.validation)
    remember_choice(posterior, options.validation, options.seed)
    data = Batches(loader, options.seed, posterior.device, ranks.part)
    data.share(ranks)
    validation = options.validation if options.computing.precision is None else None  # which casts inputs
    notes = notes_on_data(posterior, data, validation, options.estimator.kind != "log_q")
    made = make_optimizer(posterior, options.optimizer, options.lr)
    scheduler = make_scheduler(made, options.scheduler)
    make_step = Step(
        posterior, made, torch.Generator(posterior.device).manual_seed(options.seed), estimator=options.estimator,
        clip=options.clip, capture=options.computing.capture, ranks=ranks,
    )  # fmt: skip
    settings = _settings(posterior, data, options, found)
    kept = {name: value for name, value in made.defaults.items() if name != "lr"}
    settings["optimizer"] = f"{type(made).__name__} with {kept}"
    settings["learning rates"] = [float(group["lr"]) for group in made.param_groups]
    show = options.progress and ranks.rank == 0
    one = Fit(posterior, data, settings, make_step, scheduler, options.validation, show)
    one.notes = notes
    kept = options.checkpoint
    if kept is not None:
        known = fingerprint(posterior, data)
        one.problem = known.parts
        if found is not None:
            one.notes += restore(one, found)
            if known.unchecked:
                one.notes.append(f"resumed without a look at {'; '.join(known.unchecked)}")
        elif kept.resume:
            one.notes.append(f"nothing to resume in {kept.directory}: started from the beginning")
    return one


def release(posterior: "Posterior") -> None:
    """Let all low-rank factors learn again after a fit, however it ended."""
    for factor in factors(posterior.family):
        factor.requires_grad_(True)


def _settings(posterior: "Posterior", data: Batches, options: Options, found: Found | None) -> dict[str, Any]:
    """Return what a resumed fit must share; "auto" is decided by whether the posterior was fitted before."""
    steps, times, estimator = options.steps, options.times, options.estimator
    if options.epochs is not None:
        if data.length is None:
            raise ValueError("the loader does not know how many batches it has: give steps= instead of epochs=")
        steps = options.epochs * -(-data.length // options.accumulate)
    assert steps
    then = {} if found is None else found.description["settings"]
    is_first = posterior.fit_status is None
    staged = then.get("staged", is_first) if times.staged == "auto" else times.staged
    kl_warmup = then.get("kl_warmup", KL_WARMUP if is_first else 0.0) if times.kl_warmup == "auto" else times.kl_warmup
    return {
        "steps": steps, "accumulate": options.accumulate, "estimator": estimator.kind, "groups": estimator.groups,
        "coupling": getattr(estimator.coupling, "__qualname__", repr(estimator.coupling)), "clip": options.clip,
        "kl_weight": float(options.kl_weight), "kl_warmup": float(kl_warmup), "warmup": times.warmup,
        "hold": times.hold, "staged": bool(staged and factors(posterior.family) and steps >= FEWEST_STAGED),
        "stop": times.stop, "precision": str(options.computing.precision), "seed": options.seed,
        "num_data": posterior.model.num_data,
    }  # fmt: skip


@contextmanager
def recovering(one: Fit, options: Options, every: int) -> Iterator[Progress | None]:
    """Give the bar of the steps that are made inside. However they end, the posterior can be used again.

    Args:
        one: a Ctrl-C inside ends the block and sets `one.stopped`.
        options: of the fit.
        every: steps between checkpoints.
    """
    posterior, ranks = one.posterior, one.ranks
    directory = None if options.checkpoint is None else options.checkpoint.directory
    common = {
        **one.settings,
        "step resumed from": one.step,
        "family": repr(posterior.family),
        "steps between checkpoints": every if ranks.sharded and directory is not None else None,
    }
    ranks.start(common, one.learned, [*posterior.net.parameters(), *posterior.net.buffers()])
    bar = Progress(one.end, one.step) if one.show else None
    try:
        with ranks.interruptible(), options.computing.applied(posterior):
            yield bar
    except KeyboardInterrupt:
        one.back_to_step()
        one.stopped = True
    except (torch.OutOfMemoryError, LostRankError) as error:
        one.back_to_step()
        note = f"the posterior is as it was after step {one.step}"
        if directory is not None:
            if ranks.size == 1 or not ranks.sharded:  # a lost rank's rows are nowhere else
                save(one, directory)
            newest = fit_checkpoint.files(directory)[:1]
            note += f"; go on from {newest[0]}" if newest else f"; no checkpoint had been written to {directory}"
        error.add_note(note)
        raise
    finally:
        if bar is not None:
            bar.close()
        one.set_rates(1.0)  # the optimizer may be the user's
        release(posterior)
