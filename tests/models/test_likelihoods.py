"""Likelihoods against torch.distributions, values and gradients; masks; an unknown noise against exact posteriors."""

from math import log, pi

import pytest
import torch
from torch import nn
from torch.distributions import Gamma, InverseGamma, LogNormal, Normal
from torch.func import functional_call, vmap
from torch.utils.data import DataLoader, Dataset

import structvi as vi
from structvi.models.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from structvi.util.configuration import configuration

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
def test_vmap_equals_a_loop(name):
    likelihood, output, target, values = case(name, (2, 3))
    target = (target, an_observation_mask(target))
    loop = [functional_call(likelihood, {k: v[s] for k, v in values.items()}, (output[s], target)) for s in range(S)]
    torch.testing.assert_close(at_draws(likelihood, output, target, values), torch.stack(loop))


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


def test_head_as_pair_dict_and_channels():
    mean, log_scale, target = (torch.randn(B, 2, 3) for _ in range(3))
    likelihood = Gaussian("head")
    expected = Normal(mean, log_scale.exp()).log_prob(target)
    outputs = (
        torch.cat([mean, log_scale], dim=1),
        (mean, log_scale),
        {"mean": mean, "log_scale": log_scale},
    )
    for output in outputs:
        torch.testing.assert_close(likelihood(output, target), expected)
    pair = likelihood.distribution((mean[None], log_scale[None]))
    torch.testing.assert_close(pair.log_prob(target), expected[None])


def test_configuration_rebuilds_every_likelihood():
    prior = InverseGamma(2.0, 1.0)
    made = [
        Gaussian(0.3),
        Gaussian("point", initial=0.2),
        Gaussian("random", initial=0.2, noise_prior=prior),
        Gaussian("head"),
        Categorical(ignore_index=255, class_weights=[1, 2]),
        Bernoulli(class_weights=(0.5, 1.5)),
        Poisson(),
    ]
    for likelihood in made:
        again = type(likelihood)(**configuration(likelihood))
        assert configuration(again) == configuration(likelihood)
        assert repr(again) == repr(likelihood)


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


def test_either_part_may_be_the_same_in_all_draws():
    X, t = line()
    model = random_noise_model()
    theta = torch.randn(S, 3)
    for names in (["likelihood.log_noise"], ["weight"]):
        point = {name: model.space.unravel(torch.randn(3))[name].requires_grad_() for name in names}
        rest = model.space.without(names)
        free = rest.ravel({name: model.space.unravel(theta)[name] for name in rest.names})
        got = model.log_joint(free, (X, t), point)
        torch.testing.assert_close(got, model.log_joint(model.space.join(free, point), (X, t)))
        (grad,) = torch.autograd.grad(got.sum(), list(point.values()))
        assert (grad != 0).all()
        assert model.likelihood_values(free, point)["log_noise"].shape == (S,)
        assert model.outputs(free, X, point).shape == (S, 40, 1)


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


def test_any_callable_is_a_likelihood():
    X, t = line()
    theta = torch.randn(S, 2)
    for own in (lambda y, t: Normal(y, 0.3).log_prob(t), nn.Module.__call__.__get__(Gaussian(0.3))):
        model = vi.BayesianModel(nn.Linear(2, 1, bias=False), own, vi.priors.NormalPrior(), 40)
        known = vi.BayesianModel(nn.Linear(2, 1, bias=False), Gaussian(0.3), vi.priors.NormalPrior(), 40)
        torch.testing.assert_close(model.log_joint(theta, (X, t)), known.log_joint(theta, (X, t)))


def test_a_users_likelihood_with_random_tensors_needs_a_prior():
    class Nameless(Likelihood):
        def __init__(self):
            super().__init__()
            self.register_buffer("log_noise", torch.zeros(()))

        def log_prob(self, output, target):
            return Normal(output, self.log_noise.exp()).log_prob(target)

        def distribution(self, output, values):
            return Normal(output, values["log_noise"].exp()[:, None, None])

        def random_tensors(self):
            return {"log_noise": self.log_noise}

    model = vi.BayesianModel(nn.Linear(2, 1, bias=False), Nameless(), vi.priors.NormalPrior(), 40)
    with pytest.raises(NotImplementedError, match="Nameless has random tensors but no prior"):
        model.log_joint(torch.zeros(2, 3), line())
    model.likelihood.log_prior = lambda values: values["log_noise"].sum()  # pyright: ignore
    with pytest.raises(ValueError, match=r"the likelihood's log_prior must return \[S\] = \[2\], got \(\)"):
        model.log_joint(torch.zeros(2, 3), line())


# ---- an unknown noise


def fit(model, batch, steps, family=None, extra=()):
    q = (family or vi.FullNormal()).bind(model.space)
    optimizer = torch.optim.Adam([*q.parameters(), *extra], lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        (-vi.elbo(q, model, batch, estimator=vi.Estimator(groups=2), generator=g) / model.num_data).backward()
        optimizer.step()
        schedule.step()
    return q()


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


@pytest.mark.slow
def test_variational_posterior_with_random_noise():
    """FullNormal over (w, log σ), N = 200, d = 3, against two exact posteriors.

    One is by quadrature over σ under the independent priors; the other the normal–inverse-gamma posterior with a flat
    prior on w. The posterior itself is not Gaussian: the best Gaussian has E[1/σ²]⁻¹ in place of E[σ²], 1 % off in
    variance, and log σ has skewness ≈ 0.1; means are asked within 0.05 sd and sds within 3 %.
    """
    N, d, a, b, tau = 200, 3, 3.0, 0.5, 100.0
    X, t = line(N, d)
    likelihood = Gaussian("random", noise_prior=InverseGamma(torch.tensor(a), torch.tensor(b)))
    model = vi.BayesianModel(nn.Linear(d, 1, bias=False), likelihood, vi.priors.NormalPrior(tau), N)
    q = fit(model, (X, t), 1000)

    # quadrature over log σ: w | σ is normal, and p(t | σ) comes with it
    grid = torch.linspace(-3, 2, 4001)
    gram, cross = X.T @ X, X.T @ t
    precision = gram / (2 * grid).exp()[:, None, None] + torch.eye(d) / tau**2  # [G, d, d]
    covariance = precision.inverse()
    means = covariance @ (cross / (2 * grid).exp()[:, None, None])  # [G, d, 1]
    fitted = (means.mT @ precision @ means).squeeze()
    log_evidence = (
        -0.5 * (t.square().sum() / (2 * grid).exp() - fitted)
        - N * grid
        - 0.5 * N * log(2 * pi)
        - 0.5 * precision.logdet()
        - d * log(tau)
    )
    weight = (log_evidence + likelihood.log_prior({"log_noise": grid})).softmax(0)
    mean_w = (weight[:, None, None] * means).sum(0).squeeze()
    spread = covariance + means @ means.mT
    sd_w = ((weight[:, None, None] * spread).sum(0).diagonal() - mean_w.square()).sqrt()
    mean_log = (weight * grid).sum()
    sd_log = ((weight * grid.square()).sum() - mean_log.square()).sqrt()
    quadrature = (torch.cat([mean_w, mean_log[None]]), torch.cat([sd_w, sd_log[None]]))

    a_n = torch.tensor(a + (N - d) / 2)
    b_n = b + 0.5 * (t.square().sum() - (cross.T @ gram.inverse() @ cross).squeeze())
    conjugate = (
        torch.cat([(gram.inverse() @ cross).squeeze(), 0.5 * (b_n.log() - a_n.digamma())[None]]),
        torch.cat([(b_n / (a_n - 1) * gram.inverse().diagonal()).sqrt(), 0.5 * torch.polygamma(1, a_n).sqrt()[None]]),
    )
    for mean, sd in (quadrature, conjugate):
        off = ((q.mean - mean) / sd).abs().max().item()
        ratio = q.variance.sqrt() / sd
        assert off < 0.05, (off, ratio)
        assert ((ratio - 1).abs() < 0.03).all(), (off, ratio)
    torch.testing.assert_close(quadrature[0], conjugate[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(quadrature[1], conjugate[1], rtol=1e-4, atol=0)
