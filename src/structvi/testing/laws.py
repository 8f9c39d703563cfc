"""The laws that every family obeys."""

import copy
from collections.abc import Callable
from itertools import product

import torch
from torch.distributions import MultivariateNormal

from ..couplings import Coupling, naive, paired, unscented
from ..families.family import Family
from ..families.gaussian import Gaussian
from ..objective import Estimator, elbo
from ..parameters import Parameters
from .truth import (
    FunctionTarget,
    GaussianTarget,
    NotApplicable,
    as_gaussian,
    check,
    check_close,
    check_within,
    dense_moments,
    estimators_of,
    global_streams,
    learned_by,
    normals,
    place,
    points_of,
    quadrature,
    seeded,
    small_space,
    true_kl,
    with_log_prob,
)

Make = Callable[[Parameters], Family]


COUPLINGS: dict[str, Coupling] = {
    "naive": naive,
    "paired": paired,
    "unscented": unscented,
    "unscented, not crossed": unscented(crossed=False),
    "unscented, shared diagonal": unscented(shared_diagonal=True),
    "unscented, one direction": unscented(directions=1),
}


def law_draws(make: Make, seed: int) -> None:
    """S draws of P finite numbers in the family's precision, with weights that sum to one."""
    for dtype in (torch.float32, torch.float64):
        density = make(small_space(7, dtype))()
        for name, coupling in COUPLINGS.items():
            draws = density.draw(3, coupling, seeded(seed))
            S, P = draws.theta.shape
            fixed = sum(t.numel() for t in draws.fixed.values())
            check(fixed + P == 7, f"{name}: draws of {P} numbers and {fixed} fixed ones, expected 7")
            check(draws.theta.dtype == dtype, f"{name}: draws in {draws.theta.dtype}, expected {dtype}")
            check(draws.weight.shape == (S,), f"{name}: weights {tuple(draws.weight.shape)} for {S} draws")
            check(bool(torch.isfinite(draws.theta).all()), f"{name}: draws are not finite")
            check_close(draws.weight.sum(), torch.tensor(1.0), 1e-6, f"{name}: weights sum to {draws.weight.sum()}")
            check(S % 3 == 0, f"{name}: {S} draws do not divide into 3 groups")


def law_reproducible(make: Make, seed: int) -> None:
    """Same generator state, same bits; and the global stream is not touched."""
    density = make(small_space(7))()
    before = global_streams()
    first, second, other = (density.draw(4, paired, seeded(s)).theta for s in (seed, seed, seed + 1))
    check(all(map(torch.equal, before, global_streams())), "drawing with a generator changed the global random stream")
    check(torch.equal(first, second), "the same seed gave other draws")
    check(not density.has_density or not torch.equal(first, other), "another seed gave the same draws")


def law_dense(make: Make, seed: int) -> None:
    """Mean, covariance, log_prob, score and entropy of a Gaussian equal the dense ones, in float64 to 1e-9."""
    density = as_gaussian(make(small_space(7))())
    mean, covariance = dense_moments(density)
    theta = density.draw(16, naive, seeded(seed)).theta.detach()
    truth = MultivariateNormal(mean, covariance)
    check_close(density.mean, mean, 1e-9, "mean")
    check_close(density.covariance(), covariance, 1e-9, "covariance()")
    check_close(density.variance, covariance.diagonal(), 1e-9, "variance")
    check_close(density.log_prob(theta), truth.log_prob(theta), 1e-9, "log_prob")
    check_close(density.score(theta), -torch.linalg.solve(covariance, (theta - mean).mT).mT, 1e-9, "score")
    check_close(density.entropy(), truth.entropy(), 1e-9, "entropy")
    check_close(density.precision_diagonal(), torch.linalg.inv(covariance).diagonal(), 1e-9, "precision_diagonal")


def law_blocks(make: Make, seed: int) -> None:
    """The covariance between two named tensors is that block of the dense matrix."""
    density = make(small_space(7))()
    try:
        dense = density.covariance()
    except NotImplementedError as reason:
        raise NotApplicable(str(reason)) from None
    space = small_space(7)
    for first, second in product(space.names, repeat=2):
        block = density.covariance(first, second)
        check_close(block, dense[space.slice(first), space.slice(second)], 1e-12, f"covariance({first!r}, {second!r})")


def law_score(make: Make, seed: int) -> None:
    """The score is the gradient of log_prob in θ, by automatic differentiation, to 1e-9."""
    density = with_log_prob(make(small_space(7))())
    theta = points_of(density, seed)
    reference = theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(density.log_prob(reference).sum(), reference)
    score = density.score(theta)
    check(not score.requires_grad, "the score must come without a graph")
    check_close(score, gradient, 1e-9, "score against autodiff of log_prob")


def law_normalised(make: Make, seed: int) -> None:
    """The density integrates to one over ℝ and ℝ², and −∫ q log q is its entropy, by quadrature."""
    for P in (1, 2):
        density = with_log_prob(make(small_space(P))(), everywhere=True)
        theta, volume = quadrature(density)
        log_q = density.log_prob(theta)
        check_close((log_q.exp() * volume).sum(), torch.tensor(1.0), 1e-6, f"P = {P}: ∫ q")
        if density.offers("entropy"):
            try:
                entropy = density.entropy()
            except NotImplementedError:
                continue
            plogp = torch.where(log_q > -700, log_q.exp() * log_q, 0.0)
            check_close(entropy, -(plogp * volume).sum(), 1e-5, f"P = {P}: entropy against −∫ q log q")


def law_gradients(make: Make, seed: int) -> None:
    """Every variational parameter receives a finite gradient, not all zero, under every estimator on offer."""
    for estimator in estimators_of(make(small_space(7))()):
        family = make(small_space(7))
        target = GaussianTarget(family, seed)
        elbo(
            family, target, estimator=Estimator(estimator, groups=2, coupling=unscented), generator=seeded(seed)
        ).backward()
        for name, parameter in learned_by(family).items():
            gradient = parameter.grad
            if gradient is None:
                raise AssertionError(f"{estimator}: no gradient reaches {name}")
            check(bool(torch.isfinite(gradient).all()), f"{estimator}: the gradient of {name} is not finite")
            check(bool(gradient.abs().max() > 0), f"{estimator}: the gradient of {name} is zero")


def law_moments(make: Make, seed: int) -> None:
    """Draws of every coupling have the density's mean and covariance, to 5.5 standard errors over groups."""
    density = make(small_space(7))()
    groups = 4096
    for name, coupling in COUPLINGS.items():
        draws = density.draw(groups, coupling, seeded(seed))
        if draws.fixed:
            raise NotApplicable("some tensors are fixed")
        weight = groups * draws.weight.detach().reshape(groups, -1, 1)
        theta = draws.theta.detach().reshape(groups, -1, 7)
        mean, variance = density.mean.detach(), density.variance.detach()
        check_within((weight * theta).sum(1), mean, f"{name}: mean of draws")
        check_within((weight * (theta - mean).square()).sum(1), variance, f"{name}: variance of draws")
        try:
            covariance = density.covariance().detach()
        except NotImplementedError:
            continue
        centred = theta - mean
        outer = torch.einsum("gs,gsp,gsq->gpq", weight.squeeze(-1), centred, centred).flatten(1)
        check_within(outer, covariance.flatten(), f"{name}: covariance of draws")


def law_positions(make: Make, seed: int) -> None:
    """At every position in a group a Gaussian's draws are normal: mean zero (so also the un-mirrored rows of
    unscented), and Mahalanobis distances χ²_P (Kolmogorov–Smirnov at level 1e-6)."""
    density = as_gaussian(make(small_space(7))())
    mean, covariance = dense_moments(density)
    cholesky = torch.linalg.cholesky(covariance)
    groups = 4096
    critical = (-0.5 * torch.tensor(1e-6 / 2).log() / groups).sqrt().item()
    for name, coupling in COUPLINGS.items():
        theta = density.draw(groups, coupling, seeded(seed)).theta.detach().reshape(groups, -1, 7)
        white = torch.linalg.solve_triangular(cholesky, (theta - mean).mT, upper=False).mT  # [G, size, P]
        for position in range(white.shape[1]):
            rows = white[:, position]
            check_within(rows, torch.zeros_like(rows[0]), f"{name}: mean at position {position}")
            distance = rows.square().sum(-1).sort().values
            chi2 = torch.special.gammainc(torch.full_like(distance, 3.5), distance / 2)
            steps = torch.arange(groups + 1, dtype=rows.dtype, device=rows.device) / groups
            gap = torch.maximum((chi2 - steps[:-1]).abs(), (steps[1:] - chi2).abs()).max().item()
            check(gap < critical, f"{name}: position {position}: distances are not χ²_7 (KS {gap:.4f})")


def law_unbiased(make: Make, seed: int) -> None:
    """Each estimator's gradient has the expectation −∇KL[q‖p] for a Gaussian p.

    The truth is the closed form for Gaussians, quadrature over θ ∈ ℝ where there is a log_prob, and quadrature over
    the noise where there is only an entropy. The standard error is over 32 means of 64 groups each.
    """
    P = 4 if isinstance(make(small_space(4))(), Gaussian) else 1
    family = make(small_space(P))
    if not family().bound:
        raise NotApplicable("point masses have no KL")
    target = GaussianTarget(family, seed)
    parameters = list(learned_by(family).values())
    truth = torch.autograd.grad(-true_kl(family(), target), parameters)
    for estimator, (name, coupling) in product(estimators_of(family()), COUPLINGS.items()):
        generator = seeded(seed)
        samples = []
        for _ in range(32):
            value = elbo(
                family, target, estimator=Estimator(estimator, groups=64, coupling=coupling), generator=generator
            )
            samples.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, parameters)]))
        expected = torch.cat([g.reshape(-1) for g in truth])
        check_within(torch.stack(samples), expected, f"{estimator}, {name}: gradient of the ELBO")


def law_path_zero(make: Make, seed: int) -> None:
    """If q = p, the path gradient is zero to rounding in every single group of draws."""
    family = make(small_space(7))
    with_log_prob(family(), everywhere=True)
    frozen = copy.deepcopy(family).requires_grad_(False)
    target = FunctionTarget(family, lambda theta: frozen().log_prob(theta))
    generator = seeded(seed)
    for _ in range(8):
        value = elbo(family, target, estimator=Estimator(groups=1, coupling=naive), generator=generator)
        check_close(value, torch.zeros(()), 1e-9, "the ELBO where q = p")
        learned = learned_by(family)
        for name, gradient in zip(learned, torch.autograd.grad(value, list(learned.values())), strict=True):
            size = gradient.abs().max().item()
            check(size < place().tolerance(1e-9), f"the path gradient of {name} is {size:.2e} where q = p")


def law_precision(make: Make, seed: int) -> None:
    """float32 agrees with float64 to its rounding."""
    family = make(small_space(7, torch.float64))
    single = copy.deepcopy(family).float()
    check(single().mean.dtype == torch.float32, "the mean of a float32 family is not float32")
    check_close(single().mean.double(), family().mean, 1e-5, "mean in float32")
    density = with_log_prob(family())
    theta = points_of(density, seed)
    check_close(single().log_prob(theta.float()).double(), density.log_prob(theta), 1e-4, "log_prob in float32")
    check_close(single().score(theta.float()).double(), density.score(theta), 1e-4, "score in float32")


def law_state_dict(make: Make, seed: int) -> None:
    """A family that loads another's state draws the same bits."""
    first = make(small_space(7))
    second = make(small_space(7))
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(1.0)
    second.load_state_dict(first.state_dict())
    one, two = (family().draw(2, paired, seeded(seed)) for family in (first, second))
    check(torch.equal(one.theta, two.theta) and torch.equal(one.weight, two.weight), "draws differ after loading")


def law_normal(make: Make, seed: int) -> None:
    """`normal()` is the density's mean and covariance, and `set_normal` takes that, moved and scaled too, exactly."""
    family, other, generator = make(small_space(7)), make(small_space(7)), seeded(seed)
    form = family.normal()
    if form is None:
        raise NotApplicable("it is no single normal that it can give")
    root = form.triangle()
    check(not form.mean.requires_grad and not root.requires_grad, "normal() must come without a graph")
    check_close(form.mean, family().mean, 1e-12, "mean of normal()")
    check_close(root @ root.mT, family().covariance(), 1e-9, "covariance of normal()")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.5 * normals(*parameter.shape, generator=generator).to(parameter))
    shift, scale = normals(2, 7, generator=generator)
    S = torch.diag(scale.exp())
    for name, given, A in (("own", form, torch.eye(7).to(S)), ("moved", form.affine(shift, scale.exp()), S)):
        other.set_normal(given)
        check_close(other().mean, given.mean, 1e-12, f"mean after set_normal of its {name} normal")
        covariance = A @ root @ root.mT @ A
        check_close(other().covariance(), covariance, 1e-9, f"covariance after set_normal of its {name} normal")


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
    "normal": law_normal,
}
