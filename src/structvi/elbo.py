"""The one objective: the evidence lower bound, in nats for the whole data set."""

from typing import Any, Literal

import torch
from torch import Tensor

from .couplings import Coupling, paired
from .families.algebra import sum_weights
from .families.base import Density, Draws, Family
from .targets import BayesianModel, Target

Estimator = Literal["path", "log_q", "entropy"]


class NonFiniteError(ValueError):
    """A log density was infinite or not a number at some draw."""


def elbo(
    family: Family,
    target: Target,
    batch: Any = None,
    *,
    groups: int = 1,
    coupling: Coupling = paired,
    estimator: Estimator = "path",
    generator: torch.Generator | None = None,
) -> Tensor:
    """An unbiased estimate of ELBO = E_q[log p(data, θ) − log q(θ)], in nats, to be maximised.

    Draws θ_s with weights w_s, Σ w_s = 1, give

        path     Σ w_s (log p(θ_s) − log q(θ_s)), without the gradient of log q at fixed θ, whose expectation is zero:
                 the gradient's variance vanishes where q equals the posterior. Needs `log_prob`.
        log_q    the same with the whole gradient. Needs `log_prob`.
        entropy  Σ w_s log p(θ_s) + H(q). Needs `entropy`.

    For point masses (MAP) there is no bound: the value is Σ w_s log p(θ_s), whatever the estimator.

    Args:
        family: bound, over the target's space.
        target: `BayesianModel`, `LogDensity`, or anything with `space` and `log_joint`.
        batch: passed to the target.
        groups: how many independent groups of coupled draws.
        coupling: `naive`, `paired`, `unscented`, or a callable of your own.
        estimator: "path", "log_q" or "entropy".
        generator: the source of all randomness; the global stream if None.

    Example:
        >>> from structvi import LogDensity, Parameters, StructuredNormal
        >>> space = Parameters({"z": torch.zeros(2)})
        >>> target = LogDensity(lambda p: -0.5 * p["z"].square().sum(), space)
        >>> q = StructuredNormal(rank=1).bind(space)
        >>> elbo(q, target, groups=4).requires_grad
        True
    """
    values = elbo_groups(
        family, target, batch, groups=groups, coupling=coupling, estimator=estimator, generator=generator
    )
    return values.mean()


def elbo_groups(
    family: Family,
    target: Target,
    batch: Any = None,
    *,
    groups: int = 1,
    coupling: Coupling = paired,
    estimator: Estimator = "path",
    generator: torch.Generator | None = None,
) -> Tensor:
    """`elbo` of each group of draws, [groups]: their mean is the estimate, their spread its standard error."""
    if not isinstance(family, Family):
        raise TypeError(
            f"elbo expects a family, got {type(family).__name__}; pass the family, not the density it builds"
        )
    _check_spaces(family, target)
    density = family()
    _check_estimator(density, estimator)
    draws = density.draw(groups, coupling, generator)
    values = log_joint(target, draws, batch)
    if density.has_density and estimator != "entropy":
        point = draws.theta if draws.latent is None else draws.latent
        values = values - log_q(density, point, path=estimator == "path")
    weighted = draws.weight * values
    per_group = weighted.sum().expand(groups) if density.enumerates else groups * weighted.reshape(groups, -1).sum(-1)
    if density.has_density and estimator == "entropy":
        per_group = per_group + density.entropy()
    return per_group - density.latent_kl()


def log_q(density: Density, theta: Tensor, path: bool) -> Tensor:
    """log q(θ) [S]; with `path` its gradient is only the one through θ, from the score: no graph through log q.

    The second term is zero in value and carries the gradient. (The shorter Σ score·θ has another value, and with it
    another gradient for whatever multiplies it, such as the proportions of a mixture.)
    """
    if not path:
        return density.log_prob(theta)
    with torch.no_grad():
        fixed = theta.detach()
        value, score = density.log_prob(fixed), density.score(fixed)
    return value + sum_weights(score * (theta - fixed)).to(value.dtype)


def log_joint(target: Target, draws: Draws, batch: Any) -> Tensor:
    """The target at the draws, checked: [S]."""
    theta, _, fixed, latent = draws
    if latent is not None:
        if not isinstance(target, BayesianModel):
            raise TypeError("this family masks weights and needs a BayesianModel, whose likelihood and prior are apart")
        values = target.log_likelihood(theta, batch, fixed) + target.log_prior(latent, fixed)
    elif fixed:
        values = target.log_joint(theta, batch, fixed)
    else:
        values = target.log_joint(theta, batch)
    if not isinstance(values, Tensor) or values.shape != theta.shape[:1]:
        came = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"the target's log_joint must return [S] = [{theta.shape[0]}] for theta [S, P], got {came}")
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        count, S = int((~finite).sum()), values.shape[0]
        raise NonFiniteError(
            f"the log joint is not finite at {count} of {S} draws (first: {values[~finite][0].item()}); "
            "look for a scale that is too wide, a log or a division in the model, or data that are not finite"
        )
    return values


def _check_spaces(family: Family, target: Target) -> None:
    space, own = target.space, family.space
    if own is not None and own is not space and (own.names, own.shapes) != (space.names, space.shapes):
        raise ValueError(
            f"family and target are over different parameters: P = {own.size} and {space.size}; "
            "bind the family to target.space"
        )


def _check_estimator(density: Density, estimator: str) -> None:
    if estimator not in ("path", "log_q", "entropy"):
        raise ValueError(f'estimator must be "path", "log_q" or "entropy", got {estimator!r}')
    if not density.has_density:
        return
    offered = [name for name in ("log_prob", "entropy") if density.offers(name)]
    if not offered:
        raise ValueError(
            f"{type(density).__name__} can only draw: no ELBO can be estimated from that. Write its `log_prob` or its "
            "`entropy`, or return a torch.distributions.Distribution that has one"
        )
    needed = "entropy" if estimator == "entropy" else "log_prob"
    if needed not in offered:
        others = "'entropy'" if needed == "log_prob" else "'path' or 'log_q'"
        raise ValueError(
            f"estimator={estimator!r} needs `{needed}`, which {type(density).__name__} does not offer; "
            f"use estimator={others}"
        )
