"""The benchmarks of posteriors from the first step run, choose on validation data, and print tables."""

import gzip
import json

import pytest
import torch

import structvi as vi
from benchmarks import characters, from_scratch, from_scratch_tables, from_scratch_variants, networks_data
from benchmarks.networks_nets import TASKS
from benchmarks.newton_scales import NewtonScales


def test_settings_are_read_and_named():
    setting = from_scratch.Setting.read("method=map,lr=.01,average=0")
    assert (setting.method, setting.lr, setting.average) == ("map", 0.01, False)
    assert setting.name == "method=map-lr=0.01-average=False-seed=0"
    with pytest.raises(ValueError, match="no setting 'rate'"):
        from_scratch.Setting.read("rate=1")


def test_from_scratch_runs_and_goes_on_from_its_folder(tmp_path, capsys):
    runs = ";".join(f"method={name}" for name in ("sgd", "map", "mean_field", "rotated", "low_rank", "ivon"))
    arguments = ["--quick", "--runs", runs, "--out", str(tmp_path)]
    rows = from_scratch.main(arguments)
    assert [row["method"] for row in rows] == ["sgd", "map", "mean_field", "rotated", "low_rank", "ivon"]
    assert all("tempered" in row for row in rows)
    assert all(row["gain"] == row["elbo"] - rows[2]["elbo"] + rows[2]["gain"] for row in rows[2:5])
    assert from_scratch.main(arguments) == []
    capsys.readouterr()
    from_scratch.main(["--out", str(tmp_path), "--table"])
    assert "mean_field" in capsys.readouterr().out
    assert len(from_scratch_tables.read(tmp_path)) == 6


def test_other_ways_to_predict(tmp_path, capsys, monkeypatch):
    """As rows of the table; a posterior of width zero is its mean, and a mean of many draws what `predict` gives."""
    monkeypatch.setattr(from_scratch_variants, "MORE", 2)
    monkeypatch.setattr(from_scratch_variants, "WIDTHS", (1.0, 1000.0))
    monkeypatch.setattr(from_scratch_variants, "LADDER", (0.5, 1.0, 1000.0))
    monkeypatch.setattr(from_scratch_variants, "MIXED", 6)
    (row,) = from_scratch.main(["--quick", "--runs", "lam=.1,variants=all", "--out", str(tmp_path)])
    assert set(row["ways"]) == {"2 draws", "linearised", "widened", "widest", "mixed"}
    assert row["widths"] == {"widened": 1.0, "widest": 1.0, "mixed": 1.0}
    capsys.readouterr()
    from_scratch.main(["--out", str(tmp_path), "--table"])
    assert "| mean_field, linearised, tempered, lam 0.1, epochs 2 | 1 |" in capsys.readouterr().out
    net = torch.nn.Linear(3, 2)
    bayes = vi.variationalize(net, vi.likelihoods.Categorical(), vi.MeanField(initial_scale=1.0), num_data=5)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    expected = bayes.mean_network()(x).log_softmax(1).double()
    assert torch.allclose(from_scratch_variants.widened(bayes, 4, 0, 0.0)(x), expected, atol=1e-6)
    found = from_scratch_variants.widened(bayes, 2000, 0, 1.0)(x).exp()
    # a probability's standard deviation is at most a half: 2000 draws leave 0.011, two of them 0.016
    assert torch.allclose(found, bayes.predict(x, draws=2000).mean.double(), atol=4 * 0.016)


def test_draws_take_widths_in_turn():
    bayes = vi.variationalize(torch.nn.Linear(3, 2), vi.likelihoods.Categorical(), vi.MeanField(), num_data=5)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    narrow, wide, both = (from_scratch_variants.widened(bayes, 2, 0, *c)(x).exp() for c in ((0.0,), (2.0,), (0.0, 2.0)))
    second = 2 * both - narrow  # of the draws the first is the mean, the second twice as far from it as it was
    first = 2 * wide - second
    assert bool((first > 0).all())
    assert not torch.allclose(first, second)
    torch.testing.assert_close(narrow, bayes.mean_network()(x).softmax(1).double(), atol=1e-6, rtol=0)


def test_rates_fall_to_zero_by_the_clock(tmp_path, monkeypatch):
    """A fit that has no time for its steps ends when the time is over, with what it learned on the way."""
    seconds = iter(range(10_000))
    monkeypatch.setattr(from_scratch, "now", lambda: float(next(seconds)))
    setting = from_scratch.Setting.read("epochs=40,batch=250,limit=60,draws=2")
    shop = from_scratch.Shop(TASKS["digits"], networks_data.digits(None), torch.device("cpu"))
    clock = from_scratch.Clock(setting, 160, tmp_path / "run.json")
    assert clock.factor(0) == pytest.approx(1 / 8)  # of 160 steps 8 rise
    row = from_scratch.run(setting, shop, tmp_path / "run.json")
    assert 5 < row["made"] < 60
    assert len(row["curve"]) == -(-row["made"] // 4)
    assert (tmp_path / "run.curve").exists()


def test_the_widest_that_is_as_good():
    """Half a standard error of the difference, and 0.005 nats at most."""
    own = torch.arange(100.0)
    near, far = own + torch.tensor([0.1, -0.0998]).repeat(50), own + 0.01
    assert from_scratch_variants.widest_as_good({1.0: own, 2.0: near, 3.0: far}) == 2.0


def test_natural_gradient_steps_of_scales_end_at_those_of_a_normal():
    """L = Σ Λ (m² + s²)/2 − (λ/N) log s, minimal at s² = (λ/N)/Λ."""
    q = vi.MeanField().bind(vi.Parameters({"w": torch.ones(3, dtype=torch.float64)}))
    precision, nats = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64), 10.0
    optimizer = NewtonScales(list(q.parameters()), vi.Soap(scale_lr=0.5), q, nats=nats)
    for _ in range(60):
        optimizer.zero_grad()
        variance = (2 * q.log_scale).exp()
        (0.5 * (precision * (q.mean.square() + variance)).sum() - q.log_scale.sum() / nats).backward()
        optimizer.step()
    torch.testing.assert_close((2 * q.log_scale).exp().detach(), 1 / (nats * precision))


def test_characters(tmp_path, capsys):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "mnist").mkdir()
    text = "to be or not to be, that is the question. " * 60
    with gzip.open(tmp_path / "shakespeare/input.txt.gz", "wt") as file:
        file.write(text)
    (tmp_path / "mnist/README.md").write_text("the question is not there. " * 10)
    out = tmp_path / "out"
    arguments = ["--data", str(tmp_path), "--quick", "--out", str(out)]
    rows = characters.main([*arguments, "--runs", "method=adamw;widen=1;method=ivon,lr=.1"])
    assert [row["method"] for row in rows] == ["adamw", "ours", "ivon"]
    assert all(0 < row["loss"] < 4 for row in rows)  # 16 letters: log 16 = 2.8 without a thing learned
    capsys.readouterr()
    characters.main([*arguments[:2], "--out", str(out), "--table"])
    printed = capsys.readouterr().out
    assert printed.count("| ours soap |") == printed.count("| ours, widened soap |") == 1
    assert rows[1]["ways"]["widened"]["validation"] <= rows[1]["validation"]
    assert len([json.loads(path.read_text()) for path in out.glob("*.json")]) == 3
