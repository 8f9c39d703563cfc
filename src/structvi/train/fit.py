"""`fit`: train a posterior on minibatches."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..objective import Estimator
from .optimizers import OptimizerLike
from .options import Checkpoint, Compute, FitOptions, MakeScheduler, Schedule
from .result import FitResult, History
from .running import run_fit

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
    """Maximise E log lik − λ KL[q‖prior] over minibatches, and return what came of it.

    A fit learns `posterior.parameters()`: the variational parameters, and those of likelihood and prior. At the end it
    compares the last step, the average over the last quarter of the steps and, of a staged fit, the posterior without
    its factor, on common draws, and keeps the best. Ctrl-C ends the fit with what there is. A fit of a fitted
    posterior goes on from it.

    Args:
        posterior: what to fit.
        loader: a `DataLoader`, or any re-iterable of batches. N is the length of its data set unless the model has it.
        epochs, steps: the length: one of them. A step takes `accumulate` batches. Around a network that is trained
            already use `laplace(loader, validation=held_out)`; `fit` goes on from there.
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
    given = {name: value for name, value in locals().items() if name not in ("posterior", "loader")}
    return run_fit(posterior, loader, FitOptions(**given))
