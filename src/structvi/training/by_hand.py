"""The gradient of one batch at draws that are leaves: a graph of the network alone, all around it in closed form.

With f = −weight/N the step descends f·Σ_s w_s (N/B · ll_s + λ (log p(θ_s) − log q(θ_s))), a sum over all draws of all
groups: what each log likelihood, log prior and log q is multiplied by is known before the network runs. So the graph
begins at log likelihoods [S], with these numbers as their gradient, and none is built for what comes after them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..families.density import Density, Detached
from ..models.bayesian_model import BayesianModel
from ..objective import check_draws, check_prior, per_group


class AtDraws(NamedTuple):
    """What a batch says at the draws."""

    elbo: Tensor  # [groups], float64, at λ = 1
    fit: Tensor  # [groups], float64: its log likelihood
    theta: Tensor  # the gradient at the draws, [S, P]
    log_q: Tensor  # that at log q, [S]
    slope: Tensor | None  # [S]: times the draws it is still to be added to the first; None for nothing


def gradient_at(
    density: Density, detached: Detached, model: BayesianModel, batch: Any, groups: int, factor: Any, temperature: Any
) -> AtDraws:
    """The ELBO, and the gradient of −weight/N times the tempered one; of what else learns, into its `.grad`.

    Args:
        density: q, without latent variables.
        detached: draws of it, in so many groups.
        model: the network with likelihood and prior.
        batch: what it is evaluated at.
        groups: of draws.
        factor: −weight/N; of a captured step a tensor.
        temperature: λ, likewise.
    """
    draws, log_q = detached.draws, detached.log_q
    theta, fixed = draws.theta, draws.fixed
    check_prior(density, model)
    check_draws(density, draws, groups)
    log_likelihood, B = model.batch_log_likelihood(theta, batch, fixed)
    prior = None if fixed else model.prior_by_hand(theta, detached.squares)
    log_prior = model.log_prior(theta, fixed) if prior is None else prior.value
    upscaled = model.num_data / B
    with torch.no_grad():
        share = draws.weight * rounded(factor, theta)
        to_prior = share * rounded(temperature, theta)
    made = [(log_likelihood, share * upscaled)] + [(log_prior, to_prior)] * (prior is None)
    with_graph = [(value, gradient.to(value.dtype)) for value, gradient in made if value.requires_grad]
    if with_graph:
        values, gradients = zip(*with_graph, strict=True)
        torch.autograd.backward(values, gradients)
    with torch.no_grad():
        g = torch.zeros_like(theta) if theta.grad is None else theta.grad
        slope = None
        if prior is not None and prior.slope is not None:
            slope = to_prior * prior.slope
        elif prior is not None:
            prior.add(g, to_prior)
        fit = log_likelihood.detach().double() * upscaled
        values = fit + log_prior.detach() - log_q
        elbo, fit = (per_group(one, density, draws, groups) for one in (values, fit))
        return AtDraws(elbo, fit, g, -to_prior, slope)


def rounded(number: Any, like: Tensor) -> Any:
    """Of a captured step a tensor, rounded as a number is."""
    return number.to(like.dtype) if isinstance(number, Tensor) else number
