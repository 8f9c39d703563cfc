"""The problem of a fit: data, model, network and family, as far as a checkpoint can recognise them.

At most `ITEMS` items of the data are read, spread evenly, and two of them twice. If the two differ, items are made anew
at each reading (augmentation), and only length and labels count. A large tensor counts by a sample of `ELEMENTS`
numbers. Code is not compared: functions and classes of the user's are known by name and listed as unchecked.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, IterableDataset

from ..distributed.sharding import whole_family
from ..files.describe import OfYourOwn, encode
from ..models.bayesian_model import split_batch
from ..networks.call import padding_rows
from ..util.random_streams import borrowed_stream
from .data import Batches

if TYPE_CHECKING:
    from ..posterior import Posterior

#: items of the data, or batches of a list of them, that are read
ITEMS = 8
#: numbers of a tensor that count
ELEMENTS = 1 << 16


class Fingerprint(NamedTuple):
    #: name of a part of the problem → a text that is equal for equal parts
    parts: dict[str, str]
    #: parts that were not compared
    unchecked: list[str]


def fingerprint(posterior: "Posterior", batches: Batches) -> Fingerprint:
    """Return the fingerprint of a fit of this posterior to these data, before its first step."""
    model, net = posterior.model, posterior.net
    held = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    padding = {name: held[name][row] for name, row in padding_rows(net, set(model.net_space.names)).items()}
    rest = sorted((name, tensor) for name, tensor in held.items() if name not in model.net_space)
    parts = {
        "the number of observations": str(model.num_data),
        "the weights' dtype": str(posterior.space.dtype),
        "the random tensors": _digest([model.space.names, [list(shape) for shape in model.space.shapes]]),
        "dropout and batch_norm": f"{posterior.dropout}, {posterior.batch_norm}",
        "the network's structure": _digest(repr(net)),
        "the network's held tensors and buffers": _digest([*rest, *padding.items()]),
        "where the network is linearised": _digest([model.linearised_at]),
        "keys=": str(model.keys),
    }
    unchecked: list[str] = []
    named = {"the likelihood": model.likelihood, "the prior": model.prior, "the family": whole_family(posterior.family)}
    for name, value in {**named, "forward=": model.user_forward}.items():
        parts[name], known = _described(value)
        unchecked += [] if known else [f"what {name} calls or holds ({parts[name].split(' ')[0]})"]
    with borrowed_stream(torch.Generator().manual_seed(0)):
        data, questions = _data(batches)
    return Fingerprint({**parts, **data}, unchecked + questions)


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the parts that differ, with both values if they are short."""
    found = []
    for name in {**then, **now}:
        old, new = then.get(name), now.get(name)
        if old != new:
            readable = all(value is not None and len(value) < 40 for value in (old, new))
            found.append(f"{name} ({old} then, {new} now)" if readable else name)
    return found


# --------------------------------------------------------------------------------------------------------------- data


def _data(batches: Batches) -> tuple[dict[str, str], list[str]]:
    loader = batches.loader
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        size = None if loader.batch_size is None else loader.batch_size * batches.part[1]  # of all ranks together
        length = len(loader.dataset)  # pyright: ignore[reportArgumentType]
        indices = batches.indices if len(batches.indices) else torch.arange(length)
        chosen = _spread(indices, ITEMS).tolist()
        own = {
            "batches": f"{type(loader.sampler).__name__}, {size}, drop_last={loader.drop_last}",
            "the indices of the data": f"{len(indices)}, {_digest(_spread(indices, 1024))[:8]}",
            "the length of the data": str(length),
        }
        return {**own, **_items([loader.dataset[i] for i in chosen], [loader.dataset[i] for i in chosen[:2]])}, []
    if isinstance(loader, Sequence):
        chosen = [loader[i] for i in _spread(torch.arange(len(loader)), ITEMS).tolist()]
        return {"batches": str(len(loader)), "the data (a sample)": _leaves(chosen)}, []
    return {}, ["the data, a stream"]


def _items(items: list[Any], again: list[Any]) -> dict[str, str]:
    """Return a digest of all items, or of their labels if items are made anew each time."""
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


def _spread(values: Tensor, count: int) -> Tensor:
    """Return at most `count` of the values, evenly spread, with the first and the last."""
    if len(values) <= count:
        return values
    return values[torch.linspace(0, len(values) - 1, count, dtype=torch.float64).round().long()]


def _leaves(value: Any) -> str:
    leaves, form = tree_flatten(value)
    return _digest([str(form), *leaves])


def _described(value: Any) -> tuple[str, bool]:
    """Return a text, and whether it describes the value completely."""
    if value is None:
        return "none", True
    try:
        return _digest(json.dumps(encode(value), sort_keys=True)), True
    except OfYourOwn:
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return f"{name} {_digest(repr(value))}" if isinstance(value, nn.Module) else name, False


def _digest(value: Any) -> str:
    sha = hashlib.sha256()
    _feed(sha, value)
    return sha.hexdigest()


def _feed(sha: Any, value: Any) -> None:
    """Feed type and content; of objects that are neither numbers, texts, tensors nor nests of them the type alone."""
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
