"""Is it Bayesian, of a network of thousands of weights? `structvi check --at-scale`, `check.at_scale.run()`.

A network is drawn from its own prior, and labels are drawn from it: the truth is known, and the model is true.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy
from tqdm import tqdm

from structvi.models.likelihoods import Bernoulli
from structvi.parameters import Parameters
from structvi.util import __version__
from structvi.util.folder_files import check_folder

from .measures import LEVEL
from .methods import Adapter, log_prob_of
from .problems import Data, Problem
from .report import aligned, save_report
from .suite import as_method

NAMES = ("mean-field", "structured", "precision", "swag", "deep-ensemble", "dropout-network")
#: draws of each method
DRAWS = 256
LEGEND = (
    "ELBO at λ = 1: E log p(data, θ) − log q(θ) of what the method calls its posterior, in nats; – where it has no "
    "density. Coverage: of the true probabilities in the method's 90 % intervals; width: of these intervals. The exact "
    "posterior covers 90 % on average over networks. NLL: of test labels, nats; s: processor seconds to fit"
)
HEADINGS = ("method", "ELBO at λ = 1", "coverage", "width", "NLL", "s")
#: inputs of the networks
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
    """The problem that methods get, with test inputs as its grid; their labels [M, 1] and true probabilities [M]."""

    problem: Problem
    t: Tensor
    p: Tensor


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
    none, title = truth.new_zeros(0, space.size), "a network drawn from its prior"
    problem = Problem("teacher", title, space, data.log_joint, none, truth, None, (), data, identified=False)
    return Teacher(problem.question(), t[size:], p[size:, 0])


@dataclass(frozen=True)
class ScaleRow:
    """One method on one teacher."""

    method: str
    seed: int
    elbo: float | None
    coverage: float
    width: float
    nll: float
    seconds: float


@dataclass(frozen=True)
class ScaleReport:
    """All rows. `print(report)` is the table; `report.save(folder)` writes it and JSON."""

    rows: tuple[ScaleRow, ...]
    weights: int
    size: int
    teachers: int
    seed: int

    def __str__(self) -> str:
        lines: list[list[str]] = [list(HEADINGS)]
        for method in dict.fromkeys(row.method for row in self.rows):
            rows = [list(asdict(row).values())[2:] for row in self.rows if row.method == method]
            lines.append([method, *map(_cell, zip(*rows, strict=True))])
        title = f"{self.teachers} networks of {self.weights} weights drawn from the prior, {self.size} labels each"
        return "\n".join([title, "", *aligned(lines), "", LEGEND])

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write at_scale.txt and at_scale.json, together."""
        check_folder(Path(folder))
        return save_report(folder, "at_scale", self, {"version": __version__} | asdict(self))


def _cell(values: Sequence[Any]) -> str:
    if None in values:
        return "–"
    error = f" ± {stdev(values) / sqrt(len(values)):.2g}" if len(values) > 1 else ""
    return f"{mean(values):.4g}{error}"


def run(
    names: Sequence[str] = NAMES,
    *,
    width: int = 24,
    size: int = 1000,
    test: int = 500,
    teachers: int = 1,
    seed: int = 0,
) -> ScaleReport:
    """Fit every method to labels of networks drawn from their prior, and measure its draws.

    Args:
        names: of methods, as of the command line.
        width: of the network's two hidden layers: P = 8·w + w² + 3w + 1 weights.
        size: observations.
        test: inputs at which predictions are compared.
        teachers: how many networks are drawn; measures are means over them.
        seed: of the first.

    Example:
        >>> report = run(["swag"], width=3, size=30, test=10)
        >>> report.rows[0].method
        'SWAG'
    """
    truths = [teacher(width, size, test, seed + number) for number in range(teachers)]
    pairs = [(truth, seed + number, name) for number, truth in enumerate(truths) for name in names]
    rows = [examine(as_method(name), truth, at) for truth, at, name in tqdm(pairs, "at scale", disable=None)]
    return ScaleReport(tuple(rows), truths[0].problem.P, size, teachers, seed)


def examine(method: Adapter, truth: Teacher, seed: int) -> ScaleRow:
    """Measure one method on one teacher."""
    start = time.process_time()
    method.fit(truth.problem, seed)
    seconds = time.process_time() - start
    theta = method.draw(DRAWS, torch.Generator().manual_seed(seed)).double()
    log_q, elbo = log_prob_of(method), None
    if log_q is not None:
        with torch.no_grad():
            values = torch.cat([truth.problem.log_joint(part) for part in theta.split(16)]) - log_q(theta)
        elbo = float(values.mean())
    p = truth.problem.outputs(theta).sigmoid()  # [S, M], the test inputs are the grid
    tail = (1 - LEVEL) / 2
    low, high = torch.quantile(p, torch.tensor([tail, 1 - tail], dtype=p.dtype), dim=0)
    inside = ((low <= truth.p) & (truth.p <= high)).double()
    nll = binary_cross_entropy(p.mean(0), truth.t[:, 0])
    held, width, loss = (float(one.mean()) for one in (inside, high - low, nll))
    return ScaleRow(method.name, seed, elbo, held, width, loss, seconds)
