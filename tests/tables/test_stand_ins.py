"""Values for what is missing in new rows: against closed forms of joint normals, and as wide as they have to be."""

import json

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from structvi_tables.columns import Columns  # noqa: E402
from structvi_tables.fitting import fit_table  # noqa: E402
from structvi_tables.model import TableModel  # noqa: E402
from structvi_tables.reading import TableError  # noqa: E402
from structvi_tables.stand_ins import FILLS, StandIns, gaps_of  # noqa: E402

#: sd of the 16 equally probable points that stand for N(0, 1)
SPREAD = 0.962


def normals(n=4000, rho=0.8):
    """a and b with correlation ρ, and a category that is "high" where b > 0 in nine of ten rows."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=n)
    b = rho * a + np.sqrt(1 - rho**2) * rng.normal(size=n)
    c = np.where((b > 0) ^ (rng.random(n) < 0.1), "high", "low")
    return pd.DataFrame({"a": a, "b": np.exp(b), "c": c})


@pytest.fixture(scope="module")
def together():
    table = normals()
    columns = Columns.of(table, {})
    return columns, StandIns.of(columns.columns, columns.values(table))


def filled(together, **row):
    columns, stand_ins = together
    rows = columns.values(pd.DataFrame({name: [value] for name, value in row.items()}))
    return stand_ins.filled(columns.columns, rows, 0)


@pytest.mark.parametrize("a", [-1.0, 0.0, 1.5])
def test_a_number_given_another(a):
    """b | a is N(ρa, 1 − ρ²) on the logarithmic scale: 64 quantiles and 4000 rows leave errors of a few hundredths."""
    table = normals()[["a", "b"]]
    columns = Columns.of(table, {})
    found = filled((columns, StandIns.of(columns.columns, columns.values(table))), a=a, b=np.nan)
    log_b = np.log([copy["b"][0] for copy in found])
    assert len(log_b) == FILLS
    assert log_b.mean() == pytest.approx(0.8 * a, abs=0.1)
    assert log_b.std() == pytest.approx(0.6 * SPREAD, abs=0.08)


def test_a_level_given_numbers(together):
    """Nine of ten rows with a large b are "high": 16 values can have 14 or 15 of them, and linear in b is not exact."""
    shares = [np.mean([copy["c"][0] == "high" for copy in filled(together, a=b, b=np.exp(b), c=None)]) for b in (-1, 1)]
    assert shares[0] <= 0.25
    assert shares[1] >= 0.75


def test_several_gaps_are_drawn_together(together):
    """With nothing known the copies have the columns' own correlation: that of a and log b is 0.8."""
    columns, stand_ins = together
    rows = columns.values(pd.DataFrame({"a": [np.nan], "b": [np.nan], "c": ["high"]}))
    every = [stand_ins.filled(columns.columns, rows, seed) for seed in range(60)]
    a, b = (np.array([copy[name][0] for copies in every for copy in copies]) for name in "ab")
    assert np.corrcoef(a, np.log(b))[0, 1] > 0.6  # of rows that are "high" it is 0.72 in 960 values: sd 0.02


def test_what_a_row_gets_does_not_depend_on_its_company(together):
    columns, stand_ins = together
    table = pd.DataFrame({"a": [0.3, np.nan, 1.0], "b": [np.nan, 2.0, 1.0], "c": ["low", "a longer text", None]})
    rows = columns.values(table)
    both = stand_ins.filled(columns.columns, rows, 0)
    assert gaps_of(columns.columns, rows).tolist() == [
        [False, True, False],
        [True, False, False],
        [False, False, True],
    ]
    for i in range(3):
        alone = stand_ins.filled(columns.columns, columns.values(table.iloc[[i]]), 0)
        for one, copy in zip(alone, both, strict=True):
            assert [values[0] for values in one.values()] == [values[i] for values in copy.values()]
    assert rows["c"].tolist() == ["low", "a longer text", ""]  # the rows themselves stay


def test_with_very_many_columns_each_is_drawn_by_itself():
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(40, 201))).rename(columns=str)
    columns = Columns.of(table, {})
    found = StandIns.of(columns.columns, columns.values(table))
    assert found.correlation == []
    gone = columns.values(table.iloc[:1].assign(**{"0": np.nan}))
    values = [copy["0"][0] for copy in found.filled(columns.columns, gone, 0)]
    assert np.std(values) == pytest.approx(table["0"].std(), rel=0.2)


@pytest.fixture
def line(few_steps):
    rng = np.random.default_rng(1)
    x, c = rng.normal(size=200), rng.choice(["a", "b"], 200)
    table = pd.DataFrame({"x": x, "c": c, "y": 100 + 30 * x + 20 * (c == "a") + 3 * rng.normal(size=200)})
    return table, fit_table(table, "y", noise="Gaussian").model


def test_an_interval_is_as_wide_as_what_is_not_known(line, tmp_path):
    """Without x the sd of y is √(30² + 3²) times that of x; one level of two is 10 from their mean."""
    table, model = line
    new = pd.DataFrame({"x": [0.0, np.nan, 0.0, np.nan], "c": ["a", "a", None, None]})
    notes = []
    found = model.predict(new, notes)
    assert found["outside"].tolist() == ["", "x", "c", "x c"]
    assert sum("mixture over values that it could have" in note for note in notes) == 2
    spread = 30 * table["x"].std()
    assert found["sd"][0] < 5
    assert found["sd"][1] == pytest.approx(np.hypot(spread, 3), rel=0.15)
    assert found["sd"][2] == pytest.approx(np.hypot(10, 3), rel=0.15)
    assert found["sd"][3] == pytest.approx(np.sqrt(spread**2 + 109), rel=0.15)
    assert found["high"][1] - found["low"][1] == pytest.approx(2 * 1.645 * np.hypot(spread, 3), rel=0.2)
    assert (found["epistemic_sd"][1:] > 3 * found["aleatoric_sd"][1:] * np.array([1, 0.5, 1])).all()
    pd.testing.assert_frame_equal(model.predict(new[:1]), found[:1])  # rows without gaps are as they were
    model.save(tmp_path)
    pd.testing.assert_frame_equal(TableModel.load(tmp_path).predict(new), found)
    model.stand_ins = None
    assert model.predict(new)["sd"][1] < 5  # the mean in its place: far too narrow


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.pop("correlation"),
        lambda r: r["margins"].pop("x"),
        lambda r: r["margins"]["x"].update(spread=0.0),
        lambda r: r["margins"]["x"].update(points=[float("nan")]),
        lambda r: r["margins"]["x"].update(points=[]),
        lambda r: r["margins"]["c"].update(shares=[1.0]),
        lambda r: r["margins"]["c"].update(more=1),
        lambda r: r["correlation"].pop(),
        lambda r: r["correlation"][0].pop(),
    ],
)
def test_a_damaged_record_is_refused(change):
    columns = Columns.of(pd.DataFrame({"x": np.arange(0.5, 40), "c": ["a", "b"] * 20}), {}).columns
    stand_ins = StandIns.of(columns, {"x": np.arange(0.5, 40), "c": np.array(["a", "b"] * 20)})
    record = json.loads(json.dumps(stand_ins.record()))
    assert StandIns.from_record(record, columns) == stand_ins
    change(record)
    with pytest.raises(TableError, match="damaged"):
        StandIns.from_record(record, columns)
