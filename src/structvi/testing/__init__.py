"""The laws that every family obeys, for ours and for users' own: `check_family`."""

import torch

from ..families.family import Family
from ..parameters import Parameters
from .laws import LAWS
from .truth import Case, Make, NotApplicable, dense_moments

__all__ = ["LAWS", "Make", "NotApplicable", "check_family", "dense_moments"]


def check_family(
    family: Family | Make,
    *,
    seed: int = 0,
    laws: list[str] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> dict[str, str]:
    """Hold a family to the laws; raise `AssertionError` naming the first one that it breaks.

    Args:
        family: a recipe (it will be bound to small spaces), or a function from `Parameters` to a bound family, for
            recipes whose configuration depends on P.
        seed: of everything random in the check.
        laws: their names, all of `LAWS` by default.
        device: where it is held to them.
        dtype: `torch.float64`, where equalities hold to 1e-9 and better, or `torch.float32`, to 1e-4.

    Returns:
        law → "held", or "not applicable" with the reason.

    Example:
        >>> from structvi import MeanField
        >>> check_family(MeanField(), laws=["draws", "normal"])
        {'draws': 'held', 'normal': 'held'}
    """
    case = Case(_maker(family, seed), seed, torch.device(device), dtype)
    verdicts = {}
    for name in laws or LAWS:
        try:
            LAWS[name](case)
            verdicts[name] = "held"
        except NotApplicable as reason:
            verdicts[name] = f"not applicable: {reason}"
        except AssertionError as error:
            raise AssertionError(f"law {name!r}: {error}") from error
    return verdicts


def _maker(family: Family | Make, seed: int) -> Make:
    """A function to a bound family whose parameters have been moved off their symmetric starting values."""
    if not callable(family):
        raise TypeError(f"check_family expects a recipe or a function of Parameters, got {type(family).__name__}")

    def make(space: Parameters) -> Family:
        generator = torch.Generator(space.device)
        generator.manual_seed(seed)
        bound = family.bind(space, generator) if isinstance(family, Family) else family(space)
        generator.manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in bound.parameters():
                noise = torch.randn(parameter.shape, generator=generator, device=generator.device)
                parameter.add_(0.3 * noise.to(parameter))
        return bound

    return make
