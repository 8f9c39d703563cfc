"""Names of a package that are loaded when they are asked for: what few programs use costs the others no time."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def later(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package.

    Args:
        package: its `__name__`.
        names: name → the module below the package that has it; with a "." at its end the name is that module itself.

    Example:
        >>> later("structvi", {"MeanField": "families.mean_field"})("MeanField").__name__
        'MeanField'
    """

    def load(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        where = names[name]
        module = import_module(f"{package}.{where.rstrip('.')}")
        return module if where.endswith(".") else getattr(module, name)

    return load
