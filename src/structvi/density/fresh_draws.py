"""Where the randomness of independent draws comes from: one seed gives the same draws on every device."""

import torch

from ..couplings import Coupling, Noise, naive


def fresh_draws(seed: int, device: torch.device) -> tuple[Coupling, torch.Generator]:
    """A coupling of independent draws, and a generator on the device for densities that take no noise from it.

    Noise is made on the CPU and moved. What torch's distributions draw is another on every kind of device.

    Example:
        >>> coupling, generator = fresh_draws(0, torch.device("cpu"))
        >>> coupling(3, P=5, K=2, generator=generator).diagonal.shape
        torch.Size([3, 5])
    """
    generator = torch.Generator(device).manual_seed(seed)
    return (naive if device.type == "cpu" else _Moved(seed)), generator


class _Moved:
    """`naive` from a stream of its own on the CPU."""

    def __init__(self, seed: int):
        self.stream = torch.Generator().manual_seed(seed)

    def __call__(self, groups: int, P: int, K: int, generator=None, dtype=None, device=None) -> Noise:
        return Noise(*(x.to(device) for x in naive(groups, P, K, self.stream, dtype)))
