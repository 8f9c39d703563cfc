"""The Gauss–Newton matrix from simulated labels against dense Jacobians, and the curvature of priors."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.laplace import curvature
from structvi.laplace.curvature import ROWS, curvature_of, prior_precision, simulated_gradients
from structvi.models.bayesian_model import BayesianModel
from structvi.train.data import Batches

N, F64 = 20, torch.float64


def network(outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def dense(net, x, hessian):
    """Σ_n JᵀHJ [P, P], H [N, O, O] the information about every output."""
    named = {name: p.detach() for name, p in net.named_parameters()}
    J = jacrev(lambda at: functional_call(net, at, (x,)))(named)
    J = torch.cat([J[name].flatten(2) for name in named], dim=-1)
    return torch.einsum("nop,noq,nqr->pr", J, hessian, J)


def cases():
    x = torch.randn(N, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
    labels, is_known = torch.arange(N) % 3, torch.arange(N) < 12
    numbers = torch.randn(N, 2, dtype=F64, generator=torch.Generator().manual_seed(2))
    weights = torch.tensor([0.5, 1.0, 3.0], dtype=F64)

    def categorical(weight):
        def truth(net):
            p = net(x).detach().softmax(-1)
            information = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
            return dense(net, x, information * weight.view(-1, 1, 1))

        return truth

    def diagonal(information):
        return lambda net: dense(net, x, torch.diag_embed(information(net(x).detach())))

    lk = vi.likelihoods
    yield "categorical", 3, lk.Categorical(), (x, labels), categorical(torch.ones(N, dtype=F64))
    yield "mask", 3, lk.Categorical(), (x, (labels, is_known)), categorical(is_known.double())
    ignored = labels.masked_fill(~is_known, 9)
    yield "ignored", 3, lk.Categorical(ignore_index=9), (x, ignored), categorical(is_known.double())
    yield "class weights", 3, lk.Categorical(class_weights=weights), (x, labels), categorical(weights[labels])
    yield "bernoulli", 2, lk.Bernoulli(), (x, (numbers > 0).double()), diagonal(lambda y: y.sigmoid() * (-y).sigmoid())
    yield "normal", 2, lk.Gaussian(0.5), (x, numbers), diagonal(lambda y: torch.full_like(y, 4.0))
    yield "poisson", 2, lk.Poisson(), (x, numbers.abs().round()), diagonal(torch.exp)


def gradients(model, batches, size, seed=0):
    return list(simulated_gradients(model, model.likelihood, model.space.initial, batches, size, seed))


@pytest.mark.parametrize(
    ("case", "size"),
    [*((case, 1) for case in cases()), (next(cases()), 4)],
    ids=lambda x: x if isinstance(x, int) else x[0],
)
def test_the_diagonal_is_unbiased(case, size):
    """Within six standard errors, as the squares themselves show them: by chance once in ten million."""
    _, outputs, likelihood, batch, truth = case
    net, passes = network(outputs), 40 * size
    model = BayesianModel(net, likelihood, vi.priors.NormalPrior(1.0), N)
    found = gradients(model, [batch] * passes, size)
    squares = torch.stack([g for g, _ in found]).square().unflatten(0, (passes, -1)).sum(1)
    expected, error = truth(net).diagonal(), squares.std(0) / passes**0.5
    assert bool(((squares.mean(0) - expected).abs() < 6 * error + 1e-12).all())
    assert bool((error < 0.2 * expected + 1e-12).all())  # and these are small
    whole = curvature_of(model.space.initial, lambda: found, N, torch.ones_like(expected), 0)
    torch.testing.assert_close(whole.diagonal, squares.mean(0))


@pytest.mark.parametrize("room", [2**28, 10])
def test_leading_columns_are_those_of_the_same_gradients(room, monkeypatch):
    monkeypatch.setattr(curvature, "MOST_NUMBERS", room)
    _, outputs, likelihood, batch, _ = next(cases())
    model = BayesianModel(network(outputs), likelihood, vi.priors.NormalPrior(1.0), 2 * N)  # half of the rows
    found = gradients(model, [batch] * 5, 1)
    roots = torch.stack([g for g, _ in found])
    G = 2 * roots.mT @ roots / 5
    reads = []
    whole = curvature_of(model.space.initial, lambda: reads.append(0) or iter(found), 2 * N, torch.ones(31), 4)
    assert len(reads) == (1 if room > 10 else 2)
    torch.testing.assert_close(whole.diagonal, G.diagonal())
    metric = (G.diagonal() + 1).sqrt()
    values, vectors = torch.linalg.eigh(G / metric / metric.unsqueeze(-1))
    best = (vectors[:, -4:] * values[-4:]) @ vectors[:, -4:].mT
    W = whole.columns / metric.unsqueeze(-1)
    # an incremental decomposition leaves out a little each time
    assert (W @ W.mT - best).norm() < (1e-9 if room > 10 else 0.05) * best.norm()
    assert bool((G.diagonal() - whole.columns.square().sum(1) > -1e-9).all())


def test_the_estimate_does_not_depend_on_the_batch_size():
    _, outputs, likelihood, (x, t), _ = next(cases())
    net, found = network(outputs), []
    for size in (1, 7, 20):
        bayes = vi.variationalize(net, likelihood, vi.LowRankPrecision(2), vi.priors.NormalPrior(1.0))
        bayes.laplace(DataLoader(TensorDataset(x, t), batch_size=size, shuffle=True), progress=False)
        found.append(bayes.family().variance.detach())
    assert all(torch.allclose(found[0], other, rtol=1e-9) for other in found[1:])


def test_some_rows_of_large_data_stand_for_all():
    """Rows that are all alike: nothing is lost but what is random in the labels, √(2/128) of a diagonal entry."""
    net, x = nn.Linear(2, 3).double(), torch.ones(20_000, 2, dtype=F64)
    model = BayesianModel(net, vi.likelihoods.Categorical(), vi.priors.NormalPrior(1.0), 20_000)
    batches = Batches(DataLoader(TensorDataset(x, torch.zeros(20_000, dtype=torch.long)), 100))
    size = -(-ROWS // curvature.GRADIENTS)
    found = gradients(model, batches.in_order(size, ROWS), size)
    assert ROWS <= sum(own for _, own in found) < ROWS + size
    half = curvature_of(model.space.initial, lambda: found, 20_000, torch.ones(9), 0).diagonal
    p = net(x[0]).softmax(-1).detach()
    truth = torch.cat([(p * (1 - p)).repeat_interleave(2), p * (1 - p)]) * 20_000
    assert (half / truth - 1).abs().max() < 5 * (2 / curvature.GRADIENTS) ** 0.5


def test_the_curvature_of_priors():
    net = nn.Linear(5, 6, bias=False).double()
    model = BayesianModel(net, vi.likelihoods.Categorical(), vi.priors.NormalPrior(0.5), 10)
    theta = model.space.initial

    def hessian(prior):
        return -torch.autograd.functional.hessian(
            lambda at: prior(model.net_space, at.unsqueeze(0))[0], theta
        ).diagonal()

    for prior in (vi.priors.NormalPrior(0.5), vi.priors.StudentTPrior(4.0, 0.3)):  # weights are independent: exactly
        torch.testing.assert_close(prior_precision(model, prior, theta), hessian(prior))
    whole = vi.priors.StudentTPrior(4.0, 0.3, per="tensor")
    found, exact = prior_precision(model, whole, theta), hessian(whole)
    error = 2 / (30 * curvature.PROBES) ** 0.5  # as it says, 4.6 %; one probe alone is 37 % off
    assert float((found / exact - 1).square().mean().sqrt()) < 1.5 * error
    # a Laplace prior has no curvature: the initialisation's width stands for its own
    flat = prior_precision(model, vi.priors.LaplacePrior(1.0), theta)
    torch.testing.assert_close(flat, model.space.scale**-2)
