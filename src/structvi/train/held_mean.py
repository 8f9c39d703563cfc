"""A held mean with a prior that learns its scales: at the linear model's own optimum first, then around the network."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from .options import FitOptions
from .result import FitResult
from .warm_start import trained_values

if TYPE_CHECKING:
    from ..posterior import Posterior


def fit_around_held_mean(
    posterior: "Posterior", options: FitOptions, fit: Callable[[FitOptions, str], FitResult]
) -> FitResult:
    """Half of the steps with a free mean learn the prior's scales; the other half has them fixed and the mean held.

    The evidence of scales read off the trained weights counts what training left of their initialisation as signal
    (Antorán et al., Adapting the Linearised Laplace Model Evidence for Modern Deep Learning, 2022).

    Args:
        posterior: with a prior that learns.
        options: of the whole.
        fit: one fit, with a label for the bar.
    """
    if options.checkpoint is not None or options.resume is not None:
        raise ValueError(
            'mean="held" with a prior that learns is two fits: checkpoint= and resume= are for one. Learn the prior '
            'in a fit of its own with mean="learned"'
        )
    name, total = ("epochs", options.epochs) if options.epochs is not None else ("steps", options.steps)
    assert total is not None
    first = max(1, total // 2)
    prior = posterior.model.prior
    assert isinstance(prior, nn.Module)
    fit(replace(options, mean="learned", validation=None, restarts=0, **{name: first}), "the prior, with a free mean")
    before = {parameter: parameter.requires_grad for parameter in prior.parameters()}
    with torch.no_grad():
        posterior.family.move_to(trained_values(posterior))
    try:
        for parameter in before:
            parameter.requires_grad_(False)
        result = fit(replace(options, start=None, kl_warmup=0.0, **{name: max(1, total - first)}), "the mean held")
    finally:
        for parameter, learned in before.items():
            parameter.requires_grad_(learned)
    result.notes.append(f"the prior's scales were learned in {first} {name} with a free mean, then held")
    return result
