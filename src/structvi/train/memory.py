"""Where a step does not fit into memory: what it needs, and what would fit."""

import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..families.low_rank import factors
from ..models.bayesian_model import rows
from ..objective import Estimator
from ..util.checks import in_words

if TYPE_CHECKING:
    from ..posterior import Posterior

#: observations at which activations are counted: two, for batch norm needs more than one
COUNTED = 2
#: the share of the memory that what is said to fit may take: workspaces of matrix products take the rest
SHARE = 0.9


class Need(NamedTuple):
    """What a step needs: V variational numbers over P weights, K of each in the factor, S draws, B observations."""

    V: int
    P: int
    K: int
    S: int
    B: int
    at_once: int  # draws that go back through the network together
    number: int  # bytes
    activation: int | None  # bytes kept for the gradient of one draw and one observation; None if not counted

    def total(self) -> int:
        """Return bytes: parameters, gradients and moments 4V; scale and unit 2P; θ and ε with their gradients 4SP;
        and what the network keeps for its way back, twice that of draws that are on it."""
        tensors = self.number * (4 * self.V + 2 * self.P + 4 * self.S * self.P)
        return tensors + (self.activation or 0) * (self.S + 2 * self.at_once) * self.B

    def with_rank(self, K: int) -> "Need":
        return self._replace(V=self.V - self.P * (self.K - K), K=K)

    def with_draws(self, S: int) -> "Need":
        return self._replace(S=S, at_once=min(self.at_once, S))


def need_of(posterior: "Posterior", batch: Any, estimator: Estimator) -> Need:
    """Return what a step of this posterior on this batch needs."""
    K = max((factor.shape[-1] for factor in factors(posterior.family)), default=0)
    V = sum(parameter.numel() for parameter in posterior.parameters())
    S = len(estimator.coupling(estimator.groups, 1, K).diagonal)
    at_once = S if posterior.model.evaluation.choice == "vmap" else 1  # in a loop too all draws wait for it
    number = torch.empty(0, dtype=posterior.space.dtype).element_size()
    return Need(V, posterior.space.size, K, S, rows(batch), at_once, number, activation_bytes(posterior, batch))


def activation_bytes(posterior: "Posterior", batch: Any) -> int | None:
    """Return the bytes that the network keeps for its gradient, for one draw and one observation; None if unknown.

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
        few = pytree.tree_map(lambda x: x[:COUNTED].clone() if isinstance(x, Tensor) and x.ndim else x, batch)
        with posterior.network_mode(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            posterior.model.batch_log_likelihood(theta, few)
        return sum(kept.values()) // min(COUNTED, rows(batch))
    except (RuntimeError, ValueError, TypeError, IndexError):  # of a batch that only the user's forward= knows
        return None


def there_is(device: torch.device, held: Iterable[Tensor]) -> int | None:
    """Return the bytes that a step can have on the device, with those of its own tensors `held`; None if unknown."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    most = free + torch.cuda.memory_reserved(device)
    most = min(most, int(total * torch.cuda.get_per_process_memory_fraction(device)))
    own = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held if x.is_cuda}
    return most - torch.cuda.memory_allocated(device) + sum(own.values())


def explain(need: Need, there: int | None, device: torch.device) -> str:
    """Return what is needed, what there is, and what would fit, each by itself."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    has = "" if there is None else f", which can have {in_words(there)}"
    said = (
        f"a step does not fit into the memory of {where}{has}: it needs about {in_words(need.total())}, with P = "
        f"{need.P} weights, rank {need.K}, {need.S} draws and batches of {need.B}."
    )
    if there is not None:
        ways: dict[str, tuple[int, Callable[[int], Need]]] = {
            "batches of {}": (need.B, lambda n: need._replace(B=n)),
            "{} draws": (need.S, need.with_draws),
            "rank {}": (need.K, need.with_rank),
        }
        found = {way: _largest(most, changed, SHARE * there) for way, (most, changed) in ways.items()}
        fits = [way.format(n) for way, n in found.items() if n]
        said += f" What would fit: {', or '.join(fits) if fits else 'none of a smaller batch, fewer draws or rank'}."
    return (
        f"{said} Activations are fewer with variationalize(.., checkpoint_activations=True) and with "
        "fit(.., compute=vi.Compute(precision=torch.bfloat16)); a posterior can be sharded over several devices."
    )


def _largest(most: int, changed: Callable[[int], Need], room: float) -> int:
    """Return the largest n in [1, most) that fits; 0 for none."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if changed(middle).total() <= room else (low, middle)
    return low


def forget_frames(error: BaseException) -> None:
    """Let go of the tensors in the frames of an error, and of the errors while which it was raised."""
    one: BaseException | None = error
    while one is not None:
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None  # a cleared frame still has its function, and that the tensors it closes over
        one = one.__context__
