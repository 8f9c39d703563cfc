"""What a fit is a fit of: data, model, network and family, as far as a checkpoint can know them again.

Everything here is cheap and stated. Of the data at most `ITEMS` items are read, spread evenly over them, and two of
them twice: where these differ, an item is made anew at each reading (augmentation), and only length and labels count.
Of large tensors a sample of `ELEMENTS` numbers counts.
What cannot be described, such as the code that a function calls, is listed as unchecked.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, IterableDataset

from ..distributed.sharding import whole_family
from ..files.describe import OfYourOwn, encode
from ..models.batch import split_batch
from ..networks.padding import padding_rows
from ..util.random_streams import borrowed_stream
from .batches import Batches

if TYPE_CHECKING:
    from ..posterior import Posterior

#: items of the data, or batches of a list of them, that are read
ITEMS = 8
#: numbers of a tensor that count
ELEMENTS = 1 << 16


class Fingerprint(NamedTuple):
    #: what was looked at → a text that is the same for the same
    parts: dict[str, str]
    #: what could not be looked at
    unchecked: list[str]


def fingerprint(posterior: "Posterior", batches: Batches) -> Fingerprint:
    """Of a fit of this posterior to these data, before it begins or goes on."""
    own = form_of(posterior)
    with borrowed_stream(torch.Generator().manual_seed(0)):
        data, questions = _data(batches)
    number = {"the number of observations": str(posterior.model.num_data)}
    return Fingerprint({**number, **own.parts, **data}, own.unchecked + questions)


def form_of(posterior: "Posterior") -> Fingerprint:
    """All but the data: what fits that are made at once must share."""
    model, net = posterior.model, posterior.net
    parts = {
        "the weights' dtype": str(posterior.space.dtype),
        "the random tensors": _digest([model.space.names, [list(shape) for shape in model.space.shapes]]),
        "dropout and batch_norm": f"{posterior.dropout}, {posterior.batch_norm}",
        "the network's structure": _digest(repr(net)),
        "the network's code": _code([type(module).forward for module in net.modules()]),
        "the network's held tensors and buffers": _digest(list(_held(net, model.net_space.names))),
    }
    if model.linearised_at is not None:
        parts["where the network is linearised"] = _digest([model.linearised_at])
    if model.keys is not None:
        parts["keys="] = str(model.keys)
    unchecked: list[str] = []
    for name, value in (
        ("the likelihood", model.likelihood),
        ("the prior", model.prior),
        ("the family", whole_family(posterior.family)),
        ("forward=", model.user_forward),
    ):
        parts[name], known = _described(value)
        unchecked += [] if known else [f"what {name} calls or holds ({parts[name].split(' ')[0]})"]
    return Fingerprint(parts, unchecked)


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What is not the same, with both values where they can be read."""
    found = []
    for name in {**then, **now}:
        old, new = then.get(name), now.get(name)
        if old == new or (name == "the network's code" and str(old).split(" ")[0] != str(new).split(" ")[0]):
            continue  # code of another Python cannot be compared
        readable = all(value is not None and len(value) < 40 for value in (old, new))
        found.append(f"{name} ({old} then, {new} now)" if readable else name)
    return found


# --------------------------------------------------------------------------------------------------------------- data


def _data(batches: Batches) -> tuple[dict[str, str], list[str]]:
    loader = batches.loader
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        size = None if loader.batch_size is None else loader.batch_size * batches.part[1]  # of all ranks together
        own = {"batches": f"{type(loader.sampler).__name__}, {size}, drop_last={loader.drop_last}"}
        length = len(loader.dataset)  # pyright: ignore[reportArgumentType]
        indices = batches.indices or list(range(length))
        own["the indices of the data"] = f"{len(indices)}, {_digest(_spread(indices, 1024))[:8]}"
        own["the length of the data"] = str(length)
        chosen = _spread(indices, ITEMS)
        items = [loader.dataset[i] for i in chosen]
        again = [loader.dataset[i] for i in chosen[:2]]
        return {**own, **_items(items, again)}, []
    if isinstance(loader, Sequence):
        own = {"batches": str(len(loader))}
        return {**own, "the data (a sample)": _leaves(_spread(loader, ITEMS))}, []
    return {}, ["the data, a stream"]


def _items(items: list[Any], again: list[Any]) -> dict[str, str]:
    """All of the items, or of items that are made anew each time their labels."""
    if _leaves(items[: len(again)]) == _leaves(again):
        return {"the data (a sample)": _leaves(items)}
    labels = [_label(item) for item in items]
    if _leaves(labels[: len(again)]) == _leaves([_label(item) for item in again]):
        return {"the data (a sample)": "anew at each reading", "the labels (a sample)": _leaves(labels)}
    return {"the data (a sample)": "anew at each reading", "the labels (a sample)": "anew at each reading"}


def _label(item: Any) -> Any:
    try:
        return split_batch(item)[1]
    except (TypeError, ValueError):
        return None


def _spread(values: Sequence[Any], count: int) -> list[Any]:
    """At most so many of them, the first and the last among them, evenly spread."""
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def _leaves(value: Any) -> str:
    leaves, form = tree_flatten(value)
    return _digest([str(form), *leaves])


# --------------------------------------------------------------------------------------------------- model and network


def _held(net: nn.Module, random: Iterable[str]) -> Iterable[Any]:
    random = set(random)
    named = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    for name, tensor in sorted(named.items()):
        if name not in random:
            yield name
            yield tensor
    for name, row in padding_rows(net, random).items():
        yield f"{name}, padding"
        yield named[name][row]


def _described(value: Any) -> tuple[str, bool]:
    """A text, and whether it says all of it."""
    if value is None:
        return "none", True
    try:
        return _digest(json.dumps(encode(value), sort_keys=True)), True
    except OfYourOwn:
        pass
    if isinstance(value, nn.Module):
        kind = type(value)
        return f"{kind.__qualname__} {_digest([repr(value), _code([kind.forward])])}", False
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{name} {_code([value])}", False


def _code(functions: Iterable[Any]) -> str:
    """Of the bytecode of Python functions: it changes with the version of Python, which stands before it."""
    codes = [function.__code__ for function in functions if isinstance(getattr(function, "__code__", None), CodeType)]
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return f"{version} {_digest([part for code in codes for part in _bytecode(code)])}"


def _bytecode(code: CodeType) -> Iterable[Any]:
    yield code.co_code
    yield [name for name in code.co_names]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _bytecode(constant)
        else:
            yield repr(constant)


def _digest(value: Any) -> str:
    sha = hashlib.sha256()
    _feed(sha, value)
    return sha.hexdigest()


def _feed(sha: Any, value: Any) -> None:
    """Type and content; of objects that are neither numbers, texts, tensors nor nests of them the type alone."""
    if isinstance(value, np.ndarray):
        value = torch.as_tensor(value) if value.dtype.kind in "fiub" else value.tolist()
    if isinstance(value, Tensor):
        flat = value.detach().reshape(-1)
        sha.update(f"tensor {value.dtype} {list(value.shape)}".encode())
        if flat.numel() > ELEMENTS:
            flat = flat[torch.linspace(0, flat.numel() - 1, ELEMENTS, dtype=torch.float64).long().to(flat.device)]
        sha.update(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    elif isinstance(value, list | tuple):
        sha.update(f"list {len(value)}".encode())
        for one in value:
            _feed(sha, one)
    elif isinstance(value, bytes):
        sha.update(value)
    elif value is None or isinstance(value, bool | int | float | complex | str):
        sha.update(f"{type(value).__name__} {value!r}".encode())
    else:
        sha.update(f"object {type(value).__qualname__}".encode())
