"""The objective: the evidence lower bound (ELBO), in nats for the whole data set, at a minibatch or over all data."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isnan, nan, sqrt
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .couplings import Coupling, paired
from .families.family import Density, Draws, Family
from .families.numerics import reads, sum_weights
from .models.bayesian_model import BayesianModel
from .models.priors.separable import learns
from .models.target import LogDensity, Target
from .util.checks import check_generator, check_integer

Kind = Literal["path", "log_q", "entropy"]


class NonFiniteError(ValueError):
    """A log density was infinite or not a number at some draw."""


@dataclass(frozen=True)
class Estimator:
    """An unbiased estimator of the ELBO from draws θ_s with weights w_s, Σ w_s = 1.

        path     Σ w_s (log p(θ_s) − log q(θ_s)), without the gradient of log q at fixed θ, whose expectation is zero:
                 the gradient's variance vanishes where q equals the posterior. Needs `log_prob`.
        log_q    the same with the whole gradient. Needs `log_prob`.
        entropy  Σ w_s log p(θ_s) + H(q). Needs `entropy`.

    Point masses (MAP) have no bound: the value is Σ w_s log p(θ_s) for every kind.

    Args:
        kind: "path", "log_q" or "entropy".
        groups: number of independent groups of coupled draws.
        coupling: `couplings.naive`, `paired`, `unscented`, or a callable of your own.
        share_rows: whether the draws of a group share the rows of a batch, so that they cost one pass of a large
            network together. Each draw sees its own rows. The estimate stays unbiased, for each draw alone is one of
            q. A mixture's draws have weights, and share nothing.

    Example:
        >>> from structvi import couplings
        >>> Estimator(groups=4, coupling=couplings.unscented).kind
        'path'
    """

    kind: Kind = "path"
    groups: int = 1
    coupling: Coupling = paired
    share_rows: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f'the kind of an Estimator must be "path", "log_q" or "entropy", got {self.kind!r}')
        check_integer("groups", self.groups)
        if not callable(self.coupling):
            raise TypeError(f"coupling must be a callable such as vi.couplings.paired, got {self.coupling!r}")


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


class Terms(NamedTuple):
    """The two sides of the bound for each group of draws: elbo = fit − complexity."""

    fit: Tensor  # [groups]: E log p(data | θ); E log p(data, θ) of a target without a likelihood of its own
    complexity: Tensor  # [groups]: KL[q‖prior]; E log q of such a target
    bound: bool = True  # as in `Estimate`

    def objective(self, kl_weight: float | Tensor = 1.0) -> Tensor:
        """Return fit − kl_weight·complexity, [groups]; the ELBO for a weight of one."""
        return self.fit - kl_weight * self.complexity

    def estimate(self, kl_weight: float = 1.0) -> Estimate:
        """Return the mean of the objective over groups, with its standard error."""
        return Estimate.of(self.objective(kl_weight), self.bound)


def not_finite(groups: int) -> Estimate:
    """Return the estimate −∞, for a posterior with draws of no density."""
    return Estimate(-inf, nan, torch.full((groups,), -inf, dtype=torch.float64))


def elbo(
    family: Family,
    target: Target,
    batch: Any = None,
    estimator: Estimator = Estimator(),
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return an unbiased estimate of ELBO = E_q[log p(data, θ) − log q(θ)], in nats, to be maximised.

    Args:
        family: bound, over the target's space.
        target: `BayesianModel`, `LogDensity`, or anything with `space` and `log_joint`.
        batch: passed to the target.
        estimator: the kind of estimate, the number of groups of draws, and their coupling.
        generator: the source of all randomness; the global stream if None.

    Example:
        >>> from structvi import LogDensity, Parameters, LowRankNormal
        >>> space = Parameters({"z": torch.zeros(2)})
        >>> target = LogDensity(lambda p: -0.5 * p["z"].square().sum(), space)
        >>> q = LowRankNormal(rank=1).bind(space)
        >>> elbo(q, target, estimator=Estimator(groups=4)).requires_grad
        True
    """
    return elbo_terms(family, target, batch, estimator, generator).objective().mean()


def elbo_terms(
    family: Family,
    target: Target,
    batch: Any = None,
    estimator: Estimator = Estimator(),
    generator: torch.Generator | None = None,
) -> Terms:
    """Return fit and complexity of each group of draws; arguments as in `elbo`."""
    check_generator(generator)
    check_spaces(family, target)
    density = family()
    draws, log_q = scored_draws(density, estimator, generator)
    return terms_at(density, draws, log_q, target, batch, estimator)


def full_terms(
    family: Family,
    model: BayesianModel,
    loader: Iterable[Any],
    estimator: Estimator = Estimator(groups=64),
    generator: torch.Generator | None = None,
) -> Terms:
    """Return fit and complexity over all data, without gradients, in float64: all batches see the same draws.

    Two posteriors over the same tensors with generators of the same seed are compared on common draws.

    Args:
        family: bound, over the model's space.
        model: the network with likelihood and prior.
        loader: batches; if they hold fewer than N observations in all, their log likelihood is scaled up to N.
        estimator: groups and coupling of the draws; log q is evaluated at the draws where the family allows.
        generator: the source of all randomness; the global stream if None.

    Example:
        >>> from structvi import MeanField, likelihoods
        >>> from structvi.models.priors import NormalPrior
        >>> model = BayesianModel(torch.nn.Linear(3, 1), likelihoods.Gaussian(noise=0.1), NormalPrior(1.0), 20)
        >>> batches = [(torch.zeros(10, 3), torch.zeros(10, 1)), (torch.zeros(10, 3), torch.zeros(10, 1))]
        >>> full_terms(MeanField().bind(model.space), model, batches, Estimator(groups=8)).fit.shape
        torch.Size([8])
    """
    with torch.no_grad():
        density = family()
        # log q at the draws rather than the entropy: if q is the posterior, then every draw gives the same value
        kind: Kind = "log_q" if not density.has_density or density.offers("log_prob") else "entropy"
        estimator = Estimator(kind, estimator.groups, estimator.coupling)
        # before the data, which may raise on one rank of several: ranks of a sharded posterior meet in log q
        draws, log_q = scored_draws(density, estimator, generator)
        log_likelihood, rows = torch.zeros_like(draws.weight, dtype=torch.float64), 0
        for batch in loader:
            values, B = model.batch_log_likelihood(draws.theta, batch, draws.fixed)
            log_likelihood += values
            rows += B
        if not rows:
            raise ValueError("the loader gave no batch: there is no ELBO without data")
        log_likelihood *= model.num_data / rows
        log_prior = model.log_prior(draws.theta, draws.fixed).double()
        _check_finite(log_likelihood, "log likelihood of the full data")
        _check_finite(log_prior, "log prior")
        return _terms(density, draws, log_q, log_likelihood, log_prior, estimator)


def scored_draws(
    density: Density, estimator: Estimator, generator: torch.Generator | None
) -> tuple[Draws, Tensor | None]:
    """Return draws and log q at them, [S]; None in its place where the estimator or the density has none."""
    check_estimator(density, estimator.kind)
    groups, coupling, log_q = estimator.groups, estimator.coupling, None
    needs_log_q = density.has_density and estimator.kind != "entropy"
    if needs_log_q and estimator.kind == "path":
        draws, log_q = density.draw_scored(groups, coupling, generator)
    else:
        draws = density.draw(groups, coupling, generator)
    check_draws(density, draws, groups)
    if needs_log_q and log_q is None:
        log_q = log_q_at(density, draws.theta, path=estimator.kind == "path")
    return draws, log_q


def terms_at(
    density: Density, draws: Draws, log_q: Tensor | None, target: Target, batch: Any, estimator: Estimator
) -> Terms:
    """Return the terms at the draws that `scored_draws` made."""
    theta, _, fixed = draws
    if isinstance(target, BayesianModel):
        _check_prior(density, target)
        share = len(theta) // estimator.groups if estimator.share_rows and density.centred else 1
        values, B = target.batch_log_likelihood(theta, batch, fixed, share)
        values, prior = values * (target.num_data / B), target.log_prior(theta, fixed)
        _check_finite(values, "log likelihood")
        _check_finite(prior, "log prior")
        return _terms(density, draws, log_q, values, prior, estimator)
    if isinstance(target, LogDensity):
        values = target.log_joint(theta, batch, fixed)
    else:
        values = target.log_joint(target.space.join(theta, fixed), batch)
    S = theta.shape[0]
    _shaped(values, (S,), f"the target's log_joint must return [S] = [{S}] for theta [S, P]")
    _check_finite(values, "log joint")
    # without a likelihood of its own the first of the two terms is log p(data, θ)
    return _terms(density, draws, log_q, values, torch.zeros_like(values), estimator)


def _terms(
    density: Density, draws: Draws, log_q: Tensor | None, log_lik: Tensor, log_prior: Tensor, estimator: Estimator
) -> Terms:
    def means(values: Tensor) -> Tensor:
        """Return the weighted mean of values [S] for each group, [groups]."""
        return estimator.groups * (draws.weight * values).reshape(estimator.groups, -1).sum(-1)

    complexity = means(-log_prior if log_q is None else log_q - log_prior)
    if density.has_density and log_q is None:
        complexity = complexity - _shaped(density.entropy(), (), f"{type(density).__name__}.entropy() must be a scalar")
    return Terms(means(log_lik), complexity, density.bound)


def log_q_at(density: Density, theta: Tensor, path: bool) -> Tensor:
    """Return log q(θ), [S]; with `path` its gradient goes through θ alone.

    The second term is zero in value and carries the gradient. The shorter Σ score·θ has the wrong value, and so the
    wrong gradient for whatever multiplies it, such as the proportions of a mixture.
    """
    expected = f"{type(density).__name__}.log_prob must return [S] = [{theta.shape[0]}] for theta [S, P]"
    if not path:
        return _shaped(density.log_prob(theta), theta.shape[:1], expected)
    with torch.no_grad():
        fixed = theta.detach()
        value = _shaped(density.log_prob(fixed), theta.shape[:1], expected)
        score = _shaped(density.score(fixed), theta.shape, f"{type(density).__name__}.score must return [S, P]")
    return value + sum_weights(score * (theta - fixed)).to(value.dtype)


def _check_finite(values: Tensor, what: str) -> None:
    if not reads():
        return
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        where = f"{int((~finite).sum())} of {values.shape[0]} draws (first: {values[~finite][0].item()})"
        raise NonFiniteError(f"the {what} is not finite at {where}; look for a log, or data that are not finite")


def _shaped(value: Tensor, shape: tuple[int, ...], expected: str) -> Tensor:
    """Return `value` if it has this shape: another shape might broadcast to a wrong bound."""
    if not isinstance(value, Tensor) or value.shape != shape:
        came = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{expected}, got {came}")
    return value


def check_draws(density: Density, draws: Draws, groups: int) -> None:
    """Raise unless the draws of a user's family have the right shapes."""
    name = type(density).__name__
    if not isinstance(draws, Draws):
        raise TypeError(f"{name}.draw must return Draws(theta [S, P], weight [S]), got {type(draws).__name__}")
    shapes = tuple(draws.theta.shape), tuple(draws.weight.shape)
    S = len(draws.weight)
    if shapes != ((S, draws.theta.shape[-1]), (S,)) or S == 0 or S % groups:
        found = f"{name}.draw gave theta {shapes[0]} and weight {shapes[1]}"
        raise ValueError(f"{found}; expected [S, P] and [S] with S a multiple of groups = {groups}")


def check_spaces(family: Family, target: Target) -> None:
    """Raise unless family and target are over the same parameters."""
    if not isinstance(family, Family):
        raise TypeError(f"expected a family, not the density it builds, got {type(family).__name__}")
    if not isinstance(target, BayesianModel) and not isinstance(target, Target):  # a protocol is slow to ask
        name = type(target).__name__
        raise TypeError(f"the target must have `space` and `log_joint`, got {name}: write LogDensity(fn, parameters)")
    space, own = target.space, family.space
    if own is not None and own is not space and (own.names, own.shapes) != (space.names, space.shapes):
        sizes = f"P = {own.size} and P = {space.size}"
        raise ValueError(f"family and target are over different parameters: {sizes}; bind the family to target.space")


def _check_prior(density: Density, target: BayesianModel) -> None:
    """Raise if a prior learns its scale together with point masses."""
    if not density.bound and learns(target.prior):
        raise ValueError(
            f"the {type(target.prior).__name__} learns its scale, and {type(density).__name__} has point masses: there "
            "is no optimum. Give the scale as a number (learn=False), or use a family with a density for all weights"
        )


def check_estimator(density: Density, kind: Kind) -> None:
    """Raise unless the density offers what this kind of estimator needs."""
    needed = "entropy" if kind == "entropy" else "log_prob"
    if density.has_density and not density.offers(needed):
        raise ValueError(
            f'Estimator("{kind}") needs `{needed}`, which {type(density).__name__} does not offer: write it, or use '
            'another kind ("entropy" needs `entropy`, the others `log_prob`)'
        )
