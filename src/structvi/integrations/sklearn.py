"""Bayesian multilayer perceptrons for tables as scikit-learn estimators, for Pipelines and cross-validations."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from structvi_tables.arrays import ArrayFit, fit_array
from structvi_tables.model import ROWS_WITH_GAPS, taken
from structvi_tables.pooled import Pooled
from structvi_tables.reading import TableError, as_table, is_table
from structvi_tables.recipes import NAMED, family_of
from structvi_tables.stand_ins import Rows

from ..families.family import Family
from ..models.likelihoods import Categorical, Gaussian, Likelihood
from ..models.priors.scale import NormalPrior
from ..posterior import Posterior, variationalize
from ..predict.predictive import Predictive
from ..train.result import FitResult
from ..util.random_streams import borrowed_stream

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state, check_X_y
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:
    raise ImportError(
        'structvi.integrations.sklearn needs scikit-learn ≥ 1.6: pip install "structvi[sklearn]"'
    ) from None

#: So many steps a fit takes where epochs are not given.
STEPS = 4000
#: So many rows are predicted at once.
ROWS = 4096
#: the family that stands for the default of `structvi fit` where hidden="auto"
DEFAULT = "LowRankPrecision"


class _Estimator(BaseEstimator):
    """A multilayer perceptron of rectified units with a posterior over all weights; see `BayesianRegressor`."""

    posterior_: Posterior
    result_: FitResult
    _auto: ArrayFit | None = None

    def __init__(
        self,
        hidden: Sequence[int] | str = (50,),
        *,
        family: str | Family = DEFAULT,
        rank: int = 5,
        prior_scale: float = 1.0,
        learn_prior: bool = True,
        epochs: int | None = None,
        batch_size: int = 64,
        lr: float = 0.05,
        groups: int = 1,
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
        self.groups = groups
        self.draws = draws
        self.random_state = random_state
        self.verbose = verbose

    def _checked(self, X: Any, y: Any, **options: Any) -> Any:
        """X and y as scikit-learn checks them; a table that is read as `structvi fit` reads it stays one."""
        is_default = isinstance(self.hidden, str) and self.hidden == "auto" and self.family == DEFAULT
        if not (is_default and is_table(X)):
            return _numbers(self, X, y, **options)
        as_table(X)  # an error where two columns have one name
        X, y = validate_data(self, X, y, skip_check_array=True)  # names and number of columns
        return X, check_X_y(np.zeros((len(X), 1)), y, **options)[1]

    def _fit(self, X: Any, t: Tensor, outputs: int, likelihood: Likelihood) -> None:
        """X [N, F] as it came, t [N, ..] as the likelihood takes it."""
        gone = X.isna().to_numpy() if is_table(X) else np.isnan(X)
        self.missing_ = np.asarray(gone.any(0))
        self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self._auto = None
        if isinstance(self.hidden, str):
            self._fit_auto(X, t, outputs)
            self.result_.notes += [] if is_table(X) else _notes(gone)
            return
        self._inputs = _Inputs(X)
        generator = torch.Generator().manual_seed(self._seed)
        sizes = [self._inputs.width, *_sizes(self.hidden), outputs]
        with borrowed_stream(generator):
            layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        net = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])
        scales = {name: self.prior_scale for name, _ in net.named_parameters()}
        prior = NormalPrior(scales, learn=self.learn_prior, by_fan_in=True)
        self.posterior_ = variationalize(net, likelihood, self._recipe(sizes), prior, generator=generator)
        data = TensorDataset(self._inputs.forth(X), t)
        loader = DataLoader(data, batch_size=min(self.batch_size, len(data)), shuffle=True)
        epochs = -(-STEPS // len(loader)) if self.epochs is None else self.epochs
        self.result_ = self.posterior_.fit(
            loader, epochs=epochs, lr=self.lr, groups=self.groups, seed=self._seed, progress=self.verbose
        )
        self.result_.notes += _notes(gone)

    def _fit_auto(self, X: Any, t: Tensor, outputs: int) -> None:
        """The way of `structvi fit`; "LowRankPrecision", the default, stands for its own default."""
        if self.hidden != "auto":
            raise ValueError(f'hidden must be the widths of the hidden layers, or "auto", got {self.hidden!r}')
        is_number = t.dtype.is_floating_point
        if is_number and outputs > 1:
            raise ValueError(f'hidden="auto" is for one number to predict, got {outputs}: fit one estimator for each')
        family = None if self.family == DEFAULT else family_of(self.family, self.rank)
        with _told_here():
            self._auto = fit_array(X, t, 0 if is_number else outputs, self._seed, family, "auto")
        self.tried_ = self._auto.tried
        self.posterior_ = self._auto.parts[0].posteriors[0]
        assert isinstance(self.posterior_.last_fit, FitResult)
        self.result_ = self.posterior_.last_fit
        self.result_.notes += self._auto.notes

    def _recipe(self, sizes: Sequence[int]) -> Family:
        P = sum(a * b + b for a, b in pairwise(sizes))
        recipe = family_of(self.family, min(self.rank, P))
        if recipe is None:
            raise ValueError(f"family must be one of {tuple(NAMED)}, or a recipe such as MAP(), got None")
        return recipe

    def predictive(self, X: Any) -> Iterable[Predictive | Pooled]:
        """Predictive distributions of the standardised target, at most `ROWS` rows at a time, all from the same draws.

        With hidden="auto" rows in which a value is missing for the first time are apart from those before and after.
        """
        return self._predictives(*self._read(X))

    def _collected(self, X: Any, what: Callable[[Predictive | Pooled], Sequence[Tensor]]) -> list[Tensor]:
        """What is asked of the predictives of all rows, [N, ..] each; those with such values are predicted together."""
        rows, gaps = self._read(X)
        order = np.argsort(gaps, kind="stable")
        found = [what(pred) for pred in self._predictives(taken(rows, order), gaps[order])]
        back = torch.as_tensor(np.argsort(order))
        return [torch.cat(parts)[back].double() for parts in zip(*found, strict=True)]

    def _read(self, X: Any) -> tuple[Rows, np.ndarray]:
        """Values by column, or all as one, and which rows are a mixture over values that are missing, [N]."""
        check_is_fitted(self, "posterior_")
        if self._auto is None:
            raw = np.asarray(_numbers(self, X, reset=False))
            new = np.flatnonzero(np.isnan(raw).any(0) & ~self.missing_)
            if len(new):
                warnings.warn(
                    f"values are missing in columns {_few(new)}, where none was when the model was fitted: their means "
                    "are taken, and the predictions do not know that",
                    stacklevel=4,
                )
            return {"X": raw}, np.zeros(len(raw), dtype=bool)
        if not self._auto.names:
            X = np.asarray(_numbers(self, X, reset=False))
        elif is_table(X):
            validate_data(self, X, reset=False, skip_check_array=True)
            if not len(X):
                raise ValueError("X has no rows: give at least one to predict")
        else:
            X = validate_data(self, X, reset=False, dtype=None, ensure_all_finite="allow-nan")
        with _told_here():
            rows = self._auto.rows(X)
        for note in self._auto.columns.unseen(rows):
            warnings.warn(note, stacklevel=4)
        return rows, self._auto.gaps(rows)

    def _predictives(self, rows: Rows, gaps: np.ndarray) -> Iterator[Predictive | Pooled]:
        for run in np.split(np.arange(len(gaps)), np.flatnonzero(np.diff(gaps)) + 1):
            has_gaps = bool(gaps[run[0]])
            size = ROWS_WITH_GAPS if has_gaps else ROWS
            for start in range(0, len(run), size):
                some = taken(rows, run[start : start + size])
                if self._auto is not None:
                    each = max(1, self.draws // sum(len(part.posteriors) for part in self._auto.parts))
                    yield self._auto.pooled(some, each, has_gaps)
                else:
                    generator = torch.Generator().manual_seed(self._seed)
                    yield self.posterior_.predict(self._inputs.forth(some["X"]), draws=self.draws, generator=generator)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _refuse(self, refused: dict[str, Any]) -> None:
        if refused:
            raise TypeError(
                f"{type(self).__name__}.fit takes X and y, got {', '.join(refused)} too. Weights of observations are "
                "not supported: a weighted likelihood is not that of any data, and its posterior is too sure or too "
                "unsure; leave out rows, or repeat those that were observed more than once"
            )


class BayesianRegressor(RegressorMixin, _Estimator):
    """Regression with uncertainty: a multilayer perceptron, a posterior over its weights, and a learned noise.

    Inputs and target are standardised inside; predictions are in the target's own unit. Missing values (NaN) of X are
    taken as `structvi fit` takes them: the column's mean, and an input of its own that says where; `missing_` and
    `result_.notes` tell of which columns. With hidden="auto" and the default family X may be a pandas table with words,
    categories, dates and truth values too, read as `fit_table` reads it; `result_.notes` tells how.

    Args:
        hidden: the widths of the hidden layers; () for a linear model; "auto" to try linear and additive models and
            networks, of amounts with four kinds of noise, on folds of the rows, and to mix the best, as `structvi fit`
            does: `tried_` tells which. Of the arguments below family, draws and random_state then count. A value that
            is missing for the first time in a row to predict makes a mixture over values that the row could have.
        family: "LowRankPrecision", "LowRankNormal", "MeanField", "FullNormal", or a recipe with its own settings.
        rank: of the two structured families.
        prior_scale: weights start with the prior N(0, prior_scale²/fan_in), biases with N(0, prior_scale²).
        learn_prior: fit the prior's scales, one a tensor, with the ELBO; False for families with point masses.
        epochs: of the fit; None for as many as make 4000 steps.
        batch_size, lr, groups: of the fit, see `structvi.train.fit.fit`.
        draws: of a prediction.
        random_state: a number makes the fit repeatable.
        verbose: show a progress bar.

    Attributes:
        posterior_: the fitted `Posterior`, of standardised data.
        result_: what the fit came to; `print(model.result_)`.
        missing_: in which columns of X values were missing, [F].

    Example:
        >>> X = np.linspace(-1, 1, 40)[:, None]
        >>> model = BayesianRegressor(hidden=(8,), family="MeanField", epochs=20, random_state=0).fit(X, 3 * X[:, 0])
        >>> mean, std = model.predict(X, return_std=True)
        >>> mean.shape, std.shape
        ((40,), (40,))
    """

    def fit(self, X: Any, y: Any, **refused: Any) -> Self:
        self._refuse(refused)
        X, y = self._checked(X, y, multi_output=True, y_numeric=True)
        rows = np.asarray(y, dtype=np.float64).reshape(len(X), -1)  # [N, D]
        self._targets, self._flat = _Standard(rows), y.ndim == 1
        self._fit(X, self._targets.forth(rows), rows.shape[1], Gaussian("point"))
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """E t, [N] as y was or [N, D]; with `return_std` also the standard deviation of t: weights and noise."""
        mean, std = (x.numpy() for x in self._collected(X, lambda pred: (pred.mean, pred.std)))
        mean, std = self._targets.back(mean), std * self._targets.scale
        mean, std = (mean[:, 0], std[:, 0]) if self._flat else (mean, std)
        return (mean, std) if return_std else mean

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class BayesianClassifier(ClassifierMixin, _Estimator):
    """Classification with uncertainty: a multilayer perceptron and a posterior over its weights.

    Inputs are standardised inside, and missing ones taken as by `BayesianRegressor`. Arguments and attributes are those
    of it, and `classes_`.

    Example:
        >>> X = np.linspace(-1, 1, 40)[:, None]
        >>> y = np.where(X[:, 0] > 0, "right", "left")
        >>> model = BayesianClassifier(hidden=(8,), family="MeanField", epochs=20, random_state=0).fit(X, y)
        >>> model.predict(X[[0, -1]]), model.predict_proba(X).shape
        (array(['left', 'right'], dtype='<U5'), (40, 2))
    """

    classes_: np.ndarray

    def fit(self, X: Any, y: Any, **refused: Any) -> Self:
        self._refuse(refused)
        X, y = self._checked(X, y)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"there is nothing to tell apart: y has one class only, {self.classes_[0]!r}")
        self._fit(X, torch.as_tensor(labels), len(self.classes_), Categorical())
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Σ_s w_s p(class | y_s), [N, C] in the order of `classes_`."""
        (mean,) = self._collected(X, lambda pred: (pred.mean,))
        return (mean / mean.sum(1, keepdim=True)).numpy()  # float32's sums are one up to 1e-7

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class, [N]."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]


def _numbers(estimator: BaseEstimator, *data: Any, **options: Any) -> Any:
    """X, or X and y, as scikit-learn checks them; words are told where they are read."""
    try:
        return validate_data(estimator, *data, dtype=np.float64, ensure_all_finite="allow-nan", **options)
    except ValueError as error:
        if "could not convert string to float" not in str(error):
            raise
        raise ValueError(
            f"{error}: X must be numbers. Put an encoder before this estimator in the pipeline, such as scikit-learn's "
            "OneHotEncoder in a ColumnTransformer, or use structvi_tables.fit_table, which reads words and dates; so "
            'does this estimator with hidden="auto" and the default family, where X is a pandas table'
        ) from None


@contextmanager
def _told_here() -> Iterator[None]:
    """What a table's message says of the command line, for an estimator."""
    try:
        yield
    except TableError as error:
        if "--category" not in (said := str(error)):
            raise
        raise TableError(
            f"{said} of `structvi fit`, and here a letter before each value: 'c' + X[name].astype(str)"
        ) from None


class _Inputs:
    """Standardised columns [N, F], zero where missing, and an input for each column in which values were missing."""

    def __init__(self, x: np.ndarray):
        self.missing = np.asarray(np.isnan(x).any(0))
        self.standard = _Standard(x)

    @property
    def width(self) -> int:
        return len(self.missing) + int(self.missing.sum())

    def forth(self, x: np.ndarray) -> Tensor:
        gone = np.isnan(x)
        z = torch.where(torch.as_tensor(gone), 0.0, self.standard.forth(x))
        return torch.cat([z, torch.as_tensor(gone[:, self.missing], dtype=torch.float32)], 1)


class _Standard:
    """(x − mean)/std of each column of an array [N, F], in float32; a constant column is only shifted."""

    def __init__(self, x: np.ndarray):
        if np.isnan(x).any():
            there = ~np.isnan(x)
            count = np.maximum(there.sum(0), 1)
            self.mean = np.where(there, x, 0.0).sum(0) / count
            x = np.where(there, x, self.mean)
            std = np.sqrt(np.square(x - self.mean).sum(0) / count)
        else:
            self.mean, std = x.mean(0), x.std(0)
        # of a constant, up to rounding of its mean
        self.scale = np.where(std > 1e-12 * np.abs(x).max(0), std, 1.0)

    def forth(self, x: np.ndarray) -> Tensor:
        return torch.as_tensor((x - self.mean) / self.scale, dtype=torch.float32)

    def back(self, x: np.ndarray) -> np.ndarray:
        return x * self.scale + self.mean


def _few(columns: np.ndarray) -> str:
    shown = ", ".join(str(column) for column in columns[:8])
    return shown if len(columns) <= 8 else f"{shown} and {len(columns) - 8} others"


def _notes(gone: np.ndarray) -> list[str]:
    """Which values are missing, in words, of where they are, [N, F]."""
    columns = np.flatnonzero(gone.any(0))
    if not len(columns):
        return []
    return [
        f"{int(gone.sum())} values are missing, in columns {_few(columns)}: the mean is taken, and an input of each "
        "column says where"
    ]


def _sizes(hidden: Any) -> list[int]:
    sizes = list(hidden) if isinstance(hidden, Iterable) else [hidden]
    if any(not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1 for size in sizes):
        raise ValueError(f"hidden must be the widths of the hidden layers, such as (50, 50), got {hidden!r}")
    return [int(size) for size in sizes]
