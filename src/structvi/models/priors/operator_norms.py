"""Largest singular values of layers: of matrices, and of linear maps that are only known by what they do."""

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor
from torch.func import vmap

#: Relative accuracy of the operator norms of convolutions.
TOLERANCE = 1e-6
#: Vectors in one Krylov space, and how often it is begun again from its best vector.
KRYLOV, RESTARTS = 24, 200


def spectral_norm(weight: Tensor) -> Tensor:
    """The largest singular value, σ = uᵀWv, with gradient uvᵀ: [S, m, n] → [S]."""
    if weight.shape[-1] > weight.shape[-2]:
        weight = weight.mT
    with torch.no_grad():
        wide = weight.double()
        v = torch.linalg.eigh(wide.mT @ wide).eigenvectors[..., -1:].to(weight.dtype)  # [S, n, 1]
    return _length(weight @ v)


def operator_norm(apply: Callable[[Tensor, Tensor], Tensor], weight: Tensor, shape: torch.Size) -> Tensor:
    """The largest singular value of x ↦ apply(weight, x), linear in x, for each of S weights: [S, ..] → [S].

    Its right singular vector v comes from power iteration with AᵀA, sped up by taking the best vector of the Krylov
    space of the iterates (Lanczos), from a fixed start; then σ = ‖Av‖, whose gradient at fixed v is that of uᵀAv.
    """
    S = weight.shape[0]
    batched = vmap(apply)
    fixed = weight.detach()
    with torch.enable_grad():
        zero = weight.new_zeros(S, *shape).requires_grad_()
        image = batched(fixed, zero)

    def gram(v: Tensor) -> Tensor:
        (back,) = torch.autograd.grad(image, zero, batched(fixed, v.view(S, *shape)), retain_graph=True)
        return back.reshape(S, -1)

    with torch.no_grad():
        start = torch.randn(shape.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        v = _top_eigenvector(gram, start.to(weight).expand(S, -1))
    return _length(batched(weight, v.view(S, *shape)))


def _length(x: Tensor) -> Tensor:
    """‖x‖ as uᵀx with u = x/‖x‖ held fixed, which has a gradient at zero too: [S, ..] → [S]."""
    x = x.flatten(1)
    length = x.detach().norm(dim=-1, keepdim=True)
    return (x.detach() / length.clamp(min=torch.finfo(x.dtype).tiny) * x).sum(-1)


def _top_eigenvector(gram: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Of S positive semidefinite operators at once, by restarted Lanczos: [S, n] → [S, n]."""
    v = start / start.norm(dim=-1, keepdim=True)
    steps = min(KRYLOV, v.shape[-1])
    epsilon = torch.finfo(v.dtype).eps
    best = v.new_full(v.shape[:1], -inf)
    for _ in range(RESTARTS):
        basis = v.unsqueeze(1)  # [S, j, n]
        T = v.new_zeros(v.shape[0], steps, steps)
        for j in range(steps):
            w = gram(basis[:, j])
            T[:, j, j] = (w * basis[:, j]).sum(-1)
            size = w.norm(dim=-1)
            for _ in range(2):  # once more removes what rounding left
                w = w - torch.einsum("sj,sjn->sn", torch.einsum("sjn,sn->sj", basis, w), basis)
            beta = w.norm(dim=-1)
            beta = torch.where(beta > 10 * epsilon * size, beta, 0.0)  # the space is exhausted: only rounding is left
            if j + 1 < steps:
                T[:, j, j + 1] = T[:, j + 1, j] = beta
                following = torch.where(beta.unsqueeze(-1) > 0, w / beta.unsqueeze(-1), 0.0)
                basis = torch.cat([basis, following.unsqueeze(1)], dim=1)
        values, vectors = torch.linalg.eigh(T)
        top, y = values[:, -1], vectors[:, :, -1]
        v = torch.einsum("sj,sjn->sn", y, basis)
        v = v / v.norm(dim=-1, keepdim=True)
        residual = beta * y[:, -1].abs()  # bounds the distance of `top` from an eigenvalue
        settled = (top - best).abs() <= max(1e-3 * TOLERANCE, 4 * epsilon) * top.abs()
        if bool(((residual <= TOLERANCE * top.abs()) | settled).all()):
            return v
        best = top
    raise ArithmeticError(f"an operator norm has not converged after {RESTARTS} restarts of power iteration")
