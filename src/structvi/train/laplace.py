"""`laplace`: a posterior around a trained network, without a step."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..distributed.ranks import Ranks
from ..result import Status
from ..util.checks import check_one_of, check_seed
from .around import fit_around
from .batches import Batches
from .before import notes_on_data, remember_choice
from .result import FitResult
from .seen import warn_of_seen

if TYPE_CHECKING:
    from ..posterior import Posterior


@dataclass(frozen=True)
class Placing:
    """The arguments of `laplace`."""

    validation: Iterable[Any] | None = None
    keep: Literal["widest", "best"] = "widest"
    seed: int = 0
    progress: bool = True

    def __post_init__(self) -> None:
        check_one_of("keep", self.keep, ("widest", "best"))
        check_seed(self.seed)


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
    options = Placing(validation, keep, seed, progress)
    if not torch.is_grad_enabled():
        raise ValueError("a fit needs gradients: call it outside torch.no_grad() and torch.inference_mode()")
    check_around(posterior)
    if validation is not None:
        warn_of_seen(loader, validation)
    remember_choice(posterior, validation, seed)
    ranks = Ranks("auto", posterior.family)
    try:
        batches = Batches(loader, seed, posterior.device, ranks.part)
        result = fit_around(posterior, batches, options, notes_on_data(posterior, batches, validation))
    finally:
        ranks.close()
    posterior.last_fit, posterior.calibration = result, result.calibration
    return result


def check_around(posterior: "Posterior") -> None:
    """ValueError where a posterior cannot be placed around its network."""
    if posterior.fit_status not in (None, Status.PLACED):
        raise ValueError(
            "laplace places a posterior around the network, and this one was fitted before: fit(loader, epochs=..) "
            "goes on from it, or variationalize the network again"
        )
    if posterior.space.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"the network's weights are {posterior.space.dtype}, and a posterior around them needs more digits: give "
            "net.float(), and inputs of that dtype"
        )
