"""Every method on the same teachers, measured in the same way."""

import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from ..adapters import Adapter, density_of
from .methods import WithDensity, methods
from .problem import Teacher, teacher
from .report import ScaleReport
from .rows import ScaleRow, Sketch

#: draws of each method
DRAWS = 256
#: of the intervals
LEVEL = 0.9


def run(
    names: Sequence[str] | None = None,
    *,
    width: int = 24,
    size: int = 1000,
    test: int = 500,
    teachers: int = 1,
    seed: int = 0,
    progress: bool = True,
) -> ScaleReport:
    """Fit every method to labels of networks that were drawn from their prior, and measure what it calls a posterior.

    Args:
        names: of methods; all if None.
        width: of the network's two hidden layers: P = 8·w + w² + 3w + 1 weights.
        size: observations.
        test: inputs at which predictions are compared.
        teachers: how many networks are drawn; measures are means over them.
        seed: of the first.
        progress: say what is at work, on stderr.

    Example:
        >>> report = run(["SWAG"], width=3, size=30, test=10, progress=False)
        >>> report.rows[0].method
        'SWAG'
    """
    known = list(methods())
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(f"there is no method {unknown[0]!r}; there are {', '.join(known)}")
    rows: list[ScaleRow] = []
    weights, constant = 0, []
    for number in range(teachers):
        truth = teacher(width, size, test, seed + number)
        weights = truth.problem.P
        constant.append(truth.constant())
        for name, method in methods().items():
            if names is not None and name not in names:
                continue
            if progress:
                print(f"teacher {number + 1}/{teachers}: {name}", file=sys.stderr, flush=True)
            rows.append(examine(method, truth, seed + number))
    return ScaleReport(tuple(rows), weights, size, teachers, seed, sum(constant) / len(constant))


def examine(method: Adapter, truth: Teacher, seed: int) -> ScaleRow:
    """One method on one teacher."""
    start = time.process_time()
    method.fit(truth.problem, seed)
    seconds = time.process_time() - start
    theta = method.draw(DRAWS, torch.Generator().manual_seed(seed)).double()
    p = probabilities(truth, theta)  # [S, M]
    elbo = error = None
    log_q = density_of(method)
    if log_q is not None:
        with torch.no_grad():
            values = torch.cat([truth.problem.log_joint(part) for part in theta.split(16)]) - log_q(theta)
        elbo, error = float(values.mean()), float(values.std() / len(values) ** 0.5)
    mean = p.mean(0).clamp(1e-9, 1 - 1e-9)
    tail = (1 - LEVEL) / 2
    low, high = torch.quantile(p, torch.tensor([tail, 1 - tail], dtype=p.dtype), dim=0)
    inside = ((low <= truth.p) & (truth.p <= high)).double()
    t = truth.t[:, 0]
    nll = -(t * mean.log() + (1 - t) * (1 - mean).log()).mean()
    true = truth.p.clamp(1e-12, 1 - 1e-12)
    kl = true * (true / mean).log() + (1 - true) * ((1 - true) / (1 - mean)).log()
    order = truth.p.argsort()
    sketch = Sketch(*(x[order].tolist() for x in (truth.p, low, mean, high)))
    moved = method.moved if isinstance(method, WithDensity) else None
    return ScaleRow(
        method.name, seed, elbo, error, moved, float(inside.mean()), float((high - low).mean()), float(nll),
        float(kl.mean()), seconds, sketch,
    )  # fmt: skip


def probabilities(truth: Teacher, theta: Tensor) -> Tensor:
    """Of the second class at the test inputs, at each draw: [S, P] → [S, M]."""
    net, space = truth.data.build(), truth.problem.space

    def one(row: Tensor) -> Tensor:
        return functional_call(net, space.unravel(row), (truth.x,))

    with torch.no_grad():
        return vmap(one, chunk_size=32)(theta).squeeze(-1).sigmoid()
