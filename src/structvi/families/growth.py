"""A fitted family with more freedom, at what it was: more columns of a factor, more parts of a mixture."""

import copy

import torch

from ..util.checks import is_integer
from .family import Family
from .low_rank import LowRankFamily
from .mixture import LOGIT_UNIT, Mixture
from .precision import LowRankPrecision
from .scale_mixture import ScaleMixture
from .starts import normal
from .structured import LowRankNormal

#: New columns of a factor start at this size, relative to its unit.
NEW_COLUMN = 0.01
#: What new parts of a mixture weigh together, to begin with.
NEW_WEIGHT = 0.1


@torch.no_grad()
def with_rank(family: Family, rank: int, generator: torch.Generator) -> Family:
    """The same normal with small new columns; a normal without a factor becomes a `LowRankNormal`.

    Example:
        >>> from structvi import MeanField, Parameters
        >>> q = MeanField().bind(Parameters({"z": torch.zeros(3)}))
        >>> with_rank(q, 2, torch.Generator().manual_seed(0)).rank
        2
    """
    if isinstance(family, ScaleMixture):
        grown = copy.deepcopy(family)
        part = with_rank(family.part, rank, generator)
        assert isinstance(part, LowRankPrecision)
        grown.part, grown.rank = part, rank
        return grown
    form = family.low_rank_form()
    if form is None or family.space is None:
        raise TypeError(
            "grow(rank=) is for MeanField, LowRankNormal, LowRankPrecision and ScaleMixture, and normals of your "
            f"own with the parameters `mean` and `log_scale` alone, not for {type(family).__name__}"
        )
    present = form.factor.shape[-1]
    if not is_integer(rank, present + 1):
        raise ValueError(f"the rank is {present} already: give an integer above that, got {rank!r}")
    recipe = LowRankNormal(rank) if form.recipe is None else form.recipe(rank)
    grown = recipe.bind(family.space, generator).to(form.mean.device)
    assert isinstance(grown, LowRankFamily)
    grown.mean.copy_(form.mean)
    grown.log_scale.copy_(form.log_scale)
    grown.unit.copy_(form.unit)
    columns = NEW_COLUMN * normal((family.space.size, rank - present), form.unit, generator)
    grown.factor.copy_(torch.cat([form.factor, columns], dim=-1))
    return grown


@torch.no_grad()
def with_components(family: Family, components: int, generator: torch.Generator) -> Mixture:
    """A mixture whose first part it is; new parts start as copies of old ones, each at a draw from it."""
    parts, weights = family.mixture_parts()
    if not is_integer(components, len(parts) + 1):
        raise ValueError(f"there are {len(parts)} parts already: give an integer above that, got {components!r}")
    new = components - len(parts)
    if not family().bound:
        raise ValueError(
            "grow(components=) compares ELBOs, and this posterior has point masses: there is no bound to compare"
        )
    own = torch.Generator(weights.device).manual_seed(generator.initial_seed())
    # which part each new one copies its shape from
    origins = torch.multinomial(weights.double().cpu(), new, replacement=True, generator=generator).tolist()
    added: list[Family] = []
    for origin in origins:
        part = copy.deepcopy(parts[origin])
        part.move_to(part().draw(1, generator=own).theta[0])
        added.append(part)
    mixture = Mixture([*copy.deepcopy(parts), *added])
    share = torch.cat([(1 - NEW_WEIGHT) * weights, weights.new_full((new,), NEW_WEIGHT / new)])
    mixture.raw_logits.copy_(share.log() / LOGIT_UNIT)
    return mixture
