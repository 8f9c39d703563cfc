"""Families as Newton's method for normals sees them: the best approximation of a normal, which costs no evaluation."""

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from ..couplings import Noise
from ..families.family import Family
from ..models.target import Target
from .coordinates import Moved, standard, to_theta
from .hops import WAYS, Hops
from .lbfgs import minimise
from .newton import Normal, triangular
from .result import Found

#: of the penalty on (log s − log s₀)² that keeps a low-rank family's scales finite
RIDGE = 1e-6
#: tolerance of the search, in nats
TOLERANCE = 1e-5
#: and of the many from several starts
ROUGH = 1e-3
#: searches near the best optimum at most, and so many in a row without a better one: one for each number, within these
HOPS, FAILED = 300, (40, 80)
#: tolerance of these at first, in nats, and how far from the best one that ends so is gone on with
SHORT, NEAR = 2e-2, 0.1
#: nats between optima that count as two
SAME = 0.02
#: with more numbers than this there are fewer searches
MANY = 128
#: times that scales are brought nearer to one where rounding spoils the KL
WALL = 20
#: least eigenvalue of a precision relative to the greatest
LEAST = 1e-12

#: from the present parameters to the best approximation of N(mean, precision⁻¹); the KL but for a constant
Polish = Callable[[Family, Tensor, Tensor], float]
#: the family in coordinates to the best on fixed draws of the target there
Maximise = Callable[[Family, Target], Found]


@torch.no_grad()
def normal_of(q: Family) -> Normal:
    """The normal that a family is: a root of its covariance from what it makes of unit noise, also where it is nearly
    singular."""
    density = q()
    mean = density.mean.double()
    if not density.coupled:  # a torch distribution
        return Normal(mean, torch.linalg.cholesky(density.covariance().double()))
    unit = torch.eye(density.noise_size, dtype=density.mean.dtype, device=density.mean.device)
    columns = density.draw(1, lambda *_: Noise(unit[:, : density.P], unit[:, density.P :])).theta - density.mean
    return Normal(mean, triangular(columns.double().mT))


class Whole:
    """A family that is every normal: searched for in coordinates in which the present one is standard."""

    def __init__(self, recipe: Family, target: Target, generator: torch.Generator):
        self.recipe, self.target, self.generator = recipe, target, generator

    def __call__(self, normal: Normal) -> Normal:
        return normal

    def searched(self, normal: Normal, maximise: Maximise) -> tuple[Normal, Found]:
        """By L-BFGS, from the normal."""
        q, place = self._standing(normal)
        found = maximise(q, place)
        to_theta(q, place)
        return normal_of(q), found

    def family(self, normal: Normal) -> Family:
        """At the normal, in θ."""
        q, place = self._standing(normal)
        to_theta(q, place)
        return q

    def _standing(self, normal: Normal) -> tuple[Family, Moved]:
        like = self.target.space.initial
        place = Moved(self.target, normal.mean.to(like), triangular(normal.root).to(like))
        return standard(self.recipe, place.space, self.generator), place


class Approximation:
    """A family with diagonal coordinates: searched for in those of a place.

    Args:
        q: the family, over the place's space.
        place: diagonal coordinates, θ = shift + root z.
        noise: standard normal numbers [P] for starts.
        polish: for families of which no `profile` is known.
    """

    def __init__(self, q: Family, place: Moved, noise: Callable[[], Tensor], polish: Polish):
        self.q, self.place, self.noise, self.polish = q, place, noise, polish
        self._begun = False
        #: share of the last searches near the best optimum, without those that hold others, that ended in a worse one
        self.elsewhere = 0.0
        self.plain = q.mean_and_scale() is not None
        #: searches cost P³: of many numbers there are fewer
        P = q.bound_space().size
        effort = min(1.0, (MANY / P) ** 2)
        failed = min(max(FAILED[0], P), FAILED[1])
        self.starts, self.failed = min(q.starts, max(2, round(effort * q.starts))), max(2, round(effort * failed))
        self._log_scale: Tensor | None = None

    def __call__(self, normal: Normal) -> Normal:
        """From where the family is; from all its starts the first time."""
        if not self._begun:
            return self.from_starts(normal)
        mean, precision = self._moved(normal)
        if self._log_scale is None:
            self.q.start_at(0, mean, precision, self.noise)
        self._search(mean, precision, TOLERANCE)
        return self.normal()

    def from_starts(self, normal: Normal) -> Normal:
        """The best of the searches from all the family's starts and from where it is."""
        mean, precision = self._moved(normal)
        tries = []
        if self._log_scale is not None:
            tries.append((self._search(mean, precision, ROUGH), self._state()))
        for index in range(self.starts):
            self.q.start_at(index, mean, precision, self.noise)
            form = self.q.low_rank_form()
            if form is not None and self.q.profile(form.log_scale.detach().double(), precision) is not None:
                self._log_scale = form.log_scale.detach().double().clone()
            tries.append((self._search(mean, precision, ROUGH), self._state()))
        tries.sort(key=lambda one: one[0])
        self._begun = True
        self.load(tries[0][1])
        self._hop(mean, precision, tries[0][0])
        return self.normal()

    def hop(self, normal: Normal) -> float:
        """To a better optimum near the present one, where there is one; by how much it is better, in nats."""
        mean, precision = self._moved(normal)
        if self.starts == 1 or self._log_scale is None:
            return 0.0
        before = self._search(mean, precision, TOLERANCE)
        return before - self._hop(mean, precision, before)

    def near(self, normal: Normal, average: Normal) -> Normal:
        """After `hop` for the normal what the family is, where that is another optimum; else its best for the average.

        An average with the family's own precision would hide other optima.
        """
        return self.normal() if self.hop(normal) > SAME else self(average)

    def _hop(self, mean: Tensor, precision: Tensor, best: float) -> float:
        """Searches near the best: see `Hops`."""
        form = self.q.relative_form()
        if self.starts == 1 or self._log_scale is None or form is None:
            return best
        hops, state, failed, ends = Hops(precision, form.of_precision, self.noise), self._state(), 0, []
        for index in range(HOPS):
            found = self.q.profile(self._log_scale, precision)
            assert found is not None
            self._log_scale = hops.start(index, self._log_scale, found.factor)
            kl = self._search(mean, precision, SHORT)
            if kl < best + NEAR:
                kl = self._search(mean, precision, ROUGH)
            failed = 0 if kl < best - ROUGH else failed + 1
            if index % WAYS < 2:
                ends.append(kl)
            if kl < best:
                best, state = kl, self._state()
            self.load(state)
            if failed == self.failed:
                break
        self.elsewhere = sum(kl > best + SAME for kl in ends) / len(ends)
        return self._search(mean, precision, TOLERANCE)

    def normal(self) -> Normal:
        """What the family is, in θ."""
        here = normal_of(self.q)
        shift, units = self.place.shift.double(), self.place.root.double()
        return Normal(shift + units * here.mean, units.unsqueeze(-1) * here.root, self._state())

    def searched(self, normal: Normal, maximise: Maximise) -> tuple[Normal, Found]:
        """By L-BFGS, from the normal."""
        self.load(normal.state)
        found = maximise(self.q, self.place)
        return self.normal(), found

    def family(self, normal: Normal) -> Family:
        """At the normal, in θ; nothing is asked of the approximation after that."""
        self.load(normal.state)
        to_theta(self.q, self.place)
        return self.q

    def load(self, state: tuple[Tensor, ...]) -> None:
        """The family as it was at a normal of this state."""
        with torch.no_grad():
            for parameter, value in zip(self.q.parameters(), state, strict=True):
                parameter.copy_(value)
        form = self.q.low_rank_form()
        if self._log_scale is not None and form is not None:
            self._log_scale = form.log_scale.detach().double().clone()

    def _state(self) -> tuple[Tensor, ...]:
        return tuple(parameter.detach().clone() for parameter in self.q.parameters())

    def _moved(self, normal: Normal) -> tuple[Tensor, Tensor]:
        """Mean and precision in the place's coordinates."""
        shift, units = self.place.shift.double(), self.place.root.double()
        precision = Normal(normal.mean, normal.root / units.unsqueeze(-1)).precision()
        values, vectors = torch.linalg.eigh(precision)  # rounding may have left it indefinite
        if values[0] < LEAST * values[-1]:
            precision = (vectors * values.clamp(min=LEAST * float(values[-1]))) @ vectors.mT
        return (normal.mean - shift) / units, precision

    def _search(self, mean: Tensor, precision: Tensor, tolerance: float) -> float:
        """From where the family is; KL at the end, but for a constant."""
        if self.plain:  # it starts at its best
            return 0.0
        if self._log_scale is None:
            return self.polish(self.q, mean, precision)

        def function(x: Tensor) -> tuple[float, Tensor]:
            found = self.q.profile(x, precision)
            assert found is not None
            return found.kl + RIDGE * float(x @ x), found.gradient + 2 * RIDGE * x

        for _ in range(WALL):
            if function(self._log_scale)[0] < inf:
                break
            self._log_scale = 0.7 * self._log_scale  # it ended where rounding spoils the KL to another normal
        self._log_scale, kl, _ = minimise(function, self._log_scale, tolerance=tolerance, iterations=300)
        self.q.move_to(mean)
        self.q.take_scales(self._log_scale, precision)
        return kl


#: a family as Newton's method sees it
Shape = Whole | Approximation
