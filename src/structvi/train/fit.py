"""`fit`: what it takes, and what it says of it."""

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..couplings import Coupling, paired
from ..distributed.ranks import Parallel
from ..objective import Kind
from .members import fit_members, temperatures_of
from .optimizers import OptimizerLike
from .options import FitOptions
from .result import FitResult, History
from .running import run_fit
from .schedule import SchedulerLike

if TYPE_CHECKING:
    from ..posterior import Posterior


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
    hold: float = 0.0,
    clip: float | None = 10.0,
    accumulate: int = 1,
    kl_warmup: float | Literal["auto", "paced"] = "auto",
    temperature: float | Sequence[float] | Literal["validated"] = 1.0,
    groups: int = 1,
    coupling: Coupling = paired,
    estimator: Kind = "path",
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
    checkpoint: str | os.PathLike[str] | None = None,
    every: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    resume_anyway: bool = False,
    data_id: str | None = None,
    progress: bool = True,
    seed: int = 0,
    callback: Callable[[History], None] | None = None,
    members: int = 1,
    weights: Literal["equal", "stacked"] = "equal",
) -> FitResult:
    """Maximise E log lik − λ KL[q‖prior] over minibatches: `posterior.fit(loader, epochs=20)`.

    What is learned is `posterior.parameters()`: the variational parameters, and those of likelihood and prior. The
    last step, the average over the last quarter of the steps and, of a staged fit, the posterior without its factor
    are compared on common draws, and the best by that objective is kept. Ctrl-C ends the fit with what there is.

    Args:
        posterior: what to fit.
        loader: a `DataLoader`, or any re-iterable of batches. N is the length of its data set unless the model has it.
        epochs, steps: how long: one of them. A step takes `accumulate` batches. Around a network
            that is trained already use `laplace(loader, validation=held_out)`.
        lr: the highest learning rate of the default optimizer, Adam; 0.02 if not given.
        optimizer: a torch optimizer, or a function from parameters to one; without weight decay. `vi.optim.Soap(bayes)`
            preconditions the means of deep networks from scratch; at λ = 1 `vi.optim.NaturalGradient(bayes)`.
        scheduler: a torch scheduler of that optimizer, or a function from it to one, called after every step;
            by default a linear warm-up and a cosine decay to zero.
        warmup: the fraction of the steps in which the learning rate rises.
        hold: the fraction of the steps after which it falls, 0.5 for deep networks from scratch with `Soap`; by
            default from the end of the warm-up on.
        clip: the largest norm of the gradient of −elbo/N; None for no limit.
        accumulate: how many batches share one step.
        kl_warmup: the fraction of the steps in which λ rises from zero. "auto": a quarter where nothing has been
            learned yet, none otherwise. At λ = 1 from the start, units are switched off before they have learned.
            "paced": in a tenth of the steps where the likelihood of the data bears it; where that has just fallen by a
            twentieth of what was learned, λ waits, and rises within half of the steps at the latest.
        temperature: λ. Other than one, what is found is not the posterior; the reported ELBO is always at λ = 1.
            "validated": a path of fits from λ = 0.01 through 1, each from the one before and of as many steps; for
            likelihoods of pixels on to their number. The best by held-out density is kept, and `result.at_one`.
            With members=, also a list: member c has the c-th of them, and from the first on again.
        groups, coupling, estimator: as in `elbo`.
        staged: of families with a low-rank factor first mean and scales, then after 40 % of the steps the factor too.
            "auto": where nothing has been learned yet.
        average: average the last quarter of the iterates, and keep that where its objective is not lower.
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
            targets' own spread, is begun again at a fresh draw of the network's initialisation; the best by the same
            objective is kept. Each takes as many steps again; the progress bar says so. Not where the posterior was
            fitted before, nor over several ranks.
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
        progress: show one live line, in a terminal or a notebook; elsewhere ten plain ones.
        seed: of all randomness: draws, the order of the data, dropout.
        callback: called with the history after every step; it may raise KeyboardInterrupt to end the fit.
        members: so many independent fits, the first from here and the others from fresh draws of the network's
            initialisation, with seeds seed, seed + 1, ..; small networks all at once, see `fit_many`. What comes back
            is a `MixtureResult`, whose `mixture` predicts, evaluates and saves: a `Ensemble` with these as its
            parts. This posterior is its first part. Not with checkpoint=, resume= and callback=.
        weights: of the members: "equal", or "stacked" on the held-out data of validation=. Members at several
            temperatures, stacked, need no λ to be chosen: `members=8, temperature=[1, 0.3, 0.1, 0.03]`.

    Example:
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        >>> bayes = variationalize(torch.nn.Linear(3, 1), likelihoods.Gaussian(noise=1.0), MeanField())
        >>> result = bayes.fit(loader, epochs=2, progress=False)
        >>> result.steps, result.verdict
        (8, 'too few steps to tell whether it has converged')
    """
    if epochs is None and steps is None:
        raise ValueError(
            "fit needs a length: give epochs= or steps=. Around a network that is trained already: "
            "posterior.laplace(loader, validation=held_out)"
        )
    apart = ("posterior", "loader", "device", "members", "weights", "temperature")
    given = {name: value for name, value in locals().items() if name not in (*apart, "apart")}
    temperatures = temperatures_of(temperature, members)
    options = FitOptions(**given, temperature=temperatures[0])
    if device is not None:
        posterior.to(device)
    if members != 1 or weights != "equal":
        return fit_members(posterior, loader, options, members, weights, temperatures)  # pyright: ignore[reportReturnType]
    return run_fit(posterior, loader, options)
