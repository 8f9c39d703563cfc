"""benchmarks.uci: its batched mathematics against the library's, its data, its tables."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import structvi as vi
from benchmarks import uci, uci_engine, uci_tables
from benchmarks.uci_data import load
from benchmarks.uci_engine import Jobs
from structvi.couplings import Noise

PRIOR = {"0.weight": 1.0, "0.bias": 1.0, "2.weight": 1.0, "2.bias": 1.0}


@pytest.fixture
def folder(tmp_path):
    """A set of 40 rows and two inputs, one of them constant, with two splits."""
    rng = np.random.default_rng(0)
    X = np.stack([rng.normal(3.0, 2.0, 40), np.ones(40)], 1)
    mask = np.zeros((2, 40), dtype=np.uint8)
    mask[0, :4] = mask[1, 4:8] = 1
    bits = np.packbits(mask, axis=1)
    np.savez(tmp_path / "yacht.npz", X=X, y=10 * np.sin(X[:, 0]), n=40, test_mask_standard=bits, test_mask_gap=bits[:1])
    return tmp_path


def test_splits_are_standardised_on_their_training_part(folder):
    data = load(folder, "yacht")
    assert data.x.shape == (2, 2, 36)
    assert data.t_test.shape == (2, 4)
    torch.testing.assert_close(data.x[:, 0].mean(-1), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(data.t.std(-1, correction=0), torch.ones(2))
    assert bool((data.x[:, 1] == 0).all())
    held = data.validation()
    assert held.t.shape == (2, 29)
    assert held.t_test.shape == (2, 7)
    assert bool(torch.isin(held.t_test[0], data.t[0]).all())
    assert not bool(torch.isin(held.t_test[0], held.t[0]).any())
    with pytest.raises(ValueError, match="splits 0 to 1"):
        load(folder, "yacht", [2])


def test_inverse_without_pivots():
    root = torch.randn(3, 30, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    M = torch.eye(7, dtype=torch.float64) + root.mT @ root
    torch.testing.assert_close(uci_engine.inverse(M), torch.linalg.inv(M))


@pytest.mark.parametrize(
    ("form", "recipe"), [("covariance", vi.StructuredNormal), ("precision", vi.StructuredPrecision)]
)
def test_the_batched_step_is_the_library_s(folder, form, recipe):
    data = load(folder, "yacht")
    jobs = Jobs(data, hidden=5)
    generator = torch.Generator().manual_seed(1)
    net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1))
    likelihood, prior = vi.likelihoods.Gaussian("point"), vi.NormalPrior.fan_in(PRIOR, learn=True)
    bayes = vi.variationalize(
        net, likelihood, recipe(3, initial_scale=0.5, initial_factor=0.5), prior, num_data=jobs.N, generator=generator
    )
    family: Any = bayes.family
    with torch.no_grad():
        family.log_scale.add_(0.1 * torch.randn(jobs.P, generator=generator))
    q = {name: getattr(family, name).detach().expand(2, *getattr(family, name).shape).clone()
         for name in ("mean", "log_scale", "factor", "unit")}  # fmt: skip
    q |= {"log_noise": torch.zeros(2), "log_prior": jobs.prior()}
    torch.manual_seed(5)
    drawn = uci_engine.deviations(q, form, 3)
    torch.manual_seed(5)
    found = uci_engine.normal_step(jobs, form, 3)(q, torch.tensor(0.7))
    batch = data.x[1].mT, data.t[1].unsqueeze(-1)
    terms = bayes.terms(batch, groups=1, coupling=lambda *_, **__: Noise(drawn.eps[1], drawn.z[1]))
    (terms.fit - 0.7 * terms.complexity).mean().backward()
    for name in ("mean", "log_scale", "factor"):
        expected = getattr(family, name).grad
        # float32: the errors of one sum over 36 observations, relative to the largest entry
        torch.testing.assert_close(found[name][1], expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    torch.testing.assert_close(found["log_noise"][1], likelihood.log_noise.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["log_prior"][1], prior.log_scale.grad, rtol=1e-4, atol=1e-4)
    value, error = uci_engine.elbo(jobs, q, form, draws=8192)
    other = bayes.elbo([batch], groups=4096, generator=torch.Generator().manual_seed(2))
    # two estimates with independent draws: four standard errors
    assert abs(float(value[1]) - other.value) < 4 * (float(error[1]) ** 2 + other.standard_error**2) ** 0.5


def test_the_command_fits_every_method_and_writes_its_tables(folder, tmp_path, monkeypatch, capsys):
    for name in ("STEPS", "GROW", "POINT", "TRIAL"):
        monkeypatch.setattr(uci, name, 20)
    monkeypatch.setattr(uci, "HIDDEN", 3)
    (folder / uci_tables.PUBLISHED).write_text(
        json.dumps({"yacht": {"test_ll": [-1.0, -2.0], "test_MC_rmse": [1.0, 2.0]}})
    )
    out = tmp_path / "out.json"
    results = uci.main(["--data", str(folder), "--sets", "yacht", "--seeds", "3", "--out", str(out)])
    methods = results["sets"]["yacht"]["methods"]
    assert set(methods) == set(uci.METHODS)
    assert all(len(one["log_likelihood"]) == 2 and np.isfinite(one["rmse"]).all() for one in methods.values())
    # a higher rank goes on from the lower one, and falls back to it
    own = results["sets"]["yacht"]["reliability"]
    assert len(own["mean field"]["elbo"]) == 3
    assert not any(uci_tables.violations(own).values())
    first = capsys.readouterr().out
    assert "| MC dropout, published | -1.50 ± 0.50 |" in first
    uci.main(["--merge", str(out), str(out), "--data", str(folder)])
    assert capsys.readouterr().out.strip() in first


def test_violations_count_a_higher_rank_below_a_lower_one():
    same = {"elbo": [0.0, 0.0], "error": [0.1, 0.1], "fallback": [False, False]}
    own = {name: dict(same) for name in ("mean field", *uci_tables.STRUCTURED)}
    own["precision 20"] = same | {"elbo": [-0.4, -0.6]}
    assert uci_tables.violations(own) == {"covariance 5": 0, "covariance 20": 0, "precision 5": 0, "precision 20": 1}
