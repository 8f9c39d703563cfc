"""Two checkouts in one process: steps of an MLP in turn, for a machine that others use too.

    python -m benchmarks.side_by_side FOLDER [--seconds 40] [--threads 1] [--peers DIR]      # the small one, on a CPU
    python -m benchmarks.side_by_side FOLDER --device cuda           # 784-1024-1024-10, eight draws, captured

FOLDER is another checkout, such as `git worktree add ../before main~20`. Its package is loaded under another name, and
each repeat takes one turn of every step: what else the machine does falls on all alike. With one thread seconds are the
processor's. `benchmarks.checkouts` does the same in processes of their own, and may take any network.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from . import peers, timing
from .nets import problem
from .peers import LR, N
from .step_cost import deterministic_step
from .timing import Step

#: name → rank, draws, whether as mirrored pairs
STEPS = {"rank 0": (0, 1, False), "rank 4": (4, 1, False), "rank 4, a pair": (4, 2, True), "rank 16": (16, 1, False)}
#: on a GPU: family, rank
CAPTURED = {
    "mean field": ("MeanField",),
    "rank 4": ("StructuredNormal", 4),
    "rank 16": ("StructuredNormal", 16),
    "precision form, rank 16": ("StructuredPrecision", 16),
}


def package(name: str, checkout: Path) -> Any:
    """The `structvi` of a checkout under a name of its own."""
    folder = checkout / "src/structvi"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not folder.is_dir():
        raise ValueError(f"{checkout} is no checkout: it has no src/structvi")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step_of(vi: Any, batch: int, rank: int, draws: int, pairs: bool) -> Step:
    given = problem("mlp", batch)
    recipe = vi.StructuredNormal(rank) if rank else vi.MeanField()
    bayes = vi.variationalize(given.net, vi.likelihoods.Categorical(), recipe, num_data=N)
    coupling, groups = (vi.paired, draws // 2) if pairs else (vi.naive, draws)
    step = bayes.stepper(lr=LR, groups=groups, coupling=coupling)
    return lambda: step(given.batch)


def captured_step(vi: Any, batch: int, draws: int, device: torch.device, kind: str, *rank: int) -> Step:
    """As in `benchmarks.step_cost`: the graph alone, without a copy of the batch or a look at what comes out."""
    stepping = importlib.import_module(f"{vi.__name__}.training.step")
    optimizers = importlib.import_module(f"{vi.__name__}.training.optimizers")
    given = problem("wide-mlp", batch, device)
    bayes = vi.variationalize(given.net, vi.likelihoods.Categorical(), getattr(vi, kind)(*rank), num_data=N).to(device)
    optimizer = optimizers.make_optimizer(list(bayes.parameters()), None, LR, bayes.family)
    generator = torch.Generator(device).manual_seed(0)
    step = stepping.Step(bayes, optimizer, generator, groups=draws, coupling=vi.naive)
    step([given.batch])
    return step.replay


def made(versions: dict[str, Any], batch: int, draws: int, device: torch.device) -> dict[str, Step]:
    """All steps that are compared, the deterministic one first."""
    if device.type == "cuda":
        steps = {"deterministic": deterministic_step(problem("wide-mlp", batch, device), True)}
        for name, family in CAPTURED.items():
            for when, vi in versions.items():
                steps[f"{name}, {when}"] = captured_step(vi, batch, draws, device, *family)
        return steps
    steps = {"deterministic": deterministic_step(problem("mlp", batch), False)}
    for name, (rank, number, pairs) in STEPS.items():
        for when, vi in versions.items():
            steps[f"{name}, {when}"] = step_of(vi, batch, rank, number, pairs)
    if peers.installed("ivon"):
        steps["IVON"] = peers.ivon(problem("mlp", batch), 1)
    return steps


def main(arguments: Sequence[str] | None = None) -> dict:
    parser = timing.parser(__doc__ or "")
    parser.add_argument("before", type=Path)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--draws", type=int, default=8, help="of steps on a GPU")
    options = parser.parse_args(arguments)
    device = timing.start(options)
    batch = 8 if options.quick else options.batch
    versions = {"before": package("structvi_before", options.before), "now": importlib.import_module("structvi")}
    steps = made(versions, batch, options.draws, device)
    for step in steps.values():
        timing.warm(step)
    times = timing.measure(steps, device, 3 if options.quick else 10**6, budget=options.seconds)
    rows = []
    for name, spent in times.items():
        row = [name, f"{1e3 * median(spent):.3f}", f"{timing.ratio(spent, times['deterministic'])['ratio']:.2f}"]
        before = times.get(name.replace(", now", ", before"), spent)
        row.append(f"{timing.ratio(spent, before)['ratio']:.3f}" if name.endswith("now") else "")
        row.append(f"{timing.ratio(spent, times['IVON'])['ratio']:.3f}" if "IVON" in times else "")
        rows.append(row)
    table = timing.markdown(rows, ["step", "ms", "× deterministic", "× before", "× IVON"])
    results = {"machine": timing.machine(device), "repeats": len(times["deterministic"]), "table": table}
    print(f"{timing.described(results['machine'])}; {results['repeats']} repeats\n\n{table}")
    timing.write(results, options.out)
    return results


if __name__ == "__main__":
    main()
