"""A network called on two items before a fit: weights that no gradient reaches, random numbers, the last layer."""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..models.batch import arguments_of
from ..networks.call import call_network
from ..networks.padding import padding_rows
from ..predict.draws import on_device
from ..util.patterns import few
from ..util.random_streams import borrowed_stream
from .batches import Batches

if TYPE_CHECKING:
    from ..posterior import Posterior

#: by how much weights are moved to see whether the output follows, in units of their root mean square
STEP = 0.1
#: what may be the last layer of a head
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
RANDOM = (
    "the network draws random numbers in its forward, though dropout is off: candidates are compared with noise. "
    "F.dropout(x, p) is always on, F.dropout(x, p, self.training) is not"
)


def probed(posterior: "Posterior", batches: Batches, gradients: bool = True) -> list[str]:
    """What there is to say of a network, found on two items of the data.

    Args:
        posterior: with the network.
        batches: its data; of streams nothing is read.
        gradients: warn of tensors without a gradient whose change changes the output: a fit moves them to the prior,
            and a curvature knows nothing of them.
    """
    batch = first_items(batches, posterior.device)
    if batch is None:
        return []
    try:
        names = unreached(posterior, batch) if gradients else []
        shared = used_padding(posterior, batch)
        called = _called(posterior, batch) if "layer" in posterior.left_open else []
        draws = posterior.dropout == "off" and _draws_random_numbers(posterior, batch)
    except Exception:  # of a network that two items do not suit, whatever it raises; what is wrong the first step says
        return []
    if names:
        warnings.warn(
            f"the network's output depends on {few(names)}, but no gradient reaches them: torch.no_grad() or detach() "
            "in its forward? As random tensors they would be drawn from the prior. Hold them: requires_grad_(False) "
            "before variationalize, or variationalize(.., exclude=[..])",
            stacklevel=2,
        )
    if shared:
        warnings.warn(
            f"the padding row of {few(shared)} is no weight and stays as it is, but the network uses it beyond its "
            "embedding too, F.linear(x, words.weight) perhaps: there it is not learned. Give the tensor to the layer "
            "that uses it, head.weight = words.weight, and all rows are weights",
            stacklevel=2,
        )
    owner = posterior.model.net_space.names[0].rpartition(".")[0]
    if called and called[-1] != owner:
        raise ValueError(
            f"variationalize_head took {owner!r}, the last layer that the network lists, and the last that it calls is "
            f"{called[-1]!r}: name the one you mean, variationalize_head(.., layer={called[-1]!r})"
        )
    return [RANDOM] if draws else []


def first_items(batches: Batches, device: torch.device) -> Any:
    """Two items of the data, or the first of a list of batches; None of streams, of which nothing is read."""
    found, loader = batches.probe(), batches.loader
    if found is not None:
        return on_device(found[0], device)
    return on_device(loader[0], device) if isinstance(loader, list | tuple) and loader else None


def check_held_out(posterior: "Posterior", batches: Batches, held_out: Batches) -> None:
    """ValueError where held-out inputs have another form than those of the training data, and the network cannot take
    them: many steps may have been made before they are read."""
    if posterior.model.user_forward is not None:
        return
    seen, other = (first_items(one, posterior.device) for one in (batches, held_out))
    if seen is None or other is None:
        return
    forms, found = _forms(posterior, seen), _forms(posterior, other)
    if found == forms or not found or not (error := _refused(posterior, other)) or _refused(posterior, seen):
        return
    raise ValueError(
        f"validation= has inputs that the network cannot take: shape and dtype of a row are {_words(found)}, of the "
        f"training data {_words(forms)}, and the call fails: {error}. Prepare both alike"
    )


def _forms(posterior: "Posterior", batch: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of a row, of every tensor among the inputs."""
    try:
        leaves = tree_leaves(posterior.model.split(batch)[0])
    except (TypeError, ValueError):  # what is wrong with it the first step says, with the batch's number
        return []
    return [(tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor)]


def _words(forms: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{list(shape)} {dtype}" for shape, dtype in forms)


@torch.no_grad()
def _refused(posterior: "Posterior", batch: Any) -> str:
    """What a call of the network raises, in a line; nothing where it raises nothing."""
    try:
        _outputs(posterior, _own(posterior), batch)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def linear_obstacle(posterior: "Posterior", theta: Tensor, batches: Batches) -> str | None:
    """Why the network cannot be linearised at θ [P], where an operation in it has no derivative of that kind."""
    model = posterior.model
    at = theta[: model.net_space.size]
    batch = first_items(batches, posterior.device)
    batch = next(iter(batches.everything(1)), None) if batch is None else batch
    stream = borrowed_stream(torch.Generator().manual_seed(0))
    try:
        with torch.no_grad(), stream, posterior.network_mode(), model.linearised_around(at):
            model.call(model.net_space.unravel(at), batch)
    except NotImplementedError as error:
        return str(error)
    except Exception:  # two items do not suit it, perhaps; what is wrong is told where it is called on all data
        return None
    return None


def unreached(posterior: "Posterior", batch: Any) -> list[str]:
    """Names of random tensors that have no gradient on a batch, and change its output."""
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
            size = STEP * own[name].square().mean().sqrt().clamp(min=1e-3)
            after = _outputs(posterior, {**own, name: own[name] + size * noise}, batch)
            return not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

        return [name for name in without if moves(name)]


def used_padding(posterior: "Posterior", batch: Any) -> list[str]:
    """Names of embeddings whose padding row, which they do not learn, has a gradient by another way."""
    model = posterior.model
    rows = padding_rows(posterior.net, model.net_space.names)
    if not rows or model.user_forward is not None:
        return []
    arguments, keywords = arguments_of(model.net, model.split(batch)[0])
    leaves = {name: tensor.requires_grad_() for name, tensor in _own(posterior).items() if name in rows}
    generator = torch.Generator().manual_seed(0)
    with borrowed_stream(generator), posterior.network_mode() as net, torch.enable_grad():
        found = tree_leaves(call_network(net, leaves, arguments, keywords))
        outputs = [leaf for leaf in found if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not outputs:
            return []
        weights = [torch.randn(leaf.shape, generator=generator).to(leaf) for leaf in outputs]
        slopes = torch.autograd.grad(outputs, list(leaves.values()), weights, allow_unused=True)
    named = zip(leaves, slopes, strict=True)
    return [name for name, slope in named if slope is not None and bool(slope[rows[name]].any())]


@torch.no_grad()
def _draws_random_numbers(posterior: "Posterior", batch: Any) -> bool:
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    streams = [torch.default_generator, *devices]
    with borrowed_stream(torch.Generator().manual_seed(0)), posterior.network_mode():
        before = [stream.get_state() for stream in streams]
        with posterior.model.linearised_around(None):
            posterior.model.call(_own(posterior), batch)
        return any(not torch.equal(a, stream.get_state()) for a, stream in zip(before, streams, strict=True))


@torch.no_grad()
def _called(posterior: "Posterior", batch: Any) -> list[str]:
    """The linear layers and convolutions that the network calls, in order."""
    calls: list[str] = []
    with posterior.network_mode() as net:
        handles = [
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
            for name, module in net.named_modules()
            if isinstance(module, LAYERS)
        ]
        try:
            _outputs(posterior, _own(posterior), batch)
        finally:
            for handle in handles:
                handle.remove()
    return calls


def _own(posterior: "Posterior") -> dict[str, Tensor]:
    space = posterior.model.net_space
    return {name: p.detach() for name, p in posterior.net.named_parameters() if name in space}


def _outputs(posterior: "Posterior", named: Mapping[str, Tensor], batch: Any) -> list[Tensor]:
    """Of the network itself, with the same random numbers at each call."""
    model = posterior.model
    with borrowed_stream(torch.Generator().manual_seed(0)), posterior.network_mode(), model.linearised_around(None):
        return [leaf for leaf in tree_leaves(model.call(named, batch)[0]) if isinstance(leaf, Tensor)]
