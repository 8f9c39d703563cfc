"""A mixture of posteriors whose weights depend on the input: on how much the members disagree there."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Laplace, Normal, StudentT
from torch.nn.functional import logsigmoid

from ..models.likelihoods.student_t import StudentTNoise
from ..util.checks import check_integer
from .predictive import Predictive
from .quantiles import continuous_quantile

if TYPE_CHECKING:
    from ..posterior import EnsembleBase

#: noise of a member so many times as wide as it was learned: each is weighed by itself
WIDTHS = (0.7, 1.0, 1.5, 3.0, 10.0, 30.0)
DRAWS = 100
#: rounds of expectation maximisation, of the first weights and of all, and steps of Newton's in each
FIRST_ROUNDS, ROUNDS, STEPS = 200, 200, 3
#: of both mixtures' weights: observations that all parts share equally; of the slope: the precision of its prior
EQUAL_ROWS, SLOPE_PRECISION = 3.0, 0.05
#: the least disagreement, in units of the noise
LEAST = 1e-3
Parts = Sequence[Predictive]


@dataclass(frozen=True)
class LocalWeights:
    """Weights w(d) = (1 − g) near + g far, g = 1/(1 + exp(−a − b d)), of a disagreement d of members.

    Attributes:
        near, far: weights of C parts each.
        intercept, slope: a and b.

    Example:
        >>> weights = LocalWeights(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), 0.0, 2.0)
        >>> weights.at(torch.tensor([0.0, 9.0])).round(decimals=3).tolist()
        [[0.5, 0.0], [0.5, 1.0]]
    """

    near: Tensor
    far: Tensor
    intercept: float
    slope: float

    def at(self, disagreement: Tensor) -> Tensor:
        """[n] → [C, n]."""
        g = torch.sigmoid(self.intercept + self.slope * disagreement)
        return self.near.to(g).unsqueeze(-1) * (1 - g) + self.far.to(g).unsqueeze(-1) * g

    @classmethod
    def of(
        cls, log_probs: Tensor, disagreement: Tensor, counts: Tensor | None = None, equal_rows: float = EQUAL_ROWS
    ) -> "LocalWeights":
        """Those with the highest Σ_n log Σ_c w_c(d_n) p_c(t_n), by expectation maximisation.

        Both mixtures are drawn to equal weights as by a few more observations, the slope to zero a little.

        Args:
            log_probs: log p_c(t_n) of held-out observations, [C, n].
            disagreement: of the members at each of them, [n].
            counts: for how many observations each counts, [n]; one by default.
            equal_rows: so many observations more are shared equally by all parts.

        Example:
            >>> near, far = torch.zeros(50).double(), torch.ones(50).double()
            >>> log_probs = torch.stack([torch.cat([near, far - 5]), torch.cat([near - 2, far - 1])])
            >>> found = LocalWeights.of(log_probs, torch.cat([near, far]))
            >>> found.at(torch.tensor([0.0, 1.0]).double()).round(decimals=1).tolist()
            [[1.0, 0.0], [0.0, 1.0]]
        """
        log_probs, d = log_probs.double(), disagreement.double()
        counts = torch.ones_like(d) if counts is None else counts.double()
        centre, width = d.mean(), d.std(correction=0).clamp_min(1e-12)
        x = (d - centre) / width
        is_far = d > d.median()
        near, far = (log_weights(log_probs[:, own], counts[own], equal_rows) for own in (~is_far, is_far))
        line, share = torch.tensor([0.0, 1.0], dtype=torch.float64), is_far.double()
        for _ in range(ROUNDS):
            line = _regressed(line, x, share, counts)
            at = line[0] + line[1] * x
            parts = near.unsqueeze(-1) + log_probs + logsigmoid(-at), far.unsqueeze(-1) + log_probs + logsigmoid(at)
            total = torch.logaddexp(parts[0].logsumexp(0), parts[1].logsumexp(0))
            near, far = (_weights(((part - total).exp() * counts).sum(1), equal_rows) for part in parts)
            share = (parts[1].logsumexp(0) - total).exp()
        slope = float(line[1] / width)
        return cls(near.exp(), far.exp(), float(line[0]) - slope * float(centre), slope)


def log_weights(log_probs: Tensor, counts: Tensor, equal_rows: float = EQUAL_ROWS) -> Tensor:
    """log weights of one mixture: [C, n] → [C]."""
    found = log_probs.new_full((len(log_probs),), -log(len(log_probs)))
    for _ in range(FIRST_ROUNDS):
        found = _weights(((found.unsqueeze(-1) + log_probs).softmax(0) * counts).sum(1), equal_rows)
    return found


def _weights(observations: Tensor, equal_rows: float) -> Tensor:
    """log weights of parts that explain so many observations each."""
    shared = observations + equal_rows / len(observations)
    return (shared / shared.sum()).log()


def _regressed(line: Tensor, x: Tensor, share: Tensor, counts: Tensor) -> Tensor:
    """Intercept and slope of a logistic regression of shares on x, by a few of Newton's steps."""
    X, ridge = torch.stack([torch.ones_like(x), x]), torch.tensor([1e-3, SLOPE_PRECISION], dtype=x.dtype)
    for _ in range(STEPS):
        p = torch.sigmoid(line @ X)
        gradient = X @ (counts * (share - p)) - ridge * line
        curvature = (X * (counts * p * (1 - p))) @ X.mT + torch.diag(ridge)
        line = line + torch.linalg.solve(curvature, gradient).clamp(-2, 2)
    return line


def disagreement(parts: Parts) -> Tensor:
    """log of the spread of y over the draws of all members, equally weighed, in units of their noise: [n]."""
    y, squares, noise = [], [], []
    for part in parts:
        d = _numbers(part)
        loc, w = d.loc.double().flatten(1), part.weights.double()  # pyright: ignore[reportAttributeAccessIssue]
        y.append(w @ loc)
        squares.append(w @ loc.square())
        noise.append(w @ d.scale.double().expand_as(d.loc).flatten(1))  # pyright: ignore[reportAttributeAccessIssue]
    spread = (torch.stack(squares).mean(0) - torch.stack(y).mean(0).square()).clamp_min(0).sqrt()
    return (spread / torch.stack(noise).median(0).values + LEAST).log()


class LocalPredictive:
    """Σ_c w_c(x) p_c(t | x): every member at every width of its noise.

    Args:
        parts: the predictive of each member, of the same inputs.
        widths: of the noise.
        weights: that have been found.
    """

    def __init__(self, parts: Parts, widths: Sequence[float], weights: LocalWeights):
        self.parts, self.widths = parts, widths
        self.shape = _numbers(parts[0]).batch_shape[1:]
        #: of every member and width, [C · widths, n]
        self.weights = weights.at(disagreement(parts))

    def log_prob(self, t: Tensor) -> Tensor:
        """log p(t) of every number, in the shape of t."""
        each = log_probs(self.parts, self.widths, t)
        return (each + self.weights.clamp_min(1e-300).log()).logsumexp(0).reshape(t.shape)

    @property
    def mean(self) -> Tensor:
        """E t."""
        return self._sum(lambda part, _: part.mean)

    @property
    def variance(self) -> Tensor:
        """Var t."""
        mean = self.mean
        return self._sum(lambda part, c: part.epistemic + c**2 * part.aleatoric + (part.mean - mean).square())

    @property
    def std(self) -> Tensor:
        return self.variance.sqrt()

    def cdf(self, t: Tensor) -> Tensor:
        """P(T ≤ t)."""
        every = [[_at_width(part, c).cdf(t.expand(self.shape)) for c in self.widths] for part in self.parts]
        averages = [
            torch.tensordot(part.weights.double(), one.double(), dims=1)
            for part, own in zip(self.parts, every, strict=True) for one in own
        ]  # fmt: skip
        return (self.weights * torch.stack(averages).flatten(1)).sum(0).clamp(0, 1).reshape(self.shape)

    def quantile(self, p: float) -> Tensor:
        """t with P(T ≤ t) = p, by bisection."""
        if not 0 < p < 1:
            raise ValueError(f"quantile: p must lie inside (0, 1), got {p}")
        mean, reach = self.mean, self.std / min(p, 1 - p) ** 0.5  # Chebyshev's bound holds it
        return continuous_quantile(p, self.cdf, mean - reach, mean + reach, 1e-6 * self.std)

    def interval(self, p: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval that holds t with this probability."""
        return self.quantile((1 - p) / 2), self.quantile((1 + p) / 2)

    def _sum(self, value: Any) -> Tensor:
        every = [value(part, c).double().flatten() for part in self.parts for c in self.widths]
        return (self.weights * torch.stack(every)).sum(0).reshape(self.shape)


def log_probs(parts: Parts, widths: Sequence[float], t: Tensor) -> Tensor:
    """log p_c(t) of every member at every width of its noise: [C · widths, n]."""
    rows = []
    for part in parts:
        share = part.weights.double().log().unsqueeze(-1)
        for width in widths:
            each = _at_width(part, width).log_prob(t).double().flatten(1)
            rows.append((share + each).logsumexp(0))
    return torch.stack(rows)


def _at_width(part: Predictive, width: float) -> Distribution:
    made: Any = copy.copy(_numbers(part))
    made.scale = width * made.scale
    return made


def _numbers(part: Predictive) -> Distribution:
    found = part.components
    if not isinstance(found, Normal | Laplace | StudentT | StudentTNoise):
        raise TypeError(
            f"a local mixture is of numbers with noise of a width, and p(t | y) is {type(found).__name__}: of labels "
            'take weights="stacked"'
        )
    return found


class LocalMixture:
    """Members of a mixture, weighed where they agree otherwise than where they do not.

    A stack has one set of weights, which suits the inputs of its held-out data: off those, where members disagree,
    other members and wider noise are better. Here two sets of weights, over members at several widths of their noise,
    are mixed by a logistic function of the disagreement, and all of it is learned from held-out data. Hold out some
    rows that are unlike the rest too, such as the middle third along an input: rows at random say little of places
    without data.

    Args:
        mixture: what `fit(.., members=M)` has as `mixture`.
        widths: factors of the noise.
        draws: of each member, to weigh and to predict.

    Example:
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> x = torch.linspace(-2, 2, 64).unsqueeze(1)
        >>> data = torch.utils.data.TensorDataset(x, x.sin())
        >>> middle = (x.abs() < 0.5).squeeze(1)
        >>> bayes = variationalize(torch.nn.Linear(1, 1), likelihoods.Gaussian("point"), MeanField())
        >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[~middle], x[~middle].sin()), 64)
        >>> mixture = bayes.fit(loader, steps=20, members=2, temperature=[1.0, 0.1], progress=False).mixture
        >>> local = LocalMixture(mixture).fit([(mixture, [(x[middle], x[middle].sin())])])
        >>> local.predict(x).log_prob(x.sin()).shape
        torch.Size([64, 1])
    """

    def __init__(self, mixture: "EnsembleBase", *, widths: Sequence[float] = WIDTHS, draws: int = DRAWS):
        check_integer("draws", draws)
        if not widths or min(widths) <= 0:
            raise ValueError(f"widths must be positive factors of the noise, got {widths}")
        self.mixture, self.widths, self.draws = mixture, tuple(widths), draws
        self.weights: LocalWeights | None = None

    def fit(
        self,
        held_out: "Iterable[tuple[EnsembleBase, Iterable[tuple[Any, Tensor]]]]",
        shares: Sequence[float] | None = None,
    ) -> "LocalMixture":
        """Learn the weights; returns itself.

        Args:
            held_out: pairs of a mixture and batches (inputs, targets) that it was fitted without: this one, or others
                with as many members in the same order, each fitted without rows of its own.
            shares: how much each pair counts, whatever its number of rows; by default every row counts the same.
        """
        found = [self._read(mixture, batches) for mixture, batches in held_out]
        if not found:
            raise ValueError("held_out has no pair of a mixture and data: give [(mixture, loader), ..]")
        sizes = [log_p.shape[1] for log_p, _ in found]
        shares = sizes if shares is None else shares
        if len(shares) != len(found) or min(shares) <= 0:
            raise ValueError(f"shares must be {len(found)} positive numbers, one for each pair, got {shares}")
        scale = sum(sizes) / sum(shares)
        counts = torch.cat([
            torch.full((n,), scale * share / n, dtype=torch.float64) for n, share in zip(sizes, shares, strict=True)
        ])  # fmt: skip
        every, apart = (torch.cat(columns, -1) for columns in zip(*found, strict=True))
        self.weights = LocalWeights.of(every, apart, counts)
        return self

    def predict(self, x: Any) -> LocalPredictive:
        """The mixture at these inputs."""
        if self.weights is None:
            raise ValueError("the weights are learned from held-out data first: local.fit([(mixture, loader), ..])")
        return LocalPredictive(self._parts(self.mixture, x), self.widths, self.weights)

    def _parts(self, mixture: "EnsembleBase", x: Any) -> list[Predictive]:
        found: list[Any] = list(mixture.members)
        generator = torch.Generator().manual_seed(0)  # the draws that the weights were learned from
        return [one.predict(x, self.draws, generator=generator, calibrated=False) for one in found]

    def _read(self, mixture: "EnsembleBase", batches: Iterable[tuple[Any, Tensor]]) -> tuple[Tensor, Tensor]:
        if len(mixture.members) != len(self.mixture.members):
            raise ValueError(
                f"all mixtures must have {len(self.mixture.members)} members in the same order, got one of "
                f"{len(mixture.members)}"
            )
        rows, apart = [], []
        for x, t in batches:
            parts = self._parts(mixture, x)
            rows.append(log_probs(parts, self.widths, t.to(mixture.device)).cpu())
            apart.append(disagreement(parts).cpu())
        if not rows:
            raise ValueError("held-out data gave no batch: is its data set empty, or was it read to its end before?")
        return torch.cat(rows, 1), torch.cat(apart)
