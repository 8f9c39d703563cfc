"""Which of many normals make the best mixture of a few? On draws that are kept: log p is computed once for each."""

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from ..families.family import Family
from ..models.target import Target
from .fixed_draws import FixedDraws
from .fresh_draws import fresh_draws

#: rounds of the weights' fixed point
ROUNDS = 30


class Kept(NamedTuple):
    """log p [K, S] and log q_j [J, K, S] at S draws of each of K densities, J = K."""

    log_p: Tensor
    log_q: Tensor

    @staticmethod
    @torch.no_grad()
    def of(families: list[Family], target: Target, draws: int, seed: int) -> "Kept":
        """One evaluation for every draw; −∞ where log p is no number."""
        densities = [family() for family in families]
        fixed, (naive, generator) = FixedDraws(draws, seed), fresh_draws(seed, target.space.device)
        theta = torch.cat(
            [(one.draw(1, fixed) if one.coupled else one.draw(draws, naive, generator)).theta for one in densities]
        )
        log_p = target.log_joint(theta).double()
        log_p = torch.where(log_p.isfinite(), log_p, -inf)
        log_q = torch.stack([density.log_prob(theta).double() for density in densities])
        K = len(families)
        return Kept(log_p.view(K, -1), log_q.view(K, K, -1))

    def elbo(self, members: list[int]) -> tuple[float, Tensor]:
        """Of the best weights of these members, and their logarithms.

        A weight's best is at w_c ∝ w_c exp E_c[log p − log q]: iterated, it is mirror ascent.
        """
        log_p, log_q = self.log_p[members], self.log_q[members][:, members]
        log_w = torch.zeros(len(members), dtype=log_p.dtype, device=log_p.device).log_softmax(0)
        best, best_w = -inf, log_w
        for _ in range(ROUNDS):
            each = (log_p - (log_w.view(-1, 1, 1) + log_q).logsumexp(0)).mean(-1)  # [C]
            value = (log_w.exp() * each).sum().item() if bool(each.isfinite().all()) else -inf
            if value > best:
                best, best_w = value, log_w
            log_w = (log_w + each).clamp(min=-1e6).log_softmax(0)
        return best, best_w

    def greedy(self, number: int, members: list[int]) -> list[int]:
        """So many members: to those that are given, each time the one that gains most."""
        members = list(members)
        while len(members) < min(number, len(self.log_p)):
            trials = [(self.elbo([*members, k])[0], k) for k in range(len(self.log_p)) if k not in members]
            members.append(max(trials)[1])
        return members


@torch.no_grad()
def weighted(family: Family, target: Target, seed: int, groups: int = 1024) -> tuple[float, float]:
    """ELBO and log evidence by importance sampling, on the same fresh draws."""
    density, fresh = family(), fresh_draws(seed + 2, target.space.device)
    draws = density.draw(groups, *fresh)
    over = target.log_joint(draws.theta).double() - density.log_prob(draws.theta).double()
    over = torch.where(over.isfinite(), over, -inf)
    return (draws.weight * over).sum().item(), (over + draws.weight.log()).logsumexp(0).item()
