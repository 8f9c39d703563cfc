"""Members of a fit: the same posterior from several starts."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from ..result import Result
from ..util.checks import check_integer, check_one_of, check_positive
from .options import FitOptions
from .restarts import elsewhere

if TYPE_CHECKING:
    from ..posterior import Posterior


def members_of(posterior: "Posterior", count: int, seed: int = 0) -> "list[Posterior]":
    """The posterior itself, and copies of it that begin at fresh draws of the network's initialisation.

    Args:
        posterior: one that has learned nothing yet.
        count: how many in all.
        seed: the start of member c comes from seed + c.

    Example:
        >>> import torch
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> bayes = variationalize(torch.nn.Linear(3, 1), likelihoods.Gaussian(1.0), MeanField())
        >>> first, second = members_of(bayes, 2)
        >>> first is bayes, bool((first.family.mean == second.family.mean).any())
        (True, False)
    """
    check_integer("members", count)
    if posterior.last_fit is not None:
        raise ValueError(
            "members= are fits from different starts, and this posterior was fitted before: variationalize the network "
            "again, or mix posteriors that you have: Ensemble([..])"
        )
    made = [posterior]
    for c in range(1, count):
        one = copy.deepcopy(posterior)
        elsewhere(one, {}, seed + c)
        if all(torch.equal(a, b) for a, b in zip(one.family.parameters(), posterior.family.parameters(), strict=True)):
            raise ValueError(
                f"members= begin at different starts, and {type(posterior.family).__name__} knows of none: a family of "
                "your own writes `begin_again(generator)`"
            )
        made.append(one)
    return made


def temperatures_of(given: Any, members: int) -> list[Any]:
    """λ of each member, of one or of several that are given.

    Example:
        >>> temperatures_of([1.0, 0.3], 3)
        [1.0, 0.3, 1.0]
    """
    check_integer("members", members)
    if not isinstance(given, list | tuple):
        return [given] * members
    if not given or members < len(given):
        raise ValueError(
            f"temperature= has {len(given)} entries, one for a member, and there are members={members}: give at least "
            "as many members, or one number"
        )
    for one in given:
        check_positive(one, "temperature", "and so must every entry of a list be")
    return [given[c % len(given)] for c in range(members)]


def fit_members(
    posterior: "Posterior",
    loader: Iterable[Any],
    options: FitOptions,
    members: int,
    weights: str,
    temperatures: Sequence[Any],
) -> Result:
    """`fit(.., members=M)`: the result of the mixture of them, which it has as `mixture`."""
    check_one_of("weights", weights, ("equal", "stacked"))
    if options.is_around or options.start is not None:
        raise ValueError(
            "members= are fits from different starts: give epochs= or steps=, and no start=. Around networks that are "
            "trained: Ensemble.of(networks, ..)"
        )
    given = {one.name: getattr(options, one.name) for one in fields(options)}
    mixture = posterior.mixed_by(members_of(posterior, members, options.seed))
    given.pop("temperature")
    return mixture.fit(loader, weights=weights, temperature=list(temperatures), **given)
