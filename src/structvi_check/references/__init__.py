"""Draws of posteriors that have no closed form, and how they were made.

python -m structvi_check.references.make
"""

from pathlib import Path

from safetensors import safe_open
from torch import Tensor

FOLDER = Path(__file__).parent


def load(name: str) -> tuple[Tensor, float | None]:
    """Draws [R, P] in float64, and log p(data) where it is known."""
    with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
        metadata = file.metadata() or {}
        draws = file.get_tensor("draws").double()
    return draws, float(metadata["log_evidence"]) if "log_evidence" in metadata else None
