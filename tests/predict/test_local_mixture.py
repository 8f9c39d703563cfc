"""Mixtures whose weights depend on how much the members disagree."""

import math

import pytest
import torch
from torch import nn

import structvi as vi
from structvi.network_mixture import stacking
from structvi.predict.local_mixture import (
    EQUAL_ROWS,
    SLOPE_PRECISION,
    LocalPredictive,
    LocalWeights,
    disagreement,
    log_probs,
)
from structvi.predict.predictive import Predictive


def rows(C: int = 4, n: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    d = torch.randn(n, generator=generator, dtype=torch.float64)
    return torch.randn(C, n, generator=generator, dtype=torch.float64) + torch.linspace(-1, 1, C).unsqueeze(1) * d, d


def value(weights: LocalWeights, log_p: torch.Tensor, d: torch.Tensor) -> float:
    return float((weights.at(d).log() + log_p).logsumexp(0).sum())


def predictives(S: int = 5, B: int = 3, C: int = 2) -> list[Predictive]:
    generator = torch.Generator().manual_seed(5)
    share = torch.softmax(torch.randn(S, generator=generator, dtype=torch.float64), 0)
    return [
        Predictive(
            torch.randn(S, B, 1, generator=generator, dtype=torch.float64),
            share,
            vi.likelihoods.Gaussian(0.3 + 0.4 * c),
        )
        for c in range(C)
    ]


def test_the_weights_are_at_an_optimum():
    """No direction of all that is learned gains: the gradient of the objective, by autograd, is nearly zero."""
    log_p, d = rows()
    found = LocalWeights.of(log_p, d)
    centre, width = d.mean(), d.std(correction=0)
    near, far = (x.log().requires_grad_(True) for x in (found.near, found.far))
    start = [found.intercept + found.slope * float(centre), found.slope * float(width)]
    line = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    at = line[0] + line[1] * (d - centre) / width
    each = torch.stack([
        near.log_softmax(0).unsqueeze(-1) + torch.nn.functional.logsigmoid(-at),
        far.log_softmax(0).unsqueeze(-1) + torch.nn.functional.logsigmoid(at),
    ])  # fmt: skip
    prior = EQUAL_ROWS / len(log_p) * (near.log_softmax(0).sum() + far.log_softmax(0).sum())
    objective = (each + log_p).flatten(0, 1).logsumexp(0).sum() + prior
    objective = objective - 0.5 * SLOPE_PRECISION * line[1] ** 2 - 0.5e-3 * line[0] ** 2
    for gradient in torch.autograd.grad(objective, (near, far, line)):
        assert float(gradient.abs().max()) < 0.02  # of a sum over 60 observations; expectation maximisation is slow


def test_they_are_better_than_one_set_of_weights_where_the_disagreement_tells():
    log_p, d = rows()
    found, one = LocalWeights.of(log_p, d), stacking(log_p)
    assert value(found, log_p, d) > float((one.log().unsqueeze(-1) + log_p).logsumexp(0).sum()) + 1
    assert torch.allclose(found.at(d).sum(0), torch.ones(len(d), dtype=torch.float64))


def test_a_row_that_counts_twice_is_two_rows():
    log_p, d = rows(n=20)
    twice = LocalWeights.of(torch.cat([log_p, log_p[:, :5]], 1), torch.cat([d, d[:5]]))
    counts = torch.ones(20)
    counts[:5] = 2
    once = LocalWeights.of(log_p, d, counts)
    # the disagreement is standardised over rows as they come, which moves the prior of the slope a little
    assert torch.allclose(once.at(d), twice.at(d), atol=0.05)


def test_moments_and_quantiles_are_those_of_the_density():
    parts, widths = predictives(), (1.0, 3.0)
    weights = LocalWeights(torch.tensor([0.7, 0.1, 0.2, 0.0]), torch.tensor([0.1, 0.2, 0.3, 0.4]), 0.3, 0.8)
    pred = LocalPredictive(parts, widths, weights)
    grid = torch.linspace(-15, 15, 601, dtype=torch.float64)
    p = torch.stack([pred.log_prob(t.expand(3, 1)).exp() for t in grid]).squeeze(-1)  # [601, 3]
    mass, first, second = (torch.trapezoid(p * grid.unsqueeze(1) ** k, grid, dim=0) for k in (0, 1, 2))
    assert torch.allclose(mass, torch.ones(3).double(), atol=1e-6)
    assert torch.allclose(pred.mean.squeeze(1), first, atol=1e-6)
    assert torch.allclose(pred.variance.squeeze(1), second - first**2, atol=1e-5)
    low, high = pred.interval(0.9)
    assert torch.allclose(pred.cdf(low), torch.tensor(0.05).double(), atol=1e-5)
    assert torch.allclose(pred.cdf(high), torch.tensor(0.95).double(), atol=1e-5)


def test_with_one_set_of_weights_it_is_the_mixture_of_the_members():
    parts = predictives()
    share = torch.tensor([0.3, 0.7], dtype=torch.float64)
    t = torch.zeros(3, 1, dtype=torch.float64)
    pred = LocalPredictive(parts, (1.0,), LocalWeights(share, share, 0.0, 1.0))
    assert torch.allclose(pred.log_prob(t), Predictive.joined(parts, share.tolist()).log_prob(t))
    assert torch.allclose(log_probs(parts, (1.0,), t)[0], parts[0].log_prob(t).flatten())


def test_disagreement_is_the_spread_over_members_in_units_of_noise():
    parts = [
        Predictive(torch.tensor([[[y]]]), torch.ones(1), vi.likelihoods.Gaussian(0.5)) for y in (1.0, 3.0)
    ]  # a spread of one
    assert float(disagreement(parts)) == pytest.approx(math.log(2 + 1e-3))


def members(count: int = 2) -> vi.Ensemble:
    nets = [nn.Linear(1, 1) for _ in range(count)]
    return vi.Ensemble.of(nets, vi.likelihoods.Gaussian(0.5), vi.MeanField(), num_data=8)


def test_what_is_asked_in_a_wrong_way_is_told():
    mixture, data = members(), [(torch.zeros(4, 1), torch.zeros(4, 1))]
    local = vi.LocalMixture(mixture)
    with pytest.raises(ValueError, match="learned from held-out data first"):
        local.predict(torch.zeros(2, 1))
    with pytest.raises(ValueError, match="no pair of a mixture and data"):
        local.fit([])
    with pytest.raises(ValueError, match="gave no batch"):
        local.fit([(mixture, [])])
    with pytest.raises(ValueError, match="2 members in the same order, got one of 3"):
        local.fit([(members(3), data)])
    with pytest.raises(ValueError, match="1 positive numbers"):
        local.fit([(mixture, data)], shares=[1.0, 2.0])
    with pytest.raises(ValueError, match="positive factors"):
        vi.LocalMixture(mixture, widths=(0.0,))
    nets = [nn.Linear(1, 2), nn.Linear(1, 2)]
    labels = vi.Ensemble.of(nets, vi.likelihoods.Categorical(), vi.MeanField(), num_data=8)
    with pytest.raises(TypeError, match="p\\(t \\| y\\) is Categorical"):
        vi.LocalMixture(labels).fit([(labels, [(torch.zeros(4, 1), torch.zeros(4, dtype=torch.long))])])


def test_where_members_disagree_it_is_as_wide_as_held_out_rows_ask():
    """Three lines through one point: held-out rows lie near them there, and far from them where they part."""
    nets = [nn.Linear(1, 1) for _ in range(3)]
    with torch.no_grad():
        for slope, net in zip((0.9, 1.0, 1.1), nets, strict=True):
            net.weight.fill_(slope)
            net.bias.zero_()
    mixture = vi.Ensemble.of(nets, vi.likelihoods.Gaussian(0.1), vi.MAP(), num_data=100)
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(0, 4, 400).unsqueeze(1)
    t = x + torch.where(x < 2, 0.1, 1.0) * torch.randn(x.shape, generator=generator)
    local = vi.LocalMixture(mixture, draws=1).fit([(mixture, [(x, t)])])
    low, high = local.predict(torch.tensor([[0.5], [3.5]])).interval(0.9)
    width = (high - low).flatten().tolist()
    # 90 % of N(0, 0.1²) are 0.33 wide, of N(0, 1) 3.3
    assert width[0] < 0.6
    assert 2.5 < width[1] < 5
