"""UCI regression: standard and gap splits, standardised on the training part."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SETS = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "wine", "yacht")


@dataclass
class Splits:
    """R splits of equal size: inputs [R, D, n] and targets [R, n], standardised; `unit` [R] is a target's own scale."""

    x: Tensor
    t: Tensor
    x_test: Tensor
    t_test: Tensor
    unit: Tensor

    def validation(self, part: float = 0.2) -> "Splits":
        """The last `part` of a fixed shuffle of each training set as its test set; test data are left out."""
        N = self.t.shape[1]
        order = torch.randperm(N, generator=torch.Generator().manual_seed(0)).to(self.t.device)
        train, held = order.split([N - round(part * N), round(part * N)])
        return Splits(self.x[:, :, train], self.t[:, train], self.x[:, :, held], self.t[:, held], self.unit)

    def take(self, rows: Tensor) -> "Splits":
        """Some splits, each as often as its index comes."""
        return Splits(*(getattr(self, name)[rows] for name in ("x", "t", "x_test", "t_test", "unit")))


def load(folder: Path, name: str, splits: list[int] | None = None, gap: bool = False, device: str = "cpu") -> Splits:
    """A set's splits; all by default. `name`.npz holds X [n, D], y [n] and the test rows of each split, as bits."""
    with np.load(folder / f"{name}.npz") as file:
        X, y, n = torch.from_numpy(file["X"]), torch.from_numpy(file["y"]), int(file["n"])
        bits = np.unpackbits(file["test_mask_gap" if gap else "test_mask_standard"], axis=1)[:, :n].astype(bool)
    wanted = list(range(len(bits))) if splits is None else splits
    if not all(0 <= split < len(bits) for split in wanted):
        raise ValueError(f"{name} has the splits 0 to {len(bits) - 1}, got {wanted}")
    rows = [_standardised(X, y, torch.from_numpy(bits[split])) for split in wanted]
    return Splits(*(torch.stack(column).float().to(device) for column in zip(*rows, strict=True)))


def _standardised(X: Tensor, y: Tensor, test: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    centre, width = X[~test].mean(0), X[~test].std(0, correction=0)
    x = ((X - centre) / torch.where(width > 1e-10, width, 1.0)).mT  # a constant feature stays zero
    unit = y[~test].std(correction=0)
    t = (y - y[~test].mean()) / unit
    return x[:, ~test], t[~test], x[:, test], t[test], unit
