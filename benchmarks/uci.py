"""UCI regression with a network of one hidden layer: test log-likelihood and RMSE of posteriors and their rivals.

    python -m benchmarks.uci --data DIR [--sets yacht energy] [--splits 0 1 2] [--noise normal] [--gap] [--device cuda]
                             [--length 1.0] [--out results.json]
    python -m benchmarks.uci --merge a.json b.json [--data DIR]          # the table of earlier runs

DIR holds NAME.npz (X, y and the test rows of each split) and, for the rows "published", published.md. The network has
50 rectified units; inputs and targets are standardised on the training part. All fits of a kind, over splits, members
and λ, are one call of `vi.fit_many`. Nothing is chosen on test data.

- `mean field`: λ = 1, the prior's scales (one for each tensor) by the ELBO; one fit, and the equal mixture of five.
- `validated λ`: the same at that λ of 1, 0.3, 0.1, 0.03 at which a held-out fifth of the training set is most likely.
- `precision 5`: rank 5, λ = 1, five members.
- `deep ensemble`: five networks; their prior scale, 1 or 4 times 1/√fan_in, on the same held-out fifth.
- `MC dropout`: masks on inputs and hidden units; drop rate of 0.005, 0.01, 0.05, 0.1 and prior scale likewise.

Each with three kinds of noise: normal, Student-t (degrees of freedom learned), heteroscedastic (a second output). The
noise too is chosen: by ELBO (`ours, by ELBO`, among posteriors at λ = 1) or on the held-out fifth (`.., validated`).
"""

import argparse
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import structvi as vi

from . import uci_methods as methods
from .uci_data import SETS, Split, load
from .uci_methods import MEMBERS, NOISE, RATES, SCALES, TEMPERATURES, Job, Method, Predicted
from .uci_tables import report

#: steps of a posterior, of one on validation data; of a point estimate and of MC dropout likewise
STEPS, TRIAL, POINT, POINT_TRIAL = 3000, 2000, 3000, 1500
LR, POINT_LR = 0.05, 0.02
#: λ = 1/s² for the prior scales s of point estimates
PRIORS = tuple(1 / s**2 for s in SCALES)


class Bench:
    """One set: `rows` has for each method its test scores, split by split.

    Args:
        splits: of the set.
        noises: which kinds of noise.
        length: of all numbers of steps, the factor.
        device: where.
        keep: called with the rows whenever there are more.
    """

    def __init__(self, splits: Sequence[Split], noises: Sequence[str], length: float, device: str, keep: Any):
        self.splits, self.noises, self.length, self.device, self.keep = splits, noises, length, device, keep
        self.rows: dict[str, dict[str, Any]] = {}
        self.started = time.monotonic()
        #: (method, noise) → split → what it predicts, its ELBO, its held-out log density
        self.found: dict[tuple[str, str], list[tuple[Predicted, float, float]]] = {}

    def run(self) -> dict[str, dict[str, Any]]:
        for noise in self.noises:
            self.posteriors(noise)
            self.ensembles(noise)
            self.dropout(noise)
        for noise in self.noises:
            self.low_rank(noise)
        elbo = [("mean field x5", n) for n in self.noises] + [("precision 5 x5", n) for n in self.noises]
        self.best("ours, by ELBO", elbo, 1)
        for name, method in (("ours", "validated λ x5"), ("MC dropout", "MC dropout"), ("deep ensemble",) * 2):
            self.best(f"{name}, validated", [(method, noise) for noise in self.noises], 2)
        return self.rows

    def _method(self, noise: str, family: Any, learned: bool, steps: int, lr: float, groups: int, draws: int) -> Method:
        return Method(noise, family, learned, max(10, round(self.length * steps)), lr, groups, draws)

    def posteriors(self, noise: str) -> None:
        trial = self._method(noise, lambda _: vi.MeanField(), True, TRIAL, LR, 2, methods.DRAWS)
        held = methods.tried(self.splits, trial, TEMPERATURES, self.device)
        best = [job.temperature for job, _ in methods.best_of(held)]
        jobs = [Job(r, λ, m) for r, own in enumerate(best) for λ in sorted({1.0, own}) for m in range(MEMBERS)]
        found = methods.fit(self.splits, jobs, trial._replace(steps=self._steps(STEPS)), self.device)
        parts = dict(zip(jobs, found, strict=True))
        for name, λs, count in (("mean field", [1.0] * len(best), 1), ("mean field x5", [1.0] * len(best), MEMBERS),
                                ("validated λ x5", best, MEMBERS)):  # fmt: skip
            rows = [[parts[Job(r, λ, m)] for m in range(count)] for r, λ in enumerate(λs)]
            values = [held[r][Job(r, λ)] for r, λ in enumerate(λs)]
            self.add(name, noise, rows, values, temperatures=λs)

    def low_rank(self, noise: str) -> None:
        method = self._method(noise, lambda _: vi.StructuredPrecision(5), True, STEPS, LR, 2, methods.DRAWS)
        self._members("precision 5 x5", noise, method, [(Job(r, 1.0), float("nan")) for r in range(len(self.splits))])

    def ensembles(self, noise: str) -> None:
        trial = self._method(noise, lambda _: vi.MAP(), False, POINT_TRIAL, POINT_LR, 1, 1)
        best = methods.best_of(methods.tried(self.splits, trial, PRIORS, self.device))
        self._members("deep ensemble", noise, trial._replace(steps=self._steps(POINT)), best)

    def dropout(self, noise: str) -> None:
        make = lambda job: methods.Dropout(job.rate)  # noqa: E731
        trial = self._method(noise, make, False, POINT_TRIAL, POINT_LR, 4, methods.DRAWS)
        best = methods.best_of(methods.tried(self.splits, trial, PRIORS, self.device, RATES))
        self._members("MC dropout", noise, trial._replace(steps=self._steps(POINT)), best, 1)

    def _members(
        self, name: str, noise: str, method: Method, best: Sequence[tuple[Job, float]], count: int | None = None
    ) -> None:
        count = MEMBERS if count is None else count
        jobs = [job._replace(member=m) for job, _ in best for m in range(count)]
        found = iter(methods.fit(self.splits, jobs, method, self.device))
        rows = [[next(found) for _ in range(count)] for _ in best]
        chosen = {"temperatures": [job.temperature for job, _ in best], "rates": [job.rate for job, _ in best]}
        self.add(name, noise, rows, [value for _, value in best], **chosen)

    def _steps(self, steps: int) -> int:
        return max(10, round(self.length * steps))

    def add(self, name: str, noise: str, rows: Sequence[Any], held: Sequence[float], **more: Any) -> None:
        """Mixtures of the parts of each split."""
        own = [
            (methods.mixed([p for p, _ in parts]), sum(elbo for _, elbo in parts) / len(parts), value)
            for parts, value in zip(rows, held, strict=True)
        ]
        self.found[name, noise] = own
        self._keep(f"{name}, {noise}", [p for p, _, _ in own], elbo=[e for _, e, _ in own], held_out=list(held), **more)

    def best(self, title: str, candidates: Sequence[tuple[str, str]], by: int) -> None:
        """Split by split the candidate with the highest ELBO (1) or held-out log density (2)."""
        known = [key for key in candidates if key in self.found]
        if not known:
            return
        picked = [max(known, key=lambda key, r=r: self.found[key][r][by]) for r in range(len(self.splits))]
        self._keep(
            title, [self.found[key][r][0] for r, key in enumerate(picked)], picked=[", ".join(k) for k in picked]
        )

    def _keep(self, title: str, predicted: Sequence[Predicted], **more: Any) -> None:
        pairs = [methods.scores(one, split) for one, split in zip(predicted, self.splits, strict=True)]
        values, errors = [list(column) for column in zip(*pairs, strict=True)]
        self.rows[title] = {"log_likelihood": values, "rmse": errors, **more}
        mean, error = sum(values) / len(values), sum(errors) / len(errors)
        print(f"{title:38} {mean:8.3f} {error:8.4f} {time.monotonic() - self.started:6.1f} s", flush=True)
        self.keep(self.rows)


def merged(files: list[dict[str, Any]]) -> dict[str, Any]:
    """One file of several: sets, and methods of one set, come together."""
    sets: dict[str, Any] = {}
    for file in files:
        for name, one in file["sets"].items():
            before = sets.get(name, {"methods": {}})
            sets[name] = before | one | {"methods": before["methods"] | one["methods"]}
    return {**files[0], "sets": sets}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with NAME.npz")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--splits", nargs="+", type=int, help="all by default")
    parser.add_argument("--noise", nargs="+", choices=list(NOISE), default=list(NOISE))
    parser.add_argument("--gap", action="store_true", help="the gap splits: test data between the training data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--length", type=float, default=1.0, help="of all fits: the factor of their steps")
    parser.add_argument("--out", type=Path, help="write everything as JSON, after every method")
    parser.add_argument("--merge", nargs="+", type=Path, help="no fits: the table of these files")
    options = parser.parse_args(arguments)
    if options.merge:
        results = merged([json.loads(path.read_text()) for path in options.merge])
    else:
        if options.data is None:
            parser.error("give --data DIR, the folder with NAME.npz")
        versions = {"torch": torch.__version__, "python": platform.python_version(), "structvi": vi.__version__}
        results = {"gap": options.gap, "versions": versions, "device": options.device, "length": options.length}
        results["sets"] = {}
        for name in options.sets:
            splits = load(options.data, name, options.splits, options.gap)
            started = time.monotonic()

            def keep(rows: dict[str, Any], name: str = name, splits: Any = splits, started: float = started) -> None:
                seconds = time.monotonic() - started
                own = {"N": len(splits[0].t), "splits": len(splits), "seconds": seconds, "methods": rows}
                results["sets"][name] = own
                if options.out:
                    options.out.write_text(json.dumps(results, indent=1))

            print(f"{name}: {len(splits)} splits of {len(splits[0].t)}", flush=True)
            Bench(splits, options.noise, options.length, options.device, keep).run()
    print(report(results, options.data))
    return results


if __name__ == "__main__":
    main()
