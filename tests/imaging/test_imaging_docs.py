"""What docs/imaging.md shows runs as written, on small volumes."""

import re
from pathlib import Path

import matplotlib as mpl
import nibabel
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

mpl.use("Agg")
PAGE = Path(__file__).parents[2] / "docs" / "imaging.md"
SHAPE = (12, 16, 8)


class Dicts(Dataset):
    """As MONAI's data sets: a channel axis for the label too, in float."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        x, t = self.data[i]
        return {"image": x, "label": t.unsqueeze(0).float(), "path": f"{i}.nii.gz", "box": torch.zeros(2)}


def scans(n):
    x = torch.randn(n, 1, *SHAPE)
    return TensorDataset(x, (x[:, 0] > 0.5).long())


@pytest.mark.filterwarnings("ignore:More than 20 figures")
def test_the_page_runs_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv3d(1, 2, 3, padding=1, bias=False), nn.BatchNorm3d(2), nn.ReLU(), nn.MaxPool3d(2),
        nn.Upsample(scale_factor=2), nn.Conv3d(2, 2, 1),
    )  # fmt: skip
    train, held_out, test = scans(6), scans(3), scans(3)
    net(train.tensors[0])  # its statistics
    np.save("volume.npy", np.random.default_rng(0).normal(size=(1, 44, 10, 12)).astype(np.float32))
    values = np.random.default_rng(0).normal(100, 10, SHAPE).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(values, np.diag([2.0, 2, 3, 1])), "scan.nii.gz")
    names = {
        "net": net, "train_set": train, "held_out_set": held_out, "test_set": test, "images": test.tensors[0],
        "monai_loader": DataLoader(Dicts(train), 2), "monai_held_out": DataLoader(Dicts(held_out), 2),
        "volume": test.tensors[0][0], "epistemic": np.full((44, 10, 12), np.nan), "np": np, "m": 4, "N": 6,
    }  # fmt: skip
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    runnable = [block for block in blocks if "kl_weight=m" not in block]  # three ways of saying one thing
    assert len(runnable) == 8
    for block in runnable:
        volume = names["volume"]
        exec(compile(block, PAGE.name, "exec"), names)
        if "np.load" in block:
            assert (names["epistemic"] >= 0).all()  # every voxel was reached
            names["volume"] = volume  # the page goes on with its own
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "scan.html", "scan_aleatoric.nii.gz", "scan_epistemic.nii.gz", "scan_label.nii.gz", "scan_probability.nii.gz",
        "scan_uncertainty.nii.gz",
    ]  # fmt: skip
    assert Path("case.html").exists()
    assert names["pred"].mutual_information.shape == (3, *SHAPE)
    plain, weighted = torch.tensor([0.2, 0.8]).log(), torch.tensor([0.2, 0.8 * 20.0]).log()
    undone = names["Unweighted"](nn.Identity(), [1.0, 20.0])(weighted.reshape(1, 2, 1))
    torch.testing.assert_close(undone.softmax(1).flatten(), plain.exp())
