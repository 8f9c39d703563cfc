"""Measures of predictions on a loader: likelihood, error, calibration, and what uncertainty is worth.

Batches are predicted one after the other, all at the same draws; over batches only sums and histograms are kept.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, islice
from math import nan, sqrt
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.distributions import Normal, Poisson

from ..util.checks import check_iterable, check_one_of
from ..util.progress import length_of, progress_bar
from .predict import draws_for
from .predictive import Predictive, observed_target, on_device

if TYPE_CHECKING:
    from ..ensemble.ensemble import Ensemble
    from ..posterior import Posterior

#: bins of the calibration error and the reliability diagram
CALIBRATION_BINS = 15
#: uncertainties of `ood_auroc`
Score = Literal[
    "entropy", "mutual_information", "expected_entropy", "max_probability", "variance", "epistemic",
    "function_variance", "ood_score",
]  # fmt: skip


class Reliability(NamedTuple):
    """Per bin of confidence: how many labels, their mean confidence, and how often they were right."""

    count: Tensor
    confidence: Tensor
    accuracy: Tensor


class RiskCoverage(NamedTuple):
    """The mean risk of the most certain observations against the fraction that they are."""

    coverage: Tensor
    risk: Tensor


@dataclass(frozen=True)
class Metrics:
    """The measures of `evaluate`; None where the likelihood has no such thing. `dict(metrics)` has the numbers only.

    Averages are over the observed elements of the target (labels, pixels, numbers). The standard error takes the rows
    of the batches to be independent, not their elements.

    Example:
        >>> metrics = Metrics(count=10, draws=64, nlpd=0.5, nlpd_se=0.1, accuracy=0.9)
        >>> dict(metrics)
        {'count': 10, 'draws': 64, 'nlpd': 0.5, 'nlpd_se': 0.1, 'accuracy': 0.9}
    """

    #: observed elements of the target
    count: int
    #: S
    draws: int
    #: negative log predictive density, nats per observation, and its standard error
    nlpd: float
    nlpd_se: float
    #: of the predictive mean
    rmse: float | None = None
    #: of the most probable label
    accuracy: float | None = None
    #: Σ_c (p_c − 1{t = c})²; for Bernoulli (p − t)²
    brier: float | None = None
    #: expected calibration error of the most probable label's confidence; for Bernoulli of the probability of 1
    ece: float | None = None
    #: E|T − t| − ½ E|T − T'|, in the unit of t
    crps: float | None = None
    #: level → the fraction of observations inside the central interval
    coverage: dict[float, float] | None = None
    #: area under the risk–coverage curve; the risk is an error (0 or 1) of a label, the squared error of a number
    aurc: float | None = None
    reliability: Reliability | None = field(default=None, repr=False)
    risk_coverage: RiskCoverage | None = field(default=None, repr=False)

    def keys(self) -> list[str]:
        return [f.name for f in fields(self) if f.repr and getattr(self, f.name) is not None]

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(f"{name!r} was not measured; there are {self.keys()}")
        return getattr(self, name)

    def __str__(self) -> str:
        lines = {name: value for name, value in ((name, self[name]) for name in self.keys()) if name != "coverage"}
        lines |= {f"coverage of {100 * level:g} %": value for level, value in (self.coverage or {}).items()}
        return "\n".join(f"{name:<18} {value:.5g}" for name, value in lines.items())


def evaluate(
    posterior: "Posterior | Ensemble",
    loader: Iterable[Any],
    draws: int | None = None,
    *,
    levels: Sequence[float] = (0.5, 0.9, 0.95),
    progress: bool = True,
    **options: Any,
) -> Metrics:
    """Return all metrics of a posterior's predictions on a loader; one batch of it is held at all draws.

    Args:
        posterior: what `variationalize` returns.
        loader: batches as `fit` takes them, with targets.
        draws, **options: as in `predict`; with draws=None the first batch tells whether outputs are few.
        levels: the probabilities of the central intervals whose coverage is measured.
        progress: show a bar, in a terminal.

    Example:
        >>> from torch import nn
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(nn.Linear(3, 1), likelihoods.Gaussian(0.5), num_data=10)
        >>> sorted(dict(evaluate(bayes, [(torch.zeros(5, 3), torch.zeros(5, 1))], draws=4)))
        ['aurc', 'count', 'coverage', 'crps', 'draws', 'nlpd', 'nlpd_se', 'rmse']
    """
    if isinstance(loader, Tensor):
        raise TypeError("evaluate expects batches (input, target), got a tensor: write evaluate([(x, t)])")
    check_iterable(loader)
    if not all(0 < level < 1 for level in levels):
        raise ValueError(f"levels must be probabilities inside (0, 1), got {levels!r}")
    first, batches = _first(loader, posterior)
    predict = draws_for(posterior, first, draws, **options)
    s, calibration, risk = Counter[Any](), CalibrationHistogram(), RiskHistogram()
    for batch in progress_bar(batches, total=length_of(loader), label="evaluate", show=progress):
        inputs, target = predict.split(batch)
        s.update(_sums(predict(inputs), target, levels, calibration, risk))
    n = s["number"]
    if not n:
        raise ValueError("the loader gave no observed target: there is nothing to evaluate")
    nlpd = s["loss"] / n
    residual = max(0.0, s["loss²"] - 2 * nlpd * s["loss·number"] + nlpd**2 * s["number²"])
    error = sqrt(residual * s["rows"] / (s["rows"] - 1)) / n if s["rows"] > 1 else nan
    found: dict[str, Any] = {name: s[name] / n for name in ("accuracy", "brier", "crps") if name in s}
    if "accuracy" in s:
        found |= {"ece": calibration.error(), "reliability": calibration.curve()}
    if "square" in s:
        covered = {level: s[level] / n for level in levels if level in s}
        found |= {"rmse": sqrt(s["square"] / n), "coverage": covered or None}
    if "accuracy" in s or "square" in s:
        found |= {"aurc": risk.area(), "risk_coverage": risk.curve()}
    return Metrics(count=int(n), draws=predict.draws, nlpd=nlpd, nlpd_se=error, **found)


def ood_auroc(
    posterior: "Posterior | Ensemble",
    in_loader: Iterable[Any],
    out_loader: Iterable[Any],
    score: Score = "entropy",
    draws: int | None = None,
    **options: Any,
) -> float:
    """Return P(score of an unfamiliar input > score of a familiar one): 1 tells them apart, ½ is chance.

    Args:
        posterior: what `variationalize` returns.
        in_loader, out_loader: batches as `fit` takes them, or bare input tensors; targets are not used.
        score: an uncertainty of `Predictive`, averaged over the elements of an input (pixels); "max_probability" is one
            minus the probability of the most probable label. "function_variance" is that of the network's output (of a
            classifier the logits): far from all data a softmax saturates, and every uncertainty of labels is then zero.
        draws, **options: as in `predict`; both loaders see the same draws.

    Example:
        >>> from torch import nn
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(nn.Linear(1, 1), likelihoods.Gaussian(0.5), num_data=10)
        >>> ood_auroc(bayes, [torch.zeros(5, 1)], [torch.full((5, 1), 9.0)], "epistemic")
        1.0
    """
    check_one_of("score", score, get_args(Score))
    first, batches = _first(in_loader, posterior)
    predict = draws_for(posterior, first, draws, **options)
    sides = [
        torch.cat([uncertainty(predict(on_device(_inputs(b, posterior), predict.device)), score) for b in loader])
        for loader in (batches, out_loader)
    ]
    for name, side in zip(("in_loader", "out_loader"), sides, strict=True):
        _check_numbers(side, f"scores ({score}) of {name} are not finite, and cannot be ranked")
    familiar, strange = sides[0].sort().values, sides[1]
    below, upto = (torch.searchsorted(familiar, strange, right=right).double() for right in (False, True))
    return float((below + upto).mean() / (2 * len(familiar)))


def uncertainty(pred: Predictive, score: Score) -> Tensor:
    """Return the uncertainty of every input, the mean over its elements: [B], float64."""
    if score == "max_probability":
        p = pred.probabilities
        value = 1 - p.max(1).values if p.ndim > pred.entropy.ndim else torch.minimum(p, 1 - p)
    else:
        value = getattr(pred, score)
    if not isinstance(value, Tensor):
        raise TypeError('score="function_variance" is for a network whose output is one tensor')
    return value.reshape(len(value), -1).mean(1).double().cpu()


def _first(loader: Iterable[Any], posterior: "Posterior | Ensemble") -> tuple[Any, Iterator[Any]]:
    """The inputs of the first batch, and all batches, the first one too."""
    batches = iter(loader)
    found = list(islice(batches, 1))
    return _inputs(found[0], posterior) if found else None, chain(found, batches)


def _inputs(batch: Any, posterior: "Posterior | Ensemble") -> Any:
    whole = isinstance(batch, Tensor) or posterior.model.user_forward is not None
    return batch if whole else posterior.model.split(batch)[0]


class CalibrationHistogram:
    """Confidences and how often they were right, in equal bins of [0, 1].

    Example:
        >>> histogram = CalibrationHistogram()
        >>> histogram.add(torch.tensor([0.8, 0.8]), torch.tensor([1.0, 0.0]))
        >>> round(histogram.error(), 4)
        0.3
    """

    def __init__(self) -> None:
        self.sums = torch.zeros(3, CALIBRATION_BINS, dtype=torch.float64)

    def add(self, confidence: Tensor, right: Tensor) -> None:
        """Add [n] probabilities, and the outcomes 0 or 1 that they are of."""
        _check_numbers(confidence, "probabilities are NaN, and in no bin")
        bins = (confidence * CALIBRATION_BINS).floor().clamp(max=CALIBRATION_BINS - 1)
        _add(self.sums, bins, torch.ones_like(confidence), confidence, right)

    def error(self) -> float:
        """Return the expected calibration error Σ_b (n_b/N) |mean confidence − frequency|."""
        count, confidence, right = self.sums
        return ((confidence - right).abs().sum() / count.sum()).item()

    def curve(self) -> Reliability:
        """Return the bins that have any."""
        count, confidence, right = self.sums[:, self.sums[0] > 0]
        return Reliability(count, confidence / count, right / count)


class RiskHistogram:
    """Risks by uncertainty, in constant memory: the area under the risk–coverage curve, ties in random order.

    The bins are the leading bits of the uncertainty as a float32, whose order as integers is that of the numbers:
    uncertainties within 2⁻¹² of each other, relatively, may count as ties.

    Example:
        >>> histogram = RiskHistogram()
        >>> histogram.add(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.0, 0.0, 1.0]))
        >>> round(histogram.area(), 4)
        0.1111
    """

    def __init__(self) -> None:
        self.sums = torch.zeros(2, 2**20, dtype=torch.float64)

    def add(self, uncertainty: Tensor, risk: Tensor) -> None:
        """Add [n] uncertainties ≥ 0, and what relying on each of the n observations costs."""
        _check_numbers(uncertainty, "uncertainties are NaN, and cannot be ranked")
        bins = uncertainty.float().clamp(min=0).contiguous().view(torch.int32) >> 11
        _add(self.sums, bins, torch.ones_like(risk), risk)

    def area(self) -> float:
        """Return (1/N) Σ_n (mean risk of the n most certain)."""
        count, risk = self.sums[:, self.sums[0] > 0]
        n, R = count.cumsum(0) - count, risk.cumsum(0) - risk  # before each bin
        mean = risk / count
        # Σ_j (R + j r̄)/(n + j) over the bin's j = 1 … c
        harmonic = torch.digamma(n + count + 1) - torch.digamma(n + 1)
        return ((mean * count + (R - mean * n) * harmonic).sum() / count.sum()).item()

    def curve(self) -> RiskCoverage:
        """Return the bins that have any."""
        count, risk = self.sums[:, self.sums[0] > 0].cumsum(1)
        return RiskCoverage(count / count[-1], risk / count)


def _add(sums: Tensor, bins: Tensor, *values: Tensor) -> None:
    for row, value in zip(sums, values, strict=True):
        row.index_add_(0, bins.long().cpu(), value.double().cpu())


def _check_numbers(values: Tensor, what: str) -> None:
    if bad := int((~values.isfinite() if "finite" in what else values.isnan()).sum()):
        raise ValueError(f"{bad} of {len(values)} {what}: look at the network's outputs there, predict(x).outputs")


def _sums(
    pred: Predictive, target: Any, levels: Sequence[float], calibration: CalibrationHistogram, risk: RiskHistogram
) -> dict[Any, float]:
    """Return sums over a batch, by name; of a level the observations inside its interval. Add to the histograms."""
    log_prob = pred.log_prob(target)
    # of a plain function only log p is known, and its target may be anything
    t, mask = (log_prob, None) if pred.is_function else observed_target(pred.likelihood, target)
    observed = torch.ones_like(log_prob, dtype=torch.bool) if mask is None else mask
    if observed.shape != log_prob.shape:
        raise ValueError(
            f"the mask {tuple(observed.shape)} and log p(t | y) {tuple(log_prob.shape)} differ in shape: "
            "elements of observations that are scored as a whole cannot be masked"
        )
    loss = -log_prob.double().reshape(len(observed), -1).sum(1)  # per row; 0 where not observed
    number = observed.reshape(len(observed), -1).sum(1).double()
    found: dict[Any, Tensor] = {
        "rows": torch.ones_like(number), "number": number, "number²": number**2,
        "loss": loss, "loss²": loss**2, "loss·number": loss * number,
    }  # fmt: skip
    if pred.is_of_labels:
        p, binary = pred.mean, pred.mean.shape == t.shape
        p, t = (p if binary else p.movedim(1, -1))[observed].double(), t[observed].long()
        if binary:
            right, top, brier = ((p > 0.5) == t).double(), torch.maximum(p, 1 - p), (p - t).square()
        else:
            (top, label), own = p.max(-1), p.gather(-1, t[:, None])[:, 0]
            right, brier = (label == t).double(), p.square().sum(-1) - 2 * own + 1
        found |= {"accuracy": right, "brier": brier}
        risk.add(1 - top, 1 - right)
        calibration.add(*((p, t) if binary else (top, right)))
    elif not pred.is_function and t.shape == observed.shape:
        found["square"] = (pred.mean.double() - t).square()[observed]
        risk.add(pred.variance[observed], found["square"])
        if isinstance(pred.components, Normal):
            found["crps"] = pred.crps(t)[observed].double()
        try:
            cdf = pred.cdf(t)[observed]
            below = pred.cdf(t - 1)[observed] if isinstance(pred.components, Poisson) else cdf
            # inside [q(a), q(1 − a)]: P(T ≤ t) ≥ a, and P(T < t) < 1 − a
            found |= {level: (cdf >= (1 - level) / 2) & (below < (1 + level) / 2) for level in levels}
        except NotImplementedError:  # torch gives a Student t none
            pass
    return {name: value.double().sum().item() for name, value in found.items()}
