"""scikit-learn's own laws for estimators, and what they are for: Pipelines, searches, cross-validations."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import make_classification
from sklearn.utils.estimator_checks import estimator_checks_generator

import structvi as vi
from structvi.integrations.sklearn import BayesianClassifier, BayesianRegressor

QUICK = {"hidden": (8,), "family": vi.MeanField(), "epochs": 30, "batch_size": 64, "draws": 8, "random_state": 0}
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


@pytest.mark.slow
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
    model = BayesianRegressor((), family=vi.FullNormal(), epochs=400, draws=512, random_state=0).fit(X, y)
    design = np.column_stack([X, np.ones(len(X))])
    exact = design @ np.linalg.lstsq(design, y, rcond=None)[0]
    mean, std = model.predict(X, return_std=True)
    noise = np.sqrt(((y - exact) ** 2).mean())
    assert np.abs(mean - exact).max() < 0.2 * noise  # the prior shrinks by about 1/60 of 30; 512 draws
    assert std.mean() == pytest.approx(noise * np.sqrt(1 + 3 / 60), rel=0.05)
    assert model.score(X, y) > 0.97


def test_the_target_is_predicted_in_its_own_unit():
    """y in another unit is the same fit: mean and spread follow it; several targets and constant columns too."""
    X, y = line()
    small, large = (BayesianRegressor(**QUICK).fit(X, t).predict(X, return_std=True) for t in (y, 1e6 * y - 3e8))
    np.testing.assert_allclose(large[0], 1e6 * small[0] - 3e8, rtol=1e-3, atol=1e4)
    np.testing.assert_allclose(large[1], 1e6 * small[1], rtol=1e-3)
    X = np.column_stack([X, np.full(len(X), 7.0)])
    mean, std = BayesianRegressor(**QUICK).fit(X, np.column_stack([y, -y, np.ones(60)])).predict(X, return_std=True)
    assert mean.shape == std.shape == (60, 3)
    assert np.isfinite(mean).all()
    assert (std > 0).all()


def test_the_probabilities_are_those_of_the_posterior(monkeypatch):
    """At one set of draws for all rows, also where they are predicted in parts."""
    X, labels = make_classification(60, random_state=0)
    model = BayesianClassifier(**QUICK).fit(X, labels + 5)
    assert model.classes_.tolist() == [5, 6]
    x = torch.as_tensor((X - X.mean(0)) / X.std(0), dtype=torch.float32)
    pred = model.posterior_.predict(x, draws=8, generator=torch.Generator().manual_seed(model._seed))
    np.testing.assert_allclose(model.predict_proba(X), pred.mean, atol=1e-6)
    assert (model.predict(X) == 5 + pred.mean.argmax(1).numpy()).all()
    monkeypatch.setattr("structvi.integrations.sklearn.ROWS", 7)
    np.testing.assert_allclose(model.predict_proba(X), pred.mean, atol=1e-6)
