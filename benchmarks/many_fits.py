"""Many fits at once against one after another, side by side in one run: the ratio, and whether they are the same.

    python -m benchmarks.many_fits [--fits 100] [--steps 500] [--single 4] [--rank 0] [--device cuda] [--threads 2]

Each fit is of a network of 50 hidden units to 300 rows of its own, batch 32, one antithetic pair a step. Fits at once
and single ones take turns, a block of steps each, so that both see the same machine; what is timed is the whole of
`fit`, its preparation and the comparison at its end with it. Of the single fits so many are made and timed as
`--single` says, and their time is taken for all. After 50 steps in float64 parameters are compared.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

INPUTS, HIDDEN, ROWS, BATCH = 8, 50, 300, 32


def posteriors(count: int, rank: int, device: str, kind: torch.dtype) -> list[vi.Posterior]:
    made = []
    for seed in range(count):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)).to(kind)
        family = vi.LowRankPrecision(rank) if rank else vi.MeanField()
        one = vi.variationalize(
            net, vi.likelihoods.Gaussian("point").to(kind), family, vi.priors.NormalPrior(1.0, by_fan_in=True)
        )
        made.append(one.to(device))
    return made


def loaders(count: int, kind: torch.dtype) -> list[DataLoader]:
    made = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(ROWS, INPUTS, generator=generator, dtype=kind)
        t = x[:, :1].sin() + 0.1 * torch.randn(ROWS, 1, generator=generator, dtype=kind)
        made.append(DataLoader(TensorDataset(x, t), batch_size=BATCH, shuffle=True))
    return made


def seconds(work) -> float:
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def ratio(options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of all at once, and of all one after another, medians over turns."""
    kind, count = torch.float32, options.fits
    data = loaders(count, kind)
    given = {"steps": options.steps, "progress": False, "schedule": vi.Schedule(stop=False)}
    together, alone = [], []
    for turn in range(options.turns):
        many = posteriors(count, options.rank, options.device, kind)
        ones = posteriors(options.single, options.rank, options.device, kind)
        for m, one in enumerate(ones[: options.single // 2]):
            alone.append(seconds(lambda one=one, m=m: one.fit(data[m], seed=m, **given)))
        together.append(seconds(lambda many=many: vi.fit_many(many, data, **given)))
        steps = sum(many[0].last_fit.history["seconds"].tolist())  # pyright: ignore
        for m, one in enumerate(ones[options.single // 2 :]):
            alone.append(seconds(lambda one=one, m=m: one.fit(data[m], seed=m, **given)))
        took = f"at once {together[-1]:.2f} s, of which steps {steps:.2f} s, one {median(alone):.3f} s"
        print(f"turn {turn}: {took}", flush=True)
    return median(together), count * median(alone)


def difference(options: argparse.Namespace, steps: int = 50) -> float:
    """The largest difference of what the first fits learn, at once and alone, in float64."""
    kind, count = torch.float64, min(8, options.fits)
    data = loaders(count, kind)
    given = {"steps": steps, "progress": False}
    a, b = (posteriors(count, options.rank, options.device, kind) for _ in range(2))
    vi.fit_many(a, data, **given)
    for m, one in enumerate(b):
        one.fit(data[m], seed=m, **given)
    return max(
        float((x.detach() - y.detach()).abs().max())
        for one, other in zip(a, b, strict=True)
        for x, y in zip(one.learned().values(), other.learned().values(), strict=True)
    )


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fits", type=int, default=100)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--single", type=int, default=4, help="single fits of each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rank", type=int, default=0, help="0 for mean field, else of the precision form")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    at_once, alone = ratio(options)
    print(
        f"{options.fits} fits of {options.steps} steps on {options.device}: at once {at_once:.2f} s, one after another "
        f"{alone:.2f} s, ratio {alone / at_once:.1f}; largest difference after 50 steps {difference(options):.1e}"
    )
    return alone / at_once


if __name__ == "__main__":
    main()
