"""The parts of a mixture: from the constructor's arguments, and where they start."""

import copy
from collections.abc import Sequence

import torch

from ..parameters import Parameters
from ..util.checks import check_integer
from .family import Family
from .starts import normal

#: of `components`: as many as a search finds
AUTO = "auto"


def parts_of(part: Family | Sequence[Family], components: int | str | None) -> list[Family]:
    """The constructor's arguments as a list of recipes, or of bound families."""
    if isinstance(components, str) and components != AUTO:
        raise ValueError(f'components must be a number of parts or "auto", got {components!r}')
    if not isinstance(components, str | None):
        check_integer("components", components)
    if isinstance(part, Family):
        if part.is_bound:
            raise ValueError(
                f"this {type(part).__name__} is bound already and its copies would coincide; "
                "give a recipe, or a list of families bound at points of their own"
            )
        number = 2 if components is None else 1 if isinstance(components, str) else components
        return [copy.deepcopy(part) for _ in range(number)]
    if not isinstance(part, Sequence) or not all(isinstance(one, Family) for one in part):
        raise TypeError(f"Mixture expects a family or a list of families, got {part!r}")
    if not part:
        raise ValueError("Mixture needs at least one part, got an empty list")
    if components == AUTO:
        raise ValueError(f'components="auto" makes its parts of one recipe, got a list of {len(part)}; give one')
    if components not in (None, len(part)):
        raise ValueError(f"components={components} but the list has {len(part)} parts; leave components out")
    bound = [one.is_bound for one in part]
    if any(bound) and not all(bound):
        raise ValueError(
            f"the parts of a mixture must be all recipes or all bound, got bound = {bound}; "
            "bind all of them, or none and the mixture"
        )
    if all(bound) and len(set(part)) < len(part):
        raise ValueError("the same bound family is in the list twice; bind each part by itself")
    return list(part)


def check_shared(spaces: Sequence[Parameters]) -> None:
    for space in spaces[1:]:
        first = spaces[0]
        if (space.names, space.shapes, space.dtype) != (first.names, first.shapes, first.dtype):
            raise ValueError(
                f"the parts of a mixture must share their tensors, got\n{first!r}\nand\n{space!r}\n"
                "bind all of them to spaces with the same names, shapes and dtype"
            )


def apart(parameters: Parameters, components: int, generator: torch.Generator | None) -> list[Parameters]:
    """The space as each part finds it: with current values of its own, so that the parts of one recipe differ."""
    if components == 1:
        return [parameters]
    starts = [parameters.fresh(generator) for _ in range(components)]
    if starts[0] is parameters.initial or torch.equal(starts[0], parameters.initial):  # no layer to ask
        half = parameters.scale * normal(((components + 1) // 2, parameters.size), parameters.initial, generator)
        starts = list(parameters.initial + torch.stack([half, -half], dim=1).flatten(0, 1))[:components]
    return [parameters.at(start) for start in starts]
