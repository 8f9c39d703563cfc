"""λ as a dial: a path of fits from narrow through λ = 1, with what each is worth to the bound and to held-out data."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from .averaging import assign, copied
from .options import FitOptions
from .result import FitResult, PathPoint
from .validation import MARGIN

if TYPE_CHECKING:
    from ..posterior import Posterior

#: λ, from narrow to the posterior
PATH = (0.01, 0.03, 0.1, 0.3, 1.0)


def temperature_path(elements: float) -> tuple[float, ...]:
    """The λ that are tried; beyond one where a row has many elements, pixels that say the same, up to their number.

    Example:
        >>> temperature_path(1), temperature_path(50)
        ((0.01, 0.03, 0.1, 0.3, 1.0), (0.01, 0.03, 0.1, 0.3, 1.0, 4.0, 16.0))
    """
    return PATH + tuple(4.0**k for k in range(1, 7) if 4.0**k <= elements)


def fit_path(
    posterior: "Posterior", options: FitOptions, elements: float, fit: Callable[[FitOptions, str], FitResult]
) -> FitResult:
    """A fit at each λ, each from where the one before ended; the best by held-out density is kept, and λ = 1 too.

    Args:
        posterior: what is fitted.
        options: with `validation`; the steps are those of each fit.
        elements: observed numbers in a row.
        fit: one fit, with a label for the bar.
    """
    path, results, states = [], [], []
    at_one = None
    for index, temperature in enumerate(temperature_path(elements)):
        later = {} if index == 0 else {"start": None, "kl_warmup": 0.0}
        own = replace(options, temperature=temperature, restarts=0, **later)
        result = fit(own, f"λ = {temperature:g}")
        path.append(PathPoint(temperature, result.elbo, result.held_out[result.kept]))
        results.append(result)
        states.append(copied(posterior.learned()))
        if temperature == 1.0:
            at_one = copy.deepcopy(posterior.family)
    best = max(point.held_out for point in path)
    good = [index for index, point in enumerate(path) if point.held_out >= best - (MARGIN * (options.keep == "widest"))]
    kept = good[-1]
    assign(posterior.learned(), states[kept])
    result = results[kept]
    result.path, result.at_one = path, at_one
    result.held_out = {f"λ = {point.temperature:g}": point.held_out for point in path}
    result.kept = f"λ = {path[kept].temperature:g}"
    result.notes.append("λ was chosen by held-out density; result.at_one is the family at λ = 1, the posterior itself")
    posterior.last_fit = result
    return result
