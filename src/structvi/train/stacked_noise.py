"""The noise of many fits, of each from its own generator, as one tensor with a leading axis."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from ..couplings import Coupling, Noise, naive, paired
from ..families.density import Density
from ..families.numerics.fused import has_triton

#: numbers from a generator's one call and from all at once may differ by so much: roundings of the sine
_OFF = {torch.float32: 1e-5, torch.float64: 1e-12}


def noise_calls(density: Density, groups: int, coupling: Coupling) -> tuple[list[tuple[int, int, int]], int]:
    """(groups, P, K) of every call of the coupling that `draw` makes, of a mixture one for each part; and S."""
    calls: list[tuple[int, int, int]] = []

    def recorded(groups: int, P: int, K: int, *rest: Any, **more: Any) -> Noise:
        calls.append((groups, P, K))
        return coupling(groups, P, K, *rest, **more)

    with torch.no_grad():
        drawn = density.draw(groups, recorded, torch.Generator(density.mean.device).manual_seed(0))
    return calls, len(drawn.weight)


class AnyNoise:
    """Of each member from its own generator, as its own draw would make it: [M, S, P], [M, S, K] for every call."""

    def __init__(
        self,
        calls: Sequence[tuple[int, int, int]],
        coupling: Coupling,
        generators: Sequence[torch.Generator],
        dtype: torch.dtype,
    ):
        self.calls, self.coupling, self.generators = calls, coupling, generators
        self.dtype, self.device = dtype, generators[0].device

    def __call__(self) -> list[Noise]:
        made = [list(self._member(generator)) for generator in self.generators]
        return [Noise(*(torch.stack(side) for side in zip(*call, strict=True))) for call in zip(*made, strict=True)]

    def _member(self, generator: torch.Generator) -> Iterator[Noise]:
        for groups, P, K in self.calls:
            yield self.coupling(groups, P, K, generator, self.dtype, self.device)


class PairedNoise(AnyNoise):
    """Antithetic pairs, mirrored once for all members."""

    def __call__(self) -> list[Noise]:
        self.coupling: Callable[..., Noise] = naive
        return [Noise(*(torch.stack([x, -x], dim=2).flatten(1, 2) for x in half)) for half in super().__call__()]


class DeviceNoise:
    """As `AnyNoise` of the couplings `naive` and `paired` on a GPU, in one launch for all generators.

    A call of a generator of its own for each of a hundred fits takes longer than their step.
    """

    def __init__(
        self,
        calls: Sequence[tuple[int, int, int]],
        coupling: Coupling,
        generators: Sequence[torch.Generator],
        dtype: torch.dtype,
    ):
        from ..families.numerics import triton_normals  # Triton takes long to import

        self._normals, self._offset = triton_normals.normals, triton_normals.OFFSET
        self.calls, self.mirrored, self.generators = calls, coupling is paired, generators
        self.dtype, self.device = dtype, generators[0].device
        self.seeds = torch.tensor([_signed(one.initial_seed()) for one in generators], device=self.device)

    def __call__(self) -> list[Noise]:
        offsets = [one.get_offset() for one in self.generators]
        begins = torch.tensor(offsets, device=self.device)
        made = []
        for index, (groups, P, K) in enumerate(self.calls):
            at = begins + index * self._offset if index else begins
            made.append(Noise(*self._normals(self.seeds, at, groups, P, K, self.mirrored, self.dtype)))
        for one, offset in zip(self.generators, offsets, strict=True):
            one.set_offset(offset + len(self.calls) * self._offset)
        return made


def maker(
    calls: Sequence[tuple[int, int, int]],
    coupling: Coupling,
    generators: Sequence[torch.Generator],
    dtype: torch.dtype,
) -> Callable[[], list[Noise]]:
    """What makes the noise of a step: the fastest that is right here."""
    if coupling is not paired and coupling is not naive:
        return AnyNoise(calls, coupling, generators, dtype)
    if generators[0].device.type == "cuda" and is_right(tuple(calls), coupling, dtype, generators[0].device):
        return DeviceNoise(calls, coupling, generators, dtype)
    return (PairedNoise if coupling is paired else AnyNoise)(calls, coupling, generators, dtype)


@lru_cache(maxsize=64)
def is_right(
    calls: tuple[tuple[int, int, int], ...], coupling: Coupling, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether `DeviceNoise` of two generators gives what each gives by itself, and leaves them where it would."""
    if dtype not in _OFF or not has_triton() or not _fits(calls, device):
        return False
    ones, others = ([torch.Generator(device).manual_seed(seed) for seed in (0, 2**40 + 1)] for _ in range(2))
    for one in (*ones, *others):
        one.set_offset(8)
    try:
        got = DeviceNoise(calls, coupling, ones, dtype)()
    except Exception:  # whatever a compiler raises: there is another way
        return False
    expected = AnyNoise(calls, coupling, others, dtype)()
    sides = [pair for a, b in zip(got, expected, strict=True) for pair in zip(a, b, strict=True)]
    off = [float((a - b).abs().max()) for a, b in sides if a.numel()]
    return max(off) <= _OFF[dtype] and [x.get_offset() for x in ones] == [x.get_offset() for x in others]


def _fits(calls: Sequence[tuple[int, int, int]], device: torch.device) -> bool:
    """Whether torch has a thread for each number of a call."""
    properties: Any = torch.cuda.get_device_properties(device)
    threads = properties.multi_processor_count * (properties.max_threads_per_multi_processor // 256) * 256
    return all(groups * (P + K) <= threads for groups, P, K in calls)


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    return seed - 2**64 if seed >= 2**63 else seed
