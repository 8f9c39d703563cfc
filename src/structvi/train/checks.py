"""Checks before a fit: N, and the network called on two items of its data."""

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..models.bayesian_model import batch_size
from ..networks.call import BATCH_NORMS
from ..predict.calibration import fingerprint
from ..util.patterns import few
from ..util.random_streams import borrowed_stream
from .data import Batches

if TYPE_CHECKING:
    from ..posterior import Posterior

#: by how much weights are moved to see whether the output follows, in units of their root mean square
MOVED = 0.1
#: what a network may raise on two items that do not suit it
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError)
RANDOM = (
    "the network draws random numbers in its forward, though dropout is off: candidates are compared with noise. "
    "F.dropout(x, p) is always on, F.dropout(x, p, self.training) is not"
)
AUGMENTED = (
    "the held-out rows differ between two readings: random augmentation? Candidates are compared on rows that training "
    "changed; give validation= the data set without augmentation"
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
    notes, items = set_num_data(posterior, batches), batches.first_items()
    batches.known_num_data = posterior.model.num_data
    notes += notes_on_network(posterior)
    if items is None:
        return notes
    batch = items[0]
    held_out = None if validation is None else Batches(validation, device=batches.device)
    if held_out is not None and (first := held_out.first_items()) is not None:
        _check_held_out(posterior, batch, first[0])
        again = held_out.first_items(seed=1)
        if again is not None and not _are_equal(first[0], again[0]):
            notes.append(AUGMENTED)
    try:
        names = unreached(posterior, batch) if gradients else []
        random = posterior.dropout == "off" and draws_random_numbers(posterior, batch)
    except FAILURES:  # what is wrong the first step says
        return notes
    if names:
        warnings.warn(
            f"the network's output depends on {few(names)}, but no gradient reaches them: torch.no_grad() or detach() "
            "in its forward? As random tensors they would be drawn from the prior. Hold them: requires_grad_(False) "
            "before variationalize, or variationalize(.., exclude=[..])",
            stacklevel=2,
        )
    return [*notes, RANDOM] if random else notes


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two batches hold the same tensors."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(not isinstance(a, Tensor) or (a.shape == b.shape and torch.equal(a, b)) for a, b in pairs)


def set_num_data(posterior: "Posterior", batches: Batches) -> list[str]:
    """Set N from the loader unless the user gave it; return notes."""
    model = posterior.model
    if model.known_num_data is None or model.num_data_of_loader:
        question = batches.question or _question_of_rows(posterior, batches)
        if batches.num_data is None or question is not None:
            why = question or "this loader does not know it"
            raise ValueError(
                f"N, the number of observations, is needed to weigh a minibatch against the prior: {why}. Give "
                "num_data= to variationalize, or a DataLoader over a data set with a length"
            )
    if model.known_num_data is None:
        assert batches.num_data is not None
        model.num_data, model.num_data_of_loader = batches.num_data, True
    elif batches.num_data not in (None, model.num_data):
        before = model.num_data
        if not model.num_data_of_loader:
            return [f"N = {before} as the model was told; the loader's data set has {batches.num_data} observations"]
        assert batches.num_data is not None
        model.num_data = batches.num_data
        return [f"N = {model.num_data}, of this loader's data set; in the fit before it was {before}"]
    return []


def _question_of_rows(posterior: "Posterior", batches: Batches) -> str | None:
    """Return why the rows in all are not known, if an item of the data set is not one row of a batch."""
    if posterior.model.user_forward is not None or (found := batches.first_items()) is None or found[1] < 0:
        return None
    batch, items = found
    try:
        B = batch_size(posterior.model.split(batch)[1])
    except (TypeError, ValueError):  # what is wrong with it the first step says, with the batch's number
        return None
    if B == items:
        return None
    words = f"a batch of {items} items of the data set has {B} rows, crops or slices of one item, perhaps"
    if batches.num_data is not None and B % items == 0:
        words += f", {B // items * batches.num_data} in all if each item has as many"
    return words


def notes_on_network(posterior: "Posterior") -> list[str]:
    """Return notes on batch norm that does nothing, and on a network linearised at weights that it no longer has."""
    notes = []
    if posterior.batch_norm != "reestimated":
        layers = {name: one for name, one in posterior.net.named_modules() if isinstance(one, BATCH_NORMS)}
        without = [name for name, one in layers.items() if one.running_mean is None or one.running_var is None]
        unused = [name for name, one in layers.items() if name not in without and _has_seen_nothing(one)]
        if unused:
            notes.append(
                f"batch norm has seen no data in {', '.join(unused)}: frozen at mean 0 and variance 1 it does not "
                'normalise; train the network first, or variationalize with batch_norm="reestimated"'
            )
        if without:
            notes.append(
                f"batch norm keeps no running statistics in {', '.join(without)}: a row's output depends on its batch, "
                "in predictions too; train the network with track_running_stats=True, or with GroupNorm"
            )
    model = posterior.model
    at = None if "linearise" in posterior.left_open else model.linearised_at
    if at is not None and not torch.equal(model.net_space.ravel(_own(posterior)), at):
        notes.append(
            "the posterior is linearised at other weights than the network has now, and those count: after more "
            "training variationalize the network again"
        )
    return notes


def _has_seen_nothing(layer: nn.Module) -> bool:
    return bool((layer.running_mean == 0).all() and (layer.running_var == 1).all())  # pyright: ignore


@torch.no_grad()
def _check_held_out(posterior: "Posterior", batch: Any, held_out: Any) -> None:
    """Refuse held-out data that the network cannot take, before many steps are made."""
    try:
        _outputs(posterior, _own(posterior), batch)
    except FAILURES:
        return
    try:
        _outputs(posterior, _own(posterior), held_out)
    except FAILURES as error:
        raise ValueError(
            f"validation= has inputs that the network cannot take, and the training data has others: "
            f"{type(error).__name__}: {error}. Prepare both alike"
        ) from error


def unreached(posterior: "Posterior", batch: Any) -> list[str]:
    """Return names of random tensors that have no gradient on a batch, and change its output."""
    own = _own(posterior)
    leaves = {name: tensor.requires_grad_() for name, tensor in own.items()}
    with torch.enable_grad():
        outputs = [leaf for leaf in _outputs(posterior, leaves, batch) if leaf.requires_grad]
        gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if outputs:
            total = torch.stack([leaf.double().sum() for leaf in outputs]).sum()
            gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    without = [name for name, gradient in zip(leaves, gradients, strict=True) if gradient is None]
    if not without:
        return []
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        before = _outputs(posterior, own, batch)

        def moves(name: str) -> bool:
            noise = torch.randn(own[name].shape, generator=generator).to(own[name])
            size = MOVED * own[name].square().mean().sqrt().clamp(min=1e-3)
            after = _outputs(posterior, {**own, name: own[name] + size * noise}, batch)
            return not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

        return [name for name in without if moves(name)]


def may_draw(posterior: "Posterior", batch: Any) -> bool:
    """Return whether the network draws random numbers on a batch; True if it cannot be called there."""
    try:
        return draws_random_numbers(posterior, batch)
    except FAILURES:
        return True


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
