"""A posterior placed around a trained network: N(θ₀, Λ⁻¹) with Λ = G/σ² + diag(π), π the prior's precision."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import escape
from math import exp, inf, isfinite, log
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
from .curvature import (
    GRADIENTS,
    MOST_NUMBERS,
    ROWS,
    Curvature,
    Stopwatch,
    curvature_of,
    prior_precision,
    simulated_gradients,
)  # fmt: skip

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
    linearised: bool

    @property
    def is_network(self) -> bool:
        return self.width == 0

    @property
    def name(self) -> str:
        if self.is_network:
            return "the network"
        prior = "" if self.width is None else f", prior width {self.width:.3g}"
        return ("linearised" if self.linearised else "drawn weights") + prior

    @property
    def spread(self) -> tuple[float, bool]:
        """Return a key that orders candidates from narrow to wide."""
        return inf if self.width is None else self.width, self.linearised


NETWORK = Candidate(0.0, linearised=False)


@dataclass
class TrainedNetwork:
    """A trained network and what is known around its weights. Its posterior changes only in `commit`.

    Attributes:
        posterior: over the network's weights.
        likelihood: a copy, with the noise of the network's residuals on its own data.
        family: a copy of the posterior's family, or the default one if the user gave none.
        curvature: of the data, at the trained weights.
        obstacle: why the network cannot be linearised; empty if it can.
        epoch: seconds that one epoch of training takes, gradients alone, as those of the curvature took.
    """

    posterior: "Posterior"
    likelihood: Any
    family: Family
    curvature: Curvature
    obstacle: str
    epoch: float
    _normals: dict[tuple[float | None, float], Normal] = field(default_factory=dict)
    _likelihoods: dict[float, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, posterior: "Posterior", batches: Batches, seed: int) -> "TrainedNetwork":
        """Measure the residuals and the curvature at the network's present weights."""
        model = posterior.model
        theta = trained_values(posterior)
        likelihood: Any = copy.deepcopy(model.likelihood)
        family = copy.deepcopy(posterior.family)
        if "family" in posterior.left_open:
            family = LowRankPrecision(min(RANK, theta.numel() // 2)).bind(posterior.space).to(posterior.device)
        with posterior.network_mode(), model.linearised_around(None):
            if isinstance(likelihood, Gaussian | StudentT) and likelihood.noise in ("point", "random"):
                log_noise = residual_noise(model, theta, batches.everything())
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
            watch = Stopwatch()
            found = curvature_of(
                theta, lambda: watch.of(gradients()), model.num_data, precision, precision_rank(family)
            )
        obstacle = _obstacle(posterior, theta, batches) if "linearise" in posterior.left_open else ""
        return cls(posterior, likelihood, family, found, obstacle, model.num_data * watch.seconds / max(1, watch.rows))

    @property
    def theta(self) -> Tensor:
        return self.curvature.theta

    @property
    def log_noise(self) -> float:
        """Return the log of the residuals' root mean square, zero if the likelihood learns no noise."""
        parameter = learned_noise(self.likelihood)
        return 0.0 if parameter is None else float(parameter.detach())

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
        is_normal = isinstance(self.placed(self.narrow)(), Normal)
        alone = model.user_forward is None and not posterior.mixes_rows and posterior.dropout == "off"
        return is_normal and alone and model.space.size == model.net_space.size

    def prior(self, width: float | None) -> Prior:
        """Return the prior of this width, or the user's."""
        return width_prior(self.posterior, self.theta, width)

    def at_noise(self, log_factor: float) -> Any:
        """Return the likelihood with the noise at a factor of the network's residuals."""
        if learned_noise(self.likelihood) is None:
            return self.likelihood
        if log_factor not in self._likelihoods:
            self._likelihoods[log_factor] = own = copy.deepcopy(self.likelihood)
            set_noise(own, self.log_noise + log_factor)
        return self._likelihoods[log_factor]

    def form(self, width: float | None, log_factor: float = 0.0) -> NormalForm:
        """Return the normal under the prior of this width, if the noise is exp(log_factor) times the residuals.

        More noise makes the data's curvature smaller by its square.
        """
        theta, diagonal, columns = self.curvature
        precision = prior_precision(self.posterior.model, self.prior(width), theta)
        shrunk = exp(-log_factor)
        rest = (diagonal - columns.double().square().sum(1)).clamp(min=0.0) * shrunk**2 + precision
        scale = rest.rsqrt()
        factor = columns.double() * shrunk * scale.unsqueeze(-1)
        return NormalForm(theta, LowRank(scale.to(theta), factor.to(theta), of_precision=True))

    @property
    def narrow(self) -> NormalForm:
        """Return a normal so narrow that predictions are the network's own."""
        return NormalForm(self.theta, Diagonal(NARROW * self.posterior.space.scale.to(self.theta)))

    def normal(self, width: float | None, log_factor: float) -> Normal:
        """Return the density of `form` as the family holds it; it is kept while there is room."""
        key = width, log_factor
        if key not in self._normals:
            family = copy.deepcopy(self.placed(self.form(width, log_factor)))
            if (len(self._normals) + 1) * sum(x.numel() for x in family.parameters()) > MOST_NUMBERS:
                self._normals.clear()
            density = family()
            assert isinstance(density, Normal)
            self._normals[key] = density
        return self._normals[key]

    def placed(self, form: NormalForm) -> Family:
        """Return the copied family, set to a normal."""
        self.family.set_normal(form)
        return self.family

    @property
    def default(self) -> Candidate:
        """Return what is placed without a validation set."""
        return Candidate(DEFAULT_WIDTH if "prior" in self.posterior.left_open else None, self.is_linearised)

    def commit(self, one: Candidate, log_factor: float) -> None:
        """Set the posterior's family, prior, linearisation and noise."""
        posterior, model = self.posterior, self.posterior.model
        placed = self.placed(self.narrow if one.is_network else self.form(one.width, log_factor))
        model.prior = self.prior(DEFAULT_WIDTH if one.is_network else one.width)
        if "family" in posterior.left_open:
            posterior.family = copy.deepcopy(placed)  # the copied family is set again for other candidates
        else:
            posterior.family.load_state_dict(placed.state_dict())
        if "linearise" in posterior.left_open and not one.is_network:
            model.linearised_at = self.theta[: model.net_space.size].clone() if one.linearised else None
        set_noise(model.likelihood, self.log_noise + log_factor)


@contextmanager
def restored_on_error(posterior: "Posterior") -> Iterator[None]:
    """Give the posterior back as it was, if anything is raised inside, an interrupt too."""
    model, family = posterior.model, posterior.family
    state = {name: tensor.detach().clone() for name, tensor in family.state_dict().items()}
    prior, linearised_at, noise = model.prior, model.linearised_at, learned_noise(model.likelihood)
    log_noise = 0.0 if noise is None else float(noise.detach())
    names = ("_last_fit", "fit_status", "calibration", "chosen_on", "learned_variance", "ood")
    known = {name: getattr(posterior, name) for name in names}
    try:
        yield
    except BaseException:
        family.load_state_dict(state)
        posterior.family, model.prior, model.linearised_at = family, prior, linearised_at
        set_noise(model.likelihood, log_noise)
        for name, value in known.items():
            setattr(posterior, name, value)
        raise


def trained_values(posterior: "Posterior") -> Tensor:
    """Return θ [P]: the network's present weights, or those at which the user asked to linearise it.

    What is not the network's, such as an unknown noise, is at its start.
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


def set_noise(likelihood: Any, log_noise: float) -> None:
    """Set the noise that a likelihood learns; leave any other likelihood as it is."""
    parameter = learned_noise(likelihood)
    if parameter is not None:
        with torch.no_grad():
            parameter.fill_(log_noise)


@torch.no_grad()
def residual_noise(model: BayesianModel, theta: Tensor, batches: Iterable[Any]) -> float:
    """Return the log noise whose errors have the variance of the network's residuals, at least that of rounding."""
    named = model.space.unravel(theta)
    network = {name: tensor for name, tensor in named.items() if name not in model.likelihood_names}
    square, size, count = 0.0, 0.0, 0
    for batch in batches:
        output, target = model.call(network, batch)
        t, mask = split_mask(target)
        residual, y = (t - output, output) if mask is None else ((t - output)[mask], output[mask])
        square, count = square + float(residual.double().square().sum()), count + residual.numel()
        size += float(y.double().square().sum())
    if not isfinite(square):
        raise ValueError(
            f"the residuals of the network on its training data are not finite, their squares add up to {square}: is "
            "there NaN in inputs or targets? Leave these rows out, or mask them"
        )
    rounding = torch.finfo(theta.dtype).eps ** 2 * size
    log_noise = 0.5 * log(max((square + rounding) / max(count, 1), torch.finfo(theta.dtype).tiny))
    if isinstance(model.likelihood, StudentT):  # σ²ν/(ν − 2) is the variance; of one near infinity a tenth
        log_noise += 0.5 * log(max(0.1, 1 - 2 / float(model.likelihood.df_value().detach())))
    return log_noise


@torch.no_grad()
def _obstacle(posterior: "Posterior", theta: Tensor, batches: Batches) -> str:
    """Return why the network cannot be linearised at θ; nothing if it can."""
    model = posterior.model
    at = theta[: model.net_space.size]
    batch = next(iter(batches.everything(1)))
    try:
        with posterior.network_mode(), model.linearised_around(at):
            model.call(model.net_space.unravel(at), batch)
    except NotImplementedError as error:
        return str(error)
    return ""
