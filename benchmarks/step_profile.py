"""Where the time of one step goes: kernels on a GPU, operations on a CPU, how many of each and how long in all.

    python -m benchmarks.step_profile --net wide-mlp --rank 16 --draws 8 --captured --device cuda [--precision-form]
    python -m benchmarks.step_profile --net mlp --rank 4 --threads 1                       # operations on the CPU

Rows are by time, of one step on average; beneath them how many there are and what they take together, beside the time
of a step without the profiler. What a GPU waits for between kernels is the difference. Eager steps on a GPU print the
operations that the host launches too, by how often they are.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

import structvi as vi

from . import timing
from .nets import NAMES, problem
from .step_cost import deterministic_step, our_step
from .timing import Step

STEPS = 10


class Row(NamedTuple):
    name: str
    count: float  # a step
    microseconds: float  # a step


def rows_of(step: Step, device: torch.device) -> tuple[list[Row], list[Row]]:
    """Kernels of a GPU, and operations of the host, each by time."""
    timing.warm(step)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    kernels, operations = [], []
    for event in profiler.key_averages():
        on_gpu = event.device_type.name == "CUDA"
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        (kernels if on_gpu else operations).append(Row(event.key, event.count / STEPS, spent / STEPS))
    return sorted(kernels, key=lambda row: -row.microseconds), sorted(operations, key=lambda row: -row.microseconds)


def table(rows: Sequence[Row], top: int, what: str) -> str:
    lines = [[_short(row.name), f"{row.count:g}", f"{row.microseconds:.1f}"] for row in rows[:top]]
    rest = rows[top:]
    if rest:
        lines.append(
            [f"{len(rest)} more", f"{sum(r.count for r in rest):g}", f"{sum(r.microseconds for r in rest):.1f}"]
        )
    lines.append(["all", f"{sum(r.count for r in rows):g}", f"{sum(r.microseconds for r in rows):.1f}"])
    return timing.markdown(lines, [what, "a step", "µs a step"])


def _short(name: str) -> str:
    """A kernel's name without what templates add to it."""
    name = name.removeprefix("void ").replace("at::native::", "").replace("|", "/")
    return name if len(name) <= 90 else f"{name[:60]}…{name[-29:]}"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = timing.parser(__doc__ or "")
    parser.add_argument("--net", choices=NAMES, default="mlp")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rank", type=int, default=16, help="0 for mean field, −1 for the deterministic step")
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--pairs", action="store_true", help="the draws as mirrored pairs")
    parser.add_argument("--precision-form", action="store_true")
    parser.add_argument("--captured", action="store_true")
    parser.add_argument("--top", type=int, default=40)
    options = parser.parse_args(arguments)
    device = timing.start(options)
    given = problem(options.net, 8 if options.quick else options.batch, device)
    if options.rank < 0:
        step, name = deterministic_step(given, options.captured), "deterministic"
    else:
        low_rank = vi.StructuredPrecision if options.precision_form else vi.StructuredNormal
        recipe = low_rank(options.rank) if options.rank else vi.MeanField()
        step, name = our_step(given, recipe, options.draws, options.captured, options.pairs), repr(recipe)
    timing.warm(step)
    spent = timing.measure({0: step}, device, options.repeats)[0]
    microseconds = 1e6 * sorted(spent)[len(spent) // 2]
    kernels, operations = rows_of(step, device)
    way = "captured" if options.captured else "eager"
    said = f"{options.net}, {name}, {options.draws} draws, {way}: {microseconds:.1f} µs a step without the profiler"
    parts = [said]
    if kernels:
        parts.append(table(kernels, options.top, "kernel"))
    if not options.captured:
        by_count = sorted(operations, key=lambda row: -row.count)
        parts.append(table(by_count if kernels else operations, options.top, "operation of the host"))
    results = {"said": said, "microseconds": microseconds, "table": "\n\n".join(parts)}
    results |= {"kernels": [row._asdict() for row in kernels], "operations": [row._asdict() for row in operations]}
    print(results["table"])
    timing.write(results, options.out)
    return results


if __name__ == "__main__":
    main()
