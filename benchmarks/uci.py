"""UCI regression with a network of one hidden layer: test log-likelihood and RMSE of ten methods on common splits.

    python -m benchmarks.uci --data DIR [--sets yacht energy] [--splits 0 1 2] [--methods ...] [--gap] [--device cuda]
                             [--seeds 5] [--quick] [--out results.json]
    python -m benchmarks.uci --merge a.json b.json [--data DIR]          # the table of earlier runs

DIR holds NAME.npz (X, y and the test rows of each split) and, for the column "published", the per-split results of MC
dropout, gal2018_mcdropout_results.json. The network has 50 rectified units; inputs and targets are standardised on the
training part. All methods have one learned noise σ. Nothing is tuned on test data: the prior scales of a posterior (one
for each tensor) maximise the ELBO; drop rate and prior scale of point estimates are chosen on a fifth of each training
set. All splits of a set, and all seeds, are fitted as one program (`uci_engine.py`).

A posterior is fitted as `fit` does it: λ rises (over a tenth of the steps, enough at lr 0.05), the factor starts at
40 %. Higher ranks go on from lower ones, as `grow` does, and are kept where the ELBO on common draws is not lower:
precision rank 5 goes on from the unfinished mean field, rank 20 from rank 5; covariance rank 5 from the finished mean
field. MC dropout has as many steps as the longest of these and as many draws a step. `--seeds` adds fits of the first
split with other seeds, of which the reliability table is made.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import uci_engine as engine
from . import uci_methods as methods
from .uci_data import SETS, Splits, load
from .uci_engine import Jobs, State
from .uci_methods import Predicted
from .uci_tables import report

POINTS = ("MAP", "last-layer Laplace", "deep ensemble", "MC dropout")
NORMALS = ("mean field", "covariance 5", "covariance 20", "precision 5", "precision 20")
METHODS = (*POINTS, *NORMALS, "mixture of 2")
#: sets with more data than this take minibatches
FULL_BATCH, BATCH = 5000, 1024
HIDDEN = 50
#: steps: of a fit, of one that goes on from it, of a point estimate, of one on validation data; and learning rates
STEPS, GROW, POINT, TRIAL = 10_000, 5_000, 5_000, 2_500
LR, GROW_LR, POINT_LR = 0.05, 0.02, 0.02
KL_WARMUP, FIRST_STAGE = 0.1, 0.4


class Fits:
    """Posteriors of one set: every split at seeds 0 and 1 (the two parts of a mixture), the first at some more."""

    def __init__(self, data: Splits, seeds: int, shorten: float, batch: int | None):
        R = len(data.t)
        rows = [*range(R), *range(R), *[0] * max(0, seeds - 2)]
        self.R, self.shorten = R, shorten
        self.seeds = [0] * R + [1] * R + list(range(2, seeds))
        self.jobs = Jobs(data.take(torch.tensor(rows, device=data.t.device)), HIDDEN, batch)
        self.states: dict[str, State] = {}
        self.elbos: dict[str, Tensor] = {}
        self.errors: dict[str, Tensor] = {}
        self.fallbacks: dict[str, Tensor] = {}

    def run(self) -> Iterator[str]:
        """Fit, and name each family when it is there."""
        jobs = self.jobs
        start = {
            "mean": jobs.initial(self.seeds),
            "log_scale": (0.1 * jobs.initial_scale()).log(),
            "log_noise": torch.zeros(jobs.J, device=jobs.device),
            "log_prior": jobs.prior(),
        }
        step = engine.normal_step(jobs, "covariance", methods.DRAWS // 2)
        begun, _ = self._stage(start, step, (0.0, FIRST_STAGE))
        yield self._keep("mean field", self._stage(begun, step, (FIRST_STAGE, 1.0)))
        step = engine.normal_step(jobs, "precision", methods.DRAWS // 2)
        staged = self._stage(methods.with_rank(begun, 5, 5), step, (FIRST_STAGE, 1.0))
        yield self._keep("precision 5", staged, methods.with_rank(self.states["mean field"], 5, 5))
        yield self._grow("precision 20", "precision 5")
        yield self._grow("covariance 5", "mean field")
        yield self._grow("covariance 20", "covariance 5")

    def _stage(self, q: State, step: engine.Step, part: tuple[float, float]) -> tuple[State, State]:
        return engine.maximise(self.jobs, q, step, self._steps(STEPS), LR, 0, KL_WARMUP, part)

    def _grow(self, name: str, before: str) -> str:
        form, rank = name.split()
        start = methods.with_rank(self.states[before], int(rank), int(rank))
        step = engine.normal_step(self.jobs, form, methods.DRAWS // 2)
        return self._keep(name, engine.maximise(self.jobs, start, step, self._steps(GROW), GROW_LR, 0), start)

    def _keep(self, name: str, found: tuple[State, ...], before: State | None = None) -> str:
        """The best by ELBO of the last iterate, the average and what there was before, without new columns."""
        if before is not None:
            found = (*found, self._columns_off(before, name))
        form = name.split()[0]
        values = torch.stack([engine.elbo(self.jobs, state, form, 1024)[0] for state in found])
        self.states[name] = engine.choose(list(found), values)
        self.fallbacks[name] = values.argmax(0) == 2
        self.elbos[name], self.errors[name] = engine.elbo(self.jobs, self.states[name], form, 4096, seed=2)
        return name

    def _columns_off(self, q: State, name: str) -> State:
        """New columns at zero: the posterior of the lower rank."""
        old = {"5": 0, "20": 5}[name.split()[1]]
        factor = q["factor"].clone()
        factor[..., old:] = 0
        return q | {"factor": factor}

    def _steps(self, steps: int) -> int:
        return max(20, round(self.shorten * steps))

    def predicted(self, name: str) -> Predicted:
        """Of seed 0; a mixture has the precision form of rank 20 at seeds 0 and 1 as its parts, of equal weight."""
        single = "precision 20" if name == "mixture of 2" else name
        q = self.states[single]
        y, variance = methods.draws(self.jobs, q, single.split()[0]), methods.noise(q)
        data, R = self.jobs.data.take(torch.arange(self.R, device=y.device)), self.R
        if name == "mixture of 2":
            wide = variance.expand(-1, y.shape[1], 1)
            both = (torch.cat([x[:R], x[R : 2 * R]], 1) for x in (y, wide))
            return methods.score(data, *both)
        return methods.score(data, y[:R], variance[:R])


def run_set(name: str, options: argparse.Namespace) -> dict[str, Any]:
    data = load(options.data, name, options.splits, options.gap, options.device)
    shorten = 0.01 if options.quick else 1.0
    batch = BATCH if data.t.shape[1] > FULL_BATCH else None
    result: dict[str, Any] = {"N": data.t.shape[1], "splits": len(data.t), "methods": {}}

    def add(method: str, predicted: Predicted, started: float, **more: Any) -> None:
        row = {"log_likelihood": predicted.log_likelihood.tolist(), "rmse": predicted.rmse.tolist(), **more}
        result["methods"][method] = row
        print(f"{name:9} {method:20} {predicted.log_likelihood.mean():8.3f} {predicted.rmse.mean():8.4f} "
              f"{time.monotonic() - started:6.1f} s", flush=True)  # fmt: skip

    wanted = options.methods
    if set(wanted) & {*NORMALS, "mixture of 2"}:
        started = time.monotonic()
        fits = Fits(data, options.seeds, shorten, batch)
        for method in fits.run():
            add(method, fits.predicted(method), started, elbo=fits.elbos[method][: fits.R].tolist(),
                fallbacks=int(fits.fallbacks[method].sum()), fits=fits.jobs.J)  # fmt: skip
        add("mixture of 2", fits.predicted("mixture of 2"), started)
        own = [0, fits.R, *range(2 * fits.R, fits.jobs.J)]  # the first split, at every seed
        result["reliability"] = {
            method: {
                "elbo": fits.elbos[method][own].tolist(),
                "error": fits.errors[method][own].tolist(),
                "fallback": fits.fallbacks[method][own].tolist(),
            }
            for method in NORMALS
        }
    seeds = [0] * len(data.t)

    def points(steps: int) -> methods.Budget:
        return methods.Budget(max(20, round(shorten * steps)), POINT_LR, batch)

    if set(wanted) & set(POINTS[:3]):
        started = time.monotonic()
        fitted = methods.tuned_points(data, seeds, (0.0,), points(TRIAL), points(POINT), HIDDEN)
        add("MAP", fitted.score(), started)
        add("last-layer Laplace", methods.last_layer_laplace(fitted), started)
        add("deep ensemble", methods.ensemble(fitted, seeds, points(POINT)), started)
    if "MC dropout" in wanted:
        started = time.monotonic()
        fitted = methods.tuned_points(data, seeds, methods.RATES, points(TRIAL), points(STEPS + GROW), HIDDEN)
        add("MC dropout", fitted.score(), started, rates=fitted.rates.tolist(), scales=fitted.scales.tolist())
    return result


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
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="fitted in groups")
    parser.add_argument("--gap", action="store_true", help="the gap splits: test data between the training data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=2, help="of posteriors of the first split, 2 or more")
    parser.add_argument("--out", type=Path, help="write everything as JSON, after every set")
    parser.add_argument("--merge", nargs="+", type=Path, help="no fits: the table of these files")
    parser.add_argument("--quick", action="store_true", help="a hundredth of the steps: shows that it runs, no more")
    options = parser.parse_args(arguments)
    if options.merge:
        results = merged([json.loads(path.read_text()) for path in options.merge])
    else:
        if options.data is None:
            parser.error("give --data DIR, the folder with NAME.npz")
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        results = {"gap": options.gap, "versions": versions, "device": options.device, "sets": {}}
        for name in options.sets:
            started = time.monotonic()
            results["sets"][name] = run_set(name, options) | {"seconds": time.monotonic() - started}
            if options.out:
                options.out.write_text(json.dumps(results, indent=1))
    print(report(results, options.data))
    return results


if __name__ == "__main__":
    main()
