"""Tables of pandas in the estimators of scikit-learn: read and predicted as `fit_table` does, by the same code."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.model_selection import cross_val_score

from structvi.integrations.sklearn import BayesianClassifier, BayesianRegressor
from structvi_tables import TableError, TableModel, arrays, choosing, members
from structvi_tables.columns import Columns
from structvi_tables.recipes import DRAWS
from structvi_tables.target import Target


def houses(n=120):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({
        "area": rng.uniform(30, 200, n),
        "city": rng.choice(["Bonn", "Ulm", "Trier"], n),
        "heating": pd.Series(rng.choice(["gas", "oil"], n), dtype="category").where(rng.random(n) > 0.2),
        "sold": pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 700, n), "D"),
        "built": [f"{day}.06.{1950 + day}" for day in rng.integers(13, 28, n)],
        "garden": rng.random(n) < 0.5,
        "house_id": rng.permutation(n),
    })  # fmt: skip
    price = 5 * frame["area"] + 200 * (frame["city"] == "Bonn") + 100 * frame["garden"] + 30 * rng.normal(size=n)
    return frame, price


def new_rows():
    """Rows with and without values that are missing for the first time, in turn, and with a city that is new."""
    frame = houses()[0].head(6).copy()
    frame.loc[1, "area"] = np.nan
    frame.loc[3, ["city", "sold"]] = None
    frame.loc[4, "city"] = "Jena"
    frame.loc[5, ["area", "built"]] = None
    return frame.set_axis(list("uvwxyz"))


@pytest.fixture(autouse=True, scope="module")
def few_steps():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(members, "STEPS", 20)
        patch.setattr(members, "MOST_STEPS", 20)
        patch.setattr(members, "LOOK", 10)
        patch.setattr(choosing, "HIDDEN", (4,))
        patch.setattr(arrays, "FOLDS", 2)
        yield


@pytest.fixture(scope="module")
def regressor():
    return BayesianRegressor("auto", random_state=0).fit(*houses())


@pytest.fixture(scope="module")
def classifier():
    frame, price = houses()
    return BayesianClassifier("auto", random_state=0).fit(frame, np.where(price > price.median(), "dear", "cheap"))


def quietly(function, *arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments, **options)


def test_columns_are_read_as_fit_table_reads_them(regressor):
    frame, price = houses()
    assert regressor.feature_names_in_.tolist() == list(frame.columns)
    assert regressor.n_features_in_ == 7
    assert regressor.missing_.tolist() == [name == "heating" for name in frame.columns]
    expected = Columns.of(frame, {})
    found = regressor._auto.columns
    assert found.describe() == expected.describe()
    assert found.left_out == expected.left_out
    np.testing.assert_allclose(found.encode(frame).bins, expected.encode(frame).bins, atol=1e-9)
    notes = " ".join(regressor.result_.notes)
    assert "'house_id' was left out: by its name" in notes
    assert "'heating': category, 2 levels, some missing; 'sold': date; 'built': date, read as day.month.year" in notes
    assert regressor.score(frame, price) > 0.9  # the noise of 30 leaves 0.98 of the variance


@pytest.mark.parametrize("rows", [houses()[0], new_rows()], ids=["fitted", "new"])
def test_amounts_are_those_of_a_table_model(regressor, rows):
    """The same parts in a `TableModel`, with as many draws, give the same numbers, whatever is missing."""
    fit, target = regressor._auto, regressor._targets
    goal = Target("price", "regression", [], float(target.mean[0]), float(target.scale[0]))
    expected = TableModel(fit.columns, goal, fit.parts, {}, 0.9, fit.seed, fit.stand_ins).predict(rows)
    model = pickle.loads(pickle.dumps(regressor)).set_params(draws=DRAWS * sum(len(p.posteriors) for p in fit.parts))
    mean, std = quietly(model.predict, rows, return_std=True)
    np.testing.assert_allclose(mean, expected["mean"], rtol=1e-6)
    np.testing.assert_allclose(std, expected["sd"], rtol=1e-6)


def test_classes_are_those_of_a_table_model(classifier):
    fit = classifier._auto
    goal = Target("price", "classification", classifier.classes_.tolist())
    expected = TableModel(fit.columns, goal, fit.parts, {}, 0.9, fit.seed, fit.stand_ins).predict(new_rows())
    model = pickle.loads(pickle.dumps(classifier)).set_params(draws=DRAWS * sum(len(p.posteriors) for p in fit.parts))
    p = quietly(model.predict_proba, new_rows())
    np.testing.assert_allclose(p, expected[["p_cheap", "p_dear"]], atol=1e-6)
    assert quietly(model.predict, new_rows()).tolist() == expected["prediction"].tolist()


def test_rows_stay_in_order_and_do_not_depend_on_their_company(regressor):
    rows = new_rows()
    whole = quietly(regressor.predict, rows)
    alone = [quietly(regressor.predict, rows.iloc[[i]])[0] for i in (1, 2, 5)]
    np.testing.assert_allclose(whole[[1, 2, 5]], alone, rtol=1e-5)
    parts = [part.mean.numpy() for part in quietly(regressor.predictive, rows)]
    assert [len(part) for part in parts] == [1, 1, 1, 1, 1, 1]  # every second has gaps
    np.testing.assert_allclose(regressor._targets.back(np.concatenate(parts))[:, 0], whole, rtol=1e-5)


def test_what_is_new_is_told(regressor):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        regressor.predict(new_rows())
    messages = " ".join(str(one.message) for one in told)
    assert "'area' is missing in 2 rows and was never when the model was fitted: the prediction" in messages
    assert "'city' has levels that are not told apart, 'Jena'" in messages
    assert {one.filename for one in told} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        regressor.predict(houses()[0])


def test_a_gap_in_an_array_is_as_wide_as_the_values_it_may_hide():
    """t = 30 x + e, x ~ U(−2, 2), sd of e 5: without x, t has mean 0 and variance 30² · 4/3 + 25, sd 35.

    400 rows: the mean has a standard error of 1.7. The 16 values stand for quantiles, whose sd is 0.1 % less.
    """
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (400, 2))
    y = 30 * X[:, 0] + 5 * rng.normal(size=400)
    model = BayesianRegressor("auto", random_state=0).fit(X, y)
    with pytest.warns(UserWarning, match="'0' is missing in 1 rows"):
        mean, std = model.predict(np.array([[1.0, 0.0], [np.nan, 0.0]]), return_std=True)
    assert mean[0] == pytest.approx(30, abs=3)
    assert std[0] == pytest.approx(5, abs=1)
    assert mean[1] == pytest.approx(0, abs=5)
    assert std[1] == pytest.approx(35, abs=3)
    frame = pd.DataFrame(X, columns=["a", "b"])  # a table of numbers is the array, bit for bit
    again = BayesianRegressor("auto", random_state=0).fit(frame, y)
    np.testing.assert_array_equal(again.predict(frame), model.predict(X))
    with pytest.warns(UserWarning, match="valid feature names"):
        np.testing.assert_array_equal(again.predict(X), model.predict(X))


def test_clones_pickles_and_cross_validations(classifier):
    frame, price = houses(60)
    again = pickle.loads(pickle.dumps(classifier))
    rows = new_rows()
    np.testing.assert_array_equal(quietly(again.predict_proba, rows), quietly(classifier.predict_proba, rows))
    assert not vars(clone(classifier)).keys() & {"classes_", "posterior_"}
    scores = quietly(cross_val_score, BayesianRegressor("auto", random_state=0), frame, price, cv=2)
    assert scores.min() > 0.5


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: x[x.columns[::-1]], ValueError, "feature names"),
        (lambda x: x.drop(columns="city"), ValueError, "missing:\n- city"),
        (lambda x: x.assign(area="large"), TableError, "'area' has numbers and 6 .* here a letter before each value"),
        (lambda x: x.assign(built="long ago"), TableError, "'built' had dates when the model was fitted"),
        (lambda x: x.head(0), ValueError, "X has no rows"),
        (lambda x: x.to_numpy()[:, :3], ValueError, "3 features, but BayesianRegressor is expecting 7"),
    ],
)
def test_rows_that_cannot_be_predicted(regressor, change, error, message):
    with pytest.raises(error, match=message):
        quietly(regressor.predict, change(new_rows()))


@pytest.mark.parametrize("options", [{"hidden": (8,)}, {"hidden": "auto", "family": "MeanField"}])
def test_words_are_refused_where_models_are_given(options):
    frame, price = houses()
    with pytest.raises(ValueError, match=r"X must be numbers.*OneHotEncoder.*fit_table.*hidden=\"auto\""):
        BayesianRegressor(**options).fit(frame[["area", "city"]], price)


@pytest.mark.parametrize(
    ("table", "y", "message"),
    [
        (lambda x: x[["house_id"]], lambda y: y, "no column is left to predict from: 'house_id'"),
        (lambda x: x.set_axis(["a", "a", *"bcdef"], axis=1), lambda y: y, "more than one column is called 'a'"),
        (lambda x: x, lambda y: y.where(y > 500), "NaN"),
        (lambda x: x, lambda y: y.head(5), "inconsistent numbers of samples"),
        (lambda x: x.assign(area=x["area"].where(x.index > 0, np.inf)), lambda y: y, "'area' has infinite values"),
        (lambda x: x.head(5), lambda y: y.head(5), "6 are the fewest, got 5"),
    ],
)
def test_tables_that_cannot_be_fitted(table, y, message):
    frame, price = houses()
    with pytest.raises(ValueError, match=message):
        BayesianRegressor("auto").fit(table(frame), y(price))
