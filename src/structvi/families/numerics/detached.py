"""Draws of a diagonal plus low-rank Gaussian and log q at them, both gradients in closed form.

The reference is `Density.draw` and `log_prob` with automatic differentiation; what is here gives the same numbers from
four passes over the parameters, without a graph through them and with nothing of size P·K but the factor itself.

Both forms are one. With r = s₀/s (covariance form) or s/s₀ (precision form), noise (ε, z), G = r∘F, M = I_K + GᵀG,
p = Gᵀε and u = M⁻¹(z − p),

    covariance  θ = μ + s∘(ε + G z),   ∇ log q = −(ε + G u)/s,   ½ log det Σ = Σ log s + ½ log det M
    precision   θ = μ + s∘(ε + G u),   ∇ log q = −(ε + G z)/s,   ½ log det Σ = Σ log s − ½ log det M

and in both (θ − μ)ᵀΛ(θ − μ) = ε·ε + p·z + (p + GᵀG z)·u.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from math import log, pi
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .algebra import SumSquares, half_log_det, project, square_on_host, sum_weights
from .way_back import back_at_once, back_diagonal, back_scaled, sloped

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_SLAB = 1 << 19  # weights that a pass on the CPU handles at once
_PRODUCTS = 64  # from S·K of these on products of all draws with the factor are one matrix product

#: An all-reduce over the ranks that hold slices of the weights: a vector of sums in, the sums over ranks out.
Reduce = Callable[[Tensor], Tensor]


class LowRankGradient(NamedTuple):
    """The gradient AᵀZ of a factor [P, K], as its two sides: it is never written out."""

    A: Tensor  # [R, P]
    Z: Tensor  # [R, K]
    #: parts of the squares of mean's and log scale's gradients and of |AᵀZ|² in float64, [.., 3], where the pass that
    #: made A has summed them up
    squares: Tensor | None = None
    #: the mean and log scale that it is about
    vectors: tuple[Tensor, ...] = ()

    @classmethod
    def joined(cls, parts: "Sequence[LowRankGradient]") -> "LowRankGradient":
        """The sum of several, side by side."""
        if len(parts) == 1:
            return parts[0]
        return cls(torch.cat([one.A for one in parts]), torch.cat([one.Z for one in parts]))

    @property
    def square(self) -> Tensor | None:
        """|AᵀZ|², where it is known."""
        return None if self.squares is None else self.squares[..., 2].sum()

    @property
    def with_vectors(self) -> Tensor | None:
        """That and the squares of the gradients of mean and log scale together, likewise."""
        return None if self.squares is None else self.squares.sum()

    def dense(self) -> Tensor:
        return (self.Z.mT @ self.A).mT

    def squared_norm(self) -> Tensor:
        """Σ_pk (AᵀZ)² = Σ_rr' (AAᵀ)(ZZᵀ), in float64."""
        if (known := self.square) is not None:
            return known
        if len(self.A) == 1 and self.A.device.type == "cpu":
            return torch.tensor(square_on_host(self.A[0]) * square_on_host(self.Z[0]), dtype=torch.float64)
        if len(self.A) == 1:
            return SumSquares.forward(self.A[0]) * SumSquares.forward(self.Z[0])
        return ((self.A @ self.A.mT).double() * (self.Z @ self.Z.mT).double()).sum()


class State(NamedTuple):
    """What a density is made of."""

    mean: Tensor  # [P]
    log_scale: Tensor  # [P]
    factor: Tensor  # [P, K]
    unit: Tensor  # [P]
    precision: bool  # the form
    #: where the weights are split over ranks
    reduce: Reduce | None = None


def draw(state: State, epsilon: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """θ and log q(θ), with the gradient of log q through θ alone: noise [S, P], [S, K] → [S, P], [S]."""
    return _Drawn.apply(*state, epsilon, z)  # pyright: ignore[reportReturnType]


class Sums(NamedTuple):
    """What of the P weights the K×K algebra needs, in float64."""

    gram: Tensor  # GᵀG [K, K]
    projection: Tensor  # Gᵀε [S, K]
    squares: Tensor  # ε·ε [S]
    log_scale: Tensor  # Σ log s

    def reduced(self, reduce: Reduce | None) -> "Sums":
        if reduce is None:
            return self
        shapes = [x.shape for x in self]
        parts = reduce(torch.cat([x.reshape(-1) for x in self])).split([shape.numel() for shape in shapes])
        return Sums(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))


class Saved(NamedTuple):
    """What the way back needs."""

    scale: Tensor  # [P]
    factor: Tensor  # [P, K]
    unit: Tensor  # [P]
    epsilon: Tensor  # [S, P]
    z: Tensor  # [S, K]
    u: Tensor  # [S, K]
    inverse: Tensor  # M⁻¹ [K, K], in float64
    scaled: Tensor | None  # Gᵀ [K, P], where it is kept
    precision: bool
    reduce: Reduce | None


def forward(state: State, epsilon: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Saved]:
    """θ [S, P] and log q(θ) [S] without a graph, θ·θ [S] where it comes with them, and what `backward` needs."""
    mean, log_scale, factor, unit, precision, reduce = state
    precision = precision and factor.shape[-1] > 0  # without a factor the forms are the same
    compute, P = _passes(factor), len(mean)
    drawn = scaled = None
    if compute.joins(len(epsilon), factor, precision):
        scale, *of_weights, theta, squares, scaled = compute.sums_and_draws(mean, log_scale, factor, unit, epsilon, z)
        drawn = theta, squares
    else:
        scale, *of_weights = compute.sums(log_scale, factor, unit, precision, epsilon)
    sums = Sums(*of_weights).reduced(reduce)
    if reduce is not None:
        P = reduce(torch.full((1,), float(P), dtype=torch.float64, device=mean.device))
    if reduce is None and compute.solves(factor.shape[-1]):
        u, log_q, inverse = compute.solve(*sums, z, precision, P)
    else:
        u, log_q, inverse = _solve(sums, z, precision, P)
    theta, squares = drawn or compute.place(mean, scale, factor, unit, precision, epsilon, u if precision else z)
    squares = squares if reduce is None else None
    return theta, log_q, squares, Saved(scale, factor, unit, epsilon, z, u, inverse, scaled, precision, reduce)


def _solve(sums: Sums, z: Tensor, precision: bool, P: Any) -> tuple[Tensor, Tensor, Tensor]:
    """u = M⁻¹(z − p), log q and M⁻¹: [S, K], [S], [K, K]."""
    quadratic, determinant = sums.squares, sums.log_scale
    if K := z.shape[-1]:
        M = sums.gram + torch.eye(K, dtype=torch.float64, device=z.device)
        # M ≥ I: only numbers that are not finite can make this fail, and then the bound is not finite either
        L, _ = torch.linalg.cholesky_ex(M)
        inverse = torch.cholesky_inverse(L)
        p, z64 = sums.projection, z.double()
        u64 = (z64 - p) @ inverse
        quadratic = quadratic + (p * z64 + (p + z64 @ sums.gram) * u64).sum(-1)
        determinant = determinant + (-1 if precision else 1) * half_log_det(L)
        u = u64.to(z.dtype)
    elif not z.is_cuda and not isinstance(P, Tensor):
        known = 0.5 * log(2 * pi) * P + determinant.item()
        return z, torch.tensor([-0.5 * x - known for x in quadratic.tolist()], dtype=z.dtype), sums.gram
    else:
        u, inverse = z, sums.gram
    log_q = (-0.5 * quadratic - determinant - 0.5 * log(2 * pi) * P).to(z.dtype)
    return u, log_q, inverse


@torch.no_grad()
def backward(
    saved: Saved, g: Tensor, g_q: Tensor, theta: Tensor | None = None, slope: Tensor | None = None
) -> tuple[Tensor, Tensor, LowRankGradient]:
    """Gradients of mean and log scale [P], and of the factor as two thin sides.

    Args:
        saved: of `forward`.
        g, g_q: the gradients at the draws [S, P] and at log q [S].
        theta, slope: to the first, slope [S] times θ [S, P] is added.
    """
    scale, factor, unit, epsilon, z, u, inverse, scaled, precision, reduce = saved
    compute = _passes(factor)
    common = scale, factor, unit
    if theta is None or slope is None:
        theta, slope = g, torch.zeros_like(g_q)
    if scaled is not None:
        to_mean, to_scale, A = back_scaled(scaled, scale, unit, epsilon, u, g, g_q, theta, slope)
        return to_mean, to_scale, LowRankGradient(A, z)
    if not precision:
        *gradients, A, squares = compute.back_covariance(*common, epsilon, u, z, g, g_q, theta, slope)
        return *gradients, LowRankGradient(A, z, squares)
    g, projection = compute.pull(*common, epsilon, z, g, g_q, theta, slope)
    if reduce is not None:
        projection = reduce(projection)
    v = (projection @ inverse).to(z.dtype)
    *gradients, A, squares = compute.back_precision(*common, epsilon, u, v, g)
    return *gradients, LowRankGradient(A, torch.cat([u, v]), squares)


class _Drawn(torch.autograd.Function):
    """`forward` and `backward` as a node of a graph, for a loop of the user's own: the factor's gradient is whole."""

    @staticmethod
    def forward(ctx, mean, log_scale, factor, unit, precision, reduce, epsilon, z):
        theta, log_q, _, saved = forward(State(mean, log_scale, factor, unit, precision, reduce), epsilon, z)
        *tensors, ctx.precision, ctx.reduce = saved
        ctx.save_for_backward(*tensors)
        return theta, log_q

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor, g_q: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = Saved._make((*ctx.saved_tensors, ctx.precision, ctx.reduce))
        mean_gradient, scale_gradient, gradient = backward(saved, g, g_q)
        factor_gradient = gradient.dense() if ctx.needs_input_grad[2] else None
        return mean_gradient, scale_gradient, factor_gradient, *[None] * 5


def kernels_serve(factor: Tensor) -> bool:
    """Whether Triton kernels are used for this factor [P, K]."""
    return factor.shape[-1] <= 128 and kernels_take(factor)


def kernels_take(x: Tensor) -> bool:
    """Whether Triton kernels may be used for this tensor at all."""
    return (x.is_cuda or _INTERPRETED) and x.dtype == torch.float32 and has_triton()


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None  # builds of torch for the CPU come without it


def _passes(factor: Tensor) -> Any:
    if not kernels_serve(factor):
        return _Slabs
    from . import triton_detached as triton_kernels

    return triton_kernels


def one_slab(factor: Tensor, precision: bool) -> bool:
    """Whether G = r∘F is made once, and kept from the draws to the way back."""
    return not precision and factor.device.type == "cpu" and 0 < factor.numel() <= factor.shape[-1] * _SLAB


def ratio(scale: Tensor, unit: Tensor, precision: bool) -> Tensor:
    return scale / unit if precision else unit / scale


def _exp(x: Tensor) -> Tensor:
    """exp(x) as 2^(x/log 2) in float32 on a CPU, where torch leaves exp to a library that is slow on some processors.

    x/log 2 is rounded once more: about |x| roundings of the result, less than those of θ = μ + s∘ε.
    """
    slow = x.dtype == torch.float32 and x.device.type == "cpu"
    return torch.mul(x, 1 / log(2)).exp2_() if slow else x.exp()


class _Slabs:
    """The passes in torch, a slab of the weights at a time: temporaries stay in the cache. As in `triton_kernels`."""

    @staticmethod
    def solves(K):
        return False

    @staticmethod
    def joins(S, factor, precision):
        """Where all weights are one slab G is kept: θ and the score are products with it."""
        return one_slab(factor, precision)

    @staticmethod
    def sums_and_draws(mean, log_scale, factor, unit, epsilon, z):
        scale = _exp(log_scale)
        scaled = factor.mT * ratio(scale, unit, False)
        sums = project(scaled, scaled.mT), project(epsilon, scaled.mT), SumSquares.forward(epsilon)
        theta = torch.addmm(epsilon, z, scaled)
        torch.addcmul(mean, scale, theta, out=theta)
        return scale, *sums, sum_weights(log_scale), theta, None, scaled

    @staticmethod
    def sums(log_scale, factor, unit, precision, epsilon):
        S, K, scale = len(epsilon), factor.shape[-1], _exp(log_scale)
        both = factor.new_zeros(K + S, K, dtype=torch.float64)
        for at in _slabs(scale) if K else ():
            rows = factor.new_empty(K + S, scale[at].shape[0])  # Gᵀ and ε: their products with G are one
            torch.mul(factor[at].mT, ratio(scale[at], unit[at], precision), out=rows[:K])
            rows[K:] = epsilon[:, at]
            both += project(rows, rows[:K].mT)
        gram, projection = both.split_with_sizes((K, S))
        return scale, gram, projection, SumSquares.forward(epsilon), sum_weights(log_scale)

    @staticmethod
    def place(mean, scale, factor, unit, precision, epsilon, a):
        theta = torch.addcmul(mean, scale, epsilon)
        if factor.shape[-1]:
            for at in _slabs(scale):
                weight = scale[at].square() / unit[at] if precision else unit[at]
                theta[:, at].addcmul_(a @ factor[at].mT, weight)
        return theta, None

    @staticmethod
    def back_covariance(scale, factor, unit, epsilon, u, z, g, g_q, theta, slope):
        """Gradients of μ and log s, A = s₀∘g' with g' = g + slope·θ + g_q·score; squares are left to who wants them.

        One draw after the other: a vector stays in the cache from one operation to the next, and none is made anew.
        """
        spare, g = theta is not g, sloped(g, theta, slope)
        if g.is_cuda:
            return back_at_once(scale, factor, unit, epsilon, u, g, g_q)
        if factor.shape[-1] == 0:
            return *back_diagonal(scale, epsilon, g, g_q, spare), g, None
        # in its place, where nobody else has it
        mean_gradient = g[0] if spare and len(g) == 1 else torch.empty_like(scale)
        scale_gradient, A, cotangents = torch.empty_like(scale), torch.empty_like(g), g_q.tolist()
        for at in _slabs(scale):
            s, s0 = scale[at], unit[at]
            to_mean, to_scale = mean_gradient[at], scale_gradient[at]
            pulled = torch.empty_like(s) if len(g) > 1 else to_mean  # of the draws after the first
            for draw, product in enumerate(_products(u, factor[at])):
                e = epsilon[draw, at]
                t = torch.addcmul(e, product, s0 / s)
                own = pulled if draw else to_mean  # the first is where the sum begins
                torch.addcdiv(g[draw, at], t, s, value=-cotangents[draw], out=own)
                torch.mul(own, s0, out=A[draw, at])
                if draw:
                    to_scale.addcmul_(own, e)
                    to_mean.add_(own)
                else:
                    torch.mul(own, e, out=to_scale)
            to_scale.mul_(s)
        return mean_gradient, scale_gradient, A, None

    @staticmethod
    def pull(scale, factor, unit, epsilon, z, g, g_q, theta, slope):
        """g' = g + slope·θ + g_q·score in the precision form, and Gᵀ(s∘g')."""
        g = sloped(g, theta, slope)
        pulled, projection = torch.empty_like(g), torch.zeros_like(z, dtype=torch.float64)
        for at in _slabs(scale):
            F, s, s0 = factor[at], scale[at], unit[at]
            t = torch.addcmul(epsilon[:, at], z @ F.mT, s / s0)
            torch.addcmul(g[:, at], t / s, g_q.unsqueeze(-1), value=-1, out=pulled[:, at])
            projection += project(pulled[:, at] * (s.square() / s0), F)
        return pulled, projection

    @staticmethod
    def back_precision(scale, factor, unit, epsilon, u, v, g):
        """Gradients of μ and log s, and A = [r∘(s∘g' − G v); −r∘y] with y = (θ − μ)/s = ε + G u."""
        S = len(g)
        mean_gradient, scale_gradient = torch.empty_like(scale), torch.empty_like(scale)
        A = g.new_empty(2 * S, g.shape[-1])
        for at in _slabs(scale):
            F, s, s0, g_ = factor[at], scale[at], unit[at], g[:, at]
            r = s / s0
            Fu, Fv = u @ F.mT, v @ F.mT  # [S, slab]
            y = torch.addcmul(epsilon[:, at], Fu, r)
            w = torch.addcmul(s * g_, Fv, r, value=-1)
            torch.sum(g_, 0, out=mean_gradient[at])
            torch.mul(torch.addcdiv(g_ * y, w * Fu - y * Fv, s0).sum(0), s, out=scale_gradient[at])
            torch.mul(w, r, out=A[:S, at])
            torch.mul(y, -r, out=A[S:, at])
        return mean_gradient, scale_gradient, A, None


def _products(a: Tensor, factor: Tensor) -> Iterable[Tensor]:
    """F a_s of each draw, [P]: for few columns one by one, which is faster and needs no room for all of them."""
    return a @ factor.mT if a.numel() >= _PRODUCTS else (torch.mv(factor, row) for row in a)


def _slabs(weights: Tensor) -> list[slice]:
    P = weights.shape[0]
    return [slice(start, min(start + _SLAB, P)) for start in range(0, P, _SLAB)]
