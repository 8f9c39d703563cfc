"""One short run of each benchmark: it runs and prints, which says nothing of the numbers."""

import json
import sys

import pytest
import torch

pytest.importorskip("sklearn")

from benchmarks import (
    attack,
    heads,
    hierarchical,
    improper,
    large_densities,
    many_fits,
    multimodal,
    networks,
    never_worse,
    posteriordb,
    schools_calibration,
    step_cost,
    tables,
)

TINY = {
    heads: ("--one", "--sizes", "20x110", "--rows", "300", "--epochs", "1", "--methods", "ours"),
    improper: ("--seeds", "1", "--families", "mean field", "--only", "flat"),
    large_densities: ("--d", "16", "--rank", "2", "--cases", "gaussian"),
    many_fits: ("--fits", "2", "--steps", "52", "--single", "1", "--turns", "1", "--threads", "1"),
    networks: ("--quick", "--methods", "temperature scaling;ours, default call"),
}
LONG = {
    attack: ("--kills", "1"),
    never_worse: ("--quick",),
    step_cost: ("--net", "mlp", "--ranks", "0", "--draws", "1", "--seconds", "1", "--methods", "MeanField*"),
    multimodal: ("--only", "gaussians-2-0"),
    schools_calibration: ("--replications", "20", "--schools", "2"),
}


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(benchmark, arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    benchmark.main()
    return capsys.readouterr().out


@pytest.mark.parametrize("benchmark", TINY, ids=lambda one: one.__name__.split(".")[-1])
def test_it_runs(benchmark, monkeypatch, capsys):
    assert len(run(benchmark, TINY[benchmark], monkeypatch, capsys)) > 60


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", LONG, ids=lambda one: one.__name__.split(".")[-1])
def test_a_long_one_runs(benchmark, monkeypatch, capsys):
    assert len(run(benchmark, LONG[benchmark], monkeypatch, capsys)) > 100


@pytest.mark.slow
def test_tables(monkeypatch, capsys):
    pytest.importorskip("pandas")
    monkeypatch.setattr("structvi_tables.training.STEPS", 20)
    assert "worse at 95 %" in run(tables, ("--tables", "iris"), monkeypatch, capsys)


def test_posteriordb_on_data_of_our_own(monkeypatch, capsys, tmp_path):
    """Of a regression with known coefficients; the reference is the least squares fit."""
    folder = tmp_path / "posteriordb" / "kidiq-kidscore_momiq"
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, generator=generator, dtype=torch.float64)
    y = 1 + 2 * x + 0.5 * torch.randn(100, generator=generator, dtype=torch.float64)
    (folder / "data.json").write_text(json.dumps({"mom_iq": x.tolist(), "kid_score": y.tolist()}))
    reference = {
        "unconstrained_mean": [1.0, 2.0, -0.69],
        "unconstrained_cov": torch.diag(torch.tensor([0.0025, 0.0025, 0.005])).tolist(),
    }
    (folder / "summary.json").write_text(json.dumps(reference))
    arguments = ("--data", str(tmp_path), "--only", "kidiq-kidscore_momiq")
    assert "full" in run(posteriordb, arguments, monkeypatch, capsys)


@pytest.mark.parametrize("name", hierarchical.MODELS)
def test_a_hierarchical_model_is_finite_with_its_gradient_where_fits_begin(name):
    target = hierarchical.target_of(name)
    theta = target.space.initial.double().repeat(2, 1).requires_grad_()
    values = target.log_joint(theta)
    (gradient,) = torch.autograd.grad(values.sum(), theta)
    assert bool(values.isfinite().all())
    assert bool(gradient.isfinite().all())
    assert bool(gradient.abs().sum(0).gt(0).any())
