"""Likelihoods against torch.distributions, values and gradients; masks; an unknown noise against exact posteriors."""

from math import log

import pytest
import torch
from torch import nn
from torch.distributions import Gamma, InverseGamma, LogNormal, Normal
from torch.func import functional_call, vmap
from torch.utils.data import DataLoader, Dataset

import structvi as vi
from structvi.models.likelihoods import Bernoulli, Categorical, Gaussian, Poisson

S, B = 3, 4


@pytest.fixture(autouse=True)
def _float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def labels(high, *shape):
    return torch.randint(high, shape)


#: name → (likelihood, trailing shape → output of S draws, trailing shape → target). C = 3 channels.
CASES = {
    "known": (lambda: Gaussian(0.3), lambda t: torch.randn(S, B, 3, *t), lambda t: torch.randn(B, 3, *t)),
    "point": (lambda: Gaussian("point", 0.3), lambda t: torch.randn(S, B, 3, *t), lambda t: torch.randn(B, 3, *t)),
    "random": (lambda: Gaussian("random", 0.3), lambda t: torch.randn(S, B, 3, *t), lambda t: torch.randn(B, 3, *t)),
    "head": (lambda: Gaussian("head"), lambda t: torch.randn(S, B, 6, *t), lambda t: torch.randn(B, 3, *t)),
    "categorical": (Categorical, lambda t: torch.randn(S, B, 3, *t), lambda t: labels(3, B, *t)),
    "bernoulli": (Bernoulli, lambda t: torch.randn(S, B, *t), lambda t: labels(2, B, *t)),
    "poisson": (Poisson, lambda t: torch.randn(S, B, *t), lambda t: labels(6, B, *t)),
}
every_case = pytest.mark.parametrize("name", list(CASES))


def case(name, trailing):
    make, output, target = CASES[name]
    likelihood = make()
    values = {"log_noise": torch.randn(S)} if name == "random" else {}
    return likelihood, output(trailing), target(trailing), values


def at_draws(likelihood, output, target, values):
    """The likelihood as a BayesianModel calls it: one draw at a time, vmapped."""
    return vmap(lambda y, v: functional_call(likelihood, v, (y, target)))(output, values)


def an_observation_mask(target):
    return (torch.arange(target.numel()) % 3 != 1).reshape(target.shape)


@every_case
@pytest.mark.parametrize("trailing", [(), (2, 3)])
def test_log_prob_and_gradient_equal_the_torch_distribution(name, trailing):
    likelihood, output, target, values = case(name, trailing)
    output.requires_grad_()
    for value in values.values():
        value.requires_grad_()
    inputs = [output, *values.values(), *likelihood.parameters()]
    got = at_draws(likelihood, output, target, values)
    distribution = likelihood.distribution(output, values)
    # torch's Bernoulli takes only floats
    expected = distribution.log_prob(target.double() if name == "bernoulli" else target)
    assert got.shape == expected.shape == distribution.batch_shape == (S, *target.shape)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(got)
    for a, b in zip(
        torch.autograd.grad((weight * got).sum(), inputs),
        torch.autograd.grad((weight * expected).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@every_case
@pytest.mark.parametrize("trailing", [(), (2, 3, 2)])
def test_masked_elements_contribute_zero_whatever_they_hold(name, trailing):
    likelihood, output, target, values = case(name, trailing)
    output.requires_grad_()
    full = at_draws(likelihood, output, target, values)
    mask = an_observation_mask(target)
    junk = target.masked_fill(~mask, torch.nan if target.dtype.is_floating_point else -7)
    got = at_draws(likelihood, output, (junk, mask), values)
    assert torch.equal(got, torch.where(mask, full, 0.0))
    (grad,) = torch.autograd.grad(got.sum(), output)
    (expected,) = torch.autograd.grad(full[:, mask].sum(), output)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["categorical", "bernoulli"])
@pytest.mark.parametrize("ignore_index", [255, -1, 1])
def test_ignore_index_is_a_mask(name, ignore_index):
    _, output, target, _ = case(name, (2, 3))
    mask = an_observation_mask(target) & (target != ignore_index)
    kind = type(CASES[name][0]())
    marked = target.masked_fill(~mask, ignore_index)
    got = at_draws(kind(ignore_index=ignore_index), output, marked, {})
    assert torch.equal(got, at_draws(kind(), output, (target, mask), {}))
    assert (got[:, mask] < 0).all()
    other = torch.ones_like(mask)
    other[0] = False
    both = at_draws(kind(ignore_index=ignore_index), output, (marked, other), {})
    assert torch.equal(both, at_draws(kind(), output, (target, mask & other), {}))


@pytest.mark.parametrize(("name", "weights"), [("categorical", (0.5, 2.0, 0.0)), ("bernoulli", (0.25, 3.0))])
def test_class_weights_multiply_log_probabilities_and_are_no_likelihood(name, weights):
    _, output, target, _ = case(name, (2, 3))
    kind = type(CASES[name][0]())
    weighted = kind(ignore_index=-1, class_weights=torch.tensor(weights))
    assert kind().exact
    assert not weighted.exact
    target[0] = -1
    plain = at_draws(kind(ignore_index=-1), output, target, {})
    expected = plain * torch.tensor(weights)[target.clamp(min=0)]
    torch.testing.assert_close(at_draws(weighted, output, target, {}), expected, rtol=1e-14, atol=0)
    observed = target.clamp(min=0).double()
    assert torch.equal(weighted.distribution(output).log_prob(observed), kind().distribution(output).log_prob(observed))


@pytest.mark.parametrize("prior", [None, InverseGamma(3.0, 0.5), LogNormal(0.0, 1.0), Gamma(2.0, 2.0)])
def test_the_prior_of_log_noise_integrates_to_one(prior):
    """Trapezoid over log σ; without the Jacobian 2σ² it would not."""
    likelihood = Gaussian("random", initial=0.7, noise_prior=prior)
    grid = torch.linspace(-12, 12, 20001)
    density = likelihood.log_prior({"log_noise": grid}).exp()
    assert abs(torch.trapezoid(density, grid).item() - 1) < 1e-6
    if prior is None:
        torch.testing.assert_close(density, Normal(log(0.7), 1.0).log_prob(grid).exp())


# ---- in a BayesianModel


def line(N=40, d=2, noise=0.5):
    X = torch.randn(N, d)
    t = X @ torch.linspace(-1.0, 1.0, d)[:, None] + noise * torch.randn(N, 1)
    return X, t


def random_noise_model(d=2, N=40, **keywords):
    likelihood = Gaussian("random", noise_prior=InverseGamma(3.0, 2.0))
    return vi.BayesianModel(nn.Linear(d, 1, bias=False), likelihood, vi.priors.NormalPrior(2.0), N, **keywords)


@pytest.mark.parametrize("evaluation", ["vmap", "loop", "auto"])
def test_random_noise_is_appended_and_enters_likelihood_and_prior(evaluation):
    X, t = line()
    model = random_noise_model(evaluation=evaluation)
    assert model.space.names == ("weight", "likelihood.log_noise")
    assert model.net_space.names == ("weight",)
    assert not list(model.likelihood.parameters())
    theta = torch.randn(S, 3, requires_grad=True)
    w, log_noise = theta[:, :2], theta[:, 2]
    got = model.log_joint(theta, (X[:10], t[:10]))
    variance = (2 * log_noise).exp()
    expected = 4 * Normal(w @ X[:10].T, log_noise.exp()[:, None]).log_prob(t[:10].squeeze(-1)).sum(-1)
    expected = expected + Normal(0.0, 2.0).log_prob(w).sum(-1)
    expected = expected + InverseGamma(3.0, 2.0).log_prob(variance) + log(2) + 2 * log_noise
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(x.sum(), theta) for x in (got, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert model.outputs(theta, X).shape == (S, 40, 1)
    values = model.likelihood_values(theta)
    assert torch.equal(values["log_noise"], log_noise)
    predictive = model.likelihood.distribution(model.outputs(theta, X), values)
    torch.testing.assert_close(predictive.scale, log_noise.exp()[:, None, None].expand(S, 40, 1))


class Pictures(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.randn(1, 4, 4, generator=g)
        return x, (torch.randint(3, (4, 4), generator=g), torch.rand(4, 4, generator=g) < 0.5)


@pytest.mark.parametrize("evaluation", ["vmap", "loop"])
def test_masked_segmentation_from_a_data_loader(evaluation):
    """A loader turns (x, (t, mask)) into [x, [t, mask]]; N/B counts pictures, not pixels."""
    net = nn.Conv2d(1, 3, 3, padding=1)
    model = vi.BayesianModel(net, Categorical(), vi.priors.NormalPrior(), 8, evaluation=evaluation)
    theta = 0.3 * torch.randn(S, model.space.size)
    batch = next(iter(DataLoader(Pictures(), batch_size=4)))
    x, (t, mask) = batch
    outputs = model.outputs(theta, x)  # [S, B, C, H, W]
    expected = 2 * Categorical().distribution(outputs).log_prob(t)[:, mask].sum(-1)
    torch.testing.assert_close(model.log_likelihood(theta, batch), expected)
    ignoring = vi.BayesianModel(net, Categorical(ignore_index=9), vi.priors.NormalPrior(), 8, evaluation=evaluation)
    torch.testing.assert_close(ignoring.log_likelihood(theta, (x, t.masked_fill(~mask, 9))), expected)


# ---- an unknown noise


def test_random_noise_target_is_the_conjugate_posterior():
    """One weight, w ~ N(0, 100²), σ² ~ InverseGamma(a, b), against the normal–inverse-gamma posterior.

    The log joint on a grid over (w, log σ) is normalised by quadrature. The closed form is that of a flat prior on w:
    (sd/100)² ≈ 1e-6 away, so 1e-4 is asked of all moments.
    """
    N, a, b = 30, 3.0, 0.5
    X, t = line(N, d=1)
    likelihood = Gaussian("random", noise_prior=InverseGamma(torch.tensor(a), torch.tensor(b)))
    model = vi.BayesianModel(nn.Linear(1, 1, bias=False), likelihood, vi.priors.NormalPrior(100.0), N)
    gram, cross = X.square().sum(), (X * t).sum()
    w_hat = cross / gram
    a_n = torch.tensor(a + (N - 1) / 2)
    b_n = b + 0.5 * (t - X * w_hat).square().sum()
    exact = {
        "mean w": w_hat,
        "sd w": (b_n / (a_n - 1) / gram).sqrt(),  # of a Student-t with 2a_n degrees of freedom
        "mean log σ": 0.5 * (b_n.log() - a_n.digamma()),
        "sd log σ": 0.5 * torch.polygamma(1, a_n).sqrt(),
        "mean σ²": b_n / (a_n - 1),
    }
    w = w_hat + exact["sd w"] * torch.linspace(-12, 12, 301)
    log_noise = exact["mean log σ"] + exact["sd log σ"] * torch.linspace(-9, 9, 201)
    theta = torch.cartesian_prod(w, log_noise)
    with torch.no_grad():
        p = model.log_joint(theta, (X, t)).softmax(0)
    got = {}
    for name, x in (("w", theta[:, 0]), ("log σ", theta[:, 1])):
        got[f"mean {name}"] = (p * x).sum()
        got[f"sd {name}"] = (p * (x - got[f"mean {name}"]).square()).sum().sqrt()
    got["mean σ²"] = (p * (2 * theta[:, 1]).exp()).sum()
    for name, value in exact.items():
        assert got[name].item() == pytest.approx(value.item(), rel=1e-4), name
