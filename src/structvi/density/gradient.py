"""Does the log density have a gradient, and one value for each draw? Asked at the first draws of a fit."""

from typing import Any

from torch import Tensor

from ..models.log_density import LogDensity
from ..models.target import Target

ADVICE = "write it with operations of torch alone, without numpy, float(), .item() and .detach()"


def checked_log_joint(target: Target, theta: Tensor) -> Tensor:
    """log p at θ [S, P], which must follow θ: [S].

    Example:
        >>> import torch
        >>> from structvi import Parameters
        >>> target = LogDensity(lambda p: -p["z"].detach().square().sum(), Parameters({"z": torch.zeros(2)}))
        >>> checked_log_joint(target, torch.zeros(3, 2, requires_grad=True))
        Traceback (most recent call last):
        TypeError: the log density has no gradient: what it returns does not follow θ; write it with operations of ...
    """
    try:
        value: Any = target.log_joint(theta)
    except RuntimeError as error:
        if "numpy()" in str(error):  # torch's words for numpy on what has a gradient
            raise TypeError(f"the log density has no gradient: it calls numpy; {ADVICE}") from error
        if "dtype" in str(error) or "expected scalar type" in str(error):  # the latter is torch 2.6
            raise TypeError(
                f"the log density mixes precisions: {error}; the parameters are {theta.dtype}, give the data in it too"
            ) from error
        raise
    except ValueError as error:
        if isinstance(target, LogDensity):
            value = target.fn(target.space.constrain(theta[0]))
            if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
                raise TypeError(f"the log density has no gradient: it returns {_came(value)}; {ADVICE}") from error
        raise
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
        raise TypeError(f"the log density has no gradient: it returns {_came(value)}; {ADVICE}")
    if value.shape != theta.shape[:1]:
        raise ValueError(
            f"log_joint must return one value for each of {len(theta)} draws, [{len(theta)}], got {list(value.shape)}; "
            "sum over all but the first axis"
        )
    if theta.requires_grad and not value.requires_grad:
        raise TypeError(f"the log density has no gradient: what it returns does not follow θ; {ADVICE}")
    return value


def _came(value: Any) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
