"""Glob patterns on tensor names, where each tensor belongs to exactly one of them."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache

#: Stands for every tensor that no other pattern matches.
REST = "*"


@lru_cache(maxsize=64)  # a prior asks at every step
def assign(names: tuple[str, ...], patterns: tuple[str, ...], what: str, partial: bool = False) -> tuple[int, ...]:
    """Return for each name the index of the one pattern that it matches; "*" takes all other names.

    Args:
        names: tensor names.
        patterns: glob patterns, case-sensitive.
        what: who asks, for the error messages.
        partial: the names are only some of those the patterns were written for, so a pattern may match none.

    Example:
        >>> assign(("body.weight", "head.weight"), ("head.*", "*"), "PerLayer")
        (1, 0)
    """
    rest = patterns.index(REST) if REST in patterns else None
    owners: list[int] = []
    for name in names:
        found = [i for i, pattern in enumerate(patterns) if i != rest and fnmatchcase(name, pattern)]
        if len(found) > 1:
            raise ValueError(
                f"{what}: every tensor must match one pattern, but {name} matches {[patterns[i] for i in found]}; "
                'make the patterns disjoint ("*" alone takes what the others leave)'
            )
        if not found and rest is None:
            raise ValueError(f'{what}: no pattern of {list(patterns)} matches {name}; add one, or "*" for the rest')
        owners += found if found or rest is None else [rest]
    unused = [pattern for i, pattern in enumerate(patterns) if i not in owners]
    if unused and not partial:
        raise ValueError(f"{what}: the patterns {unused} are left without a tensor; the tensors are {few(names)}")
    return tuple(owners)


def check_patterns(patterns: Iterable[object], what: str) -> None:
    """Raise unless there are patterns, all of them strings."""
    patterns = list(patterns)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{what} needs at least one pattern, and all of them strings, got {patterns!r}")


def few(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f", … ({len(names)} in all)" if len(names) > limit else "")
