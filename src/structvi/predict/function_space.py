"""The linearised network in function space: y(x) is normal, with mean f(x; θ₀) + J(μ − θ₀) and covariance J Σ Jᵀ.

Of a mixture of normals over the weights it is the mixture of these.

Exact, and without draws, for outputs that are few: a row takes a backward pass for each of its outputs.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jacrev, vmap
from torch.quasirandom import SobolEngine
from torch.utils._pytree import tree_leaves, tree_map

from ..families.gaussian import Gaussian
from ..families.normal_parts import weighted_normals
from ..models.bayesian_model import BayesianModel
from ..networks.call import alone_with
from .draws import on_device

if TYPE_CHECKING:
    from ..posterior import Posterior

#: so many numbers of Jacobians are held at once; on a GPU more, which waits for Python otherwise
JACOBIAN_NUMBERS, ON_GPU = 2**26, 2**28
#: a network with at most so many outputs is looked at in function space
FEW_OUTPUTS = 48
#: rows that tell whether that is so
LOOKED_AT = 4


class OutputMoments(NamedTuple):
    """Of the network's output y at every input, the weights' posterior and nothing else: no noise of observations."""

    mean: Tensor  # [B, ..]
    covariance: Tensor  # [B, O, O], between the O outputs of one input, in the order of mean[b].flatten()


def output_moments(posterior: "Posterior", x: Any) -> OutputMoments:
    """Mean and covariance of the linearised network's output at every input, exactly: J Σ Jᵀ.

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
        theta = theta_of_linearisation(posterior, density.mean)
        means, covariances, shape = [], [], torch.Size()
        for y, J in jacobians(posterior, theta, x):
            shape = y.shape[1:]
            own = torch.stack([J @ (normal.mean - theta) for _, normal in parts])  # [C, b, O]
            weights = own.new_tensor([weight for weight, _ in parts]).view(-1, 1, 1)
            mean = (weights * own).sum(0)
            apart = (own - mean).movedim(0, -1)  # [b, O, C]
            within = sum(weight * normal.between(J, J) for weight, normal in parts)
            means.append(y.reshape(len(y), -1) + mean)
            covariances.append(within + (apart * weights.view(-1)) @ apart.mT)
        return OutputMoments(torch.cat(means).reshape(-1, *shape), torch.cat(covariances))


def theta_of_linearisation(posterior: "Posterior", mean: Tensor) -> Tensor:
    """θ₀ [P] of the whole space; where the model has none, the mean."""
    model = posterior.model
    if model.linearised_at is None:
        return mean.detach()
    return torch.cat([model.linearised_at, mean.detach()[model.net_space.size :]])


def jacobians(posterior: "Posterior", theta: Tensor, x: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """f(x; θ) [b, ..] and its Jacobian [b, O, P] at one θ [P], a few rows of x at a time."""
    model = posterior.model
    if model.user_forward is not None:
        raise ValueError("with forward= the network's inputs are not known apart from its batch: use predict")
    if posterior.mixes_rows:
        raise ValueError("batch norm with a batch's own statistics makes an output depend on all of it: use predict")
    x = on_device(x, theta.device)
    tensors = [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]
    if not tensors or any(leaf.ndim == 0 or leaf.shape[0] != tensors[0].shape[0] for leaf in tensors):
        raise ValueError(f"expected inputs [B, ..] of one B, got {[tuple(leaf.shape) for leaf in tensors]}")
    with torch.no_grad(), posterior.network_mode(), model.linearised_around(None):
        first = _one(model, theta, tree_map(lambda leaf: leaf[0], x))
        numbers = ON_GPU if theta.is_cuda else JACOBIAN_NUMBERS
        chunk = max(1, numbers // max(1, first.numel() * theta.numel()))
        for start in range(0, len(tensors[0]), chunk):
            rows = tree_map(lambda leaf, start=start: leaf[start : start + chunk], x)
            y, J = _jacobian(model, theta, rows)
            yield y, J


def _one(model: BayesianModel, theta: Tensor, inputs: Any) -> Tensor:
    """The output at one input."""
    batch = tree_map(lambda leaf: leaf.unsqueeze(0), inputs)
    output = model.outputs(theta.unsqueeze(0), batch)
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the network's output must be a tensor for its covariance in closed form, got {type(output).__name__}: "
            "use predict(x, linearise=True)"
        )
    return output[0, 0]


class Looked(NamedTuple):
    """Some rows of the inputs, and the network at them."""

    rows: Any
    y: Tensor  # [b, ..]
    J: Tensor  # [b, O, P]


def looked_at(posterior: "Posterior", theta: Tensor, x: Any, numbers: int) -> Looked | None:
    """f(x; θ) and its Jacobian at a few rows of x, where outputs are few, O ≤ `FEW_OUTPUTS` and O·P ≤ numbers.

    None where they are not, or Jacobians do not come for many rows at once. An output that depends on other rows, is
    random, or is no tensor, is not for this, nor weights that `torch.no_grad()` hides. The rows are spread over all:
    the first ones may be alike, or all zero.
    """
    leaves, model = tree_leaves(x), posterior.model
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == len(leaves[0]) for leaf in leaves):
        return None
    some = torch.linspace(0, len(leaves[0]) - 1, min(LOOKED_AT, len(leaves[0]))).round().long().tolist()
    rows = on_device(tree_map(lambda leaf: leaf[some], x), theta.device)
    with alone_with(posterior.net), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.no_grad(), posterior.network_mode(), model.linearised_around(None):
                y = vmap(lambda row: _one(model, theta, row))(rows)
                if y[0].numel() > FEW_OUTPUTS or y[0].numel() * theta.numel() > numbers:
                    return None
                _, J = _at_once(model, theta, rows)
                together = model.outputs(theta.unsqueeze(0), rows)[0]
                is_alone = together.shape == y.shape and is_near(together, y)  # no row depends on others
                if not is_alone or _hides(model, theta, rows, together, J):
                    return None
        except (RuntimeError, NotImplementedError, TypeError, ValueError, LookupError):
            return None  # what is wrong with the inputs is said where the network is called with drawn weights
    return None if any("batching rule" in str(one.message) for one in caught) else Looked(rows, y, J)


def _hides(model: BayesianModel, theta: Tensor, rows: Any, y: Tensor, J: Tensor) -> bool:
    """Whether some tensor changes the output and has no gradient: in `torch.no_grad()`, past which draws go."""
    generator = torch.Generator().manual_seed(0)
    for name in model.space.names:
        place = model.space.slice(name)
        if bool((J[..., place] == 0).all()):
            moved = theta.clone()
            moved[place] += 0.1 * torch.randn(moved[place].shape, generator=generator).to(theta)
            if not torch.equal(model.outputs(moved.unsqueeze(0), rows)[0], y):
                return True
    return False


def is_near(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding, relative to the largest."""
    tolerance = 3 * torch.finfo(b.dtype).eps ** 0.5
    return bool(((a - b).abs() <= tolerance * b.abs().max()).all())


def _jacobian(model: BayesianModel, theta: Tensor, rows: Any) -> tuple[Tensor, Tensor]:
    try:
        return _at_once(model, theta, rows)
    except (RuntimeError, NotImplementedError):  # what vmap or functorch cannot do
        return _one_by_one(model, theta, rows)


def _at_once(model: BayesianModel, theta: Tensor, rows: Any) -> tuple[Tensor, Tensor]:
    def both(theta: Tensor, inputs: Any) -> tuple[Tensor, Tensor]:
        y = _one(model, theta, inputs)
        return y.flatten(), y

    J, y = vmap(jacrev(both, has_aux=True), in_dims=(None, 0))(theta, rows)
    return y, J


def _one_by_one(model: BayesianModel, theta: Tensor, rows: Any) -> tuple[Tensor, Tensor]:
    found: list[tuple[Tensor, Tensor]] = []
    for b in range(next(len(leaf) for leaf in tree_leaves(rows) if isinstance(leaf, Tensor))):
        leaf = theta.detach().requires_grad_()
        with torch.enable_grad():
            y = _one(model, leaf, tree_map(lambda x, b=b: x[b], rows))
            J = [torch.autograd.grad(one, leaf, retain_graph=True)[0] for one in y.flatten()]
        found.append((y.detach(), torch.stack(J)))
    ys, Js = zip(*found, strict=True)
    return torch.stack(ys), torch.stack(Js)


def evenly_spread(points: int, size: int, seed: int) -> Tensor:
    """Normal noise [points, size], evenly spread: of as many independent draws the error is about five times as large.

    Example:
        >>> z = evenly_spread(256, 2, seed=0)
        >>> bool(z.mean().abs() < 0.01), bool((z.square().mean() - 1).abs() < 0.01)
        (True, True)
    """
    uniform = SobolEngine(size, scramble=True, seed=seed).draw(points, dtype=torch.float64)
    return torch.special.ndtri(uniform.clamp(1e-9, 1 - 1e-9))


def normals_outputs(moments: Sequence[tuple[Tensor, Tensor]], noise: Tensor) -> list[Tensor]:
    """`normal_outputs` of several normals at the same inputs, all at once: small matrices wait for each other else."""
    means, covariances = (torch.cat(part) for part in zip(*moments, strict=True))
    drawn = normal_outputs(means, covariances, noise)
    return list(drawn.unflatten(1, (len(moments), -1)).unbind(1))


def normal_outputs(mean: Tensor, covariance: Tensor, noise: Tensor) -> Tensor:
    """Draws of y at every input: [b, ..], [b, O, O] and noise [S, O] → [S, b, ..]. Inputs are not drawn together.

    An input whose moments are not finite has NaN, and no other.
    """
    finite = covariance.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)  # [b, 1, 1]
    values, vectors = torch.linalg.eigh(torch.where(finite, covariance.double(), 0.0))
    root = vectors * torch.where(finite.squeeze(-1), values.clamp(min=0.0).sqrt(), torch.nan).unsqueeze(-2)  # [b, O, O]
    return mean + torch.einsum("boi,si->sbo", root, noise.double()).to(mean).reshape(-1, *mean.shape)


def outputs_of_normals(
    posterior: "Posterior", theta: Tensor, normals: Sequence[Callable[[], Gaussian]], x: Any, noise: Tensor
) -> list[Tensor]:
    """Draws of the outputs of the network linearised at θ [P], [S, B, ..], for each of several normals over weights.

    The normals are made when they are needed: of many, one at a time is held. The Jacobians are those of all.
    """
    outputs: list[list[Tensor]] = [[] for _ in normals]
    for y, J in jacobians(posterior, theta, x):
        moments = []
        for make in normals:
            density = make()
            moments.append((y + (J @ (density.mean - theta)).reshape(y.shape), density.between(J, J)))
        for rows, drawn in zip(outputs, normals_outputs(moments, noise), strict=True):
            rows.append(drawn)
    return [torch.cat(rows, 1) for rows in outputs]
