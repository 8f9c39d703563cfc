"""Ctrl-C that waits until a step is whole."""

import threading

# past the enumerations that `signal` makes of numbers, which take four times as long
from _signal import SIGINT, getsignal, signal  # pyright: ignore[reportMissingImports]
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
    usual = getsignal(SIGINT)
    if not callable(usual):  # ignored, or not Python's
        yield
        return
    kept: list[Any] = []

    def keep(number: int, frame: Any) -> None:
        kept.append(number)
        if len(kept) > 1:
            usual(number, frame)

    signal(SIGINT, keep)
    try:
        yield
    finally:
        signal(SIGINT, usual)
    if kept:
        usual(kept[0], None)
