"""Held-out data in a fit of many steps: watched, chosen by, and never fitted to."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(160, 3, generator=GENERATOR)
T = (X[:, 0] + 0.5 * torch.randn(160, generator=GENERATOR) > 0).long()


def loader(start=0, stop=80, size=20, shuffle=False):
    return DataLoader(TensorDataset(X[start:stop], T[start:stop]), batch_size=size, shuffle=shuffle)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 2))


def test_held_out_density_is_in_the_history_once_an_epoch():
    bayes = vi.variationalize(network(), vi.likelihoods.Categorical(), vi.MeanField())
    result = bayes.fit(loader(), epochs=6, validation=loader(80, 160), schedule=vi.Schedule(stop=False), progress=False)
    column = result.history["held_out"]
    assert column.isfinite().nonzero().squeeze(-1).tolist() == [3, 7, 11, 15, 19]  # the sixth is measured at the end
    assert result.held_out.keys() == result.candidates.keys()


def test_the_fit_is_the_same_with_and_without_held_out_data():
    """Last step and average are what they are; which is kept may differ."""
    found = []
    for validation in (None, loader(80, 160)):
        bayes = vi.variationalize(network(), vi.likelihoods.Categorical(), vi.MeanField(), generator=GENERATOR)
        result = bayes.fit(loader(), epochs=5, validation=validation, progress=False)
        found.append((result.history["elbo"], bayes.family.mean.detach().clone()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Augmented(torch.utils.data.Dataset):
    """Rows with noise that is new in every reading, if `noise` is above zero."""

    def __init__(self, noise):
        self.noise = noise

    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = torch.linspace(-1.0, 1.0, 40)[index].reshape(1)
        return x + self.noise * torch.randn(1), torch.sin(x)


@pytest.mark.parametrize(("noise", "said"), [(0.1, True), (0.0, False)])
def test_random_augmentation_of_held_out_rows_is_noted(noise, said):
    bayes = vi.variationalize(nn.Linear(1, 1), vi.likelihoods.Gaussian("point"))
    train, held_out = (DataLoader(Augmented(each), batch_size=20) for each in (0.1, noise))
    result = bayes.laplace(train, validation=held_out, progress=False)
    assert any("the held-out rows differ between two readings" in note for note in result.notes) == said
