"""What was tried for `benchmarks.uci`, on held-out parts of training sets alone: priors, λ, rates, families, and rules.

    python -m benchmarks.uci_tried --data DIR [--set boston] [--splits 6] [--noise normal] [--length 1.0] [--rows ..]

Every candidate is fitted to four fifths of each training set and asked for the log density of the last fifth; test sets
are not read. `best` is the candidate with the highest average over splits, with hindsight. For the two rules the fifth
is halved: on one half a candidate is picked, or all are weighed by stacking, and the other half is scored; then the
other way round.
"""

import argparse
from collections.abc import Callable, Sequence
from math import log
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor

import structvi as vi

from . import uci, uci_methods
from .uci_data import SETS, Split, load
from .uci_methods import NOISE, Candidate, Method
from .uci_tables import grid


class Way(NamedTuple):
    """A family, its candidates, and how long and fast it is fitted."""

    family: Callable[[Candidate], vi.Family]
    candidates: Sequence[Candidate]
    steps: int = uci.STEPS
    lr: float = 0.05
    groups: int = 1
    count: int = 2
    is_point: bool = False


def _mean_field(_: Candidate) -> vi.Family:
    return vi.MeanField()


LAMBDAS = (1.0, 0.5, 0.25, 0.1, 0.03)
LEARNED = [Candidate(λ, None) for λ in (1.0, 0.3, 0.1, 0.03)]
HELD = [Candidate(λ, λ**0.5) for λ in LAMBDAS]
UNIT = [Candidate(λ, 1.0) for λ in LAMBDAS[:-1]]
WAYS: dict[str, Way] = {
    "prior scales by ELBO": Way(_mean_field, LEARNED),
    "prior scales by ELBO, learning rate 0.02": Way(_mean_field, LEARNED, lr=0.02),
    "prior variance λ/fan_in": Way(_mean_field, HELD),
    "the same, learning rate 0.02": Way(_mean_field, HELD, lr=0.02),
    "the same, three times the steps": Way(_mean_field, HELD, steps=3 * uci.STEPS),
    "prior variance 1/fan_in": Way(_mean_field, UNIT),
    "the same, precision of rank 5": Way(lambda _: vi.StructuredPrecision(5), UNIT),
    "the same, covariance of rank 5": Way(lambda _: vi.StructuredNormal(5), UNIT),
    "MC dropout": Way(
        lambda one: uci_methods.Dropout(one.rate), [Candidate(1.0, s, r) for s in uci.DROPOUT for r in uci.RATES],
        lr=uci.POINT_LR, groups=2, count=1, is_point=True,
    ),
    "deep ensemble": Way(
        lambda _: vi.MAP(), [Candidate(1.0, s) for s in uci.ENSEMBLE], lr=uci.POINT_LR, count=5, is_point=True
    ),
}  # fmt: skip


def halves(rows: Tensor, seed: int) -> tuple[float, float]:
    """Of log densities [C, n]: what the picked candidate, and what the stacked mixture has on the other half."""
    order = torch.randperm(rows.shape[1], generator=torch.Generator().manual_seed(seed))
    one, two = order.split([rows.shape[1] // 2, rows.shape[1] - rows.shape[1] // 2])
    picked, stacked = [], []
    for a, b in ((one, two), (two, one)):
        picked.append(float(rows[int(rows[:, a].mean(1).argmax())][b].mean()))
        weights = uci_methods.stacking(rows[:, a])
        stacked.append(float((rows[:, b] + weights.log().unsqueeze(-1)).logsumexp(0).mean()))
    return mean(picked), mean(stacked)


def row(
    name: str, found: dict[int, Tensor], errors: Tensor, splits: dict[int, Split], labels: Sequence[str]
) -> list[str]:
    """Best candidate with hindsight, its RMSE, and both rules, on average over splits."""
    each = torch.stack([found[r].mean(1) - log(splits[r].unit) for r in splits]).mean(0)
    best = int(each.argmax())
    rules = [[value - log(splits[r].unit) for value in halves(found[r], r)] for r in splits]
    picked, stacked = (mean(column) for column in zip(*rules, strict=True))
    every = ", ".join(f"{value:.2f}" for value in each)
    return [name, every, labels[best], f"{errors[best]:.3f}", f"{picked:.3f}", f"{stacked:.3f}"]


def tried(splits: dict[int, Split], noise: str, way: Way, length: float) -> tuple[dict[int, Tensor], Tensor]:
    """Held-out log densities [C, n] of each split, and the RMSE of each candidate, on average over splits."""
    steps = max(10, round(length * way.steps))
    method = Method(noise, way.family, steps, way.lr, way.groups, is_point=way.is_point)
    wanted = {(r, one): way.count for r in splits for one in way.candidates}
    got = uci_methods.members(splits, wanted, method, "cpu")
    found = {r: torch.stack([got[r, one].predicted.log_density for one in way.candidates]) for r in splits}
    errors = [[uci_methods.scores(got[r, one].predicted, splits[r])[1] for one in way.candidates] for r in splits]
    return found, torch.tensor(errors).mean(0)


def main(arguments: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with NAME.npz")
    parser.add_argument("--set", choices=SETS, default="boston")
    parser.add_argument("--splits", type=int, default=6, help="so many, from the first on")
    parser.add_argument("--noise", choices=list(NOISE), default="normal")
    parser.add_argument("--length", type=float, default=1.0, help="of all fits: the factor of their steps")
    parser.add_argument("--rows", nargs="+", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args(arguments)
    numbers = list(range(options.splits))
    splits = {r: split.validation() for r, split in load(options.data, options.set, numbers).items()}
    rows: list[list[str]] = []
    ours: dict[int, list[Any]] = {r: [] for r in splits}
    wrong: list[Tensor] = []
    names: list[str] = []
    for name in options.rows:
        way = WAYS[name]
        found, errors = tried(splits, options.noise, way, options.length)
        labels = [f"{one.rate:g}, {one.scale:g}" if one.rate else f"{one.scale:g}" if way.is_point
                  else f"{one.temperature:g}" for one in way.candidates]  # fmt: skip
        rows.append(row(name, found, errors, splits, labels))
        if not way.is_point:
            for r in splits:
                ours[r].append(found[r])
            wrong.append(errors)
            names += labels
        print(" | ".join(rows[-1]), flush=True)
    if len(wrong) > 1:
        every = {r: torch.cat(parts) for r, parts in ours.items()}
        rows.append(row("all of ours", every, torch.cat(wrong), splits, names))
    title = f"{options.set}, {options.noise}, held-out"
    text = grid(title, ["candidates", "best: λ; rate, scale", "its RMSE", "picked", "stacked"], rows)
    print(text)
    return text


if __name__ == "__main__":
    main()
