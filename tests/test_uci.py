"""benchmarks.uci: its data, its fits by the library, its choices and tables."""

import copy
import json
from math import exp, log

import numpy as np
import pytest
import torch

import structvi as vi
from benchmarks import uci, uci_gap_rules, uci_gaps, uci_methods, uci_tables, uci_tried
from benchmarks.uci_data import load
from benchmarks.uci_methods import Candidate, Job, Method, Predicted


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
    assert [tuple(split.x.shape) for split in splits.values()] == [(36, 2), (36, 2)]
    for split in splits.values():
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
    method = Method("normal", lambda _: vi.MeanField(), steps=8, lr=0.05)
    jobs = [Job(0, Candidate(1.0, None)), Job(1, Candidate(0.3, None), 1), Job(0, Candidate(0.3, 0.5))]
    found = uci_methods.fit(splits, jobs, method, "cpu")
    loaders = [
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(one.x, one.t), batch_size=36, shuffle=True)
        for one in splits.values()
    ]
    options = {"steps": 8, "lr": 0.05, "temperature": 0.3, "kl_warmup": 0.1, "stop": False, "progress": False}
    for job, (predicted, elbo), seed in zip(jobs[1:], found[1:], (101, 0), strict=True):
        one = uci_methods.started(uci_methods.template(2, method, job.candidate), seed)
        if job.candidate.scale is not None:  # a prior that is held is the prior without parameters
            net, likelihood = copy.deepcopy(one.net), vi.likelihoods.Gaussian("point")
            one = vi.variationalize(net, likelihood, vi.MeanField(), vi.NormalPrior.fan_in(0.5), evaluation="vmap")
            one = uci_methods.started(one, seed)
        result = one.fit(loaders[job.split], seed=seed, **options)
        assert elbo == pytest.approx(result.elbo.value, rel=1e-4)  # float32
        own = uci_methods.predict(one, splits[job.split], uci_methods.DRAWS)
        torch.testing.assert_close(predicted.log_density, own.log_density, rtol=1e-3, atol=1e-3)


def test_a_prior_scale_of_a_point_estimate_is_part_of_its_temperature():
    method = Method("normal", lambda _: vi.MAP(), 8, 0.02, is_point=True)
    assert method.temperature(Candidate(1.0, 4.0)) == 1 / 16
    assert method._replace(is_point=False).temperature(Candidate(0.3, 4.0)) == 0.3


def test_the_limit_of_small_temperatures_is_a_network_of_an_ensemble(folder, monkeypatch):
    monkeypatch.setattr(uci_methods, "HIDDEN", 3)
    splits = load(folder, "yacht", [1])
    ours = Method("normal", lambda _: vi.MeanField(), steps=8, lr=0.05)
    ensemble = Method("normal", lambda _: vi.MAP(), steps=8, lr=0.05, draws=1, is_point=True)
    jobs = [Job(1, Candidate(0.0, 4.0), m) for m in range(2)]
    found = uci_methods.fit(splits, jobs, ours, "cpu")
    networks = uci_methods.fit(splits, [job._replace(candidate=Candidate(1.0, 4.0)) for job in jobs], ensemble, "cpu")
    for (one, _), (other, _) in zip(found, networks, strict=True):
        assert torch.equal(one.every, other.every)


def _predicted(value, mean):
    """The same log density in every row, and 2, 4 and 6 nats below it with noise of other widths."""
    every = value - torch.tensor([0.0, 2.0, 4.0, 6.0]).double().unsqueeze(-1).expand(-1, len(mean))
    return Predicted(every[0], mean, every[1:])


def test_scores_are_in_the_data_s_units(folder):
    split = load(folder, "yacht")[0]
    predicted = _predicted(-1.0, split.t_test.view(-1).double() + 0.5)
    value, error = uci_methods.scores(predicted, split)
    assert value == pytest.approx(-1.0 - log(split.unit))
    assert error == pytest.approx(0.5 * split.unit)
    both = uci_methods.mixed([(predicted, 0.25), (_predicted(-3.0, predicted.mean), 0.75)])
    expected = log(0.25 * exp(-1) + 0.75 * exp(-3))
    torch.testing.assert_close(both.log_density, torch.full((4,), expected).double())
    torch.testing.assert_close(both.mean, predicted.mean)


def test_rescaled_noise_is_that_of_every_draw(folder, monkeypatch):
    monkeypatch.setattr(uci_methods, "HIDDEN", 3)
    split = load(folder, "yacht")[0]
    for noise in ("normal", "Student-t", "heteroscedastic"):
        one = uci_methods.template(2, Method(noise, lambda _: vi.MAP(), 1, 0.1, is_point=True), Candidate(1.0, 1.0))
        predicted = uci_methods.predict(one, split, 1)
        base = one.predict(split.x_test, 1).components
        for factor, row in zip(uci_methods.WIDTHS, predicted.rescaled, strict=True):
            # t = m + factor z has 1/factor of the density that m + z has
            inside = base.mean[0] + (split.t_test - base.mean[0]) / factor
            expected = base.log_prob(inside).view(-1).double() - log(factor)
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)
    # two fifths of the weight are with the noise as it was learned
    mixture = uci_methods.with_widths(_predicted(-1.0, torch.zeros(4)), [0.4, 0.6, 0.0, 0.0])
    expected = torch.full((4,), log(0.4 * exp(-1) + 0.6 * exp(-3))).double()
    torch.testing.assert_close(mixture.log_density, expected)


def test_members_are_shared_out_by_weight():
    # rows are of the first candidate, or of the second with noise of the first other width
    rows = torch.full((2, 3, 100), -20.0).double()
    rows[0, 0, :80], rows[1, 1, 80:] = 0.0, 0.0
    held = [Predicted(own[0], torch.zeros(100), own[1:]) for own in rows]
    choice = uci.Choice.of(held)
    assert choice.first == 0
    assert choice.value == pytest.approx(-4.0)
    # three rows more are shared by all six
    expected = torch.tensor([[80.5, 0.5, 0.5], [0.5, 20.5, 0.5]]).double() / 103
    torch.testing.assert_close(choice.weights, expected, rtol=1e-3, atol=1e-3)
    assert choice.members(2, 10) == {0: 8, 1: 2}
    assert choice.members(10, 10) == {0: 10, 1: 2}
    assert choice.members(1, 0) == {0: 1, 1: 1}


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(uci, "STEPS", 10)
    for name, values in (("LEARNED", (1.0,)), ("DECAYED", ((0.1, 1.0),)), ("LIMIT", (4.0,)), ("RATES", (0.01, 0.1))):
        monkeypatch.setattr(uci, name, values)
    monkeypatch.setattr(uci_methods, "HIDDEN", 3)
    monkeypatch.setattr(uci, "MEMBERS", 2)
    monkeypatch.setattr(uci, "SHARED", 3)


def test_the_command_fits_every_method_and_writes_its_tables(folder, tmp_path, short, capsys):
    table = "| method | yacht | wine |\n| --- | --- | --- |\n| PBP | −1.63 | – |\n| VI | −2.01 | – |\n"
    (folder / uci_tables.PUBLISHED).write_text(table)
    out = tmp_path / "out.json"
    noises = ("normal", "heteroscedastic")
    results = uci.main(["--data", str(folder), "--sets", "yacht", "--noise", *noises, "--out", str(out)])
    methods = results["sets"]["yacht"]["methods"]
    names = ("mean field", "mean field x5", "validated", "validated, scaled", "stacked", "precision 5",
             "precision 5 x5", "MC dropout", "MC dropout, scaled", "MC dropout, stacked", "deep ensemble",
             "deep ensemble x3", "deep ensemble, scaled", "deep ensemble, stacked")  # fmt: skip
    assert set(methods) == {f"{name}, {noise}" for name in names for noise in noises}
    for rows in methods.values():
        assert list(rows) == ["0", "1"]
        assert all(np.isfinite([one["log_likelihood"], one["rmse"]]).all() for one in rows.values())
    for noise in noises:
        for r in ("0", "1"):
            row = methods[f"stacked, {noise}"][r]
            assert sum(row["weights"]) == pytest.approx(1.0)
            best = methods[f"validated, {noise}"][r]["held_out"]
            assert row["held_out"] >= best - log(3) - 0.02  # equal weights of three have that; small ones are left out
    rows = uci_tables.chosen(methods)
    assert {name for name in rows if name not in methods} == set(uci_tables.CHOICES)
    for r, row in rows["ours, noise validated"].items():
        held = {noise: methods[f"stacked, {noise}"][r]["held_out"] for noise in noises}
        assert row is methods[f"stacked, {max(noises, key=lambda noise: held[noise])}"][r]
    assert json.loads(out.read_text())["sets"]["yacht"]["methods"] == methods
    first = capsys.readouterr().out
    assert "| *PBP* | -1.63 |" in first
    assert "| *best published* | -1.63 |" in first
    uci.main(["--merge", str(out), str(out), "--data", str(folder)])
    assert capsys.readouterr().out.strip() in first


def test_a_run_goes_on_from_its_file_with_what_is_missing(folder, tmp_path, short, monkeypatch):
    out, made = tmp_path / "out.json", []
    command = ["--data", str(folder), "--sets", "yacht", "--noise", "normal", "--methods", "stacked", "--out", str(out)]
    whole = uci.main(command[:-2])["sets"]["yacht"]["methods"]
    uci.main([*command, "--splits", "1"])
    real = uci.Bench.stacked
    monkeypatch.setattr(uci.Bench, "stacked", lambda self, noise: (made.append(list(self.splits)), real(self, noise)))
    found = uci.main([*command, "--chunk", "1"])["sets"]["yacht"]["methods"]
    assert made == [[0]]
    for name, rows in whole.items():
        for r, row in rows.items():  # splits together or apart: rounding alone
            assert found[name][r]["log_likelihood"] == pytest.approx(row["log_likelihood"], rel=1e-3)
    with pytest.raises(ValueError, match=r"of a run with length 1\.0, got 0\.5"):
        uci.main([*command, "--length", "0.5"])


def test_splits_of_several_files_come_together():
    one = {"gap": False, "sets": {"yacht": {"N": 36, "methods": {"stacked, normal": {"0": {"rmse": 1.0}}}}}}
    two = {"gap": False, "sets": {"yacht": {"N": 36, "methods": {"stacked, normal": {"1": {"rmse": 2.0}}}}}}
    assert uci.merged([one, two])["sets"]["yacht"]["methods"]["stacked, normal"] == {
        "0": {"rmse": 1.0},
        "1": {"rmse": 2.0},
    }


def test_differences_are_paired_and_marked():
    assert uci_tables.verdict([1.0, 1.1, 0.9]) == "**1.000 ± 0.058**"
    assert uci_tables.verdict([-1.0, -1.1, -0.9]) == "-1.000 ± 0.058 (worse)"
    assert uci_tables.verdict([1.0, -1.1, 0.9]) == "0.267 ± 0.684"


def test_rules_are_scored_on_the_other_half():
    """One of two candidates is right on every row: it is picked, and stacked it has all rows but half of the three that
    all candidates share."""
    rows = torch.stack([torch.full((10,), -1.0), torch.full((10,), -9.0)]).double()
    mixture = log((5 + 1.5) / 8 * exp(-1) + 1.5 / 8 * exp(-9))
    wider = torch.stack([rows, rows - 50.0], 1)  # [C, F, n]: of no use
    widths = log((5 + 0.75) / 8 * exp(-1) + 0.75 / 8 * exp(-9))
    assert uci_tried.halves(wider, 0) == pytest.approx((-1.0, mixture, widths), abs=1e-3)
    half = torch.stack([torch.arange(2000) % 2 * -9.0, (torch.arange(2000) + 1) % 2 * -9.0]).double()
    picked, stacked, _ = uci_tried.halves(half.unsqueeze(1), 0)
    assert picked == pytest.approx(-4.5, abs=0.3)  # standard error 9/2/√1000 = 0.14
    assert stacked == pytest.approx(-log(2), abs=0.01)  # both with one half, up to the share of the halves


def test_what_was_tried_is_a_table(folder, short):
    given = ["--set", "yacht", "--splits", "1", "--length", "0.01", "--rows", "prior scales by ELBO", "deep ensemble"]
    lines = uci_tried.main(["--data", str(folder), *given]).splitlines()
    assert lines[0].startswith("| yacht, normal, held-out |")
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| prior scales by ELBO", "| deep ensemble"]


def test_a_gap_is_the_middle_third_along_an_input(folder):
    split = load(folder, "yacht")[0]
    (gap,) = uci_gaps.gaps(split, 3, 0)  # the other input is constant
    held, rest = gap.x_test[:, 0], gap.x[:, 0]
    assert len(held) == 12
    assert int((rest < held.min()).sum()) == int((rest > held.max()).sum()) == 12


def test_rules_for_weights_of_what_was_kept(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(uci_methods, "HIDDEN", 3)
    monkeypatch.setattr(uci_gaps, "NETWORKS", 2)
    own = [uci_gaps.CANDIDATES[c] for c in (0, 7, -1)]  # mean field, a network of an ensemble, MC dropout
    for module in (uci_gaps, uci_gap_rules):
        monkeypatch.setattr(module, "CANDIDATES", own)
    out = tmp_path / "kept"
    uci_gaps.main(["--data", str(folder), "--sets", "yacht", "--splits", "0", "--length", "0.02", "--out", str(out)])
    titles = ["stacked, both", "local, both, without dropout", "local, both"]
    uci_gap_rules.main([str(out), "--rules", *titles])
    printed = capsys.readouterr().out
    assert all(f"| {title} |" in printed for title in (*titles, "chosen", "MC dropout", "deep ensemble"))
    with np.load(out / "yacht-standard-0.npz") as file:
        kinds = {kind: uci_gap_rules.Rows.read(file, kind) for kind in ("random", "gap 0", "test")}
        unit = log(float(file["unit"]))
    held = {kind: kinds[kind] for kind in ("random", "gap 0")}
    found = uci_gap_rules.weighed(uci_gap_rules.RULES["local, both"], held)(kinds["test"]) - unit
    judged = uci_gap_rules.judged(out / "yacht-standard-0.npz", titles)
    assert judged["local, both"][2] == pytest.approx(found, rel=1e-9)
    alone = [one[uci_gaps.NOISES.index(1.0)].mean() - unit for one in kinds["test"].densities]
    assert min(alone) - 2 < found < max(alone) + 2
    # the one candidate of each rival
    assert judged["deep ensemble"][2] == pytest.approx(alone[1])
    assert len(kinds["test"].table(uci_gap_rules.USUAL, False)) == 2 * len(uci_gap_rules.USUAL)
