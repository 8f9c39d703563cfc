"""Is a step as fast as before? `benchmarks.step_cost` of two checkouts, in turn, in one run.

    git clone . /tmp/before && git -C /tmp/before checkout REVISION
    python -m benchmarks.checkouts /tmp/before [--rounds 7] [--net mlp] [--ranks 0 4] [--draws 1 2]

Each process measures steps as multiples of the deterministic step beside them, which takes out how fast the machine is
at the moment. For each row the median over rounds of this checkout's multiple over the other's. Twenty seconds a round.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

HERE = Path(__file__).parents[1]


def measure(checkout: Path, arguments: list[str]) -> dict[str, float]:
    """Row → a step over the deterministic one, median over repeats in the same process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.step_cost", *arguments, "--out", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
        subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
        rows = json.loads(out.read_text())["rows"]
    return {f"{row['method']}, rank {row['rank']}, {row['draws']} draws": row["ratio"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--net", default="mlp")
    parser.add_argument("--ranks", nargs="+", default=["0", "4"])
    parser.add_argument("--draws", nargs="+", default=["1", "2"])
    given = parser.parse_args()
    arguments = ["--net", given.net, "--ranks", *given.ranks, "--draws", *given.draws, "--repeats", "15"]
    arguments += ["--methods", "deterministic", "MeanField*", "Structured*"]
    ratios: dict[str, list[float]] = {}
    for index in range(given.rounds):
        pair = {checkout: measure(checkout, arguments) for checkout in (given.before, HERE)[:: 1 if index % 2 else -1]}
        before, after = pair[given.before], pair[HERE]
        for row in before.keys() & after.keys():
            ratios.setdefault(row, []).append(after[row] / before[row])
    for row, values in sorted(ratios.items()):
        print(f"{row:<50} {median(values):.3f}  ({min(values):.3f} … {max(values):.3f})")


if __name__ == "__main__":
    main()
