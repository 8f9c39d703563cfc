"""`fit`: what its options mean, and a run set up from them."""

import os
from collections.abc import Callable, Iterable
from math import inf
from typing import TYPE_CHECKING, Any, Literal

import torch

from . import resuming
from .batches import Batches
from .couplings import Coupling, paired
from .elbo import Estimator
from .families.precision import StructuredPrecision
from .families.structured import StructuredNormal
from .history import FitResult, History
from .optimizing import OptimizerLike, SchedulerLike
from .progress import Progress
from .run import Options, Run, factored

if TYPE_CHECKING:
    from .variationalize import Posterior


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
    kl_warmup: float = 0.0,
    temperature: float = 1.0,
    groups: int = 1,
    coupling: Coupling = paired,
    estimator: Estimator = "path",
    staged: bool | Literal["auto"] = "auto",
    average: bool = True,
    precision: torch.dtype | None = None,
    device: torch.device | str | None = None,
    stop: bool = True,
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
        kl_warmup: the fraction of the steps in which λ rises from zero.
        temperature: λ. Other than one, what is found is not the posterior; the reported ELBO is always at λ = 1.
        groups, coupling, estimator: as in `elbo`.
        staged: of families with a low-rank factor first mean and scales, then after 40 % of the steps the factor too.
            "auto": where nothing has been learned yet.
        average: average the last quarter of the iterates, and keep that where its ELBO is not lower.
        precision: `torch.bfloat16` runs the network, and nothing else, in mixed precision.
        device: where the posterior is moved; batches follow it.
        stop: where the ELBO no longer rises over a quarter of the steps, looked at twice, let the learning rate fall
            and end the fit a quarter of the steps later.
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
    _check(epochs, steps, warmup, kl_warmup, temperature, accumulate, clip, staged, precision, start, every)
    if device is not None:
        posterior.to(device)
    if not torch.is_grad_enabled():
        raise ValueError("a fit needs gradients: call it outside torch.no_grad() and torch.inference_mode()")
    where = next(posterior.parameters()).device
    batches = Batches(loader, seed, where)
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
    if start == "trained" and found is None:
        from .refining import start_trained

        start_trained(posterior, batches)
    options = Options(
        steps, accumulate, groups, resuming.name_of(coupling), estimator, float(temperature), kl_warmup, warmup, clip,
        bool(staged and families and steps >= 10), average, stop, str(precision), seed, posterior.model.num_data,
    )  # fmt: skip
    run = Run(posterior, batches, options, coupling, estimator)
    run.prepare(optimizer, scheduler, lr)
    run.notes += notes
    if found is not None:
        run.notes += resuming.restore(run, found)
    elif resume is not None:
        run.notes.append(f"nothing to resume in {resume}: started from the beginning")
    if every is None:
        every = max(1, -(-batches.length // accumulate)) if batches.length else 500
    bar = Progress(run.schedule.end, run.step, progress)
    before = posterior.model.precision
    try:
        run.loop(bar, precision, checkpoint, every, callback)
        stopped = False
    except KeyboardInterrupt:
        run.back_to_step()
        stopped = True
    finally:
        bar.close()
        posterior.model.precision = before
        run.schedule.reset()
        for family in families:
            family.factor.requires_grad_(True)
    if checkpoint is not None:
        resuming.save(run, checkpoint)
    return run.finish(stopped)


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
    precision: Any, start: Any, every: Any,
) -> None:  # fmt: skip
    if (epochs is None) == (steps is None):
        raise ValueError(f"give one of epochs= and steps=, got epochs={epochs!r} and steps={steps!r}")
    for name, value in (("epochs", epochs), ("steps", steps), ("accumulate", accumulate), ("every", every)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} must be an integer ≥ 1, got {value!r}")
    for name, value in (("warmup", warmup), ("kl_warmup", kl_warmup)):
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise ValueError(f"{name} is a fraction of the steps, from 0 to below 1, got {value!r}")
    for name, value in (("temperature", temperature), ("clip", clip)):
        if value is None and name == "clip":
            continue
        if not isinstance(value, int | float) or not 0 < value < inf:
            raise ValueError(f"{name} must be a positive number, got {value!r}")
    if staged not in (True, False, "auto"):
        raise ValueError(f'staged must be True, False or "auto", got {staged!r}')
    if precision not in (None, torch.bfloat16):
        raise ValueError(f"precision must be None or torch.bfloat16, got {precision!r}: float16 over- and underflows")
    if start not in (None, "trained"):
        raise ValueError(f'start must be None or "trained", got {start!r}')
