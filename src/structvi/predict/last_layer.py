"""A posterior over the last layer in function space: its outputs are normal, and one pass of the network gives them.

The network runs once at the mean, y = M φ. The features φ that come to the layer give the covariance of y at every
input. Labels are averaged over evenly spread points of y, the same at every input.
"""

import copy
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..families.gaussian import Gaussian
from ..families.matrix_normal import OutputNormals, layer_outputs, matrix_normal
from ..models.bayesian_model import BayesianModel
from ..models.likelihoods import Categorical
from ..networks.last_layer import LastLayer, Pass
from ..util.random_streams import seed_from
from .linearised import POINTS
from .network_at import network_at
from .predictive import DRAWS, Predictive, PredictiveDraws, evenly_spread, is_closed, on_device

if TYPE_CHECKING:
    from ..posterior import Posterior

#: numbers of a layer up to which a family other than `MatrixNormal` gives the covariance of the outputs
LARGEST_DENSE = 2048
#: layers whose output is the network's own; None for a posterior that is over no such layer
known_layers: "WeakKeyDictionary[BayesianModel, LastLayer | None]" = WeakKeyDictionary()


class LastLayerDraws(PredictiveDraws):
    """The predictive of a posterior over the last layer, at evenly spread points of its outputs.

    Args:
        posterior: that `known_layer` knows.
        generator: of the points; the same ones at every call if None.
    """

    def __init__(self, posterior: "Posterior", generator: torch.Generator | None = None):
        layer = known_layers[posterior.model]
        assert layer is not None
        self.posterior, self.layer, self.note = posterior, layer, "one pass of the network"
        with torch.inference_mode(False), torch.no_grad():
            self.density: Any = posterior.family()
            self.mean = self.density.mean.detach().clone()
            self.normals = layer_outputs(self.density, layer.outputs, layer.order)
        self.device = self.mean.device
        self.draws = 1 if is_closed(posterior.model.likelihood) else _points(layer)
        (self.seed,) = (0,) if generator is None else seed_from(generator)

    @torch.no_grad()
    def passed(self, inputs: Any) -> tuple[Pass, OutputNormals]:
        """Return one pass of the network at the mean, and the normals of its outputs at the inputs."""
        at = network_at(self.posterior, self.mean, inputs)
        if at is None:
            here = _pass(self.posterior, self.layer, self.mean, inputs)
        else:
            layer = copy.copy(self.layer)
            layer.layer = at.net.get_submodule(layer.name)  # pyright: ignore[reportAttributeAccessIssue]
            with at.lock:
                here = layer.run(lambda: (at(inputs), None))
        return here, self.normals(here.features)

    def mixture(self, inputs: Any) -> Predictive:
        here, normals = self.passed(inputs)
        return predictive(self.posterior.model.likelihood, self.layer, here.output, normals, self.seed, self.note)


@torch.no_grad()
def predictive(
    likelihood: Any, layer: LastLayer, mean: Tensor, normals: OutputNormals, seed: int = 0, note: str = ""
) -> Predictive:
    """Return the predictive of normal outputs of a layer around their mean [B, ..], at evenly spread points."""
    if is_closed(likelihood):
        within = layer.as_output(normals.variance, mean).unsqueeze(0)
        return Predictive(mean.unsqueeze(0), mean.new_ones(1), likelihood, {}, note, True, within)
    if isinstance(likelihood, Categorical) and layer.outputs > POINTS:  # many classes: no product with all axes
        normals = normals.centred
    S = _points(layer) if len(normals.along) == len(mean) else DRAWS
    outputs = mean + layer.as_output(normals.draw(evenly_spread(S, layer.outputs, seed).to(mean)), mean)
    return Predictive(outputs, mean.new_full((S,), 1 / S), likelihood, {}, note, True)


def _points(layer: LastLayer) -> int:
    """Return how many points there are: fewer of many outputs, for memory."""
    return POINTS if layer.outputs <= DRAWS else DRAWS


def known_layer(posterior: "Posterior", inputs: Any) -> LastLayer | None:
    """Return the layer over which the posterior is, if the network's output is that layer's own; else None.

    It is looked at once, at these inputs and two values of the layer.
    """
    model, family = posterior.model, posterior.family
    if model not in known_layers:
        if posterior.dropout == "on" or posterior.mixes_rows:
            return None
        try:
            layer = layer_of(posterior)
        except ValueError:  # it is over other tensors
            layer = None
        if layer is None or model.likelihood_names:
            known_layers[model] = None
            return None
        theta = family().mean.detach()
        try:
            here = _pass(posterior, layer, theta, inputs)
            layer.checked(here, lambda own: (_call(posterior, own, inputs), None), theta)
        except (ValueError, TypeError):  # what is wrong with the inputs is said where weights are drawn
            return None
        remember(posterior, layer)
    density = family()
    is_small = matrix_normal(family) is not None or density.P <= LARGEST_DENSE
    return known_layers[model] if isinstance(density, Gaussian) and is_small else None


def layer_of(posterior: "Posterior") -> LastLayer:
    """Return the one layer that is random; raise if other tensors are random too."""
    model = posterior.model
    return LastLayer(model.net, model.net_space, isinstance(model.likelihood, Categorical))


def remember(posterior: "Posterior", layer: LastLayer) -> None:
    """Keep a layer that was checked."""
    known_layers[posterior.model] = layer


def _pass(posterior: "Posterior", layer: LastLayer, theta: Tensor, inputs: Any) -> Pass:
    return layer.run(lambda: (_call(posterior, theta, inputs), None))


@torch.no_grad()
def _call(posterior: "Posterior", theta: Tensor, inputs: Any) -> Any:
    """Return the network's output [B, ..] at one θ [P]; with `forward=` the inputs are a batch."""
    model, inputs = posterior.model, on_device(inputs, theta.device)
    with posterior.network_mode(), model.linearised_around(None):
        if model.user_forward is not None:
            return model.call(model.space.unravel(theta), inputs)[0]
        output = model.outputs(theta.unsqueeze(0), inputs)
        return output[0] if isinstance(output, Tensor) else output
