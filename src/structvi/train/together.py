"""Posteriors around several networks, fitted for the mixture of them."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .around import Together, fit_around_together
from .batches import Batches
from .before import notes_on_data, remember_choice
from .laplace import Placing, check_around

if TYPE_CHECKING:
    from ..posterior import Posterior


def fit_together(
    posteriors: "Sequence[Posterior]", loader: Iterable[Any], options: Placing, may_temper: bool = True
) -> Together | None:
    """Place a posterior around each network, of the width that suits the mixture; None where no width is to be chosen.

    Args:
        posteriors: one for each network.
        loader: as of `fit`.
        options: of `fit`, the same for all.
        may_temper: whether a temperature may be put on top: it is that of equal weights.
    """
    is_open = all("prior" in one.left_open for one in posteriors)
    if options.validation is None or not is_open:
        return None
    dtypes = [one.space.dtype for one in posteriors]
    if len(set(dtypes)) > 1:
        raise ValueError(
            "the networks of a mixture are called on the same inputs and must share one dtype, got "
            f"{', '.join(map(str, dtypes))}: give net.float() for each, or net.double()"
        )
    members = []
    for c, posterior in enumerate(posteriors):
        check_around(posterior)
        remember_choice(posterior, options.validation, options.seed)
        batches = Batches(loader, options.seed + c, posterior.device)
        members.append((posterior, batches, notes_on_data(posterior, batches, options.validation)))
    together = fit_around_together(members, options, may_temper)
    for posterior, result in zip(posteriors, together.members, strict=True):
        posterior.last_fit = result
    return together
