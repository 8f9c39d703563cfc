"""The linearised network in function space: y(x) is normal, N(f(x; θ₀) + J(μ − θ₀), J Σ Jᵀ), without draws of weights.

A mixture of normals over the weights gives the mixture of these. With Gaussian noise that does not depend on y, p(t)
is in closed form too. Elsewhere y is drawn at evenly spread points, the same at every input. Joint predictions of
several inputs need draws of the weights. It is for few outputs: an input takes a backward pass for each of them.
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jacrev, vmap
from torch.utils._pytree import tree_leaves, tree_map

from ..families.mixture import Weighted, weighted_normals
from ..models.bayesian_model import BayesianModel, arguments_of, plain, taken
from ..networks.call import alone_with
from ..networks.plain_kernels import PlainKernels
from ..util.random_streams import seed_from
from .predictive import CHUNK, DRAWN_NUMBERS, DRAWS, Predictive, PredictiveDraws, evenly_spread, is_closed, on_device

if TYPE_CHECKING:
    from ..posterior import Posterior

#: points at which outputs are drawn; a power of two
POINTS = 256
#: numbers of Jacobians that are held at once on a GPU, which waits for Python otherwise: 2²⁸
ON_GPU = 268_435_456


class OutputMoments(NamedTuple):
    """Mean and covariance of the network's output y at every input, without noise of observations."""

    mean: Tensor  # [B, ..]
    covariance: Tensor  # [B, O, O], between the O outputs of one input, in the order of mean[b].flatten()


@torch.no_grad()
def output_moments(posterior: "Posterior", x: Any) -> OutputMoments:
    """Return mean and covariance of the linearised network's output at every input, exactly: J Σ Jᵀ.

    A linearised posterior is linearised at its θ₀, any other around its mean.

    Args:
        posterior: with a Gaussian family, or a mixture of such.
        x: as `predict` takes it.

    Example:
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> bayes = variationalize(torch.nn.Linear(3, 2), likelihoods.Categorical(), MeanField(), num_data=10)
        >>> mean, covariance = output_moments(bayes, torch.zeros(5, 3))
        >>> mean.shape, covariance.shape
        (torch.Size([5, 2]), torch.Size([5, 2, 2]))
    """
    theta, parts = _normals(posterior)
    if not parts:
        raise TypeError(
            "the outputs have a covariance in closed form for Gaussian families, and mixtures of them around one "
            f"point; {type(posterior.family).__name__} gives none: predict(x) draws from it"
        )
    means, covariances = _moments(posterior, theta, parts, x)
    weights = theta.new_tensor([one.weight for one in parts])
    mean = torch.tensordot(weights, means, dims=1)
    apart = (means - mean).reshape(*covariances.shape[:-1]).movedim(0, -1)  # [B, O, C]
    within = torch.tensordot(weights, covariances, dims=1)
    return OutputMoments(mean, within + (apart * weights) @ apart.mT)


class LinearisedDraws(PredictiveDraws):
    """The predictive of a linearised network with normals over its weights, at evenly spread points of its outputs.

    Args:
        posterior: one that `is_normal` says yes to.
        generator: of the points; the same ones at every call if None.
        members: of the ensemble whose member it is, which share the points.
    """

    def __init__(self, posterior: "Posterior", generator: torch.Generator | None = None, members: int = 1):
        self.posterior, self.note = posterior, "in function space"
        with torch.inference_mode(False), torch.no_grad():  # derivatives can be taken where they are asked for
            self.theta, self.parts = _normals(posterior)
        self.device = self.theta.device
        self.is_closed = is_closed(posterior.model.likelihood)
        share = POINTS >> (len(self.parts) * members - 1).bit_length()
        self.each = 1 if self.is_closed else max(share, DRAWS)
        self.draws = self.each * len(self.parts)
        (self.seed,) = (0,) if generator is None else seed_from(generator)

    def mixture(self, inputs: Any) -> Predictive:
        likelihood = self.posterior.model.likelihood
        weights = self.theta.new_tensor([one.weight for one in self.parts])
        with torch.inference_mode(False), torch.no_grad():
            means, covariances = _moments(self.posterior, self.theta, self.parts, _differentiable(inputs))
            if self.is_closed:
                variance = covariances.diagonal(dim1=-2, dim2=-1).clamp(min=0.0)
                within = variance.masked_fill(~variance.isfinite(), torch.nan).reshape(means.shape)
                return Predictive(means, weights, likelihood, {}, self.note, True, within)
            noise = evenly_spread(self.each, covariances.shape[-1], self.seed).to(self.device)
            drawn = normal_outputs(means.flatten(0, 1), covariances.flatten(0, 1), noise)  # [S, C·B, ..]
            outputs = drawn.unflatten(1, means.shape[:2]).movedim(1, 0).flatten(0, 1)
            values = self.posterior.model.likelihood_values(self.theta.expand(self.draws, -1))
            weights = weights.repeat_interleave(self.each) / self.each
            return Predictive(outputs, weights, likelihood, values, self.note, True)


def is_normal(posterior: "Posterior", inputs: Any) -> bool:
    """Return whether outputs, linearised, are normal at every input, few, and each of its own input alone.

    It is seen at four of the inputs. Nothing else may be random: no tensors of the likelihood, no dropout, no batch
    statistics.
    """
    model = posterior.model
    if model.user_forward is not None or model.likelihood_names or posterior.dropout == "on" or posterior.mixes_rows:
        return False
    with torch.inference_mode(False), torch.no_grad(), alone_with(posterior.net), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*batching rule")  # operations that vmap would take one by one
        theta, parts = _normals(posterior)
        # what is wrong with the inputs is said where the network is called with drawn weights
        try:
            leaves = tree_leaves(inputs := network_inputs(model, inputs))
            if not parts or parts[0].normal.P != len(theta) or len({len(leaf) for leaf in leaves}) != 1:
                return False
            some = torch.linspace(0, len(leaves[0]) - 1, min(4, len(leaves[0]))).round().long().tolist()
            rows = on_device(tree_map(lambda leaf: leaf[some], _differentiable(inputs)), theta.device)
            with posterior.network_mode(), model.linearised_around(None):
                y = model.outputs(theta.unsqueeze(0), rows)[0]
                if y[0].numel() > DRAWS or y[0].numel() * len(theta) * CHUNK > DRAWN_NUMBERS:
                    return False
                own, J = _at_once(model, theta, rows)
                moved = theta.clone()  # a tensor without a gradient may change outputs past `torch.no_grad()`
                for place in (model.space.slice(name) for name in model.space.names):
                    moved[place] += 0.0 if J[..., place].any() else 0.1
                if not torch.equal(model.outputs(moved.unsqueeze(0), rows)[0], y):
                    return False
        except (RuntimeError, NotImplementedError, TypeError, ValueError, LookupError, AttributeError, UserWarning):
            return False
    tolerance = 3 * torch.finfo(y.dtype).eps ** 0.5 * y.abs().max()
    return own.shape == y.shape and bool(((own - y).abs() <= tolerance).all())


def jacobians(posterior: "Posterior", theta: Tensor, x: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield f(x; θ) [b, ..] and its Jacobian [b, O, P] at one θ [P], a few rows of x at a time."""
    model = posterior.model
    if model.user_forward is not None:
        raise ValueError("with forward= the network's inputs are not known apart from its batch: use predict")
    if posterior.mixes_rows:
        raise ValueError("batch norm with a batch's own statistics makes an output depend on all of it: use predict")
    x = on_device(network_inputs(model, x), theta.device)
    with torch.no_grad(), posterior.network_mode(), model.linearised_around(None):
        first = _one(model, theta, tree_map(lambda leaf: leaf[0], x))
        numbers = ON_GPU if theta.is_cuda else DRAWN_NUMBERS
        chunk = max(1, numbers // max(1, first.numel() * theta.numel()))
        for start in range(0, len(tree_leaves(x)[0]), chunk):
            yield _at_once(model, theta, tree_map(lambda leaf, start=start: leaf[start : start + chunk], x))


def network_inputs(model: BayesianModel, x: Any) -> Any:
    """Return the inputs that the network is called with, a tuple or keywords: of a dict batch without all else."""
    if model.keys is not None and isinstance(x, Mapping):
        x = taken(x, model.keys[0])
    arguments, keywords = arguments_of(model.net, plain(x))
    return dict(keywords) or tuple(arguments)


def normal_outputs(mean: Tensor, covariance: Tensor, noise: Tensor) -> Tensor:
    """Return draws of y at every input: [b, ..], [b, O, O] and noise [S, O] → [S, b, ..].

    An input whose moments are not finite has NaN, and no other.
    """
    finite = covariance.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)  # [b, 1, 1]
    values, vectors = torch.linalg.eigh(torch.where(finite, covariance.double(), 0.0))
    root = vectors * torch.where(finite.squeeze(-1), values.clamp(min=0.0).sqrt(), torch.nan).unsqueeze(-2)  # [b, O, O]
    return mean + torch.einsum("boi,si->sbo", root, noise.double()).to(mean).reshape(-1, *mean.shape)


def _normals(posterior: "Posterior") -> tuple[Tensor, list[Weighted]]:
    """Return θ₀ [P], or the mean if the model has none, and the normals around it; of several means there are none."""
    density, at = posterior.family(), posterior.model.linearised_at
    parts = weighted_normals(density) if density.centred or at is not None else []
    mean = density.mean.detach()
    if at is None or len(at) == len(mean):
        return mean if at is None else at, parts
    return torch.cat([at, mean[len(at) :]]), parts


def _moments(posterior: "Posterior", theta: Tensor, parts: list[Weighted], x: Any) -> tuple[Tensor, Tensor]:
    """Mean [C, B, ..] and covariance [C, B, O, O] of the outputs under each normal."""
    means, covariances = [], []
    for y, J in jacobians(posterior, theta, x):
        means.append(torch.stack([y + (J @ (one.normal.mean - theta)).reshape(y.shape) for one in parts]))
        covariances.append(torch.stack([one.normal.between(J, J) for one in parts]))
    return torch.cat(means, 1), torch.cat(covariances, 1)


def _one(model: BayesianModel, theta: Tensor, inputs: Any) -> Tensor:
    """The output at one input."""
    output = model.outputs(theta.unsqueeze(0), tree_map(lambda leaf: leaf.unsqueeze(0), inputs))
    return output[0, 0]


def _at_once(model: BayesianModel, theta: Tensor, rows: Any) -> tuple[Tensor, Tensor]:
    def both(theta: Tensor, inputs: Any) -> tuple[Tensor, Tensor]:
        y = _one(model, theta, inputs)
        return y.flatten(), y

    with PlainKernels():  # fused attention has no batching rule
        J, y = vmap(jacrev(both, has_aux=True), in_dims=(None, 0))(theta, rows)
    return y, J


def _differentiable(inputs: Any) -> Any:
    """The inputs, those that were made in `torch.inference_mode()` as copies."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) and x.is_inference() else x, inputs)
