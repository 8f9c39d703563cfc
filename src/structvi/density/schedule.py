"""The searches of `vi.fit_density`, and when each ends.

starts ─ climbs of log p ─▶ a normal around the best hill ─ Newton's steps on 2P draws ─▶ the best full normal
                                                              │ costs no evaluation: the family's best
                                                              ▼ approximation of that normal
                      the family by Newton's steps on S, 4S, 16S.. draws, until new draws no longer move it
"""

import copy
from contextlib import suppress
from itertools import count, pairwise
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ..families.family import Family
from ..families.normal import Diagonal, NormalForm, Triangle
from ..models.target import Target
from ..objective import NonFiniteError
from ..parameters import Parameters
from ..util.progress import is_live
from .fixed_draws import FixedDraws, fixed_elbo, least_draws
from .gaussian import Normal, Shape, is_far, normal_of, set_form, triangular
from .lbfgs import Pairs, ascend
from .lowrank import LowRankMatrix
from .newton import TRIES, Local, Project, ascend_normals, full, local, part_of_the_way, stepped
from .targets import Counted, Limit, View

#: most draws that a fit takes at once by itself
MAX_DRAWS = 1 << 12
#: most draws that an average over sets of draws takes
MOST_AVERAGED = 1 << 13
#: draws are multiplied by this from one level to the next
GROWTH = 4
#: up to so many draws there is a next level whatever it gains, and it must gain less
FEW = 512
#: tolerances that new draws may gain
ENOUGH = 10
#: share of these that may be left, on few draws and on many
LEFT_FEW, LEFT = 0.2, 0.5
#: nats that new draws may promise a fit that goes only part of the way to them
AVERAGED = 0.1
#: nats, of searches that only choose between starts
ROUGH = 0.1
#: nats that four steps of a climb must gain
CLIMB = 0.2
#: steps of a climb
STEPS = 60
#: draws that choose between points of a climb
HANDFUL = 8
#: steps after which points come into question beside a climb's end
EARLIER = (0, 4, 8, 12, 16, 24, 32, 48)
#: steps and gradients from which a climb's covariance is learned
LEARNED = 40
#: nats that log p falls between two hills
VALLEY = 1.0
#: factors of a normal's width that are tried until log p is finite at all draws, and not far below the climb's end
SHRINK = (1.0, 0.5, 0.1, 1e-2, 1e-4, 1e-6, 1e-8)
#: nats for each number that log p may fall from the climb's end
FALL = 20.0
#: Newton's steps from a second and further climbs, to see whether they are better than the first
SECOND = 10
#: nats lost on new draws that make a fit to the old ones a wreck
WRECK = 5.0
#: iterations of L-BFGS where Newton's steps are slow
SLOW = 100


class SearchStep(NamedTuple):
    """One evaluation of the objective that improved on all before it in the same search."""

    stage: str
    evaluations: int
    draws: int
    elbo: float


class Found(NamedTuple):
    """The end of a search: family, ELBO on its draws, the last gain, and whether the end is an optimum.

    A search over many numbers adds the mean curvature of the log density that it has learned.
    """

    family: Family
    elbo: float
    gain: float
    converged: bool
    curvature: LowRankMatrix | None = None


class Climbs(NamedTuple):
    """Climbs of log p by rows: the view they were made in, and after each step points, values and gradients."""

    view: View
    path: list[tuple[Tensor, Tensor, Tensor]]

    def ends(self) -> tuple[Tensor, Tensor]:
        """Return θ [n, P] and log p [n], −∞ if log p is not finite."""
        z, value, _ = self.path[-1]
        return self.view.theta(z), value - self.view.log_det

    def normal(self, row: int, last: int = -1) -> Normal:
        """Return the normal at a row's end, or at step `last`, with the inverse Hessian that its steps have met.

        As in Pathfinder (Zhang, Carpenter, Gelman and Vehtari, JMLR 23:306, 2022).
        """
        pairs = Pairs(LEARNED)
        steps = [(z[row], gradient[row]) for z, _, gradient in self.path[: last % len(self.path) + 1]]
        for (z, gradient), (new, then) in pairwise(steps):
            if bool((new != z).any()):
                pairs.add((new - z).unsqueeze(0), (gradient - then).unsqueeze(0), torch.ones_like(z[:1]))
        z, gradient = steps[-1]
        eye = torch.eye(len(z), dtype=z.dtype, device=z.device)
        inverse = eye / gradient.norm().clamp(min=1) if pairs.scale is None else pairs.newton(eye)
        values, vectors = torch.linalg.eigh((inverse + inverse.mT) / 2)  # rounding may have left it indefinite
        root = vectors * values.clamp(min=max(1e-14 * float(values[-1]), 1e-100)).sqrt()
        return Normal(self.view.theta(z), self.view.scale.unsqueeze(-1) * triangular(root))


class Search:
    """One call of `fit_density`: the target and its count, and the searches."""

    def __init__(self, target: Counted, seed: int, tolerance: float, progress: bool):
        self.target = target
        self.space, self.seed, self.tolerance = target.space, seed, tolerance
        self.generator = torch.Generator().manual_seed(seed)
        self.trace: list[SearchStep] = []
        self.stage, self.draws = "start", 0
        self.bar = tqdm(unit=" evaluations", disable=not (progress and is_live()))

    # ---- where a normal begins

    def climb(self, starts: int, iterations: int = STEPS) -> Climbs:
        """Return climbs of log p from so many starts."""
        self.stage = "climb"
        view, path = View(self.target, self.space.initial.double(), self.space.scale.double()), []
        points = torch.stack([self.start(index).initial for index in range(starts)]).double()
        with suppress(Limit):
            ascend(view, view.z(points), tolerance=CLIMB, iterations=iterations, path=path)
        if not path or not bool(path[-1][1].max() > -inf):
            tried = f"{starts} starts;"
            if self.target.exhausted:
                tried = "the starts that max_evaluations= left room for; raise it, or"
            raise NonFiniteError(
                f"the log density is not finite around any of {tried} give the parameters values at which it is "
                "finite: Parameters({name: value, ..})"
            )
        return Climbs(view, path)

    def fit_hill(self, start: Normal, value: float, steps: int) -> tuple[list[Normal], float, bool] | None:
        """Return the best full normal on few draws near a climb's end, its ELBO, and whether it is an optimum.

        Before it in the list is where it began. None if log p is finite at no draws.
        """
        noise = self.draws_of(2 * self.space.size)
        at = self.around(start, noise, full, value - FALL * self.space.size)
        if at is None:
            return None
        ended = ascend_normals(self.target, at, noise, full, ROUGH, self.record, steps=steps)
        return [at.normal, ended.normal], ended.at.elbo, ended.settled

    def first(self, starts: int) -> tuple[list[Normal], bool]:
        """Return the best full normal on few draws, after where it began, and whether it is an optimum."""
        climbs = self.climb(starts)
        self.stage, best, stages, settled = "start", -inf, [], False
        theta, values = climbs.ends()
        kept: list[int] = []
        for row in values.argsort(descending=True).tolist():
            if values[row] == -inf or self.is_known(theta[row], values[row].item(), theta[kept]):
                continue
            kept.append(row)
            start = self.most_mass(climbs, row)
            found = self.fit_hill(start, values[row].item(), SECOND if stages else 100)
            stages = stages or [start]
            if found is not None and found[1] > best:
                stages, best, settled = found
        return [stage for stage in stages if not is_far(stage, self.space)] or stages[:1], settled

    def most_mass(self, climbs: Climbs, row: int) -> Normal:
        """Return the normal with the highest ELBO on a handful of draws, at a climb's end or before it.

        A climb may go past the mass, as in a funnel.
        """
        half = self.noise(HANDFUL // 2)
        z = torch.cat([half, -half]) * (half.shape[1] ** 0.5 / half.norm(dim=-1)).repeat(2).unsqueeze(-1)
        z_row = torch.stack([z[row] for z, _, _ in climbs.path])
        end = int((z_row.diff(dim=0) != 0).any(-1).sum())
        best, highest = climbs.normal(row), -inf
        with suppress(Limit), torch.no_grad():
            for step in (end, *(step for step in EARLIER if step < end)):
                normal = climbs.normal(row, step)
                values = self.target.log_joint((normal.mean + z @ normal.root.mT).to(self.space.initial)).double()
                elbo = torch.nan_to_num(values, nan=-inf).mean().item() + normal.entropy()
                if highest < elbo < inf:
                    best, highest = normal, elbo
        return best

    def is_known(self, theta: Tensor, value: float, known: Tensor) -> bool:
        """Return whether an end is on the hill of another: log p halfway is not below both."""
        if not len(known):
            return False
        try:
            with torch.no_grad():
                halfway = self.target.log_joint(((theta + known) / 2).to(self.space.initial))
        except Limit:
            return True
        return bool((halfway > value - VALLEY).any())

    def around(self, normal: Normal, noise: Tensor, project: Project, least: float = -inf) -> Local | None:
        """Return what draws of the normal tell or, if log p is not finite or too low, of the widest narrower one."""
        for shrink in SHRINK:
            try:
                new = normal if shrink == 1 else project(Normal(normal.mean, shrink * normal.root))
                at = local(self.target, new, noise)
            except Limit:
                return None
            if at is not None and at.value > least:
                self.record(at)
                return at
        return None

    # ---- a normal of the family's shape

    def gaussian(self, family: Family, starts: int, draws: int | None, goes_on: bool) -> Found:
        """Return the bound family at the best normal of its shape, from the best hill or from where it is."""
        form = family.normal()
        assert form is not None
        shape = Shape(form)
        if goes_on:
            return self.newton(family, shape, [normal_of(form)], draws, True)
        stages, trusted = self.first(starts)
        if not trusted and not isinstance(form.root, Diagonal):
            stages += [normal for normal in [self.mean_field(stages)] if not is_far(normal, self.space)]
        return self.newton(family, shape, [*stages[:-1], shape(stages[-1])], draws, trusted)

    def mean_field(self, stages: list[Normal]) -> Normal:
        """Return the best mean field near the stages, for a full normal that fits few draws too well."""
        self.stage = "mean field"
        scale = Diagonal(torch.ones_like(stages[-1].mean))
        shape, noise = Shape(NormalForm(stages[-1].mean, scale)), self.draws_of(FEW, seed=-1)
        at = self.best_stage([shape(stage) for stage in stages], inf, noise, shape)
        return stages[-1] if at is None else ascend_normals(self.target, at, noise, shape, ROUGH, self.record).normal

    def newton(self, family: Family, shape: Shape, stages: list[Normal], draws: int | None, trusted: bool) -> Found:
        """Return the end of Newton's steps on more and more draws, until new draws no longer move it.

        Each set of draws begins at the end of the one before. If that end is a wreck on the new draws, the best of the
        stages before is taken. The first set does so too if the last stage is not trusted.
        """
        self.stage = "family"
        S, before = draws or 2 * least_draws(self.space.size), 2 * self.space.size
        settled, promise, elbo, first = False, inf, -inf if trusted else inf, 0
        for level in count(1):
            noise = self.draws_of(S, level)
            at = self.best_stage(stages, elbo, noise, shape)
            if at is None:
                settled = False
                break
            few, elbo, promise = S <= FEW, at.elbo, at.promise(stepped(at, shape))
            # noise costs c/S: from a fit on S′ draws c/S′ + c/S are promised; S/(S + S′) of the way c/(S + S′) is left
            share = S / (S + before)
            left = promise * (1 - share) * (1.0 if few else share) / (ENOUGH * self.tolerance)
            enough = (settled and abs(left) < (LEFT_FEW if few else LEFT)) or abs(promise) < self.tolerance
            if enough or (settled and not few and not draws and promise < AVERAGED):
                floor, most = TRIES[first]
                stages.append(part_of_the_way(at, shape, floor, min(most, share if settled else 1.0)))
                S, before = _more_draws(S + before, left), S + before
                if not enough and before < MOST_AVERAGED:
                    continue
                settled = True
                break
            tolerance = max(0.25 * ENOUGH * self.tolerance, 0.1 * promise if settled and S < MAX_DRAWS else 0.0)
            ended = ascend_normals(self.target, at, noise, shape, tolerance, self.record, first)
            settled, first, far = ended.settled, ended.first, is_far(ended.normal, self.space)
            if not (far and few):
                stages.append(ended.normal)
                elbo, promise = ended.at.elbo, ended.promise
            if not (settled or far or self.target.exhausted):
                normal, found = self.polished(family, shape, stages[-1], S)
                far = is_far(normal, self.space)
                settled = not far and found.converged
                if not far:
                    stages.append(normal)
                    elbo, promise = found.elbo, found.gain
            if draws or self.target.exhausted or (far and not few) or S >= MAX_DRAWS:
                break
            S, before = min(MAX_DRAWS, S * (GROWTH if few or left > 0.9 else 2)), S
        set_form(family, stages[-1].to_form())
        return Found(family, elbo, promise, settled)

    def best_stage(self, stages: list[Normal], elbo: float, noise: Tensor, shape: Project) -> Local | None:
        """Return the last stage on new draws or, if it has lost much of its ELBO there, the best of all."""
        at = self.around(stages[-1], noise, shape)
        if at is not None and (at.elbo > elbo - WRECK):
            return at
        others = [self.around(shape(stage), noise, shape) for stage in stages[-4:-1]]
        found = [one for one in (at, *others) if one is not None]
        return max(found, key=lambda one: one.elbo) if found else None

    def polished(self, family: Family, shape: Shape, normal: Normal, S: int) -> tuple[Normal, Found]:
        """Return the end of L-BFGS from a normal, in coordinates in which it is about standard."""
        is_full, form, q = isinstance(shape.root, Triangle), normal.to_form(), copy.deepcopy(family)
        root = triangular(normal.root) if is_full else normal.precision().diagonal().rsqrt()
        view = View(self.target, normal.mean, root)
        q.space = view.space
        set_form(q, form.standard() if is_full else form.affine(-normal.mean / root, 1 / root))
        found = self.maximise(q, view, S, iterations=SLOW)
        form = q.normal()
        assert form is not None
        return normal_of(form.affine(normal.mean.to(form.mean), root.to(form.mean))), found

    # ---- any family

    def any(self, recipe: Family, starts: int, draws: int | None) -> Found:
        """Return the best of several starts, of a family of which nothing is known."""
        self.stage = "starts"
        tries = []
        for index in range(starts):
            q = recipe.bind(self.start(index), self.generator)
            tries.append(self.maximise(q, self.target, least_draws(q().noise_size), ROUGH))
        return self.levels(max(tries, key=lambda one: one.elbo).family, self.target, draws)

    def levels(self, family: Family, target: Target, draws: int | None) -> Found:
        """Return the family on more and more draws, until that gains next to nothing."""
        self.stage = "family"
        if draws is not None:
            return self.maximise(family, target, draws)
        S = least_draws(family().noise_size)
        while True:
            S *= GROWTH
            found = self.maximise(family, target, S)
            if found.gain < ENOUGH * self.tolerance or S * GROWTH > MAX_DRAWS or self.target.exhausted:
                return found

    def maximise(
        self, family: Family, target: Target, draws: int, tolerance: float | None = None, iterations: int = 1000
    ) -> Found:
        """Return the family at the best point found on so many fixed draws, also if the evaluations end."""
        coupling, self.draws = FixedDraws(draws, self.seed), draws
        parameters = [p for p in family.parameters() if p.requires_grad]
        start = torch.cat([p.detach().reshape(-1).double() for p in parameters])
        values: list[float] = []
        best = start

        def load(x: Tensor) -> None:
            with torch.no_grad():
                for parameter, part in zip(parameters, x.split([p.numel() for p in parameters]), strict=True):
                    parameter.copy_(part.view(parameter.shape))

        def function(rows: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal best
            load(rows[0])
            try:
                value = fixed_elbo(family, target, coupling)
                slope = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
            except (NonFiniteError, torch.linalg.LinAlgError):  # pyright: ignore[reportPrivateImportUsage]
                return rows.new_full((1,), -inf), torch.zeros_like(rows)
            if not values or value.item() > max(values):
                best = rows[0].clone()
                self.record(value.item())
            values.append(value.item())
            return value.detach().double().view(1), torch.cat([x.reshape(-1).double() for x in slope]).unsqueeze(0)

        converged = False
        try:
            tolerance = tolerance or self.tolerance
            ended = ascend(function, start.unsqueeze(0), tolerance=tolerance, iterations=iterations, memory=50)
            converged = bool(ended.converged)
        except Limit:
            self.target.exhausted = True
        load(best)
        elbo = max(values, default=-inf)
        return Found(family, elbo, elbo - values[0] if values else inf, converged)

    # ---- points and draws

    def start(self, index: int) -> Parameters:
        """Return the space, at other values for all but the first start."""
        space = self.space
        return space if index == 0 else space.at(space.initial + space.scale * self.noise(1)[0].to(space.initial))

    def noise(self, n: int) -> Tensor:
        """Return rows of standard normal numbers, [n, P] in float64."""
        return torch.randn(n, self.space.size, generator=self.generator, dtype=torch.float64).to(self.space.device)

    def draws_of(self, draws: int, seed: int = 0) -> Tensor:
        """Return fixed draws [S, P], in float64."""
        self.draws = max(8, draws)
        coupling = FixedDraws(self.draws, self.seed + seed)
        return coupling(1, self.space.size, 0, dtype=torch.float64, device=self.space.device).diagonal

    def record(self, at: Local | float) -> None:
        """Note an ELBO in the trace and on the progress bar."""
        value = at.elbo if isinstance(at, Local) else at
        self.trace.append(SearchStep(self.stage, self.target.evaluations, self.draws, value))
        self.bar.n = self.target.evaluations
        self.bar.set_postfix_str(f"{self.stage}, {self.draws} draws: ELBO {value:.6g}")


def _more_draws(before: int, left: float) -> int:
    """Return how many more draws, a power of two, leave enough of what an average over `before` of them leaves."""
    wanted = max(0.0, before * (left / LEFT - 1))
    return min(MAX_DRAWS, max(2 * FEW, 1 << int(wanted).bit_length()))
