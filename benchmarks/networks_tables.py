"""The tables of `benchmarks.networks`, from its records: one for each set and seed."""

import json
from functools import lru_cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from .networks_measures import BINS
from .networks_methods import METHODS
from .uci_tables import grid

DEFAULT, NETWORK, SCALED = "ours, default call", "network", "temperature scaling"
RESAMPLES, FEW_RESAMPLES = 4000, 400
#: of the resamples, those that are averaged at once
PIECE = 250
ENSEMBLE, MIXTURE = "ensemble of 5", "ours, mixture of 5"
PAIRS = (
    (DEFAULT, NETWORK),
    (DEFAULT, SCALED),
    (DEFAULT, "MC dropout, injected"),
    (DEFAULT, "MC dropout, trained with"),
    ("ours, calibrated", NETWORK),
    (MIXTURE, ENSEMBLE),
    (MIXTURE, f"{ENSEMBLE}, tempered"),
    (f"{MIXTURE}, calibrated", ENSEMBLE),
    (f"{MIXTURE}, calibrated", f"{ENSEMBLE}, tempered"),
)
#: nats by which a single run counts as worse than its network
WORSE = 0.01
COLUMNS = {"nll": 4, "ece": 3, "accuracy": 4, "aurc": 4, "auroc": 3, "shift": 3}
Record = dict[str, Any]


def read(folder: Path) -> list[Record]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def report(records: list[Record]) -> str:
    """Of every set its tables, and what they come to."""
    sets: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: record["seed"]):
        sets.setdefault(record["set"], []).append(record)
    pieces = [text for name, own in sets.items() for text in _of_set(name, own)]
    return "\n\n".join([*pieces, summary(sets)])


def _of_set(name: str, records: list[Record]) -> list[str]:
    one, seeds = records[0], [record["seed"] for record in records]
    sizes = ", ".join(f"{count} {part}" for part, count in one["sizes"].items())
    title = f"### {name}\n\n{one['weights']} weights, {sizes}; seeds {seeds}; unfamiliar: {one['unfamiliar']}"
    tables = [title, measured(records), shifts(records), differences(records), against(records), choices(records)]
    if failed := failures(records):
        tables.append(failed)
    return [text for text in tables if text]


def rows_of(records: list[Record], method: str) -> list[Record]:
    """The rows of a method, of the seeds where it ran."""
    found = [record["methods"].get(method, {"error": ""}) for record in records]
    return [row for row in found if "error" not in row]


def methods_of(records: list[Record]) -> list[str]:
    """All that ran in every seed of the set."""
    return [name for name in METHODS if len(rows_of(records, name)) == len(records)]


def cell(values: list[float], digits: int) -> str:
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def measured(records: list[Record]) -> str:
    """Means and standard deviations over seeds."""
    columns = COLUMNS | {"passes": 1, "fit_seconds": 1, "forwards": 0}
    first = rows_of(records, NETWORK)[0]
    more = {"referred": "referred", "dice": "Dice"}
    more = {key: title for key, title in more.items() if first.get(key) is not None}
    lines = []
    for name in METHODS:
        rows = rows_of(records, name)
        if not rows:
            continue
        label = name if len(rows) == len(records) else f"{name} ({len(rows)} of {len(records)} seeds)"
        cells = [cell([row[key] for row in rows], digits) for key, digits in list(columns.items())[:6]]
        cells += [f"{mean(row[key] for row in rows):.1f}" for key in list(columns)[6:]]
        lines.append([label, *cells, *(cell([row[key] for row in rows], 3) for key in more)])
    head = ["NLL", "ECE", "accuracy", "AURC", "AUROC", "NLL under shift", "passes to fit", "s to fit", "to predict"]
    return grid("method", [*head, *more.values()], lines)


def shifts(records: list[Record]) -> str:
    names = list(rows_of(records, NETWORK)[0]["shifts"])
    lines = [
        [name, *(cell([row["shifts"][shift] for row in rows_of(records, name)], 3) for shift in names)]
        for name in methods_of(records)
    ]
    return grid("NLL, shifted", names, lines)


def best_laplace(record: Record) -> str | None:
    """By validation NLL."""
    names = [n for n, row in record["methods"].items() if n.startswith("laplace") and "error" not in row]
    return min(names, key=lambda name: record["methods"][name]["validation"], default=None)


def rivals(records: list[Record]) -> dict[str, list[str | None]]:
    """What differences are taken to: a method for each seed."""
    named: dict[str, list[str | None]] = {
        name: [name] * len(records) for name in (NETWORK, SCALED, "MC dropout, injected")
    }
    trained = "MC dropout, trained with"
    named[trained] = [trained] * len(records)
    named["laplace-torch, best on validation"] = [best_laplace(record) for record in records]
    ran = set(methods_of(records))
    return {name: own for name, own in named.items() if all(one in ran for one in own)}


def gap(records: list[Record], method: str, others: list[str | None], what: str = "cases") -> np.ndarray:
    """NLL of a method minus that of another, of every seed and case: [seeds, cases]; below zero is better."""
    pairs = zip(records, others, strict=True)
    return np.array(
        [np.subtract(record["methods"][method][what], record["methods"][str(other)][what]) for record, other in pairs]
    )


def interval(difference: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """Mean, and 95 % interval of a bootstrap that draws seeds and cases: [seeds, cases]."""
    rows, drawn = resamples(*difference.shape, seed)
    by_case = rows @ difference / len(difference)  # [R, cases]
    pieces = (slice(start, start + PIECE) for start in range(0, RESAMPLES, PIECE))
    means = np.concatenate([(drawn[piece] * by_case[piece]).mean(1) for piece in pieces])
    low, high = np.quantile(means, (0.025, 0.975))
    return float(difference.mean()), float(low), float(high)


@lru_cache(maxsize=4)
def resamples(seeds: int, cases: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each seed [R, seeds] and each case [R, cases] is drawn: the same for all differences of a set."""
    random = np.random.default_rng(seed)
    rows = random.multinomial(seeds, np.full(seeds, 1 / seeds), RESAMPLES)
    drawn = [np.bincount(random.integers(cases, size=cases), minlength=cases) for _ in range(RESAMPLES)]
    return rows, np.stack([counts.astype(np.uint8) for counts in drawn])


def ranked_interval(records: list[Record], method: str, other: str, what: str) -> str:
    """ECE or AURC of a method minus that of another: mean, and 95 % interval of a bootstrap over seeds and cases."""
    rows = [[record["methods"][name] for name in (method, other)] for record in records]
    if any(row["confidence"] is None for pair in rows for row in pair):
        return "–"
    confidence = np.array([[row["confidence"] for row in pair] for pair in rows])  # [seeds, 2, cases]
    right = np.array([[row["right"] for row in pair] for pair in rows])
    measure = {"ece": _calibration_error, "aurc": _risk_area}[what]
    whole = measure(confidence, right)
    random, found = np.random.default_rng(0), []
    for _ in range(FEW_RESAMPLES):
        seeds = random.integers(len(rows), size=len(rows))
        chosen = random.integers(confidence.shape[2], size=confidence.shape[2])
        found.append(np.subtract(*measure(confidence[seeds][:, :, chosen], right[seeds][:, :, chosen]).mean(0)))
    return _shown(float(np.subtract(*whole.mean(0))), *np.quantile(found, (0.025, 0.975)))


def _calibration_error(confidence: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Over bins of equal width: [.., cases] → [..]."""
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [((confidence - right) * (bins == index)).sum(-1) for index in range(BINS)]
    return np.abs(gaps).sum(0) / right.shape[-1]


def _risk_area(confidence: np.ndarray, right: np.ndarray) -> np.ndarray:
    """[.., cases] → [..]"""
    order = np.argsort(-confidence, axis=-1, kind="stable")
    wrong = 1 - np.take_along_axis(right, order, -1)
    return (wrong.cumsum(-1) / np.arange(1, right.shape[-1] + 1)).mean(-1)


def _shown(middle: float, low: float, high: float) -> str:
    return f"{middle:+.4f} [{low:+.4f}, {high:+.4f}]"


def differences(records: list[Record]) -> str:
    against = rivals(records)
    lines = []
    for name in methods_of(records):
        if name == NETWORK:
            continue
        cells = []
        for other in against.values():
            if other == [name] * len(records):
                cells.append("–")
                continue
            cells.append(_shown(*interval(gap(records, name, other))))
        lines.append([name, *cells])
    return grid("NLL minus that of", list(against), lines)


def against(records: list[Record]) -> str:
    """The default call, and five networks, beside what they are to be no worse than."""
    ran, lines = methods_of(records), []
    for ours, other in PAIRS:
        if ours in ran and other in ran:
            others: list[str | None] = [other] * len(records)
            nll, shift = (_shown(*interval(gap(records, ours, others, what))) for what in ("cases", "shift_cases"))
            right = _shown(*interval(gap(records, ours, others, "right")))
            ranked = [ranked_interval(records, ours, other, what) for what in ("ece", "aurc")]
            lines.append([f"{ours} − {other}", nll, ranked[0], right, ranked[1], shift])
    columns = ["NLL", "ECE", "accuracy", "AURC", "NLL under shift"]
    return grid("differences, 95 %", columns, lines) if lines else ""


def choices(records: list[Record]) -> str:
    """Gain over the network in nats, where the choice was made and on test data; optimism is what is lost between."""
    lines = []
    for name in methods_of(records):
        rows = rows_of(records, name)
        if not any(row["choice"] for row in rows):
            continue
        networks = rows_of(records, NETWORK)
        on = {
            part: [net[part] - row[part] for net, row in zip(networks, rows, strict=True)]
            for part in ("validation", "nll")
        }
        lost = [a - b for a, b in zip(on["validation"], on["nll"], strict=True)]
        density = [f"{-mean(row[part] for row in rows):.4f}" for part in ("validation", "nll")]
        chosen = "; ".join(dict.fromkeys(row["choice"] for row in rows))
        cells = [cell(values, 4) for values in (on["validation"], on["nll"], lost)]
        lines.append([name, *density, *cells, chosen[:160]])
    columns = ["held-out density", "on test", "gain, held out", "gain, test", "optimism", "chosen"]
    return grid("choices", columns, lines) if lines else ""


def failures(records: list[Record]) -> str:
    found: dict[str, list[int]] = {}
    for record in records:
        for name, row in record["methods"].items():
            if "error" in row:
                found.setdefault(f"{name}: {row['error']}", []).append(record["seed"])
    return "\n".join(f"- not run: {text} (seeds {seeds})" for text, seeds in found.items())


def summary(sets: dict[str, list[Record]]) -> str:
    """Is the default call ever worse than the network?"""
    ours = {name: own for name, own in sets.items() if DEFAULT in methods_of(own)}
    if not ours:
        return "### Summary\n\nThe default call was not run."
    lines, runs, verdicts = [], [], []
    for name, own in ours.items():
        difference = gap(own, DEFAULT, [NETWORK] * len(own))
        middle, low, high = interval(difference)
        each = difference.mean(1).tolist()
        runs += each
        verdicts.append((middle <= 0, high < 0, low > 0))
        worst = max(each)
        lines.append([name, f"{middle:+.4f} [{low:+.4f}, {high:+.4f}]", f"{worst:+.4f}", _count(each)])
    table = grid("default call minus network", ["NLL, 95 %", "worst seed", f"worse by > {WORSE}"], lines)
    good, better, worse = (sum(column) for column in zip(*verdicts, strict=True))
    text = (
        f"The default call's NLL is not above the network's on {good} of {len(ours)} sets; it is lower at 95 % on "
        f"{better}, higher at 95 % on {worse}. Of {len(runs)} single runs {_count(runs)} are more than {WORSE} nats "
        "worse than their network."
    )
    return f"### Summary\n\n{table}\n\n{text}"


def _count(gaps: list[float]) -> str:
    many = sum(value > WORSE for value in gaps)
    return f"{many} ({100 * many / len(gaps):.0f} %)"
