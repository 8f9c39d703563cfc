"""The plans and the tables of `benchmarks.from_scratch`."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

#: what a line of JSON has of a run
SHORT = (
    "method", "optimizer", "lam", "seed", "nll", "accuracy", "ece", "shift", "validation", "elbo", "gain", "moved",
    "scale", "ms", "fit_seconds", "seconds", "kept", "risen", "T",
    "widths", "shifts", "notes",
)  # fmt: skip
MEASURES = ("nll", "accuracy", "ece", "shift", "validation", "auroc")
COLUMNS = {"nll": 4, "accuracy": 4, "ece": 3, "shift": 3, "validation": 4, "elbo": 0, "gain": 0, "moved": 2, "ms": 1}
#: settings that are no choice of a method: runs that differ in these alone are repeats
REPEATS = ("seed", "draws", "limit")
SEEDS = range(3)
#: resamples of a bootstrap over seeds and test images
RESAMPLES = 2000


def short(row: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """A run without its cases, and of its settings only what is not `plain`."""
    own = {key: row[key] for key in row if key in plain and row[key] != plain[key]}
    values = {key: row[key] for key in SHORT if key in row}
    if "tempered" in row:
        values |= {f"tempered_{key}": row["tempered"][key] for key in MEASURES}
    return {key: round(x, 5) if isinstance(x, float) else x for key, x in (own | values).items()}


def table_runs(setting: Callable[..., Any]) -> list[Any]:
    """The table: every method at its candidates of λ, three seeds; nine runs a seed, for nine processes."""
    found = []
    for seed in SEEDS:
        found.append(setting(method="map", lam=0.1, seed=seed))
        for lam, wider in ((0.02, 0.05), (0.01, 0.03)):  # in its own coordinates a family bears a larger λ
            found.append(setting(method="mean_field", lam=lam, seed=seed))
            found.append(setting(method="rotated", lam=wider, seed=seed))
            found.append(setting(method="low_rank", lam=lam, seed=seed))
        found.append(setting(method="sgd", seed=seed))
        found.append(setting(method="ivon", lr=0.5, beta1=0.9, beta2=0.99995, h0=0.5, ess=10.0, seed=seed))
    return found


def rotated_runs(setting: Callable[..., Any]) -> list[Any]:
    """Do rotated families pay where the mean moves? Bases, refreshes and ranks: on the digits, without --data."""
    found = []
    for seed, lam in product(SEEDS, (1.0, 0.1)):
        common = {"lam": lam, "seed": seed, "epochs": 100, "lr": 0.01, "scale_lr": 0.05, "draws": 64}
        found.append(setting(method="mean_field", **common))
        found += [setting(method="rotated", refresh=r, turn=t, **common) for r, t in ((10, 1), (10, 10), (50, 1))]
        found += [setting(method="low_rank", rank=rank, **common) for rank in (4, 8)]
        found += [setting(method="rotated_low_rank", rank=rank, turn=1, **common) for rank in (4, 8)]
    return found


def steps_runs(setting: Callable[..., Any]) -> list[Any]:
    """Adam, SOAP and natural gradients under one objective; and how λ rises: mean field, the digits, without --data."""
    ways = [
        *({"optimizer": "adam", "lr": lr} for lr in (0.02, 0.05)),
        {"lr": 0.01, "scale_lr": 0.05},
        *({"optimizer": "newton", "lr": lr, "scale_lr": 0.1, "beta1": 0.9} for lr in (0.1, 0.3)),
        *({"lr": 0.01, "scale_lr": 0.05, "rise": rise} for rise in (0.02, 0.1, 0.5)),
    ]
    common = {"epochs": 100, "draws": 64}
    return [setting(seed=seed, lam=lam, **way, **common) for seed in SEEDS for way in ways for lam in (1.0, 0.1)]


PLANS: dict[str, Callable[[Callable[..., Any]], list[Any]]] = {
    "table": table_runs,
    "rotated": rotated_runs,
    "steps": steps_runs,
}


def plan(name: str, setting: Callable[..., Any]) -> list[Any]:
    if name not in PLANS:
        raise ValueError(f"no plan {name!r}: there are {', '.join(PLANS)}")
    return PLANS[name](setting)


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"))]


def spread(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs, and each tempered one and each other way to predict as a row of its own."""
    found = []
    for row in rows:
        others = [own | {"method": f"{row['method']}, {name}"} for name, own in row.get("ways", {}).items()]
        for way in [row, *(row | own for own in others)]:
            found.append(way)
            if "tempered" in way:
                found.append(way | way["tempered"] | {"method": f"{way['method']}, tempered"})
    return found


def grouped(rows: list[dict[str, Any]], plain: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Runs by their settings, but for what is a repeat."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in spread(rows):
        keys = [key for key in plain if row.get(key, plain[key]) != plain[key] and key not in (*REPEATS, "method")]
        name = ", ".join([row["method"], *(f"{key} {row[key]:g}" if isinstance(row[key], float) else f"{key} {row[key]}"
                                           for key in keys)])  # fmt: skip
        found.setdefault(name, []).append(row)
    return found


def cell(values: list[Any], digits: int) -> str:
    if None in values:
        return "–"
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def table(groups: dict[str, list[dict[str, Any]]]) -> str:
    lines = ["| run | seeds | " + " | ".join(COLUMNS) + " |", "| --- | --- |" + " --- |" * len(COLUMNS)]
    for name, rows in groups.items():
        cells = [cell([row.get(key) for row in rows], digits) for key, digits in COLUMNS.items()]
        lines.append(f"| {name} | {len(rows)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def chosen(groups: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Of each method the runs of the lowest mean validation NLL, among those with the most seeds."""
    most = max((len(rows) for rows in groups.values()), default=0)
    best: dict[str, tuple[float, str]] = {}
    for name, rows in groups.items():
        method, value = rows[0]["method"], mean(row["validation"] for row in rows)
        if (len(rows) == most and rows[0].get("lam", 1.0) != 1.0) or method.startswith(("sgd", "ivon")):
            best[method] = min(best.get(method, (value, name)), (value, name))
    return {name: groups[name] for _, name in best.values()}


def differences(groups: dict[str, list[dict[str, Any]]], against: str) -> str:
    """Of NLL and NLL under shift, paired over seeds and images: mean and 95 % of a bootstrap over both."""
    base = next((rows for rows in groups.values() if rows[0]["method"] == against), None)
    if base is None:
        return ""
    lines = [f"| minus {against} | NLL | NLL under shift |", "| --- | --- | --- |"]
    for name, rows in groups.items():
        if rows is base or "cases" not in rows[0]:
            continue
        cells = [interval(rows, base, key) for key in ("cases", "shift_cases")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def interval(rows: list[dict[str, Any]], base: list[dict[str, Any]], key: str) -> str:
    others = {row["seed"]: row for row in base}
    pairs = [(row, others[row["seed"]]) for row in rows if row["seed"] in others]
    if not pairs:
        return "–"
    gaps = torch.stack([torch.tensor(a[key]).double() - torch.tensor(b[key]).double() for a, b in pairs])  # [seeds, N]
    generator = torch.Generator().manual_seed(0)
    S, N = gaps.shape
    means = torch.stack([
        gaps[torch.randint(S, (S,), generator=generator)][:, torch.randint(N, (N,), generator=generator)].mean()
        for _ in range(RESAMPLES)
    ])  # fmt: skip
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return f"{float(gaps.mean()):+.4f} [{low:+.4f}, {high:+.4f}]"


def shifts(groups: dict[str, list[dict[str, Any]]]) -> str:
    """NLL under each shift."""
    kinds = list(dict.fromkeys(kind for rows in groups.values() for row in rows for kind in row.get("shifts", {})))
    lines = ["| NLL under shift | " + " | ".join(kinds) + " |", "| --- |" + " --- |" * len(kinds)]
    for name, rows in groups.items():
        cells = [cell([row["shifts"].get(kind) for row in rows], 3) for kind in kinds]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(rows: list[dict[str, Any]], plain: dict[str, Any]) -> str:
    """All runs; of each method that with the lowest validation NLL; differences of all that have as many seeds."""
    groups = grouped(rows, plain)
    best = chosen(groups)
    most = max((len(rows) for rows in best.values()), default=0)
    tempered = {name: rows for name, rows in groups.items() if len(rows) == most and rows[0].get("lam", 1.0) != 1.0}
    parts = [
        "All runs:", table(groups), "By validation NLL:", table(best), differences(tempered, "map, tempered"),
        shifts(tempered),
    ]  # fmt: skip
    return "\n\n".join(filter(None, parts))
