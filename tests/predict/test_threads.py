"""Predictions from several threads at once: those of one thread, bit for bit, and the user's network as it was."""

import copy
import sys
import threading

import pytest
import torch
from torch import nn

import structvi as vi
from structvi.predict.metrics import ood_auroc
from structvi.predict.tiles import predict_tiles

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


class Closed(nn.Module):
    """A function that knows a layer of this network by itself."""

    def __init__(self):
        super().__init__()
        layer = self.layer = nn.Linear(3, 2)
        self.function = lambda x: layer(x)

    def forward(self, x):
        return self.function(x)


def normed():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    net[1].running_mean.normal_()
    return net


NETWORKS = {
    "train": (normed, {}),  # as networks are made
    "dropout": (normed, {"dropout": "on"}),
    "re-estimated": (normed, {"batch_norm": "reestimated"}),
    "LSTM": (Recurrent, {}),
    "closure": (Closed, {}),
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


def convolutions(dropout="off"):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Conv2d(3, 2, 1))
    return vi.variationalize(
        net, vi.likelihoods.Categorical(), vi.MeanField(initial_scale=0.3), num_data=9, dropout=dropout
    )


@pytest.mark.parametrize("dropout", ["off", "on"])
def test_everything_that_predicts_at_the_same_time(dropout):
    """evaluate, tiles, drawn networks, samples, scores and predictions, each in turn in every thread."""
    x, t = torch.randn(4, 1, 6, 6, generator=seeded(1)), torch.randint(2, (4, 6, 6), generator=seeded(2))

    def tiles(bayes, i):
        parts = predict_tiles(bayes, x[0], (4, 4), 1, draws=3, generator=seeded(i))
        return torch.cat([pred.mean.flatten() for _, pred in parts])

    kinds = [
        lambda bayes, i: bayes.predict(x, draws=3, generator=seeded(i)).mean,
        lambda bayes, i: torch.tensor(bayes.evaluate([(x, t)], draws=3, generator=seeded(i)).nlpd),
        tiles,
        lambda bayes, i: bayes.sample_network(seeded(i)).eval()(x).detach(),
        lambda bayes, i: bayes.mean_network().eval()(x).detach(),
        lambda bayes, i: bayes.sample(2, seeded(i))["0.weight"],
        lambda bayes, i: bayes.predict(x, draws=3, generator=seeded(i)).sample(2, seeded(i)),
        lambda bayes, i: torch.tensor(ood_auroc(bayes, [x], [2 * x], draws=3, generator=seeded(i))),
        lambda bayes, i: bayes.model.log_joint(bayes.space.initial.expand(3, -1) + 0.01 * i, (x, t)).detach(),
    ]
    alone, shared = convolutions(dropout), convolutions(dropout)
    for bayes in (alone, shared):
        bayes.net.eval()  # log_joint is in the network's own mode
    count = 9 * len(kinds)
    expected = [kinds[i % len(kinds)](alone, i) for i in range(count)]
    before, values = state(shared.net), copy.deepcopy(shared.net.state_dict())
    got = together(lambda i: kinds[i % len(kinds)](shared, i), threads=9, calls=len(kinds))
    assert sum(torch.equal(a, b) for a, b in zip(got, expected, strict=True)) == count
    assert state(shared.net) == before
    assert all(torch.equal(tensor, values[name]) for name, tensor in shared.net.state_dict().items())
