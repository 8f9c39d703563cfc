"""The Gauss–Newton matrix from drawn labels, against dense Jacobians; and the Laplace approximation made of it."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.models.bayesian_model import BayesianModel
from structvi.train.batches import Batches
from structvi.train.curvature import (
    Roots,
    curvature_roots,
    diagonal_curvature,
    leading_columns,
    rows_of_part,
    rows_used,
)
from structvi.train.warm_start import Laplace

N = 20


def network(outputs):
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def dense(net, x, hessian):
    """Σ_n JᵀHJ [P, P], H [N, O, O] the information about every output."""
    named = {name: p.detach() for name, p in net.named_parameters()}
    J = jacrev(lambda at: functional_call(net, at, (x,)))(named)
    J = torch.cat([J[name].flatten(2) for name in named], dim=-1)  # [N, O, P]
    return torch.einsum("nop,noq,nqr->pr", J, hessian, J)


def softmax_information(y):
    p = y.softmax(-1)
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


def cases():
    x = torch.randn(N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(N) % 3
    seen = torch.arange(N) < 12

    def categorical(net, weight):
        return dense(net, x, softmax_information(net(x).detach()) * weight.view(-1, 1, 1))

    ones = torch.ones(N, dtype=torch.float64)
    weights = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    numbers = torch.randn(N, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    yield "categorical", 3, vi.likelihoods.Categorical(), (x, labels), lambda net: categorical(net, ones)
    yield "mask", 3, vi.likelihoods.Categorical(), (x, (labels, seen)), lambda net: categorical(net, seen.double())
    ignored = labels.masked_fill(~seen, 9)
    likelihood = vi.likelihoods.Categorical(ignore_index=9)
    yield "ignored", 3, likelihood, (x, ignored), lambda net: categorical(net, seen.double())
    likelihood = vi.likelihoods.Categorical(class_weights=weights)
    yield "class weights", 3, likelihood, (x, labels), lambda net: categorical(net, weights[labels])
    yield (
        "bernoulli", 2, vi.likelihoods.Bernoulli(), (x, (numbers > 0).double()),
        lambda net: dense(net, x, torch.diag_embed((p := net(x).detach().sigmoid()) * (1 - p))),
    )  # fmt: skip
    yield (
        "normal", 2, vi.likelihoods.Gaussian(0.5), (x, numbers),
        lambda net: dense(net, x, 4 * torch.eye(2, dtype=torch.float64).expand(N, 2, 2)),
    )  # fmt: skip
    yield (
        "poisson", 2, vi.likelihoods.Poisson(), (x, numbers.abs().round()),
        lambda net: dense(net, x, torch.diag_embed(net(x).detach().exp())),
    )  # fmt: skip


def check_unbiased(model, batch, expected, size, passes):
    """Within six standard errors, as the squares themselves show them: by chance once in ten million, for forty."""
    roots = torch.stack([g for g, _ in curvature_roots(model, model.space.initial, [batch] * passes, size=size)])
    squares = roots.square().unflatten(0, (passes, -1)).sum(1)  # [passes, P]
    error = squares.std(0) / passes**0.5
    assert bool(((squares.mean(0) - expected).abs() < 6 * error + 1e-12).all())
    assert bool((error < 0.15 * expected + 1e-12).all())  # and these are small
    again = diagonal_curvature(model, curvature_roots(model, model.space.initial, [batch] * 5, size=size))
    assert torch.allclose(again, squares[:5].mean(0))


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case[0])
def test_the_diagonal_is_unbiased(case):
    _, outputs, likelihood, batch, truth = case
    net = network(outputs)
    model = BayesianModel(net, likelihood, vi.priors.NormalPrior(1.0), N)
    check_unbiased(model, batch, truth(net).diagonal(), 1, 60)


def test_parts_of_several_rows_are_unbiased_too():
    _, outputs, likelihood, batch, truth = next(cases())
    net = network(outputs)
    model = BayesianModel(net, likelihood, vi.priors.NormalPrior(1.0), N)
    assert [rows for _, rows in curvature_roots(model, model.space.initial, [batch], size=4)] == [4] * 5
    check_unbiased(model, batch, truth(net).diagonal(), 4, 200)


def test_a_random_noise_has_its_information():
    """Of log σ, N(y, σ²) has the information 2 a number, whatever the network."""
    net = network(1)
    likelihood = vi.likelihoods.Gaussian("random", initial=0.3)
    model = BayesianModel(net, likelihood, vi.priors.NormalPrior(1.0), N)
    batch = torch.randn(N, 3, dtype=torch.float64), torch.randn(N, 1, dtype=torch.float64)
    found = diagonal_curvature(model, curvature_roots(model, model.space.initial, [batch] * 100, size=1))
    assert found[-1].item() == pytest.approx(2 * N, rel=0.19)


def test_a_part_of_the_data_stands_for_all():
    _, outputs, likelihood, (x, t), _ = next(cases())
    model = BayesianModel(network(outputs), likelihood, vi.priors.NormalPrior(1.0), N)
    half = [(x[:10], t[:10])]
    roots = list(curvature_roots(model, model.space.initial, half, size=1))
    of_half = sum(g.square() for g, _ in roots)
    assert torch.allclose(diagonal_curvature(model, roots), 2 * of_half)


@pytest.mark.parametrize("way", ["kept", "a few at a time"])
def test_leading_columns_are_those_of_the_same_gradients(way, monkeypatch):
    monkeypatch.setattr("structvi.train.curvature.BLOCK", 5)
    _, outputs, likelihood, batch, _ = next(cases())
    model = BayesianModel(network(outputs), likelihood, vi.priors.NormalPrior(1.0), N)
    theta = model.space.initial
    found = list(curvature_roots(model, theta, [batch] * 5, size=1))
    roots = torch.stack([g for g, _ in found])
    G = roots.mT @ roots / 5
    metric = G.diagonal() + 1.0
    again = Roots(lambda: iter(found))
    assert way != "kept" or len(list(again)) == len(found)  # once they were read they are kept
    W = leading_columns(model, again, metric, 4)
    scaled = G / metric.sqrt() / metric.sqrt().unsqueeze(-1)
    values, vectors = torch.linalg.eigh(scaled)
    best = (vectors[:, -4:] * values[-4:]) @ vectors[:, -4:].mT
    got = (W @ W.mT) / metric.sqrt() / metric.sqrt().unsqueeze(-1)
    # an incremental decomposition leaves out a little each time
    assert (got - best).norm() < (0.05 if way == "a few at a time" else 1e-9) * best.norm()
    assert bool((G.diagonal() - W.square().sum(1) > -1e-9).all())


def test_gradients_are_made_once_where_there_is_room(monkeypatch):
    """Three of four numbers: room for all of them, or for two and no more, and then none is kept."""
    made = []

    def make():
        for k in range(3):
            made.append(k)
            yield torch.full((4,), float(k)), 1

    for room, expected in ((12, 3), (11, 6)):
        monkeypatch.setattr("structvi.train.curvature.KEPT_NUMBERS", room)
        made.clear()
        roots = Roots(make)
        for _ in range(2):
            assert [float(g[0]) for g, _ in roots] == [0.0, 1.0, 2.0]
        assert len(made) == expected
    next(iter(roots := Roots(make)))  # not read to its end: nothing is known of the rest
    assert len(list(roots)) == 3


def test_a_function_without_a_distribution_is_refused_by_name():
    model = BayesianModel(network(1), lambda y, t: -(y - t).square(), vi.priors.NormalPrior(1.0), N)
    with pytest.raises(TypeError, match="a plain function draws none: write a Likelihood"):
        next(curvature_roots(model, model.space.initial, [(torch.zeros(2, 3), torch.zeros(2, 1))]))


@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize(
    "family", [vi.MeanField(), vi.LowRankPrecision(3), vi.LowRankPrecision(1), vi.FullNormal()], ids=repr
)
def test_families_are_placed_with_this_precision(family, temperature):
    """Λ = G/λ + π: in the precision form diagonal and columns, else a precision of the same diagonal."""
    space = vi.Parameters({"a": torch.zeros(2, 3, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)})
    theta, W = torch.randn(8, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    diagonal = W.square().sum(1) + torch.rand(8, dtype=torch.float64)
    prior = torch.full((8,), 2.0, dtype=torch.float64)
    bound = family.bind(space)
    Laplace(space, theta, diagonal, W).place(bound, temperature, prior)
    precision = torch.linalg.inv(bound().covariance())
    expected = torch.diag(diagonal / temperature + prior)
    kept = W[:, : bound.precision_columns] / temperature**0.5
    expected = expected + kept @ kept.mT - torch.diag((kept @ kept.mT).diagonal())
    assert torch.allclose(precision, expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(bound().mean, theta)


def test_the_estimate_does_not_depend_on_the_batch_size():
    """Labels are drawn for the same parts of the data, in their order."""
    _, outputs, likelihood, (x, t), _ = next(cases())
    net, found = network(outputs), []
    for size in (1, 3, 7, 20):
        bayes = vi.variationalize(net, likelihood, vi.LowRankPrecision(2), vi.priors.NormalPrior(1.0))
        loader = DataLoader(TensorDataset(x, t), batch_size=size, shuffle=True)
        bayes.laplace(loader, progress=False)
        found.append(bayes.family().variance.detach())
    assert all(torch.allclose(found[0], other, rtol=1e-9) for other in found[1:])


def test_of_large_data_half_the_rows_are_read_evenly_spread():
    data = TensorDataset(torch.arange(20_000.0).unsqueeze(1), torch.zeros(20_000, 1))
    batches = Batches(DataLoader(data, 50))
    used = rows_used(20_000)
    seen = torch.cat([x for x, _ in batches.in_order(rows_of_part(used), used)]).flatten()
    assert used == len(seen) == len(seen.unique()) == 10_000
    assert torch.equal(seen, seen.sort().values)
    assert seen.unflatten(0, (10, -1)).mean(1).sub(torch.arange(1000.0, 20_000, 2000)).abs().max() < 100
    assert sum(len(x) for x, _ in batches.in_order(7)) == 20_000


def test_the_curvature_of_half_the_rows_is_that_of_all_in_the_mean():
    """Rows that are all alike: nothing is lost but what is random in the labels, √(2/512) of a diagonal entry."""
    net, x = nn.Linear(2, 3).double(), torch.ones(6000, 2, dtype=torch.float64)
    model = BayesianModel(net, vi.likelihoods.Categorical(), vi.priors.NormalPrior(1.0), 6000)
    batches = Batches(DataLoader(TensorDataset(x, torch.zeros(6000, dtype=torch.long)), 100))
    used = rows_used(6000)
    size = rows_of_part(used)
    half = diagonal_curvature(model, curvature_roots(model, model.space.initial, batches.in_order(size, used), 0, size))
    p = net(x[0]).softmax(-1).detach()
    truth = torch.cat([(p * (1 - p)).repeat_interleave(2), p * (1 - p)]) * 6000
    assert (half / truth - 1).abs().max() < 5 * (2 / 500) ** 0.5
