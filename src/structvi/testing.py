"""The laws that every family obeys, for ours and for users' own: `check_family`.

Dense truth is never taken from the formulas under test. The covariance of a Gaussian family, for one, is read off its
draws: fed with unit noise vectors they are the columns of a matrix J, and Σ = JJᵀ.
"""

import copy
from collections.abc import Callable
from itertools import product
from math import pi

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from .couplings import Coupling, Noise, naive, paired, unscented
from .elbo import Estimator, elbo
from .families.base import Density, Family
from .families.full import FullNormalDensity
from .families.gaussian import Gaussian, kl
from .parameters import Parameters

Make = Callable[[Parameters], Family]

#: Statistical laws compare with this many standard errors: over the few hundred comparisons of one check a correct
#: family fails with probability below 1e-4, and the seed is fixed.
STANDARD_ERRORS = 5.5


class NotApplicable(Exception):
    """The law says nothing about this family, with the reason."""


def check_family(family: Family | Make, *, seed: int = 0, laws: list[str] | None = None) -> dict[str, str]:
    """Hold a family to the laws; raise `AssertionError` naming the first one that it breaks.

    Args:
        family: a recipe (it will be bound to small spaces), or a function from `Parameters` to a bound family, for
            recipes whose configuration depends on P.
        seed: of everything random in the check.
        laws: their names, all of `LAWS` by default.

    Returns:
        law → "held", or "not applicable" with the reason.

    Example:
        >>> from structvi import MeanField
        >>> check_family(MeanField(), laws=["draws", "state_dict"])
        {'draws': 'held', 'state_dict': 'held'}
    """
    make = _maker(family, seed)
    unknown = set(laws or ()) - set(LAWS)
    if unknown:
        raise ValueError(f"no laws named {sorted(unknown)}; there are {', '.join(LAWS)}")
    verdicts = {}
    for name in laws or LAWS:
        try:
            LAWS[name](make, seed)
            verdicts[name] = "held"
        except NotApplicable as reason:
            verdicts[name] = f"not applicable: {reason}"
        except AssertionError as error:
            raise AssertionError(f"law {name!r}: {error}") from error
    return verdicts


def every_sign(groups: int, P: int, K: int, generator=None, dtype=None, device=None) -> Noise:
    """All 2^(K+1) sign combinations of K low-rank numbers and one diagonal vector: a coupling of a user's own."""
    base = naive(groups, P, K, generator, dtype, device)
    signs = torch.tensor(list(product([1.0, -1.0], repeat=K + 1)), dtype=dtype, device=device)  # [2^(K+1), K + 1]
    diagonal = base.diagonal.unsqueeze(1) * signs[:, :1]
    return Noise(diagonal.flatten(0, 1), (base.low_rank.unsqueeze(1) * signs[:, 1:]).flatten(0, 1))


COUPLINGS: dict[str, Coupling] = {
    "naive": naive,
    "paired": paired,
    "unscented": unscented,
    "unscented, not crossed": unscented(crossed=False),
    "unscented, shared diagonal": unscented(shared_diagonal=True),
    "unscented, one direction": unscented(directions=1),
    "every sign": every_sign,
}


# ------------------------------------------------------------------------------------------------------- the laws


def law_draws(make: Make, seed: int) -> None:
    """S draws of P finite numbers in the family's precision, with weights that sum to one."""
    for dtype in (torch.float32, torch.float64):
        density = make(_space(7, dtype))()
        for name, coupling in COUPLINGS.items():
            draws = density.draw(3, coupling, _generator(seed))
            S, P = draws.theta.shape
            fixed = sum(t.numel() for t in draws.fixed.values())
            _true(fixed + P == 7, f"{name}: draws of {P} numbers and {fixed} fixed ones, expected 7")
            _true(draws.theta.dtype == dtype, f"{name}: draws in {draws.theta.dtype}, expected {dtype}")
            _true(draws.weight.shape == (S,), f"{name}: weights {tuple(draws.weight.shape)} for {S} draws")
            _true(bool(torch.isfinite(draws.theta).all()), f"{name}: draws are not finite")
            _close(draws.weight.sum(), torch.tensor(1.0), 1e-6, f"{name}: weights sum to {draws.weight.sum()}")
            _true(density.enumerates or S % 3 == 0, f"{name}: {S} draws do not divide into 3 groups")


def law_reproducible(make: Make, seed: int) -> None:
    """Same generator state, same bits; and the global stream is not touched."""
    density = make(_space(7))()
    before = torch.get_rng_state()
    first, second, other = (density.draw(4, paired, _generator(s)).theta for s in (seed, seed, seed + 1))
    _true(torch.equal(before, torch.get_rng_state()), "drawing with a generator changed the global random stream")
    _true(torch.equal(first, second), "the same seed gave other draws")
    _true(not density.has_density or not torch.equal(first, other), "another seed gave the same draws")


def law_dense(make: Make, seed: int) -> None:
    """Mean, covariance, log_prob, score and entropy of a Gaussian equal the dense ones in float64 to 1e-9."""
    density = _gaussian(make(_space(7))())
    mean, covariance = dense_moments(density)
    theta = density.draw(16, naive, _generator(seed)).theta.detach()
    truth = MultivariateNormal(mean, covariance)
    _close(density.mean, mean, 1e-9, "mean")
    _close(density.covariance(), covariance, 1e-9, "covariance()")
    _close(density.variance, covariance.diagonal(), 1e-9, "variance")
    _close(density.log_prob(theta), truth.log_prob(theta), 1e-9, "log_prob")
    _close(density.score(theta), -torch.linalg.solve(covariance, (theta - mean).mT).mT, 1e-9, "score")
    _close(density.entropy(), truth.entropy(), 1e-9, "entropy")
    _close(density.precision_diagonal(), torch.linalg.inv(covariance).diagonal(), 1e-9, "precision_diagonal")


def law_blocks(make: Make, seed: int) -> None:
    """The covariance between two named tensors is that block of the dense matrix."""
    density = make(_space(7))()
    try:
        dense = density.covariance()
    except NotImplementedError as reason:
        raise NotApplicable(str(reason)) from None
    space = _space(7)
    for first, second in product(space.names, repeat=2):
        block = density.covariance(first, second)
        _close(block, dense[space.slice(first), space.slice(second)], 1e-12, f"covariance({first!r}, {second!r})")


def law_score(make: Make, seed: int) -> None:
    """The score is the gradient of log_prob in θ, by automatic differentiation, to 1e-9."""
    density = _with_log_prob(make(_space(7))())
    theta = _points(density, seed)
    reference = theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(density.log_prob(reference).sum(), reference)
    score = density.score(theta)
    _true(not score.requires_grad, "the score must come without a graph")
    _close(score, gradient, 1e-9, "score against autodiff of log_prob")


def law_normalised(make: Make, seed: int) -> None:
    """The density integrates to one over ℝ and ℝ², and −∫ q log q is its entropy, by quadrature."""
    for P in (1, 2):
        density = _with_log_prob(make(_space(P))(), everywhere=True)
        theta, volume = _quadrature(density)
        log_q = density.log_prob(theta)
        _close((log_q.exp() * volume).sum(), torch.tensor(1.0), 1e-6, f"P = {P}: ∫ q")
        if density.offers("entropy"):
            try:
                entropy = density.entropy()
            except NotImplementedError:
                continue
            plogp = torch.where(log_q > -700, log_q.exp() * log_q, 0.0)
            _close(entropy, -(plogp * volume).sum(), 1e-5, f"P = {P}: entropy against −∫ q log q")


def law_gradients(make: Make, seed: int) -> None:
    """Every variational parameter receives a finite gradient, not all zero, under every estimator on offer."""
    for estimator in _estimators(make(_space(7))()):
        family = make(_space(7))
        target = _GaussianTarget(family, seed)
        elbo(family, target, groups=2, coupling=unscented, estimator=estimator, generator=_generator(seed)).backward()
        for name, parameter in _learned(family).items():
            gradient = parameter.grad
            if gradient is None:
                raise AssertionError(f"{estimator}: no gradient reaches {name}")
            _true(bool(torch.isfinite(gradient).all()), f"{estimator}: the gradient of {name} is not finite")
            _true(bool(gradient.abs().max() > 0), f"{estimator}: the gradient of {name} is zero")


def law_moments(make: Make, seed: int) -> None:
    """Draws of every coupling have the density's mean and covariance, to 5.5 standard errors over groups."""
    density = make(_space(7))()
    groups = 4096
    for name, coupling in COUPLINGS.items():
        draws = density.draw(groups, coupling, _generator(seed))
        if density.enumerates or draws.fixed:
            raise NotApplicable("draws are enumerated, or some tensors are fixed")
        weight = groups * draws.weight.detach().reshape(groups, -1, 1)
        theta = draws.theta.detach().reshape(groups, -1, 7)
        mean, variance = density.mean.detach(), density.variance.detach()
        _within((weight * theta).sum(1), mean, f"{name}: mean of draws")
        _within((weight * (theta - mean).square()).sum(1), variance, f"{name}: variance of draws")
        try:
            covariance = density.covariance().detach()
        except NotImplementedError:
            continue
        centred = theta - mean
        outer = torch.einsum("gs,gsp,gsq->gpq", weight.squeeze(-1), centred, centred).flatten(1)
        _within(outer, covariance.flatten(), f"{name}: covariance of draws")


def law_positions(make: Make, seed: int) -> None:
    """At every position in a group a Gaussian's draws are normal: mean zero (so also the un-mirrored rows of
    unscented), and Mahalanobis distances χ²_P (Kolmogorov–Smirnov at level 1e-6)."""
    density = _gaussian(make(_space(7))())
    mean, covariance = dense_moments(density)
    cholesky = torch.linalg.cholesky(covariance)
    groups = 4096
    critical = (-0.5 * torch.tensor(1e-6 / 2).log() / groups).sqrt().item()
    for name, coupling in COUPLINGS.items():
        theta = density.draw(groups, coupling, _generator(seed)).theta.detach().reshape(groups, -1, 7)
        white = torch.linalg.solve_triangular(cholesky, (theta - mean).mT, upper=False).mT  # [G, size, P]
        for position in range(white.shape[1]):
            rows = white[:, position]
            _within(rows, torch.zeros(7, dtype=rows.dtype), f"{name}: mean at position {position}")
            distance = rows.square().sum(-1).sort().values
            chi2 = torch.special.gammainc(torch.tensor(3.5, dtype=rows.dtype), distance / 2)
            steps = torch.arange(groups + 1, dtype=rows.dtype) / groups
            gap = torch.maximum((chi2 - steps[:-1]).abs(), (steps[1:] - chi2).abs()).max().item()
            _true(gap < critical, f"{name}: position {position}: distances are not χ²_7 (KS {gap:.4f})")


def law_unbiased(make: Make, seed: int) -> None:
    """Each estimator's gradient has the expectation −∇KL[q‖p] for a Gaussian p.

    The truth is the closed form for Gaussians, quadrature over θ ∈ ℝ where there is a log_prob, and quadrature over
    the noise where there is only an entropy.
    """
    P = 4 if isinstance(make(_space(4))(), Gaussian) else 1
    family = make(_space(P))
    if not family().bound:
        raise NotApplicable("point masses have no KL")
    target = _GaussianTarget(family, seed)
    parameters = list(_learned(family).values())
    truth = torch.autograd.grad(-_true_kl(family(), target), parameters)
    for estimator, (name, coupling) in product(_estimators(family()), COUPLINGS.items()):
        generator = _generator(seed)
        samples = []
        for _ in range(64):
            value = elbo(family, target, groups=32, coupling=coupling, estimator=estimator, generator=generator)
            samples.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, parameters)]))
        expected = torch.cat([g.reshape(-1) for g in truth])
        _within(torch.stack(samples), expected, f"{estimator}, {name}: gradient of the ELBO")


def law_path_zero(make: Make, seed: int) -> None:
    """Where q = p the path gradient is zero to rounding in every single group of draws."""
    family = make(_space(7))
    _with_log_prob(family(), everywhere=True)
    frozen = copy.deepcopy(family).requires_grad_(False)
    target = _FunctionTarget(family, lambda theta: frozen().log_prob(theta))
    generator = _generator(seed)
    for _ in range(8):
        value = elbo(family, target, groups=1, coupling=naive, estimator="path", generator=generator)
        _close(value, torch.zeros(()), 1e-9, "the ELBO where q = p")
        learned = _learned(family)
        for name, gradient in zip(learned, torch.autograd.grad(value, list(learned.values())), strict=True):
            size = gradient.abs().max().item()
            _true(size < 1e-9, f"the path gradient of {name} is {size:.2e} where q = p")


def law_precision(make: Make, seed: int) -> None:
    """float32 agrees with float64 to its rounding."""
    family = make(_space(7))
    single = copy.deepcopy(family).float()
    _true(single().mean.dtype == torch.float32, "the mean of a float32 family is not float32")
    _close(single().mean.double(), family().mean, 1e-5, "mean in float32")
    density = _with_log_prob(family())
    theta = _points(density, seed)
    _close(single().log_prob(theta.float()).double(), density.log_prob(theta), 1e-4, "log_prob in float32")
    _close(single().score(theta.float()).double(), density.score(theta), 1e-4, "score in float32")


def law_state_dict(make: Make, seed: int) -> None:
    """A family that loads another's state draws the same bits."""
    first = make(_space(7))
    second = make(_space(7))
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(1.0)
    second.load_state_dict(first.state_dict())
    one, two = (family().draw(2, paired, _generator(seed)) for family in (first, second))
    _true(torch.equal(one.theta, two.theta) and torch.equal(one.weight, two.weight), "draws differ after loading")


def law_distribution(make: Make, seed: int) -> None:
    """`to_distribution` is the same law: equal log_prob."""
    density = make(_space(7))()
    try:
        distribution = density.to_distribution()
    except NotImplementedError as reason:
        raise NotApplicable(str(reason)) from None
    theta = _points(density, seed)
    _close(distribution.log_prob(theta), density.log_prob(theta), 1e-9, "log_prob of to_distribution()")


LAWS: dict[str, Callable[[Make, int], None]] = {
    "draws": law_draws,
    "reproducible": law_reproducible,
    "dense": law_dense,
    "blocks": law_blocks,
    "score": law_score,
    "normalised": law_normalised,
    "gradients": law_gradients,
    "moments": law_moments,
    "positions": law_positions,
    "unbiased": law_unbiased,
    "path_zero": law_path_zero,
    "precision": law_precision,
    "state_dict": law_state_dict,
    "distribution": law_distribution,
}


# --------------------------------------------------------------------------------------------------------- truths


def dense_moments(density: Gaussian) -> tuple[Tensor, Tensor]:
    """Mean and covariance of a Gaussian read off its draws at zero and at unit noise vectors: [P], [P, P]."""

    def unit_noise(groups, P, K, generator, dtype, device):
        noise = torch.cat([torch.zeros(1, P + K, dtype=dtype), torch.eye(P + K, dtype=dtype)])
        return Noise(noise[:, :P], noise[:, P:])

    theta = density.draw(1, unit_noise).theta.detach()
    J = theta[1:] - theta[0]  # [P + K, P]
    return theta[0], J.mT @ J


class _FunctionTarget:
    """A log density over the tensors that a family draws."""

    def __init__(self, family: Family, fn: Callable[[Tensor], Tensor]):
        assert family.space is not None
        self.space, self.fn = family.space, fn

    def log_joint(self, theta: Tensor, batch=None, fixed=None) -> Tensor:
        return self.fn(self.space.join(theta, fixed or {}))


class _GaussianTarget(_FunctionTarget):
    """A normalised Gaussian with a dense covariance."""

    def __init__(self, family: Family, seed: int):
        assert family.space is not None
        P, dtype, generator = family.space.size, family.space.dtype, _generator(seed + 17)
        A = torch.randn(P, P, generator=generator, dtype=dtype)
        mean = 0.5 * torch.randn(P, generator=generator, dtype=dtype)
        self.density = FullNormalDensity(mean, torch.linalg.cholesky(A @ A.mT / P + 0.5 * torch.eye(P, dtype=dtype)))
        super().__init__(family, self.density.log_prob)


def _true_kl(q: Density, target: _GaussianTarget) -> Tensor:
    if isinstance(q, Gaussian):
        return kl(q, target.density)
    if q.offers("log_prob"):
        theta, volume = _quadrature(q)
        log_q = q.log_prob(theta)
        integrand = torch.where(log_q > -700, log_q.exp() * (log_q - target.fn(theta)), 0.0)
        return (integrand * volume).sum()
    epsilon = torch.linspace(-9, 9, 2001, dtype=torch.float64)
    weight = (-0.5 * epsilon.square()).exp() / (2 * pi) ** 0.5 * (epsilon[1] - epsilon[0])

    def grid(groups, P, K, generator, dtype, device):
        return Noise(epsilon.unsqueeze(-1), epsilon.new_zeros(len(epsilon), K))

    return -q.entropy() - (weight * target.fn(q.draw(1, grid).theta)).sum()


def _quadrature(density: Density) -> tuple[Tensor, Tensor]:
    """Double exponential nodes over ℝ^P around the density, exact for heavy tails too: [M, P] and volumes [M]."""
    P = density.P
    t = torch.linspace(-3.6, 3.6, {1: 4001, 2: 501}[P], dtype=torch.float64)
    x = torch.sinh(pi / 2 * torch.sinh(t))
    slope = pi / 2 * torch.cosh(t) * torch.cosh(pi / 2 * torch.sinh(t)) * (t[1] - t[0])
    mean = density.mean.detach().nan_to_num(0.0)
    spread = density.variance.detach().sqrt().nan_to_num(1.0, 1.0).clamp(min=1e-3)
    axes = [mean[i] + spread[i] * x for i in range(P)]
    weights = [spread[i] * slope for i in range(P)]
    theta = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, P)
    volume = torch.stack(torch.meshgrid(*weights, indexing="ij"), dim=-1).prod(-1).reshape(-1)
    return theta, volume


# -------------------------------------------------------------------------------------------------------- helpers


def _maker(family: Family | Make, seed: int) -> Make:
    """A function to a bound family whose parameters have been moved off their symmetric starting values."""
    if not isinstance(family, Family) and not callable(family):
        raise TypeError(f"check_family expects a recipe or a function of Parameters, got {type(family).__name__}")

    def make(space: Parameters) -> Family:
        bound = family.bind(space, _generator(seed)) if isinstance(family, Family) else family(space)
        if not isinstance(bound, Family) or bound.space is None:
            raise TypeError("check_family: the function must return a family bound to the parameters it is given")
        generator = _generator(seed + 1)
        with torch.no_grad():
            for parameter in bound.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter))
        return bound

    return make


def _space(P: int, dtype: torch.dtype = torch.float64) -> Parameters:
    if P < 4:
        return Parameters({"z": torch.zeros(P, dtype=dtype)})
    return Parameters(
        {"a.weight": torch.zeros(2, 2, dtype=dtype), "b.bias": torch.zeros(P - 4, dtype=dtype)}
        if P > 4
        else {"a.weight": torch.zeros(3, dtype=dtype), "b.bias": torch.zeros(1, dtype=dtype)}
    )


def _learned(family: Family) -> dict[str, Tensor]:
    """The variational parameters by name, without the empty ones of rank 0."""
    return {name: parameter for name, parameter in family.named_parameters() if parameter.numel()}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _gaussian(density: Density) -> Gaussian:
    if not isinstance(density, Gaussian):
        raise NotApplicable(f"{type(density).__name__} is no Gaussian")
    return density


def _with_log_prob(density: Density, everywhere: bool = False) -> Density:
    """The density, where it has one to evaluate: over all weights, or over those that are not point masses."""
    if not (density.bound if everywhere else density.has_density) or not density.offers("log_prob"):
        over = "over all weights " if everywhere else ""
        raise NotApplicable(f"{type(density).__name__} has no density {over}to evaluate")
    return density


def _points(density: Density, seed: int) -> Tensor:
    return density.draw(8, naive, _generator(seed)).theta.detach()


def _estimators(density: Density) -> list[Estimator]:
    if not density.has_density:
        return ["path"]
    estimators: list[Estimator] = ["path", "log_q"] if density.offers("log_prob") else []
    if density.offers("entropy"):
        try:
            density.entropy()
            estimators.append("entropy")
        except NotImplementedError:
            pass
    return estimators


def _true(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _close(actual: Tensor, expected: Tensor, relative: float, what: str) -> None:
    """Equal, relative to the largest element of the truth (and absolutely below one)."""
    _true(actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    error = (actual.detach().double() - expected.detach().double()).abs().max().item()
    size = max(1.0, expected.detach().abs().max().item())
    _true(error <= relative * size, f"{what}: off by {error:.2e}, allowed {relative * size:.2e}")


def _within(samples: Tensor, expected: Tensor, what: str) -> None:
    """The mean of independent rows [G, ..] is the truth, to STANDARD_ERRORS of them."""
    mean, error = samples.mean(0), samples.std(0) / samples.shape[0] ** 0.5
    # rounding alone is left where every group is exact
    excess = (mean - expected).abs() / (error + 1e-10 * (1 + expected.abs()))
    worst = excess.max().item()
    _true(worst < STANDARD_ERRORS, f"{what}: {worst:.1f} standard errors from the truth")
