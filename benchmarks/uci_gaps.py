"""What every candidate of `benchmarks.uci` predicts of held-out rows, gaps made inside the training set among them.

    python -m benchmarks.uci_gaps --data DIR --sets yacht --gap --out folder        # one file for each split

Of each split: `random`, a fifth of the training rows, and `gap 0`, `gap 1`, ..: the middle third of the training rows
along one input, as gap splits leave out of all rows. Every candidate (those of `benchmarks.uci`: mean field at several
λ, networks of ensembles, MC dropout) is fitted without each of these and then to the whole training set. Kept are log
densities of every held-out row and test row, at several widths of the noise. `benchmarks.uci_gap_rules` weighs them.
"""

import argparse
import time
from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import structvi as vi
from structvi.training.fit_many import fit_many

from . import uci, uci_methods
from .uci_data import SETS, Split, load
from .uci_methods import Candidate, Dropout, Job, Method, started, template

#: factors of the noise
NOISES = (0.7, 1.0, 1.5, 3.0, 10.0, 30.0)
#: members of each candidate in the end, and of those that are networks of an ensemble
LAST, NETWORKS = 2, 5
#: prior scales and drop rates of MC dropout: half of those that `benchmarks.uci` tries
DROPOUT = ((1.0, 0.01), (4.0, 0.01), (4.0, 0.05), (4.0, 0.1))
#: held-out rows of one kind, at most
MOST = 700
CANDIDATES = [
    *(Candidate(λ, None) for λ in uci.LEARNED),
    *(Candidate(λ, s * λ**0.5) for λ, s in uci.DECAYED),
    *(Candidate(0.0, s) for s in uci.LIMIT),
    *(Candidate(1.0, s, rate) for s, rate in DROPOUT),
]


def gaps(split: Split, count: int, seed: int) -> list[Split]:
    """Without the middle third along one input each, which is what is held out; inputs that are constant are none."""
    generator = torch.Generator().manual_seed(seed)
    N, D = split.x.shape
    found = []
    for d in torch.randperm(D, generator=generator).tolist():
        if float(split.x[:, d].std()) < 1e-6:
            continue
        mixed = torch.randperm(N, generator=generator)  # ties in no order
        order = mixed[split.x[mixed, d].argsort(stable=True)]
        held = order[N // 3 : 2 * N // 3]
        rest = torch.cat([order[: N // 3], order[2 * N // 3 :]])
        held = held[torch.randperm(len(held), generator=generator)]
        found.append(Split(split.x[rest], split.t[rest], split.x[held], split.t[held], split.unit))
        if len(found) == count:
            break
    return found


@torch.no_grad()
def predicted(bayes: vi.Posterior, split: Split, draws: int, most: int | None) -> dict[str, Any]:
    """log density [noises, n], mean and spread of the network's outputs [n]."""
    x, t = split.x_test[:most], split.t_test[:most].view(-1).double()
    components: Any = bayes.predict(x[:2], 2, generator=torch.Generator().manual_seed(7)).components
    scale = float(components.scale.mean())
    named = bayes.space.unravel(bayes.family().draw(draws, vi.naive, torch.Generator().manual_seed(7)).theta)
    hidden = torch.relu(torch.einsum("nd,shd->snh", x, named["0.weight"]) + named["0.bias"].unsqueeze(1))
    outputs = torch.einsum("snh,soh->sn", hidden, named["2.weight"]).double() + named["2.bias"].double()
    gap = (outputs - t).square()
    every = torch.stack([_mixture(gap, factor * scale) for factor in NOISES])
    every = every.nan_to_num(nan=uci_methods.LOST).clamp(min=uci_methods.LOST)
    return {
        "log_density": every.numpy().astype(np.float16 if len(t) > 300 else np.float32),
        "mean": outputs.mean(0).numpy().astype(np.float32),
        "spread": outputs.std(0, correction=0).numpy().astype(np.float32),
        "scale": np.float32(scale),
    }


def _mixture(gap: Tensor, scale: float) -> Tensor:
    """log of the mean over draws of N(gap | 0, scale²): [S, n] → [n]."""
    return (-0.5 * gap / scale**2).logsumexp(0) - log(len(gap)) - log(scale) - 0.5 * log(2 * np.pi)


def method_of(one: Candidate, steps: int) -> Method:
    """How a candidate is fitted."""
    if one.rate:
        return Method("normal", lambda own: Dropout(own.rate), steps, uci.POINT_LR, is_point=True)
    return Method("normal", lambda _: vi.MeanField(), steps, uci.LR)


def last(one: Candidate) -> int:
    """Its members in the end."""
    return NETWORKS if one.temperature == 0 else LAST


def collect(split: Split, number: int, count: int, length: float) -> dict[str, Any]:
    """Everything of one split, as arrays by name."""
    folds = {"random": split.validation()} | {f"gap {k}": one for k, one in enumerate(gaps(split, count, number))}
    N = len(split.t)
    steps = max(10, round(length * (uci.STEPS if N <= uci_methods.FULL_BATCH else uci.MANY_STEPS)))
    ways = {one: method_of(one, steps) for one in CANDIDATES}
    found: dict[str, Any] = {"unit": split.unit, "test target": split.t_test.view(-1).numpy()}
    for name, own in {**folds, "test": split}.items():
        jobs = [Job(number, one, m) for one in CANDIDATES for m in range(last(one) if name == "test" else 1)]
        seeds = [100 * number + job.member for job in jobs]
        known = {one: template(split.x.shape[1], ways[one], one) for one in CANDIDATES}
        posteriors = [started(known[job.candidate], seed) for job, seed in zip(jobs, seeds, strict=True)]
        fit_many(
            posteriors, [uci_methods._loader(own)] * len(jobs), seeds=seeds,
            each={"temperature": [ways[job.candidate].temperature(job.candidate) for job in jobs]}, steps=steps,
            lr=uci.LR, groups=1, kl_warmup=0.1, restarts=0, stop=False, progress=False,
        )  # fmt: skip
        if name != "test":
            found[f"{name} target"] = own.t_test.view(-1).numpy()[:MOST]
        for c, one in enumerate(CANDIDATES):
            draws = uci_methods.DRAWS if one.temperature else 1
            parts = [
                predicted(bayes, own, draws, None if name == "test" else MOST)
                for job, bayes in zip(jobs, posteriors, strict=True) if job.candidate == one
            ]  # fmt: skip
            found |= {f"{name}/{c}/{key}": value for key, value in equal(parts).items()}
            found[f"{name}/{c}/first"] = parts[0]["log_density"][NOISES.index(1.0)]
    return found


def equal(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The equal mixture of some members."""
    means = np.stack([part["mean"] for part in parts])
    squares = np.stack([part["spread"] for part in parts]) ** 2 + means**2
    densities = torch.stack([torch.from_numpy(part["log_density"]) for part in parts]).float()
    mixture = (densities.logsumexp(0) - log(len(parts))).numpy()
    return {
        "log_density": mixture.astype(parts[0]["log_density"].dtype),
        "mean": means.mean(0),
        "spread": np.sqrt(np.maximum(squares.mean(0) - means.mean(0) ** 2, 0)),
        "scale": np.float32(np.mean([part["scale"] for part in parts])),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with NAME.npz")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--splits", nargs="+", type=int, help="all by default")
    parser.add_argument("--gap", action="store_true", help="the gap splits")
    parser.add_argument("--gaps", type=int, default=2, help="gaps made inside each training set")
    parser.add_argument("--length", type=float, default=1.0, help="of all fits: the factor of their steps")
    parser.add_argument("--out", type=Path, required=True, help="a folder; what is there is not made again")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.sets:
        for number, split in load(options.data, name, options.splits, options.gap).items():
            path = options.out / f"{name}-{'gap' if options.gap else 'standard'}-{number}.npz"
            if path.exists():
                continue
            began = time.monotonic()
            found = collect(split, number, options.gaps, options.length)
            np.savez_compressed(path.with_suffix(".part.npz"), **found)
            path.with_suffix(".part.npz").replace(path)
            print(f"{path.name} {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
