"""Padding rows of embeddings: never drawn, whichever way a network is called."""

import pytest
import torch
from torch import nn

import structvi as vi
from structvi.networks.call import padding_rows

PADDING = torch.zeros(2, 3, dtype=torch.long)
WORDS = torch.tensor([[1, 2, 0], [3, 0, 0]])


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(5, 4, padding_idx=0), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.words(x).sum(1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(5, 4, padding_idx=0), nn.Linear(4, 5, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.words(x).sum(1))


def posterior(**options):
    torch.manual_seed(0)
    return vi.variationalize(Sum(), vi.likelihoods.Categorical(), vi.MeanField(), num_data=10, **options)


@pytest.mark.parametrize("linearise", [False, True])
@pytest.mark.parametrize("evaluation", ["vmap", "loop"])
def test_draws_change_words_and_not_padding(linearise, evaluation):
    bayes = posterior(linearise=linearise, evaluation=evaluation)
    with torch.no_grad():
        for name in ("head.weight", "head.bias"):
            bayes.family.log_scale[bayes.space.slice(name)] = -30.0  # what is left to vary are the embeddings
    assert (bayes.predict(WORDS, draws=8).outputs.var(0) > 1e-4).all()
    assert (bayes.predict(PADDING, draws=8).outputs.var(0) < 1e-12).all()


@pytest.mark.parametrize("network", ["store", "hash"])
def test_a_file_has_the_networks_row(network, tmp_path):
    bayes = posterior()
    with torch.no_grad():
        bayes.net.words.weight[0] = 0.7
    bayes.save(tmp_path / "words.safetensors", network=network)
    other = Sum()
    if network == "hash":
        with pytest.raises(ValueError, match=r"other values"):
            vi.load(tmp_path / "words.safetensors", other)
        other.load_state_dict(bayes.net.state_dict())
    again = vi.load(tmp_path / "words.safetensors", other)
    assert torch.equal(other.words.weight[0], torch.full((4,), 0.7))
    seeds = [torch.Generator().manual_seed(0) for _ in range(2)]
    means = [one.predict(WORDS, draws=4, generator=seed).mean for one, seed in zip((bayes, again), seeds, strict=True)]
    assert torch.equal(*means)


def test_a_row_that_an_output_layer_shares_is_a_weight():
    assert padding_rows(Sum(), ["words.weight"]) == {"words.weight": 0}
    assert padding_rows(Tied(), ["words.weight"]) == {}
    assert padding_rows(Sum(), ["head.weight"]) == {}
