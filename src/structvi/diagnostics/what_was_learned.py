"""What the data taught a network: tensors still at their prior, units that are off, and what predictions explain."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..models.bayesian_model import BayesianModel
from ..models.priors.base import Prior
from ..models.priors.distribution import DistributionPrior
from ..models.priors.scale import LaplacePrior, NormalPrior, ScalePrior, StudentTPrior
from ..parameters import Parameters
from ..util.checks import check_seed
from ..util.patterns import assign
from .explained import Explained, explained

if TYPE_CHECKING:
    from ..posterior import Posterior

#: Weights that learned less, in nats each, are as good as at their prior.
PRIOR_LIKE = 0.05
#: A unit is off where the weights that read it are, in root mean square, below so many of their standard deviations.
UNIT_OFF = 1.0


@dataclass(frozen=True)
class Learned(Explained):
    """What the posterior knows.

    Attributes:
        tensors: tensor → nats per weight by which its marginals differ from the prior, KL[N(m, v)‖N(m₀, v₀)]; without
            point masses, and those whose prior's mean and variance are not known.
        units_off: hidden weight tensor → fraction of its output units that are off: the weights of the next layer that
            read them cannot be told from zero. Many are off in good fits too. Point masses are left out.
        explained: the variance of predictive means over the data, relative to that of the targets; None where the
            likelihood is a plain function.
        noise: standard deviation of the noise over that of the targets; None where the likelihood has no unknown one.
    """

    tensors: dict[str, float]
    units_off: dict[str, float]

    @property
    def at_prior(self) -> list[str]:
        """Tensors that learned less than 0.05 nats per weight."""
        return [name for name, nats in self.tensors.items() if nats < PRIOR_LIKE]


def learned(posterior: "Posterior", loader: Iterable[Any], *, seed: int = 0) -> Learned:
    """How far the posterior has moved from the prior, tensor by tensor, how many units are off, and what is explained.

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
    said = explained(posterior, loader, seed)
    return Learned(said.explained, said.noise, {name: x.mean().item() for name, x in known.items()}, off)


def prior_moments(model: BayesianModel) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the prior of every weight, [P] each; nan where they are not known.

    Example:
        >>> from structvi.models.likelihoods import Gaussian
        >>> model = BayesianModel(torch.nn.Linear(2, 1), Gaussian(1.0), NormalPrior(0.5), 10)
        >>> prior_moments(model)[1]
        tensor([0.5000, 0.5000, 0.5000], dtype=torch.float64)
    """
    return _moments(model.prior, model.net_space, model.space.size)


def _moments(prior: Prior, space: Parameters, size: int) -> tuple[Tensor, Tensor]:
    mean = torch.zeros(size, dtype=torch.float64)
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
