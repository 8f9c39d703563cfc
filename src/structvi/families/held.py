"""What networks of an ensemble must share: all that is not random, for a posterior has one of each."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..parameters import Parameters
from ..util.patterns import few


def check_held(networks: Sequence[nn.Module], spaces: Sequence[Parameters]) -> None:
    """Refuse networks that differ in a buffer, persistent or not, or in a parameter that is not random.

    Args:
        networks: of one architecture.
        spaces: the random tensors of each.

    Example:
        >>> nets = [nn.Linear(2, 1), nn.Linear(2, 1)]
        >>> check_held(nets, [Parameters.of(net) for net in nets])
        >>> try:
        ...     check_held(nets, [Parameters.of(net, "bias") for net in nets])
        ... except ValueError as error:
        ...     print(str(error).split(":")[0])
        from_networks would call every part with the tensors of one network, and weight differ
    """
    held = [_held(net, space) for net, space in zip(networks, spaces, strict=True)]
    names = dict.fromkeys(name for own in held for name in own)
    differing = [name for name in names if not all(_equal(own.get(name), held[0].get(name)) for own in held)]
    if not differing:
        return
    buffers = {name for net in networks for name, _ in net.named_buffers()}
    ways = []
    if not buffers.isdisjoint(differing):
        ways.append(
            "Ensemble.of(networks, likelihood, part) gives every part the buffers of its own network; where the "
            'buffers are not used (batch_norm="reestimated"), copy those of the first network into the others'
        )
    if not buffers.issuperset(differing):
        ways.append("Select these parameters too, or give networks that share them, heads of one backbone")
    raise ValueError(
        f"from_networks would call every part with the tensors of one network, and {few(differing)} differ: they are "
        f"not random, and must be the same in all networks. {'. '.join(ways)}"
    )


def _held(net: nn.Module, space: Parameters) -> dict[str, Tensor]:
    every = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    return {name: tensor.detach().cpu() for name, tensor in every.items() if name not in space}


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is the same as NaN
