"""The tables of `benchmarks.uci`: log-likelihood, RMSE, paired differences, and how reliable the fits are."""

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

STRUCTURED = ("covariance 5", "covariance 20", "precision 5", "precision 20")
#: test log-likelihood and RMSE of MC dropout, split by split, as published
PUBLISHED = "gal2018_mcdropout_results.json"


def cell(values: list[float], digits: int = 2) -> str:
    error = f" ± {stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{error}"


def chosen(methods: dict[str, Any]) -> list[float]:
    """Test log-likelihood of the structured posterior with the highest ELBO, split by split."""
    splits = range(len(methods[STRUCTURED[0]]["elbo"]))
    best = [max(STRUCTURED, key=lambda name, i=i: methods[name]["elbo"][i]) for i in splits]
    return [methods[name]["log_likelihood"][i] for i, name in enumerate(best)]


def grid(title: str, columns: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {title} | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def report(results: dict[str, Any], data: Path | None) -> str:
    sets, tables = results["sets"], []
    names = list(sets)
    methods = [name for one in sets.values() for name in one["methods"]]
    order = list(dict.fromkeys(methods))
    published = {}
    if data is not None and (data / PUBLISHED).exists() and not results["gap"]:
        published = json.loads((data / PUBLISHED).read_text())
    for title, key, digits in (("test log-likelihood", "log_likelihood", 2), ("RMSE", "rmse", 3)):
        found = {m: [one["methods"].get(m) for one in sets.values()] for m in order}
        rows = [[m, *("–" if one is None else cell(one[key], digits) for one in row)] for m, row in found.items()]
        if published:
            field = {"log_likelihood": "test_ll", "rmse": "test_MC_rmse"}[key]
            rows.append(["MC dropout, published", *(cell(published[n][field], digits) for n in names)])
        tables.append(grid(title, names, rows))
    full = {n: one for n, one in sets.items() if all(name in one["methods"] for name in STRUCTURED)}
    if full:
        tables.append(grid("structured, chosen by ELBO, minus", list(full), _differences(full, published)))
    if any("reliability" in one for one in sets.values()):
        tables.append(reliability({n: one for n, one in sets.items() if "reliability" in one}))
    return "\n\n".join(tables)


def _differences(sets: dict[str, Any], published: dict[str, Any]) -> list[list[str]]:
    """Paired over splits: mean difference of test log-likelihoods and its standard error."""
    rows = []
    for other in ("mean field", "MC dropout", "deep ensemble"):
        row = [other]
        for one in sets.values():
            methods = one["methods"]
            pairs = zip(chosen(methods), methods[other]["log_likelihood"], strict=True) if other in methods else ()
            row.append(cell([a - b for a, b in pairs], 3) if other in methods else "–")
        rows.append(row)
    if published and all(len(published[name]["test_ll"]) == one["splits"] for name, one in sets.items()):
        row = ["MC dropout, published"]
        for name, one in sets.items():
            pairs = zip(chosen(one["methods"]), published[name]["test_ll"], strict=True)
            row.append(cell([a - b for a, b in pairs], 3))
        rows.append(row)
    return rows


def reliability(sets: dict[str, Any]) -> str:
    """Of the first split over seeds: ELBO, how far the worst is below the best, and fallbacks to the lower rank."""
    rows = []
    for method in ("mean field", *STRUCTURED):
        row = [method]
        for one in sets.values():
            own = one["reliability"][method]
            short = 100 * (max(own["elbo"]) - min(own["elbo"])) / one["N"]
            row.append(f"{mean(own['elbo']):.0f}, worst −{short:.1f} %, {sum(own['fallback'])}/{len(own['elbo'])}")
        rows.append(row)
    row = ["rank lower than its own lower rank"]
    for one in sets.values():
        row.append(str(sum(violations(one["reliability"]).values())))
    return grid("ELBO over seeds; worst, % of N nats; fallbacks", list(sets), [*rows, row])


def violations(own: dict[str, Any]) -> dict[str, int]:
    """How many seeds have a lower ELBO at the higher rank, by more than half a nat and three standard errors."""
    counts = {}
    for form in ("covariance", "precision"):
        for low, high in (("mean field", f"{form} 5"), (f"{form} 5", f"{form} 20")):
            rows = zip(*(own[name][key] for name in (low, high) for key in ("elbo", "error")), strict=True)
            counts[high] = sum(a - b > max(0.5, 3 * (e**2 + f**2) ** 0.5) for a, e, b, f in rows)
    return counts
