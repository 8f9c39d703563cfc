"""From a file to a folder and back: the command line on small tables with few steps."""

import json
import sys

import numpy as np
import pytest
import torch

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from structvi import cli  # noqa: E402
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
    data, out = regression().assign(leak=lambda rows: rows["y"] + 1.0), tmp_path / "out"
    data.to_csv(tmp_path / "a.csv", index=False)
    options = ("--target", "y", "--without", "leak", "--out", out)
    code, said, err = run(monkeypatch, capsys, "fit", tmp_path / "a.csv", *options)
    assert code == 0, err
    for words in ("predicted as regression", "16 rows were drawn", "'leak' was left out, as you said.",
                  "tried: linear model", "ridge regression", "report.html"):  # fmt: skip
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
    assert "1 of 3 rows have values beyond what was fitted" in err
    mean, sd = (np.array([float(row.split(",")[i]) for row in rows[1:]]) for i in (1, 2))
    assert mean[:2] == pytest.approx([120, 100], abs=4)
    assert sd[2] > sd[0]
    code, said, _ = run(monkeypatch, capsys, "predict", out, tmp_path / "new.csv", "--out", tmp_path / "p.csv")
    assert (code, said) == (0, f"{tmp_path / 'p.csv'}\n")
    assert (tmp_path / "p.csv").read_text().splitlines() == rows

    new.drop(columns="x").to_csv(tmp_path / "less.csv", index=False)
    code, _, err = run(monkeypatch, capsys, "predict", out, tmp_path / "less.csv")
    assert (code, "no column 'x'" in err) == (2, True)
    code, _, err = run(monkeypatch, capsys, "predict", tmp_path, tmp_path / "new.csv")
    assert (code, "no model.json" in err) == (2, True)


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


def test_a_fit_is_repeated_by_its_seed_and_survives_the_folder(few_steps, tmp_path):
    data = regression(60)
    one, two, other = (fit_table(data, "y", seed=seed) for seed in (3, 3, 4))
    new = data.drop(columns="y").iloc[:5]
    pd.testing.assert_frame_equal(one.model.predict(new), two.model.predict(new))
    assert not np.allclose(one.model.predict(new)["mean"], other.model.predict(new)["mean"])
    one.model.save(tmp_path)
    pd.testing.assert_frame_equal(TableModel.load(tmp_path).predict(new), one.model.predict(new))
    assert set(one.fit.tolist()).isdisjoint(one.test.tolist())


def test_the_mixtures_scores_agree_with_sampling(few_steps):
    """Quantiles and distribution function of the mixture against 40,000 samples of it: three standard errors."""
    fit = fit_table(regression(60), "y")
    (mixture,) = (mixture for _, mixture in fit.model.mixtures(fit.test_table.iloc[:3]))
    generator = torch.Generator().manual_seed(0)
    samples = []
    for part, weight in zip(mixture.parts, mixture.weights, strict=True):
        samples.append(part.sample(round(40_000 * weight), generator)[..., 0])
    drawn = torch.cat(samples).double()
    q = mixture.quantiles([0.1, 0.5, 0.9])
    for i, p in enumerate((0.1, 0.5, 0.9)):
        share = (drawn <= q[:, i]).double().mean(0)
        assert (share - p).abs().max() < 3 * (p * (1 - p) / len(drawn)) ** 0.5 + 1 / 128
    torch.testing.assert_close(mixture.cdf(q[:, 1:2]), torch.full((3,), 0.5, dtype=torch.float64), atol=0.01, rtol=0)
    torch.testing.assert_close(mixture.mean[:, 0], drawn.mean(0), atol=0.03, rtol=0)


def test_an_interval_is_as_wide_as_what_is_not_known(few_steps):
    """Without x the sd of y is √(30² + 3²) times that of x; one level of two is 10 from their mean."""
    table = regression(200)
    model = fit_table(table, "y", noise="Gaussian").model
    new = pd.DataFrame({"x": [0.0, np.nan, 0.0], "c": ["a", "a", None]})
    found = model.predict(new)
    assert found["outside"].tolist() == ["", "x", "c"]
    assert found["sd"][0] < 5
    # 16 quantiles have .96 of a normal's sd
    assert found["sd"][1] == pytest.approx(np.hypot(0.96 * 30 * table["x"].std(), 3), rel=0.15)
    assert found["sd"][2] == pytest.approx(np.hypot(10, 3), rel=0.15)
    assert (found["epistemic_sd"][1:] > 1.5 * found["aleatoric_sd"][1:]).all()
    pd.testing.assert_frame_equal(model.predict(new[:1]), found[:1])  # a row does not depend on its company


def test_the_time_is_said_before_training(few_steps, monkeypatch):
    said, trained = [], []
    monkeypatch.setattr("structvi_tables.choosing.Problem.tried", lambda *_: trained.append(len(said)) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit_table(regression(40), "y", say=said.append)
    assert "Training takes about 10 seconds at most" in said[-1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("training.STEPS", 10),
            ("training.LOOK", 5),
            ("fitting.FOLDS", 2),
        ):
            patch.setattr(f"structvi_tables.{name}", value)
        fit_table(regression(40), "y", noise="Gaussian").model.save(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.update(kind="other"), "no table model"),
        (lambda r: r["parts"][0]["recipe"].update(noise="__import__('os')"), "damaged"),
        (lambda r: r["parts"][0]["recipe"].update(deep=10**9), "damaged"),
        (lambda r: r["parts"][0].update(weight=7.0), "damaged"),
        (lambda r: r["target"].update(scale=-1.0), "damaged"),
        (lambda r: r["columns"]["each"].clear(), "damaged"),
        (lambda r: r["columns"]["each"][0].update(kind="code"), "damaged"),
        (lambda r: r["columns"]["each"][0].update(scale=0), "damaged"),
        (lambda r: r["columns"]["each"][0].update(edges=["x"]), "damaged"),
        (lambda r: r["columns"]["each"][0].update(fills=[[]]), "damaged"),
        (lambda r: r["columns"].pop("left_out"), "damaged"),
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


def test_a_long_table_is_sampled(few_steps, monkeypatch):
    monkeypatch.setattr("structvi_tables.fitting.MOST_ROWS", 50)
    fit = fit_table(regression(400), "y", noise="Gaussian")
    assert (len(fit.fit), len(fit.test)) == (40, 10)
    assert any("random sample of 50" in note for note in fit.notes)
