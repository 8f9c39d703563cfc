"""`acquire`: scores input by input, and batches by their joint information."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi import likelihoods

F64 = torch.float64


def network(outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def fitted(likelihood, outputs=3, family=None, select="2.*"):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 3, generator=generator, dtype=F64)
    t = x[:, :outputs] if isinstance(likelihood, likelihoods.Gaussian) else x.argmax(-1)
    if isinstance(likelihood, likelihoods.Bernoulli):
        t = (x[:, :outputs] > 0).double()
    bayes = vi.variationalize(
        network(outputs), likelihood, family or vi.MatrixNormal(), vi.priors.NormalPrior(1.0), select=select
    )
    if select == "2.*":
        bayes.fit_head([(x, t)], progress=False)
    else:
        bayes.model.num_data = 40
        bayes.fit([(x, t)], epochs=2, progress=False)
    return bayes


POOL = torch.randn(60, 3, generator=torch.Generator().manual_seed(2), dtype=F64)


def test_input_by_input_the_largest_scores_come_first():
    bayes = fitted(likelihoods.Categorical())
    pred = bayes.predict(POOL)
    assert bayes.acquire(POOL, 5).tolist() == pred.mutual_information.topk(5).indices.tolist()
    assert bayes.acquire(POOL, 5, by="variance").tolist() == pred.epistemic.sum(1).topk(5).indices.tolist()
    loader = DataLoader(TensorDataset(POOL, torch.zeros(60, dtype=torch.long)), batch_size=7)
    assert bayes.acquire(loader, 5).tolist() == bayes.acquire(POOL, 5).tolist()
    numbers = fitted(likelihoods.Gaussian(noise=0.5))
    pred = numbers.predict(POOL)
    assert numbers.acquire(POOL, 5).tolist() == (pred.epistemic / 0.25).log1p().sum(1).topk(5).indices.tolist()


def test_a_batch_of_gaussian_noise_reduces_the_variance_of_the_pool_most():
    bayes = fitted(likelihoods.Gaussian(noise=0.5), outputs=2)
    with torch.no_grad():
        phi = torch.cat([bayes.net[:-1](POOL), POOL.new_ones(60, 1)], -1)
        J = torch.zeros(60, 2, 14, dtype=F64)
        for c in (0, 1):
            J[:, c, 6 * c : 6 * c + 6], J[:, c, 12 + c] = phi[:, :6], 1.0
        J = J.flatten(0, 1)
        K = J @ bayes.family().covariance() @ J.mT / 0.25

    def reduced(rows):
        where = torch.tensor([2 * r + c for r in rows for c in (0, 1)])
        inner = torch.linalg.inv(torch.eye(len(where), dtype=F64) + K[where][:, where])
        return (K[:, where] @ inner @ K[where]).trace()

    chosen = []
    for _ in range(6):
        rest = [i for i in range(60) if i not in chosen]
        chosen.append(max(rest, key=lambda i: reduced([*chosen, i])))
    for draws in (None, 4000):  # what is missing is the noise of the draws
        assert reduced(bayes.acquire(POOL, 6, by="batch", draws=draws).tolist()) > 0.98 * reduced(chosen)
    assert reduced(bayes.acquire(POOL, 6).tolist()) < reduced(chosen)


@pytest.mark.parametrize("likelihood", [likelihoods.Categorical(), likelihoods.Bernoulli()], ids=["classes", "binary"])
def test_a_batch_is_more_diverse_than_the_best_inputs(likelihood):
    bayes = fitted(likelihood)
    best = bayes.acquire(POOL, 1)
    pool = torch.cat([POOL, POOL[best].repeat(8, 1)])
    assert len(pool[bayes.acquire(pool, 8)].unique(dim=0)) == 1
    assert len(pool[bayes.acquire(pool, 8, by="batch")].unique(dim=0)) > 3
