"""From a posterior to predictions: the network at S weighted draws, chunk by chunk."""

import copy
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from .couplings import Coupling, naive
from .evaluation import training_key
from .families.base import Density, Draws, check_draw
from .families.mixture import MixtureDensity
from .families.point import PointMass
from .predictive import Predictive
from .random import borrowed_stream

if TYPE_CHECKING:
    from .variationalize import Posterior


class DrawChunks:
    """The same S weighted draws of a posterior, chunk by chunk and as often as asked: each is made from a kept seed.

    Args:
        posterior: what to draw from.
        draws: at least so many: S is the next whole number of the coupling's groups. Families with finitely many
            states (MAP, ensembles, enumerated masks) give each of them once, with its weight.
        coupling: how the draws of a group share noise.
        chunk: how many draws are held at once, rounded to whole groups.
        reference: inputs whose statistics batch norm uses, with batch_norm="reestimated".
        generator: of the seeds.
    """

    def __init__(
        self,
        posterior: "Posterior",
        draws: int,
        coupling: Coupling,
        chunk: int,
        reference: Any = None,
        generator: torch.Generator | None = None,
    ):
        for name, value in (("draws", draws), ("chunk", chunk)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                came = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ValueError(f"{name} must be an integer ≥ 1, got {came}")
        check_draw(1, coupling, generator)
        if posterior.batch_norm == "reestimated" and reference is None:
            raise ValueError(
                'batch_norm="reestimated" takes the statistics of a batch, for every draw anew, and the inputs to be '
                "predicted are not to be their own reference: give reference=, inputs of the training data"
            )
        if posterior.batch_norm != "reestimated" and reference is not None:
            raise ValueError(f'reference= is for batch_norm="reestimated"; here it is {posterior.batch_norm!r}')
        self.posterior, self.coupling, self.reference = posterior, coupling, reference
        with torch.no_grad():
            self.density = posterior.family()
            self.device = self.density.mean.device
            # how many draws a group has shows in drawing one
            probe = self.density.draw(1, coupling, torch.Generator(self.device).manual_seed(0))
        size = probe.weight.shape[0]
        finite = _finite(self.density) and posterior.dropout == "off"
        groups = 1 if finite else ceil(draws / size)
        most = 1 if self.density.enumerates else max(1, chunk // size)
        self.groups = [min(most, groups - start) for start in range(0, groups, most)]
        self.draws = groups * size
        self.note = f"{draws} asked for, whole groups of {size} taken" if self.draws != draws else ""
        if finite:
            self.note = f"{draws} asked for, the family has {size} states" if size != draws else ""
        device = None if generator is None else generator.device
        seeds = torch.randint(2**62, (len(self.groups),), generator=generator, device=device)
        self.seeds: list[int] = seeds.tolist()

    def __len__(self) -> int:
        return len(self.groups)

    def share(self, index: int) -> float:
        """The weight of all draws of a chunk together."""
        return self.groups[index] / sum(self.groups)

    def predictive(self, index: int, inputs: Any) -> Predictive:
        """The mixture over the draws of one chunk, its weights summing to one."""
        model = self.posterior.model
        with torch.no_grad(), self.posterior.network_mode():
            draws, generator = self._draw(index)
            joined, rows = self._with_reference(inputs)
            with borrowed_stream(generator):  # of dropout, and whatever else is random in the network
                if model.user_forward is None:
                    outputs = model.outputs(draws.theta, joined, draws.fixed)
                else:
                    key = ("prediction", frozenset(draws.fixed), training_key(model.net))
                    outputs = model.evaluation(lambda row: self._call(draws, row, joined)[0], draws.theta, key)
            outputs = pytree.tree_map(lambda leaf: leaf[:, rows:], outputs)
            return Predictive(
                outputs, draws.weight, model.likelihood, model.likelihood_values(draws.theta, draws.fixed), self.note
            )

    def target(self, batch: Any) -> Any:
        """The target that a user's `forward` makes of a batch; it takes a pass of the network."""
        with torch.no_grad(), self.posterior.network_mode():
            draws, generator = self._draw(0)
            with borrowed_stream(generator):
                return self._call(draws, draws.theta[0], batch)[1]

    def _draw(self, index: int) -> tuple[Draws, torch.Generator]:
        generator = torch.Generator(self.device).manual_seed(self.seeds[index])
        return self.density.draw(self.groups[index], self.coupling, generator), generator

    def _call(self, draws: Draws, row: Tensor, batch: Any) -> tuple[Any, Any]:
        model = self.posterior.model
        named = {**model.space.without(draws.fixed).unravel(row), **draws.fixed}
        return model.call({name: x for name, x in named.items() if name not in model.likelihood_names}, batch)

    def _with_reference(self, inputs: Any) -> tuple[Any, int]:
        """The inputs below the reference's rows, and how many those are."""
        inputs = on_device(inputs, self.device)
        if self.reference is None:
            return inputs, 0
        reference, layout = pytree.tree_flatten(on_device(self.reference, self.device))
        own, own_layout = pytree.tree_flatten(inputs)
        if layout != own_layout:
            raise ValueError(f"reference must be built as the inputs are, {own_layout}, got {layout}")
        joined = [torch.cat([r, x]) if isinstance(x, Tensor) else x for r, x in zip(reference, own, strict=True)]
        rows = next(r.shape[0] for r in reference if isinstance(r, Tensor))
        return pytree.tree_unflatten(joined, layout), rows


def predict(
    posterior: "Posterior",
    x: Any,
    draws: int = 64,
    *,
    coupling: Coupling = naive,
    chunk: int = 16,
    reference: Any = None,
    generator: torch.Generator | None = None,
) -> Predictive:
    """The mixture over draws, Σ_s w_s p(t | y_s(x)), without gradients and with the network's mode as it was.

    Args:
        posterior: what `variationalize` returns.
        x: a tensor [B, ..]; a tuple is passed to the network as several arguments, a dict as keywords. With
            `variationalize(forward=)` the batch as your function sees it: what it returns as target is not used and
            may be None, so write it to do without (`batch.get("y")`).
        draws: how many; S is rounded up to whole groups of the coupling, and families with finitely many states
            give each once: see `Predictive.draws` and `note`.
        coupling: independent draws by default, for couplings that pay in a fit need not in a prediction. The variance
            of mean, variance, 95 % quantile and log density at 64 draws, relative to theirs, fitted tanh network of 32
            units: `paired` 1.1, 1.0, 1.0, 1.0, `unscented` 1.8, 1.9, 1.9, 1.7. Draws are used with their weights.
        chunk: how many draws are evaluated at once; the seeds go by chunk, so another one gives other draws.
        reference: for batch_norm="reestimated", inputs of the training data: the network sees them above x in one
            batch, and only x's rows are kept.
        generator: of draws and dropout; the global stream is then left alone.

    Example:
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(nn.Linear(3, 2), likelihoods.Categorical(), num_data=10)
        >>> pred = predict(bayes, torch.zeros(5, 3), draws=8)
        >>> pred.mean.shape, pred.mutual_information.shape
        (torch.Size([5, 2]), torch.Size([5]))
    """
    if isinstance(x, np.ndarray | DataLoader | Dataset):
        raise TypeError(
            f"predict expects the network's inputs as tensors, got {type(x).__name__}; of an array make one with "
            "torch.as_tensor, of a loader give the inputs of its batches one by one, or use evaluate"
        )
    chunks = DrawChunks(posterior, draws, coupling, chunk, reference, generator)
    parts = [chunks.predictive(index, x) for index in range(len(chunks))]
    outputs = [part.outputs for part in parts]
    values = [part.values for part in parts]
    return Predictive(
        pytree.tree_map(lambda *leaves: torch.cat(leaves), outputs[0], *outputs[1:]),
        torch.cat([chunks.share(index) * part.weights for index, part in enumerate(parts)]),
        posterior.model.likelihood,
        {name: torch.cat([value[name] for value in values]) for name in values[0]},
        chunks.note,
    )


def sample_network(posterior: "Posterior", generator: torch.Generator | None = None) -> nn.Module:
    """A copy of the network with drawn weights: an ordinary module with parameters of its own.

    Example:
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(nn.Linear(3, 2), likelihoods.Categorical(), num_data=10)
        >>> sample_network(bayes)
        Linear(in_features=3, out_features=2, bias=True)
    """
    with torch.no_grad(), borrowed_stream(generator):
        draws = posterior.family().draw(1)
        which = torch.multinomial(draws.weight, 1)
        return _network_at(posterior, posterior.space.join(draws.theta[which], draws.fixed)[0])


def mean_network(posterior: "Posterior") -> nn.Module:
    """A copy of the network at the posterior mean of its weights; for masked weights that is θ̂ times keep."""
    with torch.no_grad():
        return _network_at(posterior, posterior.family().mean)


def on_device(tensors: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tensors)


def _network_at(posterior: "Posterior", theta: Tensor) -> nn.Module:
    net = copy.deepcopy(posterior.net)  # ties stay: they are taken once, under their first name
    named = posterior.space.unravel(theta)
    for name, parameter in net.named_parameters():
        if name in named:
            parameter.copy_(named[name])
    return net


def _finite(density: Density) -> bool:
    """Whether one group has every state, with its probability."""
    if isinstance(density, MixtureDensity):
        return all(_finite(part) for part in density.parts)
    return density.enumerates or isinstance(density, PointMass)
