"""The one objective: the evidence lower bound, in nats for the whole data set; at minibatches, and over all data."""

from collections.abc import Iterable, Sequence
from math import inf, isnan, nan, sqrt
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .couplings import Coupling, paired
from .families.density import Density, Draws, check_draw
from .families.family import Family
from .families.numerics.algebra import sum_weights
from .models.bayesian_model import BayesianModel
from .models.log_density import LogDensity
from .models.priors.base import learns
from .models.target import Target
from .util.host_reads import reads

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
        >>> from structvi import LogDensity, Parameters, LowRankNormal
        >>> space = Parameters({"z": torch.zeros(2)})
        >>> target = LogDensity(lambda p: -0.5 * p["z"].square().sum(), space)
        >>> q = LowRankNormal(rank=1).bind(space)
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
    terms = elbo_terms(
        family, target, batch, groups=groups, coupling=coupling, estimator=estimator, generator=generator
    )
    return terms.fit - terms.complexity


class Terms(NamedTuple):
    """The two sides of the bound, for each group of draws; elbo = fit − complexity, tempered fit − λ·complexity."""

    fit: Tensor  # [groups]: E log p(data | θ); of a target that is not split, E log p(data, θ)
    complexity: Tensor  # [groups]: KL[q‖prior]; of a target that is not split, E log q


def elbo_terms(
    family: Family,
    target: Target,
    batch: Any = None,
    *,
    groups: int = 1,
    coupling: Coupling = paired,
    estimator: Estimator = "path",
    generator: torch.Generator | None = None,
) -> Terms:
    """How well the draws fit the data and what they cost, apart: what `elbo` subtracts."""
    if not isinstance(family, Family):
        raise TypeError(
            f"elbo expects a family, got {type(family).__name__}; pass the family, not the density it builds"
        )
    check_draw(groups, coupling, generator)
    check_spaces(family, target)
    density = family()
    check_estimator(density, estimator)
    draws, log_q = draw_for(density, groups, coupling, estimator, generator)
    return terms_at(density, draws, log_q, target, batch, groups, estimator)


def draw_for(
    density: Density, groups: int, coupling: Coupling, estimator: Estimator, generator: torch.Generator | None
) -> tuple[Draws, Tensor | None]:
    """Draws, and log q at them where the density has it for less."""
    if density.has_density and estimator == "path":
        return density.draw_scored(groups, coupling, generator)
    return density.draw(groups, coupling, generator), None


def terms_at(
    density: Density,
    draws: Draws,
    log_q: Tensor | None,
    target: Target,
    batch: Any,
    groups: int,
    estimator: Estimator,
) -> Terms:
    """The terms at draws that were made before.

    Args:
        density: q.
        draws: of it, in so many groups.
        log_q: [S], with the gradient through the draws alone, where it is known; else the density is asked.
        target, batch, groups, estimator: as in `elbo`.
    """
    check_prior(density, target)
    check_draws(density, draws, groups)
    log_likelihood, log_prior = log_joint(target, draws, batch)
    cost = -log_prior
    if density.has_density and estimator != "entropy":
        point = draws.theta if draws.latent is None else draws.latent
        cost = cost + (log_q_at(density, point, path=estimator == "path") if log_q is None else log_q)
    complexity = per_group(cost, density, draws, groups) + density.latent_kl()
    if density.has_density and estimator == "entropy":
        expected = f"{type(density).__name__}.entropy() must return a scalar"
        complexity = complexity - _shaped(density.entropy(), (), expected)
    return Terms(per_group(log_likelihood, density, draws, groups), complexity)


def per_group(values: Tensor, density: Density, draws: Draws, groups: int) -> Tensor:
    """The weighted mean of values at the draws [S], for each group of draws: [groups]."""
    weighted = draws.weight * values
    if density.enumerates:
        return weighted.sum().expand(groups)
    return groups * weighted.reshape(groups, -1).sum(-1)


def log_q_at(density: Density, theta: Tensor, path: bool) -> Tensor:
    """log q(θ) [S]; with `path` its gradient is only the one through θ, from the score: no graph through log q.

    The second term is zero in value and carries the gradient. (The shorter Σ score·θ has another value, and with it
    another gradient for whatever multiplies it, such as the proportions of a mixture.)
    """
    expected = f"{type(density).__name__}.log_prob must return [S] = [{theta.shape[0]}] for theta [S, P]"
    if not path:
        return _shaped(density.log_prob(theta), theta.shape[:1], expected)
    with torch.no_grad():
        fixed = theta.detach()
        value = _shaped(density.log_prob(fixed), theta.shape[:1], expected)
        score = _shaped(density.score(fixed), theta.shape, f"{type(density).__name__}.score must return [S, P]")
    return value + sum_weights(score * (theta - fixed)).to(value.dtype)


def log_joint(target: Target, draws: Draws, batch: Any) -> tuple[Tensor, Tensor]:
    """Log likelihood and log prior at the draws, checked: [S], [S]. A target that is not split has all in the first."""
    theta, _, fixed, latent = draws
    if isinstance(target, BayesianModel):
        values = target.log_likelihood(theta, batch, fixed)
        prior = target.log_prior(theta if latent is None else latent, fixed)
        _check_finite(values, "log likelihood")
        _check_finite(prior, "log prior")
        return values, prior
    if latent is not None:
        raise TypeError("this family masks weights and needs a BayesianModel, whose likelihood and prior are apart")
    if isinstance(target, LogDensity):
        values = target.log_joint(theta, batch, fixed)
    else:
        values = target.log_joint(target.space.join(theta, fixed), batch)
    _shaped(values, theta.shape[:1], f"the target's log_joint must return [S] = [{theta.shape[0]}] for theta [S, P]")
    _check_finite(values, "log joint")
    return values, torch.zeros_like(values)


def _check_finite(values: Tensor, what: str) -> None:
    if not reads():
        return
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        count, S = int((~finite).sum()), values.shape[0]
        raise NonFiniteError(
            f"the {what} is not finite at {count} of {S} draws (first: {values[~finite][0].item()}); "
            "look for a scale that is too wide, a log or a division in the model, or data that are not finite"
        )


def _shaped(value: Tensor, shape: tuple[int, ...], expected: str) -> Tensor:
    """`value`, whose shape is `shape`: another one might broadcast to a wrong bound."""
    if not isinstance(value, Tensor) or value.shape != shape:
        came = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{expected}, got {came}")
    return value


def check_draws(density: Density, draws: Draws, groups: int) -> None:
    name = type(density).__name__
    if not isinstance(draws, Draws):
        raise TypeError(f"{name}.draw must return Draws(theta [S, P], weight [S]), got {type(draws).__name__}")
    theta, weight = draws.theta, draws.weight
    S = theta.shape[0] if theta.ndim else 0
    if theta.ndim != 2 or weight.shape != (S,) or S == 0 or (S % groups and not density.enumerates):
        raise ValueError(
            f"{name}.draw gave theta {tuple(theta.shape)} and weight {tuple(weight.shape)}; "
            f"expected [S, P] and [S] with S a multiple of groups = {groups}"
        )


def check_spaces(family: Family, target: Target) -> None:
    if not isinstance(target, BayesianModel) and not isinstance(target, Target):  # a protocol takes long to ask
        raise TypeError(
            f"the target must have `space` and `log_joint`, got {type(target).__name__}; "
            "write BayesianModel(net, likelihood, prior, num_data), or LogDensity(fn, parameters) for a function"
        )
    space, own = target.space, family.space
    if own is not None and own is not space and (own.names, own.shapes) != (space.names, space.shapes):
        raise ValueError(
            f"family and target are over different parameters: P = {own.size} ({', '.join(own.names[:4])}, ..) and "
            f"P = {space.size} ({', '.join(space.names[:4])}, ..); bind the family to target.space"
        )


def check_prior(density: Density, target: Target) -> None:
    if not density.bound and isinstance(target, BayesianModel) and learns(target.prior):
        raise ValueError(
            f"the {type(target.prior).__name__} learns its scale, and {type(density).__name__} has point masses: the "
            "prior's density at a point grows without bound as point and scale go to zero, so there is no optimum. "
            "Give the scale as a number (learn=False), or use a family with a density for all weights"
        )


def check_estimator(density: Density, estimator: str) -> None:
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


# --------------------------------------------------------------------------------------------- over all data


class Estimate(NamedTuple):
    """An estimate with its standard error over groups of draws; nan for a single group."""

    value: float
    standard_error: float
    per_group: Tensor  # [groups], float64
    #: False where part of q is a point mass: the value is then E log p(data, θ) without that part's entropy
    bound: bool = True

    def __str__(self) -> str:
        error = "" if isnan(self.standard_error) else f" ± {self.standard_error:.2f}"
        return f"{self.value:.2f}{error} nats"

    @classmethod
    def of(cls, per_group: Tensor, bound: bool = True) -> "Estimate":
        per_group = per_group.detach().double().cpu()
        groups = per_group.shape[0]
        error = float(per_group.std()) / sqrt(groups) if groups > 1 else nan
        return cls(float(per_group.mean()), error, per_group, bound)


def full_elbo(
    family: Family,
    model: BayesianModel,
    loader: Iterable[Any],
    *,
    groups: int = 64,
    coupling: Coupling = paired,
    generator: torch.Generator | None = None,
) -> Estimate:
    """ELBO = Σ_n E_q log p(t_n | y_θ(x_n)) − KL[q‖prior], streamed over batches that all see the same draws.

    Two posteriors over the same tensors, each with a generator of the same seed, are compared on common draws: their
    noise is shared, and what differs is the posteriors.

    Args:
        family: bound, over the model's space.
        model: the network with likelihood and prior.
        loader: batches; where they hold fewer than N observations in all, their log likelihood is scaled up to N.
        groups: how many independent groups of coupled draws.
        coupling: `naive`, `paired`, `unscented`, or a callable of your own.
        generator: the source of all randomness; the global stream if None.

    Example:
        >>> from structvi import MeanField, likelihoods
        >>> from structvi.models.priors import NormalPrior
        >>> model = BayesianModel(torch.nn.Linear(3, 1), likelihoods.Gaussian(noise=0.1), NormalPrior(1.0), 20)
        >>> batches = [(torch.zeros(10, 3), torch.zeros(10, 1)), (torch.zeros(10, 3), torch.zeros(10, 1))]
        >>> full_elbo(MeanField().bind(model.space), model, batches, groups=8).per_group.shape
        torch.Size([8])
    """
    return full_objectives(family, model, loader, (1.0,), groups=groups, coupling=coupling, generator=generator)[0]


@torch.no_grad()
def full_objectives(
    family: Family,
    model: BayesianModel,
    loader: Iterable[Any],
    temperatures: Sequence[float],
    *,
    groups: int = 64,
    coupling: Coupling = paired,
    generator: torch.Generator | None = None,
) -> list[Estimate]:
    """Σ_n E_q log p(t_n | y_θ(x_n)) − λ KL[q‖prior] for each λ, of one reading of the data; else as `full_elbo`.

    Args:
        temperatures: λ; one for the ELBO.
        family, model, loader, groups, coupling, generator: as of `full_elbo`.

    Example:
        >>> from structvi import MeanField, likelihoods
        >>> from structvi.models.priors import NormalPrior
        >>> model = BayesianModel(torch.nn.Linear(3, 1), likelihoods.Gaussian(noise=0.1), NormalPrior(1.0), 20)
        >>> batches = [(torch.zeros(20, 3), torch.zeros(20, 1))]
        >>> elbo, tempered = full_objectives(MeanField().bind(model.space), model, batches, (1.0, 0.1))
        >>> elbo.value < tempered.value
        True
    """
    density = family()
    draws = density.draw(groups, coupling, generator)
    point = draws.theta if draws.latent is None else draws.latent
    # log q at the draws rather than the entropy: where q is the posterior, every draw gives the same value. Before the
    # data, which may end this on one rank of several: those of a sharded posterior need each other for it
    at_draws = log_q_at(density, point, path=False) if density.has_density and density.offers("log_prob") else None
    log_likelihood = torch.zeros_like(draws.weight, dtype=torch.float64)
    seen = 0
    for batch in loader:
        values, B = model.batch_log_likelihood(draws.theta, batch, draws.fixed)
        log_likelihood += values
        seen += B
    if not seen:
        raise ValueError("the loader gave no batch: there is no ELBO without data")
    log_likelihood *= model.num_data / seen
    log_prior = model.log_prior(point, draws.fixed)
    for values, what in ((log_likelihood, "log likelihood"), (log_prior, "log prior")):
        if not bool(torch.isfinite(values).all()):
            raise NonFiniteError(f"the {what} of the full data is not finite at some of {len(values)} draws")
    cost = -log_prior.double()
    if at_draws is not None:
        cost = cost + at_draws
    found = []
    for lam in temperatures:
        values = per_group(log_likelihood - lam * cost, density, draws, groups) - lam * density.latent_kl()
        if density.has_density and not density.offers("log_prob"):
            values = values + lam * density.entropy()
        found.append(Estimate.of(values, density.bound))
    return found


def not_finite(groups: int) -> Estimate:
    """What stands for the ELBO of a posterior some of whose draws have none."""
    return Estimate(-inf, nan, torch.full((groups,), -inf, dtype=torch.float64))
