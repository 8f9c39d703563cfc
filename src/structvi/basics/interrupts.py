"""Ctrl-C that waits until a step is whole."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, a first Ctrl-C is kept and acts at the end of the block; a second acts at once.

    Only the main thread gets signals: elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = signal.getsignal(signal.SIGINT)
    if not callable(usual):  # ignored, or not Python's
        yield
        return
    kept: list[Any] = []

    def keep(number: int, frame: Any) -> None:
        kept.append(number)
        if len(kept) > 1:
            usual(number, frame)

    signal.signal(signal.SIGINT, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if kept:
        usual(kept[0], None)
