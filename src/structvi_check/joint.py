"""The joint distribution from draws alone: by how much events certainly have another probability."""

from math import log

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.nn.functional import one_hot

from .problems import F64, Problem

#: probability with which the error of a perfect method is above zero, at most
ALARM = 1e-6
#: intervals of equal mass into which a quantity is cut where two are looked at together
BINS = 5
#: principal axes of a network's outputs: those with this share of the largest variance
SHARE = 1e-2


def joint_error(problem: Problem, theta: Tensor) -> float:
    """Return a lower bound of the total variation between q, with draws θ [n, P], and the posterior.

    It is the largest |Q(A) − P(A)| over many events A, less what the noise of draws can make of it, or zero. For draws
    of the posterior itself it is above zero with probability `ALARM` at most. The events:

    - half-spaces, ellipsoids and level sets of log p(data, θ): {quantity ≤ threshold}, for all thresholds;
    - the 5 × 5 cells into which two weights or two principal axes are cut, and all unions of them;
    - {log N_q − log N_p ≤ threshold}: normals with the moments of half the draws, events on the other half.

    If the predictions of a network are compared, the axes belong to its outputs on the grid.

    Example:
        >>> import structvi_check as check
        >>> correlated = check.problem("correlated")
        >>> independent = torch.stack([column[torch.randperm(8192)] for column in correlated.reference.T], dim=-1)
        >>> joint_error(correlated, correlated.reference), joint_error(correlated, independent) > 0.2
        (0.0, True)
    """
    z = [coordinates(problem, draws) for draws in (theta, problem.reference)]
    single = [_quantities(problem, *both) for both in zip((theta, problem.reference), z, strict=True)]
    pairs = z
    if problem.identified:
        pairs = [torch.cat(both, dim=-1) for both in zip(z, (theta, problem.reference), strict=True)]
    return max(0.0, _thresholds(*single), _cells(*pairs), _discriminant(*z))


def noise(count: float, n: int, R: int) -> float:
    """Return what errors stay below with probability 1 − ALARM/3, for n draws of q and R of p = q.

    A sample of n is within t of its distribution but for a probability of count · exp(−2nt²): count is 2M for M
    distribution functions (Massart 1990), M · 2^k for M partitions into k cells (Bretagnolle and Huber 1979).
    """
    return sum((log(6 * count / ALARM) / (2 * size)) ** 0.5 for size in (n, R))


def coordinates(problem: Problem, theta: Tensor) -> Tensor:
    """Along the posterior's principal axes, in its standard deviations: [n, P] → [n, D]."""
    here, exact, axes = theta, problem.reference, problem.axes
    if not problem.identified:
        here, exact = problem.outputs(theta), problem.outputs(problem.reference)
        variances, axes = torch.linalg.eigh(torch.cov(exact.mT))  # ascending
        axes = axes[:, variances > SHARE * variances[-1]]
    along = exact @ axes
    return (here @ axes - along.mean(0)) / along.std(0)


def _quantities(problem: Problem, theta: Tensor, z: Tensor) -> Tensor:
    """Return the numbers that are compared with thresholds, from θ [n, P] and coordinates z [n, D]: [n, M]."""
    parts = [z, z.square().sum(-1, keepdim=True)]
    if problem.identified:
        parts += [theta, problem.log_joint(theta).detach().double().unsqueeze(-1)]
    return torch.cat(parts, dim=-1).nan_to_num(nan=-torch.inf)


def _thresholds(q: Tensor, p: Tensor) -> float:
    """The largest |F_q − F_p| over the columns of [n, M] and [R, M], less the noise."""
    ordered = [one.mT.contiguous().sort(dim=-1).values for one in (q, p)]
    below = [torch.searchsorted(one, ordered[1], right=True) / one.shape[1] for one in ordered]  # [M, R]
    return (below[0] - below[1]).abs().max().item() - noise(2 * q.shape[1], len(q), len(p))


def _cells(q: Tensor, p: Tensor) -> float:
    """The largest total variation in cells over the pairs of columns of [n, D] and [R, D], less the noise."""
    D = q.shape[1]
    levels = torch.linspace(0, 1, BINS + 1, **F64)[1:-1]
    edges = torch.quantile(p, levels, dim=0).mT.contiguous()  # [D, BINS − 1]
    shares = []
    for one in (q, p):
        cell = torch.searchsorted(edges, one.mT.contiguous())  # [D, n]
        inside = one_hot(cell, BINS).float().transpose(1, 2).reshape(D * BINS, len(one))
        shares.append(inside @ inside.mT / len(one))
    apart = (shares[0] - shares[1]).abs().reshape(D, BINS, D, BINS).sum((1, 3)) / 2  # [D, D]
    return apart.max().item() - noise(D * (D + 1) / 2 * 2.0 ** (BINS * BINS), len(q), len(p))


def _discriminant(q: Tensor, p: Tensor) -> float:
    """The error for the log ratio of the two normals of half of [n, D] and [R, D], on the other half."""
    normals = []
    for half in (q[::2], p[::2]):
        root, failed = torch.linalg.cholesky_ex(torch.atleast_2d(torch.cov(half.mT)))
        if failed or not torch.isfinite(root).all():
            return 0.0  # there is no such normal: points, or fewer draws than dimensions
        normals.append(MultivariateNormal(half.mean(0), scale_tril=root))
    ratios = [(normals[0].log_prob(half) - normals[1].log_prob(half)).unsqueeze(-1) for half in (q[1::2], p[1::2])]
    return _thresholds(*(ratio.nan_to_num(nan=torch.inf) for ratio in ratios))
