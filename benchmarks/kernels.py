"""The Triton kernels one by one, in the shapes that can be chosen for them: time and the share of a copy's bandwidth.

    python -m benchmarks.kernels [--sizes 1863690] [--ranks 16] [--draws 8] [--only back place]

Needs a GPU. Each row is one pass over the parameters at one choice of rows, warps and precision of products: what
`triton_kernels.py` and `triton_tiles.py` have as constants was chosen from these rows. "least" is what reading and
writing its tensors once takes at the bandwidth of a copy; "off" the largest difference to the same pass in torch.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structvi.families.numerics import fused

from . import timing

STEPS = 20


class Choice(NamedTuple):
    name: str
    run: Callable[[], Any]


class Data(NamedTuple):
    """What the passes read."""

    mean: Tensor
    log_scale: Tensor
    factor: Tensor
    unit: Tensor
    epsilon: Tensor
    z: Tensor
    g: Tensor
    g_q: Tensor

    @classmethod
    def of(cls, P: int, K: int, S: int, device: torch.device) -> "Data":
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        vectors = normal(P), 0.1 * normal(P), 0.1 * normal(P, K), (0.1 * normal(P)).exp()
        return cls(*vectors, normal(S, P), normal(S, K), normal(S, P), normal(S))

    def numbers(self, *counts: tuple[str, int]) -> int:
        return sum(count * getattr(self, name).numel() for name, count in counts)


def sums(data: Data) -> Iterator[Choice]:
    from structvi.families.numerics import triton_sums as kernels

    def run(shape: Any) -> Any:
        kernels.DOT = shape
        return kernels.sums(data.log_scale, data.factor, data.unit, False, data.epsilon)[1:3]

    for one in (kernels.Dot(128, 1, "ieee"), kernels.Dot(64, 1, "tf32x3")):
        yield Choice(f"{one.rows} rows, {one.warps} warps, {one.precision}", lambda s=one: run(s))
    yield from of_warps(lambda kernels: kernels.sums(data.log_scale, data.factor, data.unit, False, data.epsilon)[1:3])


def of_warps(call: Callable[[Any], Any]) -> Iterator[Choice]:
    """Products of tensor cores written out, so many groups of weights at once, in so many programs."""
    from structvi.families.numerics import triton_mma

    def run(groups: int, programs: int) -> Any:
        triton_mma.GROUPS, triton_mma._PROGRAMS = groups, programs
        return call(triton_mma)

    for groups, programs in ((1, 2640), (2, 2640), (4, 2640), (2, 5280), (4, 1320)):
        yield Choice(f"warps, {groups} groups, {programs} programs", lambda g=groups, n=programs: run(g, n))


def joined(data: Data) -> Iterator[Choice]:
    """The sums and the draws together, a row of the factor in each thread."""
    from structvi.families.numerics import triton_lane_sums as kernels

    def run(most: int) -> Any:
        kernels._MOST = most
        found = kernels.sums_and_draws(data.mean, data.log_scale, data.factor, data.unit, data.epsilon, data.z)
        return found[1], found[2], found[5]

    yield Choice("at most 1024 rows a program", lambda: run(1024))


def tiled(data: Data, tile: str, lanes: str, call: Callable[[Any], Any]) -> Iterator[Choice]:
    """One draw after the other; tiles of so many weights in so many warps; and a row of the factor in each thread."""
    from structvi.families.numerics import triton_kernels as kernels
    from structvi.families.numerics import triton_lanes, triton_tiles

    def run(shape: tuple[int, int] | None, warps: int | None) -> Any:
        triton_tiles.SERVES = 10**6 if shape is None else 1
        triton_lanes.SERVES = 10**6 if warps is None else 1
        if shape is not None:
            setattr(triton_tiles, tile, triton_tiles.Shape(*shape))
        if warps is not None:
            setattr(triton_lanes, lanes, warps)
        return call(kernels)

    yield Choice("one draw after the other", lambda: run(None, None))
    for shape in ((32, 1), (64, 4)):
        yield Choice(f"tiles of {shape[0]}, {shape[1]} warps", lambda s=shape: run(s, None))
    for warps in (1, 2):
        yield Choice(f"rows in threads, {warps} warps", lambda w=warps: run(None, w))


def place(data: Data) -> Iterator[Choice]:
    arguments = data.mean, data.log_scale.exp(), data.factor, data.unit, False, data.epsilon, data.z
    return tiled(data, "PLACE", "PLACE_WARPS", lambda kernels: kernels.place(*arguments)[0])


def back(data: Data) -> Iterator[Choice]:
    arguments = data.log_scale.exp(), data.factor, data.unit, data.epsilon, data.z, data.z, data.g, data.g_q
    arguments += data.epsilon, torch.zeros_like(data.g_q)
    return tiled(data, "COVARIANCE", "COVARIANCE_WARPS", lambda kernels: kernels.back_covariance(*arguments))


def precision(data: Data) -> Iterator[Choice]:
    arguments = data.log_scale.exp(), data.factor, data.unit, data.epsilon, data.z, data.z, data.g
    return tiled(data, "PRECISION", "PRECISION_WARPS", lambda kernels: kernels.back_precision(*arguments))


def adam(data: Data) -> Iterator[Choice]:
    from structvi.families.numerics import triton_adam

    first, second = torch.zeros_like(data.factor), torch.zeros_like(data.factor)
    step, lr, one = (torch.tensor(x, device=data.mean.device) for x in (1.0, 1e-3, 1.0))

    def run(tile: int) -> Any:
        triton_adam.TILE = tile
        triton_adam.adam(data.factor, first, second, data.g, data.z, step, lr, one, one, (0.9, 0.999), 1e-8)

    for tile in (512, 1024, 2048, 4096):
        yield Choice(f"{tile} numbers", lambda t=tile: run(t))


#: name → choices, and the tensors that are read or written
PASSES: dict[str, tuple[Callable[[Data], Iterator[Choice]], tuple[tuple[str, int], ...]]] = {
    "sums": (sums, (("factor", 1), ("epsilon", 1), ("mean", 5))),
    "joined": (joined, (("factor", 1), ("epsilon", 2), ("mean", 6))),
    "place": (place, (("factor", 1), ("epsilon", 2), ("mean", 3))),
    "back": (back, (("factor", 1), ("epsilon", 4), ("mean", 4))),
    "precision": (precision, (("factor", 1), ("epsilon", 4), ("mean", 4))),
    "adam": (adam, (("factor", 6), ("epsilon", 1))),
}


def reference(name: str, data: Data) -> Any:
    """The same in torch; None where there is none."""
    s = data.log_scale.exp()
    plain: Any = fused._Slabs
    if name == "sums":
        return plain.sums(data.log_scale, data.factor, data.unit, False, data.epsilon)[1:3]
    if name in ("place", "joined"):
        drawn = plain.place(data.mean, s, data.factor, data.unit, False, data.epsilon, data.z)[0]
        return drawn if name == "place" else (*reference("sums", data), drawn)
    common = s, data.factor, data.unit, data.epsilon, data.z, data.z, data.g
    if name == "back":
        return plain.back_covariance(*common, data.g_q, data.g, data.g_q)[:3]
    return plain.back_precision(*common)[:3] if name == "precision" else None


def off(got: Any, expected: Any) -> float:
    """The largest difference, relative to the largest number of its tensor."""
    if isinstance(expected, Tensor):
        return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())
    return max(off(a, b) for a, b in zip(got, expected, strict=False))


def main(arguments: Sequence[str] | None = None) -> dict:
    parser = timing.parser(__doc__ or "")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_863_690])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--draws", type=int, nargs="+", default=[8])
    parser.add_argument("--only", nargs="+", choices=list(PASSES), default=list(PASSES))
    options = parser.parse_args(arguments)
    device = timing.start(options)
    rate = timing.bandwidth(device)
    rows = []
    for P, K, S in product(options.sizes, options.ranks, options.draws):
        for name in options.only:
            data = Data.of(P, K, S, device)
            expected = reference(name, data)
            choices, tensors = PASSES[name]
            least = 4 * data.numbers(*tensors) / rate
            for choice in choices(data):
                try:
                    error = "" if expected is None else f"{off(choice.run(), expected):.1e}"
                    replay = timing.capture(choice.run)  # launches by themselves would be part of it
                    spent = min(timing.seconds(replay, STEPS, device) for _ in range(3))
                except Exception as failed:  # what a compiler raises is of many kinds
                    figures = [type(failed).__name__, "", ""]
                else:
                    figures = [f"{1e6 * spent:.1f}", f"{1e6 * least:.1f}", error]
                rows.append([name, str(P), str(K), str(S), choice.name, *figures])
                print(*rows[-1], flush=True)
    header = ["pass", "P", "K", "S", "choice", "µs", "least µs", "off"]
    results = {"machine": timing.machine(device), "table": timing.markdown(rows, header)}
    print(results["table"])
    timing.write(results, options.out)
    return results


if __name__ == "__main__":
    main()
