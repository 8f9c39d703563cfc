"""Pieces of work, run one after the other or in several processes, with a word on how far they are."""

import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from time import perf_counter
from typing import Any

import torch


@dataclass(frozen=True)
class Job:
    """`function(*arguments)`, picklable; `weight` is its share of the time, for the estimate of what is left."""

    label: str
    function: Callable[..., Any]
    arguments: tuple
    weight: float = 1.0


def run(jobs: list[Job], workers: int) -> list:
    """The results in the order of the jobs; they do not depend on the number of workers.

    An interrupt cancels what has not begun, waits for what has, and is passed on.
    """
    results: list[Any] = [None] * len(jobs)
    with progress(sum(job.weight for job in jobs)) as advance:
        if workers == 1:
            with _one_thread():
                for index, job in enumerate(jobs):
                    results[index] = job.function(*job.arguments)
                    advance(job)
            return results
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker)
        try:
            futures = {pool.submit(job.function, *job.arguments): index for index, job in enumerate(jobs)}
            for future in as_completed(futures):
                results[futures[future]] = future.result()
                advance(jobs[futures[future]])
        finally:
            pool.shutdown(cancel_futures=True)
    return results


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and cancels
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


@contextmanager
def progress(total: float) -> Iterator[Callable[[Job], None]]:
    """A bar on a terminal, else a line on stderr at every tenth."""
    if sys.stderr.isatty():
        with _bar(total) as advance_bar:
            yield advance_bar
        return
    began, done, said = perf_counter(), 0.0, 0

    def advance(job: Job) -> None:
        nonlocal done, said
        done += job.weight
        tenth = int(10 * done / total + 1e-9)
        if tenth > said:
            said = tenth
            left = (perf_counter() - began) * (total - done) / done
            print(f"{10 * tenth:3d} %  {job.label:<32}  about {max(left, 0):.0f} s left", file=sys.stderr, flush=True)

    yield advance


@contextmanager
def _bar(total: float) -> Iterator[Callable[[Job], None]]:
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
        task = bar.add_task("starting", total=total)
        yield lambda job: bar.update(task, advance=job.weight, description=job.label)
