"""`acquire`: which inputs of a pool to label next, by what their labels would tell of the weights.

A batch is chosen greedily: each input takes most from the sum over the pool of tr K_ii, with
K_ij = Hᵢ^½ Cov(yᵢ, yⱼ) Hⱼ^½ and Hᵢ the Fisher information of input i's label on its outputs. Information on the
weights alone would prefer outliers. The covariances are those of draws of the weights.
"""

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical
from torch.nn.functional import one_hot
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, SequentialSampler

from ..util.checks import check_integer, check_one_of
from .predict import WeightDraws, draws_for
from .predictive import Predictive, split

if TYPE_CHECKING:
    from ..posterior import Posterior

By = Literal["bald", "variance", "batch"]
#: inputs that are predicted at once
ROWS = 500
#: draws of the weights for the covariances between inputs
JOINT_DRAWS = 512
#: inputs of the pool at which the variance is reduced
TARGETS = 200
#: outputs, or classes, by which a label's information is measured: the largest ones of an input
DIRECTIONS = 3


@torch.no_grad()
def acquire(
    posterior: "Posterior",
    pool: Any,
    k: int,
    by: By = "bald",
    *,
    draws: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the indices [k] of the inputs of a pool that are worth most when labelled, the best first.

    Args:
        posterior: fitted.
        pool: inputs as `predict` takes them, [N, ..], or a `DataLoader` that does not shuffle.
        k: how many.
        by: "bald", the mutual information of label and weights, input by input; "variance", the variance of the
            expected label; or "batch", inputs whose labels together tell most of the whole pool, so that they differ.
        draws, generator: as in `predict`.

    Example:
        >>> from structvi import likelihoods, variationalize_head
        >>> bayes = variationalize_head(torch.nn.Linear(3, 2), likelihoods.Categorical())
        >>> result = bayes.fit_head([(torch.randn(32, 3), torch.randint(2, (32,)))], progress=False)
        >>> bayes.acquire(torch.randn(100, 3), 5, by="batch").shape
        torch.Size([5])
    """
    check_one_of("by", by, get_args(By))
    check_integer("k", k)
    batches = _batches(posterior, pool)
    first = next(batches, None)
    if first is None:
        raise ValueError("the pool is empty")
    batches = chain([first], batches)
    if by == "batch":
        drawn = WeightDraws(posterior, JOINT_DRAWS if draws is None else draws, generator=generator)
        values = torch.cat([_root(drawn.mixture(inputs)) for inputs in batches])
    else:
        predict = draws_for(posterior, first, draws, generator=generator)
        values = torch.cat([_score(predict(inputs), by) for inputs in batches])
    if k > len(values):
        raise ValueError(f"the pool has {len(values)} inputs, fewer than k = {k}")
    return _greedy(values, k) if by == "batch" else values.nan_to_num(-torch.inf).topk(k).indices


def _score(pred: Predictive, by: By) -> Tensor:
    """Return a number for every input: [B]."""
    if by == "variance":
        return pred.epistemic.flatten(1).sum(1)
    if pred.is_of_labels:
        return pred.mutual_information.reshape(len(pred.mean), -1).sum(1)
    return 0.5 * (pred.epistemic / pred.aleatoric).log1p().flatten(1).sum(1)


def _root(pred: Predictive) -> Tensor:
    """Return R [n, T, S] with K_ij = R_i R_jᵀ: by how much each draw moves what the labels measure."""
    if not isinstance(pred.function, Tensor):
        raise TypeError('by="batch" is for networks whose output is one tensor: use by="bald"')
    y = (pred.function - pred.function_mean).flatten(2)
    return torch.einsum("nto,sno->nts", _directions(pred), y) * pred.weights.sqrt()


def _directions(pred: Predictive) -> Tensor:
    """Return a_i [n, T, O] with Σ_t aᵀa the Fisher information of each input's label on its outputs, the largest T."""
    d = pred.components
    if isinstance(d, Categorical):
        if pred.mean.ndim > 2:
            raise TypeError('by="batch" is for one label of an input: use by="bald"')
        p, which = pred.mean.topk(min(DIRECTIONS, pred.mean.shape[1]), -1)
        return p.sqrt().unsqueeze(-1) * (one_hot(which, pred.mean.shape[1]) - pred.mean.unsqueeze(1))
    p = pred.mean.flatten(1)
    size = (p * (1 - p) if isinstance(d, Bernoulli) else pred.aleatoric.flatten(1).reciprocal()).sqrt()
    which = (size * pred.function_variance.flatten(1).sqrt()).topk(min(DIRECTIONS, size.shape[1]), -1).indices
    return one_hot(which, size.shape[1]) * size.unsqueeze(1)


def _greedy(roots: Tensor, k: int) -> Tensor:
    """Return k inputs, each the one whose label reduces the variance at inputs of the whole pool most.

    The label of input j takes K_ij (I + K_jj)⁻¹ K_ji from the covariance at input i.
    """
    N = len(roots)
    targets = roots[torch.linspace(0, N - 1, min(N, TARGETS)).long()].nan_to_num(0.0).flatten(0, 1)
    left, across = roots @ roots.mT, roots @ targets.mT  # [N, T, T] and [N, T, M·T]
    found, factors = [], left.new_empty(*left.shape[:2], 0)
    free = torch.ones(N, dtype=torch.bool, device=left.device)
    for _ in range(k):
        lower, _ = torch.linalg.cholesky_ex(torch.eye(left.shape[-1]).to(left) + left)
        scaled = torch.linalg.solve_triangular(lower, across, upper=False)
        gain = scaled.square().sum((1, 2)).nan_to_num(-torch.inf)
        j = int(gain.masked_fill(~free, -torch.inf).argmax())
        found.append(j)
        free[j] = False
        column = roots @ roots[j].mT - factors @ factors[j].mT
        more = torch.linalg.solve_triangular(lower[j], column.mT, upper=False).mT
        factors = torch.cat([factors, more], -1)
        left, across = left - more @ more.mT, across - more @ scaled[j]
    return torch.tensor(found)


def _batches(posterior: "Posterior", pool: Any) -> Iterator[Any]:
    """Yield the inputs of the pool, some at a time, in order."""
    if isinstance(pool, DataLoader):
        if not isinstance(pool.sampler, SequentialSampler) and pool.batch_size is not None:
            raise ValueError("the pool's DataLoader shuffles, and an index would mean nothing: give shuffle=False")
        yield from (split(posterior, batch)[0] for batch in pool)
        return
    for start in range(0, min(len(leaf) for leaf in tree_leaves(pool)), ROWS):
        yield tree_map(lambda x, start=start: x[start : start + ROWS], pool)
