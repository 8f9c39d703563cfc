"""From a trained network to a first posterior: its values as means, scales from a diagonal Fisher information."""

from collections.abc import Iterable
from math import log
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils._pytree import tree_leaves, tree_map

from ..models.bayesian_model import BayesianModel
from ..models.likelihoods import Gaussian, split_mask
from ..posterior import PosteriorBase
from .batches import Batches

#: Per-sample gradients are made for as many samples at once as fit into so many numbers.
GRADIENT_NUMBERS = 2**26


def start_trained(posterior: PosteriorBase, batches: Batches) -> None:
    """Means at the network's present values, scales from a diagonal Fisher: s_i² = 1/(Σ_n (∂ log p_n/∂θ_i)² + π_i).

    One pass over the data. An unknown noise, "point" or "random", starts at the root mean square of the network's
    residuals, in a pass of its own: left at its initial value it would set the scales of all weights.
    π_i is the prior's precision, −∂² log p(θ)/∂θ_i² at the mean. Scales are at most the tensor's initialisation scale:
    a network that fits its data has an empirical Fisher near zero, and scales at the prior's forget what was trained
    (digits, mean field, 60 epochs: an ELBO of −1408 nats with that limit and −1837 without).
    """
    model = posterior.model
    tensors = dict(model.net.named_parameters())
    appended = model.space.unravel(model.space.initial)
    theta = model.space.ravel({name: tensors.get(name, appended[name]).detach() for name in model.space.names})
    theta = theta.to(posterior.device)
    with posterior.network_mode():
        theta = _with_residual_noise(model, theta, batches.everything())
        information = diagonal_fisher(model, theta, batches.everything())
    prior = prior_precision(model, theta)
    scale = (information + prior).rsqrt().to(theta)
    scale = scale.minimum(model.space.scale.to(theta))
    posterior.family.place(model.space.unravel(theta), model.space.unravel(scale))


@torch.no_grad()
def _with_residual_noise(model: BayesianModel, theta: Tensor, batches: Iterable[Any]) -> Tensor:
    """θ [P], and the likelihood, with an unknown Gaussian noise at the residuals' root mean square."""
    likelihood = model.likelihood
    if not isinstance(likelihood, Gaussian) or likelihood.noise not in ("point", "random"):
        return theta
    named = dict(model.space.unravel(theta.clone()))
    network = {name: tensor for name, tensor in named.items() if name not in model.likelihood_names}
    square, count = 0.0, 0
    for batch in batches:
        output, target = model.call(network, batch)
        t, mask = split_mask(target)
        residual = (t - output).double() if mask is None else (t - output)[mask].double()
        square, count = square + float(residual.square().sum()), count + residual.numel()
    log_noise = 0.5 * log(max(square / max(count, 1), torch.finfo(theta.dtype).tiny))
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
        >>> from structvi import NormalPrior, likelihoods
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
        B = _rows(batch)
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


def _rows(batch: Any) -> int | None:
    """The number of observations, where every leaf of the batch is a tensor with one row for each."""
    leaves = tree_leaves(batch)
    if not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        return None
    rows = {leaf.shape[0] for leaf in leaves}
    return rows.pop() if len(rows) == 1 else None
