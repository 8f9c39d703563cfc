"""`fit`: what its options mean, and a run set up from them."""

import os
from collections.abc import Callable, Iterable
from math import inf
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.func import functional_call
from torch.optim.lr_scheduler import LRScheduler

from . import restarting, resuming
from .batches import Batches
from .couplings import Coupling, paired
from .distributed import LostRankError, Parallel, Ranks
from .elbo import Estimator
from .families.mean_field import MeanField
from .families.precision import StructuredPrecision
from .families.structured import StructuredNormal
from .history import FitResult, History
from .mixed_precision import check_precision
from .optimizing import OptimizerLike, SchedulerLike
from .progress import Progress
from .run import Options, Run, factored

if TYPE_CHECKING:
    from .variationalize import Posterior

#: The part of the steps in which λ rises to one, measured on UCI networks: see docs/optimisation.md.
KL_WARMUP = 0.25


def fit(
    posterior: "Posterior",
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
    temperature: float = 1.0,
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
    checkpoint: str | os.PathLike | None = None,
    every: int | None = None,
    resume: str | os.PathLike | None = None,
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
        epochs, steps: how long: one of them. A step takes `accumulate` batches.
        lr: the highest learning rate of the default optimizer, Adam; 0.02 if not given.
        optimizer: a torch optimizer, or a function from parameters to one; without weight decay.
        scheduler: a torch scheduler of that optimizer, or a function from it to one, called after every step;
            by default a linear warm-up and a cosine decay to zero.
        warmup: the fraction of the steps in which the learning rate rises.
        clip: the largest norm of the gradient of −elbo/N; None for no limit.
        accumulate: how many batches share one step.
        kl_warmup: the fraction of the steps in which λ rises from zero. "auto": a quarter where nothing has been
            learned yet, none otherwise. At λ = 1 from the start, units are switched off before they have learned.
        temperature: λ. Other than one, what is found is not the posterior; the reported ELBO is always at λ = 1.
        groups, coupling, estimator: as in `elbo`.
        staged: of families with a low-rank factor first mean and scales, then after 40 % of the steps the factor too.
            "auto": where nothing has been learned yet.
        average: average the last quarter of the iterates, and keep that where its ELBO is not lower.
        precision: `torch.bfloat16` or `torch.float16` runs the network, and nothing else, in mixed precision. A step
            whose gradient overflows in float16 is left out, and halves the scale of the gradients in the network.
        device: where the posterior is moved; batches follow it.
        parallel: over the ranks of a `torch.distributed` process group. "data": each takes its part of every batch,
            of w times the loader's batch size; "draws": each draws weights of its own for the same batch; None: they
            know nothing of each other. "auto" is "data" where there is a group. See `structvi.distributed`.
        capture: on a GPU, with the default optimizer, run the whole step as one CUDA graph where the network allows.
        compile: run the network through `torch.compile`, one draw at a time: pays where steps are many and large.
        stop: where the ELBO no longer rises over a quarter of the steps, looked at twice, let the learning rate fall
            and end the fit a quarter of the steps later.
        restarts: how often a fit that ends stuck, with predictions that hardly depend on the input or noise at the
            targets' own spread, is begun again at a fresh draw of the network's initialisation; the best by ELBO is
            kept. Not where the posterior was fitted before, nor over several ranks.
        start: "trained" starts at the network's present values with scales from a diagonal Fisher information.
        checkpoint: a directory to which all of the fit's state is written, atomically, every `every` steps (an epoch
            by default) and at its end.
        resume: a directory of checkpoints to go on from: give the same posterior, loader and options. Where it holds
            none, the fit starts from the beginning.
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
    _check(epochs, steps, warmup, kl_warmup, temperature, accumulate, clip, staged, start, every)
    if not isinstance(restarts, int) or isinstance(restarts, bool) or restarts < 0:
        raise ValueError(f"restarts must be an integer ≥ 0, got {restarts!r}")
    if device is not None:
        posterior.to(device)
    if not torch.is_grad_enabled():
        raise ValueError("a fit needs gradients: call it outside torch.no_grad() and torch.inference_mode()")
    where = next(posterior.parameters()).device
    check_precision(precision, posterior.net, posterior.space.dtype, where)  # before anything has changed
    ranks = Ranks(parallel, posterior)
    batches = Batches(loader, seed, where, ranks.part)
    notes = _set_num_data(posterior, batches) + _unused_batch_norm(posterior)
    if epochs is not None:
        if batches.length is None:
            raise ValueError("the loader does not know how many batches it has: give steps= instead of epochs=")
        steps = epochs * -(-batches.length // accumulate)
    assert steps is not None
    families = factored(posterior)
    found = None if resume is None else resuming.latest(resume)
    if staged == "auto" and found is not None:
        staged = found.description["options"]["staged"]
    elif staged == "auto":
        staged = bool(families) and all(_untouched(family) for family in families)
    if kl_warmup == "auto" and found is not None:
        kl_warmup = found.description["options"]["kl_warmup"]
    elif kl_warmup == "auto":
        kl_warmup = KL_WARMUP if start is None and _fresh(posterior) else 0.0
    assert isinstance(kl_warmup, float | int)
    may_restart = restarts > 0 and start is None and ranks.size == 1 and (found is not None or _fresh(posterior))
    # an optimizer that is made already remembers the first fit
    may_restart &= not isinstance(optimizer, torch.optim.Optimizer) and not isinstance(scheduler, LRScheduler)
    begun = {n: p.detach().clone() for n, p in posterior.named_parameters() if not n.startswith("family.")}
    if start == "trained" and found is None:
        from .refining import start_trained

        start_trained(posterior, batches)
    options = Options(
        steps, accumulate, groups, resuming.name_of(coupling), estimator, float(temperature), kl_warmup, warmup, clip,
        bool(staged and families and steps >= 10), average, stop, str(precision), seed, posterior.model.num_data,
    )  # fmt: skip
    run = Run(posterior, batches, options, coupling, estimator, ranks)
    run.prepare(optimizer, scheduler, lr, capture)
    run.notes += notes
    if found is not None:
        run.notes += resuming.restore(run, found)
    elif resume is not None:
        run.notes.append(f"nothing to resume in {resume}: started from the beginning")
    if every is None:
        every = max(1, -(-batches.length // accumulate)) if batches.length else 500
    ranks.start(run, None if checkpoint is None else every)
    bar = Progress(run.schedule.end, run.step, progress and ranks.rank == 0)
    if compile:
        posterior.model.compiled = torch.compile(functional_call)
    before, posterior.model.precision = posterior.model.precision, precision or posterior.model.precision
    try:
        with ranks.interruptible():
            run.loop(bar, checkpoint, every, callback)
        stopped = False
    except KeyboardInterrupt:
        run.back_to_step()
        stopped = True
    except LostRankError as error:
        run.back_to_step()
        if checkpoint is not None:
            error.add_note(resuming.save_alone(run, checkpoint))
        raise
    finally:
        bar.close()
        posterior.model.precision = before
        posterior.model.compiled = None
        run.schedule.reset()
        for family in families:
            family.factor.requires_grad_(True)
    if checkpoint is not None:
        resuming.save(run, checkpoint)
    result = run.finish(stopped)
    ranks.close()
    posterior.last_fit = result
    if not may_restart or stopped:
        return result

    def fit_again(seed: int, name: str) -> FitResult:
        return fit(
            posterior, loader, steps=steps, lr=lr, optimizer=optimizer, scheduler=scheduler, warmup=warmup, clip=clip,
            accumulate=accumulate, kl_warmup=kl_warmup, temperature=temperature, groups=groups, coupling=coupling,
            estimator=estimator, staged=staged, average=average, precision=precision, parallel=parallel,
            capture=capture, compile=compile, stop=stop, restarts=0, checkpoint=restarting.folder(checkpoint, name),
            every=every, resume=restarting.folder(resume, name), progress=progress, seed=seed, callback=callback,
        )  # fmt: skip

    seen = list(batches.everything(run.compared))
    posterior.last_fit = restarting.again_if_stuck(posterior, result, begun, seen, restarts, seed, fit_again)
    return posterior.last_fit


def _fresh(posterior: "Posterior") -> bool:
    """Whether all scales are still those that the family starts with; False where it has none."""
    found = False
    for module in posterior.family.modules():
        if isinstance(module, MeanField | StructuredNormal | StructuredPrecision) and module.space is not None:
            start = (module.initial_scale * module.space.scale).log().to(module.log_scale)
            if (rows := getattr(module, "rows", None)) is not None:  # this rank's of a sharded family
                start = start[rows.slice]
            if not torch.allclose(module.log_scale, start, rtol=0, atol=1e-6):
                return False
            found = True
    return found


def _untouched(family: StructuredNormal | StructuredPrecision) -> bool:
    """Whether nothing has been learned yet: the scales are still those that the factor's unit was set to."""
    return bool(torch.isclose(family.log_scale, family.unit.log(), rtol=0, atol=1e-6).all())


def _set_num_data(posterior: "Posterior", batches: Batches) -> list[str]:
    model = posterior.model
    if model._num_data is None:
        if batches.num_data is None:
            raise ValueError(
                "N, the number of observations, is needed to weigh a minibatch against the prior, and this loader does "
                "not know it: give num_data= to variationalize, or a DataLoader over a data set with a length"
            )
        model.num_data, model.num_data_of_loader = batches.num_data, True
    elif model.num_data_of_loader and batches.num_data not in (None, model.num_data):
        before, model.num_data = model.num_data, batches.num_data
        return [f"N = {model.num_data}, of this loader's data set; in the fit before it was {before}"]
    elif batches.num_data is not None and batches.num_data != model.num_data:
        return [
            f"N = {model.num_data} as the model was told; the loader's data set has {batches.num_data} observations"
        ]
    return []


def _unused_batch_norm(posterior: "Posterior") -> list[str]:
    """Layers frozen at the statistics they were made with do not normalise."""
    if posterior.batch_norm == "reestimated":
        return []
    unused = [
        name
        for name, module in posterior.net.named_modules()
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        and module.running_mean is not None
        and module.running_var is not None
        and bool((module.running_mean == 0).all() and (module.running_var == 1).all())
    ]
    if not unused:
        return []
    return [
        f"batch norm has seen no data in {', '.join(unused)}: frozen at mean 0 and variance 1 it does not normalise; "
        'train the network first, or variationalize with batch_norm="reestimated"'
    ]


def _check(
    epochs: Any, steps: Any, warmup: Any, kl_warmup: Any, temperature: Any, accumulate: Any, clip: Any, staged: Any,
    start: Any, every: Any,
) -> None:  # fmt: skip
    if (epochs is None) == (steps is None):
        raise ValueError(f"give one of epochs= and steps=, got epochs={epochs!r} and steps={steps!r}")
    for name, value in (("epochs", epochs), ("steps", steps), ("accumulate", accumulate), ("every", every)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} must be an integer ≥ 1, got {value!r}")
    for name, value in (("warmup", warmup), ("kl_warmup", 0.0 if kl_warmup == "auto" else kl_warmup)):
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise ValueError(f"{name} is a fraction of the steps, from 0 to below 1, got {value!r}")
    for name, value in (("temperature", temperature), ("clip", clip)):
        if value is None and name == "clip":
            continue
        if not isinstance(value, int | float) or not 0 < value < inf:
            raise ValueError(f"{name} must be a positive number, got {value!r}")
    if staged not in (True, False, "auto"):
        raise ValueError(f'staged must be True, False or "auto", got {staged!r}')
    if start not in (None, "trained"):
        raise ValueError(f'start must be None or "trained", got {start!r}')
