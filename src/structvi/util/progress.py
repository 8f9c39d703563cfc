"""Progress bars: one line that moves in a terminal or a notebook, and nothing in a log."""

import sys
from collections.abc import Iterable
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


def progress_bar(
    items: Iterable[Any] | None = None, *, total: int | None, label: str, show: bool, unit: str = "batch"
) -> tqdm:
    """Return the items, or a counter without any, with a bar that goes when they are read, if there is a live line.

    Example:
        >>> list(progress_bar([1, 2], total=2, label="two", show=False))
        [1, 2]
    """
    hidden = not (show and is_live())
    return tqdm(items, total=total, desc=label, leave=False, unit=unit, dynamic_ncols=True, disable=hidden)
