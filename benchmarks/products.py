"""Batched products of linear layers at S weights, one by one: cuBLAS and Triton's tensor cores in float32.

    python -m benchmarks.products [--layers 1024x1024 10x1024] [--draws 8] [--batch 128]

Needs a GPU. Rows are forward, the gradient of the input and that of the weights of each layer, as in
`structvi/networks/batched_linear.py`; "least" is the time of their multiplications at the rate of a large product of
cuBLAS. The weights of draws begin where they do in [S, P]: at any number, or at a multiple of 128 bytes.
"""

from collections.abc import Sequence
from functools import partial

import torch

from . import timing

STEPS = 20


def main(arguments: Sequence[str] | None = None) -> dict:
    from structvi.networks.triton_products import FLAT, LARGE, NARROW, Shape, product

    parser = timing.parser(__doc__ or "")
    parser.add_argument("--layers", nargs="+", default=["1024x1024", "10x1024"])
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--batch", type=int, default=128)
    options = parser.parse_args(arguments)
    device = timing.start(options)
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
                shapes = [LARGE, Shape(128, 64, 32, 8, 3), Shape(128, 128, 32, 8, 3), Shape(64, 128, 32, 4, 3)]
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
