"""Other ways to predict by a posterior that `benchmarks.from_scratch` has fitted.

- *128 draws*: four times as many.
- *linearised*: the network linearised around the posterior's mean, `predict(.., linearise=True)`.
- *widened*: draws m + c(θ − m), with the c of the least NLL of the validation images.
- *widest*: the largest such c that is as good there once each has a temperature of its own: within 0.005 nats of the
  best and half a standard error of the difference, as `fit(.., keep="widest")` chooses.
- *mixed*: the equal mixture over the widths 0.5, 1, 1.4, 2, 2.8, 4 up to one that is chosen so.
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
WIDTHS = (0.7, 1.0, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0)
MARGIN = 0.005
#: widths that are mixed, from the first up to one of them, and draws of all
LADDER, MIXED = (0.5, 1.0, 1.4, 2.0, 2.8, 4.0), 64


def variants(
    bayes: vi.Posterior, draws: int, seed: int, x: Tensor, labels: Tensor, everything: bool = True
) -> tuple[dict[str, Predictor], dict[str, float]]:
    """The predictors by name, and the widths that were chosen.

    Args:
        bayes: fitted.
        draws: of each but the first.
        seed: of the draws.
        x, labels: of validation.
        everything: or else the last two, of which only the width is another.
    """
    predictors = {width: widened(bayes, draws, seed, width) for width in WIDTHS}
    found = {width: log_probabilities(own, x, 500, bayes.device) for width, own in predictors.items()}
    best = min(WIDTHS, key=lambda width: float(cases(found[width], labels).mean()))
    widest = widest_as_good({width: tempered(log_p, labels) for width, log_p in found.items()})
    ways = {"widened": predictors[best], "widest": predictors[widest]}
    ladders = {LADDER[n - 1]: widened(bayes, MIXED, seed, *LADDER[:n]) for n in range(2, len(LADDER) + 1)}
    found = {top: tempered(log_probabilities(own, x, 500, bayes.device), labels) for top, own in ladders.items()}
    mixed = widest_as_good(found)
    ways["mixed"] = ladders[mixed]
    if everything:
        ways |= {f"{MORE} draws": widened(bayes, MORE, seed, 1.0), "linearised": linearised(bayes, draws, seed)}
    return ways, {"widened": best, "widest": widest, "mixed": mixed}


def tempered(log_p: Tensor, labels: Tensor) -> Tensor:
    """−log p of every case at the best temperature: [N]."""
    grid = torch.logspace(-0.5, 0.5, 101, dtype=torch.float64).tolist()
    return min((cases((log_p / T).log_softmax(1), labels) for T in grid), key=lambda own: float(own.mean()))


def widest_as_good(found: dict[float, Tensor]) -> float:
    """The largest width whose cases [N] are as good as those of the best."""
    leader = min(found.values(), key=lambda own: float(own.mean()))
    good = []
    for width, own in found.items():
        gap = own - leader
        if float(gap.mean()) <= min(MARGIN, 0.5 * float(gap.std()) / math.sqrt(len(gap))):
            good.append(width)
    return max(good)


def linearised(bayes: vi.Posterior, draws: int, seed: int) -> Predictor:
    def predict(x: Tensor) -> Tensor:
        found = bayes.predict(x, draws=draws, generator=torch.Generator().manual_seed(seed), linearise=True)
        return found.mean.clamp_min(1e-30).log()

    return predict


def widened(bayes: vi.Posterior, draws: int, seed: int, *widths: float) -> Predictor:
    """log of the mean over draws m + c(θ − m) of the probabilities, each width c in turn."""
    density = bayes.family()
    with torch.no_grad():
        theta = density.draw(draws, vi.naive, torch.Generator(bayes.device).manual_seed(seed)).theta
        every = torch.tensor(widths, device=theta.device, dtype=theta.dtype).repeat(draws // len(widths) + 1)[:draws]
        theta = density.mean + every.unsqueeze(-1) * (theta - density.mean)
    named: Sequence[dict[str, Any]] = [bayes.space.unravel(row) for row in theta]

    def predict(x: Tensor) -> Tensor:
        with torch.no_grad():
            outputs = torch.stack([functional_call(bayes.net, one, (x,)).log_softmax(1) for one in named])
        return outputs.double().logsumexp(0) - math.log(draws)

    return predict
