"""What the data taught a posterior: tensors still at their prior, units that are off, what predictions explain, and how
many directions of a low-rank part matter.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Categorical

from ..families.family import Family
from ..families.normal import LowRank
from ..models.bayesian_model import BayesianModel
from ..models.likelihoods import Gaussian
from ..models.priors import DistributionPrior, LaplacePrior, NormalPrior, ScalePrior, StudentTPrior
from ..predict.predict import predictive_at
from ..predict.predictive import observed_target
from ..predict.sample import IndependentDraws
from ..train.data import Batches
from ..util.checks import check_seed
from ..util.patterns import assign

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..posterior import Posterior

#: nats a weight below which a tensor is as good as at its prior
PRIOR_LIKE = 0.05
#: a unit is off if the weights that read it are, in root mean square, below so many of their standard deviations
UNIT_OFF = 1.0
#: a fit is stuck if predictions explain a smaller share of the targets' variance, or noise is a larger one of their sd
NOTHING_EXPLAINED, ALL_NOISE = 0.01, 0.95
#: draws from which the predictive mean is taken
DRAWS = 16
#: nats of entropy from which a direction of a low-rank part matters: one standard deviation in twenty
MATTERS = 0.05


@dataclass(frozen=True)
class Learned:
    """What the posterior knows.

    Attributes:
        explained: the variance of predictive means over the data, relative to that of the targets; None where the
            likelihood is a plain function.
        noise: standard deviation of the noise over that of the targets; None where the likelihood has no unknown one.
        tensors: tensor → nats per weight by which its marginals differ from the prior, KL[N(m, v)‖N(m₀, v₀)]; without
            point masses, and those whose prior's mean and variance are not known.
        units_off: hidden weight tensor → fraction of its output units that are off: the weights of the next layer that
            read them cannot be told from zero. Many are off in good fits too. Point masses are left out.
    """

    explained: float | None
    noise: float | None
    tensors: dict[str, float]
    units_off: dict[str, float]

    @property
    def at_prior(self) -> list[str]:
        """Tensors that learned less than 0.05 nats per weight."""
        return [name for name, nats in self.tensors.items() if nats < PRIOR_LIKE]

    @property
    def stuck(self) -> str | None:
        """What shows that the fit is stuck, in words; None where nothing does."""
        said = []
        if self.explained is not None and self.explained < NOTHING_EXPLAINED:
            said.append("predictions hardly depend on the input")
        if self.noise is not None and self.noise > ALL_NOISE:
            said.append(f"the noise is {self.noise:.2f} of the targets' standard deviation")
        return " and ".join(said) or None


def learned(posterior: "Posterior", loader: Iterable[Any], *, seed: int = 0) -> Learned:
    """Return how far the posterior has moved from the prior, tensor by tensor, and what its predictions explain.

    Marginals and priors are compared by mean and variance, as normals. The tensor that reads a layer's units is taken
    to be the next one of two or more axes, where its second axis fits.

    Example:
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> from structvi.models.priors import NormalPrior
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        >>> bayes = variationalize(net, likelihoods.Gaussian("point"), MeanField(), NormalPrior(1.0), num_data=4)
        >>> own = learned(bayes, [(torch.zeros(4, 2), torch.arange(4.0).unsqueeze(-1))])
        >>> own.stuck, round(own.noise, 2)
        ('predictions hardly depend on the input', 0.89)
    """
    check_seed(seed)
    model, density = posterior.model, posterior.family()
    with torch.no_grad():
        mean, variance = density.mean.double(), density.variance.double()
        prior_mean, prior_sd = (moment.to(mean) for moment in prior_moments(model))
        ratio = variance / prior_sd.square()
        nats = 0.5 * (ratio + ((mean - prior_mean) / prior_sd).square() - 1 - ratio.log())  # [P]
        known = {name: x for name, x in model.space.unravel(nats).items() if bool(x.isfinite().all())}
        certain = model.space.unravel(mean.square() / variance)  # squared signal-to-noise of every weight
    layers = {name: x for name, x in certain.items() if x.ndim > 1}
    off = {}
    for (name, units), (_, reading) in pairwise(layers.items()):
        if reading.shape[1] % units.shape[0] == 0 and bool(reading.isfinite().all()):
            by_unit = reading.transpose(0, 1).reshape(units.shape[0], -1).mean(1)
            off[name] = (by_unit < UNIT_OFF**2).double().mean().item()
    explained, spread = _explained(posterior, loader, seed)
    noise = _noise(posterior)
    relative = noise / spread if noise is not None and spread else None
    return Learned(explained, relative, {name: x.mean().item() for name, x in known.items()}, off)


def prior_moments(model: BayesianModel) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the prior of every weight, [P] each; nan where they are not known.

    Example:
        >>> from structvi.models.likelihoods import Gaussian
        >>> model = BayesianModel(torch.nn.Linear(2, 1), Gaussian(1.0), NormalPrior(0.5), 10)
        >>> prior_moments(model)[1]
        tensor([0.5000, 0.5000, 0.5000], dtype=torch.float64)
    """
    prior, space = model.prior, model.net_space
    mean = torch.zeros(model.space.size, dtype=torch.float64)
    sd = torch.full_like(mean, torch.nan)
    if isinstance(prior, ScalePrior):
        factor = {NormalPrior: 1.0, LaplacePrior: sqrt(2)}.get(type(prior), torch.nan)
        if isinstance(prior, StudentTPrior) and prior.df > 2:
            factor = sqrt(prior.df / (prior.df - 2))
        for name, scale in prior.scales(space).items():
            sd[space.slice(name)] = factor * scale
    elif isinstance(prior, DistributionPrior):
        owners = assign(space.names, tuple(prior.distributions), "DistributionPrior")
        for name, shape, owner in zip(space.names, space.shapes, owners, strict=True):
            rows, distribution = space.slice(name), list(prior.distributions.values())[owner]
            mean[rows] = distribution.mean.expand(shape).reshape(-1).double().cpu()
            sd[rows] = distribution.stddev.expand(shape).reshape(-1).double().cpu()
    return mean, sd


@torch.no_grad()
def _noise(posterior: "Posterior") -> float | None:
    """The standard deviation of a noise that is fitted."""
    likelihood = posterior.model.likelihood
    if not isinstance(likelihood, Gaussian) or likelihood.noise not in ("point", "random"):
        return None
    if likelihood.noise == "point":
        return likelihood.log_noise.exp().item()
    return posterior.space.unravel(posterior.family().mean)["likelihood.log_noise"].exp().item()


def _explained(posterior: "Posterior", loader: Iterable[Any], seed: int) -> tuple[float | None, float | None]:
    """Variance of predictive means over that of the targets, and the standard deviation of the targets; None for none.

    Of labels the means are probabilities and the variance is that of the indicators of the classes, Σ p̄(1 − p̄).
    """
    generator = torch.Generator(posterior.device).manual_seed(seed)
    draws = next(iter(IndependentDraws(posterior.family(), DRAWS, generator)))
    means, targets, labels = [], [], False
    for batch in Batches(loader, device=posterior.device).everything():
        pred, target = predictive_at(posterior, draws, batch)
        if pred.is_function:
            return None, None
        labels = pred.is_of_labels
        t, mask = observed_target(posterior.model.likelihood, target)
        mean = pred.mean.movedim(1, -1) if isinstance(pred.components, Categorical) else pred.mean.unsqueeze(-1)
        mask = torch.ones(mean.shape[:-1], dtype=torch.bool, device=mean.device) if mask is None else mask
        means.append(_sums(mean[mask]))
        targets += [] if labels else [_sums(t[mask].unsqueeze(-1))]
    p, variance = _moments(means)
    if labels:
        total = (p * (1 - p)).sum().item()
        return (variance.sum().item() / total if total else None), None
    total = _moments(targets)[1].item()
    return (variance.item() / total, sqrt(total)) if total else (None, None)


def _sums(rows: Tensor) -> Tensor:
    """How many rows [n, C], their sum, and that of their squares: [3, C], float64."""
    rows = rows.double().cpu()
    return torch.stack([torch.ones_like(rows).sum(0), rows.sum(0), rows.square().sum(0)])


def _moments(sums: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance [C] of rows that came in batches."""
    count, total, square = torch.stack(sums).sum(0)
    mean = total / count
    return mean, (square / count - mean.square()).clamp(min=0.0)


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of the low-rank part relative to the diagonal, largest first.

    In the covariance form Σ = D(I + Σₖ λₖvₖvₖᵀ)D with D = diag(s): along vₖ the variance is 1 + λₖ times the
    diagonal's. In the precision form the same holds of the precision.

    Attributes:
        eigenvalues: λ, [K], float64.
        of: "variance" or "precision".
        shares: tensor → how much of each direction lies in it, [K]; over tensors they sum to one.
    """

    eigenvalues: Tensor
    of: str
    shares: dict[str, Tensor]

    @property
    def nats(self) -> Tensor:
        """½ log(1 + λ): what each direction adds to (of the precision: takes from) the entropy."""
        return 0.5 * self.eigenvalues.log1p()

    @property
    def matter(self) -> int:
        """How many directions change the entropy by more than 0.05 nats."""
        return int((self.nats > MATTERS).sum())

    @property
    def verdict(self) -> str:
        """How many directions matter, in words."""
        K = len(self.eigenvalues)
        if not K:
            return "rank 0: there is no low-rank part"
        if self.matter == 0:
            return f"none of {K} directions matters: as good as mean field; was the factor fitted?"
        if self.matter == K:
            return f"all {K} directions matter: a higher rank may pay"
        return f"{self.matter} of {K} directions matter: a rank of {self.matter} would do"

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the eigenvalues on a logarithmic scale, and from where on they matter."""
        from ..plots import BLUE, GREY, axes_of, finish

        ax = axes_of(ax)
        limit = torch.tensor(2 * MATTERS).expm1().item()
        ax.plot(range(1, len(self.eigenvalues) + 1), self.eigenvalues.numpy(), "o-", color=BLUE, label=f"{self.of} − 1")
        ax.axhline(limit, color=GREY, linestyle="--", linewidth=1, label=f"{MATTERS} nats")
        ax.set_yscale("log")
        ax.set_xlabel("direction")
        ax.set_ylabel(f"{self.of} relative to the diagonal's")
        return finish(ax, loc="best")

    def __str__(self) -> str:
        values = ", ".join(f"{value:.3g}" for value in self.eigenvalues.tolist())
        return f"{self.of} added along each direction, relative to the diagonal's: {values}\n{self.verdict}"


@torch.no_grad()
def spectrum(q: "Posterior | Family") -> Spectrum:
    """Return the K eigenvalues of FFᵀ, for Σ = D(I + FFᵀ)D, or Λ = D⁻¹(I + FFᵀ)D⁻¹: those of the K×K matrix FᵀF.

    Example:
        >>> from structvi import LowRankNormal, Parameters
        >>> q = LowRankNormal(rank=2, initial_factor=0.0).bind(Parameters({"z": torch.zeros(4)}))
        >>> spectrum(q).verdict
        'none of 2 directions matters: as good as mean field; was the factor fitted?'
    """
    family = q if isinstance(q, Family) else q.family
    form = family.normal()
    if form is None or not isinstance(form.root, LowRank):
        raise TypeError(
            f"the spectrum is that of a low-rank part; {type(family).__name__} has none: give a LowRankNormal or "
            "LowRankPrecision, of a mixture or of blocks one of the parts"
        )
    factor, space = form.root.factor.double(), family.space
    values, vectors = torch.linalg.eigh(factor.mT @ factor)
    values, vectors = values.flip(-1), vectors.flip(-1)
    directions = (factor @ vectors).square()  # [P, K]; columns sum to the eigenvalues
    total = directions.sum(0).clamp(min=torch.finfo(torch.float64).tiny)
    names = {} if space is None else {name: space.slice(name) for name in space.names}
    shares = {name: (directions[rows].sum(0) / total).cpu() for name, rows in names.items()}
    return Spectrum(values.clamp(min=0.0).cpu(), "precision" if form.root.of_precision else "variance", shares)
