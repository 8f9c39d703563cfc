"""A batch as inputs and target, and how many observations it has."""

from collections.abc import Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..util.checks import reads

TARGET_KEYS = ("target", "targets", "label", "labels", "y")
#: of an input that a network takes, where its entry has none of the names that forward has
INPUT_KEYS = ("image", "images", "img", "input", "inputs", "x")
#: the entry of a dict batch that is the input, or several of them, and that of the target
Keys = tuple[str | tuple[str, ...], str]


def split_batch(batch: Any, keys: Keys | None = None) -> tuple[Any, Any]:
    """A batch as its inputs and its target; of a dict by the keys that are told or, of None, those that can be told."""
    if keys is not None and isinstance(batch, Mapping):
        inputs, target = keys
        return taken(batch, inputs), taken(batch, target)
    if isinstance(batch, Mapping):
        found = [key for key in TARGET_KEYS if key in batch]
        if len(found) != 1:
            raise ValueError(
                f"a dict batch needs exactly one of the keys {TARGET_KEYS}, got {sorted(map(str, batch))}; or tell "
                'which they are: variationalize(.., keys=("image", "mask"))'
            )
        rest = {key: value for key, value in batch.items() if key != found[0]}
        if not rest:
            raise ValueError(f"the batch has a target {found[0]!r} but no input")
        return (next(iter(rest.values())) if len(rest) == 1 else rest), batch[found[0]]
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    came = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else type(batch).__name__
    raise TypeError(
        f"a batch must be (input, target) or a dict, got {came}; for others give variationalize a function forward=, "
        "such as lambda net, batch: (net(*batch[:-1]), batch[-1])"
    )


def taken(batch: Mapping[Any, Any], keys: str | tuple[str, ...]) -> Any:
    """The entry of a dict, or a tuple of several."""
    names = (keys,) if isinstance(keys, str) else keys
    if missing := [name for name in names if name not in batch]:
        raise ValueError(f"the batch has no {missing}, which keys= names; it has {sorted(map(str, batch))}")
    return batch[keys] if isinstance(keys, str) else tuple(batch[name] for name in names)


def check_keys(keys: Any) -> None:
    """That they are a pair: one key, or a tuple of them, for the inputs, and one for the target."""
    if isinstance(keys, tuple | list) and len(keys) == 2:
        inputs, target = keys
        names = (inputs,) if isinstance(inputs, str) else inputs
        if isinstance(names, tuple | list) and names and all(isinstance(name, str) for name in (*names, target)):
            return
    raise TypeError(f'keys must be (input, target) of a dict batch, such as ("image", "label"), got {keys!r}')


def plain(batch: Any) -> Any:
    """Tensors as torch's own: MONAI's MetaTensor and other subclasses, that carry more than numbers, without the rest.

    Subclasses that are no plain array of numbers inside (`__torch_dispatch__`: nested, distributed) stay as they are.

    Example:
        >>> import torch
        >>> class WithName(Tensor): ...
        >>> type(plain({"image": torch.zeros(2).as_subclass(WithName)})["image"]).__name__
        'Tensor'
    """
    if type(batch) is Tensor or (isinstance(batch, tuple | list) and all(type(one) is Tensor for one in batch)):
        return batch  # nearly always, and asked for at every draw
    return tree_map(lambda leaf: leaf.as_subclass(Tensor) if _is_dressed(leaf) else leaf, batch)


def _is_dressed(leaf: Any) -> bool:
    kind = type(leaf)
    if kind is Tensor or not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
        return False
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__  # pyright: ignore


def as_labels(target: Any) -> Any:
    """Class labels as MONAI gives them, [B, 1, ..] of any dtype, as [B, ..] of integers; with a mask alike.

    Example:
        >>> import torch
        >>> as_labels(torch.ones(4, 1, 8, 8)).shape, as_labels(torch.ones(4, 1, 8, 8)).dtype
        (torch.Size([4, 8, 8]), torch.int64)
    """
    if isinstance(target, tuple | list):
        return type(target)(as_labels(part) for part in target)
    if not isinstance(target, Tensor):
        return target
    if target.ndim > 1 and target.shape[1] == 1:
        target = target.squeeze(1)
    if target.dtype.is_floating_point:
        if reads() and bool((target != target.floor()).any()):
            raise ValueError(
                "labels must be whole numbers, got fractions or NaN: after a Resize or a Spacing with interpolation? "
                'Give labels mode="nearest"'
            )
        target = target.long()
    return target


def arguments_of(net: nn.Module, inputs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """What a network is called with: positional arguments and keywords.

    Of a dict the entries that `forward` names; of one with none of these, the image where there is one. What is no
    tensor beside them, paths and headers, is left out.
    """
    if not isinstance(inputs, Mapping):
        return (inputs if isinstance(inputs, tuple | list) else (inputs,)), {}
    known = signature(net.forward).parameters
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in known.values()):
        return (), inputs
    named = {key: value for key, value in inputs.items() if key in known}
    strange = [key for key in inputs if key not in known]
    tensors = [key for key in strange if isinstance(inputs[key], Tensor)]
    if not strange or (named and not tensors):
        return (), named
    if not named and len(tensors) == 1 and tensors[0] in INPUT_KEYS:
        return (inputs[tensors[0]],), {}
    raise ValueError(
        f"the batch is a dict with the inputs {list(inputs)}, which are passed to the network by name, and its "
        f"forward({', '.join(known)}) does not take {strange}: tell which entries count, variationalize(.., "
        'keys=("image", "label")), or give it a function forward=, such as '
        'lambda net, batch: (net(batch["image"], batch["age"]), batch["label"])'
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


def rows_of(batch: Any) -> int | None:
    """The number of observations, where every leaf of the batch is a tensor with one row for each; else None.

    Example:
        >>> import torch
        >>> rows_of({"x": torch.zeros(8, 3), "t": torch.zeros(8)})
        8
    """
    leaves = tree_leaves(batch)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        return None
    rows = {leaf.shape[0] for leaf in leaves}
    return rows.pop() if len(rows) == 1 else None
