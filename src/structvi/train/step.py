"""One training step, of `fit` and for loops of your own: draw, run the network, go back, clip, move."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call
from torch.linalg import LinAlgError  # pyright: ignore
from torch.nn.utils import get_total_norm
from torch.utils import _pytree as pytree

from ..distributed.ranks import Parallel, Ranks
from ..families.numerics import unread
from ..models.bayesian_model import rows
from ..networks.call import in_modes, is_in_training
from ..objective import Estimate, Estimator, NonFiniteError, check_spaces, scored_draws, terms_at
from ..optim.adam import OptimizerLike, make_optimizer
from ..result import Status
from ..util.checks import check_integer, check_positive, check_seed
from ..util.interrupts import Interrupts
from ..util.random_streams import borrowed_stream
from .checks import FAILURES, draws_random_numbers
from .cuda_graph import CapturedStep
from .data import on_device

if TYPE_CHECKING:
    from ..posterior import Posterior

#: graphs that are kept: one for each shape of batch (the last of an epoch is shorter) in each stage
GRAPHS = 4
#: bytes of one block: after it was freed, glibc keeps up to twice as much for the next steps instead of returning it
KEPT_BYTES = 33_488_896


@dataclass(frozen=True)
class Compute:
    """Options of `fit` and `stepper`: how a step is computed.

    Args:
        precision: `torch.bfloat16` or `torch.float16` runs the network, and nothing else, in mixed precision. A step
            whose gradient overflows in float16 is left out, and halves the factor of the loss.
        compile: run the network through `torch.compile`, one draw at a time: for many large steps.
        capture: on a GPU, with the default optimizer, run the whole step as one CUDA graph if the network allows.
        parallel: "auto": of w ranks of a `torch.distributed` process group each takes its part of every batch, of w
            times the loader's batch size. None: they do not share the work. A stepper knows no other ranks.
    """

    precision: torch.dtype | None = None
    compile: bool = False
    capture: bool = True
    parallel: Parallel = "auto"

    def __post_init__(self) -> None:
        if self.precision not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"precision must be None, torch.bfloat16 or torch.float16, got {self.precision!r}")

    @contextmanager
    def applied(self, posterior: "Posterior") -> Iterator[None]:
        """Run the network in this precision, and compiled, inside the block."""
        if self.precision is not None and posterior.space.dtype != torch.float32:
            dtype = posterior.space.dtype
            raise ValueError(f"precision={self.precision} is mixed with float32, and the weights are {dtype}")
        model = posterior.model
        before = model.precision, model.compiled
        model.precision = self.precision or model.precision
        if self.compile and model.compiled is None:
            model.compiled = torch.compile(functional_call)
        try:
            yield
        finally:
            model.precision, model.compiled = before


class OverflowingError(NonFiniteError):
    """Gradients inside a float16 network are too large at the present factor of the loss, which has been halved."""


class LossFactor:
    """A power of two c: in float16 the backward pass starts from c times the loss, and gradients are divided by c.

    float16 has no numbers above 65504, and only zero below 6e-8. The gradient of −elbo/N at the output of one
    observation is about 1/(S·B). A step whose gradient is not finite halves c, and `GROWTH` finite steps in
    a row double it. bfloat16 has the range of float32 and needs no factor.

    Attributes:
        tensor: c on the device: a captured step reads it there.
        value: c.
        finite: how many steps in a row were finite.
    """

    GROWTH, LOWEST = 2000, 2.0**-16

    def __init__(self, device: torch.device):
        self.tensor = torch.empty((), device=device)
        self.set(2.0**16)

    def set(self, value: float, finite: int = 0) -> None:
        self.value, self.finite = value, finite
        self.tensor.fill_(value)

    def halve(self) -> bool:
        """Halve c after a gradient that is not finite; return False if c cannot be the reason."""
        possible = self.value > self.LOWEST
        if possible:
            self.set(self.value / 2)
        return possible

    def count(self) -> None:
        """Count a finite gradient."""
        self.finite += 1
        if self.finite == self.GROWTH:
            self.set(2 * self.value)


class Outcome(NamedTuple):
    """The numbers of a step."""

    elbo: Tensor  # [groups], float64, on the CPU: in nats for the whole data set at λ = 1
    norm: float  # of the gradient of −elbo/N, before it was clipped


class Step:
    """`step([batch])` moves the parameters by one step of the optimizer along the gradient of −elbo/N.

    If loss or gradient are not finite, it raises `NonFiniteError` and has changed nothing; nor has a step that ran out
    of memory. On a GPU, with an optimizer that is fused and capturable, the whole step is one CUDA graph.

    Args:
        posterior: to fit; N must be known.
        optimizer: over `posterior.parameters()`.
        generator: of the draws, on the posterior's device.
        estimator: of the ELBO and its gradient.
        clip: the largest norm of the gradient; None for no limit.
        capture: capture on a GPU where possible; `captured` and `reason` tell the outcome.
        ranks: the processes that share the work.

    Example:
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> bayes = variationalize(torch.nn.Linear(3, 1), likelihoods.Gaussian(noise=1.0), MeanField(), num_data=8)
        >>> step = Step(bayes, torch.optim.Adam(bayes.parameters(), lr=0.01), torch.Generator().manual_seed(0))
        >>> step([(torch.zeros(8, 3), torch.zeros(8, 1))]).elbo.shape
        torch.Size([1])
    """

    def __init__(
        self,
        posterior: "Posterior",
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
        estimator: Estimator = Estimator(),
        clip: float | None = None,
        capture: bool = True,
        ranks: Ranks | None = None,
    ):
        self.posterior, self.optimizer, self.generator, self.estimator = posterior, optimizer, generator, estimator
        if clip is not None:
            check_positive(clip, "clip")
        self.clip = inf if clip is None else clip
        self.ranks = Ranks() if ranks is None else ranks
        self.named: dict[str, Tensor] = dict(posterior.named_parameters())
        #: S of the last step; before the first, of a pair to a group
        self.draws = 2 * estimator.groups
        # on a GPU torch's fused optimizers scale the gradient, and leave a step out, by numbers on the device
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        self.moves_on_device = fused and generator.device.type == "cuda" and self.ranks.size == 1
        #: why the step is not captured; None where it is, or will be
        self.reason = self._reason_against(capture)
        #: whether the network draws random numbers; found out at the first batch, by all ranks together
        self.random: bool | None = True if posterior.dropout == "on" else None
        self.factor = LossFactor(generator.device)
        self._net, self._modes = (
            posterior.net,
            partial(is_in_training, dropout=posterior.dropout, batch_norm=posterior.batch_norm),
        )
        self._graphs: dict[Hashable, CapturedStep] = {}
        check_spaces(posterior.family, posterior.model)
        if generator.device.type == "cpu":
            torch.empty(KEPT_BYTES, dtype=torch.uint8)

    @property
    def captured(self) -> bool:
        return bool(self._graphs)

    def __call__(
        self, batches: Sequence[Any], weights: Sequence[float] = (1.0,), whole: float = 1.0, kl_weight: float = 1.0
    ) -> Outcome:
        """Make one step over these batches.

        With B_i observations in batch i and R̄ in a step on average, batches have the weights B_i/R̄. They weigh log
        likelihood and KL alike, since the log likelihood is scaled by N/B_i already. All observations then count the
        same, whatever the sizes of batches and steps.

        Args:
            batches: one, or several whose gradients are accumulated.
            weights: of each; of several ranks, of this rank's part of it.
            whole: the sum of all weights, over ranks.
            kl_weight: λ in E log lik − λ KL[q‖prior].
        """
        stream = self.generator.get_state()
        if self.random is None:
            self.random = any(self.ranks.tell(self._may_draw(batches[0])))
        try:
            with self._borrowed():
                graph = self._graph(batches, kl_weight)
                if graph is None:
                    sums, norm = self.gradients(batches, weights, kl_weight, self.generator)
                    if self.moves_on_device:
                        self.move(sums, norm)
                else:
                    sums, norm = graph(batches[0], weights[0], kl_weight)
                *values, size = torch.cat([sums, norm.reshape(1)]).tolist()  # the one time the host waits
        except torch.OutOfMemoryError as error:
            self.generator.set_state(stream)
            error.add_note(self._sizes(batches))
            raise
        if not isfinite(sum(values)) or not isfinite(size):
            self.generator.set_state(stream)
            with self._borrowed():
                raise self._explained(batches, kl_weight, not isfinite(sum(values)))
        if not self.moves_on_device:
            self._clip_and_move(size)
        if self.in_float16:
            self.factor.count()
        return Outcome(torch.tensor(values, dtype=torch.float64) / whole, size)

    @property
    def in_float16(self) -> bool:
        return self.posterior.model.precision == torch.float16

    def _may_draw(self, batch: Any) -> bool:
        """Return whether the network draws random numbers on a batch; True if it cannot be called there."""
        try:
            return draws_random_numbers(self.posterior, batch)
        except FAILURES:
            return True

    def _borrowed(self) -> AbstractContextManager[None]:
        """Hold the global streams if the network draws random numbers from them."""
        return borrowed_stream(self.generator, self.ranks.rank) if self.random else nullcontext()

    def gradients(
        self, batches: Sequence[Any], weights: Sequence[Any], kl_weight: Any, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Write gradients of −(E log lik − λ KL)/N.

        Return the ELBO of each group times the sum of the weights, [groups], and the gradient's norm, in float64.
        """
        posterior, model, ranks, total = self.posterior, self.posterior.model, self.ranks, None
        alone, factor = ranks.size == 1, self.factor.tensor if self.in_float16 else None
        for parameter in self.named.values():
            parameter.grad = None
        for batch, weight in zip(batches, weights, strict=True):
            with nullcontext() if alone else ranks.together():
                with unread(), in_modes(self._net, self._modes):
                    density = posterior.family()
                    draws, log_q = scored_draws(density, self.estimator, generator)
                    self.draws = draws.weight.shape[0]
                    terms = terms_at(density, draws, log_q, model, batch, self.estimator)
                loss = (terms.objective(kl_weight) * (weight * (-1.0 / model.num_data))).mean()
                if not alone and not bool(torch.isfinite(loss)):
                    raise NonFiniteError("the loss is not finite")
            (loss if factor is None else factor * loss).backward()
            values = weight * (terms.fit - terms.complexity).detach().double()
            total = values if total is None else total + values
        assert total is not None
        if alone:
            norm = get_total_norm([p.grad for p in self.named.values() if p.grad is not None]).double()
        else:
            total, norm = ranks.reduce(self.named, total), ranks.norm(self.named)
        return total, norm if factor is None else norm / factor

    def move(self, values: Tensor, norm: Tensor, skip: Tensor | None = None) -> None:
        """Make the optimizer's step on the device: clipped, and left out where it is not finite or `skip` is 1."""
        scale = (norm / self.clip).clamp(min=1.0).float() * self._divisor
        bad, optimizer = 1.0 - torch.isfinite(values.sum() + norm).float(), self.optimizer
        optimizer.grad_scale, optimizer.found_inf = scale, bad if skip is None else bad.maximum(skip)  # pyright: ignore
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # pyright: ignore

    @property
    def _divisor(self) -> Tensor | float:
        """The factor that gradients have to be divided by."""
        return self.factor.tensor if self.in_float16 else 1.0

    def _clip_and_move(self, size: float) -> None:
        share = min(1.0, self.clip / size) if size else 1.0
        if share < 1.0 or self.in_float16:
            gradients = [p.grad for p in self.named.values() if p.grad is not None]
            torch._foreach_mul_(gradients, share / self._divisor)  # pyright: ignore[reportPrivateImportUsage]
        self.optimizer.step()

    def _explained(self, batches: Sequence[Any], kl_weight: float, loss: bool) -> Exception:
        """Return an error that names the term that is not finite: the same draws again, with every check."""
        if not loss and self.in_float16 and self.factor.halve():
            return OverflowingError(f"float16 overflowed in the gradient; the loss is now times {self.factor.value:g}")
        if not loss:
            bad = [n for n, p in self.named.items() if p.grad is not None and not bool(p.grad.isfinite().all())]
            return NonFiniteError(f"the loss is finite but its gradient is not, in {', '.join(bad) or 'its norm'}")
        with torch.no_grad():
            for batch in batches:
                try:
                    terms = self.posterior.terms(batch, estimator=self.estimator, generator=self.generator)
                except (NonFiniteError, LinAlgError) as error:
                    return error
                if not bool(torch.isfinite(terms.objective(kl_weight).mean())):
                    break
        return NonFiniteError("the KL (log q or entropy of the posterior) is not finite")

    def _sizes(self, batches: Sequence[Any]) -> str:
        """Return what a step that ran out of memory needs, and what needs less."""
        P, most = self.posterior.space.size, max(map(rows, batches))
        return (
            f"a step does not fit into memory, with P = {P} weights, {self.draws} draws and batches of {most}. Less "
            "memory is needed with smaller batches (accumulate= keeps the step), fewer draws, a lower rank, "
            "variationalize(.., checkpoint_activations=True) or compute=vi.Compute(precision=torch.bfloat16)"
        )

    # ----------------------------------------------------------------------------------------------------- capture

    def _reason_against(self, capture: bool) -> str | None:
        if not capture:
            return "as asked"
        if self.generator.device.type != "cuda":
            return "not on a CUDA device"
        if self.ranks.size > 1:
            return "the work is shared with other ranks"
        if not self.moves_on_device or not all(group.get("capturable") for group in self.optimizer.param_groups):
            return f"the optimizer {type(self.optimizer).__name__} is not fused and capturable"
        return None

    def _graph(self, batches: Sequence[Any], kl_weight: float) -> CapturedStep | None:
        if self.reason is not None or len(batches) > 1:
            return None
        leaves, form = pytree.tree_flatten(batches[0])
        model = self.posterior.model
        key = (
            str(form), tuple((x.shape, x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves),
            tuple(p.requires_grad for p in self.named.values()), tuple(m.training for m in model.net.modules()),
            model.precision,
        )  # fmt: skip
        if key not in self._graphs:
            if len(self._graphs) == GRAPHS:
                return None
            try:
                self._graphs[key] = CapturedStep(self, batches[0], kl_weight)
            except (RuntimeError, NotImplementedError) as error:  # a capture that fails has no class of its own
                torch.cuda.synchronize()
                self.reason = f"the step cannot be captured: {str(error).strip().splitlines()[0][:200]}"
            if self.reason is not None:
                self._graphs.clear()
                torch.cuda.empty_cache()  # what a capture has taken is needed
                return None
        return self._graphs[key]


class Stepper(Step):
    """`loss = step(batch)` moves the posterior by one step of the optimizer: what `Posterior.stepper` returns.

    Attributes:
        optimizer: its learning rates are read at every step, by a captured one too.
        generator: of draws and dropout, on the posterior's device.
        captured: True if the last steps were CUDA graphs; if not, `reason` says why.
        observations: in a step, on average; None: every step counts the same.
        steps: how many have been made.
        elbo: of the last step, in nats for the whole data set, at λ = 1; None before the first.
        gradient_norm: of the last step, of −elbo/N, before it was clipped.
    """

    observations: float | None = None
    compute = Compute()
    steps, gradient_norm, elbo = 0, nan, None

    def __call__(self, *batches: Any, kl_weight: float = 1.0) -> float:  # pyright: ignore
        """Make one step; return −elbo/N, in nats per observation, at λ = 1 and before the step.

        Args:
            batches: one; or several, whose gradients are accumulated and which share the step. Each observation counts
                the same, whatever the sizes of the batches.
            kl_weight: λ in E log lik − λ KL[q‖prior], for a warm-up of your own; the returned loss is at λ = 1.

        Raises:
            NonFiniteError: loss or gradient are not finite. Nothing has changed: leave the batch out, or stop.
            torch.OutOfMemoryError: with what would fit; nothing has changed.
        """
        if not batches:
            raise ValueError("step(batch) takes a batch, or several that share the step; got none")
        check_positive(kl_weight, "kl_weight")
        posterior, device = self.posterior, self.posterior.device
        if device != self.generator.device:
            raise ValueError(f"the posterior has moved to {device}: call bayes.stepper(..) after bayes.to(device)")
        moved = [on_device(batch, device) for batch in batches]
        counts = [rows(batch) for batch in moved]
        mean = self.observations or float(sum(counts))
        with self.compute.applied(posterior), Interrupts():
            try:
                values, norm = super().__call__(moved, [one / mean for one in counts], sum(counts) / mean, kl_weight)
            except OverflowingError:  # left out, as by torch's GradScaler; its scale has been halved
                return nan
        posterior.calibration = None  # it was that of the posterior before
        posterior.fit_status = Status.STOPPED
        self.steps, self.elbo, self.gradient_norm = self.steps + 1, Estimate.of(values), norm
        return -self.elbo.value / posterior.model.num_data

    def __repr__(self) -> str:
        how = "captured" if self.captured else f"not captured: {self.reason}" if self.reason else "not captured yet"
        return f"Stepper({type(self.optimizer).__name__}, {self.steps} steps, {how})"


def stepper(
    posterior: "Posterior",
    *,
    optimizer: OptimizerLike | None = None,
    lr: float | None = None,
    observations: float | None = None,
    clip: float | None = 10.0,
    estimator: Estimator = Estimator(),
    compute: Compute = Compute(),
    seed: int = 0,
) -> Stepper:
    """Return the step of `fit` for a loop of your own: `step = bayes.stepper()`, then `loss = step(batch)`.

    A step draws weights, runs the network, clips the gradient of −elbo/N and moves `posterior.parameters()`. On a GPU,
    with the default optimizer, it is one captured CUDA graph for each shape of batch. It is the step of `fit`, bit for
    bit; your loop does the rest: learning rate, λ, stages, averages, checkpoints.

    Args:
        posterior: N must be known: `variationalize(.., num_data=N)`. Move it to its device first.
        optimizer: a torch optimizer over `posterior.parameters()`, or a function from parameters to one; without weight
            decay. By default Adam.
        lr: of the default optimizer; 0.02 if not given. A scheduler of yours over `step.optimizer` changes it.
        observations: in a step, on average over an epoch: a step with fewer then counts for less, as in `fit`, so that
            all observations count the same. None: every step counts the same, whatever its size.
        clip, estimator, compute, seed: as in `fit`.

    Example:
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> bayes = variationalize(torch.nn.Linear(3, 1), likelihoods.Gaussian(noise=1.0), MeanField(), num_data=8)
        >>> step = bayes.stepper(lr=0.01)
        >>> losses = [step((torch.ones(8, 3), torch.ones(8, 1))) for _ in range(100)]
        >>> losses[-1] < losses[0]
        True
        >>> step
        Stepper(Adam, 100 steps, not captured: not on a CUDA device)
    """
    check_seed(seed)
    if observations is not None:
        check_positive(observations, "observations")
    check_integer("num_data", posterior.model.num_data)  # which says what to do where it is not known
    generator = torch.Generator(posterior.device).manual_seed(seed)
    step = Stepper(posterior, make_optimizer(posterior, optimizer, lr), generator, estimator, clip, compute.capture)
    step.observations, step.compute = observations, compute
    return step
