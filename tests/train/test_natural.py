"""Natural-gradient steps: their formula, their fixed point, steps left out, checkpoints, and what they are for."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

RECIPE = vi.NaturalGradient(lr=0.3, scale_lr=0.2, beta=0.5, refresh=2)
NATS = 10.0


def normal(size=3):
    return vi.MeanField().bind(vi.Parameters({"w": torch.ones(size, dtype=torch.float64)}))


def optimizer_of(q, recipe=RECIPE):
    return recipe.make(list(q.parameters()), (), q, NATS)


def test_two_steps_by_hand():
    q = normal()
    optimizer = optimizer_of(q)
    mean, log_scale = q.mean.detach().clone(), q.log_scale.detach().clone()
    slopes = torch.tensor([[0.1, -0.2, 0.3], [0.2, 0.1, -0.4]], dtype=torch.float64)
    spreads = torch.tensor([[0.5, -0.09, 0.01], [-0.05, 0.2, 0.3]], dtype=torch.float64)
    for slope, spread, average in zip(slopes, spreads, (slopes[0], (slopes[0] / 2 + slopes[1]) / 1.5), strict=True):
        q.mean.grad, q.log_scale.grad = slope.clone(), spread.clone()
        optimizer.step()
        # rates are kept as float32, as a captured step reads them
        variance, u = (2 * log_scale).exp(), 0.2 * NATS * spread
        mean = mean - 0.3 * NATS * variance * average
        log_scale = -0.5 * ((1 + u + u**2 / 2) * (-2 * log_scale).exp()).log()
        torch.testing.assert_close(q.mean.detach(), mean, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(q.log_scale.detach(), log_scale, rtol=1e-6, atol=1e-7)


def test_a_mean_moves_by_so_many_standard_deviations_at_most():
    q = normal()
    optimizer = optimizer_of(q, vi.NaturalGradient(lr=0.5, radius=2.0))
    before, scale = q.mean.detach().clone(), q.log_scale.exp().detach()
    q.mean.grad = torch.tensor([1e6, -1e6, 1e-3], dtype=torch.float64)
    optimizer.step()
    moved = (before - q.mean.detach()) / scale
    torch.testing.assert_close(
        moved, torch.stack([moved.new_tensor(1.0), moved.new_tensor(-1.0), 0.5 * 1e-3 * NATS * scale[2]])
    )


def test_the_fixed_point_is_the_posterior():
    """L = Σ Λ (m² + s²)/2 − (λ/N) log s: m = 0 and s² = (λ/N)/Λ, from scales far too wide and far too narrow."""
    q, precision = normal(), torch.tensor([0.01, 1.0, 40.0], dtype=torch.float64)
    optimizer = optimizer_of(q)
    for _ in range(200):
        optimizer.zero_grad()
        variance = (2 * q.log_scale).exp()
        (0.5 * (precision * (q.mean.square() + variance)).sum() - q.log_scale.sum() / NATS).backward()
        optimizer.step()
    torch.testing.assert_close((2 * q.log_scale).exp().detach(), 1 / (NATS * precision))
    torch.testing.assert_close(q.mean.detach(), torch.zeros(3, dtype=torch.float64), atol=1e-8, rtol=0)


def test_a_step_that_is_left_out_changes_nothing():
    q = normal()
    optimizer = optimizer_of(q)
    for gradient, make in ((0.1, 1.0), (torch.nan, 0.0)):
        before = [x.detach().clone() for x in (q.mean, q.log_scale)]
        kept = {key: value.clone() for key, value in optimizer.state[q.mean].items()}
        q.mean.grad, q.log_scale.grad = (torch.full_like(x, gradient) for x in before)
        optimizer.step(make=torch.tensor(make), coefficient=torch.tensor(1.0))
    assert all(torch.equal(a, b) for a, b in zip(before, (q.mean, q.log_scale), strict=True))
    assert all(torch.equal(value, kept[key]) for key, value in optimizer.state[q.mean].items())


# ------------------------------------------------------------------------------------------------------------ in fits


def made(family=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    prior = vi.priors.NormalPrior(1.0, learn=True)
    return vi.variationalize(net, vi.likelihoods.Gaussian("point"), family or vi.MeanField(), prior)


def fit(bayes, optimizer=RECIPE, **options):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(48, 3, generator=g)
    loader = DataLoader(TensorDataset(x, x[:, :1].sin() + x[:, 1:2]), batch_size=16, shuffle=True)
    settings = {"steps": 30, "stop": False, "restarts": 0, "progress": False}
    return bayes.fit(loader, optimizer=optimizer, **settings | options)


@pytest.mark.parametrize(
    "family",
    [
        vi.MeanField(),
        vi.Rotated(vi.MeanField()),
        vi.Mixture(vi.MeanField(), components=2),
        vi.PerLayer({"0.*": vi.MeanField(), "2.*": vi.LowRankNormal(rank=1)}),
    ],
    ids=["mean field", "rotated", "mixture", "blocks"],
)
def test_a_resumed_fit_has_the_bits_of_one_never_stopped(family, tmp_path):
    whole, stopped, resumed = made(family), made(family), made(family)
    result = fit(whole)
    assert result.history["lr"].max() == pytest.approx(RECIPE.lr)
    assert result.elbo.value > result.history["elbo"][0]

    def stop(history):
        if len(history) == 13:
            raise KeyboardInterrupt

    fit(stopped, checkpoint=tmp_path, every=4, callback=stop)
    fit(resumed, resume=tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_a_fit_cannot_be_resumed_with_other_rates(tmp_path):
    fit(made(), checkpoint=tmp_path)
    with pytest.raises(ValueError, match="NaturalGradient"):
        fit(made(), vi.NaturalGradient(lr=0.3, scale_lr=0.2, beta=0.6), resume=tmp_path)


def test_the_rate_is_in_units_of_the_temperature():
    """With λ the curvature is N/λ: what the optimizer has."""
    bayes, seen = made(), []

    class Seen(vi.NaturalGradient):
        def make(self, parameters, factors, family, nats):
            seen.append(nats)
            return super().make(parameters, factors, family, nats)

    fit(bayes, Seen(), temperature=0.25, steps=1)
    assert seen == [48 / 0.25]


def test_it_finds_the_posterior_of_a_linear_network():
    """A regression with orthogonal inputs: mean field is exact, N(m, s²) with s² = 1/(Σ x² + 1)."""
    x = torch.linalg.qr(torch.randn(64, 3, generator=torch.Generator().manual_seed(0))).Q * 8
    t = x @ torch.tensor([[1.0], [-1.0], [0.5]])
    net = nn.Linear(3, 1, bias=False)
    likelihood = vi.likelihoods.Gaussian(noise=1.0)
    bayes = vi.variationalize(net, likelihood, vi.MeanField(), vi.priors.NormalPrior(1.0), num_data=64)
    # errors shrink by e^(−Σ rate), and that sum is 30
    optimizer = vi.NaturalGradient(lr=0.3, scale_lr=0.3)
    options = {"kl_warmup": 0.0, "stop": False, "restarts": 0, "progress": False}
    bayes.fit([(x, t)], steps=200, optimizer=optimizer, **options)
    with torch.no_grad():
        density = bayes.family()
    # path gradients vanish at the optimum, draw by draw: no noise is left
    torch.testing.assert_close(density.variance, torch.full((3,), 1 / 65), rtol=1e-3, atol=0)
    torch.testing.assert_close(density.mean, (x.mT @ t).flatten() / 65, rtol=1e-3, atol=1e-3)


def test_families_without_plain_normals_are_refused():
    with pytest.raises(TypeError, match=r"NaturalGradient\(\) is for normals without a factor"):
        fit(made(vi.LowRankNormal(rank=1)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr must be a positive"),
        ({"scale_lr": -1.0}, "scale_lr must be a positive"),
        ({"beta": 1.0}, "beta must be inside"),
    ],
)
def test_bad_values(options, message):
    with pytest.raises(ValueError, match=message):
        vi.NaturalGradient(**options)
