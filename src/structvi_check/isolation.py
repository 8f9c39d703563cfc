"""A method in a process of its own: it may hang, die or overwrite things, and the suite goes on."""

import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from multiprocessing import get_context, parent_process
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .measures import points
from .methods import Adapter, NotApplicable, log_prob_of
from .problems import Problem


class Failed(Exception):
    """The method gave no answer: what happened in words, and its traceback, if there is one."""

    def __init__(self, words: str, details: str = ""):
        super().__init__(words, details)
        self.words, self.details = words, details


class Fitted(NamedTuple):
    """Draws [n, P] of the fitted method, the seconds of its fit, and its log q at `points`, or None."""

    theta: Tensor
    seconds: float
    log_q: Tensor | None


def fit_apart(
    method: Adapter, problem: Problem, seed: int, n: int, generator: torch.Generator, timeout: float | None
) -> Fitted:
    """Fit the method to the question of the problem in another process, which ends with the call.

    A fork has what cannot be pickled. CUDA, and autograd where there is a GPU, do not survive one; nor do libraries
    on other systems than Linux. There a new process is started: the method's class must be in a module that can be
    imported, not in a notebook or `__main__`.

    Raises:
        Failed: the method raised, died, or took longer than `timeout` seconds in all.
        NotApplicable: the method says so.
    """
    task: Any = (method, problem.question(), points(problem), seed, n, generator.initial_seed())
    start = "fork" if sys.platform == "linux" and not torch.cuda.is_available() else "spawn"
    if start == "spawn":
        task = pickle.dumps(task)  # as bytes: tensors of arguments would be memory that both processes write to
    context: Any = get_context(start)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, task))
    try:
        with warnings.catch_warnings():  # Python warns of forks where there are threads: the child uses its own alone
            warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*multi-threaded.*")
            process.start()
        sender.close()
        if not receiver.poll(timeout):
            raise Failed(f"not finished after {timeout:g} s: it was ended")
        answer = receiver.recv()
    except EOFError:
        raise Failed("its process died before it was done, as it does when there is not enough memory") from None
    finally:
        if process.pid is not None:
            _kill(process.pid)
            process.kill()  # if it had no group yet
            process.join()
    if isinstance(answer, Exception):
        raise answer
    theta, seconds, log_q = answer
    return Fitted(torch.from_numpy(theta), seconds, None if log_q is None else torch.from_numpy(log_q))


def _kill(pid: int) -> None:
    """End a process and all that it has started, whatever they do with signals."""
    with suppress(ProcessLookupError, PermissionError):
        if os.name == "posix":
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGTERM)


def _answer(sender: Any, task: Any) -> None:
    """Run in the child; whatever a method raises, SystemExit too, becomes words that can be sent."""
    if os.name == "posix":
        os.setsid()  # a group of its own, which ends as one; Ctrl-C is the parent's
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    try:
        sender.send(_fit(*(pickle.loads(task) if isinstance(task, bytes) else task)))
    except NotApplicable as reason:
        sender.send(NotApplicable(str(reason)))
    except BaseException as error:
        message = " ".join(str(error).split())
        sender.send(Failed(f"{type(error).__name__}: {message}"[:2000], traceback.format_exc()))


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        _kill(os.getpid())


def _fit(
    method: Adapter, problem: Problem, others: Tensor, seed: int, n: int, draw_seed: int
) -> tuple[np.ndarray, float, np.ndarray | None]:
    began = perf_counter()
    method.fit(problem, seed)
    seconds = perf_counter() - began
    theta = method.draw(n, torch.Generator().manual_seed(draw_seed))
    if not isinstance(theta, Tensor) or theta.shape != (n, problem.P):
        came = tuple(theta.shape) if isinstance(theta, Tensor) else type(theta).__name__
        raise ValueError(
            f"draw(n, generator) must give a tensor [n, P] = [{n}, {problem.P}] of draws of θ in the order of "
            f"problem.space, got {came}"
        )
    if not torch.isfinite(theta).all():
        raise ValueError("draw gave numbers that are not finite")
    theta, log_prob, log_q = theta.detach().double().cpu(), log_prob_of(method), None
    if log_prob is not None and problem.identified:
        with torch.no_grad():
            log_q = log_prob(torch.cat([others, theta]))
        if not isinstance(log_q, Tensor) or log_q.shape != (len(others) + n,):
            came = tuple(log_q.shape) if isinstance(log_q, Tensor) else type(log_q).__name__
            raise ValueError(f"log_prob must give one number for each of {len(others) + n} rows, it gave {came}")
        if log_q.isnan().any():
            raise ValueError("log_prob gave NaN; it is the logarithm of a density, or −inf where that is zero")
        log_q = log_q.detach().double().cpu().numpy()
    return theta.numpy(), seconds, log_q
