"""`acquire`: which inputs of a pool to label next, by what their labels would tell of the weights.

A batch is chosen greedily by the information that its labels together hold: ½ log det(I + K) with
K = Hᵢ^½ Cov(yᵢ, yⱼ) Hⱼ^½ and Hᵢ the Fisher information of input i's label on its outputs. A posterior over the
last layer has Cov(yᵢ, yⱼ) in closed form; for others draws of the weights give it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, SequentialSampler

from ..families.gaussian import Gaussian
from ..util.checks import check_integer, check_one_of
from .last_layer import LastLayerDraws, known_layer, passed, predictive
from .predict import DRAWS, WeightDraws, draws_for
from .predictive import Predictive, split

if TYPE_CHECKING:
    from ..posterior import Posterior

By = Literal["bald", "variance", "batch"]
#: inputs that are predicted at once
ROWS = 500
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
            expected label; or "batch", inputs whose labels together tell most, so that they differ from each other.
        draws, generator: as in `predict`.

    Example:
        >>> from structvi import likelihoods, variationalize_head
        >>> bayes = variationalize_head(torch.nn.Linear(3, 2), likelihoods.Categorical())
        >>> result = bayes.fit_head([(torch.randn(32, 3), torch.randint(2, (32,)))], progress=False)
        >>> bayes.acquire(torch.randn(100, 3), 5, by="batch").shape
        torch.Size([5])
    """
    check_one_of("by", by, ("bald", "variance", "batch"))
    check_integer("k", k)
    batches = _batches(posterior, pool)
    first = next(batches, None)
    if first is None:
        raise ValueError("the pool is empty")
    batches = _with(first, batches)
    if by == "batch":
        joint = _LastLayer(posterior) if draws is None and known_layer(posterior, first) else None
        found: _Joint = joint or _Drawn(posterior, DRAWS if draws is None else draws, generator)
        for inputs in batches:
            found.add(inputs)
        return _greedy(found, _checked(k, found.size))
    predict = draws_for(posterior, first, draws, generator=generator)
    scores = torch.cat([_score(predict(inputs), by) for inputs in batches])
    return scores.nan_to_num(-torch.inf).topk(_checked(k, len(scores))).indices


def _score(pred: Predictive, by: By) -> Tensor:
    """Return a number for every input: [B]."""
    if by == "variance":
        return pred.epistemic.flatten(1).sum(1)
    if pred.is_of_labels:
        return pred.mutual_information.reshape(len(pred.mean), -1).sum(1)
    return 0.5 * (pred.epistemic / pred.aleatoric).log1p().flatten(1).sum(1)


class _Joint(ABC):
    """The covariance of what labels measure, between all inputs: blocks K_ij [T, T]."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []

    @property
    def size(self) -> int:
        return sum(map(len, self.blocks))

    def own(self) -> Tensor:
        """Return K_ii: [N, T, T]."""
        return torch.cat(self.blocks)

    @abstractmethod
    def add(self, inputs: Any) -> None: ...

    @abstractmethod
    def column(self, j: int) -> Tensor:
        """Return K_ij of all i: [N, T, T]."""


class _Drawn(_Joint):
    """Covariances over draws of the weights."""

    def __init__(self, posterior: "Posterior", draws: int, generator: torch.Generator | None):
        super().__init__()
        self.draws, self.parts = WeightDraws(posterior, draws, generator=generator), []

    def add(self, inputs: Any) -> None:
        pred = self.draws.mixture(inputs)
        if not isinstance(pred.function, Tensor):
            raise TypeError('by="batch" is for networks whose output is one tensor: use by="bald"')
        y = (pred.function - pred.function_mean).flatten(2)
        part = torch.einsum("nto,sno->nts", _directions(pred), y) * pred.weights.sqrt()
        self.parts.append(part)
        self.blocks.append(part @ part.mT)

    def column(self, j: int) -> Tensor:
        every = torch.cat(self.parts)
        self.parts = [every]
        return every @ every[j].mT


class _LastLayer(_Joint):
    """Covariances of a posterior over the last layer: K_ij = aᵢ (I ⊗ φᵢ)ᵀ Σ (I ⊗ φⱼ) aⱼᵀ."""

    def __init__(self, posterior: "Posterior"):
        super().__init__()
        density = posterior.family()
        assert isinstance(density, Gaussian)
        self.posterior, self.density = posterior, density
        self.known = LastLayerDraws(posterior).known
        self.features: list[Tensor] = []
        self.directions: list[Tensor] = []

    def add(self, inputs: Any) -> None:
        here, normals = passed(self.posterior, inputs, self.known)
        if len(here.features) != len(here.output):
            raise ValueError('by="batch" needs draws= of the weights where the layer is applied at many places')
        directions = _directions(predictive(self.posterior.model.likelihood, self.known.layer, here.output, normals))
        along = directions @ normals.axes
        self.features.append(here.features)
        self.directions.append(directions)
        self.blocks.append((along * normals.along.unsqueeze(1)) @ along.mT)

    def column(self, j: int) -> Tensor:
        features, directions = torch.cat(self.features), torch.cat(self.directions)
        self.features, self.directions = [features], [directions]
        order = self.known.layer.order
        x = features.new_empty(directions.shape[1], len(order))
        x[:, order] = (directions[j].unsqueeze(-1) * features[j]).flatten(1)
        products = self.density.covariance_product(x)[:, order].unflatten(1, (self.known.layer.outputs, -1))
        return torch.stack([((features @ G.mT).unsqueeze(1) * directions).sum(-1) for G in products], -1)


def _directions(pred: Predictive) -> Tensor:
    """Return a_i [n, T, O] with Σ_t aᵀa the Fisher information of each input's label on its outputs, the largest T."""
    d = pred.components
    if isinstance(d, Categorical):
        if pred.mean.ndim > 2:
            raise TypeError('by="batch" is for one label of an input: use by="bald"')
        p, which = pred.mean.topk(min(DIRECTIONS, pred.mean.shape[1]), -1)
        one_hot = torch.nn.functional.one_hot(which, pred.mean.shape[1])
        return p.sqrt().unsqueeze(-1) * (one_hot - pred.mean.unsqueeze(1))
    p = pred.mean.flatten(1)
    size = (p * (1 - p) if isinstance(d, Bernoulli) else pred.aleatoric.flatten(1).reciprocal()).sqrt()
    which = (size * pred.function_variance.flatten(1).sqrt()).topk(min(DIRECTIONS, size.shape[1]), -1).indices
    return torch.nn.functional.one_hot(which, size.shape[1]) * size.unsqueeze(1)


def _greedy(joint: _Joint, k: int) -> Tensor:
    """Return k inputs, each the one that adds most to ½ log det(I + K)."""
    left = joint.own()
    identity = torch.eye(left.shape[-1]).to(left)
    found, factors = [], left.new_empty(*left.shape[:2], 0)
    free = torch.ones(len(left), dtype=torch.bool, device=left.device)
    for _ in range(k):
        gain = torch.linalg.slogdet(identity + left).logabsdet.nan_to_num(-torch.inf)
        j = int(gain.masked_fill(~free, -torch.inf).argmax())
        found.append(j)
        free[j] = False
        root = torch.linalg.cholesky(identity + left[j])
        column = joint.column(j) - factors @ factors[j].mT
        more = torch.linalg.solve_triangular(root, column.mT, upper=False).mT
        factors = torch.cat([factors, more], -1)
        left = left - more @ more.mT
    return torch.tensor(found)


def _batches(posterior: "Posterior", pool: Any) -> Iterator[Any]:
    """Yield the inputs of the pool, some at a time, in order."""
    if isinstance(pool, DataLoader):
        if not isinstance(pool.sampler, SequentialSampler) and pool.batch_size is not None:
            raise ValueError("the pool's DataLoader shuffles, and an index would mean nothing: give shuffle=False")
        yield from (split(posterior, batch)[0] for batch in pool)
        return
    leaves = [leaf for leaf in tree_leaves(pool) if isinstance(leaf, Tensor)]
    if not leaves or any(leaf.ndim == 0 or len(leaf) != len(leaves[0]) for leaf in leaves):
        raise ValueError("the pool must be tensors [N, ..] of one N, as predict takes them, or a DataLoader")
    for start in range(0, len(leaves[0]), ROWS):
        yield tree_map(lambda x, start=start: x[start : start + ROWS] if isinstance(x, Tensor) else x, pool)


def _with(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def _checked(k: int, N: int) -> int:
    if k > N:
        raise ValueError(f"the pool has {N} inputs, fewer than k = {k}")
    return k
