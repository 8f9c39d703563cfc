"""The searches of `vi.fit`.

starts ─ mean field ─▶ coordinates in which scales are 1 ─ gradients ─▶ a normal with the target's mean curvature
                                                                          │ costs no evaluation: the family's best
                                                                          ▼ approximation of that normal
                                  the family on S, 4S, 16S.. draws, until more draws no longer move it
"""

import sys
from math import inf, isinf, nan

import torch
from torch import Tensor
from tqdm import tqdm

from ..families.family import Coordinates, Family
from ..families.mean_field import MeanField
from ..models.target import Target
from ..objective import NonFiniteError
from ..parameters import Parameters
from .coordinates import Counted, Limit, Moved, NormalTarget, standard, standardising, to_theta
from .fixed_draws import FixedDraws, fixed_elbo, least_draws
from .lbfgs import Curvature, flat, minimise
from .result import ENOUGH, Found, SearchStep

#: draws are multiplied by this from one level to the next
GROWTH = 4
#: most draws that the fit takes by itself
MAX_DRAWS = 1 << 12
#: of the penalty on (log s − log s₀)² that keeps a low-rank family's scales finite
RIDGE = 1e-6
#: least curvature that is believed of the estimate from gradients, relative to mean field's; its inverse the greatest
FLOOR = 1e-4
#: tolerance of searches that only choose between starts
ROUGH = 0.1


class Search:
    """One call of `fit`: the target and its count, and the searches."""

    def __init__(self, target: Target, limit: float, seed: int, tolerance: float, progress: bool):
        self.target = Counted(target, limit)
        self.space = target.space
        self.seed, self.tolerance = seed, tolerance
        self.generator = torch.Generator().manual_seed(seed)
        self.trace: list[SearchStep] = []
        self.stage, self.draws = "start", 0
        self.bar = tqdm(unit=" evaluations", disable=not (progress and sys.stderr.isatty()))

    def gaussian(self, recipe: Family, coordinates: Coordinates, starts: int, draws: int | None) -> Found:
        """Mean field, the normal with the target's curvature, then the family, in the coordinates of these two."""
        around, least = self.mean_field(starts)
        mean, precision = self.curvature(around)
        place = around
        if coordinates == "full":
            root = torch.linalg.cholesky(torch.linalg.inv(precision))
            place = Moved(self.target, around.theta(mean), around.root.unsqueeze(-1) * root)
            q, curvature = standard(recipe, place.space, self.generator), Curvature()
        else:
            q, curvature = self.approximate(recipe, place.space, mean, precision)
        found = self.levels(q, place, curvature, draws)
        if found.elbo < least - 1 and not self.target.exhausted:  # the curvature misled: begin again at mean field
            place = around
            found = self.levels(standard(recipe, place.space, self.generator), place, Curvature(), draws)
        to_theta(found.family, place)
        return found

    def mean_field(self, starts: int) -> tuple[Moved, float]:
        """Coordinates in which the best mean field from several points is standard normal, and its ELBO."""
        self.stage = "mean field"
        draws, tries = least_draws(self.space.size), []
        for index in range(starts):
            for shrink in (1.0, 0.01):
                recipe = MeanField(initial_scale=0.1 * shrink)
                tries.append(self.maximise(recipe.bind(self.start(index)), self.target, draws, ROUGH))
                if not isinf(tries[-1].elbo):
                    break
        best = max(tries, key=lambda one: one.elbo)
        if isinf(best.elbo):
            tried = f"{starts} starts;"
            if self.target.exhausted:
                tried = "the starts that max_evaluations= left room for; raise it, or"
            raise NonFiniteError(
                f"the log density is not finite around any of {tried} give the parameters values at which it is "
                "finite: Parameters({name: value, ..})"
            )
        place = standardising(self.target, best.family)
        again = self.maximise(standard(MeanField(), place.space, None), place, draws, self.tolerance)
        to_theta(again.family, place)
        return standardising(self.target, again.family), max(best.elbo, again.elbo)

    def curvature(self, place: Moved) -> tuple[Tensor, Tensor]:
        """Mean and precision of the normal whose log density has the expected gradient and Hessian of the target's.

        Under N(0, I), by Stein's identity E ∇² log p(ε) = E ∇log p(ε) εᵀ: exact on fixed draws for a quadratic.
        """
        P, like = self.space.size, place.shift
        nothing = torch.zeros_like(like), torch.eye(P, dtype=like.dtype, device=like.device)  # mean field itself
        draws = GROWTH * least_draws(P)
        noise = FixedDraws(draws, self.seed)(1, P, 0, dtype=like.dtype, device=like.device).diagonal
        z = noise.clone().requires_grad_()
        try:
            (gradient,) = torch.autograd.grad(place.log_joint(z).sum(), z)  # [S, P]
        except Limit:
            return nothing
        hessian = gradient.mT @ noise / draws
        if not bool(torch.isfinite(hessian).all()):  # a draw farther out than mean field's
            return nothing
        values, vectors = torch.linalg.eigh(-(hessian + hessian.mT) / 2)
        precision = (vectors * values.clamp(FLOOR, 1 / FLOOR)) @ vectors.mT
        return torch.linalg.solve(precision, gradient.mean(0)), precision

    def approximate(
        self, recipe: Family, space: Parameters, mean: Tensor, precision: Tensor
    ) -> tuple[Family, Curvature]:
        """The family's best approximation of N(mean, precision⁻¹), from several starts, and what was learned."""
        self.stage = "curvature"
        draws = least_draws(space.size + recipe.rank)
        normal = NormalTarget(space, mean, torch.linalg.cholesky(precision))
        tries = []
        for index in range(recipe.starts):
            q, curvature = standard(recipe, space, self.generator), Curvature()
            q.start_at(index, mean, precision, self.noise)
            tries.append((self.maximise(q, normal, draws, self.tolerance, curvature, iterations=100), curvature))
        best, curvature = max(tries, key=lambda one: one[0].elbo)
        return self.maximise(best.family, normal, draws, 1e-2 * self.tolerance, curvature).family, curvature

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
        tolerance: float,
        curvature: Curvature | None = None,
        iterations: int = 1000,
    ) -> Found:
        """Leave the family at the best point found on so many fixed draws, also where the evaluations end."""
        coupling = FixedDraws(draws, self.seed)
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
