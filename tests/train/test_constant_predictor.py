"""The best output that ignores the input, against a search for it, and what a fit says that is worse than it."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi import likelihoods as lk
from structvi.train.compare import Watched


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def searched(likelihood, target, shape, extra=()):
    """Maximise the log likelihood over one output for all rows, by L-BFGS in float64."""
    output = torch.zeros(1, *shape, dtype=torch.float64, requires_grad=True)
    free = [output, *extra]
    optimizer = torch.optim.LBFGS(free, max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe")
    B = (target[0] if isinstance(target, tuple) else target).shape[0]

    def loss():
        optimizer.zero_grad()
        value = -likelihood(output.expand(B, *shape), target).sum()
        value.backward()
        return value

    optimizer.step(loss)
    return -loss().item()


def constant(likelihood, target):
    n = len(target[0] if isinstance(target, tuple) else target)
    model = vi.BayesianModel(nn.Linear(1, 1), likelihood, vi.priors.NormalPrior(1.0), num_data=n)
    cut = [(torch.zeros(part, 1), _rows(target, start, part)) for start, part in ((0, n // 3), (n // 3, n - n // 3))]
    watched = Watched(cut, model)
    assert len(list(watched)) == 2
    return watched.log_likelihood


def _rows(target, start, count):
    if isinstance(target, tuple):
        return tuple(t[start : start + count] for t in target)
    return target[start : start + count]


T = 3 * torch.randn(40, 2, generator=generator(), dtype=torch.float64) + torch.tensor([5.0, -1.0])
MASK = torch.rand(40, 2, generator=generator(1)) > 0.3
LABELS = torch.randint(0, 3, (40,), generator=generator(2))
BITS = (torch.rand(40, 1, generator=generator(3)) > 0.8).double()
COUNTS = torch.poisson(torch.full((40, 1), 3.0), generator=generator(4))


def point():
    likelihood = lk.Gaussian("point").double()
    return likelihood, [likelihood.log_noise]


@pytest.mark.parametrize(
    ("make", "target", "shape"),
    [
        (lambda: (lk.Gaussian(0.7), []), T, (2,)),
        (lambda: (lk.Gaussian(0.7), []), (T, MASK), (2,)),
        (point, T, (2,)),
        (lambda: (lk.Gaussian("head"), []), T, (4,)),
        (lambda: (lk.Categorical(), []), LABELS, (3,)),
        (lambda: (lk.Categorical(ignore_index=2), []), LABELS, (3,)),
        (lambda: (lk.Categorical(class_weights=(1.0, 3.0, 0.5)), []), LABELS, (3,)),
        (lambda: (lk.Bernoulli(), []), BITS, (1,)),
        (lambda: (lk.Poisson(), []), COUNTS, (1,)),
    ],
    ids=["known", "masked", "point", "head", "classes", "ignored", "weighted", "bits", "counts"],
)
def test_it_is_the_best_of_all_constants(make, target, shape):
    likelihood, extra = make()
    assert constant(likelihood, target) == pytest.approx(searched(likelihood, target, shape, extra), rel=1e-6)


def test_what_is_not_known():
    x = (torch.zeros(4, 1), torch.zeros(4, 1))
    model = vi.BayesianModel(nn.Linear(1, 1), lambda y, t: -(y - t).square(), vi.priors.NormalPrior(1.0), 4)
    watched = Watched([x], model)
    list(watched)
    assert watched.log_likelihood is None


def wide(n=40):
    """Far more weights than data: at λ = 1 the KL costs more than anything that can be learned."""
    x, t = torch.randn(n, 5, generator=generator(5)), torch.randn(n, 1, generator=generator(6))
    net = nn.Sequential(nn.Linear(5, 400), nn.ReLU(), nn.Linear(400, 1))
    bayes = vi.variationalize(net, lk.Gaussian(1.0), vi.MeanField(), vi.priors.NormalPrior(1.0))
    return bayes, DataLoader(TensorDataset(x, t), batch_size=n)


def test_a_fit_that_is_worse_says_so():
    bayes, loader = wide()
    result = bayes.fit(loader, steps=120, progress=False)
    assert result.constant is not None
    assert result.elbo.value < result.constant
    assert any(note.startswith("worse than knowing nothing") for note in result.notes)
    assert not any("call fit again to go on" in note for note in result.notes)
    assert f"{result.constant:.2f} nats" in result.details


def test_a_fit_that_learns_does_not():
    torch.manual_seed(0)
    x = torch.randn(200, 2, generator=generator(7))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=50, shuffle=True)
    bayes = vi.variationalize(nn.Linear(2, 1), lk.Gaussian(0.5), vi.MeanField(), vi.priors.NormalPrior(1.0))
    result = bayes.fit(loader, steps=300, progress=False)
    assert result.elbo.value > result.constant
    assert not any("knowing nothing" in note for note in result.notes)
