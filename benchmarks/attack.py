"""Fits killed on purpose: do they go on, bit for bit, without a hand?

    python -m benchmarks.attack [--kills 40] [--seed 0]

Each fit runs in a process of its own and is killed by SIGKILL, at a random moment or at a stage of the writing of a
checkpoint (before and after the bytes, the flush, the rename, the folder's flush, the removal of old files). It is then
resumed as the documentation says, `checkpoint=folder, resume=folder`, killed again half of the time, and in the end
compared with a fit that was never stopped: parameters and history, bit for bit. Two to three minutes on two cores.
"""

import argparse
import multiprocessing
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.files import file

STEPS, EVERY = 60, 4
STAGES = ("_write_bytes", "_fsync", "_rename", "_fsync_directory")
CASES = {
    "structured": (lambda: vi.LowRankNormal(3), {}),
    "mixture": (lambda: vi.Mixture(vi.LowRankPrecision(2), 2), {}),
    "accumulated": (lambda: vi.LowRankPrecision(2), {"accumulate": 3, "estimator": vi.Estimator(groups=2)}),
    "blocks and noise": (lambda: vi.PerLayer({"0.*": vi.MAP(), "*": vi.FullNormal()}), {}),
}


def fit(case: str, folder: Path | None, callback=None) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    recipe, options = CASES[case]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(50, 3, generator=generator)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    bayes = vi.variationalize(net, vi.likelihoods.Gaussian("random"), recipe(), dropout="on", generator=generator)
    keep = {} if folder is None else {"checkpoint": vi.Checkpoint(folder, every=EVERY, resume=True)}
    result = bayes.fit(loader, steps=STEPS, progress=False, callback=callback, **options, **keep)
    history = result.history.to_tensor()[:, :-1].nan_to_num(-1.0)  # but for seconds
    return {**{name: x.detach().clone() for name, x in bayes.learned().items()}, "history": history}


def child(case: str, folder: Path, stage: tuple[str, str, int] | None) -> None:
    """A fit that kills itself at a stage, or waits to be killed."""
    if stage is not None:
        name, when, count = stage
        real, calls = getattr(file, name), []

        def dying(*arguments):
            calls.append(None)
            if len(calls) == count and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            real(*arguments)
            if len(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(file, name, dying)
    torch.save(fit(case, folder), folder / "state.pt")


def run(case: str, folder: Path, stage: tuple[str, str, int] | None, after: float | None) -> bool:
    """Whether it came to its end."""
    process = multiprocessing.get_context("fork").Process(target=child, args=(case, folder, stage))
    process.start()
    if after is not None:
        time.sleep(after)
        process.kill()
    process.join()
    return process.exitcode == 0


def attack(case: str, expected: dict[str, torch.Tensor], kills: list[tuple]) -> tuple[int, bool]:
    """Kills that struck, and whether what came out in the end is right."""
    struck = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for stage, after in [*kills, (None, None)]:
            if run(case, folder, stage, after):
                break
            struck += 1
        state = torch.load(folder / "state.pt")
        left = [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]
    same = state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in expected)
    return struck, same and not left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40, help="fits killed at random moments")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    torch.set_num_threads(1)
    table: dict[str, list[int]] = {}
    for index, case in enumerate(CASES):
        expected = fit(case, None)
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            fit(case, Path(folder))
            length = time.monotonic() - began
        for _ in range(given.kills // len(CASES) + (index < given.kills % len(CASES))):
            moments = [(None, rng.uniform(0.0, 1.2 * length)) for _ in range(rng.choice([1, 1, 2, 3]))]
            _count(table, f"{case}, at random moments", attack(case, expected, moments))
        for stage in STAGES:
            for when in ("before", "after"):
                at = (stage, when, rng.randint(1, STEPS // EVERY))
                _count(table, f"{case}, {when} {stage.strip('_')}", attack(case, expected, [(at, None)]))
    print(f"{'attack':<46}{'fits':>6}{'kills':>7}{'right':>7}")
    for name, (fits, kills, right) in table.items():
        print(f"{name:<46}{fits:>6}{kills:>7}{right:>7}")
    total = [sum(column) for column in zip(*table.values(), strict=True)]
    print(f"{'all':<46}{total[0]:>6}{total[1]:>7}{total[2]:>7}")


def _count(table: dict[str, list[int]], name: str, outcome: tuple[int, bool]) -> None:
    row = table.setdefault(name, [0, 0, 0])
    for i, value in enumerate((1, *outcome)):
        row[i] += int(value)


if __name__ == "__main__":
    main()
