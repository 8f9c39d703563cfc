"""From a file to a folder and back: the command line on small tables with few steps."""

import json
import sys

import numpy as np
import pytest
import torch

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from structvi import cli  # noqa: E402
from structvi_tables.baselines import LEVELS, crps  # noqa: E402
from structvi_tables.fitting import fit_table  # noqa: E402
from structvi_tables.model import TableModel  # noqa: E402
from structvi_tables.reading import TableError  # noqa: E402


def regression(n=80):
    rng = np.random.default_rng(1)
    x, c = rng.normal(size=n), rng.choice(["a", "b"], n)
    return pd.DataFrame({"x": x, "c": c, "y": 100 + 30 * x + 20 * (c == "a") + 3 * rng.normal(size=n)})


def classes(n=90):
    rng = np.random.default_rng(2)
    label = rng.integers(3, size=n)
    return pd.DataFrame(
        {"x": rng.normal(size=n) + 3 * label, "z": rng.normal(size=n), "kind": np.array(["u", "v", "w"])[label]}
    )


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["structvi", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_amounts_from_the_command_line(few_steps, monkeypatch, capsys, tmp_path):
    data, out = regression(), tmp_path / "out"
    data.to_csv(tmp_path / "a.csv", index=False)
    code, said, err = run(monkeypatch, capsys, "fit", tmp_path / "a.csv", "--target", "y", "--out", out)
    assert code == 0, err
    for words in (
        "predicted as regression",
        "16 rows were drawn",
        "tried: linear model",
        "ridge regression",
        "report.html",
    ):
        assert words in said
    found = pd.read_csv(out / "predictions.csv")
    assert len(found) == 16
    np.testing.assert_allclose(found["y"], data["y"].to_numpy()[found["row"] - 1])
    np.testing.assert_allclose(found["sd"] ** 2, found["epistemic_sd"] ** 2 + found["aleatoric_sd"] ** 2, rtol=1e-5)
    assert (found["low"] < found["mean"]).all()
    assert (found["mean"] < found["high"]).all()
    # a line with noise 3 is found in closed form whatever the steps: RMSE of 16 rows within three standard errors
    assert 3 * (1 - 3 / np.sqrt(32)) < np.sqrt(((found["mean"] - found["y"]) ** 2).mean()) < 3 * (1 + 3 / np.sqrt(32))

    new = pd.DataFrame({"c": ["a", "b", "q"], "x": [0.0, 0.0, 50.0]})
    new.to_csv(tmp_path / "new.csv", index=False)
    code, said, err = run(monkeypatch, capsys, "predict", out, tmp_path / "new.csv")
    assert code == 0
    rows = said.splitlines()
    assert rows[0] == "row,mean,sd,low,high,epistemic_sd,aleatoric_sd,outside"
    assert rows[3].endswith(",x c")
    assert "'q'" in err
    mean, sd = (np.array([float(row.split(",")[i]) for row in rows[1:]]) for i in (1, 2))
    assert mean[0] == pytest.approx(120, abs=4)
    assert mean[1] == pytest.approx(100, abs=4)
    assert sd[2] > sd[0]
    code, said, err = run(monkeypatch, capsys, "predict", out, tmp_path / "new.csv", "--out", tmp_path / "p.csv")
    assert (code, said) == (0, f"{tmp_path / 'p.csv'}\n")
    assert (tmp_path / "p.csv").read_text().splitlines() == rows

    new.drop(columns="x").to_csv(tmp_path / "less.csv", index=False)
    code, _, err = run(monkeypatch, capsys, "predict", out, tmp_path / "less.csv")
    assert code == 2
    assert "no column 'x'" in err


def test_a_column_is_left_out(few_steps, monkeypatch, capsys, tmp_path):
    """And is not asked for in new rows."""
    data = regression().assign(leak=lambda rows: rows["y"] + 1.0)
    data.to_csv(tmp_path / "a.csv", index=False)
    options = ("--target", "y", "--out", tmp_path / "out", "--noise", "Gaussian")
    code, said, err = run(monkeypatch, capsys, "fit", tmp_path / "a.csv", *options, "--without", "leak")
    assert code == 0, err
    assert "'leak' was left out, as you said." in said
    assert "'leak' was left out, as you said." in (tmp_path / "out" / "report.html").read_text().replace("&#x27;", "'")
    data[["x", "c"]].head(3).to_csv(tmp_path / "new.csv", index=False)
    code, _, err = run(monkeypatch, capsys, "predict", tmp_path / "out", tmp_path / "new.csv", "--out", tmp_path / "p")
    assert code == 0, err
    code, _, err = run(monkeypatch, capsys, "fit", tmp_path / "a.csv", *options, "--without", "y")
    assert (code, "is the target" in err) == (2, True)
    code, _, err = run(monkeypatch, capsys, "fit", tmp_path / "a.csv", *options, "--without", "q")
    assert (code, "no column 'q'" in err) == (2, True)


def test_classes_from_the_command_line(few_steps, monkeypatch, capsys, tmp_path):
    data, out = classes(), tmp_path / "out"
    data.to_csv(tmp_path / "a.csv", index=False)
    code, said, err = run(monkeypatch, capsys, "fit", tmp_path / "a.csv", "--target", "kind", "--out", out)
    assert code == 0, err
    assert "a fifth of each class" in said
    found = pd.read_csv(out / "predictions.csv")
    p = found[["p_u", "p_v", "p_w"]].to_numpy()
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-6)
    np.testing.assert_allclose(found["entropy"], found["epistemic"] + found["aleatoric"], atol=1e-5)
    assert (np.array(["u", "v", "w"])[p.argmax(1)] == found["prediction"]).all()
    assert (found["prediction"] == found["kind"]).mean() > 0.7  # three sd apart: 0.91 is possible
    page = (out / "report.html").read_text()
    assert "logistic regression" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page


def test_a_fit_is_repeated_by_its_seed_and_survives_the_folder(few_steps, tmp_path):
    data = regression(60)
    one, two, other = (fit_table(data, "y", seed=seed) for seed in (3, 3, 4))
    new = data.drop(columns="y").iloc[:5]
    pd.testing.assert_frame_equal(one.model.predict(new), two.model.predict(new))
    assert not np.allclose(one.model.predict(new)["mean"], other.model.predict(new)["mean"])
    one.model.save(tmp_path)
    pd.testing.assert_frame_equal(TableModel.load(tmp_path).predict(new), one.model.predict(new))
    assert set(one.split.fit.tolist()).isdisjoint(one.split.test.tolist())
    for train, held in one.folds():
        assert set(train).isdisjoint(held)
        assert set(train) | set(held) == set(one.split.fit.tolist())


def test_a_fit_in_words(few_steps):
    fit = fit_table(regression(), "y", noise="Gaussian")
    lines = str(fit).splitlines()
    assert repr(fit) == str(fit)
    assert lines[0] == "'y' predicted as regression from 2 columns: 64 rows fitted, 16 kept for the test"
    assert fit.tried[0].name in lines[1]
    assert lines[3].startswith("next: fit.model.predict(new_rows)")
    assert len(lines) == 4
    assert repr(fit.model).startswith("TableModel('y' as regression from x, c; ")


def test_pooled_scores_agree_with_sampling(few_steps):
    """Quantiles and distribution function of the mixture against 40,000 samples of it: three standard errors."""
    fit = fit_table(regression(60), "y")
    pooled = fit.model.pooled(fit.model.inputs(fit.test.iloc[:3]))
    generator = torch.Generator().manual_seed(0)
    samples = []
    for part, weight in zip(pooled.parts, pooled.weights, strict=True):
        samples.append(part.sample(round(40_000 * weight), generator)[..., 0])
    drawn = torch.cat(samples).double()
    q = pooled.quantiles([0.1, 0.5, 0.9])
    for i, p in enumerate((0.1, 0.5, 0.9)):
        share = (drawn <= q[:, i]).double().mean(0)
        assert (share - p).abs().max() < 3 * (p * (1 - p) / len(drawn)) ** 0.5 + 1 / 128
    torch.testing.assert_close(pooled.cdf(q[:, 1:2]), torch.full((3,), 0.5, dtype=torch.float64), atol=0.01, rtol=0)
    torch.testing.assert_close(pooled.mean[:, 0], drawn.mean(0), atol=0.03, rtol=0)


def test_crps_of_quantiles_is_that_of_the_normal():
    """Of exact quantiles of N(0, 1) it is nearly the closed form, (2φ(0) − 1/√π) at t = 0: 0.2337."""
    q = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(LEVELS)).numpy()[None]
    assert crps(np.zeros(1), q)[0] == pytest.approx(0.2337, abs=0.01)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.update(kind="other"), "no table model"),
        (lambda r: r.update(format=99), "no table model"),
        (lambda r: r["parts"][0].update(noise="__import__('os')"), "damaged"),
        (lambda r: r["parts"][0].update(hidden=[10**9]), "damaged"),
        (lambda r: r["parts"][0].update(weight=7.0), "damaged"),
        (lambda r: r["target"].update(scale=-1.0), "damaged"),
        (lambda r: r.pop("ranges"), "damaged"),
    ],
)
def test_a_damaged_folder_is_refused(change, says, saved, tmp_path):
    record = json.loads(saved["model.json"])
    change(record)
    for name, content in saved.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "model.json").write_text(json.dumps(record))
    with pytest.raises(TableError, match=says):
        TableModel.load(tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("members.STEPS", 10),
            ("members.MOST_STEPS", 10),
            ("members.LOOK", 5),
            ("fitting.FOLDS", 2),
        ):
            patch.setattr(f"structvi_tables.{name}", value)
        fit_table(regression(40), "y", noise="Gaussian").model.save(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_without_a_model_is_refused(monkeypatch, capsys, tmp_path):
    code, _, err = run(monkeypatch, capsys, "predict", tmp_path, tmp_path / "new.csv")
    assert code == 2
    assert "no model.json" in err


@pytest.mark.parametrize(("n", "noise"), [(30, "Gaussian"), (31, "heteroscedastic Student-t")])
def test_the_smallest_tables(few_steps, n, noise):
    fit = fit_table(regression(n), "y", noise=noise)
    assert np.isfinite(fit.model.predict(fit.test)["sd"]).all()


def test_a_long_table_is_sampled(few_steps, monkeypatch):
    monkeypatch.setattr("structvi_tables.fitting.MOST_ROWS", 50)
    fit = fit_table(regression(400), "y", noise="Gaussian")
    assert (len(fit.split.fit), len(fit.split.test)) == (40, 10)
    assert any("random sample of 50" in note for note in fit.notes)


def test_a_family_over_all_weights(few_steps):
    fit = fit_table(regression(60), "y", noise="heteroscedastic", family="MeanField")
    networks = [part for part in fit.model.parts if part.recipe.hidden]
    for part in networks:
        assert {name.split(".")[0] for name in part.posteriors[0].space.names} == {"0", "2", "4"}  # all layers
    assert networks
    assert np.isfinite(fit.model.predict(fit.test)["mean"]).all()
