"""Rules for weights of what `benchmarks.uci_gaps` kept: by held-out rows at random, by gaps too, and local ones.

    python -m benchmarks.uci_gap_rules folder [--rules ..]

For every rule three numbers, in nats: of held-out rows at random (halves of them choose for each other), of a gap that
took no part in the choice (the others did), both on training rows alone; and of the test rows, by all held-out rows.
Means over splits; of gaps and of gap splits' test rows the median. Beside them MC dropout and a deep ensemble of five:
the candidate that rows at random prefer, with noise as learned, of four and of three (`benchmarks.uci` has more).

- `stacked, random`: one set of weights, by rows at random, as `benchmarks.uci` has it.
- `stacked, both`: one set of weights, by rows at random and gaps, which count the same.
- `stacked, gaps`: by gaps alone.
- `local, random`, `local, both`: weights by the disagreement of the members, `vi.LocalMixture`.
- `averaged, both`: half of `stacked, both` and half of `local, both`, where parts share 0.3 observations, not 3.
- `chosen`: `stacked, both` or `local, both`, whichever the first two numbers prefer on this split.

Widths of the noise are those of `vi.LocalMixture`; `usual` has 0.7, 1, 1.5 and 3. `without dropout`: of mean field and
networks alone.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log, nan
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structvi.predicting.local_mixture import EQUAL_ROWS, LEAST, WIDTHS, LocalWeights, log_weights

from .uci_gaps import CANDIDATES, NOISES
from .uci_tables import grid

USUAL = (0.7, 1.0, 1.5, 3.0)
#: how, by which held-out rows, at which widths of the noise, and whether MC dropout is among the candidates
Rule = tuple[str, str, Sequence[float], bool]
RULES: dict[str, Rule] = {
    "stacked, random, usual, without dropout": ("stack", "random", USUAL, False),
    "stacked, both, without dropout": ("stack", "both", WIDTHS, False),
    "local, both, without dropout": ("local", "both", WIDTHS, False),
    "stacked, random": ("stack", "random", WIDTHS, True),
    "stacked, gaps": ("stack", "gaps", WIDTHS, True),
    "stacked, both": ("stack", "both", WIDTHS, True),
    "local, random": ("local", "random", WIDTHS, True),
    "local, both": ("local", "both", WIDTHS, True),
    "averaged, both": ("average", "both", WIDTHS, True),
}
#: observations that all parts share, of the averaged rule
FEW = 0.3
CHOSEN = "stacked, both", "local, both"


@dataclass
class Rows:
    """Some rows: log densities [noises, n] of every candidate, and the disagreement [n]."""

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

    def table(self, widths: Sequence[float], dropout: bool) -> Tensor:
        """[parts, n]."""
        places = [NOISES.index(width) for width in widths]
        used = [own[places] for one, own in zip(CANDIDATES, self.densities, strict=True) if dropout or not one.rate]
        return torch.from_numpy(np.concatenate(used))


def _stack(log_probs: Tensor, counts: Tensor, equal_rows: float) -> LocalWeights:
    """One set of weights for all."""
    weights = log_weights(log_probs, counts, equal_rows).exp()
    return LocalWeights(weights, weights, 0.0, 0.0)


def weighed(rule: Rule, held: dict[str, Rows]) -> Callable[[Rows], float]:
    """By held-out rows of some kinds, rows at random and all gaps counting the same: the log density of other rows."""
    how, kinds, widths, dropout = rule
    used = {name: own for name, own in held.items() if kinds == "both" or (name == "random") == (kinds == "random")}
    gaps = sum(len(own) for name, own in used.items() if name != "random")
    scale = len(held["random"]) / max(1, gaps)
    counts = torch.cat([torch.full((len(own),), 1.0 if name == "random" else scale, dtype=torch.float64)
                        for name, own in used.items()])  # fmt: skip
    log_probs = torch.cat([own.table(widths, dropout) for own in used.values()], 1)
    apart = torch.cat([own.disagreement for own in used.values()])
    shared = FEW if how == "average" else EQUAL_ROWS
    found = [_stack(log_probs, counts, shared)] if how != "local" else []
    found += [LocalWeights.of(log_probs, apart, counts, shared)] if how != "stack" else []

    def density(rows: Rows) -> float:
        weights = torch.stack([one.at(rows.disagreement) for one in found]).mean(0)
        return float((rows.table(widths, dropout) + weights.clamp_min(1e-300).log()).logsumexp(0).mean())

    return density


Judged = dict[str, tuple[float, float, float]]


def judged(path: Path, rules: Sequence[str]) -> Judged:
    """Of every rule: of rows at random, of left-out gaps, and of the test rows; and of the rivals."""
    with np.load(path) as file:
        kinds = sorted({name.split("/")[0] for name in file.files if "/" in name} - {"test"})
        held, unit = {kind: Rows.read(file, kind) for kind in kinds}, log(float(file["unit"]))
        test, found = Rows.read(file, "test"), rivals(file, unit)
    order = torch.randperm(len(held["random"]), generator=torch.Generator().manual_seed(0))
    halves = [held["random"].part(own) for own in order.tensor_split(2)]
    gaps = [kind for kind in kinds if kind != "random"]
    for title in rules:
        rule = RULES[title]
        inside = [weighed(rule, held | {"random": a})(b) for a, b in (halves, halves[::-1])]
        outside = [
            weighed(rule, {kind: own for kind, own in held.items() if kind != gap})(held[gap]) for gap in gaps
        ] if len(gaps) > 1 else [nan]  # fmt: skip
        found[title] = mean(inside) - unit, mean(outside) - unit, weighed(rule, held)(test) - unit
    if all(title in found for title in CHOSEN):
        found["chosen"] = max((found[title] for title in CHOSEN), key=lambda own: own[0] + own[1])
    return found


def rivals(file: Any, unit: float) -> Judged:
    """MC dropout and five networks: which one, by rows at random; noise as learned."""
    found: Judged = {}
    at = NOISES.index(1.0)
    for title, own in (
        ("MC dropout", [c for c, one in enumerate(CANDIDATES) if one.rate]),
        ("deep ensemble", [c for c, one in enumerate(CANDIDATES) if one.temperature == 0]),
    ):
        if not own:
            continue
        values = {c: float(file[f"random/{c}/log_density"][at].astype(float).mean()) for c in own}
        best = max(own, key=lambda c: values[c])
        name = f"test/{best}/first" if CANDIDATES[best].rate else f"test/{best}/log_density"
        density = file[name] if CANDIDATES[best].rate else file[name][at]
        found[title] = values[best] - unit, nan, float(density.astype(float).mean()) - unit
    return found


def main(arguments: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tables = []
    by_set: dict[str, list[Path]] = {}
    for path in sorted(options.folder.glob("*-*.npz")):
        if not path.name.endswith(".part.npz"):
            by_set.setdefault(path.name.rsplit("-", 1)[0], []).append(path)
    for name, paths in by_set.items():
        every = [judged(path, options.rules) for path in paths]
        rows = []
        for title in every[0]:
            inside, outside, test = zip(*(one[title] for one in every), strict=True)
            error = f" ± {stdev(test) / len(test) ** 0.5:.3f}" if len(test) > 1 else ""
            rows.append([title, f"{mean(inside):.3f}", f"{median(outside):.3f}", f"{median(test):.3f}",
                         f"{mean(test):.3f}{error}"])  # fmt: skip
        columns = ["at random", "gap left out, median", "test, median", "test, mean"]
        tables.append(grid(f"{name}, {len(paths)} splits", columns, rows))
        print(tables[-1] + "\n", flush=True)
    return "\n\n".join(tables)


if __name__ == "__main__":
    main()
