"""The tables of `benchmarks.uci`: log-likelihood, RMSE, paired differences, and published figures beside them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

#: test log-likelihoods as published: a table with a row for each method
PUBLISHED = "published.md"
#: ours, and what it is compared with
OURS = "stacked"
RIVALS = (
    "MC dropout", "deep ensemble", "deep ensemble x10", "MC dropout, scaled", "deep ensemble, scaled",
    "MC dropout, stacked", "deep ensemble, stacked",
)  # fmt: skip
#: rows that are chosen, split by split, among those of all kinds of noise: by what, and of which methods
CHOICES = {
    "ours, by ELBO": ("elbo", ("mean field x5", "precision 5 x5")),
    "ours, noise validated": ("held_out", ("stacked",)),
    "MC dropout, noise validated": ("held_out", ("MC dropout",)),
    "deep ensemble, noise validated": ("held_out", ("deep ensemble",)),
    "MC dropout, stacked, noise validated": ("held_out", ("MC dropout, stacked",)),
    "deep ensemble, stacked, noise validated": ("held_out", ("deep ensemble, stacked",)),
}
#: quantiles 0.975 of Student's t, by degrees of freedom
T975 = {1: 12.71, 2: 4.3, 3: 3.18, 4: 2.78, 5: 2.57, 7: 2.36, 9: 2.26, 10: 2.23, 12: 2.18, 14: 2.14, 15: 2.13, 19: 2.09}
#: split → what was found
Rows = Mapping[str, Mapping[str, Any]]


def cell(values: Sequence[float], digits: int = 2) -> str:
    error = f" ± {stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{error}"


def grid(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {title} | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def published(folder: Path | None) -> dict[str, dict[str, float]]:
    """Method → set → log-likelihood."""
    if folder is None or not (folder / PUBLISHED).exists():
        return {}
    lines = [line for line in (folder / PUBLISHED).read_text().splitlines() if line.startswith("|")]
    table = [[entry.strip() for entry in line.strip("|").split("|")] for line in lines]
    names = table[0][1:]
    return {
        row[0]: {name: float(x.replace("−", "-")) for name, x in zip(names, row[1:], strict=True) if x != "–"}
        for row in table[2:]
    }


def verdict(differences: Sequence[float]) -> str:
    """The mean of paired differences with its standard error; bold where it is not zero at 95 %, and to which side."""
    text = cell(differences, 3)
    if len(differences) < 2:
        return text
    limit = T975.get(len(differences) - 1, 2.1) * stdev(differences) / len(differences) ** 0.5
    return text if abs(mean(differences)) <= limit else f"**{text}**" if mean(differences) > 0 else f"{text} (worse)"


def chosen(rows: Mapping[str, Rows]) -> dict[str, Rows]:
    """All rows of a set, and those that are chosen among kinds of noise, for splits that have them all."""
    every = dict(rows)
    for title, (by, names) in CHOICES.items():
        candidates = [own for method, own in rows.items() if method.rpartition(", ")[0] in names]
        if not candidates:
            continue
        common = set.intersection(*(set(own) for own in candidates))
        every[title] = {
            r: max((own[r] for own in candidates), key=lambda one: one[by]) for r in sorted(common, key=int)
        }
    return {title: own for title, own in every.items() if own}


def values(rows: Rows, key: str) -> list[float]:
    return [one[key] for _, one in sorted(rows.items(), key=lambda pair: int(pair[0]))]


def report(results: Mapping[str, Any], data: Path | None) -> str:
    sets = {name: chosen(one["methods"]) for name, one in results["sets"].items()}
    names, tables = list(sets), []
    order = list(dict.fromkeys(method for rows in sets.values() for method in rows))
    literature = {} if results["gap"] else published(data)
    for title, key, digits in (("test log-likelihood", "log_likelihood", 2), ("RMSE", "rmse", 3)):
        rows = [[m, *(cell(values(own[m], key), digits) if m in own else "–" for own in sets.values())] for m in order]
        if key == "log_likelihood":
            for method, own in literature.items():
                rows.append([f"*{method}*", *(f"{own[n]:.2f}" if n in own else "–" for n in names)])
            if literature:
                best = [max((own[n] for own in literature.values() if n in own), default=None) for n in names]
                rows.append(["*best published*", *("–" if x is None else f"{x:.2f}" for x in best)])
            rows.append(["splits", *(str(max(map(len, own.values()), default=0)) for own in sets.values())])
        tables.append(grid(title, names, rows))
    if results["gap"]:
        rows = [
            [m, *(f"{median(values(own[m], 'log_likelihood')):.2f}" if m in own else "–" for own in sets.values())]
            for m in order
        ]
        tables.append(grid("in the gap, median over splits", names, rows))
    tables.append(grid("paired over splits, log-likelihood", names, _differences(sets)))
    return "\n\n".join(tables)


def _differences(sets: Mapping[str, Mapping[str, Rows]]) -> list[list[str]]:
    """Ours minus each rival, with the same noise and with each one's noise chosen on validation data."""
    order = list(dict.fromkeys(name for rows in sets.values() for name in rows))
    noises = [name.removeprefix(f"{OURS}, ") for name in order if name.startswith(f"{OURS}, ")]
    pairs = [(f"{OURS}, {noise}", f"{rival}, {noise}") for noise in noises for rival in RIVALS]
    pairs += [("ours, noise validated", f"{rival}, noise validated") for rival in RIVALS]
    rows = []
    for ours, rival in pairs:
        row = [f"{ours} − {rival}"]
        for own in sets.values():
            a, b = own.get(ours, {}), own.get(rival, {})
            common = sorted(set(a) & set(b), key=int)
            paired = [a[r]["log_likelihood"] - b[r]["log_likelihood"] for r in common]
            row.append(verdict(paired) if paired else "–")
        rows.append(row)
    return rows
