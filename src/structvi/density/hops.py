"""Where searches near an optimum of a low-rank family begin: scales changed so that they may end in another one.

A column can hold one number altogether. Of a factor of the precision that number's own scale then goes to ∞, of one of
the covariance to 0, where the KL is flat, and no small change brings it back. Optima differ in which numbers are held
so: some searches let go of held ones, and some hold another.
"""

from collections.abc import Callable

import torch
from torch import Tensor

#: a number begins again where a normal number is above, one of twenty
FEW_AGAIN = 1.645
#: share of a column's greatest number, squared, from which on it is made of a number
MADE_OF = 0.3
#: a scale is that of a held number so far beyond conditional and margin, in its logarithm, and where another is held
HELD, NEW = 0.5, 1.5
#: held numbers of which all begin again at once
LET_GO = 4
#: the ways: `Hops.start` has one for each remainder
WAYS = 4


class Hops:
    """Starts near an optimum.

    Args:
        precision: of the normal that is approximated, [P, P].
        of_precision: whether the factor is one of the precision.
        noise: standard normal numbers [P].

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> precision = torch.eye(3, dtype=torch.float64) + 0.5
        >>> hops = Hops(precision, True, lambda: torch.randn(3, generator=generator, dtype=torch.float64))
        >>> held = torch.tensor([0.0, 0.0, 9.0], dtype=torch.float64)
        >>> hops.start(2, held, precision[:, :1])[2] < 1  # no longer held, and another number is
        tensor(True)
    """

    def __init__(self, precision: Tensor, of_precision: bool, noise: Callable[[], Tensor]):
        self.of_precision, self.noise = of_precision, noise
        self.conditional = -0.5 * precision.diagonal().log()
        covariance = torch.cholesky_inverse(torch.linalg.cholesky(precision))
        self.marginal = 0.5 * covariance.diagonal().log()

    def start(self, index: int, log_scale: Tensor, factor: Tensor) -> Tensor:
        """The scales [P] of a search of this index, for an optimum's scales [P] and factor [P, K].

        In turn: a few numbers begin again; those that one column is made of; one held number, and another is held; four
        held numbers.
        """
        way = index % WAYS
        if way == 0:
            return torch.where(self.noise().double() > FEW_AGAIN, self.between(), log_scale)
        if way == 1:
            column = factor[:, int(self.noise().argmax()) % factor.shape[1]].square()
            return torch.where(column > MADE_OF * column.max(), self.between(), log_scale)
        held = self.held(log_scale)
        free = self.some(held, 1 if way == 2 else LET_GO)
        new = torch.where(free, self.between(), log_scale)
        if way == 2:
            end = self.marginal + NEW if self.of_precision else self.conditional - NEW
            new = torch.where(self.some(~held, 1, self.marginal - self.conditional), end, new)
        return new

    def between(self) -> Tensor:
        """Scales anywhere between those of the conditionals and of the margins."""
        return torch.lerp(self.conditional, self.marginal, torch.special.ndtr(self.noise().double()))

    def held(self, log_scale: Tensor) -> Tensor:
        """Which numbers a column holds altogether."""
        if self.of_precision:
            return log_scale > self.marginal + HELD
        return log_scale < self.conditional - HELD

    def some(self, among: Tensor, number: int, weight: Tensor | None = None) -> Tensor:
        """So many of the numbers that are true, all where there are fewer, by chance: [P]."""
        chance = -(-torch.special.log_ndtr(self.noise().double())).log()  # Gumbel's
        if weight is not None:
            chance = chance + weight.clamp(min=1e-12).log()
        order = torch.where(among, chance, -torch.inf).argsort(descending=True)
        chosen = torch.zeros_like(among)
        chosen[order[:number]] = True
        return chosen & among
