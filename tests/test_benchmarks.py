"""The benchmarks run and say what they promise to say; their figures are in docs/benchmarks.md."""

import gzip
import json
import struct
import sys
from functools import partial

import pytest
import torch

from benchmarks import bayesian_head, classification, gaussian_fit
from structvi.reproduce.optima import best_kl

METHODS = [method.name for method in classification.METHODS]


@pytest.fixture
def small(monkeypatch):
    """The benchmark's way, with a small network and few draws."""
    monkeypatch.setattr(classification, "HIDDEN", 8)
    for method in classification.METHODS:
        monkeypatch.setattr(method, "draws", min(method.draws, 4))


def test_classification_on_digits(small, tmp_path):
    classification.main(["--quick", "--out", str(tmp_path / "results.json")])
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["data"], results["sizes"]["test"], results["seeds"]) == ("digits", 500, 1)
    assert results["versions"]["torch"] == torch.__version__
    assert [row["method"] for row in results["rows"]] == METHODS
    assert len(results["runs"]) == len(METHODS)
    for row in results["rows"]:
        for column in ("accuracy", "nll", "ece", "auroc permuted", "auroc turned"):
            assert set(row[column]) == {"mean", "sd"}
        # chance is 0.1: even twelve epochs of eight hidden units are far from it
        assert row["accuracy"]["mean"] > 0.3
        # what makes the methods comparable
        assert row["evaluations"]["mean"] == 12
        assert ("elbo" in row) == (row["method"] not in ("MAP", "MC dropout", "deep ensemble of 3"))


def write_idx(path, array):
    path.parent.mkdir(exist_ok=True)
    header = struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.numpy().tobytes()))


def test_classification_on_idx_files(small, tmp_path):
    """Files of MNIST's form: images whose label is the row that is lit, and of letters as noise."""
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 5060), ("t10k", 50)):
        labels = torch.randint(10, (count,), generator=generator, dtype=torch.uint8)
        images = torch.zeros(count, 10, 10, dtype=torch.uint8)
        images[torch.arange(count), labels.long()] = 255
        write_idx(tmp_path / f"mnist/{split}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"mnist/{split}-labels-idx1-ubyte.gz", labels)
    letters = torch.randint(256, (50, 10, 10), generator=generator, dtype=torch.uint8)
    write_idx(tmp_path / "notmnist/t10k-images-idx3-ubyte.gz", letters)
    assert torch.equal(classification.read_idx(tmp_path / "notmnist/t10k-images-idx3-ubyte.gz"), letters)
    results = classification.main(["--data", str(tmp_path), "--train", "60", "--quick"])
    assert results["sizes"] == {"train": 60, "validation": 5000, "test": 50}
    assert all("auroc notMNIST" in row for row in results["rows"])


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"PK\x03\x04", "no idx file"), (b"\0\0\x08\x01\0\0\0\x05abc", r"says \[5\] and holds 3 bytes")],
)
def test_damaged_idx_files_are_refused(tmp_path, content, message):
    (tmp_path / "x.gz").write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match=message):
        classification.read_idx(tmp_path / "x.gz")


def test_gaussian_fit(tmp_path, monkeypatch):
    out = tmp_path / "rows.json"
    # the optima of all ranks take half a minute; any point of a family bounds its best from above
    monkeypatch.setattr(gaussian_fit, "best_kl", partial(best_kl, starts=2, steps=10))
    monkeypatch.setattr(sys, "argv", ["gaussian_fit", "--targets", "1", "--steps", "20", "--out", str(out)])
    gaussian_fit.main()
    rows = json.loads(out.read_text())
    assert [(row["family"], row["rank"]) for row in rows][:2] == [("mean field", 0), ("covariance", 1)]
    assert len(rows) == 10
    assert all(row["excess_median"] >= 0 for row in rows)


def test_bayesian_head(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bayesian_head", "--repeats", "1"])
    monkeypatch.setattr(bayesian_head, "BATCH", 2)
    monkeypatch.setattr(bayesian_head, "DRAWS", 2)
    bayesian_head.main()
    assert "all weights (the faster way) / Bayesian head = " in capsys.readouterr().out
