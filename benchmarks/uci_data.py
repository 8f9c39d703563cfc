"""UCI regression: standard and gap splits, standardised on the training part."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SETS = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "wine", "yacht")


class Split(NamedTuple):
    """Inputs [n, D] and targets [n, 1], standardised; `unit` is a target's own scale."""

    x: Tensor
    t: Tensor
    x_test: Tensor
    t_test: Tensor
    unit: float

    def validation(self, part: float = 0.2) -> "Split":
        """The last `part` of a fixed shuffle of the training set as its test set; test data are left out."""
        N = len(self.t)
        order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
        train, held = order.split([N - round(part * N), round(part * N)])
        return Split(self.x[train], self.t[train], self.x[held], self.t[held], self.unit)


def load(folder: Path, name: str, splits: list[int] | None = None, gap: bool = False) -> dict[int, Split]:
    """A set's splits, all by default. `name`.npz holds X [n, D], y [n] and the test rows of each split, as bits."""
    with np.load(folder / f"{name}.npz") as file:
        X, y, n = torch.from_numpy(file["X"]), torch.from_numpy(file["y"]), int(file["n"])
        bits = np.unpackbits(file["test_mask_gap" if gap else "test_mask_standard"], axis=1)[:, :n].astype(bool)
    wanted = list(range(len(bits))) if splits is None else splits
    if not all(0 <= split < len(bits) for split in wanted):
        raise ValueError(f"{name} has the splits 0 to {len(bits) - 1}, got {wanted}")
    return {split: _standardised(X, y, torch.from_numpy(bits[split])) for split in wanted}


def _standardised(X: Tensor, y: Tensor, test: Tensor) -> Split:
    centre, width = X[~test].mean(0), X[~test].std(0, correction=0)
    x = ((X - centre) / torch.where(width > 1e-10, width, 1.0)).float()  # a constant feature stays zero
    unit = y[~test].std(correction=0)
    t = ((y - y[~test].mean()) / unit).float().unsqueeze(-1)
    return Split(x[~test], t[~test], x[test], t[test], float(unit))
