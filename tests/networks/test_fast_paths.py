"""What is set around a call on a GPU: the same outputs, gradients through recurrence, and everything put back."""

import threading

import pytest
import torch
from torch import nn

import structvi as vi
from structvi.networks import fast_paths
from structvi.networks.fast_paths import differentiable, plain_attention
from structvi.networks.twins import Twins

X = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1))
fast = torch.backends.mha.get_fastpath_enabled


class Sees(nn.Module):
    """A recurrent network with dropout between its layers, and attention; it notes what is set in a call."""

    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.body, self.seen = kind(3, 8, num_layers=2, dropout=0.9, batch_first=True), []
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        self.seen.append((self.body.training, self.body.dropout, fast()))
        return self.head(self.attention(self.body(x)[0]).mean(1))


class OwnForward(nn.LSTM):
    def forward(self, x):
        return super().forward(x * 2 if self.training else x)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(fast_paths, "on_a_gpu", lambda tensor: True)


def posterior(kind=nn.LSTM):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    likelihood = vi.likelihoods.Categorical()
    return vi.variationalize(Sees(kind), likelihood, vi.MeanField(), num_data=4, generator=generator, evaluation="loop")


def loss(bayes):
    target = torch.tensor([0, 1, 2, 0])
    value = bayes.loss((X, target), generator=torch.Generator().manual_seed(2))
    value.backward()
    return value.detach(), [p.grad.clone() for p in bayes.parameters()]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_with_gradients_recurrence_trains_without_dropout_and_values_stay(kind, monkeypatch):
    before, after = posterior(kind), posterior(kind)
    expected, gradients = loss(before)
    assert set(before.net.seen) == {(False, 0.9, True)}
    monkeypatch.setattr(fast_paths, "on_a_gpu", lambda tensor: True)
    value, others = loss(after)
    assert set(after.net.seen) == {(True, 0.0, False)}
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert (after.net.body.training, after.net.body.dropout, fast()) == (True, 0.9, True)  # as the user left it


def test_without_gradients_only_attention_changes(as_on_a_gpu):
    bayes = posterior()
    with torch.no_grad():
        bayes.predict(X, draws=2, generator=torch.Generator().manual_seed(0))
    assert (False, 0.9, False) in bayes.net.seen
    assert all(seen[2] is False for seen in bayes.net.seen)
    assert fast()


def test_what_is_in_training_mode_keeps_its_dropout():
    lstm = nn.LSTM(2, 2, num_layers=2, dropout=0.5)
    with differentiable([lstm]):
        assert lstm.dropout == 0.5
    assert lstm.training


def test_a_call_that_fails_puts_everything_back():
    lstm = nn.LSTM(2, 2, num_layers=2, dropout=0.5).eval()
    with pytest.raises(ZeroDivisionError), differentiable([lstm]), plain_attention():
        raise ZeroDivisionError
    assert (lstm.training, lstm.dropout, fast()) == (False, 0.5, True)


def test_a_forward_of_the_users_own_is_not_put_into_training_mode():
    net = nn.ModuleDict({"own": OwnForward(2, 2), "torch": nn.LSTM(2, 2), "cell": nn.LSTMCell(2, 2)})
    with Twins(net).borrowed() as twin:
        assert twin.recurrent == [twin.net["torch"]]
        assert not twin.attends


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, OwnForward])
@pytest.mark.parametrize("family", [vi.MAP(), vi.MeanField()])
def test_no_recurrent_module_keeps_the_drawn_weights(kind, family):
    """With them the graph of the call would stay, and a captured step meets its nodes, which are of another stream."""
    torch.manual_seed(0)
    net = nn.Sequential(kind(3, 4, batch_first=True))
    bayes = vi.variationalize(net, lambda y, t: -y[0].square().sum((1, 2)), family, num_data=4, evaluation="loop")
    bayes.loss((X, torch.zeros(4))).backward()
    with bayes.model.twins.borrowed() as twin:
        kept = [weight for module in twin.flattened for weight in module._flat_weights]
    assert len(kept) == 4
    assert all(any(weight is own for own in net.parameters()) for weight in kept)


def test_attention_is_plain_until_the_last_thread_has_left():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with plain_attention():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with plain_attention():
        thread.start()
        inside.wait()
    assert not fast()
    leave.set()
    thread.join()
    assert fast()
