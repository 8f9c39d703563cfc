"""The step that `fit` makes, for a loop of the user's own: `step = bayes.stepper()`, `loss = step(batch)`."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import nan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ..models.batch import rows
from ..networks.mixed_precision import check_precision
from ..objective import Estimate, Estimator
from ..util.checks import check_integer, check_positive, check_seed
from ..util.interrupts import uninterrupted
from ..util.random_streams import borrowed_stream
from .optimizers import OptimizerLike, make_optimizer
from .options import Compute
from .step import OverflowingError, Step

if TYPE_CHECKING:
    from ..posterior import Posterior


class Stepper:
    """`loss = step(batch)` moves the posterior by one step of the optimizer: what `Posterior.stepper` returns.

    Attributes:
        optimizer: its learning rates are read at every step, by a captured one too.
        generator: of draws and dropout, on the posterior's device; its state is all that is random in what follows.
        steps: how many have been made.
        elbo: of the last step, in nats for the whole data set, always at λ = 1; None before the first.
        gradient_norm: of the last step, of −elbo/N, before it was clipped.
    """

    def __init__(
        self,
        posterior: "Posterior",
        optimizer: torch.optim.Optimizer,
        make_step: Step,
        observations: float | None,
        precision: torch.dtype | None,
        compiled: Any,
    ):
        self.posterior, self.optimizer, self.generator = posterior, optimizer, make_step.generator
        self.observations, self.precision = observations, precision
        self.steps, self.gradient_norm = 0, nan
        self._values: Tensor | None = None
        self._parameter = next(posterior.parameters())
        self._step, self._compiled = make_step, compiled

    @property
    def elbo(self) -> Estimate | None:
        """Of the last step, in nats for the whole data set, at λ = 1; None before the first."""
        return None if self._values is None else Estimate.of(self._values)

    @property
    def captured(self) -> bool:
        """Whether the last steps were CUDA graphs; where they are not, `reason` says why."""
        return self._step.captured

    @property
    def reason(self) -> str | None:
        """Why steps are not captured; None where they are, or will be."""
        return self._step.reason

    def __call__(self, *batches: Any, kl_weight: float = 1.0) -> float:
        """One step of the optimizer; returns −elbo/N, in nats per observation, at λ = 1 and before the step.

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
        posterior, device = self.posterior, self._parameter.device
        if device != self.generator.device:
            raise ValueError(
                f"the posterior is on {device} and was on {self.generator.device} when the stepper was made: "
                "call bayes.stepper(..) after bayes.to(device)"
            )
        moved = [_on_device(batch, device) for batch in batches]
        counts = [rows(batch) for batch in moved]
        mean = self.observations or float(sum(counts))
        as_it_is = self.precision is None and self._compiled is None
        with borrowed_stream(self.generator), nullcontext() if as_it_is else self._network(), uninterrupted():
            try:
                values, norm = self._step(moved, [one / mean for one in counts], kl_weight, sum(counts) / mean)
            except OverflowingError:  # left out, as by torch's GradScaler; its scale has been halved
                return nan
        if posterior.calibration is not None:  # it was one of the posterior before
            posterior.calibration = None
        self.steps, self._values, self.gradient_norm = self.steps + 1, values, norm
        return -sum(each := values.tolist()) / len(each) / posterior.model.num_data

    @contextmanager
    def _network(self) -> Iterator[None]:
        """Inside, the network runs in the precision, and compiled, as asked."""
        model = self.posterior.model
        before, model.precision = model.precision, self.precision or model.precision
        model.compiled = self._compiled
        try:
            yield
        finally:
            model.precision, model.compiled = before, None

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
    compute: Compute | None = None,
    seed: int = 0,
) -> Stepper:
    """The step that `fit` makes, for a loop of your own: `step = bayes.stepper()`, then `loss = step(batch)`.

    A step draws weights, runs the network, clips the gradient of −elbo/N and moves `posterior.parameters()`. On a GPU,
    with the default optimizer, all of it is one captured CUDA graph for each shape of batch; on a CPU it is eager. In
    both cases it is the step of `fit`, bit for bit, and what `fit` does around it is the loop's: the learning rate, λ,
    stages, averages, checkpoints, the comparison at the end.

    Args:
        posterior: N must be known: `variationalize(.., num_data=N)`. Move it to its device first.
        optimizer: a torch optimizer over `posterior.parameters()`, or a function from parameters to one; without weight
            decay. By default Adam, the only one that can be captured.
        lr: of the default optimizer; 0.02 if not given. It stays as it is unless a scheduler of yours over
            `step.optimizer` changes it.
        observations: in a step, on average over an epoch: a step with fewer then counts for less, as in `fit`, so that
            all observations count the same. None: every step counts the same, whatever its size.
        clip, estimator, compute, seed: as in `fit`; a stepper knows no other ranks.

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
    compute = compute or Compute()
    check_precision(compute.precision, posterior.net, posterior.space.dtype, posterior.device)
    if observations is not None:
        check_positive(observations, "observations")
    if clip is not None:
        check_positive(clip, "clip")
    if compute.compile and posterior.model.linearised_at is not None:
        raise ValueError("compile=True is for the network itself: a linearised one needs its derivatives; leave it out")
    check_integer("num_data", posterior.model.num_data)  # which says what to do where it is not known
    made = make_optimizer(posterior, optimizer, lr)
    make_step = Step(
        posterior, made, torch.Generator(posterior.device).manual_seed(seed), estimator=estimator, clip=clip,
        capture=compute.capture,
    )  # fmt: skip
    compiled = torch.compile(functional_call) if compute.compile else None
    return Stepper(posterior, made, make_step, observations, compute.precision, compiled)


def _on_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, tuple) and all(isinstance(x, Tensor) and x.device == device for x in batch):
        return batch
    return pytree.tree_map(lambda x: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x, batch)
