"""A posterior placed around a trained network: N(θ₀, Λ⁻¹) with Λ = G + diag(π), π the prior's precision."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from math import isfinite, log
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..families.family import Family
from ..families.gaussian import Gaussian as Normal
from ..families.low_rank import LowRankPrecision, precision_rank
from ..families.normal import Diagonal, LowRank, NormalForm
from ..families.rotated import rotation
from ..models.bayesian_model import BayesianModel
from ..models.likelihoods import Gaussian, StudentT, split_mask
from ..models.priors import NormalPrior, Prior
from ..train.data import Batches
from .curvature import GRADIENTS, ROWS, Curvature, curvature_of, prior_precision, simulated_gradients

if TYPE_CHECKING:
    from ..posterior import Posterior

#: rank of the family, if the user gave none; at most half of the weights
RANK = 32
#: prior width without a validation set, in units of each tensor's root mean square
DEFAULT_WIDTH = 0.24
#: standard deviations of "the network", relative to each tensor's initialisation: below the rounding of float32
NARROW = 1e-9


class Candidate(NamedTuple):
    """A posterior to be tried: a normal around the network under a prior of some width, or the network itself."""

    width: float | None  # in units of each tensor's root mean square; 0 for the network, None for the user's prior
    linearised: bool = True

    @property
    def name(self) -> str:
        if self == NETWORK:
            return "the network"
        prior = "" if self.width is None else f", prior width {self.width:.3g}"
        return ("linearised" if self.linearised else "drawn weights") + prior


NETWORK = Candidate(0.0, linearised=False)


@dataclass
class TrainedNetwork:
    """A trained network and what is known around its weights. Its posterior changes only in `commit`.

    Attributes:
        posterior: over the network's weights.
        likelihood: a copy, with the noise of the network's residuals on held-out data, or on its own.
        family: a copy of the posterior's family, or the default one if the user gave none.
        curvature: of the data, at the trained weights and this noise.
        obstacle: why the network cannot be linearised; empty if it can.
    """

    posterior: "Posterior"
    likelihood: Any
    family: Family
    curvature: Curvature
    obstacle: str = ""

    @classmethod
    def of(
        cls, posterior: "Posterior", batches: Batches, held_out: Iterable[Any] | None, seed: int
    ) -> "TrainedNetwork":
        """Measure the residuals and the curvature at the network's present weights."""
        model = posterior.model
        theta = trained_values(posterior)
        likelihood: Any = copy.deepcopy(model.likelihood)
        family = copy.deepcopy(posterior.family)
        if "family" in posterior.left_open:
            family = LowRankPrecision(min(RANK, theta.numel() // 2)).bind(posterior.space).to(posterior.device)
        with posterior.network_mode(), model.linearised_around(None):
            if isinstance(likelihood, Gaussian | StudentT) and likelihood.noise in ("point", "random"):
                log_noise = residual_noise(model, theta, batches.everything() if held_out is None else held_out)
                set_noise(likelihood, log_noise)
                if "likelihood.log_noise" in model.space:
                    theta[model.space.slice("likelihood.log_noise")] = log_noise
            precision = prior_precision(model, width_prior(posterior, theta, DEFAULT_WIDTH), theta)
            rows = min(ROWS, model.num_data)
            size = -(-rows // GRADIENTS)
            is_cut = not posterior.mixes_rows  # else a row's output depends on its batch, which stays whole

            def gradients() -> Iterator[tuple[Tensor, int]]:
                read = batches.in_order(size, rows) if is_cut else batches.everything()
                own = size if is_cut else model.num_data
                return simulated_gradients(model, likelihood, theta, read, own, seed)

            rotated = rotation(family)
            if rotated is not None:  # its axes are those of the gradients
                rotated.turn(rotated.basis.of_gradients(gradient for gradient, _ in gradients()))
            found = curvature_of(theta, gradients, model.num_data, precision, precision_rank(family))
        obstacle = _obstacle(posterior, theta, batches) if "linearise" in posterior.left_open else ""
        return cls(posterior, likelihood, family, found, obstacle)

    @property
    def theta(self) -> Tensor:
        return self.curvature.theta

    @property
    def is_linearised(self) -> bool:
        """Return whether the user asked to linearise the network; if that was left open, whether it can be."""
        if "linearise" not in self.posterior.left_open:
            return self.posterior.model.linearised_at is not None
        return not self.obstacle

    @property
    def is_function_of_inputs(self) -> bool:
        """Return whether an output is a normal of one input: nothing else is random or in the batch."""
        posterior, model = self.posterior, self.posterior.model
        alone = model.user_forward is None and not posterior.mixes_rows and posterior.dropout == "off"
        return alone and isinstance(self.family(), Normal) and model.space.size == model.net_space.size

    def placed(self, one: Candidate) -> Family:
        """Return the copied family, set to a candidate's normal; that of the network itself is very narrow."""
        posterior, (theta, diagonal, columns, _) = self.posterior, self.curvature
        if one == NETWORK:
            self.family.set_normal(NormalForm(theta, Diagonal(NARROW * posterior.space.scale.to(theta))))
            return self.family
        precision = prior_precision(posterior.model, width_prior(posterior, theta, one.width), theta)
        rest = (diagonal - columns.double().square().sum(1)).clamp(min=0.0) + precision
        scale = rest.rsqrt()
        factor = columns.double() * scale.unsqueeze(-1)
        self.family.set_normal(NormalForm(theta, LowRank(scale.to(theta), factor.to(theta), of_precision=True)))
        return self.family

    @property
    def default(self) -> Candidate:
        """Return what is placed without a validation set."""
        return Candidate(DEFAULT_WIDTH if "prior" in self.posterior.left_open else None, self.is_linearised)

    def commit(self, one: Candidate, log_factor: float) -> None:
        """Set the posterior's family, prior, linearisation and noise."""
        posterior, model, placed = self.posterior, self.posterior.model, self.placed(one)
        model.prior = width_prior(posterior, self.theta, DEFAULT_WIDTH if one == NETWORK else one.width)
        if "family" in posterior.left_open:
            posterior.family = placed
        else:
            posterior.family.load_state_dict(placed.state_dict())
        if "linearise" in posterior.left_open and one != NETWORK:
            model.linearised_at = self.theta[: model.net_space.size].clone() if one.linearised else None
        model.likelihood.load_state_dict(at_noise(self.likelihood, log_factor).state_dict())


@contextmanager
def restored_on_error(posterior: "Posterior") -> Iterator[None]:
    """Give the posterior back as it was, if anything is raised inside, an interrupt too."""
    model = posterior.model
    own = ("family", "_last_fit", "fit_status", "calibration", "chosen_on", "learned_variance", "ood")
    known = [(posterior, name, getattr(posterior, name)) for name in own]
    known += [(model, name, getattr(model, name)) for name in ("prior", "linearised_at")]
    values = [(tensor, tensor.detach().clone()) for tensor in posterior.learned().values()]
    try:
        yield
    except BaseException:
        for owner, name, value in known:
            setattr(owner, name, value)
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        raise


def trained_values(posterior: "Posterior") -> Tensor:
    """Return θ [P]: the network's present weights, or those at which the user asked to linearise it.

    Other tensors, such as an unknown noise, are at their start.
    """
    model = posterior.model
    named = model.space.unravel(model.space.initial.clone())
    if model.linearised_at is not None and "linearise" not in posterior.left_open:
        named |= model.net_space.unravel(model.linearised_at)
    else:
        named |= {name: p.detach() for name, p in model.net.named_parameters() if name in model.net_space}
    return model.space.ravel({name: tensor.to(posterior.device) for name, tensor in named.items()})


def width_prior(posterior: "Posterior", theta: Tensor, width: float | None) -> Prior:
    """Return the user's prior; if it was left open, N(0, (width·rms)²) for each tensor of the network.

    rms is the root mean square of the trained values. Weights before a normalisation can be scaled without a change of
    the network; with this unit their posterior scales with them.
    """
    model = posterior.model
    if width is None or "prior" not in posterior.left_open:
        return model.prior
    named, names = model.space.unravel(theta), model.net_space.names
    rms = torch.stack([named[name].double().square().mean().sqrt() for name in names]).tolist()  # a GPU waits once
    # a tensor of zeros says nothing of its scale
    scales = [max(own, 1e-3 * scale) for own, scale in zip(rms, model.net_space.scales.tolist(), strict=True)]
    return NormalPrior({escape(name): width * scale for name, scale in zip(names, scales, strict=True)})


def learned_noise(likelihood: Any) -> Tensor | None:
    """Return the log noise that a likelihood learns as a point; None for any other likelihood."""
    is_learned = isinstance(likelihood, Gaussian | StudentT) and likelihood.noise == "point"
    return likelihood.log_noise if is_learned else None


@torch.no_grad()
def set_noise(likelihood: Any, log_noise: float) -> None:
    """Set the noise that a likelihood learns; leave any other likelihood as it is."""
    if (parameter := learned_noise(likelihood)) is not None:
        parameter.fill_(log_noise)


@torch.no_grad()
def at_noise(likelihood: Any, log_factor: float) -> Any:
    """Return a copy of the likelihood with a factor times the noise that it has learned."""
    own = copy.deepcopy(likelihood)
    if (parameter := learned_noise(own)) is not None:
        parameter += log_factor
    return own


@torch.no_grad()
def residual_noise(model: BayesianModel, theta: Tensor, batches: Iterable[Any]) -> float:
    """Return the log noise whose errors have the variance of the network's residuals, at least that of rounding."""
    named = model.space.unravel(theta)
    network = {name: tensor for name, tensor in named.items() if name not in model.likelihood_names}
    square, count, eps = 0.0, 0, torch.finfo(theta.dtype).eps
    for batch in batches:
        output, target = model.call(network, batch)
        t, mask = split_mask(target)
        errors = (t - output).double().square() + (eps * output.double()).square()
        errors = errors if mask is None else errors[mask]
        square, count = square + float(errors.sum()), count + errors.numel()
    if not isfinite(square):
        raise ValueError(
            f"the network's residuals are not finite, their squares add up to {square}: is there NaN in inputs or "
            "targets? Leave these rows out, or mask them"
        )
    log_noise = 0.5 * log(max(square / max(count, 1), torch.finfo(theta.dtype).tiny))
    if isinstance(model.likelihood, StudentT):  # σ²ν/(ν − 2) is the variance; of one near infinity a tenth
        log_noise += 0.5 * log(max(0.1, 1 - 2 / float(model.likelihood.df_value().detach())))
    return log_noise


@torch.no_grad()
def _obstacle(posterior: "Posterior", theta: Tensor, batches: Batches) -> str:
    """Return why the network cannot be linearised at θ; nothing if it can."""
    model = posterior.model
    at = theta[: model.net_space.size]
    try:
        with posterior.network_mode(), model.linearised_around(at):
            model.call(model.net_space.unravel(at), next(iter(batches.everything(1))))
    except NotImplementedError as error:
        return str(error)
    return ""
