"""Ctrl-C that waits until a step is whole."""

import threading

# past the enumerations that `signal` makes of numbers, which take four times as long
from _signal import SIGINT, getsignal, signal  # pyright: ignore[reportMissingImports]
from typing import Any, Self


class Interrupts:
    """Inside, while `waits`, a first Ctrl-C is kept until `act` or the end of the block; a second acts at once.

    Only the main thread gets signals: elsewhere this does nothing.
    """

    def __init__(self, waits: bool = True):
        self.waits, self.kept = waits, False
        self._usual: Any = None

    def __enter__(self) -> Self:
        usual = getsignal(SIGINT)
        # not one that is ignored, or not Python's
        if threading.current_thread() is threading.main_thread() and callable(usual):
            self._usual = usual
            signal(SIGINT, self._came)
        return self

    def _came(self, number: int, frame: Any) -> None:
        if self.waits and not self.kept:
            self.kept = True
        else:
            self._usual(number, frame)

    def act(self) -> None:
        """Do now what the Ctrl-C that was kept asks for."""
        self.kept = False
        self._usual(SIGINT, None)

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self._usual is None:
            return
        signal(SIGINT, self._usual)
        if self.kept and kind is None:
            self.act()
