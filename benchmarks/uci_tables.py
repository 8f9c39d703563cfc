"""The tables of `benchmarks.uci`: log-likelihood, RMSE, paired differences, and published figures beside them."""

from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

#: test log-likelihoods as published: a table with a row for each method
PUBLISHED = "published.md"
RIVALS = ("MC dropout", "deep ensemble")
#: quantiles 0.975 of Student's t, by degrees of freedom
T975 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 7: 2.36, 9: 2.26, 10: 2.23, 12: 2.18, 15: 2.13, 19: 2.09}


def cell(values: list[float], digits: int = 2) -> str:
    error = f" ± {stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{error}"


def grid(title: str, columns: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {title} | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def published(folder: Path | None) -> dict[str, dict[str, float]]:
    """Method → set → log-likelihood."""
    if folder is None or not (folder / PUBLISHED).exists():
        return {}
    lines = [line for line in (folder / PUBLISHED).read_text().splitlines() if line.startswith("|")]
    table = [[entry.strip() for entry in line.strip("|").split("|")] for line in lines]
    names = table[0][1:]
    numbers = {
        row[0]: {name: float(x.replace("−", "-")) for name, x in zip(names, row[1:], strict=True) if x != "–"}
        for row in table[2:]
    }
    return numbers


def verdict(differences: list[float]) -> str:
    """The mean of paired differences with its standard error; bold where it is not zero at 95 %, and to which side."""
    if len(differences) < 2:
        return cell(differences, 3)
    text = cell(differences, 3)
    limit = T975.get(len(differences) - 1, 2.1) * stdev(differences) / len(differences) ** 0.5
    return text if abs(mean(differences)) <= limit else f"**{text}**" if mean(differences) > 0 else f"{text} (worse)"


def report(results: dict[str, Any], data: Path | None) -> str:
    sets = results["sets"]
    names = list(sets)
    order = list(dict.fromkeys(name for one in sets.values() for name in one["methods"]))
    tables = []
    for title, key, digits in (("test log-likelihood", "log_likelihood", 2), ("RMSE", "rmse", 3)):
        found = {m: [one["methods"].get(m) for one in sets.values()] for m in order}
        rows = [[m, *("–" if one is None else cell(one[key], digits) for one in row)] for m, row in found.items()]
        if key == "log_likelihood" and not results["gap"]:
            for method, own in published(data).items():
                rows.append([f"*{method}*", *(f"{own[n]:.2f}" if n in own else "–" for n in names)])
        tables.append(grid(title, names, rows))
    if results["gap"]:
        rows = [
            [m, *(f"{median(one['methods'][m]['log_likelihood']):.2f}" if m in one["methods"] else "–"
                  for one in sets.values())]
            for m in order
        ]  # fmt: skip
        tables.append(grid("in the gap, median over splits", names, rows))
    tables.append(grid("paired over splits, log-likelihood", names, _differences(sets)))
    return "\n\n".join(tables)


def _differences(sets: dict[str, Any]) -> list[list[str]]:
    """Ours minus each rival, with the same noise and with each one's noise chosen on validation data."""
    order = list(dict.fromkeys(name for one in sets.values() for name in one["methods"]))
    noises = [name.removeprefix("mean field, ") for name in order if name.startswith("mean field, ")]
    pairs = [
        (f"validated λ x5, {noise}", f"{rival}, {noise}") for noise in noises for rival in RIVALS
    ] + [("ours, validated", f"{rival}, validated") for rival in RIVALS]  # fmt: skip
    rows = []
    for ours, rival in pairs:
        row = [f"{ours} − {rival}"]
        for one in sets.values():
            a, b = (one["methods"].get(name) for name in (ours, rival))
            if a is None or b is None:
                row.append("–")
                continue
            row.append(verdict([x - y for x, y in zip(a["log_likelihood"], b["log_likelihood"], strict=True)]))
        rows.append(row)
    return rows
