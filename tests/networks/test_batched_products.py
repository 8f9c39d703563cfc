"""Gradients of the weights of all draws, written where they belong in that of θ [S, P]."""

import pytest
import torch
from torch import nn

import structvi as vi
from structvi.networks import vmap_or_loop
from structvi.networks.batched_products import Room


class Tied(nn.Module):
    """A layer that is used twice, one whose output nobody looks at, and a parameter of no layer."""

    def __init__(self):
        super().__init__()
        self.inside, self.twice, self.outside = nn.Linear(3, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
        self.unused, self.shift = nn.Linear(4, 1), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        h = self.twice(torch.tanh(self.twice(torch.tanh(self.inside(x)))) + self.shift)
        self.unused(h)
        return self.outside(h)


@pytest.fixture
def posterior(monkeypatch):
    monkeypatch.setattr(vmap_or_loop, "pays_batched", lambda theta: True)  # as on a GPU
    torch.manual_seed(0)
    batch = torch.randn(7, 3, dtype=torch.float64), torch.randint(2, (7,))
    return lambda evaluation, chunk=None: (
        vi.variationalize(
            Tied().double(), vi.likelihoods.Categorical(), vi.MeanField(), num_data=7, evaluation=evaluation,
            chunk=chunk,
        ),
        batch,
    )  # fmt: skip


def gradient(bayes, batch, theta, **options):
    theta = theta.detach().requires_grad_()
    value = bayes.model.log_likelihood(theta, batch)
    (found,) = torch.autograd.grad((value * torch.arange(1.0, 5.0)).sum(), theta, **options)
    return theta, found


@pytest.fixture
def rooms(monkeypatch):
    """How many places each room has given away before it was filled."""
    given, own = [], Room.filled

    def filled(self, parts):
        given.append(len(self.taken))
        return own(self, parts)

    monkeypatch.setattr(Room, "filled", filled)
    return given


@pytest.mark.parametrize("apart", [False, True], ids=["rows one after the other", "rows with room between them"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_gradients_are_those_of_the_loop(posterior, rooms, chunk, apart):
    (bayes, batch), (other, _) = posterior("vmap", chunk), posterior("loop")
    P = bayes.space.size
    theta = torch.randn(4, P + 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    theta = theta[:, :P] if apart else theta[:, :P].contiguous()
    other.net.load_state_dict(bayes.net.state_dict())
    _, found = gradient(bayes, batch, theta)
    torch.testing.assert_close(found, gradient(other, batch, theta)[1])
    assert rooms == [5] * (1 if chunk is None else 2)  # of three layers, each once, and of two biases


def test_twice_through_one_graph(posterior):
    bayes, batch = posterior("vmap")
    theta = torch.randn(4, bayes.space.size, dtype=torch.float64).requires_grad_()
    value = bayes.model.log_likelihood(theta, batch)
    first = torch.autograd.grad(value[0], theta, retain_graph=True)[0]
    kept = first.clone()
    second = torch.autograd.grad(value.sum(), theta)[0]
    assert torch.equal(first, kept)  # what the first pass gave is not written over
    torch.testing.assert_close(second[0], first[0])


def test_a_gradient_that_is_differentiated_again(posterior):
    bayes, batch = posterior("vmap")
    other, _ = posterior("loop")
    other.net.load_state_dict(bayes.net.state_dict())
    at = torch.randn(4, bayes.space.size, dtype=torch.float64)
    both = []
    for one in (bayes, other):
        theta, found = gradient(one, batch, at, create_graph=True)
        both.append(torch.autograd.grad(found.square().sum(), theta)[0])
    torch.testing.assert_close(*both)
