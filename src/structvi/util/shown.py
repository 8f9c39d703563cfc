"""How what takes long tells that it goes on: a bar in a terminal or a notebook, which goes at the end."""

from collections.abc import Iterable
from typing import Any, Self

from tqdm import tqdm

from .live import is_live


def shown(items: Iterable[Any], total: int | None, label: str, show: bool) -> Iterable[Any]:
    """The same items; in a terminal or a notebook with a bar that goes when they are read.

    Example:
        >>> list(shown([1, 2], 2, "two", show=False))
        [1, 2]
    """
    if not show or not is_live():
        return items
    return tqdm(items, total=total, desc=label, leave=False, unit="batch", dynamic_ncols=True)


class Stages:
    """Parts of one work, one after the other: in a terminal or a notebook a bar with the name of the present one.

    Args:
        number: of parts.
        label: what the work is.
        show: False for nothing at all.

    Example:
        >>> with Stages(2, "diagnose", show=False) as stages:
        ...     stages.begin("ELBO")
        ...     stages.begin("k̂")
    """

    def __init__(self, number: int, label: str, show: bool):
        self.bar = None
        if show and is_live():
            self.bar = tqdm(total=number, desc=label, leave=False, unit="part", dynamic_ncols=True)
        self.begun = False

    def begin(self, name: str) -> None:
        """The part before is done, and this one begins."""
        if self.bar is not None:
            self.bar.update(self.begun)
            self.bar.set_postfix_str(name)
        self.begun = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()
