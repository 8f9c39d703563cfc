"""A posterior around the network you have, beside the network and its rivals, on the same trained networks.

    python -m benchmarks.networks [--data DIR] [--sets digits,breastmnist] [--seeds N] [--device cuda] [--out folder]
    python -m benchmarks.networks --out folder --table        # the tables of a folder, nothing is run
    python -m benchmarks.networks --data DIR --sets cifar10-gn --quick        # ten steps: shows that it runs, no more

Sets: digits (perceptron), mnist (10,000 images, small CNN), breastmnist (CNN with batch norm), nuclei and nuclei-in
(64×64, U-Net with batch and with instance norm), nuclei256 (256×256, batch norm), cifar10-gn and cifar10-bn (ResNet-20
with group and with batch norm). The digits come with scikit-learn, the others from folders of DIR
(`networks_data.py`); networks and their training are in `networks_nets.py`, methods in `networks_methods.py`.

Every method sees the same trained networks. Whatever is chosen is chosen on validation data. Differences to the network
are paired, with 95 % intervals over test cases. With `--out` a file is kept for each set and seed, written after each
method, and the trained networks: an interrupted run goes on where it was.
"""

import argparse
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch

import structvi as vi

from .networks_measures import assess, clock
from .networks_methods import METHODS, Workshop
from .networks_nets import TASKS
from .peers import ERRORS

#: of `--quick`: steps of a training, cases of each part
QUICK_STEPS, QUICK_CASES = 10, 40
COLUMNS = {
    "NLL": "nll",
    "NLL under shift": "shift",
    "ECE": "ece",
    "accuracy": "accuracy",
    "AURC": "aurc",
    "AUROC": "auroc",
    "Dice": "dice",
    "s to fit": "fit_seconds",
    "ms to predict": "predict_ms",
}


def run(shop: Workshop, path: Path | None, methods: Sequence[str]) -> dict[str, Any]:
    """All methods on one set and seed; those in the file are not run again."""
    record = json.loads(path.read_text()) if path is not None and path.exists() else _record(shop)
    for name in methods:
        if name in record["methods"] and "error" not in record["methods"][name]:
            continue
        start = time.perf_counter()
        record["methods"][name] = row = _one(shop, name)
        said = row["error"] if "error" in row else f"nll {row['nll']:.4f}, {row['choice']}"
        print(f"{shop.task.name} {shop.seed} {name}: {said} ({time.perf_counter() - start:.0f} s)", flush=True)
        if path is not None:
            unfinished = path.with_suffix(".tmp")
            unfinished.write_text(json.dumps(record))
            unfinished.replace(path)
    return record


def _record(shop: Workshop) -> dict[str, Any]:
    parts = {part: len(getattr(shop.data, part)) for part in ("train", "validation", "test")}
    versions = {"structvi": vi.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {
        "set": shop.task.name,
        "seed": shop.seed,
        "sizes": parts,
        "unfamiliar": shop.data.unfamiliar_name,
        "weights": sum(p.numel() for p in shop.net().parameters()),
        "epochs": shop.task.epochs,
        "device": str(shop.device),
        "bf16": shop.bf16,
        "versions": versions,
        "methods": {},
    }


def _one(shop: Workshop, name: str) -> dict[str, Any]:
    """Everything of one method; what it raises is its row."""
    start = clock(shop.device)
    try:
        answer = METHODS[name](shop)
        seconds = clock(shop.device) - start
        row = assess(answer.predictor, shop.data, shop.batch, shop.device)
    except ERRORS as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    details = {key: value for key, value in answer.details.items() if key != "bayes"}
    return row | details | {"choice": answer.choice, "fit_seconds": seconds}


def report(records: list[dict[str, Any]]) -> str:
    """Of every set a table: means and standard deviations over seeds, and NLL minus the network's, case by case."""
    lines = []
    for name in dict.fromkeys(record["set"] for record in records):
        own = [record for record in records if record["set"] == name]
        sizes = ", ".join(f"{count} {part}" for part, count in own[0]["sizes"].items())
        lines += [
            "",
            f"### {name}",
            "",
            f"{own[0]['weights']} weights, {sizes}; seeds {[one['seed'] for one in own]}",
            "",
        ]
        lines += [f"| {' | '.join(('method', *COLUMNS, 'NLL − network'))} |", f"|{' --- |' * (len(COLUMNS) + 2)}"]
        for method in own[0]["methods"]:
            rows = [record["methods"].get(method, {"error": "not run"}) for record in own]
            if failed := next((row["error"] for row in rows if "error" in row), None):
                lines.append(f"| {method} | {failed} |")
                continue
            cells = [_cell([row[key] for row in rows]) for key in COLUMNS.values()]
            networks = [record["methods"]["network"]["cases"] for record in own]
            gaps = np.subtract([row["cases"] for row in rows], networks).mean(0)
            half = 1.96 * gaps.std(ddof=1) / len(gaps) ** 0.5
            lines.append(f"| {' | '.join((method, *cells, f'{gaps.mean():+.4f} ± {half:.4f}'))} |")
    return "\n".join(lines)


def _cell(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    return f"{mean(known):.4g}" + (f" ± {stdev(known):.2g}" if len(known) > 1 else "")


def main(arguments: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with mnist/, notmnist/, breastmnist/, nuclei/, cifar10/")
    parser.add_argument("--sets", default="digits", help=f"with commas between them, of {', '.join(TASKS)}")
    parser.add_argument("--seeds", type=int, help="how many; each set has its own default")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--methods",
        default="",
        help="how their names start, in the order they are run, with semicolons between; all if empty",
    )
    parser.add_argument("--draws", type=int, help="of weights, to predict; otherwise as predict does it by itself")
    parser.add_argument("--cases", type=int, help="of test data, the first ones; all if not given")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="train in mixed precision, bfloat16: half of a CPU's time")
    parser.add_argument("--out", type=Path, help="keep a file for each set and seed, and go on from what is there")
    parser.add_argument("--nets", type=Path, help="keep the trained networks there, and not in --out/nets")
    parser.add_argument("--table", action="store_true", help="print the tables of --out, run nothing")
    parser.add_argument("--quick", action="store_true", help="ten steps, forty cases, one seed: shows that it runs")
    options = parser.parse_args(arguments)
    if options.table and options.out is None:
        parser.error("--table prints what --out keeps: give both")
    if options.device == "cpu":
        torch.set_num_threads(1)
    records = [] if options.table else _run_sets(options, parser)
    if options.out is not None:
        records = [json.loads(path.read_text()) for path in sorted(options.out.glob("*.json"))]
    tables = report(records)
    print(tables)
    return tables


def _run_sets(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    sets = options.sets.split(",")
    if unknown := [name for name in sets if name not in TASKS]:
        parser.error(f"no set {unknown[0]!r}: take some of {', '.join(TASKS)}")
    starts = [part.strip() for part in options.methods.split(";")]
    methods = dict.fromkeys(["network", *(name for start in starts for name in METHODS if name.startswith(start))])
    records = []
    for name in sets:
        task = TASKS[name]
        data = task.data(options.data)
        if options.quick:
            data = data.smaller(QUICK_CASES)
        if options.cases:
            data = data.tested_on(options.cases)
        for seed in range(options.first, options.first + (1 if options.quick else options.seeds or task.seeds)):
            path = nets = None
            if options.out is not None:
                options.out.mkdir(parents=True, exist_ok=True)
                nets, path = options.nets or options.out / "nets", options.out / f"{name}-{seed}.json"
            steps = QUICK_STEPS if options.quick else 0
            shop = Workshop(task, data, seed, torch.device(options.device), steps, nets, options.bf16)
            if options.draws:
                shop.draws = shop.drawn = options.draws
            records.append(run(shop, path, list(methods)))
    return records


if __name__ == "__main__":
    main()
