"""Predictions from several threads at once: those of one thread, bit for bit, and the user's network as it was."""

import copy
import sys
import threading

import pytest
import torch
from torch import nn

import structvi as vi

THREADS, CALLS = 8, 20


@pytest.fixture(autouse=True)
def often():
    """Threads take turns a hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


def together(call, threads=THREADS, calls=CALLS):
    """call(i) of all i, dealt out to threads that start at the same time: the results in order."""
    results, errors, start = {}, [], threading.Barrier(threads)

    def work(own):
        try:
            start.wait(timeout=60)
            for i in range(own, threads * calls, threads):
                results[i] = call(i)
        except Exception as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(own,)) for own in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return [results[i] for i in range(threads * calls)]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.lstm(x.unsqueeze(-1))[0][:, -1])


def normed():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    net[1].running_mean.normal_()
    return net


NETWORKS = {
    "train": (normed, {}),  # as networks are made
    "dropout": (normed, {"dropout": "on"}),
    "re-estimated": (normed, {"batch_norm": "reestimated"}),
    "LSTM": (Recurrent, {}),
}


def posterior(make, options):
    torch.manual_seed(0)
    family = vi.MeanField(initial_scale=0.5)
    return vi.variationalize(make(), vi.likelihoods.Categorical(), family, num_data=20, generator=seeded(0), **options)


def state(net):
    modules = list(net.modules())
    return (
        [id(tensor) for tensor in (*net.parameters(), *net.buffers())],
        [id(module) for module in modules],
        [module.training for module in modules],
        [vars(module).keys() for module in modules],
    )


def assert_untouched(net, before, values):
    assert state(net) == before
    assert all(torch.equal(tensor, values[name]) for name, tensor in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.isfinite(copy.deepcopy(net)(torch.randn(5, 3))).all()  # it works, and can be copied


@pytest.mark.parametrize("kind", NETWORKS)
def test_predictions_are_those_of_one_thread(kind):
    """Every prediction has draws and inputs of its own; the posterior of the threads has seen none before."""
    make, options = NETWORKS[kind]
    x = torch.randn(6, 3, generator=seeded(1))
    reference = {"reference": torch.randn(9, 3, generator=seeded(2))} if "batch_norm" in options else {}

    def prediction(bayes, i):
        return bayes.predict(x + 0.01 * i, draws=2 + i % 3, generator=seeded(i), **reference).outputs

    alone, shared = posterior(make, options), posterior(make, options)
    expected = [prediction(alone, i) for i in range(THREADS * CALLS)]
    before, values = state(shared.net), copy.deepcopy(shared.net.state_dict())
    stream = torch.get_rng_state()
    got = together(lambda i: prediction(shared, i))
    assert sum(torch.equal(a, b) for a, b in zip(got, expected, strict=True)) == THREADS * CALLS
    assert torch.equal(torch.get_rng_state(), stream)
    assert_untouched(shared.net, before, values)
