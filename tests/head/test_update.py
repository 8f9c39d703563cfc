"""`update`: conjugate truth however the rows are cut, added and removed; labels near a fit to all rows."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi import likelihoods
from tests.head.test_layer_data import F64, classes, moments, network, regression

PRIOR = vi.priors.NormalPrior({"*weight": 2.0, "*bias": 0.7})


def over_head(likelihood, outputs=3, dtype=F64):
    return vi.variationalize(network(outputs, dtype=dtype), likelihood, vi.MatrixNormal(), PRIOR, select="2.*")


@pytest.mark.parametrize("cuts", [[20, 50], [1, 2, 3, 50], [49, 50]], ids=str)
def test_rows_of_gaussian_noise_are_added_and_removed_exactly(cuts):
    x, t = regression()
    whole, bayes = (over_head(likelihoods.Gaussian(noise=0.5)) for _ in (0, 1))
    whole.fit_head([(x, t)], progress=False)
    bayes.fit_head([(x[: cuts[0]], t[: cuts[0]])], progress=False)
    first = moments(bayes)
    for start, stop in pairwise(cuts):
        bayes.update((x[start:stop], t[start:stop]))
    torch.testing.assert_close(moments(bayes), moments(whole), rtol=1e-9, atol=1e-9)
    assert bayes.model.num_data == 50
    bayes.update((x[cuts[0] :], t[cuts[0] :]), remove=True)
    torch.testing.assert_close(moments(bayes), first, rtol=1e-9, atol=1e-9)
    assert bayes.model.num_data == cuts[0]


@pytest.mark.parametrize("likelihood", [likelihoods.Categorical(), likelihoods.Bernoulli()], ids=["classes", "binary"])
def test_labels_move_towards_a_fit_to_all_rows(likelihood):
    x, t = classes(rows=400)
    t = t if isinstance(likelihood, likelihoods.Categorical) else nn.functional.one_hot(t, 4).double()
    whole, bayes = (over_head(likelihood, 4) for _ in (0, 1))
    whole.fit_head([(x, t)], progress=False)
    bayes.fit_head([(x[:300], t[:300])], progress=False)
    (mean, covariance), (wanted, wide) = moments(bayes), moments(whole)

    def distance():
        return ((moments(bayes)[0] - wanted) / wide.diagonal().sqrt()).square().mean().sqrt()

    before = distance()
    for batch in DataLoader(TensorDataset(x[300:], t[300:]), batch_size=25):
        bayes.update(batch)
    assert distance() < 0.5 * before
    ratio = (moments(bayes)[1].diagonal() / wide.diagonal()).log()
    assert ratio.abs().max() < (covariance.diagonal() / wide.diagonal()).log().abs().max()
    for batch in DataLoader(TensorDataset(x[300:], t[300:]), batch_size=25):
        bayes.update(batch, remove=True)
    assert ((moments(bayes)[0] - mean) / covariance.diagonal().sqrt()).abs().max() < 0.5


def test_what_cannot_be_updated_is_refused_and_left():
    x, t = regression()
    bayes = over_head(likelihoods.Gaussian(noise=0.5))
    with pytest.raises(ValueError, match=r"call bayes\.fit_head"):
        bayes.update((x, t))
    bayes.fit_head([(x, t)], progress=False)
    before = moments(bayes)
    with pytest.raises(ValueError, match="remove only rows that were fitted"):
        bayes.update((100 * x[:40], t[:40]), remove=True)
    with pytest.raises(ValueError, match="of 50 observations: 50 of them"):
        bayes.update((x, t), remove=True)
    other = vi.variationalize(network(3), likelihoods.Gaussian(noise=0.5), vi.MeanField(), select="2.*")
    other.fit_status = vi.Status.CONVERGED
    with pytest.raises(ValueError, match="update is for a posterior that fit_head made"):
        other.update((x, t))
    torch.testing.assert_close(moments(bayes), before)
    assert bayes.model.num_data == 50
