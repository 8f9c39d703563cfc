"""The gradient of one batch at draws that are leaves: a graph of the network alone, all around it in closed form.

With f = −weight/N the step descends f·Σ_s w_s (N/B · ll_s + λ (log p(θ_s) − log q(θ_s))), a sum over all draws of all
groups: what each log likelihood, log prior and log q is multiplied by is known before the network runs. So the graph
begins at log likelihoods [S], with these numbers as their gradient, and none is built for what comes after them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..families.density import Density, Detached
from ..families.numerics.fused import kernels_take
from ..models.bayesian_model import BayesianModel
from ..objective import check_draws, check_prior


class AtDraws(NamedTuple):
    """What a batch says at the draws."""

    told: Tensor  # [2, groups], float64: ELBO at λ = 1, and its log likelihood
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
    slope = None if prior is None else prior.slope
    terms = _terms(theta, density)
    with torch.no_grad():
        own = Shares(*terms.shares(draws.weight, factor, temperature, upscaled, slope))
    made = [(log_likelihood, own.likelihood)] + [(log_prior, own.prior)] * (prior is None)
    with_graph = [(value, gradient.to(value.dtype)) for value, gradient in made if value.requires_grad]
    if with_graph:
        values, gradients = zip(*with_graph, strict=True)
        torch.autograd.backward(values, gradients)
    with torch.no_grad():
        g = torch.zeros_like(theta) if theta.grad is None else theta.grad
        if prior is not None and slope is None:
            prior.add(g, own.prior)
        told = terms.told(log_likelihood.detach(), log_prior.detach(), log_q, draws.weight, upscaled, groups)
        return AtDraws(told, g, own.log_q, own.slope)


class Shares(NamedTuple):
    """What the terms of each draw are multiplied by in what is descended, [S] each."""

    likelihood: Tensor  # that of the batch alone
    prior: Tensor
    log_q: Tensor
    slope: Tensor | None  # θ itself, where the prior's gradient is a number times θ


def _terms(theta: Tensor, density: Density) -> Any:
    if density.enumerates:
        return _Enumerated
    if not kernels_take(theta):
        return _Terms if theta.is_cuda else _Numbers
    from . import triton_terms  # Triton takes longer to import than all of the library

    return triton_terms


class _Terms:
    """In torch. As in `triton_terms`."""

    @staticmethod
    def shares(weight, factor, temperature, upscaled, slope):
        """`Shares` of draws with these weights [S]; what is a number here is one on the device in a captured step."""
        share = weight * rounded(factor, weight)
        prior = share * rounded(temperature, weight)
        return share * upscaled, prior, -prior, None if slope is None else prior * slope

    @staticmethod
    def told(log_likelihood, log_prior, log_q, weight, upscaled, groups):
        """ELBO and log likelihood of each group: [2, groups]."""
        fit = log_likelihood.double() * upscaled
        both = weight * torch.stack([fit + log_prior - log_q, fit])
        return groups * both.reshape(2, groups, -1).sum(-1)


class _Numbers(_Terms):
    """On a CPU: of a few draws, numbers in Python take less time than operations on tensors."""

    @staticmethod
    def told(log_likelihood, log_prior, log_q, weight, upscaled, groups):
        size, told = len(weight) // groups, [0.0] * (2 * groups)
        each = zip(weight.tolist(), log_likelihood.tolist(), log_prior.tolist(), log_q.tolist(), strict=True)
        for i, (w, fit, prior, q) in enumerate(each):
            told[i // size] += groups * w * (upscaled * fit + prior - q)
            told[groups + i // size] += groups * w * upscaled * fit
        return torch.tensor(told, dtype=torch.float64).view(2, groups)


class _Enumerated(_Terms):
    """Of all draws that there are: every group has them."""

    @staticmethod
    def told(log_likelihood, log_prior, log_q, weight, upscaled, groups):
        return _Terms.told(log_likelihood, log_prior, log_q, weight, upscaled, 1).expand(2, groups)


def rounded(number: Any, like: Tensor) -> Any:
    """Of a captured step a tensor, rounded as a number is."""
    return number.to(like.dtype) if isinstance(number, Tensor) else number
