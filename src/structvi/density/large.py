"""`vi.fit_density` of a diagonal plus low rank over many numbers, without a P×P matrix.

climb of log p ─▶ scales that make rows of the Hessian equal ─▶ Newton's steps, each:
    draws of q in mirrored pairs ─▶ slope, and the diagonal of the mean curvature
    the directions of q's factor, and those in which the last draws were not understood ─▶ products with the curvature
    a model of the curvature, diagonal plus low rank ─▶ the family's best for it, which costs no evaluation
"""

from contextlib import suppress
from math import hypot, inf, log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from ..families.family import Family
from ..families.forms import RelativeForm
from ..objective import NonFiniteError
from .coordinates import Limit
from .large_mean import better_mean
from .large_member import Member, Members
from .large_model import Products, sound_directions, updated
from .low_rank_matrix import LowRankMatrix, independent
from .result import ENOUGH, Found
from .rows import ascend
from .search import Search

#: the fewest evaluations that such a fit can be limited to
LARGE_LEAST = 4096
#: points at which the log density is computed at once
CHUNK = 128
#: nats that four steps of a climb must gain, and its steps
ROUGH, CLIMB = 0.2, 150
#: times that a first normal is made ten times narrower, and its pairs of draws
NARROWER, HANDFUL = 12, 4
#: rounds that make the rows of the Hessian equal, pairs of draws each, and the greatest change of a scale
EQUAL, PAIRS, CHANGE = 12, 8, 100.0
#: draws have seeds far from those that data are made with: the same numbers as a design's columns are no noise
MIXED = 0x9E3779B97F4A7C15
#: pairs of draws beyond the rank, and columns of the model for each that q has, and more
MORE, COLUMNS, BESIDE = 16, 4, 16
#: the fewest columns that count, for families with less
FEWEST = 32
#: draws around which products are taken: one and, where there is noise, twice as many, up to so many
BASES = 8
#: steps, and evaluations after which there is no other; nats for each number that may be left
STEPS, MOST_EVALUATIONS, LEFT = 60, 30_000, 1e-4
#: nats, beyond three standard errors, that make a step a failure; the share of the way that is then gone, at least
WORSE, LEAST_SHARE = 1.0, 1e-3
#: or a standard error so many times as large
NOISIER = 5.0
#: at most so much of the way: a variance grows by no more than twenty at once
MOST_SHARE = 0.95
#: steps over which the promise must halve; where it does not, and nothing is gained, it is noise, to be averaged
WINDOW = 3
#: length of the steps along chosen directions: Gauss and Hermite's three points, of which the middle one has no weight
LENGTH = 3**0.5
#: nats, and tolerance of the search for the family's best
MEMBER, MEMBER_STEPS = 1e-3, 50
#: steps that search for it from more than one start
EARLY = 4


class At(NamedTuple):
    """A normal of the family, and what is known of the curvature there."""

    mean: Tensor  # [P]
    member: Member
    model: LowRankMatrix


class Seen(NamedTuple):
    """What mirrored draws tell: the ELBO with its standard error, E ∇log p, and products with the mean curvature."""

    elbo: float
    error: float
    slope: Tensor  # [P]
    draws: Products

    @property
    def least(self) -> float:
        """What the ELBO surely is."""
        return self.elbo - 3 * self.error


class Step(NamedTuple):
    """From where, with which ELBO, and what is known for the way on."""

    at: At
    seen: Seen
    model: LowRankMatrix


class LargeSearch:
    """The search of one family.

    Args:
        run: the target and its count.
        form: the family as it is bound: its rank and form and, to go on from, where it is.
        starts: of climbs.
    """

    def __init__(self, run: Search, form: RelativeForm, starts: int):
        self.run, self.space, self.starts = run, run.space, starts
        self.form = form
        self.members = Members(form.factor.shape[-1], form.of_precision)
        self.columns = columns = max(FEWEST, self.members.rank)
        self.pairs, self.directions, self.rank = columns + MORE, columns + MORE, COLUMNS * columns + BESIDE
        self.generator = torch.Generator().manual_seed((run.seed * MIXED + MIXED) % (1 << 63))
        self.moves, self.bases = 0, 1
        self.unknown: Tensor | None = None  # [n, P], products that the model did not expect

    # ---- the log density

    def score(self, theta: Tensor) -> tuple[Tensor, Tensor] | None:
        """log p and its gradient at rows; None where one is not finite."""
        values, gradients = [], []
        for some in theta.split(CHUNK):
            some = some.to(self.space.initial).detach().requires_grad_()
            value = self.run.target.log_joint(some)
            (gradient,) = torch.autograd.grad(value.sum(), some)
            values.append(value.detach().double())
            gradients.append(gradient.double())
        value, gradient = torch.cat(values), torch.cat(gradients)
        if not bool(value.isfinite().all() and gradient.isfinite().all()):
            return None
        return value, gradient

    def noise(self, n: int) -> Tensor:
        """Directions of a standard normal, at its radius √P: [n, P]."""
        z = torch.randn(n, self.space.size, generator=self.generator, dtype=torch.float64).to(self.space.device)
        return z * (self.space.size**0.5 / z.norm(dim=-1, keepdim=True))

    def mirrored(self, centre: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """At centre ± steps: mean log p [n], mean gradient and minus half its difference, [n, P]."""
        found = self.score(torch.cat([centre + steps, centre - steps]))
        if found is None:
            return None
        (up, down), (g, h) = (x.split(len(steps)) for x in found)
        return (up + down) / 2, (g + h) / 2, (h - g) / 2

    # ---- where it begins

    def climb(self) -> Tensor:
        """The highest end of climbs from the starts: [P]."""
        self.run.stage = "climb"
        origin, scale = self.space.initial.double(), self.space.scale.double()

        def function(z: Tensor) -> tuple[Tensor, Tensor]:
            z = z.detach().requires_grad_()
            value = self.run.target.log_joint((origin + scale * z).to(self.space.initial))
            (gradient,) = torch.autograd.grad(value.sum(), z)
            return value.detach().double(), gradient

        points = torch.stack([self.run.start(index).initial for index in range(self.starts)])
        z = (points.double() - origin) / scale
        path: list[tuple[Tensor, Tensor, Tensor]] = []
        with suppress(Limit):
            ascend(function, z, torch.zeros_like(z), tolerance=ROUGH, iterations=CLIMB, path=path)
        if not path or not path[-1][1].max() > -inf:
            raise NonFiniteError(
                f"the log density is not finite around any of {self.starts} starts; give the parameters values at "
                "which it is finite: Parameters({name: value, ..})"
            )
        ends, values, _ = path[-1]
        return origin + scale * ends[int(values.argmax())]

    def width(self, mean: Tensor) -> Tensor:
        """The multiple of the space's scales with the highest ELBO, on a handful of draws: [P]."""
        self.run.stage = "start"
        scale, best = self.space.scale.double(), (-inf, self.space.scale.double())
        z, P = self.noise(HANDFUL), self.space.size
        for k in range(NARROWER):
            found = self.mirrored(mean, 0.1**k * scale * z)
            elbo = -inf if found is None else found[0].mean().item() - k * P * log(10)
            if elbo < best[0]:
                break
            best = max(best, (elbo, 0.1**k * scale), key=lambda one: one[0])
        return best[1]

    def equal(self, mean: Tensor, scale: Tensor) -> Tensor:
        """Scales s with s_i²(ASSA)_ii = 1: what a diagonal has whose draws and scores have the same moments: [P]."""
        for _ in range(EQUAL):
            steps = scale * self.noise(PAIRS)
            found = self.mirrored(mean, steps)
            if found is None:
                scale = 0.1 * scale
                continue
            new = (steps.square().mean(0) / found[2].square().mean(0).clamp(min=1e-300)) ** 0.25
            scale = torch.clamp(new, scale / CHANGE, scale * CHANGE)
        return scale

    def begin(self, goes_on: bool) -> At:
        """After a climb; or where the family is."""
        of_precision = self.members.of_precision
        if goes_on:
            self.run.stage = "start"
            member = Member.of(self.form)
            return At(self.form.mean.double(), member, member.precision())
        mean = self.climb()
        scale = self.space.scale.double()
        with suppress(Limit):
            scale = self.equal(mean, self.width(mean))
        member = Member(scale, scale.new_zeros(len(scale), 0), of_precision)
        return At(mean, member, member.precision())

    # ---- a step

    def look(self, at: At) -> Seen | None:
        """Mirrored draws; what the model expects of them is known exactly and taken off the noise."""
        covariance = at.member.precision().inverse()
        steps = covariance.root(self.noise(self.pairs))
        found = self.mirrored(at.mean, steps)
        if found is None:
            return None
        value, slope, curved = found
        value = value + 0.5 * (steps * at.model.product(steps)).sum(-1)
        entropy = 0.5 * covariance.log_det() + 0.5 * len(at.mean) * (1 + log(2 * pi))
        elbo = value.mean().item() - 0.5 * at.model.trace_of(covariance) + entropy
        return Seen(elbo, value.std().item() / len(value) ** 0.5, slope.mean(0), Products(steps, curved))

    def probe(self, at: At, slope: Tensor) -> Products | None:
        """Products with the directions of the slope, of q's factor, of the model's greatest parts, and of what it did
        not expect."""
        precision = at.member.precision()
        covariance = precision.inverse()
        wanted = [covariance.root_transposed(slope.unsqueeze(0)).mT, precision.U[:, precision.v != 0]]
        if self.unknown is not None:
            wanted.append(covariance.root_transposed(self.unknown).mT)
        v = at.model.v
        most = (v - v.log1p()).topk(min(self.columns, len(v))).indices
        wanted.append(covariance.root_transposed((at.model.U[:, most] * at.model.a.sqrt().unsqueeze(-1)).mT).mT)
        wanted.append(self.noise(1).mT)  # so that there is always one
        basis = independent(torch.cat(wanted, dim=-1)).mT  # [k, P], in units of q
        steps, curved = covariance.root(basis), torch.zeros_like(basis)
        for beside in self.noise(self.bases).split(1):
            beside = covariance.root(beside - (basis @ beside.mT) * basis)
            found = self.mirrored(at.mean + beside, LENGTH * steps)
            if found is None:
                return None
            curved += found[2] / (LENGTH * self.bases)
        return Products(steps, curved)

    def moved(self, step: Step, share: float) -> tuple[At, float]:
        """The family's best for this share of the way to the quadratic, and the nats that the quadratic gains."""
        at, model = step.at, step.model
        q = at.member.precision()
        whole = q.mixed(model, share, self.rank + self.members.rank)
        mean = at.mean + share * whole.inverse().product(step.seen.slope.unsqueeze(0)).squeeze(0)
        starts = [self.members.nearest(whole, [whole.a.rsqrt(), at.member.scale])]
        if self.moves < EARLY:  # between the scales of conditionals and margins; the optimum is chosen early
            starts.append((whole.inverse().diagonal() / whole.diagonal()) ** 0.25)
        self.moves += 1
        member = self.members.best(whole, starts, MEMBER, MEMBER_STEPS)
        return At(mean, member, model), self.promise(step, At(mean, member, model))

    @staticmethod
    def promise(step: Step, to: At) -> float:
        """Nats from here to there if log p is the quadratic."""
        here, there = (one.member.precision().inverse() for one in (step.at, to))
        way = (to.mean - step.at.mean).unsqueeze(0)
        quadratic = (way @ step.seen.slope).item() - 0.5 * (way * step.model.product(way)).sum().item()
        spread = step.model.trace_of(there) - step.model.trace_of(here)
        return quadratic - 0.5 * spread + 0.5 * (there.log_det() - here.log_det())

    def learned(self, at: At, seen: Seen) -> LowRankMatrix | None:
        """The model of the curvature with what draws and products tell; None where log p is not finite."""
        chosen = self.probe(at, seen.slope)
        if chosen is None:
            return None
        precision = at.member.precision()
        model = updated(at.model.a, precision, seen.draws, sound_directions(chosen, precision), self.rank)
        steps, curved = (x[: self.directions] for x in seen.draws)
        self.unknown = curved - model.product(steps)
        return model

    # ---- the search

    def search(self, goes_on: bool) -> tuple[At, float, float, bool]:
        """Where it ended, the ELBO there, what is left, and whether that is next to nothing."""
        at = self.begin(goes_on)
        self.run.stage = "family"
        before: Step | None = None
        best: Step | None = None
        share, averaged, failed, promises, elbos = MOST_SHARE, 0, 0, [], []
        left, enough = inf, max(ENOUGH * self.run.tolerance, LEFT * self.space.size)
        try:
            for _ in range(STEPS):
                seen = self.look(at)
                model = self.learned(at, seen) if seen is not None and not _worse(seen, best) else None
                if self.run.target.evaluations > MOST_EVALUATIONS:
                    break
                if seen is None or model is None:
                    share, averaged, promises = share / 4, 0, []
                    self.bases = min(BASES, 2 * self.bases)
                    if share < LEAST_SHARE:
                        left = inf  # no step is right
                        break
                    failed += 1
                    at = self.narrower(at) if before is None else self.again(before, share, failed)
                    continue
                before, failed = Step(at, seen, model), 0
                best = before if best is None or seen.least > best.seen.least else best
                self.record(before)
                elbos.append(seen.elbo)
                at, promise = self.moved(before, share)
                promises.append(promise / share)
                left = abs(promise if averaged else promise / share)
                if left < (ENOUGH * self.run.tolerance if not averaged else enough):
                    covariance = at.member.precision().inverse()
                    mean, more = better_mean(self.score, at.mean, covariance, self.noise, self.pairs)
                    at, left = at._replace(mean=mean), left + more
                    break
                if averaged or _is_noise(promises, elbos):
                    averaged += 1
                    self.bases = min(BASES, 2 * self.bases)
                    share = 1 / (1 + averaged)
                else:
                    share = min(MOST_SHARE, 2 * share)
        except Limit:
            self.run.target.exhausted = True
        end, elbo = self.judged(at, best)
        return end, elbo, left, left < enough and end is at

    def again(self, before: Step, share: float, failed: int) -> At:
        """A shorter step; after every second that has failed, back to where it began, to learn the curvature anew."""
        return self.moved(before, share)[0] if failed % 2 else before.at

    def record(self, step: Step) -> None:
        self.run.draws = 2 * self.pairs
        self.run.record(step.seen.elbo)

    def narrower(self, at: At) -> At:
        """A tenth as wide."""
        member = at.member._replace(scale=0.1 * at.member.scale)
        return At(at.mean, member, member.precision())

    def judged(self, at: At, best: Step | None) -> tuple[At, float]:
        """The end or, if worse on draws that neither has seen, the best step before; and an ELBO that it surely has.

        Of a search that the limit ended by the evaluations that were held back.
        """
        self.run.target.limit += self.run.held
        seen = None
        with suppress(Limit):
            seen = self.look(at)
        if best is None or (seen is not None and not _worse(seen, best)):
            return at, -inf if seen is None else seen.least
        return best.at, best.seen.least


def _worse(seen: Seen, best: Step | None) -> bool:
    """Whether the ELBO is below that of the best step by more than noise explains, or its noise has grown."""
    if best is None:
        return False
    lost = best.seen.elbo - seen.elbo - 3 * hypot(seen.error, best.seen.error)
    return lost > WORSE or seen.error > NOISIER * best.seen.error + WORSE


def _is_noise(promises: list[float], elbos: list[float]) -> bool:
    """Whether the promise no longer halves and what was promised was not gained."""
    if len(promises) <= 2 * WINDOW:
        return False
    slow = min(promises[-WINDOW:]) > 0.5 * min(promises[-2 * WINDOW : -WINDOW])
    return slow and elbos[-1] - elbos[-1 - WINDOW] < 0.5 * sum(promises[-1 - WINDOW : -1])


def fit_large(run: Search, family: Family, form: RelativeForm, starts: int, goes_on: bool) -> Found:
    """The family, bound, at the best that was found; `form` is its own.

    Args:
        run: the target and its count.
        family: bound; it is left at the end of the search.
        form: what `family.relative_form()` says.
        starts: of climbs.
        goes_on: whether it goes on from where it is.
    """
    end, elbo, left, settled = LargeSearch(run, form, starts).search(goes_on)
    like, K = run.space.initial, form.factor.shape[-1]
    factor = torch.nn.functional.pad(end.member.factor, (0, K - end.member.factor.shape[-1]))
    mean, scale, factor = (x.to(like) for x in (end.mean, end.member.scale, factor))
    family.take_relative_form(RelativeForm(mean, scale, factor, form.of_precision))
    return Found(family, elbo, left, settled, end.model)
