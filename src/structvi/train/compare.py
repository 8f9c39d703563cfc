"""The worth of a posterior: ELBO on draws from a seed, held-out log density, and the best constant output."""

from collections.abc import Iterable, Iterator
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..couplings import Coupling, paired
from ..models.bayesian_model import BayesianModel, rows
from ..models.likelihoods import Likelihood, split_mask
from ..models.priors import PriorModule
from ..objective import Estimate, Estimator, full_terms
from ..predict.predict import WeightDraws
from ..predict.predictive import observed_target
from ..util.random_streams import borrowed_stream
from .data import Batches

if TYPE_CHECKING:
    from ..posterior import Posterior
    from .loop import Fit


class Worth(NamedTuple):
    """The ELBO of a posterior, at λ = 1, and its objective E log lik − λ KL."""

    elbo: Estimate
    objective: Estimate


def elbo_over(
    posterior: "Posterior",
    batches: Iterable[Any],
    *,
    groups: int = 64,
    coupling: Coupling = paired,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Return the ELBO over batches that all see the same draws, in nats, with its standard error.

    Args:
        posterior: N must be known.
        batches: on the posterior's device.
        groups, coupling, generator: as in `elbo`.
    """
    estimator = Estimator(groups=groups, coupling=coupling)
    with posterior.network_mode():
        return full_terms(posterior.family, posterior.model, batches, estimator, generator).estimate()


def worth_on_seed(
    posterior: "Posterior", batches: Iterable[Any], groups: int, seed: int, kl_weight: float = 1.0
) -> Worth:
    """Return ELBO and objective over the batches, with all randomness from a seed.

    Args:
        posterior: N must be known.
        batches: on the posterior's device.
        groups: of draws.
        seed: posteriors over the same tensors see the same draws.
        kl_weight: λ of the objective.
    """
    generator = torch.Generator(posterior.device).manual_seed(seed + 1)
    with borrowed_stream(torch.Generator().manual_seed(seed + 2)), posterior.network_mode():
        terms = full_terms(posterior.family, posterior.model, batches, Estimator(groups=groups), generator)
    return Worth(terms.estimate(), terms.estimate(kl_weight))


def held_out_log_density(fit: "Fit", draws: int) -> float:
    """Return the log density of the held-out data, in nats for each observed number; −∞ if it is not finite."""
    assert fit.validation is not None
    posterior, seed, reference = fit.posterior, fit.settings["seed"], None
    if posterior.batch_norm == "reestimated":
        reference = posterior.model.split(next(iter(fit.data.everything(1))))[0]
    generator, total, count = torch.Generator(posterior.device).manual_seed(seed), 0.0, 0
    predict = WeightDraws(posterior, draws, reference=reference, generator=generator)
    for batch in Batches(fit.validation, seed, posterior.device).everything():
        inputs, target = predict.split(batch)
        log_prob = predict(inputs).log_prob(target)
        known = isinstance(posterior.model.likelihood, Likelihood)
        observed = observed_target(posterior.model.likelihood, target)[1] if known else None
        total += float(log_prob.double().sum())
        count += log_prob.numel() if observed is None else int(observed.sum())
    return total / count if isfinite(total) else -inf


class Watched:
    """Batches that are read once, and the log likelihood of the best constant output for their targets.

    Args:
        batches: to read.
        model: its likelihood knows the best constant. A plain function does not, nor does `forward=`, whose targets are
            not known without a pass of the network.
    """

    def __init__(self, batches: Iterable[Any], model: BayesianModel):
        likelihood = model.likelihood
        self.batches, self.model, self.rows = batches, model, 0
        self._likelihood = likelihood if isinstance(likelihood, Likelihood) and model.user_forward is None else None
        self._sums: Tensor | None = None

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.rows += rows(batch)
            if self._likelihood is not None:
                target, mask = split_mask(self.model.split(batch)[1])
                sums = self._likelihood.sums(target, mask)
                self._sums = sums if sums is None or self._sums is None else _added(self._sums, sums)
            yield batch

    @property
    def log_likelihood(self) -> float | None:
        """The log likelihood of the best constant, in nats for the whole data set."""
        if self._likelihood is None or self._sums is None:
            return None
        return self._likelihood.best_constant(self._sums) * (self.model.num_data / self.rows)


def _added(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of two; the shorter has zeros at its end, for labels that a batch does not have."""
    longest = max(a.shape[-1], b.shape[-1])
    return pad(a, (0, longest - a.shape[-1])) + pad(b, (0, longest - b.shape[-1]))


def notes_on_bound(model: BayesianModel) -> list[str]:
    """Return what makes an ELBO no bound, of likelihood and prior."""
    notes = []
    if isinstance(model.likelihood, Likelihood) and not model.likelihood.exact:
        notes.append("the likelihood is weighted: its ELBO is no bound on the evidence")
    if isinstance(model.prior, PriorModule) and not model.prior.normalised:
        notes.append("the prior is not normalised: the ELBO is known up to a constant")
    return notes
