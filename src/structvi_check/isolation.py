"""A method in a process of its own: it may hang, die or overwrite things, and the suite goes on."""

import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .measures import checked_log_prob
from .methods import Adapter, NotApplicable, log_prob_of
from .problems import Problem

#: in the child: the task before the fit, the method after it
_work: Any = None


class Failed(Exception):
    """The method gave no answer: what happened in words, and its traceback, if there is one."""

    def __init__(self, words: str, details: str = ""):
        super().__init__(words, details)
        self.words, self.details = words, details


class Fitted(NamedTuple):
    """Draws [n, P] of the fitted method, the seconds of its fit, and its log q, [S, P] → [S]."""

    theta: Tensor
    seconds: float
    log_prob: Callable[[Tensor], Tensor] | None


@contextmanager
def fitted_apart(
    method: Adapter, problem: Problem, seed: int, n: int, generator: torch.Generator, timeout: float | None
) -> Iterator[Fitted]:
    """Fit the method to the question of the problem in another process, which ends with the block.

    A fork has what cannot be pickled. CUDA, and autograd where there is a GPU, do not survive one; nor do libraries
    on other systems than Linux. There a new process is started: the method's class must be in a module that can be
    imported, not in a notebook or `__main__`.

    Raises:
        Failed: the method raised, died, or took longer than `timeout` seconds in all.
        NotApplicable: the method says so.
    """
    task: Any = (method, problem.question(), seed, n, generator.get_state())
    start = "fork" if sys.platform == "linux" and not torch.cuda.is_available() else "spawn"
    if start == "spawn":
        task = pickle.dumps(task)  # as bytes: tensors of arguments would be memory that both processes write to
    pool = ProcessPoolExecutor(1, get_context(start), _receive, (task,))
    left, pid = timeout, None

    def ask(function: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal left
        began = monotonic()
        try:
            return pool.submit(_reported, function, *arguments).result(left)
        except TimeoutError:
            raise Failed(f"not finished after {timeout:g} s: it was ended") from None
        except BrokenProcessPool:
            words = "its process died before it was done, as it does when there is not enough memory"
            raise Failed(words) from None
        finally:
            left = None if left is None else left - (monotonic() - began)

    try:
        with warnings.catch_warnings():  # Python warns of forks where there are threads: the child uses its own alone
            warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*multi-threaded.*")
            pid = ask(os.getpid)
        theta, seconds, dense = ask(_fit)
        log_prob = (lambda points: torch.from_numpy(ask(_log_prob, points.numpy()))) if dense else None
        yield Fitted(torch.from_numpy(theta), seconds, log_prob)
    finally:
        if pid is not None:
            _kill(pid)
        pool.shutdown(cancel_futures=True)


def _kill(pid: int) -> None:
    """End a process and all that it has started, whatever they do with signals."""
    with suppress(ProcessLookupError, PermissionError):
        if os.name == "posix":
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGTERM)


def _receive(task: Any) -> None:
    """Begin in the child."""
    global _work
    if os.name == "posix":
        os.setsid()  # a group of its own, which ends as one; Ctrl-C is the parent's
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    _work = task


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        _kill(os.getpid())


def _reported(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call in the child; whatever a method raises, SystemExit too, becomes words that can be sent."""
    try:
        return function(*arguments)
    except NotApplicable as reason:
        raise NotApplicable(str(reason)) from None
    except BaseException as error:
        message = " ".join(str(error).split())
        raise Failed(f"{type(error).__name__}: {message}"[:2000], traceback.format_exc()) from None


def _fit() -> tuple[np.ndarray, float, bool]:
    global _work
    method, problem, seed, n, state = pickle.loads(_work) if isinstance(_work, bytes) else _work
    began = perf_counter()
    method.fit(problem, seed)
    seconds = perf_counter() - began
    generator = torch.Generator()
    generator.set_state(state)
    theta = method.draw(n, generator)
    if not isinstance(theta, Tensor) or theta.shape != (n, problem.P):
        came = tuple(theta.shape) if isinstance(theta, Tensor) else type(theta).__name__
        raise ValueError(
            f"draw(n, generator) must give a tensor [n, P] = [{n}, {problem.P}] of draws of θ in the order of "
            f"problem.space, got {came}"
        )
    if not torch.isfinite(theta).all():
        raise ValueError("draw gave numbers that are not finite")
    _work = method
    return theta.detach().double().cpu().numpy(), seconds, log_prob_of(method) is not None


def _log_prob(points: np.ndarray) -> np.ndarray:
    log_prob = log_prob_of(_work)
    assert log_prob is not None
    return checked_log_prob(log_prob, torch.from_numpy(points)).cpu().numpy()
