"""How good predictions are, on a loader: likelihood, error, calibration, and what uncertainty is worth.

Everything is streamed. A batch is seen by the draws chunk after chunk, which are made again from their seeds for every
batch, so that all batches see the same weights and neither [S, B, ..] nor [S, P] is ever held: the predictive of a
batch is the mixture of its chunks' predictives. Over batches only sums and histograms are kept.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from itertools import chain, islice
from math import floor, nan, sqrt
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from torch import Tensor
from torch.distributions import Normal

from ..couplings import Coupling, naive
from ..util.budget import batches_within, length_of
from ..util.checks import check_iterable, check_positive
from ..util.shown import shown
from .curves import CalibrationHistogram, Reliability, RiskCoverage, RiskHistogram
from .draws import on_device
from .member_chunks import DRAWS, Chunks, chunks_for
from .predictive import Predictive, observed_target
from .quantiles import normal_mixture_crps
from .summary import Score, Summary

if TYPE_CHECKING:
    from ..posterior import EnsembleBase, Posterior

#: So many means and scales of draws are held at once for the pairs of the CRPS.
CRPS_NUMBERS = 2**22
#: A budget of passes leaves so many draws: with fewer the mixture is another one.
FEWEST_DRAWS = 16


@dataclass(frozen=True)
class Metrics:
    """What `evaluate` measured; None where the likelihood has no such thing. `dict(metrics)` has the numbers only.

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
        shown = [f.name for f in fields(self) if f.repr]
        return [name for name in shown if getattr(self, name) is not None]

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(f"{name!r} was not measured; there are {self.keys()}")
        return getattr(self, name)

    def __str__(self) -> str:
        lines = {name: value for name, value in ((name, self[name]) for name in self.keys()) if name != "coverage"}
        lines |= {f"coverage of {100 * level:g} %": value for level, value in (self.coverage or {}).items()}
        return "\n".join(f"{name:<18} {value:.5g}" for name, value in lines.items())


def evaluate(
    posterior: "Posterior | EnsembleBase",
    loader: Iterable[Any],
    draws: int | None = None,
    *,
    coupling: Coupling = naive,
    chunk: int = 16,
    levels: Sequence[float] = (0.5, 0.9, 0.95),
    reference: Any = None,
    generator: torch.Generator | None = None,
    linearise: bool | None = None,
    calibrated: bool = True,
    passes: float | None = None,
    progress: bool = True,
) -> Metrics:
    """All metrics of a posterior's predictions on a loader, in memory that grows with neither draws nor batches.

    The draws are those of `predict` with the same arguments. The CRPS needs all pairs of draws, S²/2 a number: of
    each batch so many numbers are taken at a time as make `CRPS_NUMBERS` with S draws, and the network runs once more
    over the batch for each further part (a batch of 1000 numbers: up to 4194 draws take one run).

    Args:
        posterior: what `variationalize` returns.
        loader: batches as `fit` takes them, with targets.
        draws, coupling, chunk, reference, generator, linearise, calibrated: as in `predict`; with draws=None the first
            batch tells whether outputs are few. In function space, and where a temperature or a scale is applied, all
            draws of a batch are held at once.
        levels: the probabilities of the central intervals whose coverage is measured.
        passes: how many passes over the loader, of one draw each, it may take: all draws by default. With fewer passes
            than draws so many draws are taken, but not below 16; where 16 are still too many, of a loader with a
            length, every second, third .. batch is read. `count` and `draws` of the answer say what it is made of; the
            draws are of weights.
        progress: show a bar, in a terminal.

    Example:
        >>> from torch import nn
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(nn.Linear(3, 1), likelihoods.Gaussian(0.5), num_data=10)
        >>> sorted(dict(evaluate(bayes, [(torch.zeros(5, 3), torch.zeros(5, 1))], draws=4)))
        ['aurc', 'count', 'coverage', 'crps', 'draws', 'nlpd', 'nlpd_se', 'rmse']
    """
    if isinstance(loader, Tensor):
        raise TypeError(
            "evaluate expects batches (input, target), got a tensor: write evaluate([(x, t)]), or a DataLoader"
        )
    check_iterable(loader)
    if passes is not None:
        check_positive(passes, "passes")
        draws = min(DRAWS if draws is None else draws, max(FEWEST_DRAWS, floor(passes)))
    length = length_of(loader)
    first = _First(loader, posterior)
    chunks = chunks_for(first, posterior, draws, coupling, chunk, reference, generator, linearise, calibrated)
    loader, totals = first.all(), _Totals(tuple(levels))
    most = None if passes is None else batches_within(passes, chunks.draws, length)
    for batch in shown(_spread(loader, length, most), most or length, "evaluate", progress):
        batch = on_device(batch, chunks.device)
        inputs, target = chunks.split(batch)
        totals.add(*_summary(chunks, inputs, target), posterior.model.likelihood, target)
    return totals.metrics(chunks.draws)


class _First:
    """The inputs of a loader's first batch, where someone asks for them; `all` then has the batch nevertheless."""

    def __init__(self, loader: Iterable[Any], posterior: "Posterior | EnsembleBase"):
        self.loader, self.posterior = loader, posterior
        self._seen: tuple[list[Any], Iterator[Any]] | None = None

    def __call__(self) -> Any:
        batches = iter(self.loader)
        first = list(islice(batches, 1))
        self._seen = (first, batches)
        return self._inputs(first[0]) if first else None

    def all(self) -> Iterable[Any]:
        return self.loader if self._seen is None else chain(*self._seen)

    def _inputs(self, batch: Any) -> Any:
        return batch if isinstance(batch, Tensor) else self.posterior.model.split(batch)[0]


def _spread(loader: Iterable[Any], length: int | None, most: int | None) -> Iterable[Any]:
    """So many of the batches, at even distances: a loader may be sorted."""
    if length is None or most is None:
        return loader
    chosen = {index * length // most for index in range(most)}
    return (batch for index, batch in enumerate(loader) if index in chosen)


def ood_auroc(
    posterior: "Posterior | EnsembleBase | None",
    in_loader: Iterable[Any] | Predictive,
    out_loader: Iterable[Any] | Predictive,
    score: Score = "entropy",
    draws: int | None = None,
    *,
    coupling: Coupling = naive,
    chunk: int = 16,
    reference: Any = None,
    generator: torch.Generator | None = None,
    linearise: bool | None = None,
    calibrated: bool = True,
) -> float:
    """P(score of an unfamiliar input > score of a familiar one): 1 tells them apart, ½ is chance.

    Args:
        posterior: what `variationalize` returns; None where both sides are predictives.
        in_loader, out_loader: batches as `fit` takes them, or bare input tensors; targets are not used. Or predictives,
            of which no more draws are made: the arguments from `draws` on are then not used.
        score: an uncertainty of `Predictive`, averaged over the elements of an input (pixels); "max_probability" is one
            minus the probability of the most probable label. "function_variance" is that of the network's output (of a
            classifier the logits): far from all data a softmax saturates, and every uncertainty of labels is then zero.
        draws, coupling, chunk, reference, generator, linearise, calibrated: as in `predict`; both loaders see the same
            draws.

    Example:
        >>> from torch import nn
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(nn.Linear(1, 1), likelihoods.Gaussian(0.5), num_data=10)
        >>> ood_auroc(bayes, [torch.zeros(5, 1)], [torch.full((5, 1), 9.0)], "epistemic")
        1.0
    """
    try:
        from torchmetrics.functional.classification import binary_auroc
    except ImportError:
        raise ImportError('ood_auroc needs torchmetrics: pip install "structvi[metrics]"') from None
    known = get_args(Score)
    if score not in known:
        raise ValueError(f"score must be one of {known}, got {score!r}")
    loaders = {"in_loader": in_loader, "out_loader": out_loader}
    if isinstance(in_loader, Predictive) and isinstance(out_loader, Predictive):
        sides = [Summary.of(one, None, 1.0).score(score).cpu() for one in (in_loader, out_loader)]
    else:
        for name, one in loaders.items():
            if posterior is None or isinstance(one, Predictive):
                raise TypeError(
                    "ood_auroc takes a posterior and two loaders, or None and two predictives; got "
                    f"{type(posterior).__name__} and, as {name}, {type(one).__name__}"
                )
        assert posterior is not None
        first = _First(cast(Iterable[Any], in_loader), posterior)
        chunks = chunks_for(first, posterior, draws, coupling, chunk, reference, generator, linearise, calibrated)
        every = (first.all(), cast(Iterable[Any], out_loader))
        sides = [torch.cat(list(_scores(chunks, one, score))) for one in every]
    for name, side in zip(loaders, sides, strict=True):
        if bad := int((~side.isfinite()).sum()):
            raise ValueError(
                f"{bad} of {len(side)} scores ({score}) of {name} are not finite, and cannot be ranked: look at the "
                "network's outputs there, predict(x).outputs, for inputs or weights that are not finite"
            )
    # ranks: torchmetrics squashes scores beyond one, and makes ties of them
    _, ranks = torch.cat(sides).unique(return_inverse=True)
    unfamiliar = torch.cat([torch.full(side.shape, i) for i, side in enumerate(sides)])
    return binary_auroc(ranks.double() / max(1, int(ranks.max())), unfamiliar).item()


def _summary(chunks: Chunks, inputs: Any, target: Any) -> tuple[Summary, Tensor | None]:
    """The summary of the predictive over all draws, and its CRPS [E] where the noise is Gaussian."""
    if chunks.calibration is not None and chunks.calibration.applied is not None:
        return _of_whole(chunks.whole(inputs), target)
    summary: Summary | None = None
    crps: list[Tensor] = []
    E, done = 1, 0
    while done < E:
        t, means, scales, weights = None, [], [], []
        for index in range(len(chunks)):
            part = chunks.predictive(index, inputs)
            if done == 0:
                own = Summary.of(part, target, chunks.share(index))
                summary = own if summary is None else summary.merge(own)
            if part.is_function or not isinstance(part.components, Normal):
                continue
            t = observed_target(part.likelihood, target)[0].flatten()
            E, size = t.numel(), max(1, CRPS_NUMBERS // chunks.draws)
            block = slice(done, done + size)
            own_weights, d = part.mixture
            assert isinstance(d, Normal)
            means.append(d.loc.flatten(1)[:, block].clone())
            scales.append(d.scale.flatten(1)[:, block].clone())
            weights.append(chunks.share(index) * own_weights)
        if t is None:
            break
        mean = torch.cat(means)
        crps.append(normal_mixture_crps(mean, torch.cat(scales), torch.cat(weights), t[done : done + mean.shape[1]]))
        done += mean.shape[1]
    assert summary is not None
    return summary, torch.cat(crps) if crps else None


def _of_whole(predictive: Predictive, target: Any) -> tuple[Summary, Tensor | None]:
    """The same of a predictive that is not the mixture of its chunks' predictives: a calibrated one."""
    weights, d = predictive.mixture
    if not isinstance(d, Normal):
        return Summary.of(predictive, target, 1.0), None
    t, size = observed_target(predictive.likelihood, target)[0].flatten(), max(1, CRPS_NUMBERS // predictive.draws)
    parts = zip(d.loc.flatten(1).split(size, 1), d.scale.flatten(1).split(size, 1), t.split(size), strict=True)
    crps = [normal_mixture_crps(mean, scale, weights, own) for mean, scale, own in parts]
    return Summary.of(predictive, target, 1.0), torch.cat(crps)


class _Totals:
    """Sums and histograms over the batches."""

    def __init__(self, levels: tuple[float, ...]):
        for level in levels:
            if not 0 < level < 1:
                raise ValueError(f"levels must be probabilities inside (0, 1), got {level!r}")
        self.levels = levels
        self.sums: dict[Any, float] = {}
        self.calibration = CalibrationHistogram()
        self.risk = RiskHistogram()

    def add(self, summary: Summary, crps: Tensor | None, likelihood: Any, target: Any) -> None:
        known = summary.mean is not None  # of a plain function only log p is, and its target may be anything
        t, observed = observed_target(likelihood, target) if known else (summary.log_prob, None)
        if observed is None:
            observed = torch.ones_like(summary.log_prob, dtype=torch.bool)
        if observed.shape != summary.log_prob.shape:
            raise ValueError(
                f"the mask {tuple(observed.shape)} and log p(t | y) {tuple(summary.log_prob.shape)} differ in shape: "
                "elements of observations that are scored as a whole cannot be masked"
            )
        B = len(observed)
        loss = -summary.log_prob.double().reshape(B, -1).sum(1)  # per row; 0 where not observed
        number = observed.reshape(B, -1).sum(1).double()
        self._sum(rows=B, number=number, loss=loss, loss2=loss**2, cross=loss * number, number2=number**2)
        if summary.labels:
            self._labels(summary, t, observed)
        elif known and t.shape == observed.shape:
            self._numbers(summary, crps, t, observed)

    def _labels(self, summary: Summary, t: Tensor, observed: Tensor) -> None:
        p = summary.mean
        assert p is not None
        binary = p.shape == t.shape
        p, t = (p if binary else p.movedim(1, -1))[observed].double(), t[observed].long()
        if binary:
            right, top = ((p > 0.5) == t.bool()).double(), torch.maximum(p, 1 - p)
            brier, confidence, hit = (p - t).square(), p, t.double()
        else:
            top, label = p.max(-1)
            right = (label == t).double()
            brier, confidence, hit = p.square().sum(-1) - 2 * p.gather(-1, t[:, None])[:, 0] + 1, top, right
        self._sum(right=right, brier=brier)
        self.risk.add(1 - top, 1 - right)
        self.calibration.add(confidence, hit)

    def _numbers(self, summary: Summary, crps: Tensor | None, t: Tensor, observed: Tensor) -> None:
        assert summary.mean is not None
        assert summary.epistemic is not None
        assert summary.aleatoric is not None
        square = (summary.mean.double() - t).square()[observed]
        self._sum(square=square)
        self.risk.add((summary.epistemic + summary.aleatoric)[observed], square)
        if crps is not None:
            self._sum(crps=crps.reshape(t.shape)[observed].double())
        if summary.cdf is None or summary.cdf_below is None:
            return
        for level in self.levels:
            # inside [q(a), q(1 − a)]: P(T ≤ t) ≥ a, and P(T < t) < 1 − a
            inside = (summary.cdf >= (1 - level) / 2) & (summary.cdf_below < (1 + level) / 2)
            self._sum(**{f"coverage {level}": inside[observed].double()})

    def _sum(self, **values: Any) -> None:
        for name, value in values.items():
            own = value.sum().item() if isinstance(value, Tensor) else value
            self.sums[name] = self.sums.get(name, 0.0) + own

    def metrics(self, draws: int) -> Metrics:
        s, n, rows = self.sums, self.sums.get("number", 0.0), self.sums.get("rows", 0)
        if n == 0:
            raise ValueError("the loader gave no observed target: there is nothing to evaluate")
        nlpd = s["loss"] / n
        residual = max(0.0, s["loss2"] - 2 * nlpd * s["cross"] + nlpd**2 * s["number2"])
        error = sqrt(residual * rows / (rows - 1)) / n if rows > 1 else nan
        result: dict[str, Any] = {"nlpd": nlpd, "nlpd_se": error}
        if "right" in s:
            result |= {"accuracy": s["right"] / n, "brier": s["brier"] / n}
            result |= {"ece": self.calibration.error(), "reliability": self.calibration.curve()}
        if "square" in s:
            result["rmse"] = sqrt(s["square"] / n)
            covered = {level: s[f"coverage {level}"] / n for level in self.levels if f"coverage {level}" in s}
            result["coverage"] = covered or None
        if "crps" in s:
            result["crps"] = s["crps"] / n
        if "right" in s or "square" in s:
            result["aurc"], result["risk_coverage"] = self.risk.area(), self.risk.curve()
        return Metrics(count=int(n), draws=draws, **result)


def _scores(chunks: Chunks, loader: Iterable[Any], score: Score) -> Iterator[Tensor]:
    """The score of every input, batch by batch."""
    for batch in loader:
        whole = isinstance(batch, Tensor) or chunks.posterior.model.user_forward is not None
        inputs = batch if whole else chunks.posterior.model.split(batch)[0]
        yield summary_of(chunks, inputs).score(score).double().cpu()


def summary_of(chunks: Chunks, inputs: Any) -> Summary:
    """Of the predictive over all draws; a chunk of them is held at a time, where no calibration needs all."""
    if chunks.calibration is not None and chunks.calibration.applied is not None:
        return Summary.of(chunks.whole(inputs), None, 1.0)
    parts = (Summary.of(chunks.predictive(index, inputs), None, chunks.share(index)) for index in range(len(chunks)))
    return reduce(Summary.merge, parts)
