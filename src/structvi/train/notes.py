"""What there is to say about a fit beside its verdict."""

from typing import TYPE_CHECKING, Protocol

import torch

from ..distributed.ranks import Ranks
from ..models.bayesian_model import BayesianModel
from ..models.likelihoods import Likelihood
from ..models.priors.base import PriorModule
from .batches import Batches
from .options import Settings
from .state import FitState
from .step import Step

if TYPE_CHECKING:
    from ..posterior import Posterior


class Ended(Protocol):
    """What of a run is spoken of."""

    notes: list[str]
    posterior: "Posterior"
    settings: Settings
    state: FitState
    batches: Batches
    ranks: Ranks
    make_step: Step
    generator: torch.Generator


def notes_of(run: Ended, bound: bool) -> list[str]:
    """One sentence each.

    Args:
        run: at its end.
        bound: whether the posterior has an ELBO that is a lower bound.
    """
    notes, model, kind = list(run.notes), run.posterior.model, run.generator.device.type
    if run.settings.kl_weight != 1:
        notes.append(f"λ = {run.settings.kl_weight:g}: a tempered posterior is not the posterior; the ELBO is at λ = 1")
    if kind == "cuda" and run.make_step.reason is not None:
        notes.append(f"the step was not captured as a CUDA graph: {run.make_step.reason}")
    if run.ranks.size > 1:
        what = "its part of every batch" if run.ranks.mode == "data" else "its own draws for every batch"
        notes.append(f"{run.ranks.size} ranks, each with {what}")
    if not bound:
        notes.append("point masses: no lower bound; their entropy is left out of the ELBO")
    notes += notes_on_bound(model)
    if not run.batches.exact:
        notes.append(f"not exact: {run.batches.inexact}; a resumed run differs from one never stopped")
    elif kind != "cpu":
        notes.append(f"not exact: kernels on {kind} may add in another order each time")
    if skipped := run.state.skipped:
        first = skipped[0]
        notes.append(
            f"{len(skipped)} steps undone, not finite; the first at batch {first.index} of epoch "
            f"{first.epoch}: {first.reason}"
        )
    return notes


def notes_on_bound(model: BayesianModel) -> list[str]:
    """Where likelihood or prior are such that an ELBO is none."""
    notes = []
    if isinstance(model.likelihood, Likelihood) and not model.likelihood.exact:
        notes.append("the likelihood is weighted: its ELBO is no bound on the evidence")
    if isinstance(model.prior, PriorModule) and not model.prior.normalised:
        notes.append("the prior is not normalised: the ELBO is known up to a constant")
    return notes
