"""`bayes.summary()`."""

import pytest
import torch
from torch import nn

import structvi as vi


@pytest.mark.parametrize(
    "family",
    [vi.MAP(), vi.MeanField(), vi.LowRankNormal(rank=2), vi.FullNormal(), vi.Mixture(vi.MeanField(), components=2)],
)
def test_every_family_has_one(family):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    bayes = vi.variationalize(net, vi.likelihoods.Gaussian(1.0), family, num_data=10, select="2.*")
    text = bayes.summary()
    assert f"{type(family).__name__} over 5 numbers, likelihood Gaussian, N = 10" in text
    assert "2.weight" in text
    assert "held at the network's values: 2 tensors (0.weight, 0.bias)" in text
    assert "not fitted in this session" in text


def test_the_numbers_are_those_of_the_density():
    bayes = vi.variationalize(nn.Linear(2, 1), vi.likelihoods.Gaussian(1.0), vi.MeanField(), num_data=10)
    with torch.no_grad():
        bayes.family.mean.copy_(torch.tensor([3.0, 4.0, 0.1]))
        bayes.family.log_scale.copy_(torch.tensor([0.5, 4.0, 0.25]).log())
    rows = {line.split()[0]: line for line in bayes.summary().splitlines()}
    assert rows["weight"].split()[-4:-2] == ["3.54", "0.5"]  # the lower median of 0.5 and 4
    assert rows["weight"].endswith("50 %")  # 3 of 0.5 is clear, 4 of 4 is not
    assert rows["bias"].split()[-4:-2] == ["0.1", "0.25"]
    data = [(torch.zeros(4, 2), torch.zeros(4, 1))]
    bayes.fit(data, steps=2, progress=False)
    assert f"last fit: {bayes.last_fit.verdict}" in bayes.summary()
