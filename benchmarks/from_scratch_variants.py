"""Other ways to predict by a posterior that `benchmarks.from_scratch` has fitted.

- *128 draws*: four times as many.
- *linearised*: the network linearised around the posterior's mean, `predict(.., linearise=True)`.
- *widened*: draws m + c(θ − m), with the c of the least NLL of the validation images.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

import structvi as vi

from .networks_measures import Predictor, cases, log_probabilities

MORE = 128
#: factors of the posterior's spread
WIDTHS = (0.7, 1.0, 1.2, 1.4, 1.7, 2.0, 2.5)


def variants(
    bayes: vi.Posterior, draws: int, seed: int, x: Tensor, labels: Tensor
) -> tuple[dict[str, Predictor], float]:
    """The predictors by name, and the width of the last.

    Args:
        bayes: fitted.
        draws: of each but the first.
        seed: of the draws.
        x, labels: of validation.
    """

    def nll(width: float) -> float:
        log_p = log_probabilities(widened(bayes, draws, seed, width), x, 500, bayes.device)
        return float(cases(log_p, labels).mean())

    best = min(WIDTHS, key=nll)
    found = {
        f"{MORE} draws": widened(bayes, MORE, seed, 1.0),
        "linearised": linearised(bayes, draws, seed),
        "widened": widened(bayes, draws, seed, best),
    }
    return found, best


def linearised(bayes: vi.Posterior, draws: int, seed: int) -> Predictor:
    def predict(x: Tensor) -> Tensor:
        found = bayes.predict(x, draws=draws, generator=torch.Generator().manual_seed(seed), linearise=True)
        return found.mean.clamp_min(1e-30).log()

    return predict


def widened(bayes: vi.Posterior, draws: int, seed: int, width: float) -> Predictor:
    """log of the mean over draws m + c(θ − m) of the probabilities."""
    density = bayes.family()
    with torch.no_grad():
        theta = density.draw(draws, vi.naive, torch.Generator(bayes.device).manual_seed(seed)).theta
        theta = density.mean + width * (theta - density.mean)
    named: Sequence[dict[str, Any]] = [bayes.space.unravel(row) for row in theta]

    def predict(x: Tensor) -> Tensor:
        with torch.no_grad():
            outputs = torch.stack([functional_call(bayes.net, one, (x,)).log_softmax(1) for one in named])
        return outputs.double().logsumexp(0) - math.log(draws)

    return predict
