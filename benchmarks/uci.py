"""UCI regression with a network of one hidden layer: test log-likelihood and RMSE of posteriors and their rivals.

    python -m benchmarks.uci --data DIR [--sets yacht energy] [--splits 0 1 2] [--noise normal] [--gap] [--device cuda]
                             [--length 1.0] [--methods stacked ..] [--chunk 5] [--out results.json]
    python -m benchmarks.uci --merge a.json b.json [--data DIR]          # the tables of earlier runs

DIR holds NAME.npz (X, y and the test rows of each split) and, for the rows "published", published.md. The network has
50 rectified units; inputs and targets are standardised on the training part. Fits of one form, over splits, members and
λ, are one call of `vi.fit_many`. Nothing is chosen on test data; `held-out` is a fifth of each training set, left out
of a first fit of every candidate; what is chosen is then fitted again to the whole training set.

- `mean field`: λ = 1, the prior's scales (one for each tensor) by the ELBO; one fit, and the equal mixture of five.
- `stacked`: ours. Candidates: λ = 1, 0.3, 0.03, 0.003, prior scales by the ELBO; λ = 0.1 with the prior's variance
  λ/fan_in (λ KL then pulls means as weight decay does, at any λ), λ = 0.25 with 4 λ/fan_in; and λ → 0 at
  s² λ/fan_in, s = 1, 4 and 8, which are networks of an ensemble. Each with its noise as learned, and 0.7, 1.5
  and 3 times as wide, and each an equal mixture of members: one when it is tried, in the end of ten in all as many as
  it weighs. The weights are those with the highest held-out log density (stacking). `validated` is the one best
  candidate instead.
- `precision 5`: rank 5, λ = 1, five members, prior scales by the ELBO.
- `deep ensemble`: five networks; their prior scale, 0.5, 1, 4 or 8 times 1/√fan_in, by the held-out log density. `x10`:
  as many networks as ours has.
- `MC dropout`: masks on inputs and hidden units; drop rate of 0.005, 0.01, 0.05, 0.1 and prior scale 1 or 4 likewise.
- `.., scaled`: of the candidates at all four widths of the noise the best, likewise.
- `deep ensemble, stacked`, `MC dropout, stacked`: weights as ours has them, for the rivals' candidates.

Each with three kinds of noise: normal, Student-t (degrees of freedom learned), heteroscedastic (a second output). The
noise too is chosen split by split: by ELBO (`ours, by ELBO`, among posteriors at λ = 1) or by the held-out log density.

The file of `--out` is written after every method of every `--chunk` of splits; what it has already is not made again,
so a run that was ended goes on where it was.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import structvi as vi

from . import uci_methods as methods
from .uci_data import SETS, Split, load
from .uci_methods import MEMBERS, NOISE, Candidate, Method
from .uci_tables import report

#: steps of every fit, where a step has all of the data, and where it has a minibatch
STEPS, MANY_STEPS = 1000, 1500
LR, POINT_LR = 0.02, 0.02
#: members: of ours and of a stacked ensemble in the end, shared out to its parts by their weights; of an ensemble when
#: it is tried
SHARED, TRIED = 10, 2
#: λ of candidates with prior scales by the ELBO; λ and s of those with the prior's variance λs²/fan_in; s of λ → 0
LEARNED, DECAYED, LIMIT = (1.0, 0.3, 0.03, 0.003), ((0.1, 1.0), (0.25, 2.0)), (1.0, 4.0, 8.0)
#: prior scales of networks and of MC dropout in units of 1/√fan_in, and drop rates
ENSEMBLE, DROPOUT, RATES = (0.5, 1.0, 4.0, 8.0), (1.0, 4.0), (0.005, 0.01, 0.05, 0.1)
#: candidates of ours that weigh less are left out
LEAST = 0.004
METHODS = ("stacked", "ensemble", "dropout", "mean field", "precision")
Keep = Callable[[str, int, dict[str, Any]], None]


class Choice(NamedTuple):
    """What held-out data say of some candidates."""

    #: the candidate with the highest log density, and that
    first: int
    value: float
    #: the same among candidates at all widths of their noise: which, at which width
    scaled: int
    factor: int
    scaled_value: float
    #: by stacking, of each candidate and width
    weights: Tensor
    stacked_value: float

    @classmethod
    def of(cls, held: Sequence[methods.Predicted]) -> "Choice":
        rows = torch.stack([one.every for one in held])  # [C, F, n]
        C, F, _ = rows.shape
        weights = methods.stacking(rows.flatten(0, 1)).view(C, F)
        weights = torch.where(weights.sum(1, keepdim=True) < LEAST, 0.0, weights)
        weights = weights / weights.sum()
        each = rows.mean(-1)
        first, (scaled, factor) = int(each[:, 0].argmax()), divmod(int(each.argmax()), F)
        stacked = (rows + weights.log().unsqueeze(-1)).flatten(0, 1).logsumexp(0).mean()
        values = float(each[first, 0]), float(each[scaled, factor]), float(stacked)
        return cls(first, values[0], scaled, factor, values[1], weights, values[2])

    def members(self, picked: int, shared: int) -> dict[int, int]:
        """How many of each candidate are wanted."""
        share = self.weights.sum(1).tolist()
        counts = {c: max(1, round(shared * weight)) for c, weight in enumerate(share) if weight > 0}
        for c, least in ((self.first, picked), (self.scaled, min(picked, MEMBERS))):
            counts[c] = max(least, counts.get(c, 1))
        return counts


class Bench:
    """Some splits of one set: every method, kept split by split.

    Args:
        splits: by number.
        length: of all numbers of steps, the factor.
        device: where.
        keep: called with a method's name, a split's number and what was found.
    """

    def __init__(self, splits: dict[int, Split], length: float, device: str, keep: Keep):
        self.splits, self.length, self.device, self.keep = splits, length, device, keep
        self.inner = {r: split.validation() for r, split in splits.items()}
        self.started = time.monotonic()

    def run(self, method: str, noise: str) -> None:
        {
            "stacked": self.stacked, "ensemble": self.ensemble, "dropout": self.dropout, "mean field": self.mean_field,
            "precision": self.precision,
        }[method](noise)  # fmt: skip

    def stacked(self, noise: str) -> None:
        family = lambda _: vi.MeanField()  # noqa: E731
        method = self._method(noise, family, LR, 1)
        candidates = [Candidate(λ, None) for λ in LEARNED] + [Candidate(λ, s * λ**0.5) for λ, s in DECAYED]
        candidates += [Candidate(0.0, s) for s in LIMIT]
        self._chosen("validated", "stacked", noise, method, candidates, 1, 2, SHARED)

    def ensemble(self, noise: str) -> None:
        method = self._method(noise, lambda _: vi.MAP(), POINT_LR, 1, 1, True)
        candidates = [Candidate(1.0, s) for s in ENSEMBLE]
        self._chosen("deep ensemble", "deep ensemble, stacked", noise, method, candidates, TRIED, SHARED, SHARED)

    def dropout(self, noise: str) -> None:
        method = self._method(noise, lambda one: methods.Dropout(one.rate), POINT_LR, 1, None, True)
        candidates = [Candidate(1.0, s, rate) for s in DROPOUT for rate in RATES]
        self._chosen("MC dropout", "MC dropout, stacked", noise, method, candidates, 1, 1, 0)

    def mean_field(self, noise: str) -> None:
        method = self._method(noise, lambda _: vi.MeanField(), LR, 1)
        self._members("mean field", noise, method)

    def precision(self, noise: str) -> None:
        method = self._method(noise, lambda _: vi.LowRankPrecision(5), LR, 1)
        self._members("precision 5", noise, method)

    def _method(
        self, noise: str, family: Any, lr: float, groups: int, draws: int | None = None, point: bool = False
    ) -> Method:
        N = len(next(iter(self.splits.values())).t)
        steps = max(10, round(self.length * (STEPS if N <= methods.FULL_BATCH else MANY_STEPS)))
        return Method(noise, family, steps, lr, groups, methods.DRAWS if draws is None else draws, point)

    def _chosen(
        self, best: str, stacked: str, noise: str, method: Method, candidates: Sequence[Candidate],
        tried: int, picked: int, shared: int,
    ) -> None:  # fmt: skip
        """The candidate with the highest held-out log density, the same with its noise scaled, and all by stacking.

        Args:
            best: the first row's title.
            stacked: the last row's.
            noise: which.
            method: how they are fitted.
            candidates: what there is to choose from.
            tried: members of each at first.
            picked: members of one that is picked, at least.
            shared: members of all that are stacked, about.
        """
        held = methods.members(
            self.inner, {(r, one): tried for r in self.splits for one in candidates}, method, self.device
        )
        choices = {r: Choice.of([held[r, one].predicted for one in candidates]) for r in self.splits}
        again = {
            (r, candidates[c]): count for r, one in choices.items() for c, count in one.members(picked, shared).items()
        }
        found = methods.members(self.splits, again, method, self.device)
        for r, own in choices.items():
            one, scaled = (found[r, candidates[c]] for c in (own.first, own.scaled))
            row = {"held_out": own.value, "elbo": one.elbo, "chosen": candidates[own.first]._asdict()}
            self._keep(f"{best}, {noise}", r, one.five, **row)
            if picked > MEMBERS:
                self._keep(f"{best} x{picked}, {noise}", r, one.predicted, **row)
            factor = [float(f == own.factor) for f in range(own.weights.shape[1])]
            row = {"held_out": own.scaled_value, "factor": (1.0, *methods.WIDTHS)[own.factor]}
            self._keep(f"{best}, scaled, {noise}", r, methods.with_widths(scaled.five, factor), **row)
            share, widths = own.weights.sum(1).tolist(), own.weights.sum(0).tolist()
            row = {"held_out": own.stacked_value, "weights": share, "factors": widths}
            parts = [
                (methods.with_widths(found[r, one].predicted, (own.weights[c] / share[c]).tolist()), share[c])
                for c, one in enumerate(candidates) if share[c] > 0
            ]  # fmt: skip
            self._keep(f"{stacked}, {noise}", r, methods.mixed(parts), **row)

    def _members(self, name: str, noise: str, method: Method) -> None:
        """λ = 1, prior scales by the ELBO: one member, and all."""
        jobs = {(r, Candidate(1.0, None)): MEMBERS for r in self.splits}
        for (r, _), one in methods.members(self.splits, jobs, method, self.device).items():
            self._keep(f"{name}, {noise}", r, one.first, elbo=one.elbo)
            self._keep(f"{name} x5, {noise}", r, one.predicted, elbo=one.elbo)

    def _keep(self, title: str, r: int, predicted: methods.Predicted, **more: Any) -> None:
        value, error = methods.scores(predicted, self.splits[r])
        self.keep(title, r, {"log_likelihood": value, "rmse": error, **more})


#: the last row that each method writes
LAST = {
    "stacked": "stacked", "ensemble": "deep ensemble, stacked", "dropout": "MC dropout, stacked",
    "mean field": "mean field x5", "precision": "precision 5 x5",
}  # fmt: skip


def merged(files: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One file of several: sets, methods of a set, and splits of a method come together."""
    sets: dict[str, Any] = {}
    for file in files:
        for name, one in file["sets"].items():
            own = sets.setdefault(name, {"N": one["N"], "methods": {}})
            for method, rows in one["methods"].items():
                own["methods"].setdefault(method, {}).update(rows)
    return {**files[0], "sets": sets}


class Book:
    """The results of a run, in a file where there is one.

    Args:
        path: of the file, or None.
        head: what the run is; a file with another head is refused.
    """

    def __init__(self, path: Path | None, head: dict[str, Any]):
        self.path, self.results = path, {**head, "sets": {}}
        if path is not None and path.exists():
            found = json.loads(path.read_text())
            for name in ("gap", "length"):
                if found[name] != head[name]:
                    raise ValueError(f"{path} is of a run with {name} {found[name]}, got {head[name]}: give another")
            self.results = found

    def open(self, name: str, N: int) -> dict[str, Any]:
        return self.results["sets"].setdefault(name, {"N": N, "methods": {}})["methods"]

    def write(self) -> None:
        if self.path is not None:
            beside = self.path.with_suffix(".part")
            beside.write_text(json.dumps(self.results, indent=1))
            beside.replace(self.path)


def run_set(book: Book, name: str, splits: dict[int, Split], options: argparse.Namespace) -> None:
    """All methods of one set, a chunk of splits after another."""
    rows = book.open(name, len(next(iter(splits.values())).t))
    numbers, started = list(splits), time.monotonic()
    size = options.chunk or len(numbers)
    print(f"{name}: {len(numbers)} splits of {book.results['sets'][name]['N']}", flush=True)

    def keep(title: str, r: int, row: dict[str, Any]) -> None:
        rows.setdefault(title, {})[str(r)] = row

    for begin in range(0, len(numbers), size):
        for noise in options.noise:
            for method in options.methods:
                last = rows.get(f"{LAST[method]}, {noise}", {})
                wanted = {r: splits[r] for r in numbers[begin : begin + size] if str(r) not in last}
                if not wanted:
                    continue
                Bench(wanted, options.length, options.device, keep).run(method, noise)
                book.write()
                own = rows[f"{LAST[method]}, {noise}"]
                mean = sum(one["log_likelihood"] for one in own.values()) / len(own)
                title = f"{LAST[method]}, {noise}"
                print(f"{title:40} {len(own):3} {mean:8.3f} {time.monotonic() - started:6.1f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with NAME.npz")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--splits", nargs="+", type=int, help="all by default")
    parser.add_argument("--noise", nargs="+", choices=list(NOISE), default=list(NOISE))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--gap", action="store_true", help="the gap splits: test data between the training data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--length", type=float, default=1.0, help="of all fits: the factor of their steps")
    parser.add_argument("--chunk", type=int, help="splits at a time; all by default")
    parser.add_argument("--out", type=Path, help="write everything as JSON as it comes, and go on from it")
    parser.add_argument("--merge", nargs="+", type=Path, help="no fits: the tables of these files")
    options = parser.parse_args(arguments)
    if options.merge:
        results = merged([json.loads(path.read_text()) for path in options.merge])
    else:
        if options.data is None:
            parser.error("give --data DIR, the folder with NAME.npz")
        versions = {"torch": torch.__version__, "python": platform.python_version(), "structvi": vi.__version__}
        head = {"gap": options.gap, "length": options.length, "device": options.device, "versions": versions}
        book = Book(options.out, head)
        for name in options.sets:
            run_set(book, name, load(options.data, name, options.splits, options.gap), options)
        results = book.results
    print(report(results, options.data))
    return results


if __name__ == "__main__":
    main()
