"""One training step: draws, network, gradients, clipping and the optimizer; on a GPU captured as one CUDA graph."""

import traceback
from collections.abc import Callable, Hashable, Sequence
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # pyright: ignore
from torch.utils import _pytree as pytree

from ..distributed.ranks import Ranks
from ..families.density import Density, Detached
from ..families.numerics.fused import LowRankGradient
from ..models.batch import rows
from ..objective import Estimator, NonFiniteError, check_estimator, check_spaces, scored_draws, terms_at
from ..util.host_reads import unread
from .adam import Adam, Thin, gradient_norm
from .by_hand import AtDraws, gradient_at, rounded
from .cuda_graph import CapturedStep
from .memory import explain, need_of, there_is

if TYPE_CHECKING:
    from ..posterior import Posterior

#: Graphs that are kept: one for each shape of batch (the last of an epoch is shorter) in each stage.
_GRAPHS = 4
#: why a step is not captured where the user does not want it
AS_ASKED = "as asked"


class OverflowingError(NonFiniteError):
    """Gradients inside a float16 network are too large at their present scale, which has been halved."""


class Outcome(NamedTuple):
    """What a step has to tell."""

    elbo: Tensor  # [groups], float64, on the CPU: in nats for the whole data set at λ = 1
    norm: float  # of the gradient of −elbo/N, before it was clipped


class Step:
    """`step(batch)` moves the posterior's parameters by one step of the optimizer along the gradient of −elbo/N.

    Where loss or gradient are not finite it raises `NonFiniteError` and has changed nothing; nor has a step that ran
    out of memory. On a GPU, with the
    default optimizer and batches of a shape seen before, the whole step is one captured CUDA graph: the launches of
    its kernels no longer wait for Python.

    Args:
        posterior: what is fitted; N must be known.
        optimizer: over `posterior.parameters()`; `train.adam.Adam` can be captured.
        generator: of the draws, on the posterior's device.
        estimator: of the ELBO and its gradient.
        clip: the largest norm of the gradient; None for no limit.
        capture: capture on a GPU where possible; `captured` and `reason` say what came of it.
        ranks: the processes that share the work.

    Example:
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> bayes = variationalize(torch.nn.Linear(3, 1), likelihoods.Gaussian(noise=1.0), MeanField(), num_data=8)
        >>> step = Step(bayes, Adam(bayes.parameters(), lr=0.01), torch.Generator().manual_seed(0))
        >>> step([(torch.zeros(8, 3), torch.zeros(8, 1))]).elbo.shape
        torch.Size([1])
    """

    def __init__(
        self,
        posterior: "Posterior",
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
        *,
        estimator: Estimator = Estimator(),
        clip: float | None = None,
        capture: bool = True,
        ranks: Ranks | None = None,
    ):
        self.posterior, self.optimizer, self.generator = posterior, optimizer, generator
        self.groups, self.coupling = estimator.groups, estimator.coupling
        self.estimator = estimator
        self.clip = inf if clip is None else clip
        self.ranks = Ranks() if ranks is None else ranks
        self.named: dict[str, Tensor] = dict(posterior.named_parameters())
        #: S of the last step; before the first, of a pair to a group
        self.draws = 2 * estimator.groups
        #: log likelihood of the last step, in nats for the whole data set
        self.fit = nan
        #: why the step is not captured; None where it is, or will be
        self.reason = self._why_not(capture)
        self._graphs: dict[Hashable, CapturedStep] = {}
        # the factor's gradient as two thin sides, where the optimizer can take it and it need not travel
        thin = isinstance(optimizer, Adam) and self.ranks.size == 1 and estimator.kind == "path"
        self._thin: set[Tensor] | None = optimizer.thin if isinstance(optimizer, Adam) and thin else None
        self._moves_unread = isinstance(optimizer, Adam) and self.ranks.size == 1 and generator.device.type == "cuda"
        check_spaces(posterior.family, posterior.model)
        if generator.device.type == "cpu":
            _keep_freed_memory()

    @property
    def captured(self) -> bool:
        return bool(self._graphs)

    def __call__(
        self,
        batches: Sequence[Any],
        weights: Sequence[float] = (1.0,),
        temperature: float = 1.0,
        whole: float | None = None,
    ) -> Outcome:
        """One step over these batches.

        With B_i observations in batch i and R̄ in a step on average, batches have the weights B_i/R̄: log likelihood and
        KL alike, since model.log_likelihood is scaled by N/B_i already. All observations then count the same, whatever
        the sizes of batches and steps.

        Args:
            batches: one, or several whose gradients are accumulated.
            weights: of each; of several ranks, of this rank's part of it.
            temperature: λ in E log lik − λ KL[q‖prior].
            whole: the sum of all weights, over ranks; that of `weights` if None.
        """
        stream = self.generator.get_state()
        try:
            return self._made(batches, weights, temperature, whole, stream)
        except torch.OutOfMemoryError as error:
            self.generator.set_state(stream)
            raise self._out_of_memory(error, batches) from None

    def _made(
        self, batches: Sequence[Any], weights: Sequence[float], temperature: float, whole: float | None, stream: Tensor
    ) -> Outcome:
        graph, told, norm, thin = self._gradients(batches, weights, temperature)
        # where the host would wait for the device, the optimizer is launched before it does
        moved = graph is None and self._moves_unread
        read = _reading(told, norm, moved)
        if moved:
            assert isinstance(self.optimizer, Adam)
            self.optimizer.step_clipped(told, norm, thin, self.clip)
        whole = sum(weights) if whole is None else whole
        *values, size = read()  # the one time the host waits
        values = [value / whole for value in values]
        if not all(map(isfinite, [*values, size])):
            self.generator.set_state(stream)
            raise self._explained(batches, temperature, not isfinite(sum(values)))
        groups = len(values) // 2
        elbo, self.fit = torch.tensor(values[:groups], dtype=torch.float64), sum(values[groups:]) / groups
        if graph is None and not moved:
            self._move(size, thin)
        if self.posterior.model.precision == torch.float16:
            self.posterior.model.scale.count()
        return Outcome(elbo, size)

    def replay(self) -> None:
        """The step captured last once more, on the batch that it holds, without a look at what comes out."""
        if not self._graphs:
            raise ValueError(f"no step has been captured: {self.reason or 'call it first'}")
        next(reversed(self._graphs.values())).graph.replay()

    def _gradients(
        self, batches: Sequence[Any], weights: Sequence[float], temperature: float
    ) -> tuple[CapturedStep | None, Tensor, Tensor, Thin]:
        """What `_gradient` gives, or a captured step, which has then moved the parameters too."""
        graph = self._graph(batches, temperature)
        if graph is not None:
            return graph, *graph(batches[0], weights[0], temperature), {}
        for parameter in self.named.values():
            parameter.grad = None
        return None, *self._gradient(batches, weights, temperature, self.generator)

    def _move(self, size: float, thin: Thin) -> None:
        """The optimizer's step, with the gradient, of this norm, clipped."""
        if isinstance(self.optimizer, Adam):
            self.optimizer.unheard_step(thin, min(1.0, self.clip / max(size, 1e-30)))
            return
        if size > self.clip:
            for parameter in self.named.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.clip / size)
        self.optimizer.step()

    def _gradient(
        self, batches: Sequence[Any], weights: Sequence[float], temperature: Any, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Thin]:
        """Gradients of −(E log lik − λ KL)/N into the parameters' `.grad`, but for the thin ones, which are returned;
        and ELBO and log likelihood of each group, [2, groups], times the weights' sum, and the gradient's norm."""
        total: Tensor | None = None
        thin: dict[Tensor, list[LowRankGradient]] = {}
        for offset, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            # a product: of a captured step the weight is a tensor, and CUDA divides one by a number as x·(1/N)
            factor = weight * (-1.0 / self.posterior.model.num_data)
            density = self.posterior.family()
            check_estimator(density, self.estimator.kind)
            detached = None
            if self._thin is not None and density.has_density:
                with unread():
                    detached = density.draw_detached(self.groups, self.coupling, generator)
            try:
                if detached is not None:
                    told = self._by_hand(density, detached, batch, factor, temperature, thin)
                else:
                    told = self._by_graph(density, batch, factor, temperature, generator)
            except (ValueError, TypeError, RuntimeError, IndexError) as error:
                error.batch = offset  # pyright: ignore[reportAttributeAccessIssue]
                raise
            told = told if isinstance(weight, float) and weight == 1.0 else told * weight
            total = told if total is None else total + told
        assert total is not None
        total = self.ranks.reduce(self.named, total)
        joined = {factor: LowRankGradient.joined(parts) for factor, parts in thin.items()}
        return total, self.ranks.norm(self.named, lambda own: gradient_norm(own, joined)), joined

    def _by_hand(
        self, density: Density, detached: Detached, batch: Any, factor: Any, temperature: Any,
        thin: dict[Tensor, list[LowRankGradient]],
    ) -> Tensor:  # fmt: skip
        """ELBO and log likelihood of each group; gradients of the parameters without a graph through the draws."""
        self.draws = detached.draws.weight.shape[0]
        model = self.posterior.model
        with unread(), self.posterior.network_mode():
            at = gradient_at(density, detached, model, batch, self.groups, factor, temperature)
        self._pull(detached, at, thin)
        return at.told

    def _by_graph(
        self, density: Density, batch: Any, factor: Any, temperature: Any, generator: torch.Generator
    ) -> Tensor:
        """ELBO and log likelihood of each group; gradients through draws, network and objective."""
        posterior = self.posterior
        with self.ranks.together():
            with unread(), posterior.network_mode():
                own = self.ranks.generator(generator)
                draws, log_q = scored_draws(density, self.estimator, own)
                self.draws = draws.weight.shape[0]
                terms = terms_at(density, draws, log_q, posterior.model, batch, self.estimator)
            objective = (terms.fit - rounded(temperature, terms.complexity) * terms.complexity).mean()
            if self.ranks.size > 1 and not bool(torch.isfinite(objective)):
                raise NonFiniteError("the loss is not finite")
        (objective * rounded(factor, objective)).backward()
        return torch.stack([terms.fit - terms.complexity, terms.fit]).detach().double()

    def _pull(self, detached: Detached, at: AtDraws, thin: dict[Tensor, list[LowRankGradient]]) -> None:
        """From the gradients at the draws to those of the parameters."""
        for source, gradient in detached.pull(at.theta, at.log_q, at.slope):
            if not source.requires_grad:
                continue
            if isinstance(gradient, LowRankGradient):
                if self._thin is not None and source in self._thin:
                    thin.setdefault(source, []).append(gradient)
                    continue
                gradient = gradient.dense()
            if source.is_leaf:
                source.grad = gradient if source.grad is None else source.grad.add_(gradient)
            else:  # made of the family's parameters
                source.backward(gradient)

    def _explained(self, batches: Sequence[Any], temperature: float, loss: bool) -> Exception:
        """What was not finite: the same draws again, this time with every check."""
        model = self.posterior.model
        if not loss and model.precision == torch.float16 and model.scale.halve():
            return OverflowingError(f"float16 overflowed in the gradient; its scale is now {model.scale.value:g}")
        if not loss:
            bad = [n for n, p in self.named.items() if p.grad is not None and not bool(p.grad.isfinite().all())]
            return NonFiniteError(f"the loss is finite but its gradient is not, in {', '.join(bad) or 'a factor'}")
        with torch.no_grad():
            for offset, batch in enumerate(batches):
                try:
                    terms = self.posterior.terms(
                        batch, estimator=self.estimator,
                        generator=self.generator,
                    )  # fmt: skip
                except (NonFiniteError, LinAlgError) as error:
                    return error
                except (ValueError, TypeError, RuntimeError, IndexError) as error:
                    error.batch = offset  # pyright: ignore[reportAttributeAccessIssue]
                    return error
                if not bool(torch.isfinite((terms.fit - temperature * terms.complexity).mean())):
                    break
        return NonFiniteError("the KL (log q or entropy of the posterior) is not finite")

    def _out_of_memory(self, error: torch.OutOfMemoryError, batches: Sequence[Any]) -> torch.OutOfMemoryError:
        """The same, with what the step needs and what would fit; what the step had taken is given back."""
        one: BaseException | None = error
        while one is not None:  # what it was raised while handling holds tensors too
            traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None  # a cleared frame still has its function, and that the tensors it closes over
            one = one.__context__
        for parameter in self.named.values():
            parameter.grad = None
        self._graphs.clear()
        device = self.generator.device
        if device.type == "cuda":
            torch.cuda.empty_cache()
        largest = max(batches, key=rows)
        need = need_of(self.posterior, largest, self.groups, self.coupling)
        moments = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        there = there_is(device, [*self.named.values(), *moments])
        return torch.OutOfMemoryError(f"{explain(need, there, device)} torch said: {error}")

    # ----------------------------------------------------------------------------------------------------- capture

    def _why_not(self, capture: bool) -> str | None:
        if not capture:
            return AS_ASKED
        if self.generator.device.type != "cuda":
            return "not on a CUDA device"
        if not isinstance(self.optimizer, Adam):
            return f"the optimizer is {type(self.optimizer).__name__}, not the default one"
        return "the work is shared with other ranks" if self.ranks.size > 1 else None

    def _graph(self, batches: Sequence[Any], temperature: float) -> CapturedStep | None:
        if self.reason is not None or len(batches) > 1 or not isinstance(self.optimizer, Adam):
            return None
        leaves, form = pytree.tree_flatten(batches[0])
        model = self.posterior.model
        key = (
            str(form), tuple((x.shape, x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves),
            tuple(p.requires_grad for p in self.named.values()), tuple(m.training for m in model.net.modules()),
            model.precision,
        )  # fmt: skip
        if key not in self._graphs:
            if len(self._graphs) == _GRAPHS:
                return None
            try:
                self._graphs[key] = CapturedStep(
                    self._gradient, self.optimizer, self.generator, self.clip, batches[0], temperature
                )
            except torch.OutOfMemoryError:
                self.reason = "there is no memory for a captured step beside what it needs"
            except (RuntimeError, NotImplementedError) as error:  # what cannot be captured says so in many ways
                torch.cuda.synchronize()
                self.reason = f"the step cannot be captured: {str(error).strip().splitlines()[0][:200]}"
            if self.reason is not None:
                self._graphs.clear()
                torch.cuda.empty_cache()  # what a capture has taken is needed
                return None
        return self._graphs[key]


def _reading(told: Tensor, norm: Tensor, later: bool) -> Callable[[], list[float]]:
    """How these numbers are read: where it is later, it waits for what has been launched so far, and no more."""
    if not told.is_cuda:
        return lambda: [*told.flatten().tolist(), norm.item()]
    numbers = torch.cat([told.flatten(), norm.reshape(1)])
    if not later:
        return numbers.tolist
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(numbers.device))

    def read() -> list[float]:
        copied.synchronize()
        return host.tolist()

    return read


def _keep_freed_memory() -> None:
    """The C library gives freed memory back to the system, and the next step waits for every page of it again.

    glibc gives back what is more than twice the largest block that was mapped and freed so far, up to 32 MB: after one
    of that size, whose pages are never touched, the temporaries of a step stay (docs/performance.md).
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)
