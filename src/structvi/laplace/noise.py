"""The noise of a regression whose network is trained: its residuals on its own data are too small.

Held-out data select a factor of the residuals' root mean square. Factors below that of the training data are not
tried: few held-out rows may have small residuals by chance, and too little noise costs far more than too much.
"""

from collections.abc import Iterable
from math import isfinite, log
from typing import Any

import torch
from torch import Tensor

from ..models.bayesian_model import BayesianModel
from ..models.likelihoods import Gaussian, StudentT, split_mask

#: log factors of the network's own noise, relative to its residuals: steps of 5 %, up to 5e8
NETWORK_GRID = torch.linspace(0.0, 20.0, 401, dtype=torch.float64)
#: log factors of a posterior's noise, relative to the network's: its own spread explains a part of the residuals
BELOW_NETWORK = torch.linspace(-1.2, 0.0, 13, dtype=torch.float64)


def learned_noise(likelihood: Any) -> Tensor | None:
    """Return the log noise that a likelihood learns as a point; None for any other likelihood."""
    is_learned = isinstance(likelihood, Gaussian | StudentT) and likelihood.noise == "point"
    return likelihood.log_noise if is_learned else None


def set_noise(likelihood: Any, log_noise: float) -> None:
    """Set the noise that a likelihood learns; leave any other likelihood as it is."""
    parameter = learned_noise(likelihood)
    if parameter is not None:
        with torch.no_grad():
            parameter.fill_(log_noise)


@torch.no_grad()
def residual_noise(model: BayesianModel, theta: Tensor, batches: Iterable[Any]) -> float:
    """Return the log noise whose errors have the variance of the network's residuals, at least that of rounding."""
    named = model.space.unravel(theta)
    network = {name: tensor for name, tensor in named.items() if name not in model.likelihood_names}
    square, size, count = 0.0, 0.0, 0
    for batch in batches:
        output, target = model.call(network, batch)
        t, mask = split_mask(target)
        residual, y = (t - output, output) if mask is None else ((t - output)[mask], output[mask])
        square, count = square + float(residual.double().square().sum()), count + residual.numel()
        size += float(y.double().square().sum())
    if not isfinite(square):
        raise ValueError(
            f"the residuals of the network on its training data are not finite, their squares add up to {square}: is "
            "there NaN in inputs or targets? Leave these rows out, or mask them"
        )
    rounding = torch.finfo(theta.dtype).eps ** 2 * size
    log_noise = 0.5 * log(max((square + rounding) / max(count, 1), torch.finfo(theta.dtype).tiny))
    if isinstance(model.likelihood, StudentT):  # σ²ν/(ν − 2) is the variance; of one near infinity a tenth
        log_noise += 0.5 * log(max(0.1, 1 - 2 / float(model.likelihood.df_value().detach())))
    return log_noise
