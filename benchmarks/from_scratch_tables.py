"""The plans and the tables of `benchmarks.from_scratch`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: what a line of JSON has of a run
SHORT = (
    "method", "optimizer", "lam", "seed", "nll", "accuracy", "ece", "shift", "validation", "elbo", "gain", "moved",
    "scale", "ms", "fit_seconds", "seconds", "kept", "T", "notes",
)  # fmt: skip
MEASURES = ("nll", "accuracy", "ece", "shift", "validation", "auroc")


def short(row: dict[str, Any]) -> dict[str, Any]:
    """A run without its cases, and only what is not as by default of its settings."""
    from .from_scratch import Setting

    plain = vars(Setting())
    own = {key: row[key] for key in row if key in plain and row[key] != plain[key]}
    values = {key: row[key] for key in SHORT if key in row}
    if "tempered" in row:
        values |= {f"tempered_{key}": row["tempered"][key] for key in MEASURES}
    return {key: round(x, 5) if isinstance(x, float) else x for key, x in (own | values).items()}


PLANS: dict[str, Callable[[Any], list[Any]]] = {}


def plan(name: str, setting: Any) -> list[Any]:
    return PLANS[name](setting)


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"))]


def report(rows: list[dict[str, Any]]) -> str:
    return "\n".join(json.dumps(short(row)) for row in rows)
