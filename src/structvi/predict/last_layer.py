"""A posterior over the last layer in function space: its outputs are normal, and one pass of the network gives them.

The network runs once at the mean, y = M φ. The features φ that come to the layer give the covariance of y at every
input. Labels are averaged over evenly spread points of y, the same at every input.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..families.gaussian import Gaussian
from ..families.matrix_normal import OutputNormals, layer_outputs, matrix_normal
from ..models.bayesian_model import BayesianModel
from ..models.likelihoods import Categorical
from ..models.likelihoods import Gaussian as GaussianNoise
from ..networks.last_layer import LastLayer, Pass
from ..util.random_streams import seed_from
from .linearised import POINTS, evenly_spread
from .predictive import Predictive, PredictiveDraws, on_device

if TYPE_CHECKING:
    from ..posterior import Posterior

#: outputs from which on, and rows of an input from which on, fewer points do: memory
MANY, FEWER_POINTS = 64, 64
#: numbers of a layer up to which a family other than `MatrixNormal` gives the covariance of the outputs
LARGEST_DENSE = 2048

_spread = lru_cache(maxsize=16)(evenly_spread)


class _Known(NamedTuple):
    """A layer whose output is the network's own, and q over it while the family has these values."""

    layer: LastLayer
    values: dict[str, Tensor]
    mean: Tensor
    normals: Callable[[Tensor], OutputNormals] | None  # None if q is no normal, or too large


_known: "WeakKeyDictionary[BayesianModel, _Known]" = WeakKeyDictionary()


class LastLayerDraws(PredictiveDraws):
    """The predictive of a posterior over the last layer, at evenly spread points of its outputs.

    Args:
        posterior: that `known_layer` knows.
        generator: of the points; the same ones at every call if None.
    """

    def __init__(self, posterior: "Posterior", generator: torch.Generator | None = None):
        self.posterior, self.note = posterior, "one pass of the network"
        self.known = _now(posterior)
        self.device = self.known.mean.device
        closed, many = _is_closed(posterior.model.likelihood), self.known.layer.outputs > MANY
        self.draws = 1 if closed else FEWER_POINTS if many else POINTS
        (self.seed,) = (0,) if generator is None else seed_from(generator)

    def mixture(self, inputs: Any) -> Predictive:
        here, normals = passed(self.posterior, inputs, self.known)
        return predictive(self.posterior.model.likelihood, self.known.layer, here.output, normals, self.seed, self.note)


@torch.no_grad()
def predictive(
    likelihood: Any, layer: LastLayer, mean: Tensor, normals: OutputNormals, seed: int = 0, note: str = ""
) -> Predictive:
    """Return the predictive of normal outputs of a layer around their mean [B, ..], at evenly spread points."""
    if _is_closed(likelihood):
        within = layer.as_output(normals.variance, mean).unsqueeze(0)
        return Predictive(mean.unsqueeze(0), mean.new_ones(1), likelihood, {}, note, True, within)
    S = POINTS if layer.outputs <= MANY and len(normals.along) == len(mean) else FEWER_POINTS
    outputs = mean + layer.as_output(normals.draw(_spread(S, layer.outputs, seed).to(mean)), mean)
    return Predictive(outputs, mean.new_full((S,), 1 / S), likelihood, {}, note, True)


def _is_closed(likelihood: Any) -> bool:
    """Return whether the noise leaves p(t) normal."""
    return type(likelihood) is GaussianNoise and likelihood.noise not in ("head", "random")


def known_layer(posterior: "Posterior", inputs: Any) -> LastLayer | None:
    """Return the layer over which the posterior is, if the network's output is that layer's own; else None.

    It is looked at once, at these inputs and two values of the layer.
    """
    model = posterior.model
    if model not in _known:
        if model.likelihood_names or posterior.dropout == "on" or posterior.mixes_rows:
            return None
        try:
            layer = layer_of(posterior)
            theta = posterior.family().mean.detach()
            here = _pass(posterior, layer, theta, inputs)
            layer.checked(here, lambda own: (_call(posterior, own, inputs), None), theta)
        except (ValueError, TypeError):  # what is wrong with the inputs is said where weights are drawn
            return None
        remember(posterior, layer)
    known = _now(posterior)
    return None if known.normals is None else known.layer


def layer_of(posterior: "Posterior") -> LastLayer:
    """Return the one layer that is random; raise if other tensors are random too."""
    model = posterior.model
    return LastLayer(model.net, model.net_space, isinstance(model.likelihood, Categorical))


def remember(posterior: "Posterior", layer: LastLayer) -> None:
    """Keep a layer that was checked."""
    _known[posterior.model] = _Known(layer, {}, torch.empty(0), None)


def passed(posterior: "Posterior", inputs: Any, known: _Known | None = None) -> tuple[Pass, OutputNormals]:
    """Return one pass of the network at the mean, and the normals of its outputs at the inputs."""
    known = _now(posterior) if known is None else known
    assert known.normals is not None
    with torch.no_grad():
        here = _pass(posterior, known.layer, known.mean, inputs)
        return here, known.normals(here.features)


def _now(posterior: "Posterior") -> _Known:
    """Return the layer and the present q; a dense one is made anew only if the family has changed."""
    known, family = _known[posterior.model], posterior.family
    values, is_matrix = family.state_dict(), matrix_normal(family) is not None
    if values.keys() == known.values.keys() and all(map(torch.equal, values.values(), known.values.values())):
        return known
    with torch.inference_mode(False), torch.no_grad():
        density, normals = family(), None
        if isinstance(density, Gaussian) and (is_matrix or density.P <= LARGEST_DENSE):
            normals = layer_outputs(density, known.layer.outputs, known.layer.order)
        kept = {} if is_matrix else {name: value.clone() for name, value in values.items()}
        known = _Known(known.layer, kept, density.mean.detach().clone(), normals)
    _known[posterior.model] = known
    return known


def _pass(posterior: "Posterior", layer: LastLayer, theta: Tensor, inputs: Any) -> Pass:
    return layer.run(lambda: (_call(posterior, theta, inputs), None))


def _call(posterior: "Posterior", theta: Tensor, inputs: Any) -> Any:
    """Return the network's output [B, ..] at one θ [P]; with `forward=` the inputs are a batch."""
    model, inputs = posterior.model, on_device(inputs, theta.device)
    with torch.no_grad(), posterior.network_mode(), model.linearised_around(None):
        if model.user_forward is not None:
            return model.call(model.space.unravel(theta), inputs)[0]
        output = model.outputs(theta.unsqueeze(0), inputs)
        return output[0] if isinstance(output, Tensor) else output
