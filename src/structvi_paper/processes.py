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
        if pool is None:
            return [function(*each) for each in tqdm(arguments, label, disable=None)]
        calls = [pool.submit(function, *each) for each in arguments]
        return [call.result() for call in tqdm(calls, label, disable=None)]

    pool, threads, others = None, torch.get_num_threads(), set(active_children())
    if count > 1:
        pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_start)
    else:
        torch.set_num_threads(1)  # sums over several threads round differently
    try:
        yield starmap
    except BaseException:
        for child in set(active_children()) - others:
            child.terminate()
        raise
    finally:
        torch.set_num_threads(threads)
        if pool is not None:
            pool.shutdown()


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C too and ends this process
    torch.set_num_threads(1)
