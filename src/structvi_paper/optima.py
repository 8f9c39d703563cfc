"""The best Gaussian of each shape for a Gaussian target, found deterministically.

For p = N(μ, Λ⁻¹) the mean of the best q is μ, and the rest of KL[q‖p] depends on the covariance alone:

    2 KL[q‖p] = tr(ΛΣ_q) − P − log det(ΛΣ_q).

*Covariance form*, Σ_q = S(I + WWᵀ)S with S = diag(s): given s, with λ the eigenvalues of SΛS, the best W lies along the
eigenvectors of the K smallest λ < 1 and turns their contribution λ − log λ into 1. What remains is a function of
s alone, 2 KL = Σ_rest(λ_i − 1 − log λ_i), of P variables.

*Precision form*, Λ_q = S⁻¹(I + FFᵀ)S⁻¹: minimising KL[q‖p] is maximum-likelihood factor analysis of Λ as if it were a
sample covariance. Rubin and Thayer's EM gets near; the profile likelihood (with SΛS as above, the K largest λ > 1
contribute nothing) finishes.
"""

import torch
from torch import Tensor


def random_gaussians(targets: int, P: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Means μ ~ N(0, I) [T, P] and covariances VVᵀ [T, P, P], V = Q diag(exp N(0, 1)), Q a uniform rotation."""
    options = {"generator": generator, "dtype": torch.float64}
    mean = torch.randn(targets, P, **options)
    q, r = torch.linalg.qr(torch.randn(targets, P, P, **options))
    rotation = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    V = rotation * torch.randn(targets, 1, P, **options).exp()
    return mean, V @ V.mT


def best_kl(covariance: Tensor, rank: int, form: str, starts: int = 32, steps: int = 1000) -> Tensor:
    """min_q KL[q‖p] in nats for each target covariance [T, P, P], over the given form and rank: [T].

    Args:
        covariance: of the targets, in float64.
        rank: K, from 0 (mean field, closed form) to P (which contains the target).
        form: "covariance" or "precision".
        starts: deterministic starts; the best is taken.
        steps: of Adam on the profile, decayed to nothing, over all starts and targets at once.
    """
    precision = torch.linalg.inv(covariance)
    T, P = precision.shape[:2]
    if rank >= P:
        return torch.zeros(T, dtype=precision.dtype)
    if rank == 0:  # mean field: s_i² = 1/Λ_ii
        return 0.5 * (precision.diagonal(dim1=-2, dim2=-1).log().sum(-1) - torch.linalg.slogdet(precision).logabsdet)
    log_scale = _starts(precision, starts)  # [starts, T, P]
    if form == "precision":
        log_scale = _factor_analysis_em(precision, log_scale, rank)
    best = _profile_kl(log_scale, precision, rank, form)
    variable = log_scale.clone().requires_grad_()
    optimizer = torch.optim.Adam([variable], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        value = _profile_kl(variable, precision, rank, form)
        value.sum().backward()
        best = torch.minimum(best, value.detach())
        optimizer.step()
        schedule.step()
    best = torch.minimum(best, _profile_kl(variable.detach(), precision, rank, form))
    return best.amin(0)


def _profile_kl(log_scale: Tensor, precision: Tensor, rank: int, form: str) -> Tensor:
    """KL[q‖p] at these scales and the best factor for them: [.., P], [.., P, P] → [..]."""
    scale = log_scale.exp()
    values = torch.linalg.eigvalsh(scale.unsqueeze(-1) * precision * scale.unsqueeze(-2))  # ascending
    values = values.clamp(min=torch.finfo(values.dtype).tiny)
    loss = values - 1 - values.log()
    chosen = values[..., :rank] < 1 if form == "covariance" else values[..., -rank:] > 1
    part = loss[..., :rank] if form == "covariance" else loss[..., -rank:]
    rest = loss[..., rank:] if form == "covariance" else loss[..., :-rank]
    return 0.5 * (torch.where(chosen, 0.0, part).sum(-1) + rest.sum(-1))


def _starts(precision: Tensor, starts: int) -> Tensor:
    """[starts, T, P]: mean field's optimum, the marginal scales, what lies between, and seeded departures from it."""
    conditional = -0.5 * precision.diagonal(dim1=-2, dim2=-1).log()
    marginal = 0.5 * torch.linalg.inv(precision).diagonal(dim1=-2, dim2=-1).log()
    generator = torch.Generator().manual_seed(0)
    points = []
    for index in range(starts):
        between = (index % 3) / 2
        noise = torch.randn(conditional.shape, generator=generator, dtype=conditional.dtype)
        departure = 0.0 if index < 3 else 0.5 * (1 + index % 4)
        points.append(torch.lerp(conditional, marginal, between) + departure * noise)
    return torch.stack(points)


def _factor_analysis_em(precision: Tensor, log_scale: Tensor, rank: int, iterations: int = 500) -> Tensor:
    """Rubin and Thayer's EM for Λ ≈ LLᵀ + diag(ψ); returns the scales −½ log ψ: [starts, T, P]."""
    psi = (-2 * log_scale).exp()
    values, vectors = torch.linalg.eigh(precision)
    loadings = (vectors * values.clamp(min=0).sqrt().unsqueeze(-2))[..., -rank:].expand(*psi.shape, rank)
    identity = torch.eye(rank, dtype=psi.dtype)
    for _ in range(iterations):
        whitened = loadings / psi.unsqueeze(-1)  # ψ⁻¹L
        inner = torch.linalg.inv(identity + loadings.mT @ whitened)  # (I + Lᵀψ⁻¹L)⁻¹
        regression = inner @ whitened.mT  # β: E[z | x] = βx
        cross = regression @ precision  # βΛ
        second = inner + cross @ regression.mT
        loadings = torch.linalg.solve(second, cross).mT
        residual = (precision - loadings @ cross).diagonal(dim1=-2, dim2=-1)
        psi = residual.clamp(min=1e-12 * precision.diagonal(dim1=-2, dim2=-1))
    return -0.5 * psi.log()
