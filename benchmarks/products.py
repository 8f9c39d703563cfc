"""Batched products of linear layers at S weights, one by one: cuBLAS and Triton's tensor cores in float32.

    python -m benchmarks.products [--layers 1024x1024 10x1024] [--draws 8] [--batch 128]
    python -m benchmarks.products --steps

Needs a GPU. With `--steps` whole captured steps of the MLP 784-1024-1024-10, rank 16, for each way. Else rows are
forward, the gradient of the input and that of the weights of each layer, as in `structvi/networks/batched_linear.py`;
"least" is the time of their multiplications at the rate of a large product of cuBLAS. The weights of draws begin where
they do in [S, P]: at any number, or at a multiple of 128 bytes.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

import structvi as vi

from . import timing
from .nets import problem
from .step_cost import our_step

STEPS = 20


#: tiles of products in general
SHAPES = ((64, 64, 32, 4, 3), (128, 128, 32, 8, 3), (64, 64, 16, 2, 4), (32, 64, 32, 2, 3), (64, 32, 32, 2, 4))


def steps(draws: int, batch: int, repeats: int, device: torch.device) -> str:
    """Whole steps, their repeats in turn."""
    from structvi.networks import batched_products, triton_products

    def of(shape: tuple[int, ...] | None) -> Any:
        batched_products.SMALL = 2**60 if shape is None else 2**20
        if shape is not None:
            triton_products.LARGE = triton_products.Shape(*shape)
        return our_step(problem("wide-mlp", batch, device), vi.StructuredNormal(16), draws, True)

    made = {}
    for shape in (None, *SHAPES):
        try:
            made["cuBLAS" if shape is None else str(shape)] = of(shape)
        except Exception as failed:  # what a compiler raises is of many kinds
            print(shape, type(failed).__name__, flush=True)
    times = timing.measure(made, device, repeats)
    rows = [[name, f"{1e3 * median(spent):.3f}"] for name, spent in times.items()]
    return timing.markdown(rows, ["products", "ms a step"])


def main(arguments: Sequence[str] | None = None) -> dict:
    from structvi.networks.triton_products import FLAT, LARGE, NARROW, Shape, product

    parser = timing.parser(__doc__ or "")
    parser.add_argument("--layers", nargs="+", default=["1024x1024", "10x1024"])
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", action="store_true", help="whole steps of an MLP")
    options = parser.parse_args(arguments)
    device = timing.start(options)
    if options.steps:
        table = steps(options.draws, options.batch, options.repeats, device)
        print(table)
        timing.write(results := {"machine": timing.machine(device), "table": table}, options.out)
        return results
    rate = timing.matmul_rate(device, None)
    S, B, rows = options.draws, options.batch, []
    for layer in options.layers:
        out, into = map(int, layer.split("x"))
        large = min(out, into) > 32
        for ahead in (0, 2) if large else (0,):
            apart = out * into + 128 * 1024 + ahead
            weight = torch.randn(S, apart, device=device)[:, : out * into].unflatten(1, (out, into))
            x, g = torch.randn(S, B, into, device=device), torch.randn(S, B, out, device=device)
            kinds = {"forward": (x, weight.mT), "to input": (g, weight), "to weights": (g.mT, x)}
            for kind, (a, b) in kinds.items():
                if ahead and kind == "to weights":
                    continue
                exact = a.double() @ b.double()
                shapes = [Shape(*shape) for shape in SHAPES]
                if not large:
                    shapes = {"forward": [NARROW, Shape(16, 16, 64, 1, 4), Shape(64, 16, 64, 4, 3)]}.get(kind, [])
                    shapes += {"to input": [LARGE], "to weights": [FLAT, LARGE]}.get(kind, [])
                ways = {"cuBLAS": partial(torch.bmm, a, b)} | {str(tuple(s)): partial(product, a, b, s) for s in shapes}
                least = 2 * S * B * out * into / rate
                for name, way in ways.items():
                    try:
                        off = float((way().double() - exact).abs().max() / exact.abs().max())
                        replay = timing.capture(lambda way=way: [way() for _ in range(STEPS)])
                        spent = min(timing.seconds(replay, 3, device) for _ in range(3)) / STEPS
                        figures = [f"{1e6 * spent:.1f}", f"{1e6 * least:.1f}", f"{off:.1e}"]
                    except Exception as failed:  # what a compiler raises is of many kinds
                        figures = [type(failed).__name__, "", ""]
                    rows.append([layer, "any" if ahead else "128 bytes", kind, name, *figures])
                    print(*rows[-1], flush=True)
    header = ["layer", "begins at", "product", "way", "µs", "least µs", "off"]
    results = {"machine": timing.machine(device), "table": timing.markdown(rows, header)}
    print(results["table"])
    timing.write(results, options.out)
    return results


if __name__ == "__main__":
    main()
