"""The generalised Gauss–Newton matrix G = Σ JᵀHJ of a network on its data, and the curvature of a prior.

If g is the gradient of Σ log p(t' | y) over some rows, with t' drawn from the network's own p(t | y), then the mean of
ggᵀ is the Σ JᵀHJ of these rows. Gradients of a few rows at once are therefore an unbiased root of G. The empirical
Fisher matrix, with the observed labels, vanishes on a network that fits its data; this one does not.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from ..models.bayesian_model import BayesianModel, batch_size, rows_of
from ..models.likelihoods import Likelihood
from ..models.priors.separable import Prior, log_prior

#: gradients in all; the relative standard error of a diagonal entry is √(2/GRADIENTS) = 12 %, of a scale half of it
GRADIENTS = 128
#: rows of the training data that are read
ROWS = 2048
#: numbers of gradients that are held at once (1 GB of float32); more are computed a second time
MOST_NUMBERS = 250_000_000
#: random signs that estimate a prior's curvature where its Hessian is not diagonal
PROBES = 64

#: gradients [P], the same at every call, each with the number of its rows
Gradients = Callable[[], Iterable[tuple[Tensor, int]]]


class Curvature(NamedTuple):
    """G at θ: its diagonal, and its leading part WWᵀ in the metric of that diagonal and the prior's precision."""

    theta: Tensor  # [P]
    diagonal: Tensor  # [P], float64
    columns: Tensor  # W [P, K]
    seconds: float = 0.0  # that the gradients of one row took


def curvature_of(theta: Tensor, gradients: Gradients, num_data: int, precision: Tensor, rank: int) -> Curvature:
    """Return the diagonal and `rank` leading directions of G from gradients [P] whose outer products add up to it.

    Args:
        theta: where the gradients were taken.
        gradients: called once if all of them fit into `MOST_NUMBERS`, twice if not.
        num_data: N; G is scaled from the rows of the gradients to N.
        precision: [P] of the prior; directions are those in which G is largest relative to diag G + precision.
        rank: K.
    """
    room = max(MOST_NUMBERS // theta.numel(), 3 * rank)
    stored: list[Tensor] | None = [] if rank else None
    diagonal, rows, seconds = torch.zeros_like(theta, dtype=torch.float64), 0, 0.0
    start = time.perf_counter()
    for gradient, own in gradients():
        seconds, rows = seconds + time.perf_counter() - start, rows + own
        diagonal += gradient.double().square()
        if stored is not None:
            stored.append(gradient)
            stored = stored if len(stored) <= room else None
        start = time.perf_counter()
    share = num_data / max(1, rows)
    diagonal *= share
    columns = theta.new_empty(theta.numel(), 0)
    if rank:
        scale = (diagonal + precision).rsqrt().to(theta)
        again = stored if stored is not None else (gradient for gradient, _ in gradients())
        columns = _leading((gradient * scale for gradient in again), rank, room) * (share**0.5 / scale).unsqueeze(-1)
    return Curvature(theta, diagonal, columns, seconds / max(1, rows))


def _leading(columns: Iterable[Tensor], rank: int, room: int) -> Tensor:
    """Return the leading left singular vectors of columns [P] times their singular values: [P, at most rank].

    If there are more than `room` columns, twice the rank of directions is held on the way.
    """

    def leading(some: list[Tensor], count: int) -> Tensor:
        matrix = torch.stack(some, 1)
        vectors = torch.linalg.eigh((matrix.mT @ matrix).double())[1].to(matrix)
        return matrix @ vectors.flip(1)[:, :count]

    stored: list[Tensor] = []
    for column in columns:
        if len(stored) == room:
            stored = list(leading(stored, 2 * rank).unbind(1))
        stored.append(column)
    return leading(stored, rank)


def simulated_gradients(
    model: BayesianModel, likelihood: Likelihood, theta: Tensor, batches: Iterable[Any], size: int, seed: int
) -> Iterator[tuple[Tensor, int]]:
    """Yield gradients [P] of Σ log p(t' | y) over `size` rows each, t' drawn from the network's p(t | y).

    Args:
        model: in the network's mode.
        likelihood: with the noise at which G is wanted.
        theta: of the whole space.
        batches: on the device of θ.
        size: rows of a gradient; a batch that cannot be cut has one gradient.
        seed: of the labels.
    """
    generator, simulated = torch.Generator().manual_seed(seed), _Simulated(likelihood)
    for batch in batches:
        for part, rows in cut(batch, size):
            row = theta.detach().requires_grad_()
            with torch.enable_grad():
                named = dict(model.space.unravel(row))
                own = {name: named.pop(full) for full, name in model.likelihood_names.items()}
                output, target = model.call(named, part)
                _check_output(output, batch_size(target))
                values = {name: tensor.detach().unsqueeze(0) for name, tensor in own.items()}
                tensors = {f"likelihood.{name}": tensor for name, tensor in own.items()}
                log_prob = functional_call(simulated, tensors, (output, target, values, generator))
                (gradient,) = torch.autograd.grad(log_prob.sum(), row)
            yield gradient, len(log_prob) if rows is None else rows


class _Simulated(nn.Module):
    """The likelihood as a submodule, so that `functional_call` can set its tensors."""

    def __init__(self, likelihood: Likelihood):
        super().__init__()
        self.likelihood = likelihood

    def forward(self, *arguments: Any) -> Tensor:
        return self.likelihood.simulated(*arguments)


def _check_output(output: Any, rows: int) -> None:
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.shape[:1] != (rows,):
            raise ValueError(
                f"the network's output has shape {tuple(leaf.shape)}, expected [{rows}, ..], one for each row: a "
                "squeeze() without an axis takes that of the batch too, write squeeze(-1)"
            )
        if isinstance(leaf, Tensor) and bool(leaf.isnan().any()):
            raise ValueError("the network's output is NaN on its training data: is there NaN in the inputs?")


def cut(batch: Any, size: int) -> Iterator[tuple[Any, int | None]]:
    """Yield parts of so many rows, if every leaf is a tensor with one row for each; else the batch as it is."""
    rows = rows_of(batch)
    if rows is None:
        yield batch, None
        return
    for start in range(0, rows, size):
        part = tree_map(lambda x, start=start: x[start : start + size], batch)
        yield part, min(size, rows - start)


def prior_precision(model: BayesianModel, prior: Prior, theta: Tensor) -> Tensor:
    """Return −∂² log p(θ)/∂θ_i² of a prior and of the likelihood's own tensors: [P], float64, above zero.

    It is exact if the prior's Hessian is diagonal. Otherwise it is a mean over `PROBES` random signs; for a Student t
    of a whole tensor of n weights the standard error of an entry is at most 2/√(n·PROBES) of it.
    If the prior has no curvature at θ, as a Laplace prior, the tensor's initialisation scale stands for its width.
    """
    row = theta.detach().requires_grad_()
    with torch.enable_grad():
        value = log_prior(prior, model.net_space, row[: model.net_space.size].unsqueeze(0), {}).sum()
        if model.likelihood_names and isinstance(model.likelihood, Likelihood):
            value = value + model.likelihood.log_prior(model.likelihood_values(row.unsqueeze(0))).sum()
        slope = torch.autograd.grad(value, row, create_graph=True, allow_unused=True)[0]
    generator, probes = torch.Generator().manual_seed(0), list[Tensor]()
    while slope is not None and slope.requires_grad and len(probes) < PROBES:
        sign = torch.randint(2, theta.shape, generator=generator).to(theta) * 2 - 1
        probes.append(-sign * torch.autograd.grad(slope, row, sign, retain_graph=True)[0])
        if len(probes) == 2 and torch.allclose(*probes, rtol=1e-4):
            break
    found = torch.stack(probes).mean(0).double() if probes else torch.zeros_like(theta, dtype=torch.float64)
    return torch.where(found > 0, found, model.space.scale.to(found) ** -2)
