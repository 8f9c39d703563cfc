"""The arithmetic of the families: sums over the P weights, K×K algebra, and draws with log q at them.

Sums accumulate in float64. Products are taken in blocks of the weights in their own precision and the blocks are added
in float64: the error does not grow with P, and nothing of size P is ever copied to float64.

A draw of a diagonal plus low-rank Gaussian and log q at it are one autograd function, gradients in closed form.

With r = s₀/s (covariance form) or s/s₀ (precision form), noise (ε, z), G = r∘F, M = I_K + GᵀG, p = Gᵀε and
u = M⁻¹(z − p),

    covariance  θ = μ + s∘(ε + G z),   ∇ log q = −(ε + G u)/s,   ½ log det Σ = Σ log s + ½ log det M
    precision   θ = μ + s∘(ε + G u),   ∇ log q = −(ε + G z)/s,   ½ log det Σ = Σ log s − ½ log det M

and in both (θ − μ)ᵀΛ(θ − μ) = ε·ε + p·z + (p + GᵀG z)·u. With gradients g at θ and c at log q,
g' = g + c∇ log q:

    covariance  ∂μ = Σ g',  ∂log s = Σ s∘g'∘ε,                           ∂F = Σ (s₀∘g') zᵀ
    precision   ∂μ = Σ g',  ∂log s = Σ s∘g'∘y + w∘Gu − y∘Gv,             ∂F = Σ r∘(w uᵀ − y vᵀ)
                with y = ε + G u,  v = M⁻¹Gᵀ(s∘g'),  w = s∘g' − G v

all sums over draws. On a GPU the sums, and the gradients of all draws, are Triton kernels (`triton_kernels`).
"""

import os
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from math import log, pi
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: an all-reduce over the ranks that hold slices of the weights: a vector of sums in, the sums over ranks out
Reduce = Callable[[Tensor], Tensor]

#: whether this thread may look at values
_READS: ContextVar[bool] = ContextVar("reads", default=True)
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


#: weights whose products are added in their own precision
_BLOCK = 4096


def reads() -> bool:
    """Return whether checks may look at values; where they may not, values that they would refuse become NaN.

    To read a value from a GPU is to wait for it, and is not possible inside a captured step.
    """
    return _READS.get()


class unread:
    """Look at no value inside the block: the caller finds that a result is not finite, and asks again outside."""

    def __enter__(self) -> None:
        self.token = _READS.set(False)

    def __exit__(self, *_: Any) -> None:
        _READS.reset(self.token)


def _cut(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole blocks of the weights and the rest: [.., P] → [.., P // _BLOCK, _BLOCK], [.., P % _BLOCK]."""
    rest = x.shape[-1] % _BLOCK
    whole, few = x.split_with_sizes((x.shape[-1] - rest, rest), -1)
    return whole.unflatten(-1, (-1, _BLOCK)), few


def sum_weights(x: Tensor) -> Tensor:
    """Return Σ_p x[.., p] in float64: [.., P] → [..]."""
    if x.dtype == torch.float64 or x.shape[-1] <= _BLOCK:
        return x.sum(-1, dtype=torch.float64)
    blocks, rest = _cut(x)
    return blocks.sum(-1).sum(-1, dtype=torch.float64) + rest.sum(-1, dtype=torch.float64)


def sum_squares(x: Tensor) -> Tensor:
    """Return Σ_p x[.., p]² in float64, without x² in memory if P is large: [.., P] → [..]."""
    if x.dtype == torch.float64 or x.shape[-1] <= _BLOCK:
        return x.square().sum(-1, dtype=torch.float64)
    blocks, rest = _cut(x)
    norms = torch.linalg.vector_norm(blocks, dim=-1).double()
    return norms.square().sum(-1) + rest.square().sum(-1, dtype=torch.float64)


def project(x: Tensor, factor: Tensor) -> Tensor:
    """Return x F in float64: [S, P], [P, K] → [S, K]."""
    if x.dtype == torch.float64 or x.shape[-1] <= _BLOCK:
        return x.double() @ factor.double()
    (x, x_rest), (columns, columns_rest) = _cut(x), _cut(factor.mT)
    blocks = torch.bmm(x.transpose(0, 1), columns.transpose(0, 1).mT)  # [blocks, S, K]
    return blocks.sum(0, dtype=torch.float64) + (x_rest @ columns_rest.mT).double()


def plus(x: Tensor, k: Tensor, factor: Tensor, r: Tensor) -> Tensor:
    """Return x + kGᵀ, G = r∘F: [S, P], [S, K], [P, K], [P] → [S, P]."""
    return torch.addcmul(x, k.to(x.dtype) @ factor.mT, r) if factor.shape[-1] else x


def capacitance(G: Tensor, reduce: Reduce | None = None) -> Tensor:
    """Return the lower Cholesky factor of I_K + GᵀG in float64: [P, K] → [K, K]."""
    gram = project(G.mT, G)
    gram = gram if reduce is None else reduce(gram)
    M = gram + torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return torch.linalg.cholesky(M) if reads() else torch.linalg.cholesky_ex(M)[0]


def solve(cholesky: Tensor, x: Tensor) -> Tensor:
    """Return x M⁻¹ for M = L Lᵀ: [K, K], [S, K] → [S, K]."""
    if cholesky.is_cuda:  # of many matrices at once, under vmap, `cholesky_solve` cannot be captured as a CUDA graph
        half = torch.linalg.solve_triangular(cholesky, x.mT, upper=False)
        return torch.linalg.solve_triangular(cholesky.mT, half, upper=True).mT
    return torch.cholesky_solve(x.mT, cholesky).mT


def half_log_det(cholesky: Tensor) -> Tensor:
    """Return ½ log det M = Σ log diag L."""
    return cholesky.diagonal().log().sum()


def draw(
    mean: Tensor, log_scale: Tensor, factor: Tensor, unit: Tensor, precision: bool, P: int, reduce: Reduce | None,
    epsilon: Tensor, z: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return θ [S, P] and log q(θ) [S] for noise [S, P], [S, K]; the gradient of log q goes through θ alone.

    Args:
        mean, log_scale, factor, unit: [P], [P], F [P, K], s₀ [P].
        precision: the form.
        P: of all ranks.
        reduce: the sum over ranks, where the weights are split over ranks.
        epsilon, z: the noise.
    """
    return _Drawn.apply(mean, log_scale, factor, unit, precision, P, reduce, epsilon, z)  # pyright: ignore[reportReturnType]


class _Drawn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean, log_scale, factor, unit, precision, P, reduce, epsilon, z):
        precision = precision and z.shape[-1] > 0  # without a factor the forms are the same
        kernels = _kernels(factor)
        if kernels is not None:
            scale, *sums, theta = kernels.project(precision, factor, mean, log_scale, unit, epsilon, z)
            sums = [kernels.gram(precision, factor, scale, unit), *sums]
            r = ratio(scale, unit, precision)
        else:
            scale = log_scale.exp()
            r = ratio(scale, unit, precision)
            G = factor * r.unsqueeze(-1)
            sums = [project(G.mT, G), project(epsilon, G), sum_squares(epsilon), sum_weights(log_scale)]
        if reduce is not None:
            sums = [reduce(x) for x in sums]
        u, log_q, inverse = _solve(*sums, z, precision, P)
        if kernels is None or precision:
            theta = torch.addcmul(mean, scale, plus(epsilon, u if precision else z, factor, r))
        ctx.save_for_backward(scale, factor, unit, epsilon, z, u, inverse)
        ctx.precision, ctx.reduce, ctx.kernels = precision, reduce or (lambda x: x), kernels
        return theta, log_q

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, g_q: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        scale, factor, unit, epsilon, z, u, inverse = ctx.saved_tensors
        if ctx.kernels is not None and not ctx.precision:
            return *ctx.kernels.back(False, factor, scale, unit, epsilon, u, z, g, g_q), *[None] * 6
        r = ratio(scale, unit, ctx.precision)
        t = plus(epsilon, z if ctx.precision else u, factor, r)
        pulled = torch.addcmul(g, t / scale, g_q.unsqueeze(-1), value=-1)
        if not ctx.precision:
            to_factor = (z.mT @ (pulled * unit)).mT if ctx.needs_input_grad[2] else None
            return _summed(pulled), _summed(pulled * epsilon).mul_(scale), to_factor, *[None] * 6
        own = pulled * scale
        v = (ctx.reduce(project(own * r, factor)) @ inverse).to(u.dtype)
        if ctx.kernels is not None:
            return *ctx.kernels.back(True, factor, scale, unit, epsilon, u, v, pulled, g_q), *[None] * 6
        Gu, Gv = r * (u @ factor.mT), r * (v @ factor.mT)
        w, y = own - Gv, epsilon + Gu
        to_scale = _summed((own * y).addcmul_(w, Gu).addcmul_(y, Gv, value=-1))
        to_factor = (torch.cat([u, -v]).mT @ torch.cat([w, y]).mul_(r)).mT
        return _summed(pulled), to_scale, to_factor, *[None] * 6


def _summed(x: Tensor) -> Tensor:
    """Return the sum over draws, [S, P] → [P]."""
    return x[0] if len(x) == 1 else x.sum(0)


def _solve(
    gram: Tensor, p: Tensor, squares: Tensor, log_scale: Tensor, z: Tensor, precision: bool, P: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return u = M⁻¹(z − p) [S, K], log q [S] and M⁻¹ [K, K], from GᵀG [K, K], p [S, K], ε·ε [S] and Σ log s."""
    if z.shape[-1] == 0:
        return z, (-0.5 * squares - log_scale - 0.5 * log(2 * pi) * P).to(z.dtype), gram
    # M ≥ I: only numbers that are not finite can make this fail, and then the bound is not finite either
    L, _ = torch.linalg.cholesky_ex(gram + torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    inverse, wide = torch.cholesky_inverse(L), z.double()
    u = (wide - p) @ inverse
    quadratic = squares + (p * wide + (p + wide @ gram) * u).sum(-1)
    determinant = log_scale + (-1 if precision else 1) * half_log_det(L)
    log_q = -0.5 * quadratic - determinant - 0.5 * log(2 * pi) * P
    return u.to(z.dtype), log_q.to(z.dtype), inverse


def ratio(scale: Tensor, unit: Tensor, precision: bool) -> Tensor:
    """Return r in G = r∘F: [P]."""
    return scale / unit if precision else unit / scale


def _kernels(factor: Tensor) -> Any:
    """Return the module of Triton kernels if they serve this factor, else None."""
    if not (factor.is_cuda or _INTERPRETED) or factor.dtype != torch.float32 or not has_triton():
        return None
    from . import triton_kernels  # Triton takes longer to import than all of the library

    return triton_kernels if factor.shape[-1] <= triton_kernels.MOST_COLUMNS else None


@cache
def has_triton() -> bool:
    """Return whether Triton is installed: builds of torch for the CPU come without it."""
    return find_spec("triton") is not None
