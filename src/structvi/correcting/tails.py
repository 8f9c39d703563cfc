"""Draws with longer tails than a Gaussian's, as a proposal of importance sampling."""

from collections.abc import Iterator
from math import lgamma, log, pi

import torch
from torch import Tensor

from ..families.density import Draws

#: Degrees of freedom.
NU = 5


class Tails:
    """Draws μ + L t, LLᵀ = Σ, with t of independent Student-t's with `NU` degrees of freedom.

    A Gaussian hardly draws where a posterior has longer tails, and weights of what is not drawn correct nothing. In an
    even mixture of R such proposals and q no weight is more than R + 1 times what it is for q alone.

    Args:
        mean, covariance: μ [P] and Σ [P, P].
        sizes: of the chunks in which the draws come, the same at every pass.
        generator: of their seeds.

    Example:
        >>> tails = Tails(torch.zeros(2), torch.eye(2), [3], torch.Generator().manual_seed(0))
        >>> [tails.log_prob(draws.theta).shape for draws in tails]
        [torch.Size([3])]
    """

    def __init__(self, mean: Tensor, covariance: Tensor, sizes: list[int], generator: torch.Generator):
        self.mean, self.sizes = mean.detach(), sizes
        covariance = covariance.detach().double()
        root, failed = torch.linalg.cholesky_ex(covariance)
        if failed.item():  # lost to rounding: any root makes a proposal
            root = covariance.diagonal().clamp_min(torch.finfo(torch.float64).tiny).sqrt().diag()
        self.root: Tensor = root
        count = (len(sizes),)
        self.seeds: list[int] = torch.randint(2**62, count, generator=generator, device=generator.device).tolist()

    def __iter__(self) -> Iterator[Draws]:
        like = {"dtype": torch.float64, "device": self.mean.device}
        for size, seed in zip(self.sizes, self.seeds, strict=True):
            generator = torch.Generator(self.mean.device).manual_seed(seed)
            noise = torch.randn(1 + NU, size, len(self.mean), generator=generator, **like)
            t = noise[0] * noise[1:].square().mean(0).rsqrt()
            theta = self.mean + (t @ self.root.mT).to(self.mean.dtype)
            yield Draws(theta, theta.new_full((size,), 1 / size))

    def log_prob(self, theta: Tensor) -> Tensor:
        """[S, P] → [S], in float64."""
        x = (theta - self.mean).double()
        t = torch.linalg.solve_triangular(self.root, x.mT, upper=False)  # [P, S]
        constant = lgamma((NU + 1) / 2) - lgamma(NU / 2) - 0.5 * log(NU * pi)
        each = constant - 0.5 * (NU + 1) * torch.log1p(t.square() / NU)
        return each.sum(0) - self.root.diagonal().log().sum()
