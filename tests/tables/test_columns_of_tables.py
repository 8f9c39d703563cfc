"""What columns are taken for, said in words, and the numbers they become."""

import json
from dataclasses import asdict

import numpy as np
import pytest

pd = pytest.importorskip("pandas")

from structvi_tables.columns import FILLS, Columns  # noqa: E402
from structvi_tables.reading import TableError  # noqa: E402
from structvi_tables.target import target_of  # noqa: E402

N = 60
RNG = np.random.default_rng(0)


def table():
    return pd.DataFrame(
        {
            "number": RNG.normal(size=N),
            "gaps": np.where(np.arange(N) % 7 == 0, np.nan, RNG.normal(size=N)),
            "city": np.where(np.arange(N) == 5, "rare", np.where(np.arange(N) % 2, "a", "b")),
            "flag": np.arange(N) % 3 == 0,
            "date": [f"2024-02-{i % 28 + 1:02}" for i in range(N)],
            "text": [f"words {i}" for i in range(N)],
            "patient_id": RNG.permutation(N) * 3 + 100,
            "row": np.arange(N) + 1,
            "same": 4.0,
            "none": np.nan,
        }
    )


def encoded(columns, new):
    return {name: x.double().numpy() for name, x in columns.inputs(columns.values(new)).items()}


def test_every_column_is_described():
    columns = Columns.of(table())
    assert list(map(str, columns.each)) == [
        "'number': number",
        "'gaps': number, some missing",
        "'city': category, 3 levels",
        "'flag': category, 2 levels",
        "'date': date",
    ]
    assert set(columns.left_out) == {"text", "patient_id", "row", "same", "none"}
    kinds = {"row": "category", "number": "number"}
    assert [column.kind for column in Columns.of(table()[["number", "row"]], kinds).each] == ["number", "category"]


def test_a_value_far_out_is_squashed():
    far = pd.DataFrame({"x": [*RNG.normal(size=500), 1e7]})
    (column,) = Columns.of(far).each
    assert column.squash
    z = column.z(far["x"].to_numpy())
    assert np.abs(z).max() < 25  # 22 standard deviations on the other scale with N = 501, and all others one point
    assert z[:500].std() > 0.5


def test_bins_make_a_bent_line():
    """A line bent at the edges is linear in the inputs: least squares finds it, and a plain number does not."""
    new = pd.DataFrame({"x": np.linspace(-3, 3, 400)})
    inputs, y = encoded(Columns.of(new), new), np.abs(new["x"].to_numpy())
    for name, found in (("plain", False), ("bins", True)):
        design = np.concatenate([inputs[name], np.ones((400, 1))], 1)
        residual = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
        assert (np.abs(residual).max() < 0.05) == found


def test_inputs_are_the_same_from_the_record_and_for_part_of_the_rows():
    data = table()
    columns = Columns.of(data)
    again = Columns.from_record(json.loads(json.dumps(asdict(columns))))
    assert again == columns
    np.testing.assert_array_equal(
        encoded(again, data.iloc[[3, 5, 0]])["bins"], encoded(columns, data)["bins"][[3, 5, 0]]
    )


def test_new_rows_are_checked():
    data = table()[["number", "gaps", "city"]]
    columns = Columns.of(data)
    with pytest.raises(TableError, match=r"no column 'gaps'.*it has 'number', 'city'"):
        columns.values(data.drop(columns="gaps"))
    with pytest.raises(TableError, match="'number' has 1 fields that cannot be read: 'x' in row 1"):
        columns.values(data.assign(number=["x", *[1] * (N - 1)]))
    rows = columns.values(data.assign(number=[None, *[1.0] * (N - 1)], city="new"))
    assert [bool(column.outside(rows[column.name])[0]) for column in columns.each] == [True, False, True]
    assert columns.gaps(rows)[0].tolist() == [True, False, False]


def test_far_beyond_the_range_an_input_stays():
    columns = Columns.of(pd.DataFrame({"x": np.linspace(0, 1, 50)}))
    near, far, farther = encoded(columns, pd.DataFrame({"x": [1.5, 2.5, 1e9]}))["plain"][:, 0]
    assert near < far == farther
    assert columns.each[0].outside(np.array([0.5, 1.5, np.nan])).tolist() == [False, True, True]


def test_a_gap_is_filled_with_quantiles_of_its_column():
    data = pd.DataFrame({"x": np.arange(160) + 0.5, "c": ["a"] * 40 + ["b"] * 120})
    columns = Columns.of(data)
    rows = columns.values(pd.DataFrame({"x": [np.nan, 3.0], "c": ["b", None]}))
    copies = columns.filled(rows, 0)
    assert len(copies) == FILLS
    x = sorted(copy["x"][0] for copy in copies)
    np.testing.assert_allclose(x, (np.arange(16) + 0.5) * 10, atol=1)
    assert sum(copy["c"][1] == "a" for copy in copies) == 4  # a quarter
    assert all(copy["x"][1] == 3.0 and copy["c"][0] == "b" for copy in copies)


@pytest.mark.parametrize(
    ("values", "task", "words"),
    [
        (["a", "b"] * 20, "classification", "words"),
        ([True, False] * 20, "classification", "words"),
        ([3, 9] * 20, "classification", "two values"),
        ([0, 1, 2] * 20, "classification", "whole numbers 0 to 2"),
        ([3, 4, 5] * 20, "regression", "3 different"),
        ([0.5, 1.5, 2.5] * 20, "regression", "3 different"),
        ([0] * 20 + [1] * 15 + [2] * 8 + [3], "regression", "4 different"),  # counts: too few threes for a class
    ],
)
def test_the_task_is_told(values, task, words):
    notes = []
    target = target_of(pd.DataFrame({"y": values}), "y", "auto", notes)
    assert target.task == task
    assert words in notes[0]


@pytest.mark.parametrize(
    ("form", "words"),
    [("%Y-%m-%d %H:%M", "date"), ("%d.%m.%Y %H:%M", "date, read as day.month.year"),
     ("%m/%d/%Y", "date, read as month/day/year"), ("%Y/%m/%d", "date")],
)  # fmt: skip
def test_dates_as_people_write_them(form, words):
    days = pd.Series(pd.date_range("2024-01-01", periods=60, freq="D"))
    columns = Columns.of(pd.DataFrame({"d": days.dt.strftime(form)}))
    assert str(columns.each[0]) == f"'d': {words}"
    # of new rows that do not tell themselves which number is the day
    new = columns.values(pd.DataFrame({"d": days[2:3].dt.strftime(form)}))["d"]
    assert new.tolist() == [(pd.Timestamp("2024-01-03") - pd.Timestamp(0)).days]
    assert np.isnan(columns.values(pd.DataFrame({"d": [None, np.nan]}))["d"]).all()
    with pytest.raises(TableError, match=r"'yesterday' in row 1.*2024-12-31"):
        columns.values(pd.DataFrame({"d": ["yesterday", None]}))
