"""scikit-learn's own laws for estimators, and what they are for: Pipelines, searches, cross-validations."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import make_classification
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import estimator_checks_generator

import structvi as vi
from structvi.integrations.sklearn import BayesianClassifier, BayesianRegressor
from structvi_tables import arrays
from tests.children import python

QUICK = {"hidden": (8,), "family": "MeanField", "epochs": 30, "batch_size": 64, "draws": 8, "random_state": 0}
#: scikit-learn's laws fit several hundred times
QUICKER = QUICK | {"epochs": 10, "batch_size": 128, "draws": 4}


def name_of(check):
    return getattr(check, "func", check).__name__


#: all of them, but for arrays of other libraries than numpy: scikit-learn checks those only with SCIPY_ARRAY_API set
LAWS = [
    pytest.param(estimator, check, id=f"{type(estimator).__name__}-{name_of(check)}-{index}")
    for estimator in (BayesianRegressor(**QUICKER), BayesianClassifier(**QUICKER))
    for index, (_, check) in enumerate(estimator_checks_generator(estimator))
    if "array_api" not in name_of(check)
]


@pytest.mark.parametrize(("estimator", "check"), LAWS)
def test_the_laws_of_scikit_learn(estimator, check):
    check(clone(estimator))


def line(n=60, seed=0):
    generator = np.random.default_rng(seed)
    X = generator.uniform(-2, 2, (n, 2))
    return X, 100 + 30 * X[:, 0] - 10 * X[:, 1] + 5 * generator.normal(size=n)


def test_the_linear_model_is_that_of_the_closed_form():
    """hidden=(), a full normal over 3 weights, N = 60: the mean of least squares, and noise 5 times √(1 + 3/60)."""
    X, y = line()
    model = BayesianRegressor((), family="FullNormal", epochs=400, draws=512, random_state=0).fit(X, y)
    design = np.column_stack([X, np.ones(len(X))])
    exact = design @ np.linalg.lstsq(design, y, rcond=None)[0]
    mean, std = model.predict(X, return_std=True)
    noise = np.sqrt(((y - exact) ** 2).mean())
    assert np.abs(mean - exact).max() < 0.2 * noise  # the prior shrinks by about 1/60 of 30; 512 draws
    assert std.mean() == pytest.approx(noise * np.sqrt(1 + 3 / 60), rel=0.05)
    assert model.score(X, y) > 0.97


def test_the_target_is_predicted_in_its_own_unit():
    """y in another unit is the same fit: mean and spread follow it."""
    X, y = line()
    small, large = (BayesianRegressor(**QUICK).fit(X, t).predict(X, return_std=True) for t in (y, 1e6 * y - 3e8))
    np.testing.assert_allclose(large[0], 1e6 * small[0] - 3e8, rtol=1e-3, atol=1e4)
    np.testing.assert_allclose(large[1], 1e6 * small[1], rtol=1e-3)


def test_several_targets_and_constant_columns():
    X, y = line()
    X = np.column_stack([X, np.full(len(X), 7.0)])
    model = BayesianRegressor(**QUICK).fit(X, np.column_stack([y, -y, np.ones(len(y))]))
    mean, std = model.predict(X, return_std=True)
    assert mean.shape == std.shape == (60, 3)
    assert np.isfinite(mean).all()
    assert (std > 0).all()


def test_spread_grows_away_from_the_data():
    X, y = line()
    model = BayesianRegressor(**QUICK | {"epochs": 200, "family": "LowRankNormal", "rank": 2}).fit(X, y)
    assert model.posterior_.family.rank == 2
    near, far = (model.predict(where, return_std=True)[1] for where in (X, 20 * X))
    assert np.median(far) > 2 * np.median(near)


def test_in_a_pipeline_a_search_and_a_cross_validation():
    X, y = line()
    pipeline = make_pipeline(PolynomialFeatures(2), BayesianRegressor(**QUICK))
    assert cross_val_score(pipeline, X, y, cv=2).shape == (2,)
    search = GridSearchCV(
        pipeline, {"bayesianregressor__family": ["MeanField", vi.MeanField(initial_scale=0.3)]}, cv=2
    ).fit(X, y)
    mean, std = search.best_estimator_.predict(X, return_std=True)
    assert mean.shape == std.shape == (60,)
    X, labels = make_classification(60, random_state=0)
    assert cross_val_score(BayesianClassifier(**QUICK), X, labels, cv=2, scoring="neg_log_loss").mean() > -np.log(2)


def test_frames_of_pandas():
    X, y = line()
    frame = pd.DataFrame(X, columns=["a", "b"])
    model = BayesianRegressor(**QUICK).fit(frame, pd.Series(y))
    assert list(model.feature_names_in_) == ["a", "b"]
    np.testing.assert_array_equal(model.predict(frame), BayesianRegressor(**QUICK).fit(X, y).predict(X))
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["b", "a"]])
    with pytest.raises(ValueError, match=r"'x': X must be numbers.*OneHotEncoder.*fit_table"):
        BayesianRegressor(**QUICK).fit(frame.assign(a="x"), pd.Series(y))
    labels = pd.Series(np.where(y > 100, "high", "low"), dtype="category")
    classifier = BayesianClassifier(**QUICK).fit(frame, labels)
    assert set(classifier.predict(frame)) <= {"high", "low"}
    assert classifier.predict_proba(frame).sum(1) == pytest.approx(np.ones(60))


def test_the_probabilities_are_those_of_the_posterior():
    X, labels = make_classification(60, random_state=0)
    model = BayesianClassifier(**QUICK).fit(X, labels + 5)
    assert model.classes_.tolist() == [5, 6]
    x = torch.as_tensor((X - X.mean(0)) / X.std(0), dtype=torch.float32)
    pred = model.posterior_.predict(x, draws=8, generator=torch.Generator().manual_seed(model._seed))
    np.testing.assert_allclose(model.predict_proba(X), pred.mean, atol=1e-6)
    assert (model.predict(X) == 5 + pred.mean.argmax(1).numpy()).all()


def test_rows_are_predicted_in_parts(monkeypatch):
    X, y = line()
    model = BayesianRegressor(**QUICK).fit(X, y)
    whole = model.predict(X)
    monkeypatch.setattr("structvi.integrations.sklearn.ROWS", 7)
    np.testing.assert_allclose(model.predict(X), whole, rtol=1e-6)


def test_the_global_stream_is_left_alone():
    X, y = line()
    state = torch.get_rng_state()
    BayesianRegressor(**QUICK).fit(X, y).predict(X)
    assert torch.equal(state, torch.get_rng_state())


def test_clones_and_pickles():
    X, y = line()
    model = BayesianRegressor(**QUICK | {"family": vi.LowRankNormal(rank=2)}).fit(X, y)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    np.testing.assert_array_equal(clone(model).fit(X, y).predict(X), model.predict(X))
    with pytest.raises(NotFittedError):
        clone(model).predict(X)


@pytest.mark.parametrize(
    ("options", "arguments", "error", "message"),
    [
        ({"family": "Normal"}, {}, ValueError, "family must be one of .*'MeanField'.* got 'Normal'"),
        ({"hidden": (0,)}, {}, ValueError, "widths of the hidden layers"),
        ({"hidden": "50"}, {}, ValueError, "widths of the hidden layers"),
        ({"epochs": 0}, {}, ValueError, "epochs must be an integer"),
        ({"family": vi.MAP()}, {}, ValueError, "learns its scale"),
        ({}, {"sample_weight": np.ones(60)}, TypeError, "got sample_weight too. Weights of observations are not"),
    ],
)
def test_bad_input(options, arguments, error, message):
    with pytest.raises(error, match=message):
        BayesianRegressor(**QUICK | options).fit(*line(), **arguments)


def test_a_point_estimate_is_a_family_too():
    X, y = line()
    model = BayesianRegressor(**QUICK | {"family": vi.MAP(), "learn_prior": False}).fit(X, y)
    assert model.predict(X, return_std=True)[1].std() == pytest.approx(0, abs=1e-4)  # the noise alone


def test_scikit_learn_missing_is_said():
    code = "import sys\nsys.modules['sklearn'] = None\nimport structvi\nimport structvi.integrations.sklearn"
    done = python(code)
    assert 'pip install "structvi[sklearn]"' in done.stderr


def test_auto_is_the_way_of_the_tables(monkeypatch):
    """hidden="auto" tries the models of `structvi fit`; a line is found in closed form, whatever the networks do."""
    for name, value in (("members.STEPS", 20), ("members.MOST_STEPS", 20), ("choosing.HIDDEN", (4,))):
        monkeypatch.setattr(f"structvi_tables.{name}", value)
    X, y = line()
    model = BayesianRegressor("auto", random_state=0).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    assert np.sqrt(np.mean((mean - y) ** 2)) < 7  # noise 5, N = 60: within three standard errors, and some overfit
    assert (std > 2).all()
    assert "linear model, Gaussian noise" in [one.name for one in model.tried_ if one.weight]
    classifier = BayesianClassifier("auto", random_state=0).fit(X, y > 100)
    p = classifier.predict_proba(X)
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-6)
    assert classifier.score(X, y > 100) > 0.85
    with pytest.raises(ValueError, match="one number to predict, got 2"):
        BayesianRegressor("auto").fit(X, np.stack([y, y], 1))
    with pytest.raises(ValueError, match="or \"auto\", got 'deep'"):
        BayesianRegressor("deep").fit(X, y)


def with_gaps(n=200):
    """Where the second column is missing, y is 60 higher: only an input that says so can tell."""
    X, y = line(n)
    gone = np.random.default_rng(1).random(n) < 0.3
    y = y + 60 * gone
    X[gone, 1] = np.nan
    return X, y, gone


def test_missing_values_are_taken_and_told():
    X, y, gone = with_gaps()
    model = BayesianRegressor(**QUICK | {"epochs": 100}).fit(X, y)
    assert model.missing_.tolist() == [False, True]
    assert any(f"{gone.sum()} values are missing, in columns 1" in note for note in model.result_.notes)
    left = y - model.predict(X)
    assert abs(left[gone].mean() - left[~gone].mean()) < 15  # of the 60 that would be left without the input
    with pytest.warns(UserWarning, match="missing in columns 0, where none was when"):
        mean, std = model.predict(np.array([[np.nan, 0.0]]), return_std=True)
    assert np.isfinite([*mean, *std]).all()
    labels = np.where(y > np.median(y), "high", "low")
    classifier = BayesianClassifier(**QUICK).fit(X, labels)
    assert np.isfinite(classifier.predict_proba(X)).all()
    assert classifier.score(X, labels) > 0.8


class Seen(Exception):
    pass


def test_missing_values_in_the_mixture_of_the_command_line(monkeypatch):
    """Its models, which take long to fit, get an input for them too."""

    def seen(problem, *_):
        assert all(bool(x.isfinite().all()) for x in problem.x.values())
        assert problem.x["plain"].shape[1] == 3
        assert int(problem.x["plain"][:, 2].sum()) == gone.sum()
        raise Seen

    X, y, gone = with_gaps(80)
    monkeypatch.setattr(arrays, "chosen", seen)
    with pytest.raises(Seen):
        BayesianRegressor("auto").fit(X, y)


@pytest.mark.parametrize("estimator", [BayesianRegressor(**QUICK), BayesianClassifier(**QUICK)])
def test_what_is_infinite_or_has_no_target_is_refused(estimator):
    X, y, _ = with_gaps(40)
    y = np.round(y > 100).astype(float)
    worse = X.copy()
    worse[3, 0] = np.inf
    with pytest.raises(ValueError, match="infinity"):
        estimator.fit(worse, y)
    with pytest.raises(ValueError, match="NaN"):
        estimator.fit(X, np.where(np.arange(40) == 3, np.nan, y))
    empty = np.column_stack([X[:, 0], np.full(40, np.nan)])  # a column without any value says nothing
    assert np.isfinite(estimator.fit(empty, y).predict(empty)).all()
