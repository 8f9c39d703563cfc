"""Dropout both ways: against enumeration, closed forms of the linear Gaussian model, and each other."""

from itertools import product
from math import log

import numpy as np
import pytest
import torch
from torch import nn

import structvi as vi
from structvi.families.blocks import PerLayer
from structvi.families.fitted_dropout import leave_one_out
from structvi.testing import check_family, every_sign

SIGMA = 0.5
COUPLINGS = {
    "naive": vi.couplings.naive,
    "paired": vi.couplings.paired,
    "unscented": vi.couplings.unscented,
    "every sign": every_sign,
}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def data(M, seed=0):
    """Features Π [20, M] and observations t [20] of a linear model."""
    features = torch.randn(20, M, generator=generator(seed), dtype=torch.float64)
    true = torch.randn(M, generator=generator(seed + 1), dtype=torch.float64)
    return features, features @ true + SIGMA * torch.randn(20, generator=generator(seed + 2), dtype=torch.float64)


def linear_target(M):
    """log N(t | Πθ, σ²) + log N(θ | 0, I), as a log density over a free vector."""
    features, t = data(M)
    space = vi.Parameters({"z": 0.5 + torch.arange(M, dtype=torch.float64) / M})

    def log_joint(p):
        return -0.5 * ((t - features @ p["z"]) / SIGMA).square().sum() - 0.5 * p["z"].square().sum()

    return vi.LogDensity(log_joint, space)


def linear_model(M):
    """The same as a network with its batch; the likelihood and the prior have their constants."""
    features, t = data(M)
    net = nn.Linear(M, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        net.weight.copy_(0.5 + torch.arange(M, dtype=torch.float64) / M)
    model = vi.BayesianModel(net, vi.likelihoods.Gaussian(noise=SIGMA), vi.priors.NormalPrior(1.0), num_data=20)
    return model, (features, t.unsqueeze(-1))


def all_masks(M):
    return torch.tensor(list(product([0.0, 1.0], repeat=M)), dtype=torch.float64)


def mask_probability(z, keep):
    return (z * keep + (1 - z) * (1 - keep)).prod(-1)


def scatter(family, seed=5, size=0.3):
    """Moves every parameter off its starting value."""
    with torch.no_grad():
        for parameter in family.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator(seed)).to(parameter))
    return family


def flat(gradients):
    return torch.cat([g.reshape(-1) for g in gradients])


def assert_unbiased(samples, expected, what):
    """5 standard errors: with up to 40 comparisons a right estimator fails with probability below 3e-5."""
    error = samples.std(0) / len(samples) ** 0.5
    worst = ((samples.mean(0) - expected).abs() / (error + 1e-10)).max().item()
    assert worst < 5, f"{what}: {worst:.1f} standard errors"


def elbo_gradients(family, target, batch, repeats, **options):
    parameters = list(family.parameters())
    g = generator(11)
    rows = []
    for _ in range(repeats):
        value = vi.elbo(family, target, batch, vi.Estimator(**options), g)
        rows.append(torch.cat([value.detach().reshape(1), flat(torch.autograd.grad(value, parameters))]))
    return torch.stack(rows)


def maximise(objective, parameters):
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        loss = -objective()
        loss.backward()
        return loss

    optimizer.step(closure)


# -------------------------------------------------------------------------------------------------------- the laws


@pytest.mark.parametrize(
    "recipe",
    [
        vi.MCDropout(keep=0.7),
        vi.MCDropout(keep=0.7, per="input"),
        vi.MCDropout(keep=0.7, per="output"),
        vi.FittedDropout(prior_keep=0.7),
        vi.FittedDropout(prior_keep=0.7, per="input"),
        vi.FittedDropout(prior_keep=0.7, q="logistic_normal"),
        vi.FittedDropout(prior_keep=0.7, q="logistic_normal", gates=vi.LowRankNormal(rank=1), per="output"),
    ],
    ids=repr,
)
def test_laws(recipe):
    verdicts = check_family(recipe)
    for name in ("draws", "reproducible", "gradients", "state_dict"):
        assert verdicts[name] == "held"


# ------------------------------------------------------------------------------------------------------ MC dropout


def test_support_lists_every_state_with_its_probability():
    space = vi.Parameters({"z": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)})
    density = vi.MCDropout(keep=0.8).bind(space)()
    theta, probability = density.support()
    z = (theta != 0).double()
    assert len({tuple(row) for row in z.tolist()}) == 8
    torch.testing.assert_close(probability, mask_probability(z, 0.8))
    torch.testing.assert_close(theta, z * space.initial)
    torch.testing.assert_close(probability.sum().item(), 1.0)
    torch.testing.assert_close(density.log_prob(theta), probability.log())
    torch.testing.assert_close(probability @ theta, density.mean)
    centred = theta - density.mean
    torch.testing.assert_close(centred.mT @ (probability.unsqueeze(-1) * centred), density.covariance())
    torch.testing.assert_close(density.covariance().diagonal(), density.variance)


def test_log_prob_off_the_support_and_where_a_weight_is_zero():
    point = torch.tensor([1.0, 0.0, 3.0], dtype=torch.float64)
    density = vi.MCDropout(keep=0.8).bind(vi.Parameters({"z": point}))()
    off = torch.tensor([[1.0, 0.0, 2.0], [0.5, 0.0, 3.0], [1.0, 0.1, 3.0]], dtype=torch.float64)
    assert (density.log_prob(off) == -torch.inf).all()
    on = torch.tensor([[1.0, 0.0, 3.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    # both values of the second mask give the same point
    expected = torch.tensor([0.8 * 0.8, 0.2 * 0.8, 0.2 * 0.2], dtype=torch.float64).log()
    torch.testing.assert_close(density.log_prob(on), expected)
    theta, probability = density.support()
    torch.testing.assert_close(probability[(theta == on[1]).all(-1)].sum(), expected[1].exp())


@pytest.mark.parametrize(("per", "M"), [("weight", 3 * 2 + 2 * 4 * 4), ("input", 2 + 4), ("output", 3 + 2)])
def test_masks_are_shared_by_units_of_a_network_and_biases_are_exempt(per, M):
    net = nn.Sequential(nn.Linear(2, 3), nn.Conv2d(4, 2, 2), nn.BatchNorm2d(2)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(1.5)
    space = vi.Parameters.of(net)
    density = vi.MCDropout(keep=0.5, per=per).bind(space)()
    assert density.layout.M == M
    draws = density.draw(200, vi.couplings.paired, generator())
    named = space.unravel(draws.theta.detach())
    for name in ("0.bias", "1.bias", "2.weight", "2.bias"):
        assert (named[name] == 1.5).all()
    for name in ("0.weight", "1.weight"):
        tensor = named[name]
        assert ((tensor == 0) | (tensor == 1.5)).all()
        axes = {"weight": (), "input": (1,), "output": (0,)}[per]
        if axes:  # one value along all other axes, and the units apart
            units = tensor.movedim(1 + axes[0], 1).flatten(2)
            assert (units == units[..., :1]).all()
            assert (units[:, 0, 0] != units[:, 1, 0]).any()
    assert (density.log_prob(draws.theta) > -torch.inf).all()
    torch.testing.assert_close(density.log_prob(draws.theta), torch.full((400,), M * log(0.5), dtype=torch.float64))
    broken = draws.theta.detach().clone()
    broken[:, space.slice("0.bias").start] += 1
    assert (density.log_prob(broken) == -torch.inf).all()


def test_units_share_covariance():
    space = vi.Parameters({"w": torch.arange(1.0, 7.0, dtype=torch.float64).reshape(2, 3)})
    density = vi.MCDropout(keep=0.7, per="input").bind(space)()
    theta, probability = density.support()
    assert theta.shape == (8, 6)
    centred = theta - probability @ theta
    dense = centred.mT @ (probability.unsqueeze(-1) * centred)
    assert dense[0, 3] > 0
    assert dense[0, 1].abs() < 1e-12
    torch.testing.assert_close(density.covariance(), dense)


def test_exempt_overrides_the_rule():
    net = nn.Linear(2, 3)
    space = vi.Parameters.of(net)
    assert vi.MCDropout(exempt=()).bind(space).layout.M == 9
    assert vi.MCDropout(exempt="w*").bind(space).layout.M == 3
    assert vi.MCDropout(exempt=lambda name, tensor: tensor.ndim == 1).bind(space).layout.M == 6
    assert vi.MCDropout().bind(vi.Parameters({"a": torch.zeros(4), "s": torch.zeros(())})).layout.M == 5


@pytest.mark.parametrize("coupling", COUPLINGS.values(), ids=COUPLINGS)
def test_keep_one_is_map_and_keep_zero_the_origin(coupling):
    model, batch = linear_model(4)
    for dtype in (torch.float32, torch.float64):
        space = vi.Parameters({"z": torch.randn(1000, generator=generator(), dtype=dtype)})
        one = vi.MCDropout(keep=1.0).bind(space)()
        assert (one.draw(50, coupling, generator()).theta == space.initial).all()
        assert one.log_prob(space.initial.unsqueeze(0)) == 0
        assert one.log_prob(torch.zeros(1, 1000, dtype=dtype)) == -torch.inf
        none = vi.MCDropout(keep=0).bind(space)()
        assert (none.draw(50, coupling, generator()).theta == 0).all()
        assert none.log_prob(torch.zeros(1, 1000, dtype=dtype)) == 0
        assert none.log_prob(space.initial.unsqueeze(0)) == -torch.inf
    dropout, point = (f.bind(model.space) for f in (vi.MCDropout(keep=1.0), vi.MAP()))
    values = [
        vi.elbo(f, model, batch, estimator=vi.Estimator(coupling=coupling), generator=generator())
        for f in (dropout, point)
    ]
    torch.testing.assert_close(*values)
    torch.testing.assert_close(
        *(torch.autograd.grad(v, f.point) for v, f in zip(values, (dropout, point), strict=True))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keep_one_holds_where_the_normal_distribution_function_rounds_to_one(dtype):
    def far(groups, P, K, generator, dtype, device):
        return vi.couplings.Noise(torch.full((groups, P), 9.0, dtype=dtype), torch.zeros(groups, K, dtype=dtype))

    assert torch.special.ndtr(torch.tensor(9.0, dtype=dtype)) == 1
    density = vi.MCDropout(keep=1.0).bind(vi.Parameters({"z": torch.ones(3, dtype=dtype)}))()
    assert (density.draw(1, far).theta == 1).all()


@pytest.mark.parametrize("keep", [0.3, 0.9, 1.0])
def test_optimum_on_a_linear_model_is_the_closed_form(keep):
    M = 8
    target = linear_target(M)
    family = vi.MCDropout(keep=keep).bind(target.space)

    def objective():
        theta, probability = family().support()
        return (probability * target.log_joint(theta)).sum()

    maximise(objective, [family.point])
    features, t = data(M)
    G, b = features.mT @ features / SIGMA**2, features.mT @ t / SIGMA**2
    closed = torch.linalg.solve(keep * G + (1 - keep) * torch.diag(G.diagonal()) + torch.eye(M), b)
    torch.testing.assert_close(family.point.detach(), closed, rtol=0, atol=1e-8)


@pytest.mark.parametrize("coupling", COUPLINGS.values(), ids=COUPLINGS)
def test_stochastic_objective_and_gradient_are_unbiased(coupling):
    target = linear_target(6)
    family = scatter(vi.MCDropout(keep=0.7).bind(target.space))
    z = all_masks(6)
    exact = (mask_probability(z, 0.7) * target.log_joint(family.point * z)).sum()
    expected = torch.cat([exact.detach().reshape(1), torch.autograd.grad(exact, family.point)[0]])
    samples = elbo_gradients(family, target, None, 200, groups=20, coupling=coupling)
    assert_unbiased(samples, expected, "MC dropout")


def test_antithetic_masks_are_negatively_correlated():
    density = vi.MCDropout(keep=0.5).bind(vi.Parameters({"z": torch.ones(100)}))()
    first, second = density.draw(1, vi.couplings.paired, generator()).theta
    assert torch.equal(first, 1 - second)


# -------------------------------------------------------------------------------------------------- fitted dropout


def exact_fitted(family, target, prior_keep):
    """The objective under MAP by brute force over the masks, with its own KL."""
    z, keep = all_masks(len(family.logits)), torch.sigmoid(family.logits)
    kl = (keep * (keep / prior_keep).log() + (1 - keep) * ((1 - keep) / (1 - prior_keep)).log()).sum()
    return (mask_probability(z, keep) * target.log_joint(family.weights.point * z)).sum() - kl


def test_enumerated_objective_is_exact_in_value_and_gradient():
    target = linear_target(5)
    family = scatter(vi.FittedDropout(prior_keep=0.8).bind(target.space))
    assert family().enumerates
    expected = exact_fitted(family, target, 0.8)
    for groups, coupling in product((1, 3), COUPLINGS.values()):
        value = vi.elbo(family, target, estimator=vi.Estimator(groups=groups, coupling=coupling))
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(
            torch.autograd.grad(value, list(family.parameters())),
            torch.autograd.grad(expected, list(family.parameters()), retain_graph=True),
        )
    assert vi.objective.elbo_terms(family, target, estimator=vi.Estimator(groups=3)).objective().shape == (3,)


def test_mc_dropout_is_the_case_where_q_is_the_prior():
    target = linear_target(5)
    fitted = vi.FittedDropout(prior_keep=0.8).bind(target.space)
    dropout = vi.MCDropout(keep=0.8).bind(target.space)
    theta, probability = dropout().support()
    expected = (probability * target.log_joint(theta)).sum()
    value = vi.elbo(fitted, target)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(
        torch.autograd.grad(value, fitted.weights.point), torch.autograd.grad(expected, dropout.point)
    )
    assert fitted().latent_kl().abs() < 1e-14
    for mine, its in zip(fitted().support(), dropout().support(), strict=True):
        torch.testing.assert_close(mine, its)
    for name in ("mean", "variance"):
        torch.testing.assert_close(getattr(fitted(), name), getattr(dropout(), name))
    torch.testing.assert_close(fitted().log_prob(theta), dropout().log_prob(theta))


@pytest.mark.parametrize("coupling", COUPLINGS.values(), ids=COUPLINGS)
@pytest.mark.parametrize("groups", [1, 4])
def test_drawn_masks_give_the_enumerated_objective_and_gradient(coupling, groups):
    # 2^11 masks: twice those that are enumerated. At keep = 1/2 mirrored masks would be opposites, and a baseline from
    # them most biased
    target = linear_target(11)
    family = scatter(vi.FittedDropout(prior_keep=0.5).bind(target.space))
    assert not family().enumerates
    exact = exact_fitted(family, target, 0.5)
    expected = torch.cat([exact.detach().reshape(1), flat(torch.autograd.grad(exact, list(family.parameters())))])
    samples = elbo_gradients(family, target, None, 1200 // groups, groups=groups, coupling=coupling)
    assert_unbiased(samples, expected, f"{groups} groups")


def linear_elbo(family, mean, variance, batch, prior_keep, latent_kl):
    """E log lik + E log prior + H − KL(z) of the linear model in closed form.

    `mean` and `variance` of the masked weights, which are independent; prior and entropy are the mean field θ's.
    """
    features, t = batch
    error = (t.squeeze(-1) - features @ mean).square().sum() + (features.square() @ variance).sum()
    likelihood = -0.5 * error / SIGMA**2 - 20 * log(SIGMA * (2 * torch.pi) ** 0.5)
    q = family.weights
    M = len(q.mean)
    prior = -0.5 * (q.mean.square() + (2 * q.log_scale).exp()).sum() - 0.5 * M * log(2 * torch.pi)
    entropy = q.log_scale.sum() + 0.5 * M * (1 + log(2 * torch.pi))
    return likelihood + prior + entropy - latent_kl


@pytest.mark.parametrize("coupling", COUPLINGS.values(), ids=COUPLINGS)
@pytest.mark.parametrize("M", [3, 12], ids=["enumerated", "drawn"])
@pytest.mark.parametrize("estimator", ["path", "log_q", "entropy"])
def test_masks_over_a_mean_field_give_the_closed_form(estimator, M, coupling):
    model, batch = linear_model(M)
    family = scatter(vi.FittedDropout(prior_keep=0.8, weights=vi.MeanField()).bind(model.space))
    keep, mu, square = torch.sigmoid(family.logits), family.weights.mean, (2 * family.weights.log_scale).exp()
    kl = (keep * (keep / 0.8).log() + (1 - keep) * ((1 - keep) / 0.2).log()).sum()
    exact = linear_elbo(family, keep * mu, keep * (square + mu**2) - (keep * mu) ** 2, batch, 0.8, kl)
    expected = torch.cat([exact.detach().reshape(1), flat(torch.autograd.grad(exact, list(family.parameters())))])
    samples = elbo_gradients(family, model, batch, 100, groups=3, coupling=coupling, kind=estimator)
    assert_unbiased(samples, expected, estimator)


def logistic_moments(mean, scale):
    """E z and E z² by Gauss–Hermite quadrature, which the density does not use: [M]."""
    nodes, weights = (torch.from_numpy(x) for x in np.polynomial.hermite_e.hermegauss(80))
    z = torch.sigmoid(mean.unsqueeze(-1) + scale.unsqueeze(-1) * nodes)
    weights = weights / weights.sum()
    return z @ weights, z.square() @ weights


@pytest.mark.parametrize("coupling", COUPLINGS.values(), ids=COUPLINGS)
def test_logistic_normal_masks_give_the_closed_form(coupling):
    M = 6
    model, batch = linear_model(M)
    recipe = vi.FittedDropout(prior_keep=0.8, q="logistic_normal", weights=vi.MeanField())
    family = scatter(recipe.bind(model.space))
    gates, mu, square = family.gates, family.weights.mean, (2 * family.weights.log_scale).exp()
    one, two = logistic_moments(gates.mean, gates.log_scale.exp())
    kl = 0.5 * ((2 * gates.log_scale).exp() + (gates.mean - log(4)) ** 2 - 1 - 2 * gates.log_scale).sum()
    exact = linear_elbo(family, one * mu, two * (square + mu**2) - (one * mu) ** 2, batch, 0.8, kl)
    expected = torch.cat([exact.detach().reshape(1), flat(torch.autograd.grad(exact, list(family.parameters())))])
    samples = elbo_gradients(family, model, batch, 150, groups=3, coupling=coupling)
    assert_unbiased(samples, expected, "logistic normal")
    torch.testing.assert_close(family().mean, one * mu, rtol=1e-9, atol=0)
    torch.testing.assert_close(family().variance, two * (square + mu**2) - (one * mu) ** 2, rtol=1e-9, atol=0)
    torch.testing.assert_close(family().latent_kl(), kl)


@pytest.mark.parametrize("coupling", COUPLINGS.values(), ids=COUPLINGS)
@pytest.mark.parametrize("gates", [vi.MeanField(), vi.LowRankNormal(rank=2), vi.FullNormal()], ids=repr)
@pytest.mark.parametrize("weights", [vi.MAP(), vi.MeanField(), vi.LowRankPrecision(rank=3)], ids=repr)
def test_gates_and_weights_of_any_ranks_share_one_coupling(weights, gates, coupling):
    model, batch = linear_model(4)
    recipe = vi.FittedDropout(q="logistic_normal", weights=weights, gates=gates)
    family = scatter(recipe.bind(model.space, generator()))
    draws = family().draw(3, coupling, generator())
    assert len(draws.theta) % 3 == 0
    latent = draws.latent if family().has_density else family.weights.point
    z = draws.theta / latent
    assert ((z > 0) & (z < 1)).all()
    vi.elbo(family, model, batch, estimator=vi.Estimator(coupling=coupling), generator=generator()).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in family.parameters())
    if coupling is vi.couplings.paired:
        gate = torch.logit(z.detach()).reshape(3, 2, 4)
        torch.testing.assert_close(gate.mean(1), family().gates.mean.detach().expand(3, 4))


class StudentT(vi.Family):
    def initialise(self, parameters, generator):
        self.loc = nn.Parameter(parameters.initial.clone())

    def forward(self):
        return torch.distributions.Independent(torch.distributions.StudentT(5.0, self.loc, 0.1), 1)


@pytest.mark.parametrize("q", ["bernoulli", "logistic_normal"])
@pytest.mark.parametrize("M", [3, 12])
def test_weights_under_a_users_own_family(q, M):
    model, batch = linear_model(M)
    family = vi.FittedDropout(q=q, weights=StudentT()).bind(model.space)
    assert family().has_density
    draws = family().draw(4, vi.couplings.paired, generator())
    torch.testing.assert_close(draws.weight.sum().item(), 1.0)
    torch.testing.assert_close(family().log_prob(draws.latent), family.weights().log_prob(draws.latent))
    vi.elbo(family, model, batch, estimator=vi.Estimator(groups=4), generator=generator()).backward()
    assert all(p.grad.abs().max() > 0 for p in family.parameters())


@pytest.mark.parametrize("per", ["weight", "input", "output"])
@pytest.mark.parametrize("weights", [vi.MAP(), vi.LowRankNormal(rank=2)], ids=repr)
def test_moments_of_draws_are_the_densitys(weights, per):
    net = nn.Linear(2, 3, dtype=torch.float64)
    family = scatter(vi.FittedDropout(0.7, weights=weights, per=per).bind(vi.Parameters.of(net), generator()))
    density = family()
    groups = 1 if density.enumerates else 16  # each draw of θ goes with all masks
    rows = []
    for seed in range(1 if density.enumerates else 400):
        draws = density.draw(groups, vi.couplings.naive, generator(seed))
        centred = (draws.theta - density.mean).detach()
        second = centred.mT @ (draws.weight.detach().unsqueeze(-1) * centred)
        rows.append(torch.cat([draws.weight.detach() @ centred, second.flatten()]))
    expected = torch.cat([torch.zeros(9, dtype=torch.float64), density.covariance().detach().flatten()])
    if density.enumerates:
        torch.testing.assert_close(rows[0], expected)
    else:
        assert_unbiased(torch.stack(rows), expected, "mean and covariance")
    torch.testing.assert_close(density.covariance().diagonal(), density.variance)


def test_weights_of_draws_sum_to_one_with_their_gradient():
    for M in (4, 11, 40):
        target = linear_target(M)
        family = scatter(vi.FittedDropout(0.8).bind(target.space))
        total = family().draw(2, vi.couplings.paired, generator()).weight.sum()
        torch.testing.assert_close(total.item(), 1.0)
        (gradient,) = torch.autograd.grad(total, family.logits)
        assert gradient.abs().max() < 1e-12


def test_leave_one_out_is_the_textbook_estimator():
    S, M = 5, 3
    logits = torch.randn(M, generator=generator(), dtype=torch.float64, requires_grad=True)
    z = torch.randint(0, 2, (S, M), generator=generator()).double()
    f = torch.randn(S, generator=generator(), dtype=torch.float64)
    log_q = -nn.functional.binary_cross_entropy_with_logits(logits.expand(S, M), z, reduction="none").sum(-1)
    weight = torch.softmax(torch.randn(S, generator=generator(), dtype=torch.float64), 0)
    (got,) = torch.autograd.grad((leave_one_out(weight, log_q) * f).sum(), logits)
    score = z - torch.sigmoid(logits.detach())
    baseline = (f.sum() - f) / (S - 1)
    torch.testing.assert_close(got, ((weight * (f - baseline)).unsqueeze(-1) * score).sum(0))


def test_fitted_masks_find_the_best_independent_posterior():
    """θ̂ held fixed: ascent by enumeration against coordinate ascent and a grid over (p_1, p_2, p_3)."""
    M, prior = 3, 0.6
    features, t = data(M)
    point = torch.tensor([1.0, -0.4, 0.15], dtype=torch.float64)
    space = vi.Parameters({"z": point})
    target = vi.LogDensity(lambda p: -0.05 * (t - features @ p["z"]).square().sum(), space)
    family = vi.FittedDropout(prior).bind(space)
    maximise(lambda: vi.elbo(family, target), [family.logits])
    fitted = torch.sigmoid(family.logits.detach())
    value = vi.elbo(family, target).item()

    z = all_masks(M)
    f = target.log_joint(point * z) + mask_probability(z, z.new_tensor(prior)).log()  # log p(t, z)

    def bound(keep):
        q = mask_probability(z, keep)
        return (q * (f - q.log())).sum()

    best, best_value = None, -torch.inf
    for start in product([0.1, 0.9], repeat=M):
        keep = torch.tensor(start, dtype=torch.float64)
        for _ in range(500):
            for i in range(M):
                on, off = (mask_probability(z, torch.where(torch.arange(M) == i, x, keep)) for x in (1.0, 0.0))
                keep[i] = torch.sigmoid((on * f).sum() - (off * f).sum())
        if bound(keep) > best_value:
            best, best_value = keep, bound(keep).item()
    torch.testing.assert_close(fitted, best, rtol=0, atol=1e-6)
    assert value == pytest.approx(best_value, abs=1e-10)
    grid = torch.cartesian_prod(*[torch.linspace(0.01, 0.99, 25, dtype=torch.float64)] * M)
    q = (z * grid.unsqueeze(1) + (1 - z) * (1 - grid.unsqueeze(1))).prod(-1)
    assert (q * (f - q.log())).sum(-1).max().item() <= value
    assert value <= torch.logsumexp(f, 0).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "recipe",
    [
        vi.MCDropout(per="input"),
        vi.FittedDropout(),
        vi.FittedDropout(weights=vi.LowRankNormal(rank=2)),
        vi.FittedDropout(q="logistic_normal", weights=vi.MeanField(), gates=vi.FullNormal()),
    ],
    ids=repr,
)
def test_state_and_precision(recipe, dtype):
    net = nn.Linear(4, 3).to(dtype)
    space = vi.Parameters.of(net)
    first, second = (scatter(recipe.bind(space, generator(s)), seed=s) for s in (0, 1))
    second.load_state_dict(first.state_dict())
    one, two = (f().draw(2, vi.couplings.unscented, generator(4)) for f in (first, second))
    assert torch.equal(one.theta, two.theta)
    assert torch.equal(one.weight, two.weight)
    assert one.theta.dtype == one.weight.dtype == first().mean.dtype == dtype
    model = vi.BayesianModel(net, vi.likelihoods.Gaussian(noise=0.5), vi.priors.NormalPrior(1.0), num_data=5)
    batch = (torch.randn(5, 4, generator=generator(), dtype=dtype), torch.zeros(5, 3, dtype=dtype))
    value = vi.elbo(first, model, batch, generator=generator())
    assert value.dtype == dtype
    value.backward()


# ------------------------------------------------------------------------------------------------------ bad inputs

FREE = vi.Parameters({"z": torch.ones(3)})
PARTLY_FIXED = PerLayer({"a": vi.MAP(), "b": vi.MeanField()})
TWO = vi.Parameters({"a": torch.ones(3), "b": torch.ones(2)})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: vi.MCDropout(keep=1.1), ValueError, r"keep must be a probability to keep, in \[0, 1\], got 1.1"),
        (lambda: vi.MCDropout(keep=-0.1), ValueError, "keep must be a probability"),
        (lambda: vi.MCDropout(keep=True), ValueError, "keep must be a probability"),
        (lambda: vi.MCDropout(keep="0.9"), ValueError, "keep must be a probability"),
        (lambda: vi.MCDropout(keep=float("nan")), ValueError, "keep must be a probability"),
        (lambda: vi.MCDropout(per="unit"), ValueError, 'per must be "weight", "input" or "output", got \'unit\''),
        (lambda: vi.MCDropout(initial_mean="mean"), ValueError, "initial_mean must be"),
        (lambda: vi.MCDropout(exempt="w").bind(FREE), ValueError, "exempt: the pattern 'w' matches none"),
        (lambda: vi.MCDropout(exempt="z").bind(FREE), ValueError, "every one of the 1 tensors is exempt"),
        (lambda: vi.MCDropout()(), ValueError, "call .bind"),
        (lambda: vi.FittedDropout(prior_keep=1.0), ValueError, r"inside \(0, 1\), got 1.0"),
        (lambda: vi.FittedDropout(prior_keep=0), ValueError, r"inside \(0, 1\), got 0"),
        (lambda: vi.FittedDropout(q="normal"), ValueError, 'q must be "bernoulli" or "logistic_normal"'),
        (lambda: vi.FittedDropout(per="unit"), ValueError, "per must be"),
        (lambda: vi.FittedDropout(weights="MAP"), TypeError, "weights must be a family"),
        (lambda: vi.FittedDropout(weights=vi.FittedDropout()), TypeError, "not masked again"),
        (lambda: vi.FittedDropout(gates=vi.MeanField()), ValueError, 'gates are for q="logistic_normal"'),
        (
            lambda: vi.FittedDropout(q="logistic_normal", gates=vi.MAP()).bind(FREE),
            TypeError,
            "gates must be a Gaussian",
        ),
        (
            lambda: vi.FittedDropout(weights=PARTLY_FIXED).bind(TWO)().draw(),
            ValueError,
            "partly fixed or masked already",
        ),
        (
            lambda: vi.FittedDropout(q="logistic_normal", weights=PARTLY_FIXED).bind(TWO)().draw(),
            ValueError,
            "partly fixed or masked already",
        ),
        (lambda: vi.MCDropout().bind(FREE)().draw(0), ValueError, "groups must be an integer"),
        (lambda: vi.FittedDropout().bind(FREE)().draw(0), ValueError, "groups must be an integer"),
        (lambda: vi.MCDropout().bind(FREE)().log_prob(torch.zeros(3)), ValueError, r"expected theta of shape \[S, P\]"),
        (lambda: vi.MCDropout().bind(FREE)().entropy(), NotImplementedError, "no finite differential entropy"),
        (lambda: vi.MCDropout().bind(FREE)().score(torch.zeros(1, 3)), NotImplementedError, "no score"),
        (
            lambda: vi.FittedDropout(q="logistic_normal").bind(FREE)().log_prob(torch.zeros(1, 3)),
            NotImplementedError,
            "every point has probability zero",
        ),
        (
            lambda: vi.FittedDropout(q="logistic_normal").bind(FREE)().covariance(),
            NotImplementedError,
            "estimate this covariance from draws",
        ),
        (
            lambda: vi.FittedDropout(weights=vi.MeanField()).bind(FREE)().support(),
            NotImplementedError,
            "needs weights under MAP",
        ),
        (
            lambda: vi.MCDropout().bind(vi.Parameters({"z": torch.ones(21)}))().support(),
            ValueError,
            r"support\(\) has 2\^21 states",
        ),
        (
            lambda: vi.elbo(
                vi.FittedDropout(weights=vi.MeanField()).bind(FREE), vi.LogDensity(lambda p: p["z"].sum(), FREE)
            ),
            TypeError,
            "needs a BayesianModel",
        ),
    ],
)
def test_bad_inputs(call, error, message):
    with pytest.raises(error, match=message):
        call()
