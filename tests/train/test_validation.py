"""Held-out data in a fit of many steps: watched, chosen by, and never fitted to."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.train.validation import MARGIN, NETWORK, split_off

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(160, 3, generator=GENERATOR)
T = (X[:, 0] + 0.5 * torch.randn(160, generator=GENERATOR) > 0).long()


def loader(start=0, stop=80, size=20, shuffle=False):
    return DataLoader(TensorDataset(X[start:stop], T[start:stop]), batch_size=size, shuffle=shuffle)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 2))


def trained(steps=200):
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(X[:80]), T[:80]).backward()
        optimizer.step()
    return net


def test_held_out_density_is_in_the_history_once_an_epoch():
    bayes = vi.variationalize(network(), vi.likelihoods.Categorical(), vi.MeanField())
    result = bayes.fit(loader(), epochs=6, validation=loader(80, 160), stop=False, progress=False)
    column = result.history["held_out"]
    assert column.isfinite().nonzero().squeeze(-1).tolist() == [3, 7, 11, 15, 19]  # the sixth is measured at the end
    assert result.held_out.keys() == result.candidates.keys()
    assert result.network is None  # nothing was trained before


def test_the_fit_is_the_same_with_and_without_held_out_data():
    """Last step and average are what they are; which is kept may differ."""
    found = []
    for validation in (None, loader(80, 160)):
        bayes = vi.variationalize(network(), vi.likelihoods.Categorical(), vi.MeanField(), generator=GENERATOR)
        result = bayes.fit(loader(), epochs=5, validation=validation, progress=False, average=False)
        found.append((result.history["elbo"], bayes.family.mean.detach().clone()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_is_kept_is_not_worse_than_the_network():
    net = trained()
    bayes = vi.variationalize(net, vi.likelihoods.Categorical(), vi.MeanField(), vi.priors.NormalPrior(1.0))
    result = bayes.fit(loader(), epochs=10, start="trained", validation=loader(80, 160), progress=False)
    assert {"last step", "the start"} <= result.held_out.keys()
    assert result.against_network[0] >= -MARGIN - 0.001
    assert result.held_out[result.kept] >= max(result.held_out.values()) - MARGIN
    kept = bayes.evaluate(loader(80, 160), draws=400).nlpd
    assert -kept == pytest.approx(result.held_out[result.kept], abs=0.02)


def test_the_network_is_kept_where_the_fit_is_worse():
    """A prior so wide that nothing is sure any more, at the start and after two epochs."""
    net = trained()
    x = X[80:]
    sure = DataLoader(TensorDataset(x, net(x).argmax(1)), batch_size=40)  # labels that the network is sure about
    bayes = vi.variationalize(
        net, vi.likelihoods.Categorical(), vi.MeanField(), vi.priors.NormalPrior(30.0), linearise=True
    )
    result = bayes.fit(loader(), epochs=2, start="trained", validation=sure, progress=False)
    assert max(result.held_out[name] for name in ("last step", "the start")) < result.network - MARGIN
    assert result.kept == NETWORK
    assert "prefer the network" in result.details
    assert torch.allclose(bayes.predict(x, 16).mean, net(x).softmax(-1), atol=0.02)


def test_keep_the_best():
    bayes = vi.variationalize(trained(), vi.likelihoods.Categorical(), vi.MeanField(), vi.priors.NormalPrior(1.0))
    result = bayes.fit(loader(), epochs=5, start="trained", validation=loader(80, 160), keep="best", progress=False)
    assert result.held_out[result.kept] == max(result.held_out.values())


def test_a_fraction_is_held_out_of_the_data_set():
    bayes = vi.variationalize(network(), vi.likelihoods.Categorical(), vi.MeanField())
    result = bayes.fit(loader(shuffle=True), epochs=2, validation=0.25, progress=False)
    assert bayes.model.num_data == 60
    assert result.held_out


def test_groups_stay_on_one_side():
    groups = [i // 8 for i in range(80)]  # ten patients of eight images
    rest, held_out = split_off(loader(), 0.3, groups, seed=0)
    sides = [{groups[i] for i in side.dataset.indices} for side in (rest, held_out)]
    assert len(sides[0]) == 7
    assert len(sides[1]) == 3
    assert not sides[0] & sides[1]
    again, _ = split_off(loader(), 0.3, groups, seed=0)
    assert again.dataset.indices == rest.dataset.indices


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 1, "validation": 1.5}, r"inside \(0, 1\)"),
        ({"epochs": 1, "validation": 0.2, "start": "trained"}, "has seen these"),
        ({"validation": 0.2}, "has seen these"),
        ({"epochs": 1, "validation": 0.2, "validation_groups": [1, 2]}, "for each of the 80 items, got 2"),
        ({"epochs": 1, "validation": 0.999}, "leaves nothing to fit to"),
        ({"epochs": 1, "validation_groups": [1]}, "for validation= as a fraction"),
        ({"epochs": 1, "keep": "all"}, "keep must be one of"),
    ],
)
def test_bad_input_is_named(options, words):
    bayes = vi.variationalize(network(), vi.likelihoods.Categorical(), vi.MeanField())
    with pytest.raises(ValueError, match=words):
        bayes.fit(loader(), progress=False, **options)


def test_a_fraction_of_a_list_is_refused():
    bayes = vi.variationalize(network(), vi.likelihoods.Categorical(), vi.MeanField())
    with pytest.raises(ValueError, match="split the data yourself"):
        bayes.fit(list(loader()), epochs=1, validation=0.2, progress=False)


def test_a_killed_fit_goes_on_with_its_held_out_data(tmp_path):
    def begun():
        return vi.variationalize(
            network(), vi.likelihoods.Categorical(), vi.MeanField(), generator=torch.Generator().manual_seed(0)
        )

    whole = begun().fit(loader(), epochs=4, validation=loader(80, 160), progress=False)

    def stop(history):
        if len(history) == 6:
            raise KeyboardInterrupt

    options = {"epochs": 4, "validation": loader(80, 160), "progress": False}
    begun().fit(loader(), checkpoint=tmp_path, callback=stop, **options)
    again = begun().fit(loader(), resume=tmp_path, **options)
    assert again.held_out == whole.held_out
    assert torch.equal(again.history["held_out"].nan_to_num(0), whole.history["held_out"].nan_to_num(0))


def test_data_that_are_fitted_are_no_held_out_data():
    x = torch.randn(20, 2)
    data = TensorDataset(x, x[:, :1])
    train, again = DataLoader(data, batch_size=10, shuffle=True), DataLoader(data, batch_size=5)
    bayes = vi.variationalize(nn.Linear(2, 1), vi.likelihoods.Gaussian(1.0), vi.MeanField())
    for seen in (train, again):
        with pytest.warns(UserWarning, match="are the data that are fitted"):
            bayes.fit(train, steps=2, validation=seen, progress=False)
    halves = (torch.utils.data.SubsetRandomSampler(range(*ends)) for ends in ((0, 10), (10, 20)))
    fitted, held_out = (DataLoader(data, batch_size=5, sampler=half) for half in halves)
    bayes.fit(fitted, steps=2, validation=held_out, progress=False)  # no warning, which would be an error
