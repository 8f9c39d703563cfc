"""What is measured of one method on one teacher."""

from dataclasses import dataclass
from typing import NamedTuple

HEADINGS = (
    "method",
    "ELBO at λ = 1",
    "above a constant",
    "scales moved",
    "coverage",
    "width",
    "NLL",
    "KL to truth",
    "s",
)
LEGEND = (
    "ELBO at λ = 1: E log p(data, θ) − log q(θ) of what the method calls its posterior, in nats; – where it has no "
    "density. Above a constant: how far above the best prediction that ignores the input. Scales moved: mean |log s − "
    "log s₀|, s₀ where scales started; – where they have no start. Coverage: of the true probabilities in the method's "
    "90 % intervals; width: of these intervals. The networks are drawn from the prior, so that the exact posterior "
    "covers 90 % on average over them. NLL: of test labels, nats; KL to truth: from the true probabilities to the "
    "predicted ones, nats; s: processor seconds to fit"
)


class Sketch(NamedTuple):
    """Of test inputs, ordered by the truth: what the picture shows."""

    truth: list[float]
    low: list[float]
    mean: list[float]
    high: list[float]


@dataclass(frozen=True)
class ScaleRow:
    """One method on one teacher."""

    method: str
    seed: int
    elbo: float | None
    elbo_error: float | None
    moved: float | None
    coverage: float
    width: float
    nll: float
    kl: float
    seconds: float
    sketch: Sketch
