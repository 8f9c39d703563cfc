"""What everything around the steps of a fit takes: the choice and the verdict at its end, and `diagnose`.

    python -m benchmarks.around_steps [--data DIR] [--sets digits breastmnist nuclei] [--epochs 20] [--repeats 3]
        [--unlimited]

For each set of `benchmarks.networks` the default fit of its network, untrained, and `diagnose` afterwards:
(fit + diagnose) over the sum of the times of the steps themselves. The digits come with scikit-learn, all else from the
folder DIR. One thread; medians over repeats, which take the sets in turn after a short fit of each. With --unlimited
comparison and diagnosis may take as many passes over the data as they can use.
"""

import argparse
import time
from pathlib import Path
from statistics import median

import torch
from torch.utils.data import DataLoader

import structvi as vi

from .networks_nets import TASKS, Task

#: wanted: no more than this
TARGET = 1.3


def measured(task: Task, loader: DataLoader, epochs: int, seed: int, passes: float | None) -> dict[str, float]:
    """Seconds of the steps, of the whole fit and of `diagnose`; and passes of the fit."""
    torch.manual_seed(seed)
    bayes = vi.variationalize(task.net(), vi.likelihoods.Categorical())
    started = time.perf_counter()
    result = bayes.fit(loader, epochs=epochs, restarts=0, stop=False, compare=passes, progress=False, seed=seed)
    fitted = time.perf_counter()
    bayes.diagnose(loader, passes=passes)
    ended = time.perf_counter()
    steps = result.history["seconds"].nansum().item()
    return {"steps": steps, "fit": fitted - started, "diagnose": ended - fitted, "passes": result.passes}


def row(name: str, runs: list[dict[str, float]]) -> str:
    seconds = [median(run[key] for run in runs) for key in ("steps", "fit", "diagnose")]
    ratio = median((run["fit"] + run["diagnose"]) / run["steps"] for run in runs)
    cells = " | ".join(f"{value:.2f}" for value in seconds)
    return f"| {name} | {runs[0]['passes']:.0f} | {cells} | {ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="the folder of the sets that do not come with scikit-learn")
    parser.add_argument("--sets", nargs="+", help="of benchmarks.networks: digits, and with --data breastmnist too")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--unlimited", action="store_true", help="without budgets")
    given = parser.parse_args()
    passes = 1e9 if given.unlimited else None
    torch.set_num_threads(1)
    names = given.sets or (["digits"] if given.data is None else ["digits", "breastmnist"])
    loaders = {
        name: DataLoader(TASKS[name].data(given.data).train, batch_size=TASKS[name].batch, shuffle=True)
        for name in names
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for name in names:  # what the first fit of a process loads is no part of it
        measured(TASKS[name], loaders[name], 1, 0, 1.0)
    for repeat in range(given.repeats):
        for name in names:
            runs[name].append(measured(TASKS[name], loaders[name], given.epochs, repeat, passes))
    print(f"default fit of {given.epochs} epochs, StructuredNormal(8), one thread, medians of {given.repeats}:\n")
    print("| set | passes of the fit | steps, s | fit, s | diagnose, s | (fit + diagnose) / steps |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name in names:
        print(row(name, runs[name]))
    print(f"\nwanted: at most {TARGET}")


if __name__ == "__main__":
    main()
