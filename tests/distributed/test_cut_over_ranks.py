"""The posterior does not depend on how the data are cut over processes either: against the conjugate truth."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.distributed.launching import launch
from tests.train.test_cut_into_batches import (
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
EPOCHS = ["sequential", "accumulated", "one's own", "torch's own", "torch's own, accumulated"]


def fits_of_a_rank(rank, size):
    whole = Rows(X, T)

    def loader(**options):
        return DataLoader(whole, collate_fn=as_they_are, **options)

    cases = {
        "shuffled": (loader(batch_size=167, shuffle=True), {}),
        "unequal": (loader(batch_size=200, sampler=OwnSampler(PARTS[rank])), {}),
    }
    out = {}
    for name, (data, options) in cases.items():
        bayes = posterior()
        steps = 500 if name == "shuffled" else 5  # of the other N alone is looked at
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


@pytest.mark.slow
def test_two_processes_find_what_one_does():
    """One test, for its processes are started once: workers of pytest would share out several, and start them again."""
    ranks = launch(fits_of_a_rank, 2, 2)
    for out in ranks:
        state, N, _ = out["shuffled"]
        assert N == 1000
        bayes = posterior()
        bayes.family.load_state_dict(state)
        assert_true(bayes, X, T)
        for name in EPOCHS:
            assert_same_gradient(out[name], 1000)
    assert all(torch.equal(value, ranks[1]["shuffled"][0][key]) for key, value in ranks[0]["shuffled"][0].items())
    # ranks whose samplers overlap: each observation that one of them can give counts once in N
    assert [out["unequal"][1] for out in ranks] == [900, 900]
