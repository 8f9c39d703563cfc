"""benchmarks.uci: its data, its fits by the library, its choices and tables."""

import json
from math import log

import numpy as np
import pytest
import torch

import structvi as vi
from benchmarks import uci, uci_methods, uci_tables
from benchmarks.uci_data import load
from benchmarks.uci_methods import Job, Method, Predicted


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
    splits = load(folder, "yacht")
    assert [tuple(split.x.shape) for split in splits] == [(36, 2), (36, 2)]
    for split in splits:
        assert split.t_test.shape == (4, 1)
        torch.testing.assert_close(split.x[:, 0].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
        torch.testing.assert_close(split.t.std(correction=0), torch.tensor(1.0))
        assert bool((split.x[:, 1] == 0).all())
    held = splits[0].validation()
    assert (len(held.t), len(held.t_test)) == (29, 7)
    assert bool(torch.isin(held.t_test, splits[0].t).all())
    assert not bool(torch.isin(held.t_test, held.t).any())
    with pytest.raises(ValueError, match="splits 0 to 1"):
        load(folder, "yacht", [2])


def test_a_job_is_a_fit_of_the_library(folder, monkeypatch):
    """What all of them come to at once is what `posterior.fit` and `predict` come to for one."""
    monkeypatch.setattr(uci_methods, "HIDDEN", 3)
    splits = load(folder, "yacht")
    method = Method("normal", lambda _: vi.MeanField(), True, steps=8, lr=0.05)
    jobs = [Job(0, 1.0), Job(1, 0.3, 1)]
    found = uci_methods.fit(splits, jobs, method, "cpu")
    split = splits[1]
    one = uci_methods.started(uci_methods.template(2, method, jobs[1]), 101)
    data = torch.utils.data.TensorDataset(split.x, split.t)
    loader = torch.utils.data.DataLoader(data, batch_size=36, shuffle=True)
    result = one.fit(loader, steps=8, lr=0.05, temperature=0.3, seed=101, kl_warmup=0.1, stop=False, progress=False)
    predicted, elbo = found[1]
    assert elbo == pytest.approx(result.elbo.value, rel=1e-4)  # float32
    own = uci_methods.predict(one, split, uci_methods.DRAWS)
    torch.testing.assert_close(predicted.log_density, own.log_density, rtol=1e-3, atol=1e-3)


def test_scores_are_in_the_data_s_units(folder):
    split = load(folder, "yacht")[0]
    predicted = Predicted(torch.full((4,), -1.0).double(), split.t_test.view(-1).double() + 0.5)
    value, error = uci_methods.scores(predicted, split)
    assert value == pytest.approx(-1.0 - log(split.unit))
    assert error == pytest.approx(0.5 * split.unit)
    both = uci_methods.mixed([predicted, Predicted(torch.full((4,), -3.0).double(), predicted.mean)])
    expected = log((2.718281828459045**-1 + 2.718281828459045**-3) / 2)
    torch.testing.assert_close(both.log_density, torch.full((4,), expected).double())


def test_the_command_fits_every_method_and_writes_its_tables(folder, tmp_path, monkeypatch, capsys):
    for name in ("STEPS", "TRIAL", "POINT", "POINT_TRIAL"):
        monkeypatch.setattr(uci, name, 10)
    monkeypatch.setattr(uci_methods, "HIDDEN", 3)
    monkeypatch.setattr(uci, "MEMBERS", 2)
    monkeypatch.setattr(uci, "RATES", (0.01, 0.1))
    table = "| method | yacht | wine |\n| --- | --- | --- |\n| PBP | −1.63 | – |\n"
    (folder / uci_tables.PUBLISHED).write_text(table)
    out = tmp_path / "out.json"
    results = uci.main(["--data", str(folder), "--sets", "yacht", "--noise", "normal", "heteroscedastic",
                        "--out", str(out)])  # fmt: skip
    methods = results["sets"]["yacht"]["methods"]
    names = ("mean field", "mean field x5", "validated λ x5", "precision 5 x5", "MC dropout", "deep ensemble")
    expected = {f"{name}, {noise}" for name in names for noise in ("normal", "heteroscedastic")}
    chosen = {"ours, by ELBO", "ours, validated", "MC dropout, validated", "deep ensemble, validated"}
    assert set(methods) == expected | chosen
    assert all(len(one["log_likelihood"]) == 2 and np.isfinite(one["rmse"]).all() for one in methods.values())
    for r, picked in enumerate(methods["ours, validated"]["picked"]):
        held = {name: methods[name]["held_out"][r] for name in methods if name.startswith("validated λ")}
        assert picked == max(held, key=held.get)
        assert methods["ours, validated"]["log_likelihood"][r] == methods[picked]["log_likelihood"][r]
    assert json.loads(out.read_text())["sets"].keys() == {"yacht"}
    first = capsys.readouterr().out
    assert "| *PBP* | -1.63 |" in first
    uci.main(["--merge", str(out), str(out), "--data", str(folder)])
    assert capsys.readouterr().out.strip() in first


def test_differences_are_paired_and_marked():
    assert uci_tables.verdict([1.0, 1.1, 0.9]) == "**1.000 ± 0.058**"
    assert uci_tables.verdict([-1.0, -1.1, -0.9]) == "-1.000 ± 0.058 (worse)"
    assert uci_tables.verdict([1.0, -1.1, 0.9]) == "0.267 ± 0.684"
