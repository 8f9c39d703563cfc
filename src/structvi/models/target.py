"""Targets of the approximation: any `Target` has a space and the log joint at S points of it. `LogDensity` is one."""

from collections.abc import Callable, Mapping
from inspect import isfunction
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ..networks.vmap_or_loop import Evaluation, Mode
from ..parameters import Parameters
from ..util.checks import check_theta
from ..util.patterns import few

NOTHING: Mapping[str, Tensor] = MappingProxyType({})


@runtime_checkable
class Target(Protocol):
    """An unnormalised log posterior over `space`."""

    space: Parameters

    def log_joint(self, theta: Tensor, batch: Any = None) -> Tensor:
        """log p(data, θ), or an unbiased estimate of it from a batch: [S, P] → [S].

        `BayesianModel` and `LogDensity` also take `fixed`, from families with point-estimated blocks: named tensors
        that are the same in every draw and are missing from `theta`. For other targets they are joined to `theta`.
        """
        ...


class LogDensity:
    """Any log density, not necessarily normalised.

    If parameters are constrained (`positive` and its like), then `fn` is the log density of the values themselves.
    `log_joint` is the log density of the free numbers θ: it adds log |det ∂ values/∂θ|.

    Args:
        fn: sees one draw as a dict of named tensors (and the batch, where `log_joint` is given one) and returns a
            scalar; it is batched over draws for you. Constrained parameters are their values.
        parameters: the space.
        evaluation: "auto", "vmap" or "loop" over draws.
        chunk: how many draws vmap takes at once.

    Example:
        >>> import torch
        >>> space = Parameters({"z": torch.zeros(2)})
        >>> LogDensity(lambda p: -0.5 * p["z"].square().sum(), space).log_joint(torch.ones(3, 2))
        tensor([-1., -1., -1.])
        >>> from structvi.constraints import positive
        >>> target = LogDensity(lambda p: -p["sigma"], Parameters({"sigma": positive(1.0)}))  # σ ~ Exponential(1)
        >>> target.log_joint(torch.zeros(1, 1, dtype=torch.float64))  # of log σ: −σ + log σ
        tensor([-1.], dtype=torch.float64)
    """

    def __init__(
        self,
        fn: Callable[[dict[str, Tensor]], Tensor] | Callable[[dict[str, Tensor], Any], Tensor],
        parameters: Parameters,
        *,
        evaluation: Mode = "auto",
        chunk: int | None = None,
    ):
        if not callable(fn):
            raise TypeError(f"LogDensity expects a function of a dict of named tensors, got {type(fn).__name__}")
        if not isinstance(parameters, Parameters):
            raise TypeError(f'expected Parameters({{"mu": torch.zeros(())}}), got {type(parameters).__name__}')
        self.fn: Callable[..., Tensor] = fn
        self.space = parameters
        self.evaluation = Evaluation(evaluation, chunk)

    def __repr__(self) -> str:
        own = self.fn.__name__ if isfunction(self.fn) else type(self.fn).__name__
        return f"LogDensity({own} of {few(self.space.names)}; P = {self.space.size})"

    def log_joint(self, theta: Tensor, batch: Any = None, fixed: Mapping[str, Tensor] = NOTHING) -> Tensor:
        check_theta(theta, self.space.without(fixed).size)

        def one(row: Tensor) -> Tensor:
            whole = self.space.join(row.unsqueeze(0), fixed).squeeze(0)
            arguments = (self.space.constrain(whole),) if batch is None else (self.space.constrain(whole), batch)
            value = _scalar(self.fn(*arguments))
            return value + self.space.log_jacobian(whole) if self.space.constraints else value

        try:
            return self.evaluation(one, theta, batch=batch)
        except (KeyError, ValueError) as error:
            error.add_note(
                f"the log density was given a dict of the parameters {few(self.space.names)}. A draw takes every value "
                'unless its parameter is constrained: Parameters({"sigma": positive(1.0), ..})'
            )
            raise


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.dtype.is_floating_point:
        came = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"the log density must return a floating scalar for one draw, got {came}; sum over its elements"
        )
    return value.reshape(())
