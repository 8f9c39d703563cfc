"""Numbers in pages: each comes from a file in docs/results, which names the command that measured it.

    python docs/make_results.py                 write every number into its page
    python docs/make_results.py NAME PATH       read what the command wrote to PATH, as docs/results/NAME.json

A result file has `command`, `machine` and `table`: a header and rows of words. A page shows a table between
`<!-- result NAME -->` and `<!-- end -->`, and one number as `0.344<!-- NAME: row, column -->`.
"""

import csv
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
Table = list[list[str]]

SETS = {
    "digits": "digits, perceptron, 5 networks",
    "breastmnist": "BreastMNIST, batch norm, 10 networks",
    "nuclei": "nuclei, U-Net, 3 networks",
}
METHODS = {"network": "network", "temperature scaling": "temperature", "ours, default call": "laplace"}


def networks(path: Path) -> Table:
    table = [["data", *METHODS.values(), *(f"shift: {name}" for name in METHODS.values())]]
    for name, words in SETS.items():
        found = [json.loads(file.read_text())["methods"] for file in sorted(path.glob(f"{name}-*.json"))]
        if found:
            cells = [mean(one[method][key] for one in found) for key in ("nll", "shift") for method in METHODS]
            table.append([words, *(f"{cell:.3g}" for cell in cells)])
    return table


def pretrained(path: Path) -> Table:
    """Return the table that the command printed into a file."""
    rows = [line.strip("| \n").split(" | ") for line in path.read_text().splitlines() if line.startswith("| ")]
    return [row for row in rows if not set(row[0]) <= set("- ")]


def families(path: Path) -> Table:
    """Return the table that the tutorial prints."""
    printed = re.search(r"^ +family +learned.*?(?=\n```)", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert printed is not None
    line = r" *(.*?)  +(\d+) +[\d.]+ +(\S+) +(-?[\d.]+) +(-?[\d.]+) .*"
    rows = [list(found.groups()) for found in map(re.compile(line).fullmatch, printed[0].splitlines()[1:]) if found]
    return [["family", "parameters", "ELBO", "near", "gap"], *rows]


def posteriordb(path: Path) -> Table:
    columns = {
        "method": "family", "mean max": "mean", "sd max": "standard deviation", "evaluations": "evaluations",
        "missed, flagged": "flagged", "sound, not flagged": "not flagged", "k < 0.7": "k̂ < 0.7",
        "corrected within limits": "corrected within limits",
    }  # fmt: skip
    rows = json.loads(path.read_text())["summary"]
    return [list(columns.values()), *([word(row.get(name)) for name in columns] for row in rows)]


def tables(path: Path) -> Table:
    rows = json.loads(path.read_text())
    return [["table", "structvi", "baseline", "gain", "CPU s"]] + [
        [
            f"{row['table']}, {row['rows']} × {row['columns']}", f"{row['ours']:.3f}",
            f"{row['theirs']:.3f}, {row['baseline']}", f"{row['gain']:+.3f} ± {row['half']:.3f}",
            f"{row['seconds']:.0f}",
        ]
        for row in rows
    ]  # fmt: skip


def check(path: Path) -> Table:
    rows = json.loads(path.read_text())["rows"]
    methods = [name for name in dict.fromkeys(row["method"] for row in rows) if "head" not in name]
    table = [["problem", *methods]]
    for problem in dict.fromkeys(row["problem"] for row in rows):
        own = {row["method"]: row for row in rows if row["problem"] == problem}
        table.append([problem, *(coverage(own[method]) for method in methods)])
    return table


def coverage(row: dict[str, Any]) -> str:
    if row["measures"] is None:
        return "–"
    if row["grade"] == "not a posterior":
        return "points"
    low, high = (100 * row["measures"][f"coverage_{end}"] for end in ("min", "max"))
    return f"{low:.0f}–{high:.0f}{' *' if row['bayesian'] else ''}"


def paper(*names: str) -> Callable[[Path], Table]:
    """Return a reader of these columns of a CSV file of `structvi reproduce`."""

    def read(path: Path) -> Table:
        from structvi_paper.reproduce import COLUMNS

        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        return [[COLUMNS[name] for name in names], *([word(row[name]) for name in names] for row in rows)]

    return read


def word(value: Any) -> str:
    """Return a cell: a number with three digits."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value or "–")
    return "< 10⁻⁶" if 0 < abs(number) < 1e-6 else f"{number:.3g}".replace("inf", "∞")


#: name → how its source is read, and the command that writes the source
SOURCES: dict[str, tuple[Callable[[Path], Table], str]] = {
    "networks": (
        networks,
        'python -m benchmarks.networks --data DIR --sets digits,breastmnist,nuclei '
        '--methods "temperature scaling;ours, default call" --out PATH',
    ),
    "pretrained": (
        pretrained,
        "python -m benchmarks.pretrained --data DIR --train 4000 --validation 2000 --test 1500 > PATH",
    ),
    "families": (families, "python docs/make_tutorials.py choosing_a_family"),
    "posteriordb": (posteriordb, "python -m benchmarks.posteriordb --data DIR --out PATH"),
    "tables": (tables, "python -m benchmarks.tables --data DIR --out PATH"),
    "check": (check, "structvi check --quick --out PATH"),
    "table1": (
        paper("method", "rank", "paper_kl_p_q", "kl_p_q", "kl_q_p", "optimum_kl_q_p", "excess", "stochastic_excess"),
        "structvi reproduce table1 --seed 0 --out PATH",
    ),
    "table2": (
        paper("method", "rank", "paper_log_q_true", "log_q_true", "paper_kl_p_q", "kl_p_q"),
        "structvi reproduce table2 --seed 0 --out PATH",
    ),
}  # fmt: skip


def keep(name: str, path: Path) -> None:
    """Write the result file of a measurement."""
    read, command = SOURCES[name]
    found = {"command": command, "machine": "one CPU thread", "table": read(path)}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def shown(name: str) -> str:
    """Return a result as a table in Markdown, with its command below."""
    found = result(name)
    header, *rows = found["table"]
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n*`{found['command']}`, {found['machine']}*"


def number(name: str, row: str, column: str) -> str:
    """Return the cell of the first row whose name begins so."""
    header, *rows = result(name)["table"]
    return next(cells[header.index(column)] for cells in rows if cells[0].startswith(row))


def filled(text: str) -> str:
    """Return the page with the numbers of the result files."""
    table = r"(<!-- result (\w+) -->\n).*?(<!-- end -->)"
    text = re.sub(table, lambda found: f"{found[1]}{shown(found[2])}\n\n{found[3]}", text, flags=re.DOTALL)
    cell = r"[\w.+−-]+(<!-- (\w+): ([^,>]+), ([^>]+?) -->)"
    return re.sub(cell, lambda found: number(found[2], found[3], found[4]) + found[1], text)


def pages() -> list[Path]:
    """Return all pages that may show numbers."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


if __name__ == "__main__":
    if len(sys.argv) == 3:
        keep(sys.argv[1], Path(sys.argv[2]))
    for page in pages():
        page.write_text(filled(page.read_text()))
