"""Calls of one function in several processes; the results do not depend on how many there are."""

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from typing import Any

import torch
from tqdm import tqdm

#: label, function and the arguments of each call → results in the same order
Starmap = Callable[[str, Callable[..., Any], Sequence[tuple[Any, ...]]], list[Any]]


@contextmanager
def processes(count: int) -> Iterator[Starmap]:
    """Yield `starmap`; with one process everything runs in this one. An error or Ctrl-C ends the others at once."""

    def starmap(label: str, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        calls = run(function, *zip(*arguments, strict=True))
        return list(tqdm(calls, label, len(arguments), disable=None))

    if count == 1:
        run, threads = map, torch.get_num_threads()
        torch.set_num_threads(1)  # sums over several threads round differently
        try:
            yield starmap
        finally:
            torch.set_num_threads(threads)
        return
    others = set(active_children())
    with ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_start) as pool:
        run = pool.map
        try:
            yield starmap
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in set(active_children()) - others:
                child.terminate()
            raise


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C too and ends this process
    torch.set_num_threads(1)
