"""What a training step costs: deterministic, ours, and the peers', side by side in one run.

    python -m benchmarks.step_cost [--net mlp resnet18 transformer unet] [--device cuda] [--captured | --eager]
        [--ranks 0 4 16] [--draws 1 2 8] [--methods "LowRankNormal*" "Pyro*"] [--peers DIR] [--out results.json]

Times are medians of interleaved repeats; `×` is the median over repeats of the ratio to the deterministic step of the
same repeat, run the same way: eager, or captured as a CUDA graph. Peers run eagerly. A `stepper` stands among the eager
rows, for it is called in a loop of the user's own, and is captured on a GPU all the same. Memory is the height of a
step: weights, variational parameters, gradients, state of the optimizer and activations.

The floor of a step with S draws at rank K is S deterministic passes forward and backward, as measured, and ten passes
over the P(K + 2) variational parameters in float32 at the bandwidth of a copy: the draw reads them, the score reads
them, the gradient is written and read, and Adam reads and writes the parameters and two moments.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from statistics import median
from typing import Any

import torch
from torch import Tensor

import structvi as vi
from structvi.optim.adam import make_optimizer
from structvi.train import step as stepping

from . import peers, timing
from .nets import NAMES, Problem, loss, problem
from .peers import LR, N, adam
from .timing import Step

PASSES = 10
DETERMINISTIC, FORWARD_BACKWARD, PAIRS = "deterministic", "forward and backward", "LowRankNormal, a pair"


@dataclass
class Case:
    """One row: how to build its step from a fresh problem."""

    method: str
    build: Callable[[Problem], Step] | None  # None: not installed
    rank: int | None = None
    draws: int = 1
    captured: bool = False
    status: str = "ok"
    weights: int | None = None  # P of a floor, for ours over all weights


def our_step(problem: Problem, recipe: vi.Family, draws: int, captured: bool, pairs: bool = False) -> Step:
    """The step that `fit` takes, with its own Adam; draws independent, or in the mirrored pairs of its default."""
    device = problem.batch[0].device
    bayes = vi.variationalize(problem.net, vi.likelihoods.Categorical(), recipe, num_data=N).to(device)
    optimizer = make_optimizer(bayes, None, LR)
    generator = torch.Generator(device).manual_seed(0)
    coupling, groups = (vi.couplings.paired, draws // 2) if pairs else (vi.couplings.naive, draws)
    made = stepping.Step(
        bayes, optimizer, generator, estimator=vi.Estimator(groups=groups, coupling=coupling), capture=captured
    )
    made([problem.batch])
    if captured and not made.captured:
        raise RuntimeError(made.reason)
    # as the deterministic step is: neither copies a batch in, nor looks at what comes out
    if captured:
        return next(iter(made._graphs.values())).graph.replay
    return lambda: made([problem.batch])


def stepper(problem: Problem, recipe: vi.Family, draws: int) -> Step:
    """`step = bayes.stepper()`, `loss = step(batch)`: captured where it can be, the batch copied in, the loss read."""
    bayes = vi.variationalize(problem.net, vi.likelihoods.Categorical(), recipe, num_data=N).to(problem.batch[0].device)
    step = bayes.stepper(lr=LR, estimator=vi.Estimator(groups=draws, coupling=vi.couplings.naive))
    return lambda: step(problem.batch)


def deterministic_step(problem: Problem, captured: bool) -> Step:
    optimizer = adam(problem.net.parameters(), capturable=captured)

    def step() -> None:
        optimizer.zero_grad()
        loss(problem).backward()
        optimizer.step()

    return timing.capture(step) if captured else step


def forward_backward(problem: Problem, captured: bool) -> Step:
    parameters = list(problem.net.parameters())

    def step() -> Sequence[Tensor]:
        return torch.autograd.grad(loss(problem), parameters)

    return timing.capture(step) if captured else step


def recipes(rank: int) -> dict[str, vi.Family]:
    if rank == 0:
        return {"MeanField": vi.MeanField()}
    return {"LowRankNormal": vi.LowRankNormal(rank), "LowRankPrecision": vi.LowRankPrecision(rank)}


def cases(ranks: Sequence[int], draws: Sequence[int], captured: bool, size: int) -> Iterator[Case]:
    """Deterministic, ours and, where steps run eagerly, the peers'."""
    yield Case(DETERMINISTIC, lambda p: deterministic_step(p, captured), captured=captured)
    yield Case(FORWARD_BACKWARD, lambda p: forward_backward(p, captured), captured=captured)
    for rank in ranks:
        for name, recipe in recipes(rank).items():
            for S in draws:

                def ours(p: Problem, recipe: vi.Family = recipe, S: int = S) -> Step:
                    return our_step(p, recipe, S, captured)

                yield Case(name, ours, rank, S, captured, weights=size)
                if not captured:

                    def by_stepper(p: Problem, recipe: vi.Family = recipe, S: int = S) -> Step:
                        return stepper(p, recipe, S)

                    yield Case(f"{name}, stepper", by_stepper, rank, S)
                if S == 2 and name == "LowRankNormal":

                    def in_pairs(p: Problem, recipe: vi.Family = recipe, S: int = S) -> Step:
                        return our_step(p, recipe, S, captured, pairs=True)

                    yield Case(PAIRS, in_pairs, rank, S, captured, weights=size)
    top = max(ranks)
    head = vi.MeanField() if top == 0 else vi.LowRankNormal(top)
    for S in draws:

        def on_head(p: Problem, S: int = S) -> Step:
            return our_step(p, vi.PerLayer({"backbone.*": vi.MAP(), "head.*": head}), S, captured)

        yield Case("Bayesian head on MAP", on_head, top, S, captured)
    if not captured:
        for peer in (peer for peer in peers.PEERS if peer.rank in (None, *ranks)):
            for S in (S for S in peer.draws if S in draws):

                def theirs(p: Problem, peer: peers.Peer = peer, S: int = S) -> Step:
                    return peer.build(p, S)

                status = "ok" if peer.installed else "not installed"
                yield Case(peer.name, theirs if peer.installed else None, peer.rank, S, status=status)


def prepared(case: Case, name: str, batch: int, device: torch.device) -> timing.Prepared | None:
    """The step, or None with the reason in the case's status."""
    if case.build is None:
        return None
    build = case.build
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what peers say about their own defaults
            return timing.prepare(lambda: build(problem(name, batch, device)), device, case.captured)
    except peers.ERRORS as error:
        case.status = f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        return None


def run(name: str, batch: int, device: torch.device, chosen: Sequence[Case], repeats: int, budget: float) -> list[dict]:
    ready = [(case, prepared(case, name, batch, device)) for case in chosen]
    steps = {i: made.step for i, (_, made) in enumerate(ready) if made is not None}
    times = timing.measure(steps, device, repeats, budget=budget)
    of = {(case.method, case.captured): times[i] for i, (case, _) in enumerate(ready) if i in times}
    rows = []
    for i, (case, made) in enumerate(ready):
        row: dict[str, Any] = {"net": name, "batch": batch, "method": case.method, "rank": case.rank}
        row |= {"draws": case.draws, "mode": "captured" if case.captured else "eager", "status": case.status}
        if made is not None:
            row |= {"seconds": median(times[i]), "least": min(times[i]), "repeats": len(times[i])}
            row |= {"live": made.live, "peak": made.peak}
            row |= timing.ratio(times[i], of[DETERMINISTIC, case.captured])
        row["weights"] = case.weights
        rows.append(row)
    return rows


def add_floors(rows: list[dict], bandwidth: float) -> None:
    """S passes and the traffic of the variational parameters, and how far above it each of our steps is."""
    passes = {row["mode"]: row["seconds"] for row in rows if row["method"] == FORWARD_BACKWARD}
    for row in rows:
        if row["weights"] and "seconds" in row:
            row["floor"] = row["draws"] * passes[row["mode"]] + traffic(row["weights"], row["rank"]) / bandwidth
            row["over_floor"] = row["seconds"] / row["floor"]


def traffic(P: int, K: int) -> int:
    """Bytes of ten passes over P(K + 2) numbers in float32."""
    return PASSES * 4 * P * (K + 2)


def table(rows: Sequence[dict]) -> str:
    header = ["method", "rank", "draws", "run", "ms", "× deterministic", "peak MB", "floor ms", "× floor"]
    lines = []
    for row in rows:
        cells = [row["method"], "–" if row["rank"] is None else str(row["rank"]), str(row["draws"]), row["mode"]]
        if row["status"] == "ok":
            cells += [f"{1e3 * row['seconds']:.3f}", f"{row['ratio']:.2f}", f"{row['peak'] / 1e6:.1f}"]
        else:
            cells += [row["status"].partition(":")[0], "", ""]
        floored = "floor" in row
        cells += [f"{1e3 * row['floor']:.3f}", f"{row['over_floor']:.2f}"] if floored else ["", ""]
        lines.append(cells)
    reasons = [f"{row['method']}: {row['status']}." for row in rows if row["status"].startswith("failed")]
    return "\n\n".join([timing.markdown(lines, header), *reasons])


def main(arguments: Sequence[str] | None = None) -> dict:
    parser = timing.parser(__doc__ or "")
    parser.add_argument("--net", nargs="+", choices=NAMES, default=["mlp", "resnet18", "transformer", "unet"])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 4, 16])
    parser.add_argument("--draws", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--methods", nargs="+", default=["*"], help="patterns of the rows wanted, such as 'Pyro*'")
    parser.add_argument("--seconds", type=float, default=120.0, help="of repeats for one network, at most")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--captured", action="store_true", help="CUDA graphs alone")
    way.add_argument("--eager", action="store_true", help="eager steps alone; both on a GPU if neither is given")
    options = parser.parse_args(arguments)
    device = timing.start(options)
    if options.captured and device.type != "cuda":
        raise ValueError("--captured needs --device cuda: a graph of a step is a CUDA graph")
    if options.quick:
        options.batch, options.ranks, options.draws = min(options.batch, 8), options.ranks[:2], options.draws[:2]
    modes = [False] * (not options.captured) + [True] * (device.type == "cuda" and not options.eager)
    machine = timing.machine(device)
    megabytes, size = (16, 256) if options.quick else (None, None)
    rates = {"bandwidth": timing.bandwidth(device, megabytes), "matmul": timing.matmul_rate(device, size)}
    copied, multiplied = rates["bandwidth"] / 1e9, rates["matmul"] / 1e9
    said = f"a copy reads and writes {copied:.1f} GB/s, a matrix product {multiplied:.0f} Gflop/s"
    parts = [f"{timing.described(machine)}; {said}"]
    print(parts[0], flush=True)
    results: dict[str, Any] = {"machine": machine, "rates": rates, "lr": LR, "num_data": N, "rows": []}
    wanted = [DETERMINISTIC, FORWARD_BACKWARD, *options.methods]
    for name in options.net:
        P = problem(name, 1).size
        rows = []
        for captured in modes:  # one after the other: all steps that are compared are held at once
            every = cases(options.ranks, options.draws, captured, P)
            chosen = [case for case in every if any(fnmatch(case.method, pattern) for pattern in wanted)]
            rows += run(name, options.batch, device, chosen, options.repeats, options.seconds)
            peers.forget()
        add_floors(rows, rates["bandwidth"])
        results["rows"] += rows
        parts.append(f"{name}, P = {P}, batch {options.batch}, {rows[0]['repeats']} repeats\n\n{table(rows)}")
        print(f"\n{parts[-1]}", flush=True)
    parts += [f"{name}: {why}." for name, why in peers.NOT_COMPARED.items()]
    results["load_at_end"] = timing.machine(device)["load"]
    results["table"] = "\n\n".join(parts)
    timing.write(results, options.out)
    return results


if __name__ == "__main__":
    main()
