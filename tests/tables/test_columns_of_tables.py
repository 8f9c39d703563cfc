"""What columns are taken for, said in words, and the numbers they become."""

import json

import numpy as np
import pytest

pd = pytest.importorskip("pandas")

from structvi_tables import fit_table  # noqa: E402
from structvi_tables.columns import Columns  # noqa: E402
from structvi_tables.model import TableModel  # noqa: E402
from structvi_tables.reading import TableError, read_table  # noqa: E402
from structvi_tables.target import target_of, with_target  # noqa: E402

N = 60
RNG = np.random.default_rng(0)


def table():
    return pd.DataFrame(
        {
            "number": RNG.normal(size=N),
            "gaps": np.where(np.arange(N) % 7 == 0, np.nan, RNG.normal(size=N)),
            "heavy": np.exp(3 * RNG.normal(size=N)) * np.where(np.arange(N) == 0, 1e6, 1),
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


def test_every_column_is_described():
    columns = Columns.of(table(), {})
    described = dict(line.split(": ", 1) for line in columns.describe())
    assert described == {
        "'number'": "number",
        "'gaps'": "number, some missing",
        "'heavy'": "number, with values far out: read on a logarithmic scale",
        "'city'": "category, 2 levels and others",
        "'flag'": "category, 2 levels",
        "'date'": "date",
    } | {key: value for key, value in described.items() if key == "'heavy'"}
    assert described["'heavy'"].startswith("number")
    left_out = columns.left_out
    assert set(left_out) == {"text", "patient_id", "row", "same", "none"}
    assert "identifier" in left_out["patient_id"]
    assert "counts the rows" in left_out["row"]
    assert "missing" in left_out["none"]


def test_a_value_far_out_is_squashed():
    far = pd.DataFrame({"x": [*RNG.normal(size=500), 1e7]})
    (column,) = Columns.of(far, {}).columns
    assert column.squash
    z = column.z(far["x"].to_numpy())
    assert (
        np.abs(z).max() < 25
    )  # it was 22 standard deviations in the other scale with N = 501, and all others one point
    assert z[:500].std() > 0.5


def test_what_is_said_of_a_column_is_believed():
    columns = Columns.of(table()[["number", "row"]], {"row": "category", "number": "number"})
    assert [column.kind for column in columns.columns] == ["number", "category"]


def test_bins_make_a_bent_line():
    """A line bent at the edges is linear in the inputs: least squares finds it, and a plain number does not."""
    x = np.linspace(-3, 3, 400)
    columns = Columns.of(pd.DataFrame({"x": x}), {})
    encoded = columns.encode(pd.DataFrame({"x": x}))
    y = np.abs(x)
    for inputs, found in ((encoded.plain, False), (encoded.bins, True)):
        design = np.concatenate([inputs, np.ones((400, 1))], 1)
        residual = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
        assert (np.abs(residual).max() < 0.05) == found


def test_inputs_are_the_same_from_the_record_and_for_part_of_the_rows():
    data = table()
    columns = Columns.of(data, {})
    again = Columns.from_record(json.loads(json.dumps(columns.record())))
    part = data.iloc[[3, 5, 0]]
    np.testing.assert_array_equal(again.encode(part).bins, columns.encode(data).bins[[3, 5, 0]])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r["columns"].clear(), "damaged"),
        (lambda r: r["columns"][0].update(kind="code"), "damaged"),
        (lambda r: r["columns"][0].update(scale=0), "damaged"),
        (lambda r: r["columns"][0].update(edges=["x"]), "damaged"),
        (lambda r: r["columns"][0].update(more=1), "damaged"),
        (lambda r: r.pop("left_out"), "damaged"),
    ],
)
def test_a_damaged_record_is_refused(change, says):
    record = json.loads(json.dumps(Columns.of(table(), {}).record()))
    change(record)
    with pytest.raises(TableError, match=says):
        Columns.from_record(record)


def test_new_rows_are_checked():
    data = table()[["number", "gaps", "city"]]
    columns = Columns.of(data, {})
    with pytest.raises(TableError, match=r"no column 'gaps'.*it has number, city"):
        columns.encode(data.drop(columns="gaps"))
    with pytest.raises(TableError, match="'number' has numbers and 1 fields that are none"):
        columns.encode(data.assign(number=["x", *[1] * (N - 1)]))
    notes = columns.encode(data.assign(number=[None, *[1.0] * (N - 1)], city="new")).notes
    assert "'number' is missing in 1 rows" in notes[0]
    assert "'new'" in notes[1]
    assert "'other'" in notes[1]


def test_far_beyond_the_range_an_input_stays():
    columns = Columns.of(pd.DataFrame({"x": np.linspace(0, 1, 50)}), {})
    near, far, farther = columns.encode(pd.DataFrame({"x": [1.5, 2.5, 1e9]})).plain[:, 0]
    assert near < far == farther


@pytest.mark.parametrize(
    ("values", "task", "words"),
    [
        (["a", "b"] * 20, "classification", "words"),
        ([True, False] * 20, "classification", "true and false"),
        ([3, 9] * 20, "classification", "two values"),
        ([0, 1, 2] * 20, "classification", "whole numbers 0 to 2"),
        ([3, 4, 5] * 20, "regression", "3 different"),
        ([0.5, 1.5, 2.5] * 20, "regression", "3 different"),
        (list(range(1, 41)), "regression", "40 different"),
        ([0] * 20 + [1] * 15 + [2] * 8 + [3], "regression", "4 different"),  # counts: too few threes for a class
    ],
)
def test_the_task_is_told(values, task, words):
    notes = []
    target = target_of(pd.DataFrame({"y": values}), "y", "auto", notes)
    assert target.task == task
    assert words in notes[0]
    assert "--task" in notes[0]


def test_rows_without_a_target_are_counted():
    notes = []
    found = with_target(pd.DataFrame({"y": [1.0, None] * 40}), "y", notes)
    assert len(found) == 40
    assert found.index[1] == 2  # the rows of the file
    assert "40 rows" in notes[0]


def test_separators_and_decimal_commas_are_told(tmp_path):
    (tmp_path / "a.csv").write_text("\ufeffx;y\n1,5;2\n-2,5;3\n", encoding="utf-8")
    notes = []
    found = read_table(tmp_path / "a.csv", notes=notes)
    assert found["x"].tolist() == [1.5, -2.5]
    assert notes == ["The columns are separated by semicolons.", "Numbers have a decimal comma."]
    (tmp_path / "b.csv").write_text(",x\n0,1\n1,?\n")
    notes = []
    found = read_table(tmp_path / "b.csv", notes=notes)
    assert list(found.columns) == ["x"]
    assert found["x"].isna().tolist() == [False, True]
    assert "row number" in notes[0]


@pytest.mark.parametrize(
    ("form", "words"),
    [("%Y-%m-%d %H:%M", "date"), ("%d.%m.%Y %H:%M", "date, read as day.month.year"),
     ("%m/%d/%Y", "date, read as month/day/year"), ("%d/%m/%y", "date, read as day/month/year"),
     ("%m/%d/%Y %I:%M %p", "date, read as month/day/year"), ("%Y/%m/%d", "date")],
)  # fmt: skip
def test_dates_as_people_write_them(form, words):
    days = pd.Series(pd.date_range("2024-01-01", periods=60, freq="D"))
    columns = Columns.of(pd.DataFrame({"d": days.dt.strftime(form)}), {})
    assert columns.describe() == [f"'d': {words}"]
    again = Columns.from_record(json.loads(json.dumps(columns.record())))
    # of new rows that do not tell themselves which number is the day
    new = again.values(pd.DataFrame({"d": days[2:3].dt.strftime(form)}))["d"]
    assert new.tolist() == [(pd.Timestamp("2024-01-03") - pd.Timestamp(0)).days]
    # ISO 8601 is always known
    assert again.values(pd.DataFrame({"d": ["2024-01-03"]}))["d"].tolist() == new.tolist()


def test_dates_that_do_not_tell_the_day_are_said_to():
    table = pd.DataFrame({"d": [f"{i % 12 + 1:02}/{i % 7 + 1:02}/2024" for i in range(60)]})
    (words,) = Columns.of(table, {}).describe()
    assert words == "'d': date, read as month/day/year (no day is above 12: if the day comes first, write 2024-12-31)"


def test_dates_of_new_rows():
    columns = Columns.of(pd.DataFrame({"d": pd.date_range("2024-01-01", periods=40).strftime("%Y-%m-%d")}), {})
    assert not np.isnan(columns.encode(pd.DataFrame({"d": ["2024-02-01"]})).plain).any()
    gone = columns.encode(pd.DataFrame({"d": [np.nan, np.nan]}))
    assert (gone.plain == 0).all()
    assert "missing in 2 rows" in gone.notes[0]
    assert "a mixture over values that it could have" in gone.notes[0]
    with pytest.raises(TableError, match=r"had dates.*'yesterday'.*2024-12-31"):
        columns.encode(pd.DataFrame({"d": ["yesterday", "2024-01-01"]}))


def test_tables_that_are_none_and_names_that_are_no_texts():
    for wrong in ({"a": [1]}, "a.csv", np.zeros((3, 2))):
        with pytest.raises(TypeError, match=r"expected a pandas table.*read_table"):
            fit_table(wrong, "a")
    with pytest.raises(TableError, match="more than one column is called 'a'"):
        fit_table(pd.DataFrame([[1, 2]], columns=["a", "a"]), "a")
    with pytest.raises(TableError, match="the target '2' has one value only"):
        fit_table(pd.DataFrame(np.ones((40, 3)), index=[f"r{i}" for i in range(40)]), 2)


def test_what_is_missing_where_nothing_was_is_outside():
    table = pd.DataFrame({"x": np.linspace(0, 1, 40), "c": ["a", "b"] * 20, "g": [np.nan, 1.0, 2.0, 3.0] * 10})
    model = TableModel(Columns.of(table, {}), target_of(table, "x", "regression", []), [], {"x": (0.0, 1.0)})
    rows = pd.DataFrame({"x": [0.5, np.nan, 2.0], "c": ["a", None, "z"], "g": [1.0, np.nan, np.nan]})
    assert model.outside(rows) == ["", "x c", "x c"]
