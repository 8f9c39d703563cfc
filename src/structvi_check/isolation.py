"""A method at work in a process of its own: what it does there, it does to itself.

Draws and log densities come back as files of numbers in a folder that the two share, in small messages only that they
are there. So no message fills the pipe between them, and neither side waits for the other without end.
"""

import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import inf
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .adapters import Adapter, NotApplicable, density_of
from .measures import checked_log_prob
from .methods import as_adapter
from .problems import Problem

#: longest words of an error that are passed on
LONGEST = 2000
#: how often a process that says nothing is looked at: its own children may keep its end of the connection open
HEARTBEAT_S = 0.5
MODULE = "define its class in a module that can be imported, not in a notebook or __main__ and without lambdas"


class Failed(Exception):
    """The method gave no answer; the message says what happened, `details` is its traceback, where there is one."""

    def __init__(self, words: str, details: str = ""):
        super().__init__(words)
        self.details = details


def start_method(method: Adapter | str, problem: Problem) -> str:
    """ "fork" or "spawn".

    A fork has all that its parent has, also what cannot be pickled. It is for Linux: elsewhere libraries do not survive
    it. Where there is a GPU, CUDA does not, nor autograd once it was used: there what can be pickled is spawned.
    """
    if sys.platform != "linux":
        return "spawn"
    if not torch.cuda.is_available():
        return "fork"
    try:
        pickle.dumps((method, problem))
    except Exception:  # anything may come from a user's object
        return "fork"
    return "fork" if type(method).__module__ == "__main__" else "spawn"


class Work:
    """The parent's end: waits for messages until the time is over. Only the time that it waits counts."""

    def __init__(self, process: BaseProcess, connection: Connection, folder: Path, timeout: float):
        self.process, self.connection, self.folder = process, connection, folder
        self.timeout, self.left, self.ended = timeout, timeout, False

    def start(self) -> None:
        try:
            with warnings.catch_warnings():
                # Python warns of forks where there are threads: the child uses none but its own
                warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*multi-threaded.*")
                self.process.start()
        except Exception as error:  # no memory, too many processes, or this is one that may have none
            raise Failed(f"no process could be started for it: {type(error).__name__}: {error}") from error

    def answer(self) -> tuple[Any, ...]:
        """The next message; `Failed` or `NotApplicable` where it is that, or none comes."""
        deadline = monotonic() + self.left
        while not self.connection.poll():
            self.left = deadline - monotonic()
            if self.left <= 0:
                raise Failed(f"not finished after {self.timeout:g} s: it was ended")
            if self._has_ended() and not self.connection.poll():
                raise Failed(_death(self.end()))
            wait([self.connection, self.process.sentinel], min(self.left, HEARTBEAT_S))
        try:
            kind, *rest = self.connection.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if kind == "not applicable":
            raise NotApplicable(*rest)
        if kind == "raised":
            raise Failed(*rest)
        return tuple(rest)

    def draws(self) -> tuple[Tensor, float, bool]:
        """Draws [n, P], the seconds of the fit, and whether there is a density."""
        seconds, dense = self.answer()
        return self._read("draws"), seconds, dense

    def log_prob(self, theta: Tensor) -> Tensor:
        """log q(θ), computed there: [S, P] → [S]."""
        np.save(self.folder / "points.npy", theta.numpy())
        try:
            self.connection.send("points")
        except OSError:
            raise self._gone() from None
        self.answer()
        return self._read("values")

    def leave(self) -> None:
        """Let it end by itself, for a moment: so it puts away what is shared, such as semaphores."""
        with suppress(OSError):
            self.connection.send("end")
        wait([self.process.sentinel], 2 * HEARTBEAT_S)

    def end(self) -> int | None:
        """Kill the process and all of its group, whatever they do with signals; its exit code."""
        if not self.ended and self.process.pid is not None:
            self.ended = True
            if sys.platform == "linux":  # first: after `join` its number may be another's
                with suppress(ProcessLookupError, PermissionError):  # it is not yet the head of a group
                    os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.join()
        return self.process.exitcode if self.ended else None

    def _gone(self) -> Failed:
        """After the connection was closed from there: by a process that is about to end."""
        until = monotonic() + 10 * HEARTBEAT_S
        while not self._has_ended() and monotonic() < until:
            wait([self.process.sentinel], HEARTBEAT_S)
        return Failed(_death(self.end()))

    def _has_ended(self) -> bool:
        """On Linux without taking leave of it: until then its number, which is its group's, is nobody else's."""
        if sys.platform == "linux" and self.process.pid is not None:
            try:
                return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            except ChildProcessError:  # somebody has, such as another thread that starts processes
                return True
        return self.process.exitcode is not None

    def _read(self, name: str) -> Tensor:
        return torch.from_numpy(np.load(self.folder / f"{name}.npy", allow_pickle=False))


@contextmanager
def at_work(
    method: Adapter | str, problem: Problem, seed: int, n: int, generator: torch.Generator, timeout: float | None
) -> Iterator[Work]:
    """The method is fitted to the question of the problem and makes n draws. Its process ends with the block, and all
    processes that it has started."""
    task: Any = (method, problem.question(), seed, n, generator.get_state())
    start = start_method(method, problem)
    if start == "spawn":  # as bytes: the tensors of arguments would be memory that both processes write to
        task = _pickled(task)
    context: Any = get_context(start)
    with tempfile.TemporaryDirectory(prefix="structvi-check-", ignore_cleanup_errors=True) as folder:
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, folder, task), daemon=False)
        work = Work(process, here, Path(folder), inf if timeout is None else timeout)
        try:
            work.start()
            there.close()
            yield work
            work.leave()
        finally:
            work.end()
            here.close()


def _pickled(task: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(task)
    except Exception as error:  # anything may come from a user's object
        raise Failed(f"cannot be sent to a process of its own ({error}): on this system {MODULE}") from None


def _death(code: int | None) -> str:
    if code is None or code >= 0:
        return f"its process ended with exit code {code} before it was done"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    memory = ", as it is when there is not enough memory" if name == "SIGKILL" else ""
    return f"its process died: {name}{memory}"


def _serve(connection: Connection, folder: str, task: tuple[Any, ...] | bytes) -> None:
    """The child: fit, draw, and the density at points that are sent afterwards."""
    if os.name == "posix":
        os.setsid()  # so that it ends with all that it starts, and Ctrl-C is its parent's
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    torch.set_num_threads(1)  # a fork has none of its parent's; and sums over threads would round differently
    try:
        method, question, seed, n, state = _unpickled(task) if isinstance(task, bytes) else task
        adapter = as_adapter(method)
        began = perf_counter()
        adapter.fit(question, seed)
        seconds = perf_counter() - began
        generator = torch.Generator()
        generator.set_state(state)
        np.save(Path(folder, "draws.npy"), _checked_draws(adapter, question, n, generator).numpy())
        density = density_of(adapter)
        connection.send(("drawn", seconds, density is not None))
        while density is not None and connection.recv() == "points":
            points = torch.from_numpy(np.load(Path(folder, "points.npy")))
            np.save(Path(folder, "values.npy"), checked_log_prob(density, points).cpu().numpy())
            connection.send(("scored",))
    except NotApplicable as reason:
        connection.send(("not applicable", str(reason)[:LONGEST]))
    except BaseException as error:  # also SystemExit
        words, details = _words(error), traceback.format_exc()
        connection.send(("raised", words[:LONGEST], details[-10 * LONGEST :]))


def _checked_draws(adapter: Adapter, on: Problem, n: int, generator: torch.Generator) -> Tensor:
    theta = adapter.draw(n, generator)
    if not isinstance(theta, Tensor) or theta.shape != (n, on.P):
        came = tuple(theta.shape) if isinstance(theta, Tensor) else type(theta).__name__
        raise ValueError(
            f"draw(n, generator) must give a tensor [n, P] = [{n}, {on.P}] of draws of θ in the order of "
            f"problem.space, got {came}"
        )
    if not torch.isfinite(theta).all():
        raise ValueError("draw gave numbers that are not finite")
    return theta.detach().double().cpu().contiguous()


def _words(error: BaseException) -> str:
    message = " ".join(str(error).split())
    words = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if "fork" in message and isinstance(error, RuntimeError):  # of CUDA, of autograd
        words += f"; a forked process has no GPU: {MODULE}, and a new process is started for it"
    return words


def _unpickled(task: bytes) -> tuple[Any, ...]:
    try:
        return pickle.loads(task)
    except Exception as error:
        raise TypeError(f"it cannot be made again in a process of its own ({error}): {MODULE}") from error


def _end_with_parent(folder: str) -> None:
    """A parent that was killed has not ended this process, nor removed the folder."""
    parent = parent_process()
    if parent is None:
        return
    wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    if os.name == "posix":
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
