"""What may be placed around a trained network, and how it is placed."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from glob import escape
from math import hypot, inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..families.gaussian import Gaussian
from ..families.normal_parts import weighted_normals
from ..models.bayesian_model import BayesianModel
from ..models.calibration import Adjustment
from ..models.priors.base import MixturePrior
from ..models.priors.scale import NormalPrior
from .held_out import HeldOut
from .noise import Noise
from .validation import narrowed
from .warm_start import Laplace, prior_precision

if TYPE_CHECKING:
    from ..posterior import Posterior
    from .laplace import Placing

#: the prior's width is not known but for its largest value c: PARTS widths, equally likely, each 1/RATIO of the one
#: before
PARTS, RATIO = 4, 2.5
#: widths that are tried, in units of each tensor's root mean square, two of them for each RATIO; the least stands for
#: the network
WIDTHS = tuple(round(1.5 * RATIO ** (k / 2), 9) for k in range(-8, 1))
#: those where each costs passes of the network: the first in both ways, the next in the better one while it is as good
FEW_WIDTHS = WIDTHS[2], WIDTHS[5], WIDTHS[8]
#: without held-out data
WIDTH = WIDTHS[4]
#: rank of the default family, and the share of the weights that it is at most
RANK = 32
#: the prior's width on a path of temperatures
PATH_WIDTH = WIDTH
#: numbers of normals that are kept once they are made
KEPT_NUMBERS = 2**28


@dataclass
class Candidate:
    """A posterior that was tried."""

    name: str
    width: float | None  # c, the largest; None where the prior is the user's
    linearised: bool
    temperature: float  # λ
    noise: float = 1.0  # of a Gaussian("point"), in units of the network's residuals
    held_out: HeldOut | None = None
    density: float = -inf  # of held-out data, in nats for each element
    is_exact: bool = False  # measured without draws
    is_network: bool = False
    adjustment: Adjustment | None = None  # a temperature on top
    plain: "Candidate | None" = None  # then what it is without
    beside: HeldOut | None = None  # what it was compared with on some of the rows

    @property
    def kind(self) -> tuple[Any, ...]:
        """What it is but for its noise."""
        return (self.width, self.temperature, self.linearised)

    @property
    def untempered(self) -> "Candidate":
        """Without its temperature on top."""
        return self if self.plain is None else self.plain

    def parts(self, count: int) -> "list[Candidate]":
        """Of so many widths, the largest first, what it is with each alone."""
        if self.width is None:
            return [self]
        return [replace(self, width=round(self.width / RATIO**k, 7)) for k in range(count)]

    @property
    def spread(self) -> tuple[float, float, bool, float]:
        """From narrow to wide; of one width the noise that suits it best, for noise is no doubt about the network."""
        return (inf if self.width is None else self.width, self.temperature, self.linearised, self.density)

    def measured(self, held_out: HeldOut, network: HeldOut, beside: HeldOut | None = None) -> HeldOut:
        """Keep what was measured; of some of the rows, the network's own density and what is gained over it there."""
        self.held_out, self.beside = held_out, beside
        gain = self.gain_over(network)[0]
        self.density = network.mean + gain if gain == gain else -inf
        return held_out

    def gain_over(self, network: HeldOut) -> tuple[float, float]:
        """How much higher its density is than the network's, and the standard error of that.

        Where it was compared with another on some of the rows: what it gains over that there, and that over the network
        on all rows.
        """
        assert self.held_out is not None
        if self.beside is None:
            return self.held_out.gain_over(network)
        (first, one), (second, two) = self.held_out.gain_over(self.beside), self.beside.gain_over(network)
        return first + second, hypot(one, two)


def relative_prior(model: BayesianModel, theta: Tensor, width: float) -> NormalPrior:
    """N(0, (width·rms)²) for each tensor of the network, rms of its values in θ."""
    named, names = model.space.unravel(theta), model.net_space.names
    rms = torch.stack([named[name].double().square().mean().sqrt() for name in names]).tolist()  # a GPU waits once
    # a tensor that is zero says nothing of its scale
    scales = [max(own, 1e-3 * scale) for own, scale in zip(rms, model.net_space.scales.tolist(), strict=True)]
    return NormalPrior({escape(name): width * scale for name, scale in zip(names, scales, strict=True)})


def candidates_of(
    arounds: "Sequence[Around]", options: "Placing", elements: float = 1.0, noises: Sequence[float] = (1.0,)
) -> list[Candidate]:
    """In the order in which they are tried; the first is what is taken without held-out data.

    Args:
        arounds: one, or the members of a mixture, which go one way where they can.
        options: of the fit.
        elements: observed numbers in a row, the pixels of an image: λ may go up to it.
        noises: factors of the noise.
    """
    posterior = arounds[0].posterior
    own = arounds[0].ways
    linear = [way for way in own if all(way in one.ways for one in arounds)] or own
    widths: tuple[float | None, ...] = (None,)
    if "prior" in posterior.left_open:
        widths = (WIDTH,) if options.validation is None else WIDTHS
    temperatures = (1.0,)
    found, several = [], posterior.family.scale_count > 1
    for linearised in linear:
        for width in widths:
            for temperature in temperatures:
                how = "linearised" if linearised else "drawn weights"
                prior = "" if width is None else f", prior {'up to ' if several else ''}{width:.3g}"
                dial = "" if len(temperatures) == 1 else f", λ = {temperature:g}"
                for noise in noises:
                    own = "" if len(noises) == 1 else noise_name(noise)
                    name = f"{how}{prior}{dial}{own}"
                    found.append(Candidate(name, width, linearised, float(temperature), noise))
    return found


def noise_name(factor: float) -> str:
    return f", noise {factor:.4g}"


@dataclass
class Around:
    """A posterior, and what is known of the weights around which it is placed."""

    posterior: "Posterior"
    laplace: Laplace
    noise: Noise
    #: why the network cannot be linearised
    obstacle: str | None = None
    #: by the kind of their candidate and its noise
    made: dict[tuple[Any, ...], Gaussian] = field(default_factory=dict[tuple[Any, ...], Gaussian])

    @property
    def ways(self) -> tuple[bool, ...]:
        """Whether linearised: as the user asked or, where that was left open, both if the network can be."""
        if "linearise" not in self.posterior.left_open:
            return (self.posterior.model.linearised_at is not None,)
        return (True, False) if self.obstacle is None else (False,)

    @property
    def network(self) -> "tuple[Posterior, Tensor]":
        return self.posterior, self.laplace.theta

    def place(self, candidate: Candidate) -> None:
        """The posterior of a candidate. A noise c times as large makes the data's curvature smaller by c²."""
        posterior, laplace, model = self.posterior, self.laplace, self.posterior.model
        self.noise.set(candidate.noise)
        if "linearise" in posterior.left_open:
            model.linearised_at = laplace.theta[: model.net_space.size].clone() if candidate.linearised else None
        curvature = candidate.temperature * candidate.noise**2
        parts = candidate.parts(posterior.family.scale_count)
        priors, scales = [], []
        for part in reversed(parts):  # the widest is placed last
            if part.width is not None:
                model.prior = relative_prior(model, laplace.theta, part.width)
                priors.insert(0, model.prior)
            precision = prior_precision(model, laplace.theta)
            scales.insert(0, laplace.scales(posterior.family, curvature, precision))
        laplace.place(posterior.family, curvature, precision)
        if len(parts) > 1:
            posterior.family.place_scales(torch.stack(scales))
            model.prior = MixturePrior(priors)

    def place_kept(self, kept: Candidate, batches: Iterable[Any]) -> None:
        """What is kept: the network as a normal so narrow that its predictions, of a batch, are the network's own."""
        if not kept.is_network:
            self.place(kept)
            return
        self.place(replace(kept, width=WIDTHS[0] if "prior" in self.posterior.left_open else None))
        narrowed(*self.network, batches)

    def normal(self, one: Candidate) -> Gaussian:
        """That of one width, kept if there is room, and the noise that goes with it set."""
        key = (*one.kind, one.noise)
        if (made := self.made.get(key)) is not None:
            self.noise.set(one.noise)
            return made
        posterior, laplace, model = self.posterior, self.laplace, self.posterior.model
        self.noise.set(one.noise)
        if one.width is not None:
            model.prior = relative_prior(model, laplace.theta, one.width)
        precision = prior_precision(model, laplace.theta)
        laplace.place(posterior.family, one.temperature * one.noise**2, precision)
        numbers = sum(tensor.numel() for tensor in posterior.family.state_dict().values())
        room = (1 + len(self.made)) * numbers <= KEPT_NUMBERS
        density = weighted_normals((copy.deepcopy(posterior.family) if room else posterior.family)())[0].normal
        if room:
            self.made[key] = density
        return density
