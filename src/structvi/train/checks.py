"""Checks before a fit: N, and the network called on two items of its data."""

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..models.bayesian_model import batch_size
from ..networks.call import BATCH_NORMS
from ..predict.calibration import fingerprint
from ..util.patterns import few
from ..util.random_streams import borrowed_stream
from .data import Batches

if TYPE_CHECKING:
    from ..posterior import Posterior

#: what a network may raise on two items that do not suit it
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError)
RANDOM = (
    "the network draws random numbers in its forward, though dropout is off: F.dropout(x, p) is always on, "
    "F.dropout(x, p, self.training) is not"
)
AUGMENTED = (
    "the held-out rows differ between two readings: random augmentation? Give validation= the data set without it"
)


def remember_choice(posterior: "Posterior", validation: Iterable[Any] | None, seed: int) -> None:
    """Record the data on which choices are made, and drop the calibration, which belongs to the posterior before."""
    posterior.calibration, posterior.chosen_on = None, None
    if validation is not None:
        posterior.chosen_on = fingerprint(Batches(validation, seed).everything())


def notes_on_data(
    posterior: "Posterior", batches: Batches, validation: Iterable[Any] | None = None, gradients: bool = True
) -> list[str]:
    """Set N; return notes on data and network.

    Args:
        posterior: with the network.
        batches: its data; of streams nothing is read.
        validation: held-out data.
        gradients: warn of tensors without a gradient whose change changes the output: a fit moves them to the prior,
            and a curvature knows nothing of them.
    """
    items = batches.first_items()
    notes = [*_set_num_data(posterior, batches, items), *_notes_on_network(posterior)]
    batches.known_num_data = posterior.model.num_data
    if validation is not None and is_made_anew(Batches(validation, device=batches.device)):
        notes.append(AUGMENTED)
    if items is None:
        return notes
    try:
        names = _unreached(posterior, items[0]) if gradients else []
        random = posterior.dropout == "off" and draws_random_numbers(posterior, items[0])
    except FAILURES:  # what is wrong the first step says
        return notes
    if names:
        warnings.warn(
            f"the network's output depends on {few(names)}, but no gradient reaches them: torch.no_grad() or detach() "
            "in its forward? Hold them: requires_grad_(False) before variationalize, or its exclude=[..]",
            stacklevel=2,
        )
    return [*notes, RANDOM] if random else notes


def is_made_anew(batches: Batches) -> bool:
    """Return whether the first items differ between two readings, as with random augmentation."""
    first, again = batches.first_items(), batches.first_items(seed=1)
    if first is None or again is None:
        return False
    pairs = zip(tree_leaves(first[0]), tree_leaves(again[0]), strict=True)
    return not all(not isinstance(a, Tensor) or (a.shape == b.shape and torch.equal(a, b)) for a, b in pairs)


def _set_num_data(posterior: "Posterior", batches: Batches, items: tuple[Any, int] | None) -> list[str]:
    """Set N from the loader unless the user gave it; return notes."""
    model, found = posterior.model, batches.num_data
    before = model.known_num_data
    if before is not None and not model.num_data_of_loader:
        if found in (None, before):
            return []
        return [f"N = {before} as the model was told; the loader's data set has {found} observations"]
    question = batches.question or _question_of_rows(posterior, items)
    if found is None or question is not None:
        raise ValueError(
            "N, the number of observations, is needed to weigh a minibatch against the prior: "
            f"{question or 'this loader does not know it'}. Give num_data= to variationalize"
        )
    model.num_data, model.num_data_of_loader = found, True
    return [] if before in (None, found) else [f"N = {found}, of this loader's data set; in the fit before {before}"]


def _question_of_rows(posterior: "Posterior", items: tuple[Any, int] | None) -> str | None:
    """Return why the rows in all are not known, if an item of the data set is not one row of a batch."""
    if posterior.model.user_forward is not None or items is None or items[1] < 0:
        return None
    try:
        B = batch_size(posterior.model.split(items[0])[1])
    except (TypeError, ValueError):  # what is wrong with it the first step says, with the batch's number
        return None
    if B == items[1]:
        return None
    return f"a batch of {items[1]} items of the data set has {B} rows, crops or slices of one item, perhaps"


def _notes_on_network(posterior: "Posterior") -> list[str]:
    """Return a note on frozen batch norm that does not normalise."""
    layers = {name: one for name, one in posterior.net.named_modules() if isinstance(one, BATCH_NORMS)}
    unused = [name for name, one in layers.items() if one.running_mean is not None and not bool(one.running_mean.any())]
    if not unused or posterior.batch_norm == "reestimated":
        return []
    return [
        f"batch norm has seen no data in {', '.join(unused)}: frozen at mean 0 and variance 1 it does not "
        'normalise; train the network first, or variationalize with batch_norm="reestimated"'
    ]


def _unreached(posterior: "Posterior", batch: Any) -> list[str]:
    """Return names of random tensors that have no gradient on a batch, and change its output."""
    own = {name: tensor.requires_grad_() for name, tensor in _own(posterior).items()}
    with torch.enable_grad():
        before = _outputs(posterior, own, batch)
        outputs = [leaf.double().sum() for leaf in before if leaf.requires_grad]
        if not outputs:
            gradients: tuple[Tensor | None, ...] = (None,) * len(own)
        else:
            gradients = torch.autograd.grad(torch.stack(outputs).sum(), list(own.values()), allow_unused=True)
    generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def moves(name: str) -> bool:
        moved = own[name] + torch.randn(own[name].shape, generator=generator).to(own[name])
        after = _outputs(posterior, {**own, name: moved}, batch)
        return not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    return [name for name, gradient in zip(own, gradients, strict=True) if gradient is None and moves(name)]


@torch.no_grad()
def draws_random_numbers(posterior: "Posterior", batch: Any) -> bool:
    """Return whether a call of the network draws from the global streams."""
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    streams = [torch.default_generator, *devices]
    with borrowed_stream(torch.Generator().manual_seed(0)), posterior.network_mode():
        before = [stream.get_state() for stream in streams]
        with posterior.model.linearised_around(None):
            posterior.model.call(_own(posterior), batch)
        return any(not torch.equal(a, stream.get_state()) for a, stream in zip(before, streams, strict=True))


def _own(posterior: "Posterior") -> dict[str, Tensor]:
    space = posterior.model.net_space
    return {name: p.detach() for name, p in posterior.net.named_parameters() if name in space}


def _outputs(posterior: "Posterior", named: Mapping[str, Tensor], batch: Any) -> list[Tensor]:
    """Return the outputs of the network itself, with the same random numbers at each call."""
    model = posterior.model
    with borrowed_stream(torch.Generator().manual_seed(0)), posterior.network_mode(), model.linearised_around(None):
        return [leaf for leaf in tree_leaves(model.call(named, batch)[0]) if isinstance(leaf, Tensor)]
