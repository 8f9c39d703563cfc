"""The posterior does not depend on how the data are cut over processes either: against the conjugate truth."""

import pytest
import torch
from launching import launch
from torch.utils.data import DataLoader, DistributedSampler

from tests.training.test_cut_into_batches import (
    OwnSampler,
    Rows,
    T,
    X,
    as_they_are,
    assert_same_gradient,
    assert_true,
    epoch_gradient,
    posterior,
)

#: of rank 0 and of rank 1: more and fewer, some in common, 900 of 1000 in all
PARTS = [list(range(600)), list(range(500, 900))]
CASES = ["shuffled", "draws"]


def fits_of_a_rank(rank, size):
    whole = Rows(X, T)

    def loader(**options):
        return DataLoader(whole, collate_fn=as_they_are, **options)

    cases = {
        "shuffled": (loader(batch_size=167, shuffle=True), {}),
        "draws": (loader(batch_size=333), {"parallel": "draws"}),
        "unequal": (loader(batch_size=200, sampler=OwnSampler(PARTS[rank])), {}),
    }
    out = {}
    for name, (data, options) in cases.items():
        bayes = posterior()
        steps = 500 if name in CASES else 5  # of the other N alone is looked at
        result = bayes.fit(data, steps=steps, lr=0.08, progress=False, seed=1, **options)
        out[name] = bayes.family.state_dict(), bayes.model.num_data, result.elbo.value
    own = DistributedSampler(whole, size, rank, shuffle=False)
    epochs = {
        "one's own": (loader(batch_size=130, sampler=OwnSampler(range(rank, 1000, 2))), 1),
        "sequential": (loader(batch_size=167), 1),
        "accumulated": (loader(batch_size=150), 2),
        "torch's own": (loader(batch_size=150, sampler=own), 1),
        "torch's own, accumulated": (loader(batch_size=150, sampler=own), 3),
    }
    for name, (data, accumulate) in epochs.items():
        batches = -(-500 // data.batch_size)
        out[name] = epoch_gradient(data, 1000, -(-batches // accumulate), accumulate)
    return out


@pytest.fixture(scope="module")
def ranks():
    return launch(fits_of_a_rank, 2, 2)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_find_the_conjugate_posterior(ranks, name):
    for out in ranks:
        state, N, _ = out[name]
        assert N == 1000
        bayes = posterior()
        bayes.family.load_state_dict(state)
        assert_true(bayes, X, T)
    assert all(torch.equal(ranks[0][name][0][key], ranks[1][name][0][key]) for key in ranks[0][name][0])


@pytest.mark.parametrize("name", ["sequential", "accumulated", "one's own", "torch's own", "torch's own, accumulated"])
def test_the_gradient_of_an_epoch_over_two_processes(ranks, name):
    for out in ranks:
        assert_same_gradient(out[name], 1000)


def test_N_is_that_of_all_ranks_together(ranks):
    """Ranks whose samplers overlap: each observation that one of them can give counts once in N."""
    assert [out["unequal"][1] for out in ranks] == [900, 900]
