"""What was tried for `benchmarks.uci`, on held-out parts of training sets alone: priors, λ, rates, families, and rules.

    python -m benchmarks.uci_tried --data DIR [--set boston] [--splits 6] [--noise normal] [--length 1.0] [--rows ..]

Every candidate is fitted to four fifths of each training set and asked for the log density of the last fifth; test sets
are not read. `best` is the candidate with the highest average over splits, with hindsight. For the two rules the fifth
is halved: on one half a candidate is picked, or all are weighed by stacking, and the other half is scored; then the
other way round. `with widths` stacks every candidate with its noise as learned, and 0.7, 1.5 and 3 times as wide.
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
    """A family, its candidates, and how fast and how many times as long as in `benchmarks.uci` it is fitted."""

    family: Callable[[Candidate], vi.Family]
    candidates: Sequence[Candidate]
    longer: float = 1.0
    lr: float = 0.05
    groups: int = 1
    count: int = 2
    is_point: bool = False


def _mean_field(_: Candidate) -> vi.Family:
    return vi.MeanField()


def _network(_: Candidate) -> vi.Family:
    return vi.MAP()


LAMBDAS = (1.0, 0.5, 0.25, 0.1, 0.03)
LEARNED = [Candidate(λ, None) for λ in (1.0, 0.3, 0.1, 0.03)]
HELD = [Candidate(λ, λ**0.5) for λ in LAMBDAS]
UNIT = [Candidate(λ, 1.0) for λ in LAMBDAS[:-1]]
NETWORKS = [Candidate(1.0, s) for s in uci.ENSEMBLE]
WAYS: dict[str, Way] = {
    "prior scales by ELBO": Way(_mean_field, LEARNED),
    "prior scales by ELBO, learning rate 0.02": Way(_mean_field, LEARNED, lr=0.02),
    "prior variance λ/fan_in": Way(_mean_field, HELD),
    "the same, learning rate 0.02": Way(_mean_field, HELD, lr=0.02),
    "the same, three times the steps": Way(_mean_field, HELD, longer=3.0),
    "prior variance 1/fan_in": Way(_mean_field, UNIT),
    "the same, precision of rank 5": Way(lambda _: vi.StructuredPrecision(5), UNIT),
    "the same, covariance of rank 5": Way(lambda _: vi.StructuredNormal(5), UNIT),
    "MC dropout": Way(
        lambda one: uci_methods.Dropout(one.rate), [Candidate(1.0, s, r) for s in uci.DROPOUT for r in uci.RATES],
        lr=uci.POINT_LR, groups=2, count=1, is_point=True,
    ),
    "deep ensemble": Way(_network, NETWORKS, lr=uci.POINT_LR, count=5, is_point=True),
    "deep ensemble of two": Way(_network, NETWORKS, lr=uci.POINT_LR, is_point=True),
    "deep ensemble, three times the steps": Way(_network, NETWORKS, 3.0, uci.POINT_LR, count=5, is_point=True),
    "deep ensemble, learning rate 0.05": Way(_network, NETWORKS, lr=0.05, count=5, is_point=True),
    "candidates of ours, prior scales by ELBO": Way(
        _mean_field, [Candidate(λ, None) for λ in uci.LEARNED], lr=uci.LR
    ),
    "the same, three times the steps, decay": Way(_mean_field, [Candidate(λ, None) for λ in uci.LEARNED], 3.0, uci.LR),
    "the same, five members": Way(_mean_field, [Candidate(λ, None) for λ in uci.LEARNED], lr=uci.LR, count=5),
    "prior variance 16 λ/fan_in": Way(_mean_field, [Candidate(λ, 4 * λ**0.5) for λ in (0.5, 0.1, 0.01)], lr=uci.LR),
    "the same, two pairs of draws": Way(
        _mean_field, [Candidate(λ, 4 * λ**0.5) for λ in (0.5, 0.1, 0.01)], lr=uci.LR, groups=2
    ),
}  # fmt: skip


def halves(every: Tensor, seed: int) -> tuple[float, float, float]:
    """Of log densities [C, F, n]: what the picked candidate has on the other half, and what stacked mixtures have, with
    the noise as learned and at every width."""
    n, rows = every.shape[-1], every[:, 0]
    one, two = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).split([n // 2, n - n // 2])
    picked, stacked, widths = [], [], []
    for a, b in ((one, two), (two, one)):
        picked.append(float(rows[int(rows[:, a].mean(1).argmax())][b].mean()))
        for values, found in ((rows, stacked), (every.flatten(0, 1), widths)):
            weights = uci_methods.stacking(values[:, a])
            found.append(float((values[:, b] + weights.log().unsqueeze(-1)).logsumexp(0).mean()))
    return mean(picked), mean(stacked), mean(widths)


def row(
    name: str, found: dict[int, Tensor], errors: Tensor, splits: dict[int, Split], labels: Sequence[str]
) -> list[str]:
    """Best candidate with hindsight, its RMSE, and both rules, on average over splits."""
    each = torch.stack([found[r][:, 0].mean(1) - log(splits[r].unit) for r in splits]).mean(0)
    best = int(each.argmax())
    rules = [[value - log(splits[r].unit) for value in halves(found[r], r)] for r in splits]
    chosen = [f"{mean(column):.3f}" for column in zip(*rules, strict=True)]
    every = ", ".join(f"{value:.2f}" for value in each)
    return [name, every, labels[best], f"{errors[best]:.3g}", *chosen]


def tried(splits: dict[int, Split], noise: str, way: Way, length: float) -> tuple[dict[int, Tensor], Tensor]:
    """Held-out log densities [C, F, n] of each split, and the RMSE of each candidate, on average over splits."""
    N = len(next(iter(splits.values())).t)
    usual = uci.STEPS if N <= uci_methods.FULL_BATCH else uci.MANY_STEPS
    steps = max(10, round(length * way.longer * usual))
    method = Method(noise, way.family, steps, way.lr, way.groups, is_point=way.is_point)
    wanted = {(r, one): way.count for r in splits for one in way.candidates}
    got = uci_methods.members(splits, wanted, method, "cpu")
    found = {r: torch.stack([got[r, one].predicted.every for one in way.candidates]) for r in splits}
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
    text = grid(title, ["candidates", "best: λ; rate, scale", "its RMSE", "picked", "stacked", "with widths"], rows)
    print(text)
    return text


if __name__ == "__main__":
    main()
