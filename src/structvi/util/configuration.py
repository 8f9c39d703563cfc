"""Objects that keep their constructor's arguments as attributes of the same names can be rebuilt from them."""

import inspect
from typing import Any


def configuration(instance: object) -> dict[str, Any]:
    """Return the constructor's arguments, read from the attributes of the same names.

    Example:
        >>> class Ball:
        ...     def __init__(self, radius=1.0):
        ...         self.radius = radius
        >>> configuration(Ball(2.0))
        {'radius': 2.0}
    """
    names = list(inspect.signature(type(instance).__init__).parameters)[1:]
    return {name: getattr(instance, name) for name in names}
