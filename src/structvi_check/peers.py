"""Adapters for other methods: deep ensembles, SWAG, networks with dropout layers, each as its authors show it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from structvi.families import MCDropout
from structvi.parameters import Parameters
from structvi.util.random_streams import borrowed_stream

from .methods import STEPS, Adapter, NotApplicable
from .problems import Data, Problem

#: highest learning rate of Adam
RATE = 0.02


def _data(problem: Problem, method: str) -> Data:
    if problem.data is None:
        raise NotApplicable(f"{method} needs a network with data")
    return problem.data


def train(net: nn.Module, data: Data, seed: int) -> nn.Module:
    """Train a point estimate in the ordinary way: Adam on the penalised loss, the modules in train mode."""
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    with borrowed_stream(torch.Generator().manual_seed(seed)):
        for _ in range(STEPS):
            optimizer.zero_grad()
            penalised_loss(net, data, data.x, data.t).backward()
            optimizer.step()
            schedule.step()
    return net


def penalised_loss(net: nn.Module, data: Data, x: Tensor, t: Tensor) -> Tensor:
    """Return −log p(t, θ)/N of a batch that stands for all data."""
    squares = parameters_to_vector(net.parameters()).square().sum() / data.scale**2
    return 0.5 * squares / len(data.x) - data.likelihood(net(x), t).mean()


class DeepEnsemble:
    """Networks trained from different starts; a draw is one of them."""

    name = "deep ensemble"
    size = 5

    def fit(self, problem: Problem, seed: int) -> None:
        data, members = _data(problem, self.name), []
        for member in range(self.size):
            net = data.build()
            start = Parameters.of(net).fresh(torch.Generator().manual_seed(self.size * seed + member))
            vector_to_parameters(start, net.parameters())
            members.append(parameters_to_vector(train(net, data, seed).parameters()).detach())
        self.members = torch.stack(members)

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        return self.members[torch.randint(self.size, (n,), generator=generator)]


class DropoutNetwork:
    """A network with `nn.Dropout` before its last layer, trained with it and left active to predict."""

    name = "dropout network"
    #: the probability to drop a unit, as in Gal and Ghahramani's regressions
    drop = 0.05

    def fit(self, problem: Problem, seed: int) -> None:
        data = _data(problem, self.name)
        net = data.build()
        layers = list(net) if isinstance(net, nn.Sequential) else [net]
        dropped = nn.Sequential(*layers[:-1], nn.Dropout(self.drop), layers[-1])
        train(dropped, data, seed)
        # the tensors are the same in the same order: a draw of the one's weights is a draw of the other's
        self.density = MCDropout.from_network(dropped).bind(Parameters.of(dropped))()

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        return self.density.draw(n, generator=generator).theta.detach()


def stationary_rate(net: nn.Module, data: Data, batch: int) -> float:
    """Return 2BP/(N tr C), C the covariance of one observation's gradient (Mandt, Hoffman and Blei 2017, theorem 1).

    At this constant rate the iterates of SGD are nearest to the posterior. It is at most half the inverse of C's
    largest eigenvalue: C is also the curvature, and SGD diverges beyond it.
    """
    parameters, gradients = list(net.parameters()), []
    for x, t in zip(data.x, data.t, strict=True):
        loss = -data.likelihood(net(x.unsqueeze(0)), t.unsqueeze(0)).sum()
        gradients.append(parameters_to_vector([g.contiguous() for g in torch.autograd.grad(loss, parameters)]))
    curvature = torch.linalg.eigvalsh(torch.cov(torch.stack(gradients).mT))  # of C, ascending
    nearest = 2 * batch * len(curvature) / (len(data.x) * curvature.sum())
    return torch.minimum(nearest, 0.5 / curvature[-1]).item()


class SWAG:
    """Maddox and others 2019: SGD goes on from a trained network; N(mean, ½ diagonal + ½ low rank) of its iterates."""

    name = "SWAG"
    #: iterates, one for each epoch, the last of them that make the low-rank part, and observations in a step
    collected, deviations, batch = 100, 20, 10

    def fit(self, problem: Problem, seed: int) -> None:
        data = _data(problem, self.name)
        net = train(data.build(), data, seed)
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(TensorDataset(data.x, data.t), batch_size=self.batch, shuffle=True, generator=generator)
        optimizer = torch.optim.SGD(net.parameters(), lr=stationary_rate(net, data, self.batch))
        iterates = []
        for _ in range(self.collected):
            for x, t in loader:
                optimizer.zero_grad()
                penalised_loss(net, data, x, t).backward()
                optimizer.step()
            iterates.append(parameters_to_vector(net.parameters()).detach())
        collected = torch.stack(iterates)
        mean, variance = collected.mean(0), 0.5 * collected.var(0, correction=0)
        deviations = (collected - mean)[-self.deviations :].mT / (2 * (self.deviations - 1)) ** 0.5  # [P, K]
        self.normal = torch.distributions.LowRankMultivariateNormal(mean, deviations, variance.clamp(min=1e-20))

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        with borrowed_stream(generator):
            return self.normal.sample((n,))

    def log_prob(self, theta: Tensor) -> Tensor:
        return self.normal.log_prob(theta)


#: by the names of the command line
PEERS: dict[str, Callable[[], Adapter]] = {
    "deep-ensemble": DeepEnsemble,
    "swag": SWAG,
    "dropout-network": DropoutNetwork,
}
