"""The searches of `vi.fit_density`.

starts ─ climbs of log p ─▶ a normal around the best hill ─ Newton's steps on 2P draws ─▶ the best full normal
                                                              │ costs no evaluation: the family's best
                                                              ▼ approximation of that normal
                      the family by Newton's steps on S, 4S, 16S.. draws, until new draws no longer move it
"""

from contextlib import suppress
from functools import partial
from itertools import count
from math import inf, nan

import torch
from torch import Tensor
from tqdm import tqdm

from ..families.family import Coordinates, Family
from ..families.mean_field import MeanField
from ..models.target import Target
from ..objective import NonFiniteError
from ..parameters import Parameters
from ..util.progress import is_live
from .approximation import Approximation, Shape, Whole
from .averaging import (
    AVERAGED,
    FEW,
    LEFT,
    LEFT_FEW,
    MAX_DRAWS,
    MOST_AVERAGED,
    MOST_FRESH,
    ascend_on_fresh_draws,
    more_draws,
)
from .climb import climb
from .coordinates import Counted, Limit, Moved, NormalTarget, standard
from .fixed_draws import FixedDraws, fixed_elbo, least_draws
from .hills import hills
from .lbfgs import Curvature, flat, minimise
from .most_mass import HANDFUL, most_mass
from .newton import (
    STEPS,
    TRIES,
    Local,
    Normal,
    Project,
    ascend_normals,
    averaged,
    full,
    is_far,
    local,
    part_of_the_way,
    stepped,
)
from .result import ENOUGH, Found, SearchStep

#: draws are multiplied by this from one level to the next
GROWTH = 4
#: of the penalty on (log s − log s₀)² that keeps a low-rank family's scales finite
RIDGE = 1e-6
#: tolerance of searches that only choose between starts
ROUGH = 0.1
#: a climb's end, or a normal on new draws, is made narrower by these until log p is finite at all draws
SHRINK = (1.0, 0.5, 0.1, 1e-2, 1e-4)
#: steps from the end of a second climb, to see whether it is better than the first
SECOND = 10
#: nats lost on new draws that make a fit to the old ones a wreck
WRECK = 5.0
#: nats that noise alone promises above which draws are too few for a full normal
NOISY = 0.5
#: nats below what it has on the draws fitted that a normal has on new ones where these are too few
OVER_FITTED = 1.0
#: seeds of draws that are looked at once, and of those that are new at every step
CHECKED, NEW = 500, 1000
#: draws that choose between the end of a search that found no optimum and the two best stages before
HELD = 512


class Search:
    """One call of `fit`: the target and its count, and the searches."""

    def __init__(self, target: Target, limit: float, seed: int, tolerance: float, progress: bool):
        #: evaluations that are kept for the end of a search that the limit ends
        self.held = 0 if limit < 16 * HELD else 3 * HELD
        self.target = Counted(target, limit - self.held, twice=4)
        self.space = target.space
        self.seed, self.tolerance = seed, tolerance
        self.generator = torch.Generator().manual_seed(seed)
        self.trace: list[SearchStep] = []
        self.stage, self.draws = "start", 0
        #: share of searches near the family's optimum that ended in another one
        self.elsewhere = 0.0
        #: hills that the starts ended on, where a normal was fitted
        self.hills = 0
        self.bar = tqdm(unit=" evaluations", disable=not (progress and is_live()))

    def gaussian(self, recipe: Family, coordinates: Coordinates, starts: int, draws: int | None) -> Found:
        """The best full normal on few draws, then the family's approximation of it, on more and more."""
        stages, settled = self.first(starts)
        if not settled and (coordinates == "full" or recipe.rank):
            stages += [normal for normal in [self.mean_field(stages)] if not is_far(normal, self.space)]
        if coordinates == "full":
            return self.newton(stages, Whole(recipe, self.target, self.generator), draws, settled)
        shape = self.approximation(recipe, stages[-1])
        return self.newton([*stages[:-1], shape(stages[-1])], shape, draws, settled)

    def approximation(self, recipe: Family, normal: Normal) -> Approximation:
        """A family with diagonal coordinates, in the units of the normal."""
        like, scale = self.space.initial, normal.precision().diagonal().rsqrt()
        place = Moved(self.target, normal.mean.to(like), scale.to(like))
        return Approximation(standard(recipe, place.space, self.generator), place, self.noise, self.approximate)

    def mean_field(self, stages: list[Normal]) -> Normal:
        """Where a full normal does not settle on few draws, which it may fit alone: the best mean field near it."""
        self.stage = "mean field"
        noise = self.draws_of(2 * least_draws(self.space.size), seed=-1)
        at = self.best_stage(stages, inf, noise, full)
        if at is None:
            return stages[-1]
        shape = self.approximation(MeanField(), at.normal)
        at = self.best_stage([*stages, shape(at.normal)], inf, noise, shape)
        if at is None:
            return stages[-1]
        ended = ascend_normals(self.target, at, noise, shape, ROUGH, self.record_local)
        if ended.settled or self.target.exhausted:
            return ended.normal
        return shape.searched(ended.normal, partial(self.maximise, draws=len(noise), tolerance=ROUGH, iterations=100))[
            0
        ]

    def first(self, starts: int) -> tuple[list[Normal], bool]:
        """The best full normal, on few draws, from where climbs from several starts end, and whether it is an optimum.

        Before it, where it began.
        """
        self.stage = "climb"
        points = torch.stack([self.start(index).initial for index in range(starts)])
        ends = climb(self.target, points)
        if not ends:
            tried = f"{starts} starts;"
            if self.target.exhausted:
                tried = "the starts that max_evaluations= left room for; raise it, or"
            raise NonFiniteError(
                f"the log density is not finite around any of {tried} give the parameters values at which it is "
                "finite: Parameters({name: value, ..})"
            )
        self.stage, best, stages, settled, fits = "start", -inf, [], False, []
        noise = self.draws_of(2 * self.space.size)
        for points in ends:
            half = torch.stack([self.noise().double() for _ in range(HANDFUL // 2)])
            start = most_mass(self.target, points, half)
            at = self.around(start, noise, full)
            if at is None:
                stages = stages or [start]
                continue
            steps = SECOND if stages else STEPS
            ended = ascend_normals(self.target, at, noise, full, ROUGH, self.record_local, steps=steps)
            fits.append((ended.at.elbo, ended.normal))
            if ended.at.elbo > best:
                best, settled, stages = ended.at.elbo, ended.settled, [at.normal, ended.normal]
        with suppress(Limit), torch.no_grad():
            near = [fit for fit in fits if not is_far(fit[1], self.space)]
            self.hills = hills(near, lambda theta: self.target.log_joint(theta.to(self.space.initial)))
        return [stage for stage in stages if not is_far(stage, self.space)] or stages[:1], settled

    def around(self, normal: Normal, noise: Tensor, project: Project) -> Local | None:
        """What draws of the normal tell or, where log p is not finite at some, of the widest that is narrower."""
        for shrink in SHRINK:
            try:
                new = normal if shrink == 1 else project(normal._replace(root=shrink * normal.root))
                at = local(self.target, new, noise)
            except Limit:
                return None
            if at is not None:
                self.record(at.elbo)
                return at
        return None

    def draws_of(self, draws: int, seed: int = 0) -> Tensor:
        """Fixed draws [S, P], in float64."""
        self.draws = max(8, draws)
        return FixedDraws(self.draws, self.seed + seed)(
            1, self.space.size, 0, dtype=torch.float64, device=self.space.device
        ).diagonal

    def newton(self, stages: list[Normal], shape: Shape, draws: int | None, trusted: bool) -> Found:
        """Newton's steps on more and more draws, until new draws no longer move it.

        Each set of draws begins where the one before ended or, if that is a wreck, at the best of the stages before;
        so does the first where the last stage is not to be trusted.
        """
        self.stage = "family"
        S, before = draws or 2 * least_draws(self.space.size), 2 * self.space.size
        settled, promise, elbo, first, known = False, inf, -inf if trusted else inf, 0, []
        for level in count(1):
            noise = self.draws_of(S, level)
            at = self.best_stage(stages, elbo, noise, shape)
            if at is None:
                settled = False
                break
            known.append((at.elbo, at.normal))
            few = S <= FEW
            if isinstance(shape, Approximation):
                shape.load(at.normal.state)
                if few:
                    shape.hop(stepped(at, full))
            elbo, promise = at.elbo, at.promise(stepped(at, shape))
            # noise costs c/S: from a fit on S′ draws c/S′ + c/S are promised; S/(S + S′) of the way c/(S + S′) is left
            share = S / (S + before)
            left = promise * (1 - share) * (1.0 if few else share) / (ENOUGH * self.tolerance)
            enough = (settled and abs(left) < (LEFT_FEW if few else LEFT)) or abs(promise) < self.tolerance
            if enough or (settled and not few and not draws and promise < AVERAGED):
                floor, most = TRIES[first]
                stages.append(part_of_the_way(at, shape, floor, min(most, share if settled else 1.0)))
                S, before = more_draws(S + before, left), S + before
                if not enough and before < MOST_AVERAGED:
                    continue
                settled = True
                if isinstance(shape, Approximation) and not few:
                    stages.append(shape.near(stepped(at, full), averaged(at, full, min(most, share))))
                break
            if isinstance(shape, Whole) and at.noise > NOISY and not draws and S < MAX_DRAWS:
                stages.append(at.normal)
                if level > 1 and S > FEW:
                    return self.on_fresh_draws(shape, stages, known)
                S, before = min(MAX_DRAWS, S * GROWTH), S
                continue
            tolerance = max(0.25 * ENOUGH * self.tolerance, 0.1 * promise if settled and S < MAX_DRAWS else 0.0)
            ended = ascend_normals(self.target, at, noise, shape, tolerance, self.record_local, first)
            settled, first, far = ended.settled, ended.first, is_far(ended.normal, self.space)
            if not (far and few):
                stages.append(ended.normal)
                elbo, promise = ended.at.elbo, ended.promise
            if not (settled or far or self.target.exhausted):
                if isinstance(shape, Whole) and not draws and self.over_fitted(stages[-1], elbo, S, level):
                    return self.on_fresh_draws(shape, [at.normal, stages[-1]], known)
                normal, found = shape.searched(stages[-1], partial(self.maximise, draws=S, iterations=100))
                if far := is_far(normal, self.space):
                    settled = False
                else:
                    stages.append(normal)
                    elbo, promise, settled = found.elbo, found.gain, found.converged
            if draws or self.target.exhausted or (far and not few) or S >= MAX_DRAWS:
                break
            S, before = min(MAX_DRAWS, S * (GROWTH if few or left > 0.9 else 2)), S
        if isinstance(shape, Approximation):
            self.elsewhere = shape.elsewhere
        normal = stages[-1] if settled else self.on_held_draws(stages[-1], known)
        return Found(shape.family(normal), elbo, promise, settled)

    def over_fitted(self, normal: Normal, elbo: float, S: int, level: int) -> bool:
        """Whether a normal has a much lower ELBO on new draws than on those that it was fitted to."""
        at = self.around(normal, self.draws_of(S, CHECKED + level), full)
        return at is None or at.elbo < elbo - OVER_FITTED

    def still_settled(self, normal: Normal) -> bool:
        """Whether many draws at once promise next to nothing: rare ones that few do not meet may hold much noise."""
        at = self.around(normal, self.draws_of(MAX_DRAWS, CHECKED + 1), full)
        return at is not None and at.promise(stepped(at, full)) < AVERAGED / 2

    def on_fresh_draws(self, shape: Shape, stages: list[Normal], known: list[tuple[float, Normal]]) -> Found:
        """A full normal that fits any fixed draws too well, on draws that are new at every step."""
        S, enough = 2 * least_draws(self.space.size), LEFT * ENOUGH * self.tolerance
        best = self.best_stage(stages, inf, self.draws_of(S, CHECKED), full)
        ended = ascend_on_fresh_draws(
            self.target, stages[-1] if best is None else best.normal,
            lambda step: self.draws_of(S, NEW + step), self.record_local, enough=enough, most=MOST_FRESH,
        )  # fmt: skip
        settled = ended.left < enough and self.still_settled(ended.normal)
        normal = ended.normal if settled else self.on_held_draws(ended.normal, known)
        return Found(shape.family(normal), ended.elbo, ended.left, settled)

    def on_held_draws(self, normal: Normal, known: list[tuple[float, Normal]]) -> Normal:
        """Of the last normal of a search without end and the two best that began a level the best, on draws that none
        has been fitted to."""
        best = [one for _, one in sorted(known, key=lambda one: -one[0])[:2]]
        stopped = self.target.exhausted
        if not ((self.release() or not stopped) and best) or HELD < 2 * self.space.size:
            return best[0] if best else normal
        noise = self.draws_of(HELD, seed=-2)
        found = [(local(self.target, one, noise), one) for one in (*best, normal)]
        if found[-1][0] is None and not stopped:
            return normal  # it reaches where log p is not finite, as the verdict will say
        return max(found, key=lambda one: -inf if one[0] is None else one[0].elbo)[1]

    def hold(self) -> None:
        """Keep evaluations for the end of a search that has a part of the limit."""
        self.held = 3 * HELD if self.target.limit - self.target.evaluations > 16 * HELD else 0
        self.target.limit -= self.held

    def release(self) -> int:
        """How many evaluations were held; from now on they are not."""
        held, self.held = self.held, 0
        self.target.limit += held
        return held

    def best_stage(self, stages: list[Normal], elbo: float, noise: Tensor, shape: Project) -> Local | None:
        """The last stage on new draws or, where it has lost much of its ELBO there, the best of all."""
        at = self.around(stages[-1], noise, shape)
        if at is not None and (at.elbo > elbo - WRECK):
            return at
        others = [self.around(shape(stage), noise, shape) for stage in stages[:-1]]
        found = [one for one in (at, *others) if one is not None]
        return max(found, key=lambda one: one.elbo) if found else None

    def approximate(self, q: Family, mean: Tensor, precision: Tensor) -> float:
        """The best approximation of N(mean, precision⁻¹) by a family of which nothing but draws is known."""
        stage, draws, self.stage = self.stage, self.draws, "approximation"
        like = self.space.initial
        normal = NormalTarget(q.bound_space(), mean.to(like), torch.linalg.cholesky(precision).to(like))
        found = self.maximise(q, normal, least_draws(q().noise_size), 1e-2 * self.tolerance)
        self.stage, self.draws = stage, draws
        return -found.elbo

    def record_local(self, at: Local) -> None:
        self.record(at.elbo)

    def any(self, recipe: Family, starts: int, draws: int | None) -> Found:
        """A family of which nothing is known: the best of several starts."""
        self.stage = "starts"
        tries = []
        for index in range(starts):
            q, curvature = recipe.bind(self.start(index), self.generator), Curvature()
            draws_each = least_draws(q().noise_size)
            tries.append((self.maximise(q, self.target, draws_each, ROUGH, curvature), curvature))
        best, curvature = max(tries, key=lambda one: one[0].elbo)
        return self.levels(best.family, self.target, curvature, draws)

    def levels(self, family: Family, target: Target, curvature: Curvature, draws: int | None) -> Found:
        """More and more draws, until that gains next to nothing."""
        self.stage = "family"
        if draws is not None:
            return self.maximise(family, target, draws, self.tolerance, curvature)
        S = least_draws(family().noise_size)
        while True:
            S *= GROWTH
            found = self.maximise(family, target, S, self.tolerance, curvature)
            if found.gain < ENOUGH * self.tolerance or S * GROWTH > MAX_DRAWS or self.target.exhausted:
                return found

    def start(self, index: int) -> Parameters:
        """The space, for all but the first start at other values."""
        space = self.space
        if index == 0:
            return space
        return space.at(space.initial + space.scale * self.noise())

    def noise(self) -> Tensor:
        """[P]"""
        return torch.randn(self.space.size, generator=self.generator, dtype=torch.float64).to(self.space.initial)

    def maximise(
        self,
        family: Family,
        target: Target,
        draws: int,
        tolerance: float | None = None,
        curvature: Curvature | None = None,
        iterations: int = 1000,
    ) -> Found:
        """Leave the family at the best point found on so many fixed draws, also where the evaluations end."""
        coupling, tolerance = FixedDraws(draws, self.seed), tolerance or self.tolerance
        self.draws = draws
        parameters = [p for p in family.parameters() if p.requires_grad]
        start = flat(parameters).detach()
        first, best, best_x = nan, -inf, start

        def load(x: Tensor) -> None:
            with torch.no_grad():
                for parameter, part in zip(parameters, x.split([p.numel() for p in parameters]), strict=True):
                    parameter.copy_(part.view(parameter.shape))

        def function(x: Tensor) -> tuple[float, Tensor]:
            nonlocal first, best, best_x
            load(x)
            try:
                value = fixed_elbo(family, target, coupling)
                loss = RIDGE * sum(part.ridge() for part in family.families()) - value
                gradient = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            except (NonFiniteError, torch.linalg.LinAlgError):  # pyright: ignore[reportPrivateImportUsage]
                return inf, torch.zeros_like(x)
            first = value.item() if first != first else first
            if value.item() > best:
                best, best_x = value.item(), x
                self.record(best)
            return loss.item(), flat(gradient)

        converged = False
        try:
            *_, converged = minimise(function, start, tolerance=tolerance, curvature=curvature, iterations=iterations)
        except Limit:
            self.target.exhausted = True
        load(best_x)
        return Found(family, best, best - first, converged)

    def record(self, value: float) -> None:
        self.trace.append(SearchStep(self.stage, self.target.evaluations, self.draws, value))
        self.bar.n = self.target.evaluations
        self.bar.set_postfix_str(f"{self.stage}, {self.draws} draws: ELBO {value:.6g}")
