"""Where a network's own dropout layers are masks on the weights of the layer after them."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from torch import nn

#: each kind of dropout, and the layers of whose inputs it drops whole units
_PAIRS: dict[type[nn.Module], tuple[type[nn.Module], ...]] = {
    nn.Dropout: (nn.Linear,),
    nn.Dropout1d: (nn.Conv1d,),
    nn.Dropout2d: (nn.Conv2d,),
    nn.Dropout3d: (nn.Conv3d,),
}


def dropped_layers(net: nn.Module) -> dict[str, float]:
    """Weight name → 1 − p, for the layer after each dropout layer; all that cannot be converted is named in an error.

    Example:
        >>> dropped_layers(nn.Sequential(nn.Dropout(0.2), nn.Linear(3, 2)))
        {'1.weight': 0.8}
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"expected the network, an nn.Module, got {type(net).__name__}")
    shared = Counter(id(tensor) for _, tensor in net.named_parameters(remove_duplicate=False))
    after = {name: following for chain in _chains(net, "") for (name, _), following in pairwise(chain)}
    keeps: dict[str, float] = {}
    refused: list[str] = []
    for name, module in net.named_modules(remove_duplicate=False):  # one dropout layer may serve several places
        p = _probability(module)
        if p == 0:
            continue
        following, layer = after.get(name, ("", None))
        reason = _refusal(module, p, layer)
        if reason is None and shared[id(layer.weight)] > 1:  # pyright: ignore[reportOptionalMemberAccess]
            reason = f"the weight of {following} is used elsewhere too, where nothing is dropped"
        if reason is None:
            keeps[f"{following}.weight"] = 1 - p
        else:
            refused.append(f"  {name or 'the network'} ({type(module).__name__}): {reason}")
    if refused:
        raise ValueError(
            "these dropout layers are no masks on the weights of a layer after them:\n"
            + "\n".join(refused)
            + '\nKeep them as they are with variationalize(.., dropout="on"), or change the network'
        )
    if not keeps:
        raise ValueError("the network has no nn.Dropout layer with p > 0; give keep= yourself: MCDropout(keep=0.9)")
    return keeps


def _probability(module: nn.Module) -> float:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout
    return 0.0


def _refusal(module: nn.Module, p: float, layer: nn.Module | None) -> str | None:
    if type(module) not in _PAIRS:
        return "it drops inside of the layer, or something else than units"
    if p == 1:
        return "p = 1 drops everything, and there is no weight divided by 1 − p"
    if layer is None:
        return "it is not in an nn.Sequential with a layer directly after it"
    if type(layer) not in _PAIRS[type(module)]:
        return f"it is before {type(layer).__name__}, it must be before " + _PAIRS[type(module)][0].__name__
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and layer.groups > 1:
        return f"it is before a convolution with groups = {layer.groups}, whose weights have no axis of all inputs"
    return None


def _is_sequence(module: nn.Module) -> bool:
    return type(module).forward is nn.Sequential.forward


def _chains(module: nn.Module, name: str) -> Iterator[list[tuple[str, nn.Module]]]:
    """The modules that are called one after the other, of every `nn.Sequential`; nested ones are one chain."""
    if _is_sequence(module):
        chain = list(_links(module, name))
        yield chain
        inner = [(link, part) for link, part in chain if not _is_sequence(part)]
    else:
        inner = [(f"{name}.{child}" if name else child, part) for child, part in module.named_children()]
    for link, part in inner:
        if part is not module:
            yield from _chains(part, link)


def _links(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    if not _is_sequence(module):
        yield name, module
        return
    for child, part in module._modules.items():  # not named_children: a module may come twice
        if part is not None:
            yield from _links(part, f"{name}.{child}" if name else child)
