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
    specific = [i for i, pattern in enumerate(patterns) if pattern != REST]
    matches = {name: [i for i in specific if fnmatchcase(name, patterns[i])] for name in names}
    several = [name for name, found in matches.items() if len(found) > 1]
    if several:
        rivals = [patterns[i] for i in matches[several[0]]]
        raise ValueError(
            f"{what}: every tensor must match one pattern, but {few(several)} match several, such as {rivals}; "
            'make the patterns disjoint ("*" alone takes what the others leave)'
        )
    if REST in patterns:
        rest = patterns.index(REST)
        matches = {name: found or [rest] for name, found in matches.items()}
    none = [name for name, found in matches.items() if not found]
    if none:
        raise ValueError(f'{what}: no pattern of {list(patterns)} matches {few(none)}; add one, or "*" for the rest')
    owners = tuple(found[0] for found in matches.values())
    unused = [pattern for i, pattern in enumerate(patterns) if i not in owners]
    if unused and not partial:
        raise ValueError(f"{what}: the patterns {unused} are left without a tensor; the tensors are {few(names)}")
    return owners


def check_patterns(patterns: Iterable[object], what: str) -> None:
    patterns = list(patterns)
    if not patterns:
        raise ValueError(f"{what} needs at least one pattern, got an empty dict")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{what}: patterns must be strings, got {pattern!r}")


def few(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f", … ({len(names)} in all)" if len(names) > limit else "")
