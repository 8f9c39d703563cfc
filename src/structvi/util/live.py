"""Whether a line on stderr can be written again: in a terminal, and in a notebook."""

import sys


def is_live() -> bool:
    """Whether a progress bar would be one line that moves, and not many lines of a log.

    Example:
        >>> is_live() in (True, False)
        True
    """
    return sys.stderr.isatty() or in_notebook()


def in_notebook() -> bool:
    """Whether this is a kernel of Jupyter: IPython is loaded, and its shell talks to a page."""
    found = sys.modules.get("IPython")
    shell = None if found is None else found.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"
