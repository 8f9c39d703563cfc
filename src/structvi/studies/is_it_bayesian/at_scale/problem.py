"""A network drawn from its own prior, and labels drawn from it: the truth is known, and the model is true."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear

from ....models.bayesian_model import BayesianModel
from ....models.likelihoods import Bernoulli
from ....parameters import Parameters
from ..problems import Data, Problem

INPUTS = 8
#: how far the last layer's output is multiplied: labels are neither coins nor certain
SHARPNESS = 4.0


class Unit(nn.Linear):
    """x ↦ gain · Wx/√inputs + b: with all weights of N(0, 1) outputs are of the size of the inputs."""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0):
        self.gain = gain
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.normal_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight * (self.gain * self.in_features**-0.5), self.bias)


def build(width: int) -> nn.Module:
    """8 – width – width – 1, tanh; the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [Unit(INPUTS, width), nn.Tanh(), Unit(width, width), nn.Tanh(), Unit(width, 1, SHARPNESS)]
        return nn.Sequential(*layers).double()


@dataclass(frozen=True)
class Teacher:
    """What methods get, and what they are measured by."""

    problem: Problem
    model: BayesianModel
    x: Tensor  # test inputs [M, 8]
    t: Tensor  # their labels [M, 1]
    p: Tensor  # their true probabilities [M]

    @property
    def data(self) -> Data:
        assert self.problem.data is not None
        return self.problem.data

    def constant(self) -> float:
        """Log likelihood of the training labels by their own mean."""
        share = self.data.t.mean().clamp(1e-6, 1 - 1e-6)
        return float(len(self.data.t) * (share * share.log() + (1 - share) * (1 - share).log()))


def teacher(width: int, size: int, test: int, seed: int) -> Teacher:
    """θ* ~ N(0, I), so that the exact posterior's 90 % intervals hold the truth in 90 % of cases, over teachers.

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
    model = BayesianModel(net, data.likelihood, data.prior, size)
    problem = Problem(
        "teacher", f"a network of {space.size} weights drawn from its prior", space,
        partial(_log_joint, model, data), torch.zeros(0, space.size, dtype=torch.float64), truth, None, (), data, False,
    )  # fmt: skip
    return Teacher(problem.question(), model, x[size:], t[size:], p[size:, 0])


def _log_joint(model: BayesianModel, data: Data, theta: Tensor) -> Tensor:
    return model.log_joint(theta, (data.x, data.t))
