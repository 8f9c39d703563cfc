"""Where a step does not fit into memory: what it needs, by the formula of docs/performance.md, and what would fit."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..couplings import Coupling
from ..families.low_rank import factors
from ..models.batch import rows
from ..util.checks import in_words

if TYPE_CHECKING:
    from ..posterior import Posterior

#: Observations at which activations are counted: two, for batch norm needs more than one.
_COUNTED = 2
#: The share of the memory that what is said to fit may take: workspaces of matrix products and pieces take the rest.
SHARE = 0.9


class Need(NamedTuple):
    """What a step needs: V variational numbers over P weights, K of each in the factor, S draws, B observations."""

    V: int
    P: int
    K: int
    S: int
    B: int
    #: draws that go back through the network together
    at_once: int
    #: bytes of a number
    number: int
    #: bytes kept for the gradient, of one draw and one observation; None where they could not be counted
    activation: int | None

    def posterior(self) -> int:
        """Parameters and two moments, 3V; scale, unit and gradients of mean and scale, 5P; θ, ε, gradient and A of
        each draw, 4SP: with V = P(K + 2) it is 4·P·(3(K + 2) + 5 + 4·S) bytes in float32."""
        return self.number * (3 * self.V + 5 * self.P + 4 * self.S * self.P)

    def activations(self) -> int:
        """What all draws keep for the way back, and twice that of those that are on it."""
        return (self.activation or 0) * (self.S + 2 * self.at_once) * self.B

    def total(self) -> int:
        return self.posterior() + self.activations()

    def with_rank(self, K: int) -> "Need":
        return self._replace(V=self.V - self.P * (self.K - K), K=K)

    def with_draws(self, S: int) -> "Need":
        return self._replace(S=S, at_once=min(self.at_once, S))


def need_of(posterior: "Posterior", batch: Any, groups: int, coupling: Coupling) -> Need:
    """What a step of this posterior on this batch needs."""
    K = max((factor.shape[-1] for factor in factors(posterior.family)), default=0)
    P = posterior.space.size
    V = sum(parameter.numel() for parameter in posterior.parameters())
    S = len(coupling(groups, 1, K).diagonal)
    at_once = S if posterior.model.evaluation.choice == "vmap" else 1  # in a loop too all draws wait for it
    number = torch.empty(0, dtype=posterior.space.dtype).element_size()
    return Need(V, P, K, S, rows(batch), at_once, number, activation_bytes(posterior, batch))


def activation_bytes(posterior: "Posterior", batch: Any) -> int | None:
    """Bytes that the network keeps for its gradient, for one draw and one observation; None where it cannot be told.

    Example:
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> bayes = variationalize(torch.nn.Linear(3, 1), likelihoods.Gaussian(noise=1.0), MeanField(), num_data=8)
        >>> activation_bytes(bayes, (torch.zeros(8, 3), torch.zeros(8, 1))) >= 3 * 4
        True
    """
    kept: dict[int, int] = {}
    theta = posterior.space.initial.detach().to(posterior.device).unsqueeze(0).requires_grad_()
    weights = [theta, *posterior.net.parameters(), *posterior.net.buffers()]
    held = {tensor.untyped_storage().data_ptr() for tensor in weights}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    try:
        few = pytree.tree_map(lambda x: x[:_COUNTED].clone() if isinstance(x, Tensor) and x.ndim else x, batch)
        with posterior.network_mode(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            posterior.model.batch_log_likelihood(theta, few)
        return sum(kept.values()) // min(_COUNTED, rows(batch))
    except (RuntimeError, ValueError, TypeError, IndexError):  # of a batch that only the user's forward= knows
        return None


def there_is(device: torch.device, held: Iterable[Tensor]) -> int | None:
    """Bytes that a step can have on the device; None where it is not known.

    What this process can have, less the tensors that it holds already, but for those of the step itself.

    Args:
        device: where.
        held: the step's own: parameters and moments.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    most = free + torch.cuda.memory_reserved(device)
    with suppress(AttributeError):  # older versions of torch do not tell
        most = min(most, int(total * torch.cuda.get_per_process_memory_fraction(device)))
    own = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held if x.is_cuda}
    return most - torch.cuda.memory_allocated(device) + sum(own.values())


def explain(need: Need, there: int | None, device: torch.device) -> str:
    """What is needed, what there is, and what would fit."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    said = (
        f"a step does not fit into memory on {where}: it needs about {in_words(need.total())}, "
        f"{in_words(need.posterior())} of it for the posterior (P = {need.P}, rank {need.K}, {need.S} draws)"
    )
    if need.activation is not None:
        said += f" and {in_words(need.activations())} for activations ({need.S} draws of {need.B} observations)"
    said += "." if there is None else f"; there are {in_words(max(there, 0))} for it."
    if there is not None and need.total() <= there:
        said += " By this estimate it fits: other tensors, or memory in pieces, take the rest."
    elif there is not None:
        said += f" {_what_fits(need, there)}"
    return (
        f"{said} Activations are fewer with variationalize(.., checkpoint_activations=True) and with "
        "fit(.., precision=torch.bfloat16); over several devices the posterior can be sharded."
    )


def _what_fits(need: Need, there: int) -> str:
    """The largest batch, number of draws and rank, each with the rest as it is."""
    ways = {
        "batches of {}": (need.B, lambda n: need._replace(B=n)),
        "{} draws (coupling=vi.couplings.naive, groups={})": (need.S, need.with_draws),
        "rank {}": (need.K, need.with_rank),
    }
    fits = [
        way.format(best, best)
        for way, (most, changed) in ways.items()
        if (best := _largest(most, lambda n, changed=changed: changed(n).total() <= SHARE * there)) is not None
    ]
    if fits:
        return f"What would fit, each by itself: {'; '.join(fits)}."
    least = need.with_rank(0).with_draws(1)._replace(B=1)
    text = f"Mean field with one draw and one observation needs {in_words(least.total())}"
    return f"{text}: batch, draws and rank together have to be smaller." if least.total() <= there else f"{text}."


def _largest(most: int, fits: Callable[[int], bool]) -> int | None:
    """The largest n in [1, most) that fits."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low or None
