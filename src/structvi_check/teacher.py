"""A network drawn from its own prior, and labels drawn from it: the truth is known, and the model is true."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from structvi.models.likelihoods import Bernoulli
from structvi.parameters import Parameters

from .problems import Data, Problem

INPUTS = 8
#: the last layer's output is multiplied by it: labels are neither coins nor certain
SHARPNESS = 4.0


class Times(nn.Module):
    """x ↦ factor · x: with 1/√n before a layer of n inputs, and weights of N(0, 1), outputs have the inputs' size."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def build(width: int) -> nn.Module:
    """Return a network 8 – width – width – 1 with tanh; the same at every call, at a draw of N(0, 1)."""
    layers: list[nn.Module] = []
    for inputs, outputs, gain in ((INPUTS, width, 1.0), (width, width, 1.0), (width, 1, SHARPNESS)):
        layers += [Times(gain * inputs**-0.5), nn.Linear(inputs, outputs, device="meta"), nn.Tanh()]
    net = nn.Sequential(*layers[:-1]).to_empty(device="cpu").double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return net


@dataclass(frozen=True)
class Teacher:
    """What methods get, and test inputs [M, 8] with their labels [M, 1] and true probabilities [M]."""

    problem: Problem
    x: Tensor
    t: Tensor
    p: Tensor

    @property
    def data(self) -> Data:
        assert self.problem.data is not None
        return self.problem.data

    def constant(self) -> float:
        """Return the log likelihood of the training labels by their own mean."""
        share = self.data.t.mean().clamp(1e-6, 1 - 1e-6)
        return float(len(self.data.t) * (share * share.log() + (1 - share) * (1 - share).log()))

    def probabilities(self, theta: Tensor) -> Tensor:
        """Return those of the second class at the test inputs, at each draw: [S, P] → [S, M]."""
        with torch.no_grad():
            return self.data.outputs(theta, self.x).sigmoid()


def teacher(width: int, size: int, test: int, seed: int) -> Teacher:
    """Draw θ* ~ N(0, I): over teachers the exact posterior's 90 % intervals hold the truth in 90 % of cases.

    Args:
        width: of the two hidden layers.
        size: observations.
        test: inputs at which predictions are compared.
        seed: of the truth and the data.

    Example:
        >>> found = teacher(width=4, size=20, test=5, seed=0)
        >>> found.problem.P, found.p.shape
        (61, torch.Size([5]))
    """
    generator = torch.Generator().manual_seed(seed)
    net = build(width)
    space = Parameters.of(net)
    truth = torch.randn(space.size, generator=generator, dtype=torch.float64)
    x = torch.randn(size + test, INPUTS, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        p = functional_call(net, space.unravel(truth), (x,)).sigmoid()
    t = (torch.rand(p.shape, generator=generator, dtype=torch.float64) < p).double()
    data = Data(partial(build, width), Bernoulli(), 1.0, x[:size], t[:size], x[size:])
    title = f"a network of {space.size} weights drawn from its prior"
    none = torch.zeros(0, space.size, dtype=torch.float64)
    problem = Problem("teacher", title, space, data.log_joint, none, truth, None, (), data, identified=False)
    return Teacher(problem.question(), x[size:], t[size:], p[size:, 0])
