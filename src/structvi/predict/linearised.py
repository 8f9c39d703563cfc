"""The linearised network in function space: y(x) is normal, N(f(x; θ₀) + J(μ − θ₀), J Σ Jᵀ), without draws of weights.

Of a mixture of normals over the weights it is the mixture of these. With Gaussian noise that does not depend on y, p(t)
is in closed form too. Elsewhere y is drawn at evenly spread points, the same at every input. How inputs go together
this does not tell. It is for few outputs: an input takes a backward pass for each of them.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jacrev, vmap
from torch.utils._pytree import tree_leaves, tree_map

from ..families.gaussian import Gaussian
from ..families.mixture import weighted_normals
from ..models.bayesian_model import BayesianModel, arguments_of, plain, taken
from ..models.likelihoods import Gaussian as GaussianNoise
from ..networks.call import alone_with
from ..networks.plain_kernels import PlainKernels
from ..util.random_streams import seed_from
from .predictive import Predictive, PredictiveDraws, evenly_spread, on_device

if TYPE_CHECKING:
    from ..posterior import Posterior

#: points at which outputs are drawn, in all, and at least for each normal of a mixture; powers of two
POINTS, FEWEST = 256, 32
#: outputs O of an input, and numbers O·P of its Jacobian, beyond which weights are drawn instead
FEW_OUTPUTS, MOST_NUMBERS = 48, 2**22
#: numbers of Jacobians that are held at once, on a CPU and on a GPU, which waits for Python otherwise
JACOBIAN_NUMBERS, ON_GPU = 2**26, 2**28


class OutputMoments(NamedTuple):
    """Mean and covariance of the network's output y at every input, without noise of observations."""

    mean: Tensor  # [B, ..]
    covariance: Tensor  # [B, O, O], between the O outputs of one input, in the order of mean[b].flatten()


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
    density = posterior.family()
    with torch.no_grad():
        parts = weighted_normals(density) if density.centred or posterior.model.linearised_at is not None else []
        if not parts:
            raise TypeError(
                "the outputs have a covariance in closed form for Gaussian families, and mixtures of them around one "
                f"point; {type(density).__name__} is none: predict(x) draws from it"
            )
        theta = _theta(posterior, density.mean)
        weights = torch.stack([density.mean.new_tensor(one.weight) for one in parts]).view(-1, 1, 1)
        means, covariances = [], []
        for y, J in jacobians(posterior, theta, x):
            moments = [_moments(one.normal, theta, y, J) for one in parts]
            own = torch.stack([mean.reshape(len(y), -1) for mean, _ in moments])  # [C, b, O]
            mean = (weights * own).sum(0)
            apart = (own - mean).movedim(0, -1)  # [b, O, C]
            within = sum(one.weight * covariance for one, (_, covariance) in zip(parts, moments, strict=True))
            means.append(mean.reshape(y.shape))
            covariances.append(within + (apart * weights.view(-1)) @ apart.mT)
        return OutputMoments(torch.cat(means), torch.cat(covariances))


class LinearisedDraws(PredictiveDraws):
    """The predictive of a linearised network with normals over its weights, at evenly spread points of its outputs.

    Args:
        posterior: one that `is_normal` says yes to.
        generator: of the points; the same ones at every call if None.
        points: how many, a share for each normal of a mixture.
    """

    def __init__(self, posterior: "Posterior", generator: torch.Generator | None = None, points: int = POINTS):
        self.posterior, self.note = posterior, "in function space"
        with _derivatives():
            density = posterior.family()
            self.parts = weighted_normals(density)
            self.theta = _theta(posterior, density.mean)
        self.device = self.theta.device
        likelihood = posterior.model.likelihood
        #: whether the noise leaves p(t) a mixture of normals
        self.is_closed = type(likelihood) is GaussianNoise and likelihood.noise not in ("head", "random")
        share = max(FEWEST, points // 2 ** (len(self.parts) - 1).bit_length())
        self.each = 1 if self.is_closed else share if len(self.parts) > 1 else points
        self.draws = self.each * len(self.parts)
        (self.seed,) = (0,) if generator is None else seed_from(generator)

    def mixture(self, inputs: Any) -> Predictive:
        model = self.posterior.model
        weights = self.theta.new_tensor([one.weight for one in self.parts]).repeat_interleave(self.each) / self.each
        outputs, within = [], []
        with _derivatives():
            noise: Tensor | None = None
            for y, J in jacobians(self.posterior, self.theta, _differentiable(inputs)):
                means, covariances = zip(*[_moments(one.normal, self.theta, y, J) for one in self.parts], strict=True)
                if self.is_closed:
                    variance = torch.stack([one.diagonal(dim1=-2, dim2=-1) for one in covariances]).clamp(min=0.0)
                    outputs.append(torch.stack(means))
                    within.append(variance.masked_fill(~variance.isfinite(), torch.nan).reshape(outputs[-1].shape))
                    continue
                noise = evenly_spread(self.each, J.shape[1], self.seed).to(self.device) if noise is None else noise
                drawn = normal_outputs(torch.cat(means), torch.cat(covariances), noise)
                outputs.append(torch.cat(drawn.unflatten(1, (len(self.parts), -1)).unbind(1)))
            values = model.likelihood_values(self.theta.unsqueeze(0).expand(self.draws, -1))
            return Predictive(
                torch.cat(outputs, 1), weights, model.likelihood, values, self.note, True,
                torch.cat(within, 1) if self.is_closed else None,
            )  # fmt: skip


def is_normal(posterior: "Posterior", inputs: Any) -> bool:
    """Return whether outputs, linearised, are normal at every input, few, and each of its own input alone.

    It is seen at four of the inputs. Nothing else may be random: no tensors of the likelihood, no dropout, no batch
    statistics.
    """
    model = posterior.model
    if model.user_forward is not None or posterior.dropout == "on" or posterior.mixes_rows:
        return False
    with _derivatives():
        density = posterior.family()
        has_centre = density.centred or model.linearised_at is not None
        P = density.P
        if not has_centre or not weighted_normals(density) or not P == model.space.size == model.net_space.size:
            return False
        inputs = network_inputs(model, inputs)
        theta, leaves = _theta(posterior, density.mean), tree_leaves(inputs)
        if not leaves or not all(isinstance(x, Tensor) and x.ndim and len(x) == len(leaves[0]) > 0 for x in leaves):
            return False
        some = torch.linspace(0, len(leaves[0]) - 1, min(4, len(leaves[0]))).round().long().tolist()
        rows = on_device(tree_map(lambda leaf: leaf[some], _differentiable(inputs)), theta.device)
        with alone_with(posterior.net), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with posterior.network_mode(), model.linearised_around(None):
                    y = model.outputs(theta.unsqueeze(0), rows)[0]
                    if y[0].numel() > FEW_OUTPUTS or y[0].numel() * P > MOST_NUMBERS:
                        return False
                    own, J = _at_once(model, theta, rows)
                    moved = theta.clone()  # a tensor without a gradient may change outputs past `torch.no_grad()`
                    for place in (model.space.slice(name) for name in model.space.names):
                        if not J[..., place].any():
                            moved[place] += 0.1
                    if not torch.equal(model.outputs(moved.unsqueeze(0), rows)[0], y):
                        return False
            # what is wrong with the inputs is said where the network is called with drawn weights
            except (RuntimeError, NotImplementedError, TypeError, ValueError, LookupError, AttributeError):
                return False
        slow = any("batching rule" in str(one.message) for one in caught)
        tolerance = 3 * torch.finfo(y.dtype).eps ** 0.5 * y.abs().max()
        return not slow and own.shape == y.shape and bool(((own - y).abs() <= tolerance).all())


def jacobians(posterior: "Posterior", theta: Tensor, x: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield f(x; θ) [b, ..] and its Jacobian [b, O, P] at one θ [P], a few rows of x at a time."""
    model = posterior.model
    if model.user_forward is not None:
        raise ValueError("with forward= the network's inputs are not known apart from its batch: use predict")
    if posterior.mixes_rows:
        raise ValueError("batch norm with a batch's own statistics makes an output depend on all of it: use predict")
    x = on_device(network_inputs(model, x), theta.device)
    tensors = [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]
    if not tensors or any(leaf.ndim == 0 or leaf.shape[0] != tensors[0].shape[0] for leaf in tensors):
        raise ValueError(f"expected inputs [B, ..] of one B, got {[tuple(leaf.shape) for leaf in tensors]}")
    with torch.no_grad(), posterior.network_mode(), model.linearised_around(None):
        first = _one(model, theta, tree_map(lambda leaf: leaf[0], x))
        numbers = ON_GPU if theta.is_cuda else JACOBIAN_NUMBERS
        chunk = max(1, numbers // max(1, first.numel() * theta.numel()))
        for start in range(0, len(tensors[0]), chunk):
            rows = tree_map(lambda leaf, start=start: leaf[start : start + chunk], x)
            yield _at_once(model, theta, rows)


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


def _moments(normal: Gaussian, theta: Tensor, y: Tensor, J: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [b, ..] and covariance [b, O, O] of the outputs under one normal."""
    return y + (J @ (normal.mean - theta)).reshape(y.shape), normal.between(J, J)


def _theta(posterior: "Posterior", mean: Tensor) -> Tensor:
    """θ₀ [P] of the whole space; where the model has none, the mean."""
    model = posterior.model
    if model.linearised_at is None:
        return mean.detach()
    return torch.cat([model.linearised_at, mean.detach()[model.net_space.size :]])


def _one(model: BayesianModel, theta: Tensor, inputs: Any) -> Tensor:
    """The output at one input."""
    output = model.outputs(theta.unsqueeze(0), tree_map(lambda leaf: leaf.unsqueeze(0), inputs))
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the network's output must be a tensor for its covariance in closed form, got {type(output).__name__}: "
            "use predict(x, linearise=True)"
        )
    return output[0, 0]


def _at_once(model: BayesianModel, theta: Tensor, rows: Any) -> tuple[Tensor, Tensor]:
    def both(theta: Tensor, inputs: Any) -> tuple[Tensor, Tensor]:
        y = _one(model, theta, inputs)
        return y.flatten(), y

    with PlainKernels():  # fused attention has no batching rule
        J, y = vmap(jacrev(both, has_aux=True), in_dims=(None, 0))(theta, rows)
    return y, J


@contextmanager
def _derivatives() -> Iterator[None]:
    """Inside, derivatives can be taken where they are asked for, also by one who called in `torch.inference_mode()`."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _differentiable(inputs: Any) -> Any:
    """The inputs, those that were made in `torch.inference_mode()` as copies."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) and x.is_inference() else x, inputs)
