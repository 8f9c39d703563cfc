"""`laplace`: a posterior around a trained network, without a step."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from .fit_many import options_of
from .result import FitResult
from .running import run_fit

if TYPE_CHECKING:
    from ..posterior import Posterior


def laplace(
    posterior: "Posterior",
    loader: Iterable[Any],
    *,
    validation: Iterable[Any] | None = None,
    keep: Literal["widest", "best"] = "widest",
    seed: int = 0,
    progress: bool = True,
) -> FitResult:
    """Place the posterior around the trained network, and return what was selected on the validation set.

    Args:
        posterior: of a trained network.
        loader: its training data.
        validation: data that took no part in the training: they select the prior's width, and more.
        keep: the "widest" posterior that is as good as the best, or the "best".
        seed: of all randomness.
        progress: show what it does.
    """
    return run_fit(posterior, loader, options_of(validation=validation, keep=keep, seed=seed, progress=progress))
