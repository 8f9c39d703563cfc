"""From a fitted posterior to a richer one, never worse."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..families.low_rank import with_rank
from ..families.mixture import with_components
from ..util.checks import check_seed
from .checkpoint import assign, copied
from .compare import GROUPS, terms_on_seed
from .data import Batches
from .fit import fit
from .result import FitResult

if TYPE_CHECKING:
    from ..posterior import Posterior


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
    generator, old = torch.Generator().manual_seed(seed), posterior.family
    if rank is not None:
        grown = with_rank(old, rank, generator)
    else:
        assert components is not None
        grown = with_components(old, components, generator)
    others, batches = posterior.outside_family(), Batches(loader, seed, posterior.device)
    fitted, kl_weight = copied(others), options.get("kl_weight", 1.0)
    found = {"before": terms_on_seed(posterior, batches.everything(), seed)}
    posterior.family, kept = grown, "before"
    try:
        result = fit(posterior, loader, seed=seed, **options)
        found["grown"] = terms_on_seed(posterior, batches.everything(), seed)
        objectives = {name: one.estimate(kl_weight) for name, one in found.items()}
        kept = max(objectives, key=lambda name: (objectives[name].value, name))  # of equals the grown one
    finally:
        if kept == "before":
            posterior.family = old
            assign(others, fitted)
    result.candidates = {name: one.estimate() for name, one in found.items()}
    result.objectives = {} if kl_weight == 1.0 else objectives
    result.kept, result.elbo = kept, result.candidates[kept]
    result.comparison = f"{GROUPS} groups of draws, all data"
    return result
