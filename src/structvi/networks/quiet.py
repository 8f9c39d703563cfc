"""Networks that draw random numbers of their own, and those that do not: only the first must wait for each other."""

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

from ..util.random_streams import alone, borrowed_stream

T = TypeVar("T")


def with_stream(run: Callable[[], T], generator: torch.Generator, quiet: set[Hashable], key: Hashable) -> T:
    """`run()`, which draws whatever is random in it from `generator`; the global streams stay as they are.

    It is run by one thread at a time, on global streams seeded for it, until it is seen to draw nothing. From then on
    threads run it side by side; where the streams have moved meanwhile, by this thread or another, once more alone.

    Args:
        run: the same again for a generator of the same state.
        generator: its next number is the seed.
        quiet: the keys of what has been seen to draw nothing, kept by the caller.
        key: of what is run.

    Example:
        >>> quiet = set()
        >>> with_stream(lambda: 3, torch.Generator(), quiet, "three"), quiet
        (3, {'three'})
        >>> drawn = [with_stream(lambda: torch.rand(()).item(), torch.Generator(), quiet, "number") for _ in range(2)]
        >>> drawn[0] == drawn[1], quiet
        (True, {'three'})
    """
    if key in quiet:
        before = _states()
        result = run()
        if _same(before, _states()):
            return result
        quiet.discard(key)
        del result
    with alone(), borrowed_stream(generator):
        before = _states()
        result = run()
        if _same(before, _states()):
            quiet.add(key)
    return result


def _states() -> list[Tensor]:
    """Of all global streams."""
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [own.get_state() for own in (torch.default_generator, *devices)]


def _same(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))
