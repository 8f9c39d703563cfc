"""Distances of a method's draws from a known posterior: numbers, without judgement."""

from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from scipy.stats import chi2
from torch import Tensor
from torch.distributions import Normal

from .joint import joint_error
from .problems import Problem

#: the intervals whose calibration is measured
LEVEL = 0.9
#: draws of each side in the total variation of predictions
PREDICTIVE_DRAWS = 1000


@dataclass(frozen=True)
class Estimate:
    """A mean over draws and its standard error; (inf, 0) if one of them is infinite."""

    value: float
    standard_error: float = 0.0

    @classmethod
    def of(cls, values: Tensor) -> "Estimate":
        if torch.isinf(values).any():
            return cls(inf)
        return cls(values.mean().item(), (values.std() / len(values) ** 0.5).item())


@dataclass(frozen=True)
class Measures:
    """Distances from the posterior; None if a measure does not exist for this problem or method.

    Quantities are the weights and the posterior's principal axes, or for a network its outputs on a grid.
    """

    #: weights that are points under the method, of P
    points: int
    P: int
    #: log q(θ*) and log p(θ* | data), the probability of the true model
    log_q_true: float | None
    log_p_true: float | None
    #: KL[p‖q] and KL[q‖p] in nats
    kl_p_q: Estimate | None
    kl_q_p: Estimate | None
    modes_found: int | None
    modes_there: int | None
    #: posterior mass of the method's central 90 % intervals: mean, least and most over the quantities
    coverage: float
    coverage_min: float
    coverage_max: float
    #: |E_q − E_p| in posterior standard deviations: the largest
    mean_error: float
    #: log Var_q − log Var_p where it is farthest from zero
    log_variance_error: float
    #: by how much an event has another probability than under the posterior, at least
    joint_error: float
    #: share of inputs at which the prediction is the posterior's: the class, or a mean between its quartiles
    agreement: float | None
    #: between the predictive distributions, averaged over inputs
    total_variation: float | None


def points(problem: Problem) -> Tensor:
    """Return θ* and the reference draws, where log q is asked for besides at the method's own draws: [1 + R, P]."""
    return torch.cat([problem.truth.unsqueeze(0), problem.reference])


def measure(problem: Problem, theta: Tensor, log_q: Tensor | None) -> Measures:
    """Measure draws of q [n, P], and log q at `points` and then at these draws, [1 + R + n], where there is one."""
    q, p = problem.quantities(theta), problem.quantities(problem.reference)  # [n, Q], [R, Q]
    repeated = count_points(theta)
    sd = p.std(0)
    bias = (q.mean(0) - p.mean(0)).abs() / sd
    spread = q.var(0).log() - p.var(0).log()
    held = coverage(q, p)
    found, there = modes(problem, theta)
    agreement, variation = predictions(problem, theta)
    return Measures(
        points=repeated,
        P=problem.P,
        **_densities(problem, theta, log_q, repeated),
        modes_found=found,
        modes_there=there,
        coverage=held.mean().item(),
        coverage_min=held.min().item(),
        coverage_max=held.max().item(),
        mean_error=bias.max().item(),
        log_variance_error=spread[spread.abs().argmax()].item(),
        joint_error=joint_error(problem, theta),
        agreement=agreement,
        total_variation=variation,
    )


def count_points(theta: Tensor) -> int:
    """Count the weights with mostly repeated draws: q has no density there.

    Example:
        >>> count_points(torch.stack([torch.randn(100), torch.ones(100)], dim=-1))
        1
    """
    ordered = theta.sort(dim=0).values
    distinct = 1 + (ordered.diff(dim=0) != 0).sum(0)
    return int((distinct < 0.5 * len(theta)).sum())


def coverage(q: Tensor, p: Tensor) -> Tensor:
    """Return the share of p's draws in q's central 90 % interval, for each quantity: [n, Q], [R, Q] → [Q]."""
    tail = (1 - LEVEL) / 2
    low, high = torch.quantile(q, torch.tensor([tail, 1 - tail], dtype=q.dtype), dim=0)
    return ((p >= low) & (p <= high)).to(q.dtype).mean(0)


def modes(problem: Problem, theta: Tensor) -> tuple[int | None, int | None]:
    """Count the modes in whose ellipse of 99 % q has a tenth of the posterior's mass, and the modes there."""
    if not problem.modes:
        return None, None
    radius, found = float(chi2.ppf(0.99, problem.P)), 0
    for normal in problem.modes:
        inside, exact = (
            (normal.quadratic(draws - normal.mean) <= radius).double().mean().item()
            for draws in (theta, problem.reference)
        )
        found += inside >= 0.1 * exact
    return found, len(problem.modes)


def _densities(problem: Problem, theta: Tensor, log_q: Tensor | None, repeated: int) -> dict[str, Any]:
    """Return the probability of the true model, and KL both ways."""
    truth, known = problem.truth.unsqueeze(0), problem.log_evidence is not None
    found: dict[str, Any] = dict.fromkeys(("log_q_true", "log_p_true", "kl_p_q", "kl_q_p"))
    if known:
        found["log_p_true"] = problem.log_posterior(truth).item()
    if repeated:
        return found | {"log_q_true": -inf, "kl_p_q": Estimate(inf), "kl_q_p": Estimate(inf)}
    if log_q is None:
        return found
    at_truth, at_reference, at_own = log_q.split([1, len(problem.reference), len(theta)])
    found["log_q_true"] = at_truth.item()
    if known:
        found["kl_p_q"] = Estimate.of(problem.log_posterior(problem.reference) - at_reference)
        found["kl_q_p"] = Estimate.of(at_own - problem.log_posterior(theta))
    return found


def predictions(problem: Problem, theta: Tensor) -> tuple[float | None, float | None]:
    """Return agreement and total variation of the predictive distributions at the grid's inputs."""
    if problem.data is None:
        return None, None
    rows = torch.linspace(0, len(problem.reference) - 1, min(PREDICTIVE_DRAWS, len(problem.reference))).long()
    q, p = problem.outputs(theta[:PREDICTIVE_DRAWS]), problem.outputs(problem.reference[rows])  # [S, G]
    noise = problem.data.noise
    if noise is None:
        of_q, of_p = q.sigmoid().mean(0), p.sigmoid().mean(0)
        return ((of_q > 0.5) == (of_p > 0.5)).double().mean().item(), (of_q - of_p).abs().mean().item()
    quartiles = torch.quantile(p, torch.tensor([0.25, 0.75], dtype=p.dtype), dim=0)
    agreement = ((q.mean(0) >= quartiles[0]) & (q.mean(0) <= quartiles[1])).double().mean().item()
    total = 0.0
    for of_q, of_p in zip(q.T, p.T, strict=True):  # ½∫|q − p| over t, on a grid of a quarter of the noise
        both = torch.cat([of_q, of_p])
        low, high = both.min().item() - 4 * noise, both.max().item() + 4 * noise
        t = torch.arange(low, high, max(noise / 4, (high - low) / 2000), dtype=torch.float64).unsqueeze(-1)
        densities = [Normal(y, noise).log_prob(t).exp().mean(-1) for y in (of_q, of_p)]
        total += 0.5 * torch.trapezoid((densities[0] - densities[1]).abs(), t.squeeze(-1)).item()
    return agreement, total / q.shape[1]
