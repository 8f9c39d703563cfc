"""`structvi fit` on public tables, unattended, beside the baseline of scikit-learn's that the folds choose.

    python -m benchmarks.tables --data DIR [--tables diabetes concrete ..] [--all] [--seed 0] [--missing] [--inner]
        [--out r.json]

DIR holds the UCI tables, NAME.npz with X and y (as for `benchmarks.uci`). Each table is written as a CSV file and
fitted as the command line does it with nothing but `--target`. Eight by default: scikit-learn's diabetes,
breast_cancer, wine and digits, and the first four of UCI by name. `--all` adds iris, the other four of UCI and two
simulated ones that are hard. Printed are test log-likelihoods in nats a row, ours minus the baseline's with a 95 %
interval over the test rows, and of amounts the same of the CRPS of gradient-boosted quantiles minus ours, as a share of
ours. CPU seconds are those of all: fit, comparison and page, on one thread.

`--missing` adds a line for each table: one number after the other is taken away from all test rows, though it was never
missing when the model was fitted. Printed are, over columns (the first 13), the mean test log-likelihood and the share
of test rows inside their 90 % interval (of classes: the share right), in three ways: with the column's mean in its
place, with a mixture over values of the column by itself, and with the mixture over values that a row could have; and
for comparison those of the complete rows.

`--inner` takes the test rows away first: a table is what the others are, and a fifth of those is its test. Choices are
made by such a run, and no figure of a run without it is of rows that took part in one.
"""

import argparse
import csv
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import torch

from structvi_tables.assessing import OURS
from structvi_tables.command import fit_file
from structvi_tables.fitting import MOST_ROWS, TableFit
from structvi_tables.reading import read_table
from structvi_tables.stand_ins import StandIns
from structvi_tables.target import split, target_of

SKLEARN = ("diabetes", "breast_cancer", "wine", "digits")
UCI = ("boston", "concrete", "energy", "kin8nm")
MORE = ("iris", "naval", "power", "uci_wine", "yacht")
#: simulated, and hard: five of 300 columns matter, in 120 rows; the sign of a product, among ten columns
SIMULATED = ("wide", "product")
EIGHT = (*SKLEARN, *UCI)
ALL = (*EIGHT, *MORE, *SIMULATED)
#: that are taken away, one after the other
MOST_COLUMNS = 13


def load(name: str, data: Path | None) -> tuple[list[str], np.ndarray, list[Any]]:
    """Names of the columns, rows, and the target: class names of a classification."""
    if name in (*SKLEARN, "iris"):
        from sklearn import datasets

        found = getattr(datasets, f"load_{name}")()
        names = [str(column) for column in found.feature_names]
        if name == "diabetes":
            return names, found.data, found.target.tolist()
        return names, found.data, [f"{found.target_names[label]}" for label in found.target]
    if name in SIMULATED:
        rng = np.random.default_rng(5)
        if name == "wide":
            X = rng.normal(size=(120, 300))
            return [f"x{i}" for i in range(300)], X, (X[:, :5].sum(1) + rng.normal(size=120)).tolist()
        X = rng.uniform(-1, 1, size=(1000, 10))
        flipped = (X[:, 0] * X[:, 1] > 0) ^ (rng.random(1000) < 0.1)
        return [f"x{i}" for i in range(10)], X, ["ab"[int(label)] for label in flipped]
    if data is None:
        raise SystemExit("give --data DIR, the folder with the UCI tables")
    with np.load(data / f"{name.removeprefix('uci_')}.npz") as file:
        return [f"x{i}" for i in range(file["X"].shape[1])], file["X"], file["y"].tolist()


def run(
    name: str,
    data: Path | None,
    folder: Path,
    seed: int,
    quiet: bool = True,
    gaps: bool = False,
    inner: bool = False,
) -> dict[str, Any]:
    """Write the table, fit it, and what came of it."""
    names, rows, target = load(name, data)
    path = folder / f"{name}.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "target"])
        writer.writerows([*row, t] for row, t in zip(rows.tolist(), target, strict=True))
    if inner:
        rows = without_test_rows(path, seed)
    start = time.process_time()
    fitted = fit_file(path, "target", seed=seed, say=(lambda _: None) if quiet else print)
    fitted.write(folder)
    found, seconds = fitted.found, time.process_time() - start
    gain, crps = found.gain, found.crps_gain
    return {
        "table": name, "rows": len(rows), "columns": len(names), "seconds": seconds, "ours": found.densities[OURS],
        "baseline": found.best, "theirs": found.densities[found.best], "gain": gain.mean, "half": gain.half,
        "crps_gain": None if crps is None else crps.mean, "crps_half": None if crps is None else crps.half,
        "crps": found.crps, "coverage_90": found.coverage.get(0.9), "quality": found.quality,
        "parts": [[one.name, one.weight] for one in fitted.fit.tried if one.weight],
        "missing": missing(fitted.fit) if gaps else None,
    }  # fmt: skip


def without_test_rows(path: Path, seed: int) -> np.ndarray:
    """The file without the rows that a fit of it with this seed tests on; which rows it has now."""
    table = read_table(path, "utf-8", [])
    goal = target_of(table, "target", "auto", [])
    labels = goal.encode(table) if goal.classes else None
    kept = split(labels, len(table), seed, MOST_ROWS).fit.sort().values.numpy()
    table.iloc[kept].to_csv(path, index=False)
    return kept


def scores(fit: TableFit, without: str | None = None) -> list[float]:
    """Mean log-likelihood of the test rows, and the share inside the 90 % interval or with the right class."""
    test, t = fit.test, fit.model.target.encode(fit.test)
    if without is not None:
        test[without] = np.nan
    log_prob, good = [], []
    for rows, mixture in fit.model.mixtures(test):
        log_prob.append(mixture.log_prob(t[rows]))
        right = mixture.mean.argmax(1) == t[rows] if fit.model.target.classes else None
        good.append(((mixture.cdf(t[rows]) - 0.5).abs() <= 0.45 if right is None else right).double())
    return [float(torch.cat(log_prob).mean()) - log(fit.model.target.scale), float(torch.cat(good).mean())]


def missing(fit: TableFit) -> dict[str, list[float]]:
    """`scores` of complete rows, and over numbers that were complete and are taken away, in three ways."""
    model, own = fit.model, fit.model.stand_ins
    assert own is not None
    names = [column.name for column in model.columns.columns if column.kind == "number" and not column.missing]
    found = {"complete": scores(fit)}
    for way, stand_ins in (("mean", None), ("alone", StandIns(own.margins, [])), ("mixture", own)):
        model.stand_ins = stand_ins
        found[way] = np.mean([scores(fit, name) for name in names[:MOST_COLUMNS]], 0).tolist()
    model.stand_ins = own
    return found


def line(row: dict[str, Any]) -> str:
    verdict = "worse" if row["gain"] + row["half"] < 0 else "better" if row["gain"] > row["half"] else "as good"
    crps = (
        ""
        if row["crps_gain"] is None
        else f"{row['crps_gain'] / row['crps']:+.3f} ± {row['crps_half'] / row['crps']:.3f}"
    )
    return (
        f"{row['table']:14}{row['rows']:6}{row['columns']:5}  {row['ours']:8.3f}  {row['baseline']:20}"
        f"{row['theirs']:8.3f}  {row['gain']:+.3f} ± {row['half']:.3f}  {verdict:8}{crps:17}{row['seconds']:6.0f}"
    )


HEAD = (
    f"{'table':14}{'rows':>6}{'cols':>5}  {'structvi':>8}  {'baseline':20}{'':>8}  {'gain, 95 %':14}  {'':8}"
    f"{'CRPS gain / CRPS':17}{'CPU s':>6}"
)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with the UCI tables, NAME.npz")
    parser.add_argument("--tables", nargs="+", choices=ALL, default=list(EIGHT))
    parser.add_argument("--all", action="store_true", help="the eight and the other seven")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    parser.add_argument("--missing", action="store_true", help="test rows without one column after the other")
    parser.add_argument("--inner", action="store_true", help="without the test rows of the other runs: for choices")
    parser.add_argument("--verbose", action="store_true", help="what was tried on each")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    print(HEAD)
    for name in ALL if options.all else options.tables:
        with tempfile.TemporaryDirectory() as folder:
            how = (options.seed, not options.verbose, options.missing, options.inner)
            rows.append(run(name, options.data, Path(folder), *how))
        print(line(rows[-1]), flush=True)
        if options.missing:
            told = (f"{way} {a:.3f}, {100 * b:.0f} %" for way, (a, b) in rows[-1]["missing"].items())
            print(f"    a column missing: {'; '.join(told)}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1))
    worse = [row["table"] for row in rows if row["gain"] + row["half"] < 0]
    print(f"worse at 95 %: {', '.join(worse) or 'none'} of {len(rows)}")
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
