"""The laws that every family obeys."""

import copy
from itertools import product

import torch
from torch.distributions import MultivariateNormal

from ..couplings import Coupling, naive, paired, unscented
from ..families.family import Family
from ..families.gaussian import Gaussian
from ..objective import Estimator, elbo
from .truth import (
    Case,
    FunctionTarget,
    GaussianTarget,
    NotApplicable,
    as_gaussian,
    check,
    dense_moments,
    estimators_of,
    offers_entropy,
    quadrature,
    true_kl,
    with_log_prob,
)

COUPLINGS: dict[str, Coupling] = {
    "naive": naive,
    "paired": paired,
    "unscented": unscented,
    "unscented, not crossed": unscented(crossed=False),
    "unscented, shared diagonal": unscented(shared_diagonal=True),
    "unscented, one direction": unscented(directions=1),
}


def law_draws(case: Case) -> None:
    """S draws of P finite numbers in the family's precision, with weights that sum to one."""
    for dtype in (torch.float32, torch.float64):
        density = case.family(7, dtype)()
        for name, coupling in COUPLINGS.items():
            theta, weight, fixed = density.draw(3, coupling, case.generator())
            own = 7 - sum(t.numel() for t in fixed.values())
            check(theta.shape == (len(weight), own), f"{name}: draws {tuple(theta.shape)}, weights {len(weight)}")
            check(theta.dtype == dtype, f"{name}: draws in {theta.dtype}, expected {dtype}")
            check(bool(torch.isfinite(theta).all()), f"{name}: draws are not finite")
            case.check_close(weight.sum(), torch.tensor(1.0), 1e-6, f"{name}: sum of weights")
            check(len(theta) % 3 == 0, f"{name}: {len(theta)} draws do not divide into 3 groups")


def law_reproducible(case: Case) -> None:
    """Same generator state, same bits; and the global stream is not touched."""
    density = case.family(7)()
    streams = [torch.get_rng_state] + [torch.cuda.get_rng_state] * (case.device.type == "cuda")
    before = [stream() for stream in streams]
    first, second, other = (density.draw(4, paired, case.generator(more)).theta for more in (0, 0, 1))
    now = [stream() for stream in streams]
    check(all(map(torch.equal, before, now)), "drawing with a generator changed the global random stream")
    check(torch.equal(first, second), "the same seed gave other draws")
    check(not density.has_density or not torch.equal(first, other), "another seed gave the same draws")


def law_dense(case: Case) -> None:
    """Mean, covariance, log_prob and entropy of a Gaussian equal the dense ones, in float64 to 1e-9."""
    density = as_gaussian(case.family(7)())
    mean, covariance = dense_moments(density)
    theta = density.draw(16, naive, case.generator()).theta.detach()
    truth = MultivariateNormal(mean, covariance)
    case.check_close(density.mean, mean, 1e-9, "mean")
    case.check_close(density.covariance(), covariance, 1e-9, "covariance()")
    case.check_close(density.variance, covariance.diagonal(), 1e-9, "variance")
    case.check_close(density.log_prob(theta), truth.log_prob(theta), 1e-9, "log_prob")
    case.check_close(density.entropy(), truth.entropy(), 1e-9, "entropy")
    case.check_close(density.precision_diagonal(), torch.linalg.inv(covariance).diagonal(), 1e-9, "precision_diagonal")


def law_blocks(case: Case) -> None:
    """The covariance between two named tensors is that block of the dense matrix."""
    density = case.family(7)()
    try:
        dense = density.covariance()
    except NotImplementedError as reason:
        raise NotApplicable(str(reason)) from None
    space = density.named_space()
    for first, second in product(space.names, repeat=2):
        block, whole = density.covariance(first, second), dense[space.slice(first), space.slice(second)]
        case.check_close(block, whole, 1e-12, f"covariance({first!r}, {second!r})")


def law_score(case: Case) -> None:
    """The score is the gradient of log_prob in θ, by automatic differentiation, to 1e-9."""
    density = with_log_prob(case.family(7)())
    theta = density.draw(8, naive, case.generator()).theta.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(density.log_prob(theta).sum(), theta)
    score = density.score(theta)
    check(not score.requires_grad, "the score must come without a graph")
    case.check_close(score, gradient, 1e-9, "score against autodiff of log_prob")


def law_normalised(case: Case) -> None:
    """The density integrates to one over ℝ and ℝ², and −∫ q log q is its entropy, by quadrature."""
    for P in (1, 2):
        density = with_log_prob(case.family(P)(), everywhere=True)
        theta, volume = quadrature(density)
        log_q = density.log_prob(theta)
        case.check_close((log_q.exp() * volume).sum(), torch.tensor(1.0), 1e-6, f"P = {P}: ∫ q")
        if offers_entropy(density):
            plogp = torch.where(log_q > -700, log_q.exp() * log_q, 0.0)
            case.check_close(density.entropy(), -(plogp * volume).sum(), 1e-5, f"P = {P}: entropy against −∫ q log q")


def law_moments(case: Case) -> None:
    """Draws of every coupling have the density's mean and covariance, to 5.5 standard errors over groups."""
    density = case.family(7)()
    groups = 4096
    mean = density.mean.detach()
    try:
        covariance = density.covariance().detach()
    except NotImplementedError:
        covariance = None
    for name, coupling in COUPLINGS.items():
        draws = density.draw(groups, coupling, case.generator())
        if draws.fixed:
            raise NotApplicable("some tensors are fixed")
        weight = groups * draws.weight.detach().reshape(groups, -1, 1)
        theta = draws.theta.detach().reshape(groups, -1, 7)
        case.check_within((weight * theta).sum(1), mean, f"{name}: mean of draws")
        squares = (weight * (theta - mean).square()).sum(1)
        case.check_within(squares, density.variance.detach(), f"{name}: variance of draws")
        if covariance is not None:
            outer = torch.einsum("gs,gsp,gsq->gpq", weight.squeeze(-1), theta - mean, theta - mean)
            case.check_within(outer, covariance, f"{name}: covariance of draws")


def law_positions(case: Case) -> None:
    """At every position in a group a Gaussian's draws are normal: mean zero (so also the un-mirrored rows of
    unscented), and Mahalanobis distances χ²_P (Kolmogorov–Smirnov at level 1e-6)."""
    density = as_gaussian(case.family(7)())
    mean, covariance = dense_moments(density)
    cholesky = torch.linalg.cholesky(covariance)
    groups = 4096
    critical = (-0.5 * torch.tensor(1e-6 / 2).log() / groups).sqrt().item()
    for name, coupling in COUPLINGS.items():
        theta = density.draw(groups, coupling, case.generator()).theta.detach().reshape(groups, -1, 7)
        white = torch.linalg.solve_triangular(cholesky, (theta - mean).mT, upper=False).mT  # [G, size, P]
        for position, rows in enumerate(white.unbind(1)):
            case.check_within(rows, torch.zeros_like(rows[0]), f"{name}: mean at position {position}")
            distance = rows.square().sum(-1).sort().values
            chi2 = torch.special.gammainc(torch.full_like(distance, 3.5), distance / 2)
            steps = torch.arange(groups + 1, dtype=rows.dtype, device=rows.device) / groups
            gap = torch.maximum((chi2 - steps[:-1]).abs(), (steps[1:] - chi2).abs()).max().item()
            check(gap < critical, f"{name}: position {position}: distances are not χ²_7 (KS {gap:.4f})")


def law_unbiased(case: Case) -> None:
    """Each estimator's gradient has the expectation −∇KL[q‖p] for a Gaussian p.

    The truth is the closed form for Gaussians, quadrature over θ ∈ ℝ where there is a log_prob, and quadrature over
    the noise where there is only an entropy. The standard error is over 32 means of 64 groups each.
    """
    family = case.family(4 if isinstance(case.family(4)(), Gaussian) else 1)
    if not family().bound:
        raise NotApplicable("point masses have no KL")
    target = GaussianTarget(family, case)
    parameters = list(_learned(family).values())
    truth = torch.autograd.grad(-true_kl(family(), target), parameters)
    expected = torch.cat([g.reshape(-1) for g in truth])
    for kind, (name, coupling) in product(estimators_of(family()), COUPLINGS.items()):
        generator = case.generator()
        samples = []
        for _ in range(32):
            value = elbo(family, target, estimator=Estimator(kind, 64, coupling), generator=generator)
            samples.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, parameters)]))
        case.check_within(torch.stack(samples), expected, f"{kind}, {name}: gradient of the ELBO")


def law_path_zero(case: Case) -> None:
    """If q = p, the path gradient is zero to rounding in every single group of draws."""
    family = case.family(7)
    with_log_prob(family(), everywhere=True)
    frozen = copy.deepcopy(family).requires_grad_(False)
    target = FunctionTarget(family, lambda theta: frozen().log_prob(theta))
    generator, learned = case.generator(), _learned(family)
    for _ in range(8):
        value = elbo(family, target, estimator=Estimator(groups=1, coupling=naive), generator=generator)
        case.check_close(value, torch.zeros(()), 1e-9, "the ELBO where q = p")
        for name, gradient in zip(learned, torch.autograd.grad(value, list(learned.values())), strict=True):
            case.check_close(gradient, torch.zeros_like(gradient), 1e-9, f"the path gradient of {name} where q = p")


def law_precision(case: Case) -> None:
    """float32 agrees with float64 to its rounding."""
    family = case.family(7, torch.float64)
    density, single = with_log_prob(family()), copy.deepcopy(family).float()()
    check(single.mean.dtype == torch.float32, "the mean of a float32 family is not float32")
    case.check_close(single.mean, density.mean, 1e-5, "mean in float32")
    theta = density.draw(8, naive, case.generator()).theta.detach()
    case.check_close(single.log_prob(theta.float()), density.log_prob(theta), 1e-4, "log_prob in float32")
    case.check_close(single.score(theta.float()), density.score(theta), 1e-4, "score in float32")


def law_normal(case: Case) -> None:
    """`normal()` is the density's mean and covariance, and `set_normal` takes that, moved and scaled too, exactly."""
    family, other, generator = case.family(7), case.family(7), case.generator()
    form = family.normal()
    if form is None:
        raise NotApplicable("it is no single normal that it can give")
    root = form.triangle()
    check(not form.mean.requires_grad and not root.requires_grad, "normal() must come without a graph")
    case.check_close(form.mean, family().mean, 1e-12, "mean of normal()")
    case.check_close(root @ root.mT, family().covariance(), 1e-9, "covariance of normal()")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.5 * case.normals(*parameter.shape, generator=generator).to(parameter))
    shift, scale = case.normals(2, 7, generator=generator)
    S = torch.diag(scale.exp())
    for name, given, A in (("own", form, torch.eye(7).to(S)), ("moved", form.affine(shift, scale.exp()), S)):
        other.set_normal(given)
        covariance = A @ root @ root.mT @ A
        case.check_close(other().mean, given.mean, 1e-12, f"mean after set_normal of its {name} normal")
        case.check_close(other().covariance(), covariance, 1e-9, f"covariance after set_normal of its {name} normal")


def _learned(family: Family) -> dict[str, torch.Tensor]:
    """The variational parameters by name, without the empty ones of rank 0."""
    return {name: parameter for name, parameter in family.named_parameters() if parameter.numel()}


LAWS = {
    law.__name__.removeprefix("law_"): law
    for law in (
        law_draws, law_reproducible, law_dense, law_blocks, law_score, law_normalised, law_moments,
        law_positions, law_unbiased, law_path_zero, law_precision, law_normal,
    )
}  # fmt: skip
