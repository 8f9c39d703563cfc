"""How the benchmarks measure: interleaved repeats, medians, peak memory, the machine they ran on, tables.

    python -m benchmarks.timing PAGE.md results/step_cost_cpu.json ...      # tables into the page

fills what stands between `<!-- table step_cost_cpu -->` and `<!-- end -->` from the file of that name.
"""

import argparse
import gc
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

PEERS = ("pyro-ppl", "bayesian-torch", "blitz-bayesian-pytorch", "ivon-opt", "posteriors", "pyvarinf")
WARM_UP = 3
Step = Callable[[], object]


class Prepared(NamedTuple):
    step: Step
    live: int  # bytes kept between steps: weights, variational parameters, state of the optimizer
    peak: int  # bytes at the height of a step, `live` among them


def prepare(build: Callable[[], Step], device: torch.device, captured: bool = False) -> Prepared:
    """Build a step, warm it up, and measure its memory: what it alone holds.

    A captured step allocates when it is built and first called, and not when it is replayed: its peak is that of the
    capture and of the warm-up before it.
    """
    if device.type != "cuda":
        step, (live, _) = allocated(lambda: warm(build()))
        _, (_, height) = allocated(step)
        return Prepared(step, live, live + height)
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step = warm(build())
    torch.cuda.synchronize(device)
    live = torch.cuda.memory_allocated(device)
    if not captured:
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
    return Prepared(step, live - before, torch.cuda.max_memory_allocated(device) - before)


def warm(step: Step) -> Step:
    for _ in range(WARM_UP):
        step()
    return step


def capture(step: Step) -> Step:
    """The step as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm(step)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()

    def replay(_used: tuple = (step, kept)) -> None:  # the graph reads and writes their tensors
        graph.replay()

    return replay


def allocated(function: Callable[[], Any]) -> tuple[Any, tuple[int, int]]:
    """The result; and bytes on the CPU held more than before at the end, and at the height of the call."""
    gc.disable()  # what others left behind is freed before or after, not within
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = function()
    finally:
        gc.enable()
    events: list[Any] = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = list(accumulate((nbytes for _, nbytes in changes), initial=0))
    return result, (held[-1], max(held))


def seconds(step: Step, times: int, device: torch.device) -> float:
    """Of one of `times` steps in a row."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(times):
            step()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1e3 / times
    since = clock()
    for _ in range(times):
        step()
    return (clock() - since) / times


def clock() -> float:
    """Seconds on a CPU: with one thread those of the processor, to which other work on the machine adds nothing."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def measure(
    steps: Mapping[Any, Step], device: torch.device, repeats: int = 15, span: float = 0.02, budget: float = math.inf
) -> dict[Any, list[float]]:
    """Seconds of each step in each repeat. All take their turn in a repeat, so that whatever else the machine does
    falls on all alike; a turn is as many steps as take `span` seconds. At least three repeats, and no more than
    `repeats` or than fit in `budget` seconds.
    """
    once = {name: seconds(step, 1, device) for name, step in steps.items()}
    times = {name: max(1, math.ceil(span / value)) for name, value in once.items()}
    results: dict[Any, list[float]] = {name: [] for name in steps}
    start = time.perf_counter()
    for repeat in range(repeats):
        if repeat >= 3 and (time.perf_counter() - start) * (repeat + 1) / repeat > budget:
            break
        for name, step in steps.items():
            results[name].append(seconds(step, times[name], device))
    return results


def ratio(values: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Median over repeats of the ratio within a repeat, and its quartiles."""
    ratios = [a / b for a, b in zip(values, base, strict=True)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return {"ratio": median(ratios), "ratio_low": low, "ratio_high": high}


def bandwidth(device: torch.device, megabytes: int | None = None) -> float:
    """Bytes read and written a second by a copy that no cache holds."""
    size = (megabytes or (2048 if device.type == "cuda" else 256)) * 2**20
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / best(lambda: target.copy_(source), device)


def matmul_rate(device: torch.device, size: int | None = None) -> float:
    """Floating-point operations a second of a float32 matrix product, at the precision torch is set to."""
    n = size or (8192 if device.type == "cuda" else 1024)
    a = torch.randn(n, n, device=device)
    return 2 * n**3 / best(lambda: a @ a, device)


def best(step: Step, device: torch.device) -> float:
    """Rates of a device are its best: the least of ten, after warming up."""
    warm(step)
    return min(seconds(step, 3, device) for _ in range(10))


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures depend on: processor, threads, load, versions."""
    names = ("structvi", "torch", "numpy", *PEERS)
    # torch with its build, +cu124 or +cpu, which the metadata of its wheel may leave out
    versions = {name: version(name) for name in names} | {"torch": str(torch.__version__)}
    result: dict[str, Any] = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "versions": {name: value for name, value in versions.items() if value},
        "device": str(device),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
    }
    if device.type == "cuda":
        result |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return result


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def described(machine: Mapping[str, Any]) -> str:
    seconds = "processor seconds" if machine["threads"] == 1 else "wall-clock seconds"
    where = f"{machine['processor']}, {machine['threads']} threads, {seconds}, load {machine['load']}"
    where = machine.get("gpu", where)
    return f"{where}; " + ", ".join(f"{name} {value}" for name, value in machine["versions"].items())


def markdown(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """A table whose columns line up in a terminal too.

    Example:
        >>> print(markdown([["a", "1.0"]], ["name", "ms"]))
        | name |  ms |
        | ---- | --: |
        | a    | 1.0 |
    """
    widths = [max(2, *map(len, column)) for column in zip(header, *rows, strict=True)]  # "-:" is the shortest rule

    def line(cells: Sequence[str]) -> str:
        aligned = [cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))]
        return f"| {' | '.join(aligned)} |"

    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def parser(description: str) -> argparse.ArgumentParser:
    """What all benchmarks take."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--device", default="cpu", help="cpu or cuda")
    result.add_argument("--threads", type=int, default=2, help="of torch on the CPU")
    result.add_argument("--repeats", type=int, default=15)
    result.add_argument("--quick", action="store_true", help="small sizes, three repeats: shows that it runs, no more")
    result.add_argument("--peers", type=Path, help="a folder that holds the peers, for a machine without them")
    result.add_argument("--out", type=Path, help="write everything as JSON")
    return result


def start(options: argparse.Namespace) -> torch.device:
    if options.peers:
        if not options.peers.is_dir():
            raise ValueError(f"--peers expects a folder of packages, got {options.peers}")
        sys.path.insert(0, str(options.peers.resolve()))
    torch.set_num_threads(options.threads)
    # The C library returns freed blocks to the system, and steps then pay for page faults, unless a block of this size
    # was freed before: from the first row on all are alike.
    torch.ones(31 * 2**18)
    if options.quick:
        options.repeats = min(options.repeats, 3)
    return torch.device(options.device)


def write(results: Mapping[str, Any], out: Path | None) -> None:
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1))


def fill(page: str, tables: Mapping[str, str]) -> str:
    """The page with these tables between their marks.

    Example:
        >>> fill("<!-- table a -->old<!-- end -->", {"a": "new"}).split()
        ['<!--', 'table', 'a', '-->', 'new', '<!--', 'end', '-->']
    """
    for name, table in tables.items():
        mark = f"<!-- table {name} -->"
        if mark not in page:
            raise ValueError(f"the page has no place for {name}: write {mark} and <!-- end --> where it belongs")
        before, _, rest = page.partition(mark)
        page = f"{before}{mark}\n\n{table}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("page", type=Path)
    command.add_argument("results", type=Path, nargs="+", help="JSON files of the benchmarks")
    options = command.parse_args(arguments)
    tables = {path.stem: json.loads(path.read_text())["table"] for path in options.results}
    options.page.write_text(fill(options.page.read_text(), tables))


if __name__ == "__main__":
    main()
