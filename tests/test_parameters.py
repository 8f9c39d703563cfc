"""Parameters: selection, views, initialisation scales and fresh draws."""

from math import sqrt

import pytest
import torch
from torch import nn

from structvi import Parameters
from structvi.parameters import FREE_SCALE_FLOOR, SCALE_FLOOR


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


class Tied(nn.Module):
    """A language model's habit: the output layer's weight is the embedding's."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Embedding(5, 3)
        self.decode = nn.Linear(3, 5)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(self.encode(x))


class TestSelection:
    @pytest.mark.parametrize(
        ("select", "exclude", "names"),
        [
            ("*", (), ("0.weight", "0.bias", "2.weight", "2.bias")),
            ("2.*", (), ("2.weight", "2.bias")),
            ("?.weight", (), ("0.weight", "2.weight")),
            (["2.bias", "0.*"], (), ("0.weight", "0.bias", "2.bias")),  # in the network's order
            ("*", "*.bias", ("0.weight", "2.weight")),
            ("*", ["0.*", "2.bias"], ("2.weight",)),
            ("0.*", "*.bias", ("0.weight",)),
            (lambda name, tensor: tensor.ndim == 2, (), ("0.weight", "2.weight")),
            (lambda name, tensor: name.startswith("2"), lambda name, tensor: tensor.ndim == 1, ("2.weight",)),
        ],
    )
    def test_by_pattern_and_by_predicate(self, select, exclude, names):
        assert Parameters.of(mlp(), select, exclude).names == names

    @pytest.mark.parametrize("pattern", ["encode.weight", "decode.weight", "*"])
    def test_tied_tensors_are_taken_once_by_any_of_their_names(self, pattern):
        space = Parameters.of(Tied(), pattern)
        assert [name for name in space.names if "weight" in name] == ["encode.weight"]


class TestViews:
    space = Parameters({"a": torch.zeros(2, 3), "s": torch.zeros(()), "b": torch.zeros(4)})

    @pytest.mark.parametrize("leading", [(), (5,), (2, 5)])
    def test_unravel_gives_views_and_ravel_inverts(self, leading):
        theta = torch.randn(*leading, self.space.size)
        named = self.space.unravel(theta)
        assert {name: t.shape for name, t in named.items()} == {
            "a": (*leading, 2, 3),
            "s": leading,
            "b": (*leading, 4),
        }
        assert torch.equal(self.space.ravel(named), theta)
        for name, tensor in named.items():
            assert tensor.untyped_storage().data_ptr() == theta.untyped_storage().data_ptr()
            tensor.fill_(7.0)  # written through
            assert bool((theta[..., self.space.slice(name)] == 7.0).all())
        assert bool((theta == 7.0).all())

    def test_subset_without_and_join(self):
        small = self.space.without(["s"])
        assert small.names == ("a", "b")
        assert small is self.space.subset(["b", "a"])
        theta = torch.randn(3, small.size)
        shared = torch.tensor(5.0, requires_grad=True)
        whole = self.space.join(theta, {"s": shared})
        assert bool((whole[:, 6] == 5.0).all())
        assert torch.equal(whole[:, torch.arange(11) != 6], theta)
        assert torch.autograd.grad(whole.sum(), shared)[0].item() == 3.0


class Transformer(nn.Module):
    """The habit of a model hub: the root initialises each part."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(40, 50)
        self.norm = nn.LayerNorm(50)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


class NoInitialiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([3.0, -4.0]))
        self.shift = nn.Parameter(torch.zeros(2))


#: network → name → root mean square of its initialisation. torch's layers draw U(±1/√fan_in), whose rms is
#: 1/√(3 fan_in); an LSTM's fan is its hidden size; attention's joint projection is Xavier's: √(2/(fan_in + fan_out)).
SCALES = {
    "Linear": (lambda: nn.Linear(50, 64), {"weight": 1 / sqrt(150), "bias": 1 / sqrt(150)}),
    "wide Linear": (lambda: nn.Linear(5000, 32), {"weight": 1 / sqrt(15000), "bias": 1 / sqrt(15000)}),
    "Conv2d": (lambda: nn.Conv2d(3, 32, 5), {"weight": 1 / sqrt(225), "bias": 1 / sqrt(225)}),
    "Embedding": (lambda: nn.Embedding(100, 16), {"weight": 1.0}),
    "LSTM": (
        lambda: nn.LSTM(5, 16),
        {name + "_l0": 1 / sqrt(48) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")},
    ),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(32, 4),
        {
            "in_proj_weight": sqrt(2 / (32 + 96)),
            "in_proj_bias": SCALE_FLOOR,
            "out_proj.weight": 1 / sqrt(96),
            "out_proj.bias": SCALE_FLOOR,
        },
    ),
    "LayerNorm": (lambda: nn.LayerNorm(32), {"weight": 1.0, "bias": SCALE_FLOOR}),
    "BatchNorm": (lambda: nn.BatchNorm1d(32), {"weight": 1.0, "bias": SCALE_FLOOR}),
    "_init_weights(module)": (
        Transformer,
        {"linear.weight": 0.02, "linear.bias": SCALE_FLOOR, "norm.weight": 1.0, "norm.bias": SCALE_FLOOR},
    ),
    "no initialiser": (NoInitialiser, {"gain": sqrt(12.5), "shift": SCALE_FLOOR}),
}


class TestScales:
    @pytest.mark.parametrize("layer", SCALES)
    def test_root_mean_square_of_the_layers_own_initialisation(self, layer):
        make, expected = SCALES[layer]
        net = make()
        if layer != "no initialiser":
            with torch.no_grad():
                for p in net.parameters():
                    p.fill_(100.0)  # training has moved the weights: their values must not count
        space = Parameters.of(net)
        assert set(space.names) == set(expected)
        for name, scale in zip(space.names, space.scales.tolist(), strict=True):
            # at least 1024 numbers are drawn for each; the rms of n normal numbers has relative error 0.71/√n
            assert scale == pytest.approx(expected[name], rel=5 * 0.71 / sqrt(1024)), name
            if expected[name] in (SCALE_FLOOR, 1.0) and layer != "Embedding":  # constants are exact
                assert scale == pytest.approx(expected[name], rel=1e-6)

    def test_without_a_network(self):
        space = Parameters({"z": torch.zeros(3), "w": torch.full((2,), -10.0)})
        assert space.scales.tolist() == [FREE_SCALE_FLOOR, 10.0]
        assert space.scale.tolist() == [FREE_SCALE_FLOOR] * 3 + [10.0] * 2


class TestFresh:
    def test_of_a_seed(self):
        space = Parameters.of(mlp())
        state = torch.get_rng_state()
        a, b, c = (space.fresh(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
        assert torch.equal(a, b)
        assert bool((a != c).all())
        assert torch.equal(torch.get_rng_state(), state)

    def test_the_network_is_left_as_it_was(self):
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        net(torch.randn(8, 3))  # running statistics off their initial values
        before = {name: t.clone() for name, t in net.state_dict().items()}
        Parameters.of(net).fresh(torch.Generator().manual_seed(1))
        assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
