"""Predictions of a linearised network in function space: what `DrawChunks` is for draws of weights, without these.

The output y(x) is normal, N(f(x; θ₀) + J(μ − θ₀), J Σ Jᵀ), known exactly where outputs are few (`function_space.py`);
of a mixture of normals over the weights it is the mixture of these. It is drawn at evenly spread points, the same at
every input and in every part. How inputs go together these do not tell. With Gaussian noise that does not depend on y,
p(t | x) is normal too, or a mixture, and answers come from it: the points are for `outputs` alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..families.normal_parts import weighted_normals
from ..models.calibration import Calibration
from ..util.random_streams import seed_from
from .function_space import (
    Looked,
    evenly_spread,
    is_near,
    jacobians,
    looked_at,
    normals_outputs,
    theta_of_linearisation,
)
from .layer_moments import LayerMoments, has_layers
from .predictive import Predictive

if TYPE_CHECKING:
    from ..posterior import Posterior

#: evenly spread points at which outputs are drawn; of each part of a mixture at least
POINTS, FEWEST = 256, 32
#: numbers of one input's Jacobian, O·P, beyond which weights are drawn: Jacobians come at least 16 inputs at a time
MOST_NUMBERS = 2**22
#: outputs beyond which Jacobians of a network cost more than draws: without convolutions, and with them
FEW_PLAIN, FEW_CONVOLVED = 3, 32
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@contextmanager
def _with_derivatives() -> Iterator[None]:
    """Inside, derivatives can be taken where they are asked for, also by one who called in `torch.inference_mode()`."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _differentiable(inputs: Any) -> Any:
    """Of inputs that were made in `torch.inference_mode()` copies."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) and x.is_inference() else x, inputs)


class FunctionChunks:
    """The predictive of a linearised posterior as one chunk of evenly spread draws of its outputs.

    Args:
        posterior: one that `is_normal` says yes to.
        points: how many draws of outputs, a share for each part of a mixture.
        calibrated: whether `whole` gives what the posterior's calibration makes of the mixture.
    """

    def __init__(self, posterior: "Posterior", points: int = POINTS, calibrated: bool = False):
        self.posterior = posterior
        self.reference, self.linearise = None, True
        with _with_derivatives():
            density = posterior.family()
            parts = weighted_normals(density)
            self.normals = [normal for _, normal in parts]
            self.theta = theta_of_linearisation(posterior, density.mean)
        self.each = max(FEWEST, points // 2 ** (len(parts) - 1).bit_length()) if len(parts) > 1 else points
        self.draws = self.each * len(parts)
        self.weights = self.theta.new_tensor([one.weight for one in parts]).repeat_interleave(self.each) / self.each
        self.device = self.theta.device
        #: whether the function is the one that was fitted; a calibration is of that
        self.is_as_fitted = posterior.model.linearised_at is not None
        self.calibration: Calibration | None = posterior.calibration if calibrated and self.is_as_fitted else None
        self.note = "in function space"
        if calibrated and not self.is_as_fitted and posterior.calibration is not None:
            self.note += ", not calibrated: with linearise= it is another function"
        self.seed = 0
        #: of networks of linear layers
        self.layers: LayerMoments | None = None
        self._points: Tensor | None = None

    def take_seed(self, generator: torch.Generator | None) -> None:
        """Of the points; before there are outputs, nothing is random."""
        (self.seed,), self._points = seed_from(generator), None

    @_with_derivatives()
    def suits(self, inputs: Any) -> bool:
        """Whether inputs are such that this is exact, and not slower than draws of weights.

        Jacobians are cheap beside draws where a network does more with each weight than to multiply one number, as
        convolutions do; of linear layers they are not needed, and a few rows show whether that is so.
        """
        found = looked_at(self.posterior, self.theta, _differentiable(inputs), MOST_NUMBERS)
        if found is None:
            return False
        if all(has_layers(self.posterior, one) for one in self.normals) and self._agrees(found):
            return True
        self.layers = None
        convolves = any(isinstance(one, CONVOLUTIONS) for one in self.posterior.net.modules())
        return found.J.shape[1] <= (FEW_CONVOLVED if convolves else FEW_PLAIN)

    def _agrees(self, found: Looked) -> bool:
        """Whether the moments of layers are those of the Jacobian, at the rows that were looked at."""
        rows, y, J = found
        try:
            self.layers = LayerMoments(self.posterior, self.theta, self.normals, J.shape[1])
            if not self.layers.is_whole(rows):
                return False
            pieces = zip(*self.layers(rows), strict=True)  # of each normal, some rows at a time
            own = [torch.cat(part) for normal in pieces for part in zip(*normal, strict=True)]
        except (RuntimeError, TypeError, ValueError):
            return False
        expected = [part for normal in self._of_jacobian(y, J) for part in normal]
        return all(is_near(a, b) for a, b in zip(own, expected, strict=True))

    def __len__(self) -> int:
        return 1

    def share(self, index: int) -> float:
        """The weight of all draws of a chunk together: there is one."""
        return 1.0

    def predictive(self, index: int, inputs: Any) -> Predictive:
        """The mixture over all draws."""
        model, parts = self.posterior.model, []
        with _with_derivatives():
            for moments in self._moments(_differentiable(inputs)):
                drawn = torch.cat(normals_outputs(moments, self._noise(moments[0][1].shape[1])))
                means = torch.stack([mean for mean, _ in moments])
                variances = torch.stack([one.diagonal(dim1=-2, dim2=-1) for _, one in moments]).reshape(means.shape)
                parts.append((drawn, means, variances))
            outputs, means, variances = (torch.cat(part, 1) for part in zip(*parts, strict=True))
            values = model.likelihood_values(self.theta.unsqueeze(0).expand(self.draws, -1))
            moments = self.weights[:: self.each] * self.each, means, variances
            return Predictive(outputs, self.weights, model.likelihood, values, self.note, True, moments)

    def whole(self, inputs: Any) -> Predictive:
        """The mixture over all draws; the calibrated one, where that is asked for."""
        return self.uncalibrated(inputs).calibrated(self.calibration)

    def uncalibrated(self, inputs: Any) -> Predictive:
        """The mixture over all draws, as it is."""
        return self.predictive(0, inputs)

    def split(self, batch: Any) -> tuple[Any, Any]:
        """The inputs of a batch, and its target."""
        return self.posterior.model.split(batch)

    def target(self, batch: Any) -> Any:
        """The target of a batch."""
        return self.posterior.model.split(batch)[1]

    def _moments(self, inputs: Any) -> Iterator[Sequence[tuple[Tensor, Tensor]]]:
        """Of y at every input, [b, ..] and [b, O, O], some inputs at a time, under each normal."""
        if self.layers is not None:
            yield from self.layers(inputs)
            return
        for y, J in jacobians(self.posterior, self.theta, inputs):
            yield self._of_jacobian(y, J)

    def _of_jacobian(self, y: Tensor, J: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(y + (J @ (one.mean - self.theta)).reshape(y.shape), one.between(J, J)) for one in self.normals]

    def _noise(self, size: int) -> Tensor:
        """[S, O], the same for all inputs."""
        if self._points is None or self._points.shape[1] != size:
            self._points = evenly_spread(self.each, size, self.seed).to(self.device)
        return self._points


def is_normal(posterior: "Posterior", linearise: bool | None) -> bool:
    """Whether outputs are normal at every input: those of a network linearised, with normals over its weights.

    Nothing else may be random: neither tensors of the likelihood, nor dropout, nor statistics of batches.
    """
    model = posterior.model
    if linearise not in (None, True) or (linearise is None and model.linearised_at is None):
        return False
    if model.user_forward is not None or posterior.dropout == "on" or posterior.mixes_rows:
        return False
    with torch.no_grad():
        density = posterior.family()
    has_centre = density.centred or model.linearised_at is not None
    return has_centre and bool(weighted_normals(density)) and density.P == model.space.size == model.net_space.size
