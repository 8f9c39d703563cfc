"""Prediction with S drawn networks beside a deep ensemble of S, and beside S plain passes of one network.

    python -m benchmarks.predictor [--net resnet18] [--draws 32] [--batch 128 1024] [--device cuda] [--out results.json]

All rows are of one run with interleaved repeats. "plain passes" calls one network S times on the batch, "deep ensemble"
S networks once each; "predictor" is `bayes.predictor(draws=S)`, the outputs [S, B, ..] of which are those of the
posterior's draws, with `mean` the whole of what a user asks for. `predict` draws the weights anew at every call.
The throughput is passes of one observation through one network a second; `of plain` is relative to plain passes run the
same way. On a GPU plain passes are also captured as a CUDA graph, which is the least that S passes can take there.
"""

import copy
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

import structvi as vi

from . import timing
from .nets import NAMES, Problem, problem
from .peers import N
from .timing import Step

PLAIN, ENSEMBLE, PLAIN_CAPTURED = "plain passes", "deep ensemble", "plain passes, captured"


def plain(given: Problem, draws: int) -> Step:
    net = given.net.eval()
    x = given.batch[0]

    @torch.no_grad()
    def step() -> Tensor:
        return torch.stack([net(x) for _ in range(draws)])

    return step


def ensemble(given: Problem, draws: int) -> Step:
    nets = [copy.deepcopy(given.net).eval() for _ in range(draws)]
    x = given.batch[0]

    @torch.no_grad()
    def step() -> Tensor:
        return torch.stack([net(x) for net in nets])

    return step


def posterior(given: Problem) -> Any:
    device = given.batch[0].device
    family = vi.MeanField(initial_scale=0.01)
    return vi.variationalize(given.net, vi.likelihoods.Categorical(), family, num_data=N).to(device)


def outputs(given: Problem, draws: int) -> Step:
    served = posterior(given).predictor(draws)
    return lambda: served(given.batch[0]).outputs


def mean(given: Problem, draws: int) -> Step:
    served = posterior(given).predictor(draws)
    return lambda: served(given.batch[0]).mean


def predict(given: Problem, draws: int) -> Step:
    bayes = posterior(given)
    return lambda: bayes.predict(given.batch[0], draws).mean


WAYS: dict[str, Callable[[Problem, int], Step]] = {
    PLAIN: plain,
    ENSEMBLE: ensemble,
    "predictor, outputs": outputs,
    "predictor, mean": mean,
    "predict, mean": predict,
}


def run(name: str, batch: int, draws: int, device: torch.device, repeats: int, budget: float) -> list[dict]:
    ways = dict(WAYS)
    if device.type == "cuda":
        ways = {PLAIN: plain, PLAIN_CAPTURED: lambda p, S: timing.capture(plain(p, S)), **ways}
    given = {way: problem(name, batch, device) for way in ways}
    ready = {way: timing.prepare(lambda way=way: ways[way](given[way], draws), device) for way in ways}
    times = timing.measure({way: made.step for way, made in ready.items()}, device, repeats, budget=budget)
    rows = []
    for way, made in ready.items():
        row: dict[str, Any] = {"net": name, "batch": batch, "draws": draws, "way": way}
        row |= {"seconds": median(times[way]), "peak": made.peak, "live": made.live}
        row["throughput"] = batch * draws / row["seconds"]
        row["of_plain"] = 1 / timing.ratio(times[way], times[PLAIN])["ratio"]
        if PLAIN_CAPTURED in times:
            row["of_captured"] = 1 / timing.ratio(times[way], times[PLAIN_CAPTURED])["ratio"]
        rows.append(row)
    return rows


def table(rows: Sequence[dict]) -> str:
    captured = any("of_captured" in row for row in rows)
    header = ["way", "batch", "draws", "ms", "thousand passes/s", "of plain", "live MB", "peak MB"]
    header[6:6] = ["of captured"] * captured
    lines = []
    for row in rows:
        cells = [row["way"], str(row["batch"]), str(row["draws"]), f"{1e3 * row['seconds']:.2f}"]
        cells += [f"{row['throughput'] / 1e3:.1f}", f"{row['of_plain']:.2f}"]
        if captured:
            cells.append(f"{row['of_captured']:.2f}")
        lines.append([*cells, f"{row['live'] / 1e6:.0f}", f"{row['peak'] / 1e6:.0f}"])
    return timing.markdown(lines, header)


def main(arguments: Sequence[str] | None = None) -> dict:
    parser = timing.parser(__doc__ or "")
    parser.add_argument("--net", choices=NAMES, default="resnet18")
    parser.add_argument("--draws", type=int, default=32)
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--seconds", type=float, default=30.0, help="of repeats for one size of batch, at most")
    options = parser.parse_args(arguments)
    device = timing.start(options)
    if options.quick:
        options.batch, options.draws = [4], min(options.draws, 4)
    machine = timing.machine(device)
    print(timing.described(machine), flush=True)
    rows: list[dict] = []
    for batch in options.batch:
        rows += run(options.net, batch, options.draws, device, options.repeats, options.seconds)
    results = {"machine": machine, "rows": rows}
    results["table"] = f"{timing.described(machine)}\n\n{options.net}\n\n{table(rows)}"
    print(f"\n{table(rows)}")
    timing.write(results, options.out)
    return results


if __name__ == "__main__":
    main()
