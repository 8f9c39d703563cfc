"""Rules for weights of what `benchmarks.uci_gaps` kept: by held-out rows at random, by gaps too, and local ones.

    python -m benchmarks.uci_gap_rules folder [--rivals results.json ..] [--rules ..]

For every rule three numbers, in nats: of held-out rows at random (halves of them choose for each other), of a gap that
took no part in the choice (the others did), both on training rows alone; and of the test rows, by all held-out rows.
Means over splits; of gaps and of gap splits' test rows the median. `--rivals`: files of `benchmarks.uci` of the same
splits, for the medians of MC dropout and deep ensembles beside.

- `stacked, random`: one set of weights, by rows at random, as `benchmarks.uci` has it.
- `stacked, both`: one set of weights, by rows at random and gaps, which count the same.
- `local, random`, `local, both`: weights by the disagreement of the members, `vi.LocalMixture`.

Widths of the noise are those of `vi.LocalMixture`; `usual` has 0.7, 1, 1.5 and 3, `spread` every member's draws three
times as far from their mean too.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structvi.predicting.local_mixture import LEAST, WIDTHS, LocalWeights, log_weights

from .uci_gaps import CANDIDATES, NOISES
from .uci_tables import grid

USUAL = (0.7, 1.0, 1.5, 3.0)
RULES = {
    "stacked, random, usual": ("stack", "random", USUAL, 1),
    "stacked, random": ("stack", "random", WIDTHS, 1),
    "stacked, both": ("stack", "both", WIDTHS, 1),
    "stacked, both, spread": ("stack", "both", WIDTHS, 2),
    "local, random": ("local", "random", WIDTHS, 1),
    "local, both": ("local", "both", WIDTHS, 1),
    "local, both, spread": ("local", "both", WIDTHS, 2),
}


@dataclass
class Rows:
    """Some rows: log densities [spreads, noises, n] of every candidate, and the disagreement [n]."""

    densities: list[np.ndarray]
    disagreement: Tensor

    @classmethod
    def read(cls, file: Any, kind: str) -> "Rows":
        own = [{key: file[f"{kind}/{c}/{key}"].astype(np.float64) for key in ("log_density", "mean", "spread", "scale")}
               for c in range(len(CANDIDATES))]  # fmt: skip
        means, spreads = (np.stack([one[key] for one in own]) for key in ("mean", "spread"))
        variance = (spreads**2 + means**2).mean(0) - means.mean(0) ** 2
        noise = np.median([one["scale"] for one in own])
        apart = np.log(np.sqrt(np.maximum(variance, 0)) / noise + LEAST)
        return cls([one["log_density"] for one in own], torch.from_numpy(apart))

    def __len__(self) -> int:
        return len(self.disagreement)

    def part(self, index: Tensor) -> "Rows":
        return Rows([one[..., index.numpy()] for one in self.densities], self.disagreement[index])

    def table(self, widths: Sequence[float], spreads: int) -> Tensor:
        """[parts, n]."""
        places = [NOISES.index(width) for width in widths]
        parts = [one[:spreads][:, places].reshape(-1, one.shape[-1]) for one in self.densities]
        return torch.from_numpy(np.concatenate(parts))


def _stack(log_probs: Tensor, counts: Tensor) -> LocalWeights:
    """One set of weights for all."""
    weights = log_weights(log_probs, counts).exp()
    return LocalWeights(weights, weights, 0.0, 0.0)


def chosen(rule: tuple[str, str, Sequence[float], int], held: dict[str, Rows]) -> Callable[[Rows], float]:
    """By held-out rows of some kinds, rows at random and all gaps counting the same: the log density of other rows."""
    how, kinds, widths, spreads = rule
    used = {name: own for name, own in held.items() if kinds == "both" or name == "random"}
    gaps = sum(len(own) for name, own in used.items() if name != "random")
    scale = len(used["random"]) / max(1, gaps)
    counts = torch.cat([torch.full((len(own),), 1.0 if name == "random" else scale, dtype=torch.float64)
                        for name, own in used.items()])  # fmt: skip
    log_probs = torch.cat([own.table(widths, spreads) for own in used.values()], 1)
    apart = torch.cat([own.disagreement for own in used.values()])
    weights = _stack(log_probs, counts) if how == "stack" else LocalWeights.of(log_probs, apart, counts)

    def density(rows: Rows) -> float:
        each = rows.table(widths, spreads) + weights.at(rows.disagreement).clamp_min(1e-300).log()
        return float(each.logsumexp(0).mean())

    return density


def judged(path: Path, rule: tuple[str, str, Sequence[float], int]) -> tuple[float, float, float]:
    """Of rows at random, of left-out gaps, and of the test rows."""
    with np.load(path) as file:
        kinds = sorted({name.split("/")[0] for name in file.files if "/" in name} - {"test"})
        held, unit = {kind: Rows.read(file, kind) for kind in kinds}, log(float(file["unit"]))
        test = Rows.read(file, "test")
    order = torch.randperm(len(held["random"]), generator=torch.Generator().manual_seed(0))
    halves = [held["random"].part(own) for own in order.tensor_split(2)]
    inside = [chosen(rule, held | {"random": a})(b) for a, b in (halves, halves[::-1])]
    gaps = [kind for kind in kinds if kind != "random"]
    outside = [
        chosen(rule, {kind: own for kind, own in held.items() if kind != gap})(held[gap]) for gap in gaps
    ]  # fmt: skip
    return mean(inside) - unit, median(outside) - unit, chosen(rule, held)(test) - unit


def rivals(paths: Sequence[Path], name: str, splits: Sequence[int]) -> list[list[str]]:
    """Of MC dropout and deep ensembles with normal noise the median over the same splits, where there are all."""
    found = []
    for path in paths:
        methods = json.loads(path.read_text())["sets"].get(name, {"methods": {}})["methods"]
        for title in ("MC dropout, normal", "deep ensemble, normal"):
            own = methods.get(title, {})
            if all(str(split) in own for split in splits):
                values = [own[str(split)]["log_likelihood"] for split in splits]
                found.append([title, "–", "–", f"{median(values):.3f}", f"{mean(values):.3f}"])
    return found


def main(arguments: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rivals", nargs="+", type=Path, default=[])
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tables = []
    by_set: dict[str, list[Path]] = {}
    for path in sorted(options.folder.glob("*-*.npz")):
        if not path.name.endswith(".part.npz"):
            by_set.setdefault(path.name.rsplit("-", 1)[0], []).append(path)
    for name, paths in by_set.items():
        splits = [int(path.stem.rsplit("-", 1)[1]) for path in paths]
        rows = []
        for title in options.rules:
            inside, outside, test = zip(*(judged(path, RULES[title]) for path in paths), strict=True)
            error = f" ± {stdev(test) / len(test) ** 0.5:.3f}" if len(test) > 1 else ""
            rows.append([title, f"{mean(inside):.3f}", f"{median(outside):.3f}", f"{median(test):.3f}",
                         f"{mean(test):.3f}{error}"])  # fmt: skip
        rows += rivals(options.rivals, name.split("-")[0], splits)
        columns = ["at random", "gap left out, median", "test, median", "test, mean"]
        tables.append(grid(f"{name}, {len(paths)} splits", columns, rows))
        print(tables[-1] + "\n", flush=True)
    return "\n\n".join(tables)


if __name__ == "__main__":
    main()
