"""One call of a network: drawn weights take part, and afterwards nothing of it has changed; threads take turns."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import structvi as vi
from structvi.networks.call import alone_with, call_network, in_modes

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
T = torch.randn(6, 1, generator=torch.Generator().manual_seed(2))
SEQUENCES = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(3))


def posterior(net, **options):
    family = options.pop("family", vi.MeanField(initial_scale=0.1))
    return vi.variationalize(net, vi.likelihoods.Gaussian(0.5), family, num_data=6, **options)


def outputs(bayes, x=X, draws=3):
    return bayes.predict(x, draws=draws, generator=torch.Generator().manual_seed(0)).outputs


def at_the_mean(bayes, x=X):
    """The network's output at the mean of θ, as the posterior calls it."""
    with bayes.network_mode(), torch.no_grad():
        return bayes.model.outputs(bayes.family().mean.unsqueeze(0), x)[0]


def in_parallel(*works):
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)


class Changing(nn.Module):
    """A linear layer; how often it was called is added to its output."""

    def __init__(self, change):
        super().__init__()
        self.linear, self.change = nn.Linear(3, 1), change
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.register_buffer("frozen", torch.ones(3))

    def forward(self, x):
        self.change(self, x.detach())
        return self.linear(x * self.frozen) + self.count


def in_place(net, x):
    net.count += 1
    net.mean.mul_(0.9).add_(0.1 * x.mean(0))


def assigned(net, x):
    net.count = net.count + 1
    net.mean = 0.9 * net.mean + 0.1 * x.mean(0)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("change", [in_place, assigned])
@pytest.mark.parametrize("evaluation", ["auto", "loop"])
def test_a_network_that_changes_its_buffers_is_not_changed(change, evaluation, training):
    """Every call has found the count at 0 and left it at 1."""
    net = Changing(change).train(training)
    buffers = dict(net.named_buffers())
    before = {name: (buffer.clone(), buffer._version) for name, buffer in buffers.items()}
    bayes = posterior(net, evaluation=evaluation)
    torch.testing.assert_close(at_the_mean(bayes), (net.linear(X) + 1).detach())
    for _ in range(3):
        bayes.loss((X, T)).backward()
    assert torch.equal(outputs(bayes, draws=5), outputs(bayes, draws=5))
    bayes.sample_network()
    assert all(buffer is buffers[name] for name, buffer in net.named_buffers())
    for name, buffer in net.named_buffers():
        value, version = before[name]
        assert torch.equal(buffer, value), name
        assert buffer._version == version, name
    assert [module.training for module in net.modules()] == [training] * 2
    assert all(parameter.grad is None for parameter in net.parameters())


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 1)
        self.register_buffer("offset", torch.zeros(1))
        self.factor, self.steps = 1.0, [self.body, self.head]

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return self.factor * x + self.offset


def assign_state(net):
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state["offset"] += 3.0
    net.load_state_dict(state, assign=True)


def free_and_append(net):
    """The new module may have the address of the old one."""
    del net.body[1]
    net.body.append(nn.ReLU())


CHANGES = {
    "buffer in place": lambda net: net.offset.add_(3.0),
    "buffer replaced": lambda net: setattr(net, "offset", torch.full((1,), 3.0)),
    "load_state_dict(assign=True)": assign_state,
    "module replaced": lambda net: net.body.__setitem__(1, nn.ReLU()),
    "module freed and another appended": free_and_append,
    "module appended to a list": lambda net: net.steps.append(nn.Sigmoid()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_network_are_seen_at_the_next_call(change):
    torch.manual_seed(0)
    net = Plain()
    bayes = posterior(net)
    first = at_the_mean(bayes)
    torch.testing.assert_close(first, net(X).detach())
    CHANGES[change](net)
    expected = copy.deepcopy(net)(X).detach()
    assert not torch.allclose(expected, first, atol=1e-3)
    torch.testing.assert_close(at_the_mean(bayes), expected)


def test_held_tensors_have_the_values_that_the_network_has_and_no_gradient():
    net = Plain()
    bayes = posterior(net, select="head.*")
    first = at_the_mean(bayes)
    with torch.no_grad():
        net.body[0].weight.mul_(2.0)
    assert not torch.allclose(at_the_mean(bayes), first, atol=1e-3)
    torch.testing.assert_close(at_the_mean(bayes), net(X).detach())
    bayes.loss((X, T)).backward()
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_call_that_fails_leaves_nothing_behind():
    net = nn.Sequential(nn.LSTM(3, 2, num_layers=2, dropout=0.5), nn.Linear(7, 1))  # its output is no tensor
    tensors = {name: parameter.detach() + 1 for name, parameter in net.named_parameters()}
    before = {name: (parameter, parameter._version) for name, parameter in net.named_parameters()}
    with pytest.raises(TypeError), in_modes(net, lambda module: False):
        call_network(net, tensors, (torch.zeros(2, 5, 3, dtype=torch.float32),))
    assert all(before[name] == (parameter, parameter._version) for name, parameter in net.named_parameters())
    assert all(module.training for module in net.modules())
    assert net[0].dropout == 0.5


# Layers with other kernels in eval mode


class Sees(nn.Module):
    """A recurrent network with dropout between its layers, and attention; it notes how they are called."""

    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.body, self.seen = kind(3, 8, num_layers=2, dropout=0.9, batch_first=True), set()
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.9)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        attention = self.attention.self_attn
        self.seen.add((self.training, self.body.training, self.body.dropout, attention.training, attention.dropout))
        return self.head(self.attention(self.body(x)[0]).mean(1))


class OwnForward(nn.LSTM):
    def forward(self, x):
        return super().forward(x * 2 if self.training else x)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrence_and_attention_train_without_dropout_and_values_stay(kind):
    torch.manual_seed(0)
    net = Sees(kind).eval()
    expected = net(SEQUENCES)
    net.seen.clear()
    own = {name: parameter.detach() for name, parameter in net.named_parameters()}
    torch.testing.assert_close(call_network(net, own, (SEQUENCES,)), expected)
    assert net.seen == {(False, True, 0.0, True, 0.0)}
    assert (net.body.training, net.body.dropout, net.attention.training) == (False, 0.9, False)
    net.seen.clear()
    net.train()
    call_network(net, own, (SEQUENCES,))  # what is in training mode keeps its dropout
    assert net.seen == {(True, True, 0.9, True, 0.9)}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, OwnForward])
def test_no_recurrent_module_keeps_the_drawn_weights(kind):
    """With them the graph of the call would stay, and a captured step meets its nodes, which are of another stream."""
    torch.manual_seed(0)
    net = nn.Sequential(kind(3, 4, batch_first=True)).eval()
    before = net(SEQUENCES)[0]
    bayes = vi.variationalize(net, lambda y, t: -y[0].square().sum((1, 2)), vi.MAP(), num_data=4, evaluation="loop")
    bayes.loss((SEQUENCES, torch.zeros(4))).backward()
    kept = net[0]._flat_weights
    assert len(kept) == 4
    assert all(any(weight is own for own in net.parameters()) for weight in kept)
    torch.testing.assert_close(at_the_mean(bayes, SEQUENCES)[0], before.detach())


# Threads


def test_threads_that_share_a_network_take_turns():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5), nn.BatchNorm1d(64), nn.Linear(64, 1))
    posteriors = [posterior(net, family=vi.MeanField(initial_scale=0.1 * (1 + i)), dropout="off") for i in range(3)]
    expected = [outputs(bayes) for bayes in posteriors]
    found = [[] for _ in posteriors]
    in_parallel(*(lambda i=i: found[i].extend(outputs(posteriors[i]) for _ in range(20)) for i in range(3)))
    for wanted, own in zip(expected, found, strict=True):
        assert len(own) == 20
        assert all(torch.equal(one, wanted) for one in own)
    assert all(module.training for module in net.modules())


def test_a_thread_of_autograds_does_not_wait_for_the_one_that_waits_for_it():
    """On a GPU the backward pass runs in a thread of autograd's, while this one, inside a step, has the lock."""
    net, done, caller = nn.Linear(3, 1), [], threading.get_ident()

    def again():
        with alone_with(net, caller), in_modes(net, [True]):
            done.append(net.training)

    with alone_with(net):
        in_parallel(again)
    assert done == [True]


def test_a_network_that_one_of_its_hooks_knows_is_freed():
    net = nn.Sequential(nn.Linear(3, 1))
    net[0].register_forward_hook(lambda *_, net=net: None)
    at_the_mean(posterior(net))
    known = weakref.ref(net)
    del net
    gc.collect()
    assert known() is None
