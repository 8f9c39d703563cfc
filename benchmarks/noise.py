"""What P normal numbers cost on a CPU: torch's own generator, and what was tried in its place.

    python -m benchmarks.noise [--size 269322] [--threads 1]

`torch.randn` is one serial stream of 32-bit words and a vectorised Box–Muller. The others: the same from 64-bit words,
with Box–Muller as torch operations, which share threads; the inverse distribution function; numpy's ziggurat.
"""

from collections.abc import Callable, Sequence
from math import pi

import numpy as np
import torch
from torch import Tensor

from . import timing


def box_muller(words: Tensor, generator: torch.Generator) -> Tensor:
    """Two normals of each 64-bit word: 32 bits for the radius, 32 for the angle."""
    halves = words.random_(-(2**63), None, generator=generator).view(torch.int32)  # pyright: ignore[reportCallIssue]
    uniform = halves.to(torch.float32).mul_(2.0**-32).add_(0.5).clamp_(2.0**-33, 1.0)
    radius = uniform[0::2].log().mul_(-2).sqrt_()
    angle = uniform[1::2] * (2 * pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])


def ways(P: int) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    words = torch.empty(P // 2, dtype=torch.int64)
    out = np.empty(P, np.float32)
    made: dict[str, Callable[[], object]] = {
        "torch.randn": lambda: torch.randn(P, generator=generator),
        "64-bit words and Box–Muller in torch": lambda: box_muller(words, generator),
        "of this the words alone": lambda: words.random_(generator=generator),
        "torch.rand and erfinv": lambda: torch.rand(P, generator=generator).mul_(2).sub_(1).erfinv_().mul_(2**0.5),
    }
    for name in ("SFC64", "PCG64DXSM", "Philox"):
        stream = np.random.Generator(getattr(np.random, name)(0))
        made[f"numpy {name}, ziggurat"] = lambda stream=stream: stream.standard_normal(dtype=np.float32, out=out)
    return made


def main(arguments: Sequence[str] | None = None) -> dict:
    parser = timing.parser(__doc__ or "")
    parser.add_argument("--size", type=int, default=269_322)
    options = parser.parse_args(arguments)
    device = timing.start(options)
    times = timing.measure(ways(options.size), device, options.repeats)
    base = times["torch.randn"]
    lines = [
        [name, f"{1e3 * sorted(spent)[len(spent) // 2]:.2f}", f"{timing.ratio(spent, base)['ratio']:.2f}"]
        for name, spent in times.items()
    ]
    results = {"machine": timing.machine(device), "table": timing.markdown(lines, ["way", "ms", "× torch.randn"])}
    print(f"{timing.described(results['machine'])}; {options.size} numbers\n\n{results['table']}")
    timing.write(results, options.out)
    return results


if __name__ == "__main__":
    main()
