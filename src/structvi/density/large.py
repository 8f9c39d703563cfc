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
from ..families.normal import Diagonal, LowRank, NormalForm
from .gaussian import set_form
from .lbfgs import ascend
from .lowrank import Approximation, LowRankMatrix, between_scales, independent
from .schedule import ENOUGH, Found, Search
from .targets import Limit

#: P above which a family that is a diagonal plus low rank is fitted so
LARGE = 256
#: points at which the log density is computed at once
CHUNK = 128
#: steps of the climb
CLIMB = 150
#: times that a first normal is made ten times narrower
NARROWER = 12
#: rounds that make the rows of the Hessian equal
EQUAL = 12
#: pairs of draws of such a round
PAIRS = 8
#: greatest factor of a scale in such a round
CHANGE = 100.0
#: pairs of draws, and products, beyond the rank
MORE = 16
#: columns of the model for each column of q
COLUMNS = 4
#: columns that count, for families with fewer
FEWEST = 32
#: steps of the search
STEPS = 60
#: evaluations after which no other step begins
MOST = 30_000
#: nats for each number that may be left
LEFT = 1e-4
#: nats, beyond three standard errors, that make a step a failure
WORSE = 1.0
#: share of the way to the best for the model, at most and at least
MOST_SHARE, LEAST_SHARE = 0.95, 1e-3
#: steps over which the promise must halve, or else it is noise, and shares of 1/t average it
WINDOW = 3
#: length of the steps along chosen directions: the outer points of Gauss and Hermite's three
LENGTH = 3**0.5
#: nats, of the search for the family's best
TOLERANCE = 1e-3
#: rounds between diagonal and low-rank part of the model
ROUNDS = 4
#: factor by which one round changes the model's diagonal, at most
LIMIT = 3.0
#: least curvature along a direction that is believed, relative to q's
LEAST = 1e-8
#: curvature, relative to q's, in place of one that is not positive: q is made wider
WIDER = 0.25
#: least diagonal of the model, relative to that of q's precision
FLOOR = 1e-3
#: median of the square of a normal number
MEDIAN = 0.455
#: squared standard errors that make a correction by itself certain
CERTAIN = 4.0


class At(NamedTuple):
    """A normal of the family, and a model of the curvature there."""

    mean: Tensor  # [P]
    root: LowRank
    precision: LowRankMatrix
    model: LowRankMatrix


class Seen(NamedTuple):
    """Findings of mirrored draws: the ELBO with its standard error, E ∇log p, and products with the mean curvature."""

    elbo: float
    error: float
    slope: Tensor  # [P]
    steps: Tensor  # [n, P]
    curved: Tensor  # [n, P]

    def is_worse(self, best: "Seen | None") -> bool:
        """Return whether the ELBO is below another by more than noise explains, or its noise has grown."""
        if best is None:
            return False
        lost = best.elbo - self.elbo - 3 * hypot(self.error, best.error)
        return lost > WORSE or self.error > 5 * best.error + WORSE


def large_root(form: NormalForm | None) -> LowRank | None:
    """Return the root of a normal of many numbers that is a diagonal plus low rank; None for all others."""
    if form is None or len(form.mean) <= LARGE:
        return None
    if isinstance(form.root, Diagonal):
        return LowRank(form.root.scale, form.root.scale.new_zeros(len(form.mean), 0), False)
    return form.root if isinstance(form.root, LowRank) else None


class LargeSearch:
    """The search of one family.

    Args:
        run: the target and its count.
        form: the family as it is bound; its root has the rank and the form.
    """

    def __init__(self, run: Search, form: NormalForm):
        root = large_root(form)
        assert root is not None
        self.run, self.space, self.mean, self.root = run, run.space, form.mean.double(), root
        rank = root.factor.shape[1]
        self.approximation = Approximation(rank, root.of_precision)
        self.columns = columns = max(FEWEST, rank)
        self.pairs, self.rank = columns + MORE, COLUMNS * columns + MORE
        self.moves, self.bases = 0, 1
        self.unknown: Tensor | None = None  # [n, P], products that the model did not expect

    # ---- the log density

    def score(self, theta: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return log p and its gradient at rows; None if one is not finite."""
        values, gradients = [], []
        for some in theta.split(CHUNK):
            some = some.to(self.space.initial).detach().requires_grad_()
            value = self.run.target.log_joint(some)
            (gradient,) = torch.autograd.grad(value.sum(), some)
            values.append(value.detach().double())
            gradients.append(gradient.double())
        value, gradient = torch.cat(values), torch.cat(gradients)
        return (value, gradient) if bool(value.isfinite().all() and gradient.isfinite().all()) else None

    def noise(self, n: int) -> Tensor:
        """Return directions of a standard normal at its radius √P, [n, P]."""
        z = self.run.noise(n)
        return z * (self.space.size**0.5 / z.norm(dim=-1, keepdim=True))

    def mirrored(self, centre: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return of centre ± steps the mean log p [n], mean gradient and minus half its difference, [n, P]."""
        found = self.score(torch.cat([centre + steps, centre - steps]))
        if found is None:
            return None
        (up, down), (g, h) = (x.split(len(steps)) for x in found)
        return (up + down) / 2, (g + h) / 2, (h - g) / 2

    # ---- the first normal

    def begin(self, starts: int) -> At:
        """Return a diagonal normal after a climb."""
        theta, values = self.run.climb(starts, CLIMB).ends()
        mean, scale = theta[values.argmax()], self.space.scale.double()
        self.run.stage = "start"
        with suppress(Limit):
            scale = self.equal(mean, self.width(mean))
        return self.at(mean, LowRank(scale, scale.new_zeros(len(scale), 0), self.root.of_precision))

    def at(self, mean: Tensor, root: LowRank) -> At:
        """Return a normal whose own precision is the model of the curvature."""
        precision = LowRankMatrix.precision_of(root)
        return At(mean, root, precision, precision)

    def width(self, mean: Tensor) -> Tensor:
        """Return the multiple of the space's scales with the highest ELBO on a handful of draws, [P]."""
        scale, best, z = self.space.scale.double(), (-inf, self.space.scale.double()), self.noise(4)
        for k in range(NARROWER):
            found = self.mirrored(mean, 0.1**k * scale * z)
            elbo = -inf if found is None else found[0].mean().item() - k * len(mean) * log(10)
            if elbo < best[0]:
                break
            best = max(best, (elbo, 0.1**k * scale), key=lambda one: one[0])
        return best[1]

    def equal(self, mean: Tensor, scale: Tensor) -> Tensor:
        """Return scales s with s_i²(ASSA)_ii = 1: draws and scores of that diagonal have the same moments."""
        for _ in range(EQUAL):
            steps = scale * self.noise(PAIRS)
            found = self.mirrored(mean, steps)
            if found is None:
                scale = 0.1 * scale
                continue
            new = (steps.square().mean(0) / found[2].square().mean(0).clamp(min=1e-300)) ** 0.25
            scale = torch.clamp(new, scale / CHANGE, scale * CHANGE)
        return scale

    # ---- a step

    def look(self, at: At) -> Seen | None:
        """Return what mirrored draws tell; what the model expects of them is known and taken off the noise."""
        covariance = at.precision.inverse()
        steps = covariance.root(self.noise(self.pairs))
        found = self.mirrored(at.mean, steps)
        if found is None:
            return None
        value, slope, curved = found
        value = value + 0.5 * (steps * at.model.product(steps)).sum(-1)
        entropy = 0.5 * covariance.log_det() + 0.5 * len(at.mean) * (1 + log(2 * pi))
        elbo = value.mean().item() - 0.5 * at.model.trace_of(covariance) + entropy
        return Seen(elbo, value.std().item() / len(value) ** 0.5, slope.mean(0), steps, curved)

    def learned(self, at: At, seen: Seen) -> LowRankMatrix | None:
        """Return the model with what draws and products along directions tell; None if log p is not finite.

        The directions: the slope, q's factor, the model's greatest parts, and what the model did not expect.
        """
        covariance, v = at.precision.inverse(), at.model.v
        most = (v - v.log1p()).topk(min(self.columns, len(v))).indices
        parts = (at.model.U[:, most] * at.model.a.sqrt().unsqueeze(-1)).mT
        unknown = seen.slope.new_zeros(0, len(at.mean)) if self.unknown is None else self.unknown
        rows = covariance.root_transposed(torch.cat([seen.slope.unsqueeze(0), unknown, parts]))
        basis = independent(torch.cat([rows.mT, at.precision.U, self.noise(1).mT], dim=-1)).mT  # in units of q
        steps, curved = covariance.root(basis), torch.zeros_like(basis)
        for beside in self.noise(self.bases).split(1):
            beside = covariance.root(beside - (basis @ beside.mT) * basis)
            found = self.mirrored(at.mean + beside, LENGTH * steps)
            if found is None:
                return None
            curved += found[2] / (LENGTH * self.bases)
        model = updated_model(at, seen, steps, curved, self.rank)
        self.unknown = (seen.curved - model.product(seen.steps))[: self.pairs]
        return model

    def moved(self, at: At, seen: Seen, model: LowRankMatrix, share: float) -> tuple[At, float]:
        """Return the family's best for this share of the way to the quadratic, and the nats that it gains."""
        whole = at.precision.mixed(model, share, self.rank + self.approximation.rank)
        mean = at.mean + share * whole.inverse().product(seen.slope.unsqueeze(0)).squeeze(0)
        starts = torch.stack([whole.a.rsqrt(), at.root.scale])
        if self.approximation.rank:
            kl = [self.approximation.kl(one.log().unsqueeze(0), whole)[0].item() for one in starts]
            starts = starts[kl.index(min(kl)) :][:1]
        if self.moves < 4:  # between the scales of conditionals and margins; the optimum is chosen early
            between = between_scales(whole.diagonal().rsqrt(), whole.inverse().diagonal().sqrt())
            starts = torch.cat([starts, between[1:2]])
        self.moves += 1
        root, _ = self.approximation.best(whole, starts, TOLERANCE, 50)
        new = At(mean, root, LowRankMatrix.precision_of(root), model)
        here, there, way = at.precision.inverse(), new.precision.inverse(), (mean - at.mean).unsqueeze(0)
        quadratic = (way @ seen.slope).item() - 0.5 * (way * model.product(way)).sum().item()
        spread = model.trace_of(there) - model.trace_of(here)
        return new, quadratic - 0.5 * spread + 0.5 * (there.log_det() - here.log_det())

    def better_mean(self, at: At) -> tuple[Tensor, float]:
        """Return the mean by L-BFGS on a few mirrored draws, in units of q, and the nats that are left.

        Along directions that q is narrow in and log p is wide in, slopes are small and ways long. The new mean is
        taken if it gains two standard errors on other draws.
        """
        covariance = at.precision.inverse()
        steps, path = covariance.root(self.noise(4)), []
        steps = torch.cat([steps, -steps])

        def function(x: Tensor) -> tuple[Tensor, Tensor]:
            found = self.score(at.mean + covariance.root(x) + steps)
            if found is None:
                return x.new_full((1,), -inf), torch.zeros_like(x)
            return found[0].mean().view(1), covariance.root_transposed(found[1].mean(0, keepdim=True))

        start = torch.zeros_like(at.mean).unsqueeze(0)
        ended = ascend(function, start, tolerance=1e-9, iterations=200, memory=50, path=path)
        new = at.mean + covariance.root(ended.z).squeeze(0)
        steps = covariance.root(self.noise(self.pairs))
        before, after = (self.mirrored(centre, steps) for centre in (at.mean, new))
        if before is None or after is None:
            return at.mean, 0.0
        gains = after[0] - before[0]
        if gains.mean().item() < 2 * gains.std().item() / len(gains) ** 0.5:
            return at.mean, 0.0
        values = [value.item() for _, value, _ in path]
        return new, 0.0 if bool(ended.converged) else values[-1] - values[len(values) // 2]

    # ---- the search

    def search(self, starts: int, goes_on: bool) -> tuple[At, float, float, bool]:
        """Return where it ended, the ELBO there, what is left, and whether that is next to nothing."""
        root = LowRank(self.root.scale.double(), self.root.factor.double(), self.root.of_precision)
        at = self.at(self.mean, root) if goes_on else self.begin(starts)
        self.run.stage, before, best = "family", None, None
        share, averaged, failed, promises, elbos = MOST_SHARE, 0, 0, [], []
        left, enough = inf, max(ENOUGH * self.run.tolerance, LEFT * self.space.size)
        with suppress(Limit):
            for _ in range(STEPS):
                seen = self.look(at)
                model = self.learned(at, seen) if seen is not None and not seen.is_worse(best and best[1]) else None
                if self.run.target.evaluations > MOST:
                    break
                if seen is None or model is None:  # a shorter step; after every second failure, learn anew
                    share, averaged, promises, failed = share / 4, 0, [], failed + 1
                    self.bases = min(8, 2 * self.bases)
                    if share < LEAST_SHARE:
                        left = inf  # no step is right
                        break
                    if before is None:
                        at = self.at(at.mean, at.root._replace(scale=0.1 * at.root.scale))
                    else:
                        at = self.moved(*before, share)[0] if failed % 2 else before[0]
                    continue
                before, failed = (at, seen, model), 0
                if best is None or seen.elbo - 3 * seen.error > best[1].elbo - 3 * best[1].error:
                    best = before
                self.run.draws = 2 * self.pairs
                self.run.record(seen.elbo)
                elbos.append(seen.elbo)
                at, promise = self.moved(*before, share)
                promises.append(promise / share)
                left = abs(promise if averaged else promise / share)
                if left < (enough if averaged else ENOUGH * self.run.tolerance):
                    mean, more = self.better_mean(at)
                    at, left = at._replace(mean=mean), left + more
                    break
                if averaged or _is_noise(promises, elbos):
                    averaged += 1
                    self.bases = min(8, 2 * self.bases)
                    share = 1 / (1 + averaged)
                else:
                    share = min(MOST_SHARE, 2 * share)
        seen = None
        with suppress(Limit):
            seen = self.look(at)
        if best is not None and (seen is None or seen.is_worse(best[1])):
            return best[0], best[1].elbo - 3 * best[1].error, left, False
        return at, -inf if seen is None else seen.elbo - 3 * seen.error, left, left < enough


def _is_noise(promises: list[float], elbos: list[float]) -> bool:
    """Return whether the promise no longer halves and what was promised was not gained."""
    if len(promises) <= 2 * WINDOW:
        return False
    slow = min(promises[-WINDOW:]) > 0.5 * min(promises[-2 * WINDOW : -WINDOW])
    return slow and elbos[-1] - elbos[-1 - WINDOW] < 0.5 * sum(promises[-1 - WINDOW : -1])


def updated_model(at: At, seen: Seen, steps: Tensor, curved: Tensor, rank: int) -> LowRankMatrix:
    """Return the model of what is now known: block BFGS along the directions, from a diagonal that draws correct.

    With steps T and products Y = AT the curvature is B − BT(TᵀBT)⁻¹TᵀB + Y(TᵀY)⁻¹Yᵀ for B = diag(a): right along the
    directions, and positive. For draws δ of N(m, Λ⁻¹) the diagonal of what is left is E (y − Âδ)∘Λδ; it is believed as
    far as it is above its noise (James and Stein). As B holds the diagonal both are repeated.

    Args:
        at: q, with the model before.
        seen: draws δ and their products y.
        steps, curved: T and Y in rows; T is orthonormal in units of q.
        rank: columns of the model.
    """
    inner = steps @ curved.mT
    values, turn = torch.linalg.eigh((inner + inner.mT) / 2)
    steps, curved = turn.mT @ steps, turn.mT @ curved
    wrong = values < LEAST
    curved = torch.where(wrong.unsqueeze(-1), WIDER * at.precision.product(steps), curved)
    values = torch.where(wrong, WIDER, values)
    a, weight, floor = at.model.a, at.precision.product(seen.steps), FLOOR * at.precision.diagonal()
    before, inverse = a * steps, _inverse(steps, a)
    for _ in range(ROUNDS):
        left = seen.curved - a * seen.steps + (seen.steps @ before.mT @ inverse) @ before
        left = left - (seen.steps @ curved.mT / values) @ curved
        a = torch.maximum(a * _correction(left, seen.steps, weight, a), floor)
        before, inverse = a * steps, _inverse(steps, a)
    columns = torch.cat([before.mT, curved.mT], dim=-1)
    return LowRankMatrix.of(a, columns, torch.block_diag(-inverse, (1 / values).diag()), rank)


def _inverse(steps: Tensor, a: Tensor) -> Tensor:
    """Return (T diag(a) Tᵀ)⁻¹ of steps T in rows."""
    values, vectors = torch.linalg.eigh(steps @ (a * steps).mT)
    return (vectors / values.clamp(min=1e-12 * float(values[-1]))) @ vectors.mT


def _correction(left: Tensor, steps: Tensor, weight: Tensor, a: Tensor) -> Tensor:
    """Return the factor [P] of the diagonal: believed as far as all numbers are above their noise, or one by itself."""
    n, each = len(left), left * weight
    found = each.sum(0) / (steps * weight).sum(0).clamp(min=0.5 * n) / a
    noise, square = each.var(0) / n / a.square(), found.square().clamp(min=1e-300)
    all_of_them = 1 - noise.median() / (square.median() / MEDIAN)
    gain = torch.maximum(1 - CERTAIN * noise / square, all_of_them).clamp(min=0.0)
    return (1 + gain * found).clamp(1 / LIMIT, LIMIT)


def fit_large(run: Search, family: Family, starts: int, goes_on: bool) -> Found:
    """Return the family, bound, at the best that was found.

    Args:
        run: the target and its count.
        family: bound; it is left at the end of the search.
        starts: of climbs.
        goes_on: whether it goes on from where it is.
    """
    form = family.normal()
    assert form is not None
    search = LargeSearch(run, form)
    end, elbo, left, settled = search.search(starts, goes_on)
    missing = search.root.factor.shape[1] - end.root.factor.shape[1]
    root = end.root._replace(factor=torch.nn.functional.pad(end.root.factor, (0, missing)))
    set_form(family, NormalForm(end.mean, Diagonal(root.scale) if isinstance(form.root, Diagonal) else root))
    return Found(family, elbo, left, settled, end.model)
