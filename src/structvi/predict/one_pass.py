"""Predictions from one forward pass of the network: with a learned variance, or a posterior over its last layer.

The network runs once at the mean. With a learned variance y is N(f(x), v(x)). Over the last layer y = M φ, and the
features φ that come to the layer give the covariance of y at every input. A small network is called at the price of
its pass: a copy that shares its tensors is kept.
"""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..families.gaussian import Gaussian
from ..families.matrix_normal import OutputNormals, layer_outputs, matrix_normal
from ..models.bayesian_model import BayesianModel, logits_of
from ..models.likelihoods import Bernoulli, Categorical
from ..networks.last_layer import LAYERS, LastLayer
from ..networks.learned_variance import OnePass
from ..networks.out_of_distribution import OutOfDistribution
from ..util.random_streams import seed_from
from .linearised import POINTS, network_inputs
from .predictive import DRAWS, Predictive, PredictiveDraws, evenly_spread, is_closed, on_device

if TYPE_CHECKING:
    from ..posterior import Posterior

#: training rows whose features tell how the data look; of more features than rows there is no covariance
TYPICAL_ROWS = 5000
#: numbers of a layer up to which a family other than `MatrixNormal` gives the covariance of the outputs
LARGEST_DENSE = 2048
#: layers whose output is the network's own; None for a posterior that is over no such layer
known_layers: "WeakKeyDictionary[BayesianModel, LastLayer | None]" = WeakKeyDictionary()


class NetworkAt:
    """The network of a posterior with views of θ [P] in place of its random tensors, and all others shared."""

    def __init__(self, posterior: "Posterior", theta: Tensor):
        self.model, self.theta, self.lock = posterior.model, theta, threading.Lock()
        with torch.inference_mode(False), torch.no_grad(), posterior.network_mode() as net:
            self.modules = list(net.modules())
            holders = [holder for one in self.modules for holder in (one._parameters, one._buffers, one._modules)]
            self.places = [(holder, key, value) for holder in holders for key, value in holder.items()]
            named = self.model.with_padding(self.model.net_space.unravel(theta))
            shared: dict[int, Any] = {id(tensor): tensor for tensor in (*net.parameters(), *net.buffers())}
            shared |= {id(p): nn.Parameter(named[name], False) for name, p in net.named_parameters() if name in named}
            self.net = copy.deepcopy(net, shared)

    def is_of(self, theta: Tensor) -> bool:
        """Return whether θ has its values, and the network the same modules and tensors as before, without hooks."""
        same = self.theta is theta or torch.equal(self.theta, theta)
        same = same and all(holder.get(key) is value for holder, key, value in self.places)
        return same and not any(one._forward_hooks or one._forward_pre_hooks for one in self.modules)

    def __call__(self, inputs: Any) -> Any:
        """Return the network's output [B, ..]; the caller holds the lock."""
        given = network_inputs(self.model, on_device(inputs, self.theta.device))
        with torch.no_grad():
            return logits_of(self.net(**given) if isinstance(given, dict) else self.net(*given))


_KEPT: "WeakKeyDictionary[Posterior, NetworkAt | None]" = WeakKeyDictionary()


@contextmanager
def network_at(posterior: "Posterior", theta: Tensor, inputs: Any) -> Iterator[tuple[nn.Module, Callable[[], Any]]]:
    """Give the network at θ, and what calls it: a copy that is kept, or its own if a copy is not the same network."""
    kept = _kept(posterior, theta, inputs)
    if kept is None:
        yield posterior.net, lambda: output_at(posterior, theta, inputs)
    else:
        with kept.lock:
            yield kept.net, lambda: kept(inputs)


@torch.no_grad()
def output_at(posterior: "Posterior", theta: Tensor, inputs: Any) -> Any:
    """Return the network's output [B, ..] at one θ [P], by its own modules; with `forward=` the inputs are a batch."""
    model, inputs = posterior.model, on_device(inputs, theta.device)
    with posterior.network_mode(), model.linearised_around(None):
        if model.user_forward is not None:
            return model.call(model.net_space.unravel(theta[: model.net_space.size]), inputs)[0]
        return pytree.tree_map(lambda leaf: leaf[0], model.outputs(theta.unsqueeze(0), inputs))


def _kept(posterior: "Posterior", theta: Tensor, inputs: Any) -> NetworkAt | None:
    """Return the copy at θ, kept from the last call; None if a copy is not the same network."""
    kept = _KEPT.get(posterior)
    if posterior.model.precision is not None or (posterior in _KEPT and kept is None):
        return None
    if kept is not None and kept.is_of(theta):
        return kept
    if any(one._forward_hooks or one._forward_pre_hooks for one in posterior.net.modules()):
        return None
    _KEPT[posterior] = made = NetworkAt(posterior, theta) if _is_copied_whole(posterior, theta, inputs) else None
    return made


def _is_copied_whole(posterior: "Posterior", theta: Tensor, inputs: Any) -> bool:
    """Return whether a copy gives at another θ what the network does: a function may know a layer by itself."""
    model = posterior.model
    of_torch = [
        one.forward.__module__.startswith("torch.nn.modules.") for one in posterior.net.modules() if one._buffers
    ]
    if model.user_forward is not None or posterior.dropout == "on" or posterior.mixes_rows or not all(of_torch):
        return False
    there = theta + 0.1 * theta.abs().mean()
    expected = output_at(posterior, there, inputs)
    try:
        return torch.equal(NetworkAt(posterior, there)(inputs), expected)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):  # a network that cannot be copied
        return False


# -------------------------------------------------------------------------------- a learned variance


@torch.no_grad()
def _called(posterior: "Posterior", theta: Tensor, inputs: Any, name: str | None) -> tuple[Any, str, nn.Module, Any]:
    """Return the output at θ [P], and name, module and input of this layer; without a name of the one called last."""
    calls: list[Any] = []
    with network_at(posterior, theta, inputs) as (net, call):
        layers = net.named_modules() if name is None else [(name, net.get_submodule(name))]
        hooks = [
            layer.register_forward_pre_hook(lambda layer, given, own=own: calls.append((own, layer, given[0])))
            for own, layer in layers
            if isinstance(layer, LAYERS)
        ]
        try:
            y = call()
        finally:
            for hook in hooks:
                hook.remove()
    own, layer, features = calls[-1] if calls else ("", net, None)
    return y, own, layer, features


def one_pass(posterior: "Posterior", theta: Tensor, inputs: Any, name: str) -> OnePass:
    """Return what the network's forward pass at θ [P] tells, with the features of a layer of this name."""
    y, _, layer, features = _called(posterior, theta, inputs, name)
    return OnePass.of(y, layer, features, _is_classes(posterior))


def last_layer(posterior: "Posterior", theta: Tensor, inputs: Any) -> str | None:
    """Return the name of the linear layer or convolution that is called last; None if there is none."""
    y, name, _, features = _called(posterior, theta, inputs, None)
    return None if features is None or not isinstance(y, Tensor) else name


def out_of_distribution(
    posterior: "Posterior", theta: Tensor, train: Iterable[Any], held_out: Iterable[Any]
) -> OutOfDistribution | None:
    """Return the score of inputs unlike the data, for the network at θ [P]; None if no layer tells features."""
    model, layer, found = posterior.model, None, []
    for batches in (train, held_out):
        passes: list[OnePass] = []
        for batch in batches:
            inputs = model.split(batch)[0]
            layer = last_layer(posterior, theta, inputs) if layer is None else layer
            if layer is None:
                return None
            passes.append(one_pass(posterior, theta, inputs, layer))
            if not found and sum(len(one.output) for one in passes) >= TYPICAL_ROWS:
                break
        found.append(passes)
    first = found[0][0]
    classes = first.output.shape[1] if _is_classes(posterior) else 1
    is_wide = first.pooled(classes)[0].shape[1] > TYPICAL_ROWS
    return None if is_wide else OutOfDistribution.fitted(layer or "", classes, *found)


def ood_scores(posterior: "Posterior", inputs: Any) -> tuple[Tensor, Tensor]:
    """Return how unlike the data inputs are, [B], and the threshold: one pass of the network at the mean."""
    assert posterior.ood is not None
    theta = posterior.family().mean.detach()
    one = one_pass(posterior, theta, inputs, posterior.ood.layer)
    return posterior.ood(one), posterior.ood.threshold


def variance_of_draws(posterior: "Posterior", deviations: Tensor) -> Tensor:
    """Return variances in the shape of outputs from draws around a known mean, [S, B, ..]; of classes one, [B, 1, ..].

    For classes it is the mean over pairs of half the variance of their difference.
    """
    if not _is_classes(posterior):
        return deviations.square().mean(0)
    centred = deviations - deviations.mean(2, keepdim=True)
    return centred.square().sum(2, keepdim=True).mean(0) / (deviations.shape[2] - 1)


def predictive_of(output: Tensor, variance: Tensor, likelihood: Any, note: str = "") -> Predictive:
    """Return the predictive of normal outputs [B, ..] with known variances, those of `LearnedVariance`.

    It is in closed form for Gaussian noise that does not depend on y, a probit approximation for labels, and an average
    over points of y else.
    """
    ones, variance = output.new_ones(1), variance.to(output)
    if isinstance(likelihood, Categorical | Bernoulli) or is_closed(likelihood):
        return Predictive(output.unsqueeze(0), ones, likelihood, {}, note, True, variance.unsqueeze(0))
    z = evenly_spread(DRAWS, 1, 0).to(output).reshape(-1, *[1] * output.ndim)
    return Predictive(output + variance.sqrt() * z, ones.repeat(DRAWS) / DRAWS, likelihood, {}, note, True)


class LearnedDraws(PredictiveDraws):
    """The predictive of a linearised posterior with its learned variance: one forward pass, and no draws.

    Args:
        posterior: with a `learned_variance`.
    """

    def __init__(self, posterior: "Posterior"):
        self.posterior, self.note, self.draws = posterior, "learned variance", 1
        learned, theta = posterior.learned_variance, posterior.model.linearised_at
        assert learned is not None
        assert theta is not None
        self.learned, self.theta, self.device = learned, theta, theta.device

    def mixture(self, inputs: Any) -> Predictive:
        with torch.inference_mode(False), torch.no_grad():
            one = one_pass(self.posterior, self.theta, inputs, self.learned.layer)
            return predictive_of(one.output, self.learned(one), self.posterior.model.likelihood, self.note)


def _is_classes(posterior: "Posterior") -> bool:
    return isinstance(posterior.model.likelihood, Categorical)


# -------------------------------------------------------------------------------- the last layer


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
            density: Any = posterior.family()
            self.mean = density.mean.detach().clone()
            self.normals = layer_outputs(density, layer.outputs, layer.order)
        self.device = self.mean.device
        self.draws = 1 if is_closed(posterior.model.likelihood) else _points(layer)
        (self.seed,) = (0,) if generator is None else seed_from(generator)

    @torch.no_grad()
    def mixture(self, inputs: Any) -> Predictive:
        layer = copy.copy(self.layer)
        with network_at(self.posterior, self.mean, inputs) as (net, call):
            layer.layer = net.get_submodule(layer.name)  # pyright: ignore[reportAttributeAccessIssue]
            here = layer.run(lambda: (call(), None))
        likelihood, normals = self.posterior.model.likelihood, self.normals(here.features)
        return predictive(likelihood, layer, here.output, normals, self.seed, self.note)


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
            here = layer.run(lambda: (output_at(posterior, theta, inputs), None))
            layer.checked(here, lambda own: (output_at(posterior, own, inputs), None), theta)
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
