"""Predictions against closed forms, and the identities that hold exactly on the same draws."""

import copy
import gc
import math
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, MixtureSameFamily, Normal

import structvi as vi
from structvi import likelihoods as lk
from structvi.families import NormalForm, Triangle
from structvi.families.mixture import LOGIT_UNIT
from structvi.predict.predict import WeightDraws
from structvi.predict.predictive import Predictive

NOISE = 0.5


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def set_full(family, mean, covariance):
    """Put a FullNormal at N(mean, covariance)."""
    family.set_normal(NormalForm(mean, Triangle(torch.linalg.cholesky(covariance))))


def exact_linear(N=12):
    """Linear regression at its exact posterior, and mean and variance of y at new inputs."""
    x, x_new = randn(N, 2, seed=1), 1.5 * randn(6, 2, seed=2)
    features, new = (torch.cat([z, torch.ones(len(z), 1, dtype=z.dtype)], 1) for z in (x, x_new))
    t = features @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=x.dtype) + NOISE * randn(N, 1, seed=3)
    covariance = torch.linalg.inv(features.T @ features / NOISE**2 + torch.eye(3, dtype=x.dtype))
    mean = covariance @ features.T @ t / NOISE**2
    bayes = vi.variationalize(
        nn.Linear(2, 1).double(), lk.Gaussian(NOISE), vi.FullNormal(), vi.priors.NormalPrior(1.0), num_data=N
    )
    set_full(bayes.family, mean.squeeze(-1), covariance)
    return bayes, x_new, new @ mean, ((new @ covariance) * new).sum(1, keepdim=True)


def classifier(outputs=3, **options):
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    return vi.variationalize(net, lk.Categorical(), vi.MeanField(initial_scale=0.5), num_data=10, **options)


def test_linear_model_against_its_closed_form():
    """Every figure within 5 of its own Monte Carlo standard errors, S = 2000 independent draws (seed fixed)."""
    bayes, x, y, variance = exact_linear()
    S = 2000
    pred = bayes.predict(x, draws=S, generator=seeded())
    total = variance + NOISE**2
    exact = Normal(y, total.sqrt())
    assert pred.draws == S
    assert ((pred.function_mean - y).abs() <= 5 * (variance / S).sqrt()).all()
    assert ((pred.function_variance / variance - 1).abs() <= 5 * math.sqrt(2 / S)).all()
    assert ((pred.mean - y).abs() <= 5 * (variance / S).sqrt()).all()
    assert ((pred.variance - total).abs() <= 5 * variance * math.sqrt(2 / S)).all()
    torch.testing.assert_close(pred.aleatoric, torch.full_like(y, NOISE**2))

    t = y + 0.7
    density = pred.components.log_prob(t).exp()  # [S, B, 1]
    error = density.std(0) / math.sqrt(S) / exact.log_prob(t).exp()
    assert ((pred.log_prob(t) - exact.log_prob(t)).abs() <= 5 * error).all()

    for p, end in zip((0.05, 0.95), pred.interval(0.9), strict=True):
        q = exact.icdf(torch.tensor(p, dtype=y.dtype))
        error = pred.components.cdf(q).std(0) / math.sqrt(S) / exact.log_prob(q).exp()
        assert ((end - q).abs() <= 5 * error).all()

    z = (t - y) / total.sqrt()
    unit = Normal(torch.zeros_like(z), torch.ones_like(z))
    crps = total.sqrt() * (z * (2 * unit.cdf(z) - 1) + 2 * unit.log_prob(z).exp() - 1 / math.sqrt(math.pi))
    # |CRPS(F) − CRPS(G)| ≤ 2 ∫ |F − G|, with F(u) − G(u) of the size of its standard error
    u = torch.linspace(-9, 9, 200, dtype=y.dtype) + y  # [B, 200]
    error = torch.trapezoid(Normal(pred.outputs, NOISE).cdf(u).std(0) / math.sqrt(S), u, dim=-1)
    assert ((pred.crps(t) - crps).abs().squeeze(-1) <= 5 * 2 * error).all()


def test_joint_prediction_of_several_inputs():
    """Against the joint normal of t = y(x) + noise at three inputs; 5 standard errors of the draws' mean, S = 20000."""
    bayes, x, y, _ = exact_linear()
    S = 20000
    pred = bayes.predict(x[:3], draws=S, generator=seeded())
    features = torch.cat([x[:3], torch.ones(3, 1, dtype=x.dtype)], 1)
    covariance = features @ bayes.family().covariance() @ features.T + NOISE**2 * torch.eye(3, dtype=x.dtype)
    t = y[:3] + 0.3
    exact = torch.distributions.MultivariateNormal(y[:3, 0], covariance).log_prob(t[:, 0])
    density = pred.components.log_prob(t).sum((1, 2)).exp()
    error = density.std() / math.sqrt(S) / exact.exp()
    assert (pred.joint_log_prob(t) - exact).abs() <= 5 * error
    assert (pred.joint_log_prob(t) - pred.log_prob(t).sum()).abs() > 0.1  # the inputs share weights


def mixture(pred):
    """The mixture as torch has it, with the draws on the last axis."""
    d = pred.components
    names = d.arg_constraints.keys() - {"probs"}
    last = type(d)(**{name: getattr(d, name).movedim(0, len(d.batch_shape) - 1) for name in names})
    return MixtureSameFamily(Categorical(probs=pred.weights.expand(*last.batch_shape)), last)


@pytest.mark.parametrize("kind", ["number", "label", "binary", "count"])
def test_identities_on_the_same_draws(kind):
    likelihood = {
        "number": lk.Gaussian("head"),
        "label": lk.Categorical(),
        "binary": lk.Bernoulli(),
        "count": lk.Poisson(),
    }[kind]
    outputs = 2 * randn(7, 5, 4)
    weights = torch.rand(7, generator=seeded(), dtype=torch.float64)
    pred = Predictive(outputs, weights / weights.sum(), likelihood)
    t = {
        "number": randn(5, 2, seed=1),
        "label": torch.tensor([0, 1, 2, 3, 0]),
        "binary": (randn(5, 4, seed=1) > 0).double(),
        "count": torch.randint(4, (5, 4), generator=seeded()),
    }[kind]
    torch.testing.assert_close(pred.variance, pred.epistemic + pred.aleatoric, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pred.std.square(), pred.variance)
    mixed = mixture(pred)
    torch.testing.assert_close(pred.log_prob(t), mixed.log_prob(t.double()), rtol=1e-12, atol=1e-12)
    assert pred.joint_log_prob(t).shape == ()
    if kind in ("label", "binary"):
        torch.testing.assert_close(pred.entropy, pred.expected_entropy + pred.mutual_information)
        torch.testing.assert_close(pred.mean, pred.probabilities)
        torch.testing.assert_close(pred.variance, pred.mean * (1 - pred.mean))  # of an indicator
        assert (pred.mutual_information > 0).all()
    if kind != "label":
        torch.testing.assert_close(pred.mean, mixed.mean)
        torch.testing.assert_close(pred.variance, mixed.variance)
    if kind == "number":
        torch.testing.assert_close(pred.function_mean, pred.mean)
        assert pred.function_variance.shape == (5, 2)


def test_quantiles_of_a_mixture_of_normals():
    """q is right to 1e-9 standard deviations, so F(q(p)) − p to that times the largest density, below 4."""
    outputs = torch.tensor([[[0.0]], [[3.0]], [[1000.0]]], dtype=torch.float64)
    pred = Predictive(outputs, torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), lk.Gaussian(0.1))
    levels = [0.01, 0.4, 0.6, 0.9, 0.99]
    q = pred.quantile(levels)
    assert q.shape == (5, 1, 1)
    for level, at in zip(levels, q, strict=True):
        assert abs(pred.cdf(at).item() - level) <= 1e-9 * pred.std.item() * 4
    one = Predictive(outputs[:1], torch.ones(1, dtype=torch.float64), lk.Gaussian(2.0))
    assert one.quantile(0.975).item() == pytest.approx(2 * 1.959963984540054, abs=2e-8)
    low, high = one.interval(0.5)
    assert low.item() == pytest.approx(-2 * 0.6744897501960817, abs=2e-8)
    assert high.item() == pytest.approx(2 * 0.6744897501960817, abs=2e-8)


def test_quantiles_of_counts_and_bits():
    """The smallest t with P(T ≤ t) ≥ p, against a sum over the counts."""
    rates = torch.tensor([[[0.2], [30.0]], [[5.0], [400.0]]], dtype=torch.float64)
    weights = torch.tensor([0.7, 0.3], dtype=torch.float64)
    pred = Predictive(rates.log(), weights, lk.Poisson())
    counts = torch.arange(1000, dtype=torch.float64)
    mass = torch.distributions.Poisson(rates.unsqueeze(-1)).log_prob(counts).exp()  # [S, B, 1, 1000]
    cdf = (weights.view(2, 1, 1, 1) * mass).sum(0).cumsum(-1)
    for p in (0.001, 0.3, 0.5, 0.9, 0.999):
        expected = (cdf < p).sum(-1).double()
        torch.testing.assert_close(pred.quantile(p), expected)
    torch.testing.assert_close(pred.cdf(torch.full((2, 1), 4.0)), cdf[..., 4])
    assert (pred.cdf(torch.full((2, 1), -1.0)) == 0).all()
    bits = Predictive(torch.tensor([[[0.0]]]), torch.ones(1), lk.Bernoulli())
    assert [bits.quantile(p).item() for p in (0.4, 0.6)] == [0.0, 1.0]
    assert [bits.cdf(torch.tensor([[t]])).item() for t in (-1.0, 0.0, 1.0)] == [0.0, 0.5, 1.0]


def test_crps_against_quadrature():
    """∫ (F(u) − 1{t ≤ u})² du by the trapezoidal rule on either side of the jump, 1e-6 for its step of 1e-3."""
    mean, scale = randn(4, 3, seed=1), 0.3 + torch.rand(4, 3, generator=seeded(), dtype=torch.float64)
    weight = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    t = randn(3, seed=2)
    head = torch.stack([mean, scale.log()], -1)  # [S, B, 2]
    got = Predictive(head, weight, lk.Gaussian("head")).crps(t.unsqueeze(-1)).squeeze(-1)
    for e in range(3):
        sides = []
        for a, b, jump in ((-15.0, t[e].item(), 0.0), (t[e].item(), 15.0, 1.0)):
            u = torch.linspace(a, b, 20001, dtype=torch.float64)
            F = (weight[:, None] * Normal(mean[:, e, None], scale[:, e, None]).cdf(u)).sum(0)
            sides.append(torch.trapezoid((F - jump).square(), u))
        assert got[e].item() == pytest.approx(sum(sides).item(), abs=1e-6)


def test_masks_contribute_nothing_and_class_weights_take_no_part():
    pred = Predictive(randn(3, 4, 2), torch.full((3,), 1 / 3), lk.Gaussian(1.0))
    t, mask = randn(4, 2, seed=1), torch.ones(4, 2, dtype=torch.bool)
    mask[0, 0] = False
    seen = pred.log_prob(t)
    t[0, 0] = float("nan")
    torch.testing.assert_close(pred.log_prob((t, mask)), seen * mask)
    assert torch.isfinite(pred.joint_log_prob((t, mask)))
    labels = torch.tensor([0, 1, 1, 0])
    plain, weighted = (
        Predictive(randn(3, 4, 2), torch.full((3,), 1 / 3), lk.Categorical(class_weights=w)) for w in (None, (1.0, 9.0))
    )
    torch.testing.assert_close(plain.log_prob(labels), weighted.log_prob(labels))


def test_weights_of_a_mixture_are_respected():
    """Two parts far apart with proportions ¼ and ¾: exact for the stratified draws of point masses."""
    space = vi.Parameters.of(nn.Linear(1, 1).double())
    points = [space.at(torch.full((2,), value, dtype=torch.float64)) for value in (-1.0, 1.0)]
    family = vi.Mixture([vi.MAP().bind(point) for point in points])
    proportions = torch.tensor([0.25, 0.75], dtype=torch.float64)
    family.raw_logits.data = proportions.log() / LOGIT_UNIT
    torch.testing.assert_close(family().proportions, proportions)
    bayes = vi.variationalize(nn.Linear(1, 1).double(), lk.Gaussian(0.1), family, num_data=5)
    pred = bayes.predict(torch.ones(1, 1, dtype=torch.float64), draws=50)
    assert pred.draws == 2  # both states, once
    assert "2 states" in pred.note
    assert "2 states" in repr(pred)
    torch.testing.assert_close(pred.function_mean.item(), 0.25 * -2 + 0.75 * 2)
    torch.testing.assert_close(pred.function_variance.item(), 0.25 * 9 + 0.75 * 1.0)
    t = torch.full((1, 1), 2.0, dtype=torch.float64)
    torch.testing.assert_close(
        pred.log_prob(t).item(), math.log(0.75) + Normal(2, 0.1).log_prob(torch.tensor(2.0)).item()
    )
    values = [bayes.sample_network(seeded(i)).weight.item() for i in range(200)]
    assert abs(values.count(1.0) / 200 - 0.75) <= 4 * math.sqrt(0.75 * 0.25 / 200)


@pytest.mark.parametrize(
    "family",
    [
        vi.PerLayer({"weight": vi.MeanField(), "*": vi.MAP()}),
        vi.MCDropout(keep=0.5),
        vi.LowRankPrecision(rank=1),
    ],
)
def test_families_with_a_random_noise(family):
    """log σ is part of θ: the noise variance is that of each draw, wherever the family keeps log σ."""
    bayes = vi.variationalize(nn.Linear(2, 1).double(), lk.Gaussian("random", initial=0.3), family, num_data=9)
    pred = bayes.predict(randn(3, 2), draws=8, generator=seeded())
    draws = WeightDraws(bayes, 8, generator=seeded()).every()
    theta = bayes.space.join(draws.theta, draws.fixed)
    noise = (2 * bayes.space.unravel(theta)["likelihood.log_noise"]).exp()
    torch.testing.assert_close(pred.aleatoric, (draws.weight * noise).sum().expand(3, 1))
    torch.testing.assert_close(pred.components.variance[:, 0, 0], noise)


def test_the_same_prediction_in_every_call_and_process():
    net = "torch.nn.Linear(2, 3)"
    code = (
        "import torch, structvi as vi, warnings; warnings.simplefilter('ignore'); torch.manual_seed({seed});"
        f"net = {net}; torch.nn.init.constant_(net.weight, 0.3); torch.nn.init.zeros_(net.bias);"
        "bayes = vi.variationalize(net, vi.likelihoods.Categorical(), vi.MeanField(), num_data=9);"
        "torch.rand({seed}); print(bayes.predict(torch.ones(1, 2)).mean.tolist(), bayes.predict(torch.ones(1, 2)).mean.tolist())"
    )
    runs = [subprocess.run([sys.executable, "-c", code.format(seed=s)], capture_output=True, text=True) for s in (1, 2)]
    assert runs[0].stdout == runs[1].stdout != ""
    one, two = runs[0].stdout.strip().replace("]] [[", "]]|[[").split("|")
    assert one == two


def test_predict_leaves_mode_and_global_stream_alone():
    net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 3)).double()
    net.train()
    net[0].eval()
    modes = [module.training for module in net.modules()]
    bayes = vi.variationalize(net, lk.Categorical(), vi.MeanField(), num_data=9, dropout="on")
    x = randn(3, 2)
    before = torch.get_rng_state()
    first = bayes.predict(x, draws=20, generator=seeded())
    first.sample(3, seeded())
    bayes.sample_network(seeded())
    bayes.evaluate([(x, torch.tensor([0, 1, 2]))], draws=4, generator=seeded())
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in net.modules()] == modes
    assert not first.outputs.requires_grad
    torch.testing.assert_close(first.outputs, bayes(x, draws=20, generator=seeded()).outputs, rtol=0, atol=0)
    assert not torch.equal(first.outputs, bayes.predict(x, draws=20, generator=seeded(1)).outputs)


def test_reestimated_batch_norm_needs_a_reference():
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    bayes = vi.variationalize(net, lk.Gaussian(1.0), vi.MAP(), num_data=9, batch_norm="reestimated")
    x, reference = randn(3, 2), 2 + randn(20, 2, seed=1)
    with pytest.raises(ValueError, match="give reference="):
        bayes.predict(x)
    pred = bayes.predict(x, reference=reference)
    net.train()
    with torch.no_grad():
        expected = net(torch.cat([reference, x]))[20:]
    torch.testing.assert_close(pred.function_mean, expected)
    with pytest.raises(ValueError, match="reference= is for"):
        classifier().predict(x, reference=reference)


def test_inputs_of_several_arguments_and_a_forward_of_ones_own():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 1).double()

        def forward(self, a, b):
            return self.linear(a + b)

    x = randn(3, 2)
    bayes = vi.variationalize(Two(), lk.Gaussian(1.0), vi.MeanField(), num_data=9)
    as_tuple, as_dict = (bayes.predict(z, generator=seeded()).outputs for z in ((x, x), {"a": x, "b": x}))
    torch.testing.assert_close(as_tuple, as_dict)
    own = vi.variationalize(
        bayes.net,
        lk.Gaussian(1.0),
        num_data=9,
        forward=lambda net, batch: (net(batch["x"], batch["x"]), batch.get("t")),
    )
    own.family = bayes.family
    torch.testing.assert_close(own.predict({"x": x}, generator=seeded()).outputs, as_tuple)
    t = randn(3, 1, seed=1)
    theirs = own.evaluate([{"x": x, "t": t}], draws=8, generator=seeded())
    assert theirs.nlpd == pytest.approx(bayes.evaluate([((x, x), t)], draws=8, generator=seeded()).nlpd, rel=1e-12)


def test_a_predictive_is_a_value():
    """Learned noise that changes later does not change it."""
    bayes = vi.variationalize(nn.Linear(2, 1), lk.Gaussian("point"), vi.MeanField(), num_data=9)
    pred = bayes.predict(torch.zeros(1, 2))
    before = pred.aleatoric.clone()
    with torch.no_grad():
        bayes.model.likelihood.log_noise.add_(1.0)
    assert torch.equal(pred.aleatoric, before)
    assert not pred.log_prob(torch.zeros(1, 1)).requires_grad


@pytest.mark.parametrize(("scale", "draws"), [(1e-9, 1), (0.1, 64)])
def test_a_posterior_narrower_than_rounding_takes_one_draw(scale, draws):
    """`laplace` leaves such a posterior if the validation set selects the network."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
    bayes = vi.variationalize(net, vi.likelihoods.Categorical(), vi.MeanField(initial_scale=scale))
    assert len(bayes.predict(torch.randn(5, 2)).weights) == draws


def test_what_is_kept_follows_the_posterior_and_lets_it_go():
    """Also a change that torch does not count: of `.data` in place."""
    for make in (classifier, lambda: classifier(linearise=True)):
        bayes, x = make(), randn(4, 2)
        first = bayes.predict(x)
        assert torch.equal(bayes.predict(x).mean, first.mean)
        bayes.family.log_scale.data.add_(1.0)
        assert (bayes.predict(x).epistemic > first.epistemic).all()
        assert torch.equal(bayes.predict(x).mean, copy.deepcopy(bayes).predict(x).mean)
        gone = weakref.ref(bayes)
        del bayes
        gc.collect()
        assert gone() is None
