"""Replicated data against data that the model does and does not describe."""

from math import sqrt

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi import likelihoods as lk
from structvi.diagnostics import predictive_check


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def constant(likelihood, bias, family=None):
    """A network that is a constant, with a narrow posterior at it."""
    net = nn.Linear(1, len(bias))
    with torch.no_grad():
        net.weight.zero_()
        net.bias.copy_(torch.tensor(bias))
    return vi.variationalize(net, likelihood, family or vi.MeanField(initial_scale=1e-4), num_data=400)


def test_a_right_model_and_one_with_too_little_noise():
    x, t = torch.zeros(400, 1), 2 + torch.randn(400, 1, generator=seeded())
    loader = DataLoader(TensorDataset(x, t), batch_size=150, shuffle=True)
    right = predictive_check(constant(lk.Gaussian(1.0), [2.0]), loader)
    assert right.observed["sd"] == pytest.approx(t.std().item(), rel=1e-5)
    assert right.observed["max"] == t.max().item()
    # the mean of 400 standard normals about 2
    assert right.replicated["mean"].shape == (200,)
    assert right.replicated["mean"].mean().item() == pytest.approx(2.0, abs=4 * 0.05 / 200**0.5)
    assert right.replicated["mean"].std().item() == pytest.approx(0.05, rel=0.2)  # four errors of 1/√400
    # p-values in closed form, of extremes and mean of 400 independent normals; four standard errors of 200 data sets
    normal = Normal(2.0, 1.0)
    exact = {
        "mean": 1 - Normal(2.0, 0.05).cdf(t.mean()).item(),
        "max": 1 - normal.cdf(t.max()).item() ** 400,
        "min": (1 - normal.cdf(t.min()).item()) ** 400,
    }
    for name, p in exact.items():
        assert right.p_values[name] == pytest.approx(p, abs=4 * sqrt(p * (1 - p) / 200))
    wrong = predictive_check(constant(lk.Gaussian(0.5), [2.0]), loader)
    assert wrong.p_values["sd"] == 0.0
    assert "sd (too small in replicated data)" in wrong.verdict
    assert "mean" not in wrong.verdict
    assert str(wrong).splitlines()[2].split()[0] == "sd"


def test_custom_statistics_see_the_observed_elements():
    t = torch.randn(50, 2, generator=seeded())
    mask = torch.rand(50, 2, generator=seeded()) > 0.3
    bayes = constant(lk.Gaussian(1.0), [0.0, 0.0])
    sizes = []

    def count(values):
        sizes.append(tuple(values.shape))
        return float(values.numel())

    result = predictive_check(bayes, [(torch.zeros(50, 1), (t, mask))], {"count": count}, draws=3)
    assert set(sizes) == {(int(mask.sum()),)}
    assert result.p_values == {"count": 0.5}  # equal ones count half


@pytest.mark.parametrize(
    ("likelihood", "bias", "t", "names"),
    [
        (lk.Categorical(), [0.0, 0.0, 0.0], torch.arange(300) % 3, [f"frequency of {c}" for c in range(3)]),
        (lk.Bernoulli(), [0.0], (torch.arange(300.0) % 2).unsqueeze(-1), ["frequency of 1"]),
    ],
)
def test_labels_are_counted(likelihood, bias, t, names):
    result = predictive_check(constant(likelihood, bias), [(torch.zeros(300, 1), t)], draws=100)
    assert list(result.observed) == names
    assert "look like the data" in result.verdict
    one_class = predictive_check(constant(likelihood, bias), [(torch.zeros(300, 1), torch.zeros_like(t))], draws=100)
    assert "frequency of 1" in one_class.verdict


def test_the_spread_of_the_weights_is_in_the_replicated_data():
    # the posterior of a level with sd 2 moves whole data sets: their means have that spread, not noise/√N = 0.05
    bayes = constant(lk.Gaussian(1.0), [0.0])
    with torch.no_grad():
        bayes.family.log_scale.fill_(2.0).log_()
    result = predictive_check(bayes, [(torch.zeros(400, 1), torch.zeros(400, 1))])
    assert result.replicated["mean"].std().item() == pytest.approx(2.0, rel=0.2)


def test_a_user_forward_is_followed():
    bayes = vi.variationalize(
        nn.Linear(1, 1), lk.Gaussian(1.0), vi.MeanField(), num_data=5, forward=lambda net, b: (net(b["x"]), b["t"])
    )
    batch = {"x": torch.zeros(5, 1), "t": torch.arange(5.0).unsqueeze(-1)}
    assert predictive_check(bayes, [batch], draws=3).observed["max"] == 4.0


def test_the_plot_shows_statistic_and_data():
    t = torch.randn(30, 1, generator=seeded())
    result = predictive_check(constant(lk.Gaussian(1.0), [0.0]), [(torch.zeros(30, 1), t)], draws=40)
    ax = result.plot("sd")
    assert sum(patch.get_height() for patch in ax.patches) == 40
    assert ax.lines[0].get_xdata()[0] == pytest.approx(t.std().item(), rel=1e-6)
    assert result.plot().get_xlabel() == "mean"
