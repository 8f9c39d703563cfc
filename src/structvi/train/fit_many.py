"""`fit_many`: many fits of small networks, to data of their own, as one computation."""

from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from .at_once import fit_each
from .fit import fit
from .options import FitOptions
from .result import FitResult

if TYPE_CHECKING:
    from ..posterior import Posterior


def fit_many(
    posteriors: "Sequence[Posterior]",
    loaders: Sequence[Iterable[Any]] | Iterable[Any],
    *,
    seeds: Sequence[int] | None = None,
    validation: Sequence[Iterable[Any]] | None = None,
    each: Mapping[str, Sequence[Any]] | None = None,
    at_once: bool | None = None,
    **options: Any,
) -> list[FitResult]:
    """Fit each posterior to its own data: splits, seeds, simulated data sets. Each as `posterior.fit` would alone.

    Posteriors of one form (network, family, likelihood and prior made with the same arguments) are fitted as one
    computation: one call of the network for all of them, one Adam over their parameters side by side. Noise, the order
    of the data, clipping, stages, averages and the end are each one's own; data sets may differ in size, as shorter
    batches are padded with rows that count nothing. What is found is that of single fits up to rounding.

    Networks for which vmap does not pay (a draw of more than 1 MiB on a CPU, random convolutions) and options that it
    cannot have (an optimizer of one's own, several ranks, ..) are fitted one after another; `result.notes` says why.

    Args:
        posteriors: what `variationalize` returns, each with a network of its own.
        loaders: the data of each, or one for all.
        seeds: of each, `range(len(posteriors))` if not given.
        validation: held-out data of each.
        each: options of `posterior.fit` that differ, one value for each: `each={"kl_weight": [1.0, 0.3]}`.
        at_once: False for one after another; True for an error where that is not possible.
        **options: of `posterior.fit`, the same for all; `checkpoint=` and `callback=` are refused.

    Example:
        >>> import torch
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> nets = [torch.nn.Linear(3, 1) for _ in range(4)]
        >>> data = [[(torch.randn(n, 3), torch.randn(n, 1))] for n in (5, 6, 7, 8)]
        >>> made = [
        ...     variationalize(net, likelihoods.Gaussian(1.0), MeanField(), num_data=len(own[0][0]))
        ...     for net, own in zip(nets, data)
        ... ]
        >>> [result.steps for result in fit_many(made, data, steps=3, progress=False)]
        [3, 3, 3, 3]
    """
    if len({id(one.net) for one in posteriors}) < len(posteriors):
        raise ValueError("two of the posteriors are of the same network: each fit has a network of its own")
    M = len(posteriors)
    same = len(loaders) if isinstance(loaders, list | tuple) and len(loaders) == M else None
    data = list(loaders) if same is not None else [loaders] * M
    own: dict[str, Sequence[Any]] = {"seed": range(M) if seeds is None else seeds, **(each or {})}
    if validation is not None:
        if not isinstance(validation, list | tuple):
            raise TypeError(
                f"validation must be a list of the held-out data of each posterior, got {type(validation).__name__}"
            )
        own["validation"] = validation
    for name, values in own.items():
        if len(values) != M:
            raise ValueError(f"{name} must have one entry for each of the {M} posteriors, got {len(values)}")
        if name in options:
            raise ValueError(f"{name} is given for all and for each: give one of them")
    rows = zip(*own.values(), strict=True)
    asked = [options_of(**options, **dict(zip(own, row, strict=True))) for row in rows]
    return fit_each(posteriors, data, asked, at_once)


def options_of(**given: Any) -> FitOptions:
    """The options of `fit`, by its defaults where they are not given; a name that it does not have is refused."""
    defaults = {name: one.default for name, one in signature(fit).parameters.items() if one.kind is one.KEYWORD_ONLY}
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise TypeError(f"fit has no option {', '.join(unknown)}")
    return FitOptions(**(defaults | given))
