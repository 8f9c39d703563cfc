"""Which models a table gets: all are tried, those that held-out rows find best are mixed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .recipes import CLASSES, HIDDEN, NOISES, Part, Problem, Recipe

#: so many of those that are trained by steps get a posterior
BEST = 2
#: a part of the mixture with less weight is left out
LEAST = 0.05
#: a model this many nats below the best is no part of the mixture
BEHIND = 0.3
#: rows that each part has for itself beforehand: few rows do not decide between models that are nearly the same
BEFOREHAND = 5.0
#: of the search for weights
ITERATIONS = 300

Say = Callable[[str], None]


@dataclass
class Tried:
    """A model that was tried, its held-out log density in nats a row, and its weight in the mixture."""

    name: str
    density: float
    weight: float = 0.0


def chosen(problem: Problem, say: Say, noise: str = "auto") -> tuple[list[Part], list[Tried]]:
    """The parts of the mixture, the heaviest first, and all that was tried, the best first.

    First every recipe is fitted on all folds but one, in turn, and judged by that one. The best of them get
    posteriors, and the weights of the mixture are those with the highest held-out density (`weights_of`).

    Args:
        problem: rows, folds and seed.
        say: is told what goes on.
        noise: one of `NOISES` where it is not to be chosen.
    """
    noises = (CLASSES,) if problem.classes else NOISES if noise == "auto" else (noise,)
    first = [Recipe(encoding, (), kind) for kind in noises[:1] for encoding in ("plain", "bins")]
    if "heteroscedastic" in noises:
        first.append(Recipe("plain", (), "heteroscedastic"))
    first += [Recipe("bins", HIDDEN, kind) for kind in noises]
    if problem.classes:
        first.append(Recipe("bins", HIDDEN, CLASSES, shrink=True))
    parts = [_fitted(problem, recipe, say) for recipe in dict.fromkeys(first)]
    best = max((part for part in parts if part.recipe.hidden), key=lambda part: part.density)
    parts.append(_fitted(problem, Recipe("plain", HIDDEN, best.recipe.noise), say))
    tried = {part.recipe: Tried(part.recipe.name, part.density) for part in parts}
    kept = _shortlist(parts)
    kept = [part for part in (problem.placed(part) for part in kept) if part.density > -torch.inf]
    for part in kept:
        tried[part.recipe].density = part.density
    kept = _weighed(kept)
    for part in kept:
        tried[part.recipe].weight = part.weight
        say(f"in the mixture, weight {part.weight:.2f}: {part.recipe.name}")
    return kept, sorted(tried.values(), key=lambda one: -one.density)


def _fitted(problem: Problem, recipe: Recipe, say: Say) -> Part:
    part = problem.fitted(recipe)
    say(f"tried: {recipe.name}, held-out log density {part.density:.3f} nats a row")
    return part


def _shortlist(parts: list[Part]) -> list[Part]:
    """The best of those trained by steps, and all in closed form that are not far behind."""
    finite = sorted((part for part in parts if part.density > -torch.inf), key=lambda part: -part.density)
    steps = [part for part in finite if part.trained is not None][:BEST]
    near = [part for part in finite if part.trained is None]
    top = max(part.density for part in [*steps, *near])
    return [part for part in [*steps, *near] if part.density > top - BEHIND]


def _weighed(parts: list[Part]) -> list[Part]:
    log_probs = torch.stack([part.held_out for part in parts]).double()
    weights = weights_of(log_probs)
    heavy = [c for c in range(len(parts)) if weights[c] >= LEAST]
    total = float(weights[heavy].sum())
    for c in heavy:
        parts[c].weight = float(weights[c]) / total
    return sorted((parts[c] for c in heavy), key=lambda part: -part.weight)


def weights_of(log_probs: Tensor) -> Tensor:
    """The maximum of Σ_n log Σ_c w_c p_c(t_n) + `BEFOREHAND` Σ_c log w_c: [C, n] → [C], by expectation maximisation.

    Example:
        >>> weights_of(torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]).double()).tolist()
        [0.5, 0.5]
    """
    weights = log_probs.new_full((len(log_probs),), 1 / len(log_probs))
    for _ in range(ITERATIONS):
        share = (weights.log().unsqueeze(-1) + log_probs).softmax(0).sum(-1) + BEFOREHAND
        weights = share / share.sum()
    return weights
