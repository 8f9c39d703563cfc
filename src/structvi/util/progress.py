"""Progress of loops: one line that moves in a terminal or a notebook; elsewhere a few plain lines of a fit."""

import sys
import time
from collections.abc import Iterable
from math import isnan
from typing import Any

from tqdm import tqdm


def is_live() -> bool:
    """Return whether a line on stderr can be written again: in a terminal, and in a notebook.

    Example:
        >>> is_live() in (True, False)
        True
    """
    found = sys.modules.get("IPython")
    shell = None if found is None else found.get_ipython()
    return sys.stderr.isatty() or type(shell).__name__ == "ZMQInteractiveShell"


def length_of(loader: Iterable[Any]) -> int | None:
    """Return the number of batches of a loader; None if it is unknown.

    Example:
        >>> length_of([1, 2]), length_of(iter([1, 2]))
        (2, None)
    """
    try:
        return len(loader)  # pyright: ignore[reportArgumentType]
    except TypeError:  # a DataLoader has a length, and that of a stream raises
        return None


def progress_bar(
    items: Iterable[Any] | None = None, *, total: int | None, label: str, show: bool, unit: str = "batch"
) -> "tqdm[Any]":
    """Return the items, or a counter without any, with a bar that goes when they are read, if there is a live line.

    Example:
        >>> list(progress_bar([1, 2], total=2, label="two", show=False))
        [1, 2]
    """
    hidden = not (show and is_live())
    return tqdm(items, total=total, desc=label, leave=False, unit=unit, dynamic_ncols=True, disable=hidden)


class Progress:
    """ELBO with its standard error, and the time left: on a live line, or on a few plain ones.

    Args:
        total: steps in all.
        done: steps made before (a resumed fit).
        label: what these steps are for, where that is not one fit.
    """

    #: plain lines a fit
    LINES = 10

    def __init__(self, total: int, done: int = 0, label: str = ""):
        self.total, self.done, self.first = total, done, done
        self.started, self.bar = time.monotonic(), None
        if is_live():
            self.bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, desc=label or None)

    def update(self, elbo: float, standard_error: float, held_out: float | None, total: int) -> None:
        """Count one step more, of fewer in all if the fit ends early."""
        self.done, self.total = self.done + 1, total
        error = "" if isnan(standard_error) else f" ± {standard_error:.2g}"
        text = f"ELBO {elbo:.5g}{error} nats"
        if held_out is not None:
            text += f", held out {held_out:.4f}"
        if self.bar is not None:
            self.bar.total = total
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update()
        elif self.done % max(1, self.total // self.LINES) == 0 or self.done == self.total:
            left = (time.monotonic() - self.started) / (self.done - self.first) * (self.total - self.done)
            print(f"step {self.done}/{self.total}: {text}, {left:.0f} s left", file=sys.stderr)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
