"""A batch as inputs and target, and how many observations it has."""

from collections.abc import Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

TARGET_KEYS = ("target", "targets", "label", "labels", "y")


def split_batch(batch: Any) -> tuple[Any, Any]:
    """A batch as its inputs and its target."""
    if isinstance(batch, Mapping):
        keys = [key for key in TARGET_KEYS if key in batch]
        if len(keys) != 1:
            raise ValueError(f"a dict batch needs exactly one of the keys {TARGET_KEYS}, got {sorted(map(str, batch))}")
        rest = {key: value for key, value in batch.items() if key != keys[0]}
        if not rest:
            raise ValueError(f"the batch has a target {keys[0]!r} but no input")
        return (next(iter(rest.values())) if len(rest) == 1 else rest), batch[keys[0]]
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    came = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else type(batch).__name__
    raise TypeError(
        f"a batch must be (input, target) or a dict, got {came}; for others give variationalize a function forward=, "
        "such as lambda net, batch: (net(*batch[:-1]), batch[-1])"
    )


def arguments_of(inputs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """What a network is called with: positional arguments and keywords."""
    if isinstance(inputs, Mapping):
        return (), inputs
    return (inputs if isinstance(inputs, tuple | list) else (inputs,)), {}


def check_keywords(net: nn.Module, keywords: Mapping[str, Any]) -> None:
    """Entries of a dict batch that the network's forward does not take are named before torch does."""
    known = signature(net.forward).parameters
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in known.values()):
        return
    strange = [key for key in keywords if key not in known]
    if strange:
        raise ValueError(
            f"the batch is a dict with the inputs {list(keywords)}, which are passed to the network by name, and its "
            f"forward({', '.join(known)}) does not take {strange}: give variationalize a function forward=, such as "
            'lambda net, batch: (net(batch["image"]), batch["label"])'
        )


def batch_size(target: Any) -> int:
    """B: the number of rows of a target t, or of t in (t, mask)."""
    if isinstance(target, tuple | list) and len(target) == 2:
        target, _ = target  # (t, mask)
    if not isinstance(target, Tensor) or target.ndim == 0 or target.shape[0] == 0:
        came = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(f"the target must be a tensor [B, ..] with B ≥ 1, got {came}")
    return target.shape[0]


def observations(batch: Any) -> int:
    """B of a whole batch: the length of its first tensor."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    if not tensors:
        raise TypeError(f"cannot tell how many observations are in a batch without tensors: {type(batch).__name__}")
    return tensors[0].shape[0]


def rows(batch: Any) -> int:
    """B as far as a batch tells it: rows of its target, of its first tensor, or one."""
    try:
        return batch_size(split_batch(batch)[1])
    except (TypeError, ValueError):  # of a form that only the user's `forward` knows
        pass
    try:
        return observations(batch)
    except TypeError:
        return 1
