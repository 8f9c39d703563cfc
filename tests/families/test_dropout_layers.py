"""MC dropout the practitioner's way: a network's own dropout layers as masks on weights, with the same law."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d

import structvi as vi
from structvi.families.mc_dropout import dropped_layers


def mlp():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Dropout(0.2), nn.Linear(2, 3), nn.Sequential(nn.Tanh(), nn.Dropout(0.5)), nn.Linear(3, 1))
    return net.double()


def enumerated(net, x):
    """Every output of the network in train mode and its probability, written out with torch's 1/(1 − p)."""
    first, second = net[1], net[3]
    outputs, probabilities = [], []
    for masks in product([0.0, 1.0], repeat=5):
        z = torch.tensor(masks, dtype=torch.float64)
        hidden = torch.tanh(first.weight @ (x * z[:2] / 0.8) + first.bias)
        outputs.append((second.weight @ (hidden * z[2:] / 0.5) + second.bias).squeeze())
        probabilities.append((0.2 + 0.6 * z[:2]).prod() * 0.5**3)
    return torch.stack(outputs).detach(), torch.stack(probabilities)


def as_law(outputs, probabilities):
    """{output: probability}, outputs to 10 digits: masks of a dropped unit may coincide."""
    law = {}
    for output, probability in zip(outputs.reshape(-1).tolist(), probabilities.tolist(), strict=True):
        key = round(output, 10)
        law[key] = law.get(key, 0.0) + probability
    return law


def of_posterior(net, x):
    posterior = vi.variationalize(net, vi.likelihoods.Gaussian(1.0), vi.MCDropout.from_network(net), num_data=1)
    theta, probabilities = posterior.family().support()
    with torch.no_grad(), posterior.network_mode():
        return posterior.model.outputs(theta, x.unsqueeze(0)), probabilities, posterior


def test_the_law_of_the_output_is_that_of_the_network_in_train_mode():
    net, x = mlp(), torch.tensor([0.7, -1.3], dtype=torch.float64)
    outputs, probabilities, _ = of_posterior(net, x)
    got, expected = as_law(outputs, probabilities), as_law(*enumerated(net, x))
    assert got.keys() == expected.keys()
    assert len(expected) == 29  # of 32 masks, the four that drop all hidden units give the bias
    for output in expected:
        assert got[output] == pytest.approx(expected[output], rel=1e-12)


def test_whole_channels_before_a_convolution():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Dropout2d(0.25), nn.Conv2d(2, 1, 2)).double()
    x = torch.randn(2, 3, 3, dtype=torch.float64)
    outputs, probabilities, _ = of_posterior(net, x)
    for mask in product([0.0, 1.0], repeat=2):
        z = torch.tensor(mask, dtype=torch.float64)
        dropped = (x * z[:, None, None] / 0.75).unsqueeze(0)
        expected = conv2d(dropped, net[1].weight, net[1].bias).detach()
        (state,) = [s for s in range(4) if torch.allclose(outputs[s], expected, rtol=1e-12, atol=1e-12)]
        assert probabilities[state].item() == pytest.approx((0.25 + 0.5 * z).prod().item(), rel=1e-12)


# Which layers


class Custom(nn.Module):
    def __init__(self, head=None):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 4))
        self.head = nn.Linear(4, 1) if head is None else head

    def forward(self, x):
        return self.head(self.body(x))


def tied():
    net = nn.Sequential(nn.Dropout(0.1), nn.Linear(3, 3), nn.Linear(3, 3))
    net[2].weight = net[1].weight
    return net


DROP = nn.Dropout(0.3)
CONVERTED = [
    (nn.Sequential(nn.Dropout(0.25), nn.Linear(2, 1)), {"1.weight": 0.75}),
    (nn.Sequential(nn.Sequential(nn.ReLU(), nn.Dropout(0.25)), nn.Linear(2, 1)), {"1.weight": 0.75}),
    (nn.Sequential(nn.Dropout(0.25), nn.Sequential(nn.Sequential(nn.Linear(2, 1)))), {"1.0.0.weight": 0.75}),
    (nn.Sequential(nn.Dropout1d(0.5), nn.Conv1d(2, 1, 1), nn.Dropout(0.0)), {"1.weight": 0.5}),
    (nn.Sequential(nn.Dropout3d(0.5), nn.Conv3d(2, 1, 1)), {"1.weight": 0.5}),
    (Custom(), {"body.3.weight": 0.9}),
    (nn.Sequential(Custom(), nn.Dropout(0.5), nn.Linear(1, 1)), {"0.body.3.weight": 0.9, "2.weight": 0.5}),
    # one dropout layer in two places
    (nn.Sequential(DROP, nn.Linear(2, 2), DROP, nn.Linear(2, 2)), {"1.weight": 0.7, "3.weight": 0.7}),
]


def test_which_layers_are_converted():
    for net, keeps in CONVERTED:
        assert dropped_layers(net) == pytest.approx(keeps)


REFUSED = [
    (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), r"1 \(Dropout\)"),
    (nn.Sequential(nn.Dropout(0.5), nn.ReLU(), nn.Linear(2, 2)), r"0 \(Dropout\)"),
    (nn.Sequential(nn.Dropout(0.5), nn.Conv2d(2, 2, 1)), r"0 \(Dropout\)"),
    (nn.Sequential(nn.Dropout2d(0.5), nn.Conv2d(2, 2, 1, groups=2)), r"0 \(Dropout2d\)"),
    (nn.Sequential(nn.AlphaDropout(0.5), nn.Linear(2, 2)), r"0 \(AlphaDropout\)"),
    (nn.Sequential(nn.Dropout(1.0), nn.Linear(2, 2)), r"0 \(Dropout\)"),
    (tied(), r"0 \(Dropout\)"),
    (Custom(nn.Dropout(0.3)), r"head \(Dropout\)"),
    (nn.LSTM(2, 3, num_layers=2, dropout=0.1), r"the network \(LSTM\)"),
    (nn.MultiheadAttention(4, 2, dropout=0.1), r"the network \(MultiheadAttention\)"),
    (nn.TransformerEncoderLayer(4, 2, 8), r"dropout1 \(Dropout\)"),
]


def test_what_cannot_be_converted_is_named():
    for net, name in REFUSED:
        with pytest.raises(ValueError, match=rf'no masks on weights: (.*, )?{name}.*dropout="on"'):
            vi.MCDropout.from_network(net)
    with pytest.raises(ValueError, match=r"has no nn\.Dropout layer with p > 0"):
        vi.MCDropout.from_network(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))
    net = nn.Sequential(nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(2, 2), nn.Dropout(0.1))
    with pytest.raises(ValueError, match=r"no masks on weights: 0 \(Dropout\), 4 \(Dropout\)\."):
        vi.MCDropout.from_network(net)


SPACE = vi.Parameters({"a": torch.ones(2), "b": torch.ones(1), "c": torch.full((1,), 2.0)})


def test_keep_by_name():
    density = vi.MCDropout({"a": 0.25, "c*": 1}, initial_mean="rescaled").bind(SPACE)()
    assert torch.equal(density.keep, torch.tensor([0.25, 0.25, 1.0]))
    assert torch.equal(density.mean, torch.tensor([1.0, 1.0, 1.0, 2.0]))
    assert torch.equal(density.point, torch.tensor([4.0, 4.0, 1.0, 2.0]))
    # Var θ̂z = θ̂² keep (1 − keep)
    torch.testing.assert_close(density.variance, torch.tensor([3.0, 3.0, 0.0, 0.0]))
