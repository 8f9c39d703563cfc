"""Fresh values again and again from one copy of a network: each as if the copy were new."""

import torch
from torch import nn

import structvi as vi
from structvi.util.initialisers import Initialisers


class Growing(nn.Module):
    """Initialisers that go by the values there, and one that puts a new tensor in the place of the old."""

    def __init__(self):
        super().__init__()
        self.doubled = nn.Parameter(torch.ones(2))
        self.replaced = nn.Parameter(torch.zeros(2))
        self.alone = nn.Parameter(torch.full((2,), 3.0))

    def reset_parameters(self):
        self.doubled.mul_(2)
        self.replaced = nn.Parameter(torch.randn(2))


def test_each_call_starts_from_the_networks_values():
    net = Growing()
    initialise = Initialisers(net)
    torch.manual_seed(1)
    first, second = ({name: t.clone() for name, t in initialise().items()} for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(first["replaced"], torch.randn(2))
    assert torch.equal(second["replaced"], torch.randn(2))
    for draw in (first, second):
        assert draw["doubled"].tolist() == [2, 2]
        assert draw["alone"].tolist() == [3, 3]
    assert net.doubled.tolist() == [1, 1]
    assert net.replaced.tolist() == [0, 0]


def test_a_model_that_initialises_its_parts():
    class Model(nn.Sequential):
        def _init_weights(self, part):
            if isinstance(part, nn.Linear):
                nn.init.constant_(part.weight, 7.0)

    fresh = Initialisers(Model(nn.Linear(2, 2), nn.Linear(2, 1)))()
    assert all((fresh[name] == 7).all() for name in ("0.weight", "1.weight"))
    assert not (fresh["0.bias"] == 7).any()


def test_a_reset_with_arguments_is_left_to_its_layer():
    """`variationalize` asks for the initialisation scale of every tensor, and only the layer knows what gain is meant."""

    class Gained(nn.Linear):
        def reset_parameters(self, gain=None):
            super().reset_parameters()

        def _reset_parameters(self, gain):
            nn.init.xavier_uniform_(self.weight, gain)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((3, 2), 0.5))

        def reset_parameters(self, gain):
            nn.init.constant_(self.weight, gain)

        def forward(self, x):
            return x @ self.weight

    fresh = Initialisers(nn.Sequential(Gained(3, 3), Scaled()))()
    assert (fresh["1.weight"] == 0.5).all()
    bayes = vi.variationalize(nn.Sequential(nn.Linear(2, 3), Scaled()), vi.likelihoods.Gaussian(1.0), num_data=4)
    assert bayes.space.scales[2] == 0.5
