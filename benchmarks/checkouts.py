"""Is a step as fast as before? `benchmarks.step_cost` of two checkouts, in turn, in one run.

    make bench-compare                                   # this checkout against the last release
    make bench-compare REF=main~20                       # or against any revision
    python -m benchmarks.checkouts [REF or FOLDER] [--rounds 7] [--net mlp] [--ranks 0 4] [--draws 1 2] [--limit 1.05]

Each process measures steps as multiples of the deterministic step beside them, which takes out how fast the machine is
at the moment. For each row the median over rounds of this checkout's multiple over the other's: above one it has become
slower. Twenty seconds a round. With --limit the command fails where a median is above it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

HERE = Path(__file__).parents[1]


def git(*arguments: str, folder: Path = HERE) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def last_release(folder: Path = HERE) -> str:
    """The newest tag that this checkout descends from."""
    try:
        return git("describe", "--tags", "--abbrev=0", folder=folder)
    except ValueError:
        raise ValueError(
            "no release is tagged in this checkout: give a revision to compare with, make bench-compare REF=main~20, "
            "or fetch the tags (git fetch --tags)"
        ) from None


@contextmanager
def checkout(of: str | None, folder: Path = HERE) -> Iterator[Path]:
    """A folder that is a checkout already, or one made of a revision for the time of the run."""
    if of is not None and (Path(of) / "benchmarks").is_dir():
        yield Path(of)
        return
    commit = git("rev-parse", "--verify", f"{of or last_release(folder)}^{{commit}}", folder=folder)
    with tempfile.TemporaryDirectory() as place:
        git("clone", "--quiet", "--shared", "--no-checkout", str(folder), place, folder=folder)
        git("checkout", "--quiet", commit, folder=Path(place))
        yield Path(place)


def measure(place: Path, arguments: list[str]) -> dict[str, float]:
    """Row → a step over the deterministic one, median over repeats in the same process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.step_cost", *arguments, "--out", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(place / "src")}
        subprocess.run(command, cwd=place, env=environment, check=True, stdout=subprocess.DEVNULL)
        rows = json.loads(out.read_text())["rows"]
    return {f"{row['method']}, rank {row['rank']}, {row['draws']} draws": row["ratio"] for row in rows}


def lines(ratios: Mapping[str, Sequence[float]]) -> list[str]:
    """A row each: the median of after over before, and its range over rounds."""
    head = f"{'step over that of the other checkout':<50} median  (range)"
    return [head] + [
        f"{row:<50} {median(values):.3f}  ({min(values):.3f} … {max(values):.3f})"
        for row, values in sorted(ratios.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "before", nargs="?", help="a revision, or the folder of a checkout; the last release if left out"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--net", default="mlp")
    parser.add_argument("--ranks", nargs="+", default=["0", "4"])
    parser.add_argument("--draws", nargs="+", default=["1", "2"])
    parser.add_argument("--repeats", default="15")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=float, help="fail where a median is above it")
    given = parser.parse_args()
    arguments = ["--net", given.net, "--ranks", *given.ranks, "--draws", *given.draws, "--repeats", given.repeats]
    arguments += ["--device", given.device, "--methods", "deterministic", "MeanField*", "Structured*"]
    ratios: dict[str, list[float]] = {}
    with checkout(given.before) as other:
        for index in range(given.rounds):
            pair = {place: measure(place, arguments) for place in (other, HERE)[:: 1 if index % 2 else -1]}
            before, after = pair[other], pair[HERE]
            for row in before.keys() & after.keys():
                ratios.setdefault(row, []).append(after[row] / before[row])
    print("\n".join(lines(ratios)))
    if given.limit is not None and (slow := [row for row, all in ratios.items() if median(all) > given.limit]):
        sys.exit(f"slower than {given.limit} of the other checkout: {'; '.join(sorted(slow))}")


if __name__ == "__main__":
    main()
