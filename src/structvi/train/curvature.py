"""The generalised Gauss–Newton matrix of a network on its data, from gradients with labels that the network draws.

Where g is the gradient of Σ log p(t' | y_θ(x)) over some rows, with t' drawn from p(t | y_θ(x)), the mean of ggᵀ is
these rows' Σ JᵀHJ, with H the information of t about y: gradients of different rows are independent with mean zero. So
the gradient of a few rows at once is an unbiased square root, and no gradient of single observations is needed. The
empirical Fisher, with the observed labels, vanishes on a network that fits its data; this does not.

The variance of the estimate falls with the number of gradients: batches are cut into about `PARTS` parts in all, of so
many rows each. Of large data half the rows, in as many parts, tell the same for half the price (`rows_used`). Diagonal
and leading directions are of the same gradients: where there is room they are kept, and the data are read once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from ..couplings import naive
from ..families.density import Density
from ..models.batch import batch_size
from ..models.bayesian_model import BayesianModel
from ..models.likelihoods import Likelihood
from ..parameters import Parameters
from ..util.batch_rows import rows_of

#: parts in which the data are seen: the relative standard error of a diagonal entry is √(2/PARTS), of a scale half
PARTS = 512
#: gradients that are taken in at a time, and columns beyond those asked for that are kept on the way
FEW = 8
#: of more rows, half are looked at, and at least so many
ROWS = 4000
#: numbers of gradients that are kept, and places of each that are looked at together
KEPT_NUMBERS, BLOCK = 2**28, 2**16
#: a gradient [P], and of how many rows it is
Root = tuple[Tensor, int]
#: rows [.., P] along other axes
Turn = Callable[[Tensor], Tensor]


#: where the curvature is taken: at one θ [P], or for each gradient at a θ of its own, the same ones at every call
Where = Tensor | Callable[[], Iterator[Tensor]]


def same(x: Tensor) -> Tensor:
    return x


def draws_of(density: Density, space: Parameters, seed: int, at_once: int = 16) -> Callable[[], Iterator[Tensor]]:
    """Draws θ [P] of q without end, what is learned as a point with them, from the same seed whenever they are asked:
    the matrix is then E_q[JᵀHJ].

    Example:
        >>> from structvi import MeanField, Parameters
        >>> space = Parameters({"z": torch.zeros(2)})
        >>> where = draws_of(MeanField().bind(space)(), space, seed=0)
        >>> bool((next(where()) == next(where())).all())
        True
    """

    def draws() -> Iterator[Tensor]:
        generator = torch.Generator(density.mean.device).manual_seed(seed)
        while True:
            drawn = density.draw(at_once, naive, generator)
            yield from (space.join(drawn.theta, drawn.fixed) if drawn.fixed else drawn.theta).detach()

    return draws


class Roots:
    """Gradients as often as they are asked for: kept once they are made, if there is room, else made again.

    Args:
        make: the same gradients at every call.
    """

    def __init__(self, make: Callable[[], Iterator[Root]]):
        self.make = make
        self.kept: list[Root] | None = None

    def __iter__(self) -> Iterator[Root]:
        if self.kept is not None:
            yield from self.kept
            return
        kept: list[Root] = []
        is_whole = True
        for gradient, rows in self.make():
            is_whole = is_whole and (len(kept) + 1) * gradient.numel() <= KEPT_NUMBERS
            if is_whole:
                kept.append((gradient, rows))
            else:
                kept.clear()
            yield gradient, rows
        self.kept = kept if is_whole else None


def diagonal_curvature(model: BayesianModel, roots: Iterable[Root], along: Turn = same) -> Tensor:
    """The diagonal of Σ_n J_nᵀ H_n J_n, scaled to N observations: [P], float64.

    Args:
        model: N must be known.
        roots: gradients (`curvature_roots`).
        along: rows [.., P] along other axes: the diagonal is that of the matrix in them.

    Example:
        >>> from structvi import likelihoods
        >>> from structvi.models.priors import NormalPrior
        >>> model = BayesianModel(nn.Linear(1, 1), likelihoods.Gaussian(noise=1.0), NormalPrior(1.0), 2)
        >>> batch = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
        >>> roots = curvature_roots(model, torch.zeros(2), [batch] * 2000)
        >>> [round(x) for x in diagonal_curvature(model, roots).tolist()]  # 1² + 2², 1 + 1
        [5, 2]
    """
    total, seen = torch.zeros((), dtype=torch.float64), 0
    for gradient, rows in roots:
        total = total.to(gradient.device) + along(gradient).double().square()
        seen += rows
    return total * (model.num_data / max(1, seen))


def leading_columns(model: BayesianModel, roots: Roots, precision: Tensor, rank: int, along: Turn = same) -> Tensor:
    """W [P, rank] with WWᵀ the leading part of G = Σ_n J_nᵀ H_n J_n in the metric of a diagonal D [P], of P(K + few).

    D^(−½) G D^(−½) has its largest eigenvalues where the data say more than any diagonal can. With the gradients of
    `diagonal_curvature` G − WWᵀ has no negative diagonal. Where they are at hand their inner products tell; else they
    are taken in a few at a time, and the leading directions kept (an incremental singular value decomposition).
    """
    if roots.kept:
        return _leading_kept(model, roots.kept, precision, rank, along)
    scale, seen = precision.rsqrt().to(model.space.dtype), 0
    kept = scale.new_empty(len(scale), 0)
    block: list[Tensor] = []
    for gradient, rows in roots:
        block.append(along(gradient) * scale)
        seen += rows
        if len(block) == FEW:
            kept, block = _leading(torch.cat([kept, torch.stack(block, 1)], 1), rank + FEW), []
    if block:
        kept = torch.cat([kept, torch.stack(block, 1)], 1)
    kept = _leading(kept, rank) * (model.num_data / max(1, seen)) ** 0.5
    return kept / scale.unsqueeze(-1)


def _leading_kept(model: BayesianModel, kept: Sequence[Root], precision: Tensor, rank: int, along: Turn) -> Tensor:
    """The same from the inner products of all gradients A [n, P]: AAᵀ has the eigenvalues of AᵀA."""
    turned, scale = [along(gradient) for gradient, _ in kept], precision.double().rsqrt()
    blocks = [slice(start, start + BLOCK) for start in range(0, len(scale), BLOCK)]

    def scaled(block: slice) -> Tensor:
        return torch.stack([gradient[block] for gradient in turned]).double() * scale[block]

    products = sum((one @ one.mT for one in map(scaled, blocks)), start=torch.zeros((), dtype=torch.float64))
    leading = torch.linalg.eigh(products)[1].flip(1)[:, :rank]
    columns = torch.cat([scaled(block).mT @ leading / scale[block].unsqueeze(-1) for block in blocks])
    return (columns * (model.num_data / sum(rows for _, rows in kept)) ** 0.5).to(model.space.dtype)


def _leading(columns: Tensor, rank: int) -> Tensor:
    """[P, n] → [P, at most rank]: the leading singular vectors times their singular values, the largest first."""
    columns = columns.double() if columns.numel() < 2**24 else columns
    _, vectors = torch.linalg.eigh((columns.mT @ columns).double())
    return (columns @ vectors.flip(1)[:, :rank].to(columns)).to(columns)


def curvature_roots(
    model: BayesianModel, theta: Where, batches: Iterable[Any], seed: int = 0, size: int | None = None
) -> Iterator[Root]:
    """Gradients g [P] whose outer products add up to the matrix, in the mean, and of how many rows each is.

    Args:
        model: N must be known.
        theta: of the whole space; or draws of it (`draws_of`).
        batches: on the device of θ.
        seed: of the labels.
        size: how many rows a gradient is of; by default there are `PARTS` of them in N rows.
    """
    likelihood = model.likelihood
    if not isinstance(likelihood, Likelihood):
        raise TypeError(
            "the curvature needs observations drawn from the likelihood, and a plain function draws none: write a "
            "Likelihood, whose distribution(output, values) is p(t | y)"
        )
    generator = torch.Generator().manual_seed(seed)
    size = rows_of_part(model.num_data) if size is None else size
    points = repeat(theta) if isinstance(theta, Tensor) else theta()
    for batch in batches:
        for part, rows in _cut(batch, size):
            row = next(points).detach().requires_grad_()
            with torch.enable_grad():
                value, own = _simulated(model, likelihood, row, part, generator)
                (gradient,) = torch.autograd.grad(value, row)
            yield gradient, own if rows is None else rows


def rows_used(N: int) -> int:
    """Of how many of N rows the curvature is taken.

    Example:
        >>> rows_used(1000), rows_used(5000), rows_used(60_000)
        (1000, 4000, 30000)
    """
    return min(N, max(ROWS, N // 2))


def rows_of_part(rows: int) -> int:
    """How many rows a gradient is of, of so many in all."""
    return -(-rows // PARTS)


def _simulated(
    model: BayesianModel, likelihood: Likelihood, row: Tensor, batch: Any, generator: torch.Generator
) -> tuple[Tensor, int]:
    """Σ log p(t' | y) of labels that the network draws, and the number of rows."""
    named = dict(model.space.unravel(row))
    own = {name: named.pop(full) for full, name in model.likelihood_names.items()}
    output, target = model.call(named, batch)
    _check_output(output, target)
    values = {name: tensor.detach().unsqueeze(0) for name, tensor in own.items()}
    tensors = {f"likelihood.{name}": tensor for name, tensor in own.items()}
    log_prob = functional_call(_Simulated(likelihood), tensors, (output, target, values, generator))
    return log_prob.sum(), log_prob.shape[0]


def _check_output(output: Any, target: Any) -> None:
    """ValueError where no labels can be drawn from an output."""
    rows = batch_size(target)
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.shape[:1] != (rows,):
            raise ValueError(
                f"the network's output for {rows} {'row' if rows == 1 else 'rows'} has shape {tuple(leaf.shape)}, "
                f"expected [{rows}, ..]: a squeeze() without an axis takes that of the batch too, write squeeze(-1)"
            )
        if isinstance(leaf, Tensor) and bool(leaf.isnan().any()):
            raise ValueError("the network's output is NaN on its training data: is there NaN in the inputs?")


class _Simulated(nn.Module):
    """So that `functional_call` can set the likelihood's own tensors."""

    def __init__(self, likelihood: Likelihood):
        super().__init__()
        self.likelihood = likelihood

    def forward(self, *arguments: Any) -> Tensor:
        return self.likelihood.simulated(*arguments)


def _cut(batch: Any, size: int) -> Iterator[tuple[Any, int | None]]:
    """A batch in parts of so many rows, where every leaf is a tensor with one row for each; else as it is."""
    rows = rows_of(batch)
    if rows is None:
        yield batch, None
        return
    for start in range(0, rows, size):
        part = tree_map(lambda x, start=start: x[start : start + size], batch)
        yield part, min(size, rows - start)
