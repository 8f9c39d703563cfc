"""Pieces of work, run one after the other or in several processes, with a word on how far they are."""

import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from time import perf_counter
from typing import Any

import torch


@dataclass(frozen=True)
class Job:
    """`function(*arguments)`, picklable; `weight` is its share of the time, for the estimate of what is left."""

    label: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    weight: float = 1.0


def run(jobs: list[Job], workers: int) -> list[Any]:
    """The results in the order of the jobs; they do not depend on the number of workers.

    An interrupt, or an error of a job, ends the workers at once and is passed on.
    """
    results: list[Any] = [None] * len(jobs)
    left = list(range(len(jobs)))  # in order: the first of them is running
    with progress(jobs) as advance:

        def finish(index: int, result: Any) -> None:
            results[index] = result
            left.remove(index)
            advance(jobs[index].weight, jobs[left[0]].label if left else "done")

        if workers == 1:
            with _one_thread():
                for index, job in enumerate(jobs):
                    finish(index, job.function(*job.arguments))
            return results
        before = set(active_children())
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker)
        try:
            futures = {pool.submit(job.function, *job.arguments): index for index, job in enumerate(jobs)}
            for future in as_completed(futures):
                finish(futures[future], future.result())
        except BaseException:
            for worker in set(active_children()) - before:
                worker.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    return results


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and ends this
    torch.set_num_threads(1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """As in the workers: sums split over threads would round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


Advance = Callable[[float, str], None]


@contextmanager
def progress(jobs: list[Job]) -> Iterator[Advance]:
    """Called with the weight of what is done and what runs now: a bar on a terminal, else a line at every tenth."""
    total = sum(job.weight for job in jobs)
    if sys.stderr.isatty():
        with _bar(total, jobs[0].label) as advance_bar:
            yield advance_bar
        return
    began, done, said = perf_counter(), 0.0, 0

    def advance(weight: float, running: str) -> None:
        nonlocal done, said
        done += weight
        tenth = int(10 * done / total + 1e-9)
        if tenth > said:
            said = tenth
            left = (perf_counter() - began) * (total - done) / done
            print(f"{10 * tenth:3d} %  {running:<38}  about {max(left, 0):.0f} s left", file=sys.stderr, flush=True)

    yield advance


@contextmanager
def _bar(total: float, first: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:<30}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("· left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(first, total=total)
        yield lambda weight, running: bar.update(task, advance=weight, description=running)
