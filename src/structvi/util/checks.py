"""Checks of arguments, each in one place with one wording: the expected value and the given one."""

from collections.abc import Iterable
from math import inf
from typing import Any, TypeGuard

import torch
from torch import Tensor


def check_integer(name: str, value: object, least: int = 1, optional: bool = False) -> None:
    """Raise ValueError unless the value is an integer of at least `least`, and no bool; None if `optional`.

    Example:
        >>> check_integer("rank", -1, least=0)
        Traceback (most recent call last):
        ValueError: rank must be an integer ≥ 0, got -1
    """
    if optional and value is None:
        return
    if not is_integer(value, least):
        raise ValueError(f"{name} must be {'None or ' if optional else ''}an integer ≥ {least}, got {value!r}")


def is_integer(value: object, least: int = 1) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_seed(seed: object) -> None:
    """Raise ValueError unless the seed is an integer of at least 0.

    Example:
        >>> check_seed(-1)
        Traceback (most recent call last):
        ValueError: seed must be an integer ≥ 0, got -1
    """
    check_integer("seed", seed, 0)


def check_generator(generator: object) -> None:
    """Raise TypeError unless it is a torch.Generator, or None for torch's global stream.

    Example:
        >>> check_generator(3)
        Traceback (most recent call last):
        TypeError: generator must be a torch.Generator().manual_seed(..), got int
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator().manual_seed(..), got {type(generator).__name__}")


def check_positive(value: object, what: str, otherwise: str = "") -> None:
    if not is_positive(value):
        also = f", {otherwise}" if otherwise else ""
        raise ValueError(f"{what} must be a positive number{also}, got {value!r}")


def is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf


def check_fraction(name: str, value: Any) -> None:
    """Raise ValueError unless the value is from 0 to below 1."""
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{name} must be a fraction, from 0 to below 1, got {value!r}")


def check_theta(theta: Any, P: int) -> Tensor:
    """Return θ; raise unless it is [S, P] with S ≥ 1."""
    if not isinstance(theta, Tensor) or theta.ndim != 2 or theta.shape[0] == 0 or theta.shape[1] != P:
        came = tuple(theta.shape) if isinstance(theta, Tensor) else type(theta).__name__
        raise ValueError(f"expected theta of shape [S, P] with S ≥ 1 and P = {P}, got {came}")
    return theta


def check_one_of(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {known}, got {value!r}")


def check_iterable(loader: Any) -> None:
    """Raise TypeError unless the loader gives batches."""
    wrap = "DataLoader(TensorDataset(x, t), batch_size=128, shuffle=True)"
    if isinstance(loader, Tensor):
        raise TypeError(f"expected batches (input, target), got a tensor; wrap it: {wrap}")
    if isinstance(loader, tuple) and loader and all(isinstance(one, Tensor) for one in loader):
        raise TypeError(f"expected batches (input, target), got a tuple of tensors, which is one batch: write {wrap}")
    if not isinstance(loader, Iterable):  # a data set is none
        raise TypeError(f"expected a DataLoader or a list of batches (input, target), got {type(loader).__name__}")


def in_words(size: float) -> str:
    """Return a number of bytes with a unit.

    Example:
        >>> in_words(12), in_words(3.2e9)
        ('12 B', '3.2 GB')
    """
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
