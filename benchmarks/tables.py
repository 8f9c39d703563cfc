"""`structvi fit` on public tables, unattended, beside the baseline of scikit-learn's that the folds choose.

    python -m benchmarks.tables --data DIR [--tables diabetes concrete ..] [--all] [--seed 0] [--out r.json]

DIR/uci holds the UCI tables, NAME.npz with X and y. Each table is written as a CSV file and
fitted as the command line does it with nothing but `--target`. Eight by default: scikit-learn's diabetes,
breast_cancer, wine and digits, and the first four of UCI by name. `--all` adds iris, the other four of UCI and two
simulated ones that are hard. Printed are test log-likelihoods in nats a row, and ours minus the baseline's with a 95 %
interval over the test rows. CPU seconds are those of all: fit, comparison and page, on one thread.
"""

import argparse
import csv
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from structvi_tables.command import fit_file

SKLEARN = ("diabetes", "breast_cancer", "wine", "digits")
UCI = ("boston", "concrete", "energy", "kin8nm")
MORE = ("iris", "naval", "power", "uci_wine", "yacht")
#: simulated, and hard: five of 300 columns matter, in 120 rows; the sign of a product, among ten columns
SIMULATED = ("wide", "product")
EIGHT = (*SKLEARN, *UCI)
ALL = (*EIGHT, *MORE, *SIMULATED)


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
        raise SystemExit("give --data DIR, the folder with uci/NAME.npz")
    with np.load(data / "uci" / f"{name.removeprefix('uci_')}.npz") as file:
        return [f"x{i}" for i in range(file["X"].shape[1])], file["X"], file["y"].tolist()


def run(name: str, data: Path | None, folder: Path, seed: int) -> dict[str, Any]:
    """Write the table, fit it, and what came of it."""
    names, rows, target = load(name, data)
    path = folder / f"{name}.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "target"])
        writer.writerows([*row, t] for row, t in zip(rows.tolist(), target, strict=True))
    start = time.process_time()
    fitted = fit_file(path, "target", seed=seed)
    fitted.save(folder)
    found = fitted.found
    return {
        "table": name, "rows": len(rows), "columns": len(names), "seconds": time.process_time() - start,
        "ours": float(found.log_prob.mean()), "baseline": found.best.name, "theirs": float(found.best.log_prob.mean()),
        "gain": found.gain.mean, "half": found.gain.half, "verdict": found.gain.verdict,
        "calibration": found.calibration, "parts": [[str(one.recipe), one.weight] for one in fitted.fit.tried],
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['table']:14}{row['rows']:6}{row['columns']:5}  {row['ours']:8.3f}  {row['baseline']:20}"
        f"{row['theirs']:8.3f}  {row['gain']:+.3f} ± {row['half']:.3f}  {row['verdict']:8}{row['seconds']:6.0f}"
    )


HEAD = f"{'table':14}{'rows':>6}{'cols':>5}  {'structvi':>8}  {'baseline':20}{'':>8}  {'gain, 95 %':14}  {'':8}{'CPU s':>6}"


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with uci/NAME.npz")
    parser.add_argument("--tables", nargs="+", choices=ALL, default=list(EIGHT))
    parser.add_argument("--all", action="store_true", help="the eight and the other seven")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    print(HEAD)
    for name in ALL if options.all else options.tables:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(run(name, options.data, Path(folder), options.seed))
        print(line(rows[-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1))
    worse = [row["table"] for row in rows if row["verdict"] == "worse"]
    print(f"worse at 95 %: {', '.join(worse) or 'none'} of {len(rows)}")
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
