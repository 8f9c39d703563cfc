"""Draws with longer tails than a Gaussian's, as a proposal of importance sampling."""

from collections.abc import Iterator
from math import exp, lgamma, log, pi

import torch
from torch import Tensor

from ..families.density import Draws, NormalPart

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


class MixedTails:
    """The same around the parts of a mixture: each draw is of one of them, by weight.

    Args:
        parts: weight, mean and covariance of each.
        sizes, generator: as of `Tails`.

    Example:
        >>> parts = [NormalPart(log(0.5), torch.full((1,), x), torch.eye(1)) for x in (-4.0, 4.0)]
        >>> tails = MixedTails(parts, [3], torch.Generator().manual_seed(0))
        >>> [tails.log_prob(draws.theta).shape for draws in tails]
        [torch.Size([3])]
    """

    def __init__(self, parts: list[NormalPart], sizes: list[int], generator: torch.Generator):
        self.parts, self.sizes = parts, sizes
        self.own = [Tails(part.mean, part.covariance, sizes, generator) for part in parts]
        weights = torch.tensor([part.log_weight for part in parts], dtype=torch.float64).softmax(0)
        self.log_weights: Tensor = weights.log().to(parts[0].mean.device)
        count = (len(sizes),)
        self.seeds: list[int] = torch.randint(2**62, count, generator=generator, device=generator.device).tolist()

    def __iter__(self) -> Iterator[Draws]:
        for seed, each in zip(self.seeds, zip(*self.own, strict=True), strict=True):
            theta = torch.stack([draws.theta for draws in each])  # [C, s, P]
            generator = torch.Generator(theta.device).manual_seed(seed)
            chosen = torch.multinomial(self.log_weights.exp(), theta.shape[1], replacement=True, generator=generator)
            yield Draws(theta[chosen, torch.arange(theta.shape[1], device=theta.device)], each[0].weight)

    def each(self, theta: Tensor) -> Tensor:
        """log of weight and density of every part: [S, P] → [C, S], in float64."""
        return self.log_weights.unsqueeze(-1) + torch.stack([tails.log_prob(theta) for tails in self.own])

    def log_prob(self, theta: Tensor) -> Tensor:
        """[S, P] → [S], in float64."""
        return self.each(theta).logsumexp(0)

    def moved(self, theta: Tensor, weights: Tensor, least: float) -> list[NormalPart]:
        """Parts with the moments of the draws that are theirs by weight; as they were where fewer than `least` of those
        are effective, or they have a tenth of its weight: what is far from all parts is some part's too. No part has
        less than a quarter of its weight before, for another round."""
        theirs = self.each(theta).softmax(0) * weights  # [C, S]
        made = []
        for part, log_weight, own in zip(self.parts, self.log_weights.tolist(), theirs, strict=True):
            share = own.sum().item()
            kept = part._replace(log_weight=log(max(share, exp(log_weight) / 4)))
            if share > exp(log_weight) / 10 and share**2 / own.square().sum().item() >= least:
                own = own / share
                mean = (own @ theta.double()).to(theta.dtype)
                x = (theta - mean).double()
                kept = kept._replace(mean=mean, covariance=(x * own.unsqueeze(-1)).mT @ x)
            made.append(kept)
        return made
