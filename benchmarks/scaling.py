"""How time and memory of a step grow with P, K and S: each over two decades about a centre, with fitted exponents.

    python -m benchmarks.scaling [--device cuda] [--out results.json]

Two kinds of step of LowRankNormal(K) with S draws. "parameters": the parameter space alone, for a target that reads
θ [S, P] once: draw, score, gradient and Adam. "training": a whole step of a perceptron with three hidden layers of
equal width on a batch of 32. An exponent is the slope of least squares in log-log. Times against K are also fitted by
c + a·PK + b·PK², and memory against K and S by a line, with coefficients that are not negative. What would betray a
P×P matrix or a copy of the network for each draw is printed too: the height of memory in units of P² numbers, and what
one more draw adds in units of P numbers. Beside the height of a training step stands what `fit` would predict for it
(docs/performance.md, Memory).
"""

from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import structvi as vi
from structvi.train.memory import Need, activation_bytes

from . import timing
from .nets import Problem, mlp
from .peers import adam
from .step_cost import our_step
from .timing import Step

BATCH = 32
KINDS = ("parameters", "training")


class Point(NamedTuple):
    P: int
    K: int
    S: int


class Centre(NamedTuple):
    """The sweeps: two decades of each letter, the other two at the centre."""

    P: int
    K: int
    S: int
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    draws: tuple[int, ...]

    def points(self, letter: str) -> list[Point]:
        at = Point(self.P, self.K, self.S)
        values = {"P": self.sizes, "K": self.ranks, "S": self.draws}[letter]
        return [at._replace(**{letter: value}) for value in values]


CENTRES = {
    "cpu": Centre(
        300_000, 8, 2, (30_000, 100_000, 300_000, 1_000_000, 3_000_000), (1, 3, 10, 30, 100), (1, 3, 10, 30, 100)
    ),
    "cuda": Centre(
        10_000_000,
        8,
        2,
        (1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000),
        (1, 4, 16, 64, 128),
        (1, 2, 4, 8, 16, 32),
    ),
    "quick": Centre(300, 2, 2, (100, 1000, 10_000), (1, 4, 16), (1, 4, 16)),
}


class Linear:
    """log p(θ) = c·θ: a target that costs one reading of the draws."""

    def __init__(self, P: int, device: torch.device):
        self.space = vi.Parameters({"theta": torch.zeros(P, device=device)})
        self.coefficients = torch.full((P,), 1e-3, device=device)

    def log_joint(self, theta: Tensor, batch: Any = None) -> Tensor:
        return theta @ self.coefficients


def parameters_step(point: Point, device: torch.device) -> Step:
    target = Linear(point.P, device)
    family = vi.LowRankNormal(point.K).bind(target.space)
    optimizer = adam(family.parameters())

    def step() -> None:
        optimizer.zero_grad()
        (-vi.elbo(family, target, estimator=vi.Estimator(groups=point.S, coupling=vi.couplings.naive))).backward()
        optimizer.step()

    return step


def width(P: int) -> int:
    """Of the three hidden layers of a perceptron with about P weights."""
    return max(4, round((P / 3) ** 0.5))


def perceptron(P: int, device: torch.device) -> nn.Module:
    with device:  # not to be made on the host first
        return mlp(*[width(P)] * 4, 10)


def training_step(point: Point, device: torch.device) -> Step:
    torch.manual_seed(0)
    net = perceptron(point.P, device)
    batch = torch.randn(BATCH, width(point.P), device=device), torch.randint(10, (BATCH,), device=device)
    return our_step(Problem("perceptron", net, batch), vi.LowRankNormal(point.K), point.S, captured=False)


def predicted(point: Point, device: torch.device) -> int:
    """Bytes at the height of a training step by the formula that `fit` gives where memory does not suffice."""
    net = perceptron(point.P, device)
    bayes = vi.variationalize(net, vi.likelihoods.Categorical(), vi.MeanField(), num_data=BATCH)
    with device:
        batch = torch.zeros(BATCH, width(point.P)), torch.zeros(BATCH, dtype=torch.long)
    P = bayes.space.size
    activation = activation_bytes(bayes, batch)
    return Need(P * (point.K + 2), P, point.K, point.S, BATCH, point.S, 4, activation).total()


def sweep(kind: str, points: Sequence[Point], device: torch.device, repeats: int, budget: float) -> list[dict]:
    build = {"parameters": parameters_step, "training": training_step}[kind]
    made = [timing.prepare(lambda point=point: build(point, device), device) for point in points]
    times = timing.measure({i: m.step for i, m in enumerate(made)}, device, repeats, budget=budget)
    sizes = [point.P if kind == "parameters" else count(perceptron(point.P, torch.device("meta"))) for point in points]
    return [
        {
            "kind": kind,
            **point._asdict(),
            "P": P,
            "predicted": predicted(point, device) if kind == "training" else None,
            "seconds": median(times[i]),
            "least": min(times[i]),
            "live": m.live,
            "peak": m.peak,
        }
        for i, (point, P, m) in enumerate(zip(points, sizes, made, strict=True))
    ]


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of log y against log x.

    Example:
        >>> round(exponent([1, 10, 100], [3, 30, 300]), 6)
        1.0
    """
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def non_negative(columns: Sequence[Sequence[float]], y: Sequence[float]) -> tuple[list[float], float]:
    """Coefficients ≥ 0 with the least squared relative error, and the largest relative error.

    Few columns: the best of all subsets whose own least squares is positive is the solution.

    Example:
        >>> non_negative([[1.0, 2.0, 3.0], [1.0, 4.0, 9.0]], [2.0, 4.0, 6.0])[0]
        [2.0, 0.0]
    """
    values = np.asarray(y, dtype=float)
    A = np.asarray(columns, dtype=float).T / values[:, None]
    best, least = np.zeros(A.shape[1]), np.inf
    for number in range(1, A.shape[1] + 1):
        for subset in combinations(range(A.shape[1]), number):
            found = np.linalg.lstsq(A[:, subset], np.ones(len(values)), rcond=None)[0]
            error = float(np.square(A[:, subset] @ found - 1).sum())
            if (found >= 0).all() and error < least - 1e-12:
                least, best = error, np.zeros(A.shape[1])
                best[list(subset)] = found
    return [round(float(c), 18) for c in best], float(np.abs(A @ best - 1).max())


def fits(kind: str, letter: str, rows: Sequence[dict]) -> dict[str, Any]:
    x = [row[letter] for row in rows]
    result: dict[str, Any] = {"kind": kind, "letter": letter}
    result["time_exponent"] = exponent(x, [row["seconds"] for row in rows])
    result["memory_exponent"] = exponent(x, [row["peak"] for row in rows])
    P = rows[0]["P"]
    ones = [1.0] * len(x)
    if letter == "K":
        columns = [ones, [P * k for k in x], [P * k * k for k in x]]
        coefficients, error = non_negative(columns, [row["seconds"] for row in rows])
        result["time_fit"] = dict(zip(("c", "a", "b"), coefficients, strict=True)) | {"relative_error": error}
        coefficients, error = non_negative([ones, [4 * P * k for k in x]], [row["peak"] for row in rows])
        result["memory_fit"] = {"numbers_per_weight_and_rank": coefficients[1], "relative_error": error}
    if letter == "S":
        coefficients, error = non_negative([ones, [4 * P * s for s in x]], [row["peak"] for row in rows])
        result["memory_fit"] = {"numbers_per_weight_and_draw": coefficients[1], "relative_error": error}
    if letter == "P":
        result["peak_over_square"] = rows[-1]["peak"] / (4 * rows[-1]["P"] ** 2)
    return result


def said(fit: dict) -> str:
    extra = ""
    if fit["letter"] == "K":
        t, m = fit["time_fit"], fit["memory_fit"]
        extra = (
            f"; time = {t['c']:.1e} s + {t['a']:.1e}·PK + {t['b']:.1e}·PK², within {t['relative_error']:.0%}; memory "
            f"{m['numbers_per_weight_and_rank']:.1f} numbers for each weight and rank"
        )
    if fit["letter"] == "S":
        extra = f"; one more draw adds {fit['memory_fit']['numbers_per_weight_and_draw']:.2f}·P numbers"
    if fit["letter"] == "P":
        extra = f"; the largest peak is {fit['peak_over_square']:.1e} of a P×P matrix"
    x, time, memory = fit["letter"], fit["time_exponent"], fit["memory_exponent"]
    return f"- {fit['kind']}, {x}: time ∝ {x}^{time:.2f}, memory ∝ {x}^{memory:.2f}{extra}"


def table(rows: Sequence[dict], found: Sequence[dict]) -> str:
    header = ["step", "P", "K", "S", "ms", "peak MB", "predicted MB"]
    lines = []
    for row in rows:
        numbers = [str(row[letter]) for letter in "PKS"]
        figures = [f"{1e3 * row['seconds']:.2f}", f"{row['peak'] / 1e6:.1f}"]
        foreseen = "" if row["predicted"] is None else f"{row['predicted'] / 1e6:.1f}"
        lines.append([row["kind"], *numbers, *figures, foreseen])
    return timing.markdown(lines, header) + "\n\n" + "\n".join(said(fit) for fit in found)


def main(arguments: Sequence[str] | None = None) -> dict:
    parser = timing.parser(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=15.0, help="of repeats for one sweep, at most")
    options = parser.parse_args(arguments)
    device = timing.start(options)
    centre = CENTRES["quick" if options.quick else device.type]
    machine = timing.machine(device)
    print(timing.described(machine), flush=True)
    rows: list[dict] = []
    found: list[dict] = []
    results: dict[str, Any] = {}
    for kind in KINDS:
        for letter in "PKS":
            swept = sweep(kind, centre.points(letter), device, options.repeats, options.seconds)
            rows += swept
            found.append(fits(kind, letter, swept))
            print(f"{table(swept, found[-1:])}\n", flush=True)
            results |= {"machine": machine, "rows": rows, "fits": found, "load_at_end": timing.machine(device)["load"]}
            results["table"] = f"{timing.described(machine)}\n\n{table(rows, found)}"
            timing.write(results, options.out)  # what there is, should it be stopped
    return results


if __name__ == "__main__":
    main()
