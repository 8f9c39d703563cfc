"""The rules that `benchmarks.networks_widths` compares."""

from typing import Any


def table(found: list[dict[str, Any]]) -> str:
    return f"{len(found)} networks"
