"""Checks of arguments, each in one place with one wording: the expected value and the given one."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from math import inf
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def with_hints(function: Function) -> Function:
    """Return the function with errors that say what to give for an argument that it does not have.

    Example:
        >>> @with_hints
        ... def fit(loader, *, epochs=1): ...
        >>> fit([], epoch=3)
        Traceback (most recent call last):
        TypeError: fit has no argument 'epoch'; did you mean 'epochs'?
    """
    kinds = {name: one.kind for name, one in signature(function).parameters.items()}
    most = sum(kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds.values())
    takes_others = Parameter.VAR_KEYWORD in kinds.values()

    @wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        if len(args) > most:
            hint = "give the others by name"
            if any(isinstance(one, Tensor) for one in args):
                hint = "give data as one argument, DataLoader(TensorDataset(x, t), batch_size=128, shuffle=True)"
            own = list(kinds)[:1] == ["posterior"]  # of a method
            names = ", ".join(list(kinds)[own:most])
            raise TypeError(f"{function.__name__}({names}) got {len(args) - own} arguments by position: {hint}")
        for name in () if takes_others else options:
            if name not in kinds:
                near = get_close_matches(name, kinds, 1) or sorted(set(kinds) - set(list(kinds)[:most]))
                hint = f"did you mean {near[0]!r}?" if len(near) == 1 else f"there are {', '.join(near)}"
                raise TypeError(f"{function.__name__} has no argument {name!r}; {hint}")
        return function(*args, **options)

    return cast("Function", called)


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
        came = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name} must be {'None or ' if optional else ''}an integer ≥ {least}, got {came}")


def is_integer(value: object, least: int = 1) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_seed(seed: object) -> None:
    """Raise ValueError unless the seed is an integer of at least 0.

    Example:
        >>> check_seed(torch.Generator())
        Traceback (most recent call last):
        ValueError: seed must be an integer ≥ 0, got Generator; generator= is an argument of what returns draws
    """
    if not is_integer(seed, 0):
        came = repr(seed) if isinstance(seed, int | float | str) else type(seed).__name__
        also = "; generator= is an argument of what returns draws" if isinstance(seed, torch.Generator) else ""
        raise ValueError(f"seed must be an integer ≥ 0, got {came}{also}")


def check_generator(generator: object) -> None:
    """Raise TypeError unless it is a torch.Generator, or None for torch's global stream.

    Example:
        >>> check_generator(3)
        Traceback (most recent call last):
        TypeError: generator must be a torch.Generator, got int: write torch.Generator().manual_seed(3)
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        number = generator if is_integer(generator, 0) else 0
        raise TypeError(
            f"generator must be a torch.Generator, got {type(generator).__name__}: "
            f"write torch.Generator().manual_seed({number})"
        )


def check_positive(value: object, what: str, otherwise: str = "") -> None:
    if not is_positive(value):
        also = f", {otherwise}" if otherwise else ""
        raise ValueError(f"{what} must be a positive number{also}, got {value!r}")


def is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf


def check_fraction(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a fraction of the steps of a fit."""
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{name} is a fraction of the steps, from 0 to below 1, got {value!r}")


def check_theta(theta: Any, P: int) -> Tensor:
    """Return θ; raise unless it is [S, P] with S ≥ 1."""
    if not isinstance(theta, Tensor) or theta.ndim != 2 or theta.shape[0] == 0 or theta.shape[1] != P:
        came = tuple(theta.shape) if isinstance(theta, Tensor) else type(theta).__name__
        raise ValueError(
            f"expected theta of shape [S, P] with S ≥ 1 and P = {P}, got {came}; for one point add a row axis"
        )
    return theta


def check_one_of(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {known}, got {value!r}")


def check_iterable(loader: Any) -> None:
    if not isinstance(loader, Iterable):  # a data set is none
        raise TypeError(
            f"expected a DataLoader or another iterable of batches (input, target), got {type(loader).__name__}; "
            "wrap a data set: DataLoader(data, batch_size=128, shuffle=True)"
        )
    if isinstance(loader, tuple) and loader and all(isinstance(one, Tensor) for one in loader):
        raise TypeError(
            "expected batches (input, target), got a tuple of tensors, which is one batch: write "
            "DataLoader(TensorDataset(x, t), batch_size=128, shuffle=True)"
        )


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
