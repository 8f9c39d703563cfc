"""From a trained network to a first posterior: its values as means, the rest from the curvature of the likelihood."""

from collections.abc import Callable, Iterable
from functools import partial
from math import isfinite, log
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils._pytree import tree_map

from ..families.family import Family
from ..models.bayesian_model import BayesianModel
from ..models.likelihoods import Gaussian, Likelihood, StudentT, split_mask
from ..parameters import Parameters
from ..util.batch_rows import rows_of
from .batches import Batches
from .curvature import (
    Roots,
    Where,
    curvature_roots,
    diagonal_curvature,
    leading_columns,
    rows_of_part,
    rows_used,
)

if TYPE_CHECKING:
    from ..posterior import Posterior

#: Per-sample gradients are made for as many samples at once as fit into so many numbers.
GRADIENT_NUMBERS = 2**26


class Laplace(NamedTuple):
    """What a posterior around trained weights is made of: Λ = G/λ + diag(π)."""

    space: Parameters
    theta: Tensor  # [P]
    diagonal: Tensor  # of G along the family's axes, [P], float64
    columns: Tensor  # the leading part of G as WWᵀ, along them too, [P, K]

    def place(self, family: Family, temperature: float, prior: Tensor, factor: float | Tensor = 1.0) -> None:
        """Start a family at N(θ, CΛ⁻¹C), with this prior precision [P], C = factor, or diag(factor) along its axes."""
        scale = factor * self.scales(family, temperature, prior)
        by_row = factor.unsqueeze(-1) if isinstance(factor, Tensor) else factor
        columns = self.columns / (by_row * temperature**0.5)
        named = {
            name: columns[self.space.slice(name)].reshape(*shape, columns.shape[1])
            for name, shape in zip(self.space.names, self.space.shapes, strict=True)
        }
        family.place(self.space.unravel(self.theta), self.space.unravel(scale), named)

    def scales(self, family: Family, temperature: float, prior: Tensor) -> Tensor:
        """Those of Λ without its leading directions: [P]."""
        rest = (self.diagonal - self.columns.double().square().sum(1)).clamp(min=0.0)
        return (rest / temperature + family.diagonal_to_axes(prior)).rsqrt().to(self.theta)


def trained_values(posterior: "Posterior", present: bool = False) -> Tensor:
    """θ [P] where the network is linearised, or at its present values; with the start of what is not the network's.

    Args:
        posterior: of a network.
        present: its present values in any case: where it is linearised is to be chosen anew.
    """
    model = posterior.model
    named = model.space.unravel(model.space.initial.clone())
    if model.linearised_at is not None and not present:
        named |= model.net_space.unravel(model.linearised_at)
    else:
        named |= {name: p.detach() for name, p in model.net.named_parameters() if name in model.net_space}
    return model.space.ravel({name: tensor.to(posterior.device) for name, tensor in named.items()})


def curvature_of(
    posterior: "Posterior", theta: Tensor, batches: Batches, seed: int, rank: int, where: Where | None = None
) -> Laplace:
    """In the network's mode: G's diagonal and so many of its leading directions, at θ or where it is said."""
    at = theta if where is None else where
    model = posterior.model
    if not isinstance(model.likelihood, Likelihood):  # no labels can be drawn: the observed ones
        diagonal = diagonal_fisher(model, theta, batches.everything())
        return Laplace(model.space, theta, diagonal, theta.new_empty(theta.numel(), 0))
    used, family = rows_used(model.num_data), posterior.family
    size = rows_of_part(used)
    read: Callable[[], Iterable[Any]] = partial(batches.in_order, size, used)
    if posterior.mixes_rows:  # what a row says depends on its batch: that is not cut
        size, read = model.num_data, batches.everything
    roots = Roots(lambda: curvature_roots(model, at, read(), seed, size))
    if family.wants_gradients and where is None:
        family.take_gradients(g for g, _ in roots)
    diagonal = diagonal_curvature(model, roots, family.to_axes)
    columns = theta.new_empty(theta.numel(), 0)
    if rank:
        metric = diagonal + family.diagonal_to_axes(prior_precision(model, theta))
        metric = metric.clamp(min=torch.finfo(torch.float64).eps * float(metric.max()))
        columns = leading_columns(model, roots, metric, rank, family.to_axes)
    return Laplace(model.space, theta, diagonal, columns.to(theta))


@torch.no_grad()
def with_residual_noise(model: BayesianModel, theta: Tensor, batches: Iterable[Any]) -> Tensor:
    """θ [P], and the likelihood, with an unknown noise at the residuals' root mean square."""
    likelihood = model.likelihood
    if not isinstance(likelihood, Gaussian | StudentT) or likelihood.noise not in ("point", "random"):
        return theta
    named = dict(model.space.unravel(theta.clone()))
    network = {name: tensor for name, tensor in named.items() if name not in model.likelihood_names}
    square, size, count = 0.0, 0.0, 0
    for batch in batches:
        output, target = model.call(network, batch)
        t, mask = split_mask(target)
        residual, y = (t - output, output) if mask is None else ((t - output)[mask], output[mask])
        square, count = square + float(residual.double().square().sum()), count + residual.numel()
        size += float(y.double().square().sum())
    if not isfinite(square):
        raise ValueError(
            f"the residuals of the network on its training data are not finite, their squares add up to {square}: is "
            "there NaN in inputs or targets? Leave these rows out, or mask them"
        )
    # residuals smaller than an output's own rounding say nothing of the noise
    rounding = torch.finfo(theta.dtype).eps ** 2 * size
    log_noise = 0.5 * log(max((square + rounding) / max(count, 1), torch.finfo(theta.dtype).tiny))
    if likelihood.noise == "point":
        likelihood.log_noise.fill_(log_noise)
        return theta
    for name in model.likelihood_names:
        named[name] = torch.full_like(named[name], log_noise)
    return model.space.ravel(named)


def diagonal_fisher(model: BayesianModel, theta: Tensor, batches: Iterable[Any]) -> Tensor:
    """Σ_n (∂ log p(t_n | x_n, θ)/∂θ_i)² at one θ [P], scaled to N observations: [P], float64.

    Gradients of single observations by `vmap(grad)`. For a network that vmap cannot run, squares of the gradients of
    whole batches instead: equal in expectation where the model is right and θ its optimum, since the gradients of
    different observations are then independent with mean zero.

    Example:
        >>> from structvi import likelihoods
        >>> from structvi.models.priors import NormalPrior
        >>> model = BayesianModel(torch.nn.Linear(1, 1), likelihoods.Gaussian(noise=1.0), NormalPrior(1.0), 2)
        >>> batch = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
        >>> diagonal_fisher(model, torch.zeros(2), [batch])
        tensor([73., 25.], dtype=torch.float64)
    """
    total = torch.zeros_like(theta, dtype=torch.float64)
    seen, together = 0, False

    def log_likelihood(row: Tensor, batch: Any) -> Tensor:
        return model.batch_log_likelihood(row.unsqueeze(0), batch)[0].squeeze(0)

    def of_one(row: Tensor, sample: Any) -> Tensor:
        return log_likelihood(row, tree_map(lambda x: x.unsqueeze(0), sample))

    each = vmap(grad(of_one), in_dims=(None, 0), randomness="different")
    chunk = max(1, GRADIENT_NUMBERS // theta.shape[0])
    for batch in batches:
        B = rows_of(batch)
        if B is None:
            together = True
        if not together:
            try:
                for start in range(0, B or 0, chunk):
                    samples = tree_map(lambda x, start=start: x[start : start + chunk], batch)
                    total += each(theta, samples).double().square().sum(0)
            except (RuntimeError, NotImplementedError):
                if seen:
                    raise
                total.zero_()
                together = True
        if together:
            row = theta.detach().requires_grad_()
            with torch.enable_grad():
                value, B = model.batch_log_likelihood(row.unsqueeze(0), batch)
                (gradient,) = torch.autograd.grad(value.sum(), row)
            total += gradient.double().square()
        seen += B or 0
    return total * (model.num_data / seen)


def prior_precision(model: BayesianModel, theta: Tensor) -> Tensor:
    """−∂² log p(θ)/∂θ_i², no less than zero: [P], float64. Exact where weights are independent in the prior."""
    # v∘(Hv) for v = ±1 is the diagonal of a diagonal H, and has it as its mean for any H
    generator = torch.Generator().manual_seed(0)
    sign = torch.randint(2, theta.shape, generator=generator).to(theta) * 2 - 1
    row = theta.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(model.log_prior(row.unsqueeze(0)).sum(), row, create_graph=True)
        if not slope.requires_grad:
            return torch.zeros_like(theta, dtype=torch.float64)
        (product,) = torch.autograd.grad(slope @ sign, row)
    return (-sign * product).double().clamp(min=0.0)
