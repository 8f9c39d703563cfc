"""Code that draws from torch's global streams, run without touching the user's, by one thread at a time."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .checks import check_generator

_LOCK = threading.RLock()


def _in_a_child() -> None:
    """A process that was forked while another thread was inside would wait for ever."""
    global _LOCK
    _LOCK = threading.RLock()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_in_a_child)


def seed_from(generator: torch.Generator | None = None, count: int = 1) -> list[int]:
    """Return `count` seeds, from the global stream without a generator."""
    check_generator(generator)
    if generator is not None:
        return torch.randint(2**62, (count,), generator=generator, device=generator.device).tolist()
    with _LOCK:  # not from what another thread has borrowed
        return torch.randint(2**62, (count,)).tolist()


@contextmanager
def borrowed_stream(generator: torch.Generator | None = None, rank: int = 0) -> Iterator[None]:
    """Inside, the global streams are seeded from `generator`, for this thread alone; afterwards they are as they were.

    Without a generator the seed comes from the global stream, which advances by that one number. Ranks with a common
    generator get streams of their own: dropout and augmentation differ between them.
    """
    check_generator(generator)
    with _LOCK:
        device = None if generator is None else generator.device
        seed = int(torch.randint(2**62, (), generator=generator, device=device)) + rank
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        streams = [torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)]
        states = [stream.get_state() for stream in streams]
        try:
            for stream in streams:
                stream.manual_seed(seed)
            yield
        finally:
            for stream, state in zip(streams, states, strict=True):
                stream.set_state(state)
