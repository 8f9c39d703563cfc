"""From a trained network to a first posterior, and from a fitted posterior to a richer one, never worse."""

import copy
from collections.abc import Iterable
from math import log
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils._pytree import tree_leaves, tree_map

from .batches import Batches
from .estimate import Estimate, full_elbo
from .families.base import Family
from .families.blocks import Blocks
from .families.full import FullNormal
from .families.low_rank import normal
from .families.mean_field import MeanField
from .families.mixture import LOGIT_UNIT, Mixture
from .families.point import MAP
from .families.precision import StructuredPrecision
from .families.structured import StructuredNormal
from .history import FitResult
from .likelihoods import Gaussian, split_mask
from .random import borrowed_stream
from .targets import BayesianModel

if TYPE_CHECKING:
    from .variationalize import Posterior

#: Per-sample gradients are made for as many samples at once as fit into so many numbers.
GRADIENT_NUMBERS = 2**26
#: New columns of a factor start at this size, relative to its unit.
NEW_COLUMN = 0.01
#: What new parts of a mixture weigh together, to begin with.
NEW_WEIGHT = 0.1


def start_trained(posterior: "Posterior", batches: Batches) -> None:
    """Means at the network's present values, scales from a diagonal Fisher: s_i² = 1/(Σ_n (∂ log p_n/∂θ_i)² + π_i).

    One pass over the data. An unknown noise, "point" or "random", starts at the root mean square of the network's
    residuals, in a pass of its own: left at its initial value it would set the scales of all weights.
    π_i is the prior's precision, −∂² log p(θ)/∂θ_i² at the mean. Scales are at most the tensor's initialisation scale:
    a network that fits its data has an empirical Fisher near zero, and scales at the prior's forget what was trained
    (digits, mean field, 60 epochs: an ELBO of −1408 nats with that limit and −1837 without).
    """
    model = posterior.model
    tensors = dict(model.net.named_parameters())
    appended = model.space.unravel(model.space.initial)
    theta = model.space.ravel({name: tensors.get(name, appended[name]).detach() for name in model.space.names})
    theta = theta.to(next(posterior.parameters()).device)
    with posterior.network_mode():
        theta = _with_residual_noise(model, theta, batches.everything())
        information = diagonal_fisher(model, theta, batches.everything())
    prior = prior_precision(model, theta)
    scale = (information + prior).rsqrt().to(theta)
    scale = scale.minimum(model.space.scale.to(theta))
    _place(posterior.family, model.space.unravel(theta), model.space.unravel(scale))


@torch.no_grad()
def _with_residual_noise(model: BayesianModel, theta: Tensor, batches: Iterable[Any]) -> Tensor:
    """θ [P], and the likelihood, with an unknown Gaussian noise at the residuals' root mean square."""
    likelihood = model.likelihood
    if not isinstance(likelihood, Gaussian) or likelihood.noise not in ("point", "random"):
        return theta
    named = dict(model.space.unravel(theta.clone()))
    network = {name: tensor for name, tensor in named.items() if name not in model.likelihood_names}
    square, count = 0.0, 0
    for batch in batches:
        output, target = model.call(network, batch)
        t, mask = split_mask(target)
        residual = (t - output).double() if mask is None else (t - output)[mask].double()
        square, count = square + float(residual.square().sum()), count + residual.numel()
    log_noise = 0.5 * log(max(square / max(count, 1), torch.finfo(theta.dtype).tiny))
    if likelihood.noise == "point":
        likelihood.log_noise.fill_(log_noise)
        return theta
    for name in model.likelihood_names:
        named[name] = torch.full_like(named[name], log_noise)
    return model.space.ravel(named)


def diagonal_fisher(model: BayesianModel, theta: Tensor, batches: Iterable[Any]) -> Tensor:
    """Σ_n (∂ log p(t_n | x_n, θ)/∂θ_i)² at one θ [P], scaled to N observations: [P], float64.

    Gradients of single observations by `vmap(grad)`. For a network that vmap cannot run, squares of the gradients of
    whole batches instead: equal in expectation where the model is right and θ its optimum, since the gradients of
    different observations are then independent with mean zero.

    Example:
        >>> from structvi import NormalPrior, likelihoods
        >>> model = BayesianModel(torch.nn.Linear(1, 1), likelihoods.Gaussian(noise=1.0), NormalPrior(1.0), 2)
        >>> batch = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
        >>> diagonal_fisher(model, torch.zeros(2), [batch])
        tensor([73., 25.], dtype=torch.float64)
    """
    total = torch.zeros_like(theta, dtype=torch.float64)
    seen, together = 0, False

    def log_likelihood(row: Tensor, batch: Any) -> Tensor:
        return model.batch_log_likelihood(row.unsqueeze(0), batch)[0].squeeze(0)

    def of_one(row: Tensor, sample: Any) -> Tensor:
        return log_likelihood(row, tree_map(lambda x: x.unsqueeze(0), sample))

    each = vmap(grad(of_one), in_dims=(None, 0), randomness="different")
    chunk = max(1, GRADIENT_NUMBERS // theta.shape[0])
    for batch in batches:
        B = _rows(batch)
        if B is None:
            together = True
        if not together:
            try:
                for start in range(0, B or 0, chunk):
                    samples = tree_map(lambda x, start=start: x[start : start + chunk], batch)
                    total += each(theta, samples).double().square().sum(0)
            except (RuntimeError, NotImplementedError):
                if seen:
                    raise
                total.zero_()
                together = True
        if together:
            row = theta.detach().requires_grad_()
            with torch.enable_grad():
                value, B = model.batch_log_likelihood(row.unsqueeze(0), batch)
                (gradient,) = torch.autograd.grad(value.sum(), row)
            total += gradient.double().square()
        seen += B or 0
    return total * (model.num_data / seen)


def prior_precision(model: BayesianModel, theta: Tensor) -> Tensor:
    """−∂² log p(θ)/∂θ_i², no less than zero: [P], float64. Exact where weights are independent in the prior."""
    # v∘(Hv) for v = ±1 is the diagonal of a diagonal H, and has it as its mean for any H
    generator = torch.Generator().manual_seed(0)
    sign = torch.randint(2, theta.shape, generator=generator).to(theta) * 2 - 1
    row = theta.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(model.log_prior(row.unsqueeze(0)).sum(), row, create_graph=True)
        if not slope.requires_grad:
            return torch.zeros_like(theta, dtype=torch.float64)
        (product,) = torch.autograd.grad(slope @ sign, row)
    return (-sign * product).double().clamp(min=0.0)


@torch.no_grad()
def _place(family: Family, mean: dict[str, Tensor], scale: dict[str, Tensor]) -> None:
    """Put a family at a mean with these scales, both by tensor name."""
    if isinstance(family, Blocks):
        for part in family.blocks.values():
            _place(part, mean, scale)
        return
    if not isinstance(family, MeanField | StructuredNormal | StructuredPrecision | FullNormal | MAP):
        raise TypeError(
            f'start="trained" is for normal families, MAP and blocks of them, not for {type(family).__name__}; '
            "a mixture starts at several trained networks: Mixture.from_networks"
        )
    assert family.space is not None
    names = family.space.names
    centre = family.space.ravel({name: mean[name] for name in names})
    width = family.space.ravel({name: scale[name] for name in names})
    if hasattr(family, "sharded"):
        rows: slice = family.rows.slice  # pyright: ignore
        centre, width = centre[rows], width[rows]
    if isinstance(family, MAP):
        family.point.copy_(centre)
        return
    family.mean.copy_(centre)
    if isinstance(family, FullNormal):
        family.unit.copy_(width)
        family.log_diagonal.zero_()
        family.lower.zero_()
        return
    family.log_scale.copy_(width.log())
    if not isinstance(family, MeanField):
        family.unit.copy_(width)


def _rows(batch: Any) -> int | None:
    """The number of observations, where every leaf of the batch is a tensor with one row for each."""
    leaves = tree_leaves(batch)
    if not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        return None
    rows = {leaf.shape[0] for leaf in leaves}
    return rows.pop() if len(rows) == 1 else None


def grow(
    posterior: "Posterior",
    loader: Iterable[Any],
    *,
    rank: int | None = None,
    components: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    **options: Any,
) -> FitResult:
    """Give a fitted posterior more freedom and fit on; keep that only where its ELBO on common draws is not lower.

    With `rank` a normal's factor gets new columns, small ones: what was fitted is kept (a `MeanField` becomes a
    `StructuredNormal`). With `components` the posterior becomes the first part of a mixture, as in variational
    boosting, and the new parts, which weigh 0.1 together, start as copies of it, each at a draw from it.

    Args:
        posterior: fitted; its family is replaced where the grown one is kept.
        loader, device, options: as for `fit`.
        rank: the new rank, above the present one.
        components: the new number of parts, above the present one.
        seed: of all randomness.

    Returns:
        The fit's result, with "before" and "grown" in `candidates`, and `kept` saying which it was.

    Example:
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        >>> bayes = variationalize(torch.nn.Linear(3, 1), likelihoods.Gaussian(noise=1.0), MeanField())
        >>> _ = bayes.fit(loader, epochs=2, progress=False)
        >>> result = bayes.grow(loader, rank=2, epochs=2, progress=False)
        >>> result.candidates[result.kept].value >= result.candidates["before"].value
        True
    """
    if (rank is None) == (components is None):
        raise ValueError(f"give one of rank= and components=, got rank={rank!r} and components={components!r}")
    if "staged" in options or "start" in options:
        raise ValueError("grow goes on from a fitted posterior: it takes neither staged= nor start=")
    if device is not None:
        posterior.to(device)
    generator = torch.Generator().manual_seed(seed)
    old = posterior.family
    if rank is not None:
        grown = _with_rank(old, rank, generator)
    else:
        assert components is not None
        grown = _with_components(old, components, generator)
    others = {name: p for name, p in posterior.named_parameters() if not name.startswith("family.")}
    fitted = {name: p.detach().clone() for name, p in others.items()}
    batches = Batches(loader, seed, next(posterior.parameters()).device)
    before = _common(posterior, batches, seed)
    posterior.family = grown
    kept = False
    try:
        result = posterior.fit(loader, staged=False, seed=seed, **options)
        after = _common(posterior, batches, seed)
        kept = after.value >= before.value
    finally:
        if not kept:
            posterior.family = old
            with torch.no_grad():
                for name, parameter in others.items():
                    parameter.copy_(fitted[name])
    result.candidates = {"before": before, "grown": after}
    result.kept = "grown" if kept else "before"
    result.elbo = result.candidates[result.kept]
    result.comparison = f"{len(before.per_group)} groups of draws, all data"
    return result


def _common(posterior: "Posterior", batches: Batches, seed: int) -> Estimate:
    generator = torch.Generator(next(posterior.parameters()).device).manual_seed(seed + 1)
    stream = torch.Generator().manual_seed(seed + 2)
    with posterior.network_mode(), borrowed_stream(stream):
        return full_elbo(posterior.family, posterior.model, batches.everything(), groups=32, generator=generator)


@torch.no_grad()
def _with_rank(family: Family, rank: int, generator: torch.Generator) -> Family:
    if not isinstance(family, MeanField | StructuredNormal | StructuredPrecision) or family.space is None:
        raise TypeError(
            f"grow(rank=) is for MeanField, StructuredNormal and StructuredPrecision, not for {type(family).__name__}"
        )
    present = 0 if isinstance(family, MeanField) else family.rank
    if not isinstance(rank, int) or isinstance(rank, bool) or rank <= present:
        raise ValueError(f"the rank is {present} already: give an integer above that, got {rank!r}")
    recipe = StructuredPrecision(rank) if isinstance(family, StructuredPrecision) else StructuredNormal(rank)
    grown = recipe.bind(family.space, generator).to(family.mean.device)
    grown.mean.copy_(family.mean)
    grown.log_scale.copy_(family.log_scale)
    # no column yet, no unit yet: the present scales
    unit = family.log_scale.exp() if isinstance(family, MeanField) or not family.rank else family.unit
    grown.unit.copy_(unit)
    columns = NEW_COLUMN * normal((family.space.size, rank - present), unit, generator)
    grown.factor.copy_(columns if isinstance(family, MeanField) else torch.cat([family.factor, columns], dim=-1))
    return grown


@torch.no_grad()
def _with_components(family: Family, components: int, generator: torch.Generator) -> Mixture:
    parts = family.part if isinstance(family, Mixture) else [family]
    if not isinstance(components, int) or isinstance(components, bool) or components <= len(parts):
        raise ValueError(f"there are {len(parts)} parts already: give an integer above that, got {components!r}")
    new = components - len(parts)
    weights = family.logits.softmax(-1) if isinstance(family, Mixture) else parts[0]().mean.new_ones(1)
    if not family().bound:
        raise ValueError(
            "grow(components=) compares ELBOs, and this posterior has point masses: there is no bound to compare"
        )
    own = torch.Generator(weights.device).manual_seed(generator.initial_seed())
    added: list[Family] = []
    for origin in _origins(weights, new, generator):
        part = copy.deepcopy(parts[origin])
        _move(part, part().draw(1, generator=own).theta[0])
        added.append(part)
    mixture = Mixture([*copy.deepcopy(parts), *added])
    share = torch.cat([(1 - NEW_WEIGHT) * weights, weights.new_full((new,), NEW_WEIGHT / new)])
    mixture.raw_logits.copy_(share.log() / LOGIT_UNIT)
    return mixture


def _origins(weights: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Which part each new one copies its shape from."""
    return torch.multinomial(weights.double().cpu(), count, replacement=True, generator=generator).tolist()


def _move(family: Family, theta: Tensor) -> None:
    """The mean of a family to θ, its shape as it is."""
    if not isinstance(family, MeanField | StructuredNormal | StructuredPrecision | FullNormal):
        raise TypeError(
            f"grow(components=) is for normal families and mixtures of them, not for {type(family).__name__}"
        )
    family.mean.copy_(theta)
