"""Posteriors of many fits compared at once: what each is worth over its own data, on draws that its seed decides."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from ..couplings import Noise, paired
from ..families.density import Density
from ..objective import Estimate, log_q_at, not_finite
from ..util.host_reads import unread
from .comparing import Worth
from .stacked_noise import maker, noise_calls

if TYPE_CHECKING:
    from ..posterior import Posterior

#: numbers that a call of all networks may make of one hidden unit: rows times draws times members
AT_ONCE = 2**20


class Compared(torch.nn.Module):
    """Log likelihood, cost and weight of the draws of one posterior at given noise: what vmap is taken of."""

    def __init__(self, posterior: "Posterior", groups: int):
        super().__init__()
        self.posterior, self.groups = posterior, groups

    def forward(self, noise: Sequence[Noise], batch: object) -> tuple[Tensor, Tensor, Tensor]:
        posterior, given = self.posterior, iter(noise)
        density = posterior.family()
        draws = density.draw(self.groups, lambda *_, **__: Noise(*next(given)))
        point = draws.theta if draws.latent is None else draws.latent
        cost = -posterior.model.log_prior(point, draws.fixed).double()
        if density.has_density:
            cost = cost + log_q_at(density, point, path=False)
        total, _ = posterior.model.batch_log_likelihood(draws.theta, batch, draws.fixed)
        return total.double(), cost, draws.weight.double()

    def at(self, tensors: dict[str, Tensor], noise: Sequence[Noise], batch: object) -> tuple[Tensor, Tensor, Tensor]:
        return functional_call(self, {f"posterior.{name}": x for name, x in tensors.items()}, (noise, batch))


def serves(density: Density) -> bool:
    """Whether the ELBO of such a density is what is computed here."""
    plain = not density.enumerates and isinstance(density.latent_kl(), float)
    return plain and (not density.has_density or density.offers("log_prob"))


class StackedElbo:
    """ELBO and objective of every member, in nats, as `worth_on_seed` has them of one.

    Args:
        posterior: whose forms and modes all have; its N is the largest.
        table: inputs [rows, ..] and targets [rows, ..] of all members.
        indices: which rows of it each member's data are.
        num_data: N of each.
        seeds: of each.
        groups: of draws.
        temperatures: λ of the objective of each.
    """

    def __init__(
        self,
        posterior: "Posterior",
        table: Sequence[Tensor],
        indices: Sequence[Tensor],
        num_data: Sequence[int],
        seeds: Sequence[int],
        groups: int,
        temperatures: Sequence[float],
    ):
        self.temperatures = torch.tensor(temperatures, dtype=torch.float64, device=posterior.device).unsqueeze(-1)
        self.table, self.groups, self.device = table, groups, posterior.device
        self.compared = Compared(posterior, groups)
        self.seen, self.num_data = torch.tensor([len(own) for own in indices]), torch.tensor(num_data)
        longest = int(self.seen.max())
        self.at = torch.stack([torch.cat([own, own[:1].expand(longest - len(own))]) for own in indices])
        self.mask = torch.arange(longest) < self.seen.unsqueeze(-1)
        generators = [torch.Generator(self.device).manual_seed(seed + 1) for seed in seeds]
        calls, S = noise_calls(posterior.family(), groups, paired)
        self.noise = tuple(maker(calls, paired, generators, posterior.space.dtype)())
        self.rows = max(1, min(AT_ONCE // (len(indices) * S), posterior.model.num_data))

    @torch.no_grad()
    def __call__(self, tensors: dict[str, Tensor]) -> list[Worth]:
        """Of the posteriors that have these tensors [M, ..]."""
        x, t = self.table
        total: Tensor | float = 0.0
        cost = weight = torch.zeros(())
        for start in range(0, self.at.shape[1], self.rows):
            at, mask = (y[:, start : start + self.rows].to(self.device) for y in (self.at, self.mask))
            target = t[at]
            if not bool(mask.all()):
                target = target, mask.view(*mask.shape, *[1] * (target.ndim - 2)).expand_as(target)
            with unread(), self.compared.posterior.network_mode():
                values, cost, weight = vmap(self.compared.at)(tensors, self.noise, (x[at], target))
            total = total + values
        scale = (self.num_data / self.seen).to(cost.device).unsqueeze(-1)
        elbo, objective = (self._estimates(weight * (total * scale - lam * cost)) for lam in (1.0, self.temperatures))
        return [Worth(*both) for both in zip(elbo, objective, strict=True)]

    def _estimates(self, weighted: Tensor) -> list[Estimate]:
        groups = self.groups * weighted.unflatten(-1, (self.groups, -1)).sum(-1)  # [M, groups]
        bound = self.compared.posterior.family().bound
        good = groups.isfinite().all(-1).tolist()
        pairs = zip(groups.cpu(), good, strict=True)
        return [Estimate.of(own, bound) if finite else not_finite(self.groups) for own, finite in pairs]
