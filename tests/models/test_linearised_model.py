"""A posterior of the linearised network: in fits, predictions, files and programs, against truth where there is one."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

FAMILIES = [
    vi.MAP(),
    vi.MeanField(),
    vi.LowRankNormal(2),
    vi.LowRankPrecision(2),
    vi.FullNormal(),
    vi.Mixture(vi.MeanField(), 2),
    vi.PerLayer({"0.*": vi.MAP(), "*": vi.MeanField()}),
    vi.MCDropout(0.9),
]


def names(family):
    return type(family).__name__


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def data(n=40, outputs=2, dtype=torch.float64):
    x = torch.randn(n, 3, generator=seeded(1), dtype=dtype)
    return x, (x[:, 0] > 0).long() if outputs > 1 else x[:, :1].sin()


def loader(pair, size=10):
    return DataLoader(TensorDataset(*pair), batch_size=size, shuffle=True)


def network(outputs=2, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype)


@pytest.mark.parametrize("family", FAMILIES, ids=names)
def test_of_a_network_that_is_linear_it_is_the_network(family):
    """Fits, ELBOs and predictions to 1e-6 in float64: the same numbers by another way."""
    if isinstance(family, vi.PerLayer):
        family = vi.PerLayer({"weight": vi.MAP(), "*": vi.MeanField()})
    found = []
    for linearise in (False, True):
        torch.manual_seed(3)
        net = nn.Linear(3, 2).double()
        bayes = vi.variationalize(
            net,
            vi.likelihoods.Categorical(),
            family,
            vi.priors.NormalPrior(1.0),
            linearise=linearise,
            generator=seeded(),
        )
        result = bayes.fit(
            loader(data()), steps=10, estimator=vi.Estimator(coupling=vi.couplings.unscented), progress=False
        )
        prediction = bayes.predict(data()[0], 64, generator=seeded())
        found.append((result.elbo.value, prediction.mean, torch.cat([p.flatten() for p in bayes.family.parameters()])))
    (elbo, prediction, state), (elbo2, prediction2, state2) = found
    assert elbo2 == pytest.approx(elbo, abs=1e-6)
    assert torch.allclose(prediction, prediction2, rtol=0, atol=1e-6)
    assert torch.allclose(state, state2, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", [FAMILIES[3], *FAMILIES[5:7]], ids=names)
def test_fitted_saved_loaded_and_resumed(family, tmp_path):
    pair, net = data(dtype=torch.float32), network(dtype=torch.float32)

    def begun():
        return vi.variationalize(
            net, vi.likelihoods.Categorical(), family, vi.priors.NormalPrior(1.0), linearise=True, generator=seeded()
        )

    bayes = begun()
    whole = bayes.fit(loader(pair), steps=12, progress=False)
    assert whole.elbo.value > -1e4
    stopped = begun()

    def stop(history):
        if len(history) == 5:
            raise KeyboardInterrupt

    stopped.fit(loader(pair), steps=12, checkpoint=vi.Checkpoint(tmp_path / "fit"), callback=stop, progress=False)
    again = begun()
    again.fit(loader(pair), steps=12, checkpoint=vi.Checkpoint(tmp_path / "fit", resume=True), progress=False)
    for one, two in zip(bayes.family.parameters(), again.family.parameters(), strict=True):
        assert torch.equal(one, two)
    bayes.save(tmp_path / "posterior.safetensors")
    other = network(dtype=torch.float32)
    with torch.no_grad():
        other[0].weight.zero_()
    loaded = vi.load(tmp_path / "posterior.safetensors", other)
    x = pair[0]
    assert torch.equal(loaded.predict(x, generator=seeded()).mean, bayes.predict(x, generator=seeded()).mean)
    assert bayes.evaluate(loader(pair), generator=seeded()).nlpd > 0
