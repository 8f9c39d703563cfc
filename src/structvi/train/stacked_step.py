"""One training step of M posteriors at once: vmap over their parameters, noise and batches."""

from collections.abc import Sequence
from math import nan
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from ..couplings import Coupling, Noise
from ..objective import Estimator, Kind, log_q_at, terms_at
from ..util.host_reads import unread
from .stacked import Stack, StackedAdam
from .stacked_graph import StackedGraph, key_of
from .stacked_noise import maker, noise_calls

if TYPE_CHECKING:
    from ..posterior import Posterior

#: gradients both ways may differ by this many roots of the rounding, relative to the largest
CLOSE = 3.0
#: graphs that are kept: one for each shape of batch
GRAPHS = 8


class Plan(NamedTuple):
    """What a step has to know of each member: [M] each, in float64."""

    #: N/B over that of the model that is called, which takes the padded batch for its own
    ratio: Tensor
    #: B/R̄/N: of −elbo, as `Step` weighs it
    weight: Tensor
    #: λ
    temperature: Tensor
    #: learning rate
    rate: Tensor
    #: 1 while the fit goes on
    active: Tensor


class Outcomes(NamedTuple):
    """What the step has to tell, on the CPU."""

    elbo: list[float]  # in nats for the whole data set at λ = 1
    error: list[float]  # its standard error over groups; nan for one
    norm: list[float]  # of the gradient of −elbo/N, before it was clipped
    finite: list[bool]


class Objective(nn.Module):
    """Fit and complexity of one posterior at given noise: what vmap is taken of.

    Args:
        posterior: whose forms and modes all have.
        groups, estimator: as in `elbo`.
    """

    def __init__(self, posterior: "Posterior", groups: int, estimator: Kind):
        super().__init__()
        self.posterior, self.groups = posterior, groups
        self.estimator = Estimator(estimator, groups)

    def forward(self, noise: Sequence[Noise], batch: Any) -> tuple[Tensor, Tensor]:
        density, given = self.posterior.family(), iter(noise)
        draws = density.draw(self.groups, lambda *_, **__: Noise(*next(given)))
        point, kind, log_q = draws.theta if draws.latent is None else draws.latent, self.estimator.kind, None
        if density.has_density and kind != "entropy":
            log_q = log_q_at(density, point, path=kind == "path")
        terms = terms_at(density, draws, log_q, self.posterior.model, batch, self.estimator)
        return terms.fit, terms.complexity

    def at(self, tensors: dict[str, Tensor], noise: Sequence[Noise], batch: Any) -> tuple[Tensor, Tensor]:
        """With these tensors in place of the posterior's own."""
        return functional_call(self, {f"posterior.{name}": x for name, x in tensors.items()}, (noise, batch))


class StackedStep:
    """`step(batch, plan)` moves every posterior as `Step` would move it alone, up to rounding.

    Args:
        posteriors: of one form.
        rates: learning rates of tensors, relative to the rest, by name.
        generators: of each one's draws.
        groups, coupling, estimator: as in `elbo`.
        clip: the largest norm of a gradient.
        capture: on a GPU, run the step as one CUDA graph for each shape of batch.
    """

    def __init__(
        self,
        posteriors: "Sequence[Posterior]",
        rates: dict[str, float],
        generators: Sequence[torch.Generator],
        *,
        groups: int,
        coupling: Coupling,
        estimator: Kind,
        clip: float,
        capture: bool = True,
    ):
        self.posteriors, self.generators, self.clip = posteriors, generators, clip
        self.groups, self.coupling = groups, coupling
        # its N is the largest: a padded batch is never larger than that
        self.largest = max(range(len(posteriors)), key=lambda m: posteriors[m].model.num_data)
        self.objective = Objective(posteriors[self.largest], groups, estimator)
        self.stack = Stack(posteriors)
        self.adam = StackedAdam(self.stack, rates)
        #: what noise one draw asks for, and S
        self.calls, self.size = noise_calls(posteriors[0].family(), groups, coupling)
        self.draws = maker(self.calls, coupling, generators, posteriors[0].space.dtype)
        #: why the step is not captured as a CUDA graph; None where it is, or will be
        self.reason = None if capture and posteriors[0].device.type == "cuda" else "not on a CUDA device, or as asked"
        self._graphs: dict[Any, StackedGraph] = {}

    @property
    def num_data(self) -> int:
        """N of the model that is called."""
        return self.posteriors[self.largest].model.num_data

    def __call__(self, batch: Any, plan: Plan) -> Outcomes:
        given = tuple(self.draws()), batch, plan
        told = self._captured(*given)
        if told is None:
            told = self._body(*given)
        elbo, error, norm, finite = told.tolist()  # the one time that the host waits
        return Outcomes(elbo, error, norm, [value > 0 for value in finite])

    def _body(self, noise: Sequence[Noise], batch: Any, plan: Plan) -> Tensor:
        """The step; ELBO, its error, the gradient's norm and whether all is finite: [4, M] in float64."""
        elbo = self._gradients(noise, batch, plan)
        norm = self.adam.norms()
        finite = norm.isfinite() & elbo.isfinite().all(-1)
        coefficient = (self.clip / norm.clamp(min=1e-30)).clamp(max=1.0)
        self.adam.step(plan.rate, finite & (plan.active > 0), coefficient)
        error = elbo.std(-1) / self.groups**0.5 if self.groups > 1 else torch.full_like(norm, nan)
        return torch.stack([elbo.mean(-1), error, norm, finite.double()])

    def _captured(self, *given: Any) -> Tensor | None:
        """By a graph, on a GPU where the network allows; None where it has to be done otherwise."""
        if self.reason is not None:
            return None
        key = key_of(given)
        if key not in self._graphs:
            if len(self._graphs) == GRAPHS:
                return None
            noise, batch, plan = given
            try:
                self._graphs[key] = StackedGraph(self._body, (noise, batch, plan._replace(active=0 * plan.active)))
            except (RuntimeError, NotImplementedError) as error:  # what cannot be captured says so in many ways
                torch.cuda.synchronize()
                self.reason = f"the step cannot be captured: {str(error).strip().splitlines()[0][:200]}"
                self._graphs.clear()
                return None
        return self._graphs[key](*given)

    def _gradients(self, noise: Sequence[Noise], batch: Any, plan: Plan) -> Tensor:
        """Gradients of −elbo/N into `stack.rows`; the ELBO [M, groups] in float64."""
        for rows in self.stack.rows.values():
            rows.grad = None
        with unread(), self.objective.posterior.network_mode():
            fit, complexity = vmap(self.objective.at, randomness="error")(self.stack.views(), tuple(noise), batch)
        fit = fit * plan.ratio.to(fit.dtype).unsqueeze(-1)
        tempered = fit - plan.temperature.to(fit.dtype).unsqueeze(-1) * complexity
        (-tempered.mean(-1) * plan.weight.to(fit.dtype)).sum().backward()
        for rows in self.stack.rows.values():
            if rows.grad is None:
                rows.grad = torch.zeros_like(rows)
        return (fit - complexity).detach().double()

    def why_not(self, batch: Any, plan: Plan, counts: Sequence[int]) -> str | None:
        """What speaks against it, or None: each member beside its own network on its own rows, of the first and last
        the gradients too. Networks may differ in what no parameter shows, and padded rows may change the others.

        Args:
            batch: of all members, padded.
            plan: of the step.
            counts: of each member, the rows that are its own.
        """
        other = [torch.Generator(one.device).manual_seed(m) for m, one in enumerate(self.generators)]
        noise = maker(self.calls, self.coupling, other, self.posteriors[0].space.dtype)()
        try:
            found = self._gradients(noise, batch, plan)
        except (
            RuntimeError,
            ValueError,
            TypeError,
            NotImplementedError,
            IndexError,
            KeyError,
            AttributeError,
        ) as error:
            return f"vmap cannot run it: {(str(error).strip() or repr(error)).splitlines()[0][:200]}"
        views = {name: x.detach() for name, x in self.stack.views().items()}
        last = len(self.posteriors) - 1
        for m, posterior in enumerate(self.posteriors):
            own = {name: x[m].clone().requires_grad_(x.is_floating_point()) for name, x in views.items()}
            one = pytree.tree_map(lambda x, m=m: x[m], tuple(noise))
            alone = pytree.tree_map(lambda x, m=m: x[m][: counts[m]] if isinstance(x, Tensor) else x, batch)
            with unread(), posterior.network_mode():
                fit, complexity = Objective(posterior, self.groups, self.objective.estimator.kind).at(own, one, alone)
            if not _close(found[m], (fit - complexity).detach().double(), fit.dtype):
                return "all at once gives other values than each with its own network on its own rows"
            if m in (0, last):
                loss = (plan.temperature[m].to(fit.dtype) * complexity - fit).mean() * plan.weight[m].to(fit.dtype)
                loss.backward()
                wrong = [name for name in self.stack.places if not self._same_gradient(name, m, own[name].grad)]
                if wrong:
                    return f"all at once gives other gradients than one by one, of {', '.join(wrong)}"
        return None

    def _same_gradient(self, name: str, m: int, alone: Tensor | None) -> bool:
        place = self.stack.places[name]
        at_once = self.stack.rows[place.kind].grad
        assert at_once is not None
        return alone is None or _close(place.view(at_once[m]), alone, alone.dtype)


def _close(a: Tensor, b: Tensor, kind: torch.dtype) -> bool:
    tolerance = CLOSE * torch.finfo(kind).eps ** 0.5
    size = b.where(b.isfinite(), 0.0).abs().max().item() if b.numel() else 0.0
    return bool(torch.isclose(a.double(), b.double(), rtol=0.0, atol=tolerance * size, equal_nan=True).all())
