"""Variances learned from one forward pass: against exact ones, of every form of output; saved, and dropped by a fit."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.predict.metrics import ood_auroc
from structvi.predict.one_pass import one_pass, predictive_of, variance_of_draws

lk = vi.likelihoods
F64 = torch.float64


class Tokens(nn.Module):
    """A last layer whose outputs are averaged over positions."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.last(self.first(x).tanh()).mean(1)


FORMS = {
    "classes": (
        lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)),
        lk.Categorical(), (3,), lambda n: torch.randint(5, (n,)),
    ),
    "pixels of classes": (
        lambda: nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 3, 1)),
        lk.Categorical(), (1, 8, 8), lambda n: torch.randint(3, (n, 8, 8)),
    ),
    "pixels": (
        lambda: nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 1, 1)),
        lk.Bernoulli(), (1, 8, 8), lambda n: torch.randint(2, (n, 1, 8, 8)).float(),
    ),
    "tokens": (Tokens, lk.Categorical(), (4, 3), lambda n: torch.randint(5, (n,))),
    "numbers": (
        lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)),
        lk.Gaussian("point"), (3,), lambda n: torch.randn(n, 5),
    ),
    "counts": (
        lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)),
        lk.Poisson(), (3,), lambda n: torch.randint(4, (n, 5)).float(),
    ),
}  # fmt: skip


def placed(form, n=300, **options):
    make, likelihood, shape, target = FORMS[form]
    torch.manual_seed(0)
    net, x, t = make(), torch.randn(n, *shape), target(n)
    bayes = vi.variationalize(net, copy.deepcopy(likelihood), **options)
    bayes.laplace(DataLoader(TensorDataset(x, t), 50), progress=False)
    return bayes, x, t


@pytest.fixture(scope="module", params=FORMS)
def known(request):
    return request.param, *placed(request.param)


def test_it_has_the_order_of_the_variances_and_takes_one_pass(known):
    form, bayes, x, t = known
    calls = []
    hook = bayes.net.register_forward_pre_hook(lambda *_: calls.append(1))
    pred = bayes.predict(x[:50])
    hook.remove()
    assert len(calls) == 1
    assert pred.note == "learned variance"
    assert torch.equal(pred.mean, bayes.predict(x[:50]).mean)
    drawn = bayes.predict(x[:50], 2000)
    spread, truth = pred.function_variance, drawn.function_variance
    if form != "counts":  # of those function values are at points
        assert pred.outputs[0].shape == truth.shape == spread.shape
    if isinstance(bayes.model.likelihood, lk.Categorical):  # logits count up to a constant
        truth = variance_of_draws(bayes, drawn.outputs - drawn.function_mean)
        spread = spread.mean(1, keepdim=True)
    error = (spread / truth).log()
    assert error.square().mean().sqrt() < 0.5
    assert pred.log_prob(t[:50]).mean() == pytest.approx(drawn.log_prob(t[:50]).mean().item(), abs=0.03)
    torch.testing.assert_close(pred.mean, drawn.mean, atol=0.06 if form != "numbers" else 0.2, rtol=0.1)


def test_it_is_saved_moves_with_the_posterior_and_a_fit_drops_it(known, tmp_path):
    _, bayes, x, t = known
    bayes.save(tmp_path / "own.safetensors")
    net = copy.deepcopy(bayes.net)
    again = vi.load(tmp_path / "own.safetensors", net)
    assert torch.equal(again.predict(x).mean, bayes.predict(x).mean)
    own = copy.deepcopy(bayes)
    own.double()
    assert own.predict(x.double()).mean.dtype == F64
    again.fit(DataLoader(TensorDataset(x, t), 100), epochs=1, progress=False)
    assert again.learned_variance is None
    assert again.predict(x[:4]).note != "learned variance"


class Closed(nn.Module):
    """A function that knows a layer of this network by itself."""

    def __init__(self):
        super().__init__()
        layer, self.last = nn.Linear(3, 8), nn.Linear(8, 5)
        self.layer, self.function = layer, lambda x: layer(x).tanh()

    def forward(self, x):
        return self.last(self.function(x))


@pytest.mark.parametrize("make", [FORMS["classes"][0], Closed])
def test_one_pass_is_that_of_the_posterior_whatever_becomes_of_the_network(make):
    torch.manual_seed(0)
    net, x = make(), torch.randn(300, 3)
    bayes = vi.variationalize(net, lk.Categorical())
    bayes.laplace(DataLoader(TensorDataset(x, torch.randint(5, (300,))), 50), progress=False)
    first = bayes.predict(x[:4])
    with torch.no_grad():
        for parameter in net.parameters():  # θ₀ is the posterior's own
            parameter.add_(1.0)
    assert torch.equal(bayes.predict(x[:4]).outputs, first.outputs)
    bayes.model.linearised_at.mul_(1.1)
    moved = bayes.predict(x[:4]).outputs[0]
    assert not torch.equal(moved, first.outputs[0])
    assert torch.equal(moved, one_pass(bayes, bayes.model.linearised_at, x[:4], bayes.learned_variance.layer).output)


def test_variances_of_classes_are_those_of_differences():
    bayes, *_ = placed("pixels of classes", n=20)
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(3, 3, generator=generator, dtype=F64)
    covariance = root @ root.mT
    pairs = [covariance[i, i] + covariance[j, j] - 2 * covariance[i, j] for i in range(3) for j in range(i)]
    draws = torch.einsum("ij,sbjn->sbin", root, torch.randn(40_000, 2, 3, 4, generator=generator, dtype=F64))
    found = variance_of_draws(bayes, draws)
    assert found.shape == (2, 1, 4)
    torch.testing.assert_close(found, torch.full_like(found, float(sum(pairs)) / 6), rtol=0.05, atol=0.0)


def test_a_probit_approximation_is_near_the_average():
    """Of normal logits with one variance, against many points of them."""
    y = torch.tensor([[2.0, 0.0, -1.0], [0.3, 0.1, 0.0]], dtype=F64)
    v = torch.tensor([[1.0], [2.0]], dtype=F64)
    pred = predictive_of(y, v, lk.Categorical())
    z = torch.randn(100_000, 2, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    drawn = (y + v.sqrt() * z).softmax(-1)
    torch.testing.assert_close(pred.mean, drawn.mean(0), atol=0.04, rtol=0)  # the approximation is off by up to .03
    expected = -torch.xlogy(drawn.mean(0), drawn.mean(0)).sum(-1) + torch.xlogy(drawn, drawn).sum(-1).mean(0)
    torch.testing.assert_close(pred.mutual_information, expected, atol=0.02, rtol=0)


def test_inputs_unlike_the_data_have_a_score_and_a_threshold(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(3000, 3)
    t = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 5))
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[:1000]), t[:1000]).backward()
        optimizer.step()
    bayes = vi.variationalize(net, lk.Categorical())
    with pytest.raises(ValueError, match="validation=held_out"):
        bayes.predict(x).ood_score  # noqa: B018
    data = [DataLoader(TensorDataset(x[a:b], t[a:b]), 100) for a, b in ((0, 1000), (1000, 2000))]
    bayes.laplace(data[0], validation=data[1], progress=False)
    pred, far = bayes.predict(x[2000:]), bayes.predict(10 * x[2000:] + 5)
    assert pred.is_ood.double().mean() == pytest.approx(0.05, abs=0.03)
    assert far.is_ood.double().mean() > 0.9
    assert ood_auroc(bayes, [x[2000:]], [10 * x[2000:] + 5], "ood_score") > 0.95
    bayes.save(tmp_path / "own.safetensors")
    again = vi.load(tmp_path / "own.safetensors", net)
    assert torch.equal(again.predict(x[:9]).ood_score, bayes.predict(x[:9]).ood_score)
    assert torch.equal(bayes.predict(x[:9], 8).ood_score, bayes.predict(x[:9]).ood_score)  # whatever draws there are
