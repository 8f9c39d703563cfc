"""From a fitted posterior to a richer one, never worse."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..families.low_rank import with_rank
from ..families.mixture import with_components
from ..util.checks import check_seed
from .compare import worth_on_seed
from .data import Batches
from .fit import fit
from .loop import Schedule, assign, copied
from .result import FitResult

if TYPE_CHECKING:
    from ..posterior import Posterior

#: groups of draws on which the grown posterior is compared with the one before
GROUPS = 32


def grow(
    posterior: "Posterior",
    loader: Iterable[Any],
    *,
    rank: int | None = None,
    components: int | None = None,
    seed: int = 0,
    **options: Any,
) -> FitResult:
    """Give a fitted posterior more freedom and fit on; keep that only if it is not worse on common draws.

    The objective that is fitted decides, E log lik − λ KL: at λ = 1 the ELBO.

    With `rank` a normal's factor gets new columns with small entries (a `MeanField` becomes a `LowRankNormal`). With
    `components` the posterior becomes the first part of a mixture, as in variational boosting. The new parts weigh 0.1
    together and start as copies of the posterior, each at a draw from it.

    Args:
        posterior: fitted; its family is replaced if the grown one is kept.
        loader, options: as for `fit`.
        rank: the new rank, above the present one.
        components: the new number of parts, above the present one.
        seed: of all randomness.

    Returns:
        The fit's result, with "before" and "grown" in `candidates`, and `kept` saying which it was.

    Example:
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        >>> bayes = variationalize(torch.nn.Linear(3, 1), likelihoods.Gaussian(noise=1.0), MeanField())
        >>> _ = bayes.fit(loader, epochs=2, progress=False)
        >>> result = bayes.grow(loader, rank=2, epochs=2, progress=False)
        >>> result.candidates[result.kept].value >= result.candidates["before"].value
        True
    """
    check_seed(seed)
    if (rank is None) == (components is None):
        raise ValueError(f"give one of rank= and components=, got rank={rank!r} and components={components!r}")
    posterior.check_whole()
    schedule = options.pop("schedule", None) or Schedule()
    if isinstance(schedule, Schedule):
        schedule = replace(schedule, staged=False)
    generator, old = torch.Generator().manual_seed(seed), posterior.family
    if rank is not None:
        grown = with_rank(old, rank, generator)
    else:
        assert components is not None
        grown = with_components(old, components, generator)
    others, batches = posterior.outside_family(), Batches(loader, seed, posterior.device)
    fitted, kl_weight = copied(others), options.get("kl_weight", 1.0)
    before = worth_on_seed(posterior, batches.everything(), GROUPS, seed, kl_weight)
    posterior.family, kept = grown, False
    try:
        result = fit(posterior, loader, schedule=schedule, seed=seed, **options)
        after = worth_on_seed(posterior, batches.everything(), GROUPS, seed, kl_weight)
        kept = after.objective.value >= before.objective.value
    finally:
        if not kept:
            posterior.family = old
            assign(others, fitted)
    found = {"before": before, "grown": after}
    result.candidates = {name: one.elbo for name, one in found.items()}
    result.objectives = {} if kl_weight == 1.0 else {name: one.objective for name, one in found.items()}
    result.kept = "grown" if kept else "before"
    result.elbo = result.candidates[result.kept]
    result.comparison = f"{GROUPS} groups of draws, all data"
    return result
