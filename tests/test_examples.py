"""The imaging examples run as written, in smoke mode; what they measure against direct formulas."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def methods(monkeypatch):
    """`examples/methods.py`, found as it is when an example is run."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import methods

    yield methods
    del sys.modules["methods"]


@pytest.mark.parametrize("example", ["classification", "segmentation", "volumes"])
def test_an_example_runs_and_draws_its_picture(example, methods, tmp_path, monkeypatch, capsys):
    out = tmp_path / "picture.png"
    monkeypatch.setattr("sys.argv", [f"{example}.py", "--smoke", "--out", str(out)])
    runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
    assert out.read_bytes().startswith(b"\x89PNG")
    if example != "volumes":  # a row for every method, its comparison in the last cells
        rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
        assert [row.split(" | ")[0].strip("| ") for row in rows] == list(methods.METHODS)


def test_scans_of_your_own_are_read_and_their_maps_kept(methods, tmp_path, monkeypatch, capsys):
    import nibabel

    example = runpy.run_path(str(EXAMPLES / "scans.py"))
    example["simulate"](tmp_path / "data", 6, seed=1)
    command = ["scans.py", "--smoke", "--data", str(tmp_path / "data"), "--names", "liver,tumour"]
    folders = ["--folder", str(tmp_path / "maps"), "--out", str(tmp_path / "picture.png")]
    monkeypatch.setattr("sys.argv", [*command, *folders])
    runpy.run_path(str(EXAMPLES / "scans.py"), run_name="__main__")
    assert [
        line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith(("liver", "tumour"))
    ] == [
        "liver",
        "tumour",
    ]
    scan = nibabel.load(tmp_path / "data" / "images" / "case05.nii.gz")
    written = nibabel.load(tmp_path / "maps" / "case05_epistemic.nii.gz")
    assert written.shape == scan.shape
    np.testing.assert_array_equal(written.affine, scan.affine)
    assert (tmp_path / "maps" / "case05.html").exists()
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="at least six scans"):
        example["read"](tmp_path)


def scores_of(methods, seed: int, n: int = 40):
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(n, 2, generator=generator).softmax(1)
    t = torch.multinomial(p, 1, generator=generator).squeeze(1)
    return p, t, methods.Scores.of(p, t)


def test_scores_are_those_of_the_definitions(methods):
    p, t, scores = scores_of(methods, 0)
    everything = np.ones((1, len(t)))
    assert scores.nll(everything)[0] == pytest.approx(torch.nn.functional.nll_loss(p.log(), t).item(), rel=1e-6)
    top, label = p.max(1)
    wrong = (label != t).double()
    sorted_wrong = wrong[top.argsort(descending=True)]
    risk = sorted_wrong.cumsum(0) / torch.arange(1, len(t) + 1)
    assert scores.aurc(everything)[0] == pytest.approx(risk.mean().item(), rel=1e-12)
    pairs = (top[wrong == 1].unsqueeze(1) < top[wrong == 0]).double()
    assert scores.error_auroc() == pytest.approx(pairs.mean().item(), rel=1e-12)
    share, accuracy = scores.referral()
    assert share[-1] == 0
    assert accuracy[-1] == pytest.approx(1 - wrong.mean().item())


def test_cases_that_count_twice_are_cases_that_are_there_twice(methods):
    p, t, scores = scores_of(methods, 1)
    weight = np.ones(len(t))
    weight[:7] = 2
    again = methods.Scores.of(torch.cat([p, p[:7]]), torch.cat([t, t[:7]]))
    assert scores.nll(weight[None])[0] == pytest.approx(again.nll(np.ones((1, len(t) + 7)))[0], rel=1e-12)
    assert scores.aurc(weight[None])[0] == pytest.approx(again.aurc(np.ones((1, len(t) + 7)))[0], rel=1e-12)


def test_a_comparison_is_paired(methods):
    _, _, scores = scores_of(methods, 3)
    worse = methods.Scores(scores.loss + 0.1, scores.count, scores.wrong)
    result = methods.compare([scores, scores], [worse, worse], resamples=50)
    assert result["nll"] == pytest.approx((-0.1, -0.1, -0.1))  # whatever cases are drawn
    assert result["aurc"] == (0, 0, 0)
