"""Gaussian noise: known, learned, random, or from a head of the network."""

from collections.abc import Mapping
from math import log, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, LogNormal, Normal

from ...util.checks import check_positive, is_positive
from .base import NO_VALUES, Likelihood, check_same_shape

#: the largest |log σ| of a head: e^±20 squared is far from the ends of float32, and no noise of a measurement
BOUND = 20.0


class NoiseLikelihood(Likelihood):
    """t = y + σ·(standard noise), independently for every element, with σ in one of several ways.

    Args:
        noise: a number, or one of `words`: "point", "random" or "head".
        words: those that the likelihood has.
        initial: where σ starts for "point" and "random".
        bound: the largest |log σ| of a head.
    """

    log_noise: Tensor

    def __init__(self, noise: float | str, words: tuple[str, ...], initial: float, bound: float):
        super().__init__()
        if noise not in words and not is_positive(noise):
            expected = ", ".join(f'"{word}"' for word in words[:-1]) + f' or "{words[-1]}"'
            raise ValueError(f"noise must be a positive number, {expected}, got {noise!r}")
        check_positive(initial, "initial, where a learned noise starts,")
        check_positive(bound, 'bound, the largest |log σ| of noise="head",')
        self.noise: float | str = noise if isinstance(noise, str) else float(noise)
        self.initial, self.bound = float(initial), float(bound)
        if noise == "point":
            self.log_noise = nn.Parameter(torch.tensor(log(initial)))
        elif noise == "random":
            self.register_buffer("log_noise", torch.tensor(log(initial)), persistent=False)

    def mean_and_log_noise(self, output: Any, channel: int) -> tuple[Tensor, Tensor]:
        """Return the mean, and log σ as far as it does not depend on the draw."""
        if isinstance(self.noise, float):
            return output, torch.tensor(log(self.noise), dtype=torch.float64)  # 0-dim: takes part as a number
        if self.noise != "head":
            return output, self.log_noise
        if isinstance(output, Mapping):
            mean, log_noise = output["mean"], output["log_scale"]
        elif not isinstance(output, Tensor):
            mean, log_noise = output
        elif output.ndim > channel and output.shape[channel] % 2 == 0:
            mean, log_noise = output.chunk(2, dim=channel)
        else:
            raise ValueError(
                f'{type(self).__name__}("head"): the output must have an even number of channels on the axis after the '
                f"batch, first the means and then the log scales, got {tuple(output.shape)}"
            )
        return mean, log_noise.clamp(-self.bound, self.bound)

    def residual(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return (t − y)/σ and log σ at one draw; check the target."""
        mean, log_noise = self.mean_and_log_noise(output, 1)
        check_same_shape(type(self).__name__, mean, target)
        return (target - mean) * (-log_noise).exp(), log_noise


class Gaussian(NoiseLikelihood):
    """t ~ N(y, σ²), independently for every element of the output.

    Args:
        noise: the standard deviation σ:

            a number   known, > 0;
            "point"    one learned number, the parameter `log_noise`, optimised with the variational parameters;
            "random"   one random number with a prior: log σ is appended to θ as "likelihood.log_noise";
            "head"     one per element, from the network: y is (mean, log σ), each of the target's shape, as a pair,
                       as a dict with the keys "mean" and "log_scale", or as the two halves along dim 1 of an
                       output [B, 2C, ..], the mean first, for a target [B, C, ..]. log σ is held inside ±`bound`.

        initial: where σ starts for "point" and "random".
        noise_prior: for "random" a distribution of one positive number, the *variance* σ². θ holds log σ, whose
            density is p(log σ) = p_{σ²}(σ²)·2σ². By default σ² ~ LogNormal(2 log initial, 2²), which is
            log σ ~ N(log initial, 1); InverseGamma(a, b) is the conjugate choice, informative for σ² ≪ b.
        bound: for "head" the largest |log σ|: one weight that is drawn far off else makes a likelihood of e^100 of it.
            For targets of unit scale 7 is sharp enough for noise of a thousandth, and fits stay calm at high learning
            rates.

    Example:
        >>> Gaussian(noise=0.25)(torch.zeros(5, 1), torch.zeros(5, 1)).shape
        torch.Size([5, 1])
        >>> Gaussian("head")(torch.zeros(5, 2), torch.zeros(5, 1)).shape
        torch.Size([5, 1])
        >>> Gaussian("random", noise_prior=torch.distributions.InverseGamma(2.0, 1.0)).random_tensors()
        {'log_noise': tensor(0.)}
    """

    def __init__(
        self,
        noise: float | str,
        initial: float = 1.0,
        noise_prior: Distribution | None = None,
        bound: float = BOUND,
    ):
        super().__init__(noise, ("point", "random", "head"), initial, bound)
        if noise_prior is not None:
            if noise != "random":
                raise ValueError(f'noise_prior needs noise="random"; with noise={noise!r} nothing has a prior')
            inside = noise_prior.support.check(torch.tensor([-1.0, 1e-6, 1e6]))  # pyright: ignore[reportOptionalMemberAccess]
            if noise_prior.batch_shape + noise_prior.event_shape or inside.tolist() != [False, True, True]:
                raise ValueError(
                    f"noise_prior is of one number, the variance σ², and needs all positive numbers as its support, "
                    f"got {noise_prior}; take InverseGamma, LogNormal or Gamma, for example"
                )
        self.noise_prior = noise_prior

    def log_prob(self, output: Any, target: Tensor) -> Tensor:
        z, log_noise = self.residual(output, target)
        return -0.5 * z.square() - log_noise - 0.5 * log(2 * pi)

    def distribution(self, output: Any, values: Mapping[str, Tensor] = NO_VALUES) -> Distribution:
        mean, log_noise = self.mean_and_log_noise(output, 2)
        if self.noise == "random":
            log_noise = values["log_noise"].reshape(-1, *[1] * (mean.ndim - 1))
        return Normal(mean, log_noise.to(mean).exp(), validate_args=False)

    def random_tensors(self) -> dict[str, Tensor]:
        return {"log_noise": self.log_noise} if self.noise == "random" else {}

    def log_prior(self, values: Mapping[str, Tensor]) -> Tensor:
        log_noise = values["log_noise"]
        prior = self.noise_prior or LogNormal(2 * log(self.initial), 2.0)
        return prior.log_prob((2 * log_noise).exp()) + log(2) + 2 * log_noise  # + log |dσ² / dlog σ|

    def sums(self, target: Tensor, mask: Tensor | None) -> Tensor:
        """Return the count of t and the sums of t and t², [3, columns]."""
        t = target.detach().double()
        observed = torch.ones_like(t) if mask is None else mask.double()
        t = t.masked_fill(observed == 0, 0.0)
        if t.ndim != 2:
            t, observed = t.reshape(-1, 1), observed.reshape(-1, 1)
        return torch.stack([observed.sum(0), t.sum(0), t.square().sum(0)])

    def best_constant(self, sums: Tensor) -> float:
        count, total, square = sums
        n = count.clamp(min=1.0)
        residual = (square - total.square() / n).clamp(min=0.0)  # [columns]
        if isinstance(self.noise, float):
            variance = torch.full_like(residual, self.noise**2)
        else:
            variance = residual / n if self.noise == "head" else (residual.sum() / n.sum()).expand_as(residual)
        variance = variance.clamp(min=torch.finfo(torch.float64).tiny)
        return float((-0.5 * residual / variance - 0.5 * count * (variance.log() + log(2 * pi))).sum())
