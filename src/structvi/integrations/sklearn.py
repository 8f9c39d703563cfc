"""Bayesian multilayer perceptrons as scikit-learn estimators, for Pipelines, searches and cross-validations."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ..families.family import Family
from ..families.low_rank import LowRankPrecision
from ..models.likelihoods import Categorical, Gaussian, Likelihood
from ..models.priors import NormalPrior
from ..posterior import Posterior, variationalize
from ..predict.predictive import Predictive
from ..train.result import FitResult
from ..util.random_streams import borrowed_stream

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:
    raise ImportError(
        'structvi.integrations.sklearn needs scikit-learn ≥ 1.6: pip install "structvi[sklearn]"'
    ) from None

__all__ = ["BayesianClassifier", "BayesianRegressor"]

#: steps of a fit where epochs are not given; a network of 50 hidden units converges on a few thousand rows
STEPS = 4000
#: rows in one call of the network, which bounds the memory of a prediction
ROWS = 4096


class BayesianEstimator(BaseEstimator):
    """A multilayer perceptron of rectified units with a posterior over all weights; see `BayesianRegressor`."""

    posterior_: Posterior
    result_: FitResult

    def __init__(
        self,
        hidden: Sequence[int] = (50,),
        *,
        family: Family | None = None,
        rank: int = 5,
        prior_scale: float = 1.0,
        learn_prior: bool = True,
        epochs: int | None = None,
        batch_size: int = 64,
        lr: float = 0.05,
        draws: int = 64,
        random_state: Any = None,
        verbose: bool = False,
    ):
        self.hidden = hidden
        self.family = family
        self.rank = rank
        self.prior_scale = prior_scale
        self.learn_prior = learn_prior
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.draws = draws
        self.random_state = random_state
        self.verbose = verbose

    def _fit(self, X: np.ndarray, t: Tensor, outputs: int, likelihood: Likelihood) -> None:
        """Fit to X [N, F] and t [N, ..] as the likelihood takes it."""
        self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self._inputs = StandardScaler().fit(X)
        sizes = [X.shape[1], *map(int, np.atleast_1d(self.hidden)), outputs]
        generator = torch.Generator().manual_seed(self._seed)
        with borrowed_stream(generator):
            layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        net = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])
        scales = {name: self.prior_scale for name, _ in net.named_parameters()}
        prior = NormalPrior(scales, learn=self.learn_prior, by_fan_in=True)
        P = sum(parameter.numel() for parameter in net.parameters())
        family = LowRankPrecision(min(self.rank, P)) if self.family is None else self.family
        self.posterior_ = variationalize(net, likelihood, family, prior, generator=generator)
        data = TensorDataset(self._standardised(X), t)
        loader = DataLoader(data, batch_size=min(self.batch_size, len(data)), shuffle=True)
        epochs = -(-STEPS // len(loader)) if self.epochs is None else self.epochs
        self.result_ = self.posterior_.fit(loader, epochs=epochs, lr=self.lr, seed=self._seed, progress=self.verbose)

    def _standardised(self, X: np.ndarray) -> Tensor:
        return torch.as_tensor(self._inputs.transform(X), dtype=torch.float32)

    def predictive(self, X: Any) -> Iterator[Predictive]:
        """Yield predictive distributions of the standardised target, `ROWS` rows at a time, all from the same draws."""
        check_is_fitted(self, "posterior_")
        rows: Any = validate_data(self, X, reset=False, dtype=np.float64)
        inputs = self._standardised(rows)
        for part in inputs.split(ROWS):
            yield self.posterior_.predict(part, draws=self.draws, generator=torch.Generator().manual_seed(self._seed))


class BayesianRegressor(RegressorMixin, BayesianEstimator):
    """Regression with uncertainty: a multilayer perceptron, a posterior over its weights, and a learned noise.

    Inputs and target are standardised inside; predictions are in the target's own unit. If values are missing, put
    scikit-learn's `SimpleImputer(add_indicator=True)` before this estimator in the pipeline.

    Args:
        hidden: the widths of the hidden layers; () for a linear model.
        family: a recipe, such as `MeanField()`; `LowRankPrecision(rank)` by default.
        rank: of the default family.
        prior_scale: weights start with the prior N(0, prior_scale²/fan_in), biases with N(0, prior_scale²).
        learn_prior: fit the prior's scales, one a tensor, with the ELBO; False for families with point masses.
        epochs: of the fit; None for as many as make 4000 steps.
        batch_size, lr: of the fit.
        draws: of a prediction.
        random_state: a number makes the fit repeatable.
        verbose: show a progress bar.

    Attributes:
        posterior_: the fitted `Posterior`, of standardised data.
        result_: what the fit came to; `print(model.result_)`.

    Example:
        >>> X = np.linspace(-1, 1, 40)[:, None]
        >>> model = BayesianRegressor(hidden=(8,), epochs=20, random_state=0).fit(X, 3 * X[:, 0])
        >>> mean, std = model.predict(X, return_std=True)
        >>> mean.shape, std.shape
        ((40,), (40,))
    """

    def fit(self, X: Any, y: Any) -> Self:
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        rows = np.asarray(y, dtype=np.float64).reshape(len(X), -1)  # [N, D]
        self._targets, self._flat = StandardScaler().fit(rows), y.ndim == 1
        t = torch.as_tensor(self._targets.transform(rows), dtype=torch.float32)
        self._fit(X, t, rows.shape[1], Gaussian("point"))
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return E t, [N] as y was or [N, D]; with `return_std` also the standard deviation, of weights and noise."""
        found = [(one.mean.double(), one.std.double()) for one in self.predictive(X)]
        mean, std = (torch.cat(parts).numpy() for parts in zip(*found, strict=True))
        mean, std = self._targets.inverse_transform(mean), std * self._targets.scale_
        mean, std = (mean[:, 0], std[:, 0]) if self._flat else (mean, std)
        return (mean, std) if return_std else mean

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class BayesianClassifier(ClassifierMixin, BayesianEstimator):
    """Classification with uncertainty: a multilayer perceptron and a posterior over its weights.

    Inputs are standardised inside. It has the arguments and attributes of `BayesianRegressor`, and `classes_`.

    Example:
        >>> X = np.linspace(-1, 1, 40)[:, None]
        >>> y = np.where(X[:, 0] > 0, "right", "left")
        >>> model = BayesianClassifier(hidden=(8,), epochs=20, random_state=0).fit(X, y)
        >>> model.predict(X[[0, -1]]), model.predict_proba(X).shape
        (array(['left', 'right'], dtype='<U5'), (40, 2))
    """

    classes_: np.ndarray

    def fit(self, X: Any, y: Any) -> Self:
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"a classifier needs two classes, and y has one class only, {self.classes_[0]!r}")
        self._fit(X, torch.as_tensor(labels), len(self.classes_), Categorical())
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return Σ_s w_s p(class | y_s), [N, C] in the order of `classes_`."""
        mean = torch.cat([one.mean.double() for one in self.predictive(X)])
        return (mean / mean.sum(1, keepdim=True)).numpy()  # float32's sums are one up to 1e-7

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class, [N]."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]
