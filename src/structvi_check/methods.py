"""What is examined, by name or as an object: our families, peers, and methods of the user's."""

from structvi.families import Family

from .adapters import Adapter, Ours, ours
from .peers import PEERS


def as_adapter(method: object) -> Adapter:
    """A method of the user's in the form that is examined: an adapter, a family, or a name."""
    if isinstance(method, str):
        known = ours()
        if method in known:
            return known[method]
        if method in PEERS:
            return PEERS[method]()
        raise ValueError(f"there is no method {method!r}; there are {', '.join([*known, *PEERS])}")
    if isinstance(method, Family):
        return Ours(method)
    if isinstance(method, type):
        raise TypeError(f"a method must be an object, not a class: write {method.__name__}()")
    if not isinstance(method, Adapter):
        missing = [name for name in ("name", "fit", "draw") if not hasattr(method, name)]
        raise TypeError(
            f"a method needs `name`, `fit(problem, seed)` and `draw(n, generator) -> [n, P]`; "
            f"{type(method).__name__} has no {' and no '.join(missing)}"
        )
    if not isinstance(method.name, str):
        raise TypeError(f"the name of a method must be a string, {type(method).__name__} has {method.name!r}")
    return method
