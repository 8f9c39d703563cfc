"""The twelve posteriors: log densities on unconstrained parameters u, all draws at once, log Jacobians included.

Each function takes the data, as a dict of float64 tensors, and returns P and a function [S, P] → [S]. Constants are
left out. The order of u is that of the references' `unconstrained_mean`.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import structvi as vi

Density = Callable[[Tensor], Tensor]


def normal(x: Tensor, mean: Tensor | float, scale: Tensor | float) -> Tensor:
    """log N(x; mean, scale²) without −½ log 2π."""
    scale = torch.as_tensor(scale, dtype=torch.float64)
    return -0.5 * ((x - mean) / scale).square() - scale.log()


def half_cauchy(s: Tensor, a: float) -> Tensor:
    return -torch.log1p((s / a).square())


def regression(X: Tensor, y: Tensor, prior: Callable[[Tensor, Tensor], Tensor]) -> tuple[int, Density]:
    """u = (β, log σ), y ~ N(Xβ, σ²); `prior` of β [S, P − 1] and σ [S]."""

    def log_density(u: Tensor) -> Tensor:
        beta, log_sigma = u[:, :-1], u[:, -1]
        residual = y - beta @ X.mT  # [S, N]
        fit = -0.5 * residual.square().sum(-1) * (-2 * log_sigma).exp() - len(y) * log_sigma
        return fit + prior(beta, log_sigma.exp()) + log_sigma

    return X.shape[1] + 1, log_density


def columns(*values: Tensor) -> Tensor:
    """A design matrix, a column of ones first: [N, 1 + n]."""
    return torch.stack([torch.ones_like(values[0]), *values], dim=-1)


def flat(beta: Tensor, sigma: Tensor) -> Tensor:
    return torch.zeros_like(sigma)


def cauchy(beta: Tensor, sigma: Tensor) -> Tensor:
    return half_cauchy(sigma, 2.5)


def kidscore_momiq(d):
    return regression(columns(d["mom_iq"]), d["kid_score"], cauchy)


def kidscore_interaction(d):
    return regression(columns(d["mom_hs"], d["mom_iq"], d["mom_hs"] * d["mom_iq"]), d["kid_score"], cauchy)


MEASURES = ("diam1", "diam2", "canopy_height", "total_height", "density")


def mesquite(d):
    return regression(columns(*(d[name] for name in MEASURES), d["group"]), d["weight"], flat)


def logmesquite(d):
    return regression(columns(*(d[name].log() for name in MEASURES), d["group"]), d["weight"].log(), flat)


def nes(d):
    ages = [(d["age_discrete"] == age).double() for age in (2, 3, 4)]
    X = columns(d["real_ideo"], d["race_adj"], *ages, d["educ1"], d["gender"], d["income"])
    return regression(X, d["partyid7"], flat)


def ark(d):
    y, K = d["y"], int(d["K"])
    lags = [y[K - k : len(y) - k] for k in range(1, K + 1)]
    return regression(columns(*lags), y[K:], lambda b, s: normal(b, 0.0, 10.0).sum(-1) + half_cauchy(s, 2.5))


def blr(d):
    return regression(d["X"], d["y"], lambda b, s: normal(b, 0.0, 10.0).sum(-1) + normal(s, 0.0, 10.0))


def eight_schools_noncentered(d):
    def log_density(u: Tensor) -> Tensor:
        z, mu, log_tau = u[:, :8], u[:, 8:9], u[:, 9]
        effect = mu + log_tau.exp().unsqueeze(-1) * z
        return normal(z, 0.0, 1.0).sum(-1) + _schools(d, effect, mu, log_tau)

    return 10, log_density


def eight_schools_centered(d):
    def log_density(u: Tensor) -> Tensor:
        effect, mu, log_tau = u[:, :8], u[:, 8:9], u[:, 9]
        spread = normal(effect, mu, log_tau.exp().unsqueeze(-1)).sum(-1)
        return spread + _schools(d, effect, mu, log_tau)

    return 10, log_density


def _schools(d, effect: Tensor, mu: Tensor, log_tau: Tensor) -> Tensor:
    prior = normal(mu, 0.0, 5.0).squeeze(-1) + half_cauchy(log_tau.exp(), 5.0) + log_tau
    return normal(d["y"], effect, d["sigma"]).sum(-1) + prior


def garch11(d):
    y, first = d["y"], d["sigma1"].square()

    def log_density(u: Tensor) -> Tensor:
        mu, a0, a1 = u[:, 0], u[:, 1].exp(), u[:, 2].sigmoid()
        share = u[:, 3].sigmoid()  # β₁ = (1 − α₁)·share
        b1 = (1 - a1) * share
        # log Jacobians of exp, of sigmoid, and of sigmoid scaled by 1 − α₁
        jacobian = u[:, 1] + logsigmoid(u[:, 2]) + 2 * logsigmoid(-u[:, 2]) + logsigmoid(u[:, 3]) + logsigmoid(-u[:, 3])
        variance, total = first.expand(len(u)), jacobian
        for t in range(len(y)):
            deviation = (y[t] - mu).square()
            total = total - 0.5 * deviation / variance - 0.5 * variance.log()
            variance = a0 + a1 * deviation + b1 * variance
        return total

    return 4, log_density


def gp_regr(d):
    squared = (d["x"].unsqueeze(-1) - d["x"]).square()  # [N, N]
    identity = torch.eye(len(squared), dtype=torch.float64)

    def log_density(u: Tensor) -> Tensor:
        rho, alpha, sigma = u.exp().unbind(-1)
        kernel = alpha.square()[:, None, None] * (-0.5 * squared / rho.square()[:, None, None]).exp()
        L, failed = torch.linalg.cholesky_ex(kernel + sigma[:, None, None] * identity)
        x = torch.linalg.solve_triangular(L, d["y"].unsqueeze(-1).expand(len(u), -1, 1), upper=False)
        fit = -0.5 * x.square().sum((-2, -1)) - L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        fit = fit.where(failed == 0, -torch.inf)
        gamma = 24 * u[:, 0] - 4 * rho
        return fit + gamma + normal(alpha, 0.0, 2.0) + normal(sigma, 0.0, 1.0) + u.sum(-1)

    return 3, log_density


def low_dim_gauss_mix(d):
    y = d["y"]

    def log_density(u: Tensor) -> Tensor:
        mu1, gap, s1, s2 = u[:, 0], u[:, 1].exp(), u[:, 2].exp(), u[:, 3].exp()
        mu2 = mu1 + gap
        log_theta, log_rest = logsigmoid(u[:, 4]), logsigmoid(-u[:, 4])
        left = log_theta.unsqueeze(-1) + normal(y, mu1.unsqueeze(-1), s1.unsqueeze(-1))
        right = log_rest.unsqueeze(-1) + normal(y, mu2.unsqueeze(-1), s2.unsqueeze(-1))
        fit = torch.logaddexp(left, right).sum(-1)
        prior = sum(normal(v, 0.0, 2.0) for v in (mu1, mu2, s1, s2)) + 4 * (log_theta + log_rest)
        return fit + prior + u[:, 1] + u[:, 2] + u[:, 3] + log_theta + log_rest

    return 5, log_density


MODELS = {
    "arK-arK": ark,
    "eight_schools-eight_schools_centered": eight_schools_centered,
    "eight_schools-eight_schools_noncentered": eight_schools_noncentered,
    "garch-garch11": garch11,
    "gp_pois_regr-gp_regr": gp_regr,
    "kidiq-kidscore_interaction": kidscore_interaction,
    "kidiq-kidscore_momiq": kidscore_momiq,
    "low_dim_gauss_mix-low_dim_gauss_mix": low_dim_gauss_mix,
    "mesquite-logmesquite": logmesquite,
    "mesquite-mesquite": mesquite,
    "nes1980-nes": nes,
    "sblrc-blr": blr,
}


class Posterior:
    """A target of structvi, with the reference's mean and covariance on the same scale."""

    def __init__(self, name: str, folder: Path):
        data = json.loads((folder / name / "data.json").read_text())
        self.name = name
        tensors = {key: torch.tensor(value, dtype=torch.float64) for key, value in data.items()}
        self.P, self.log_density = MODELS[name](tensors)
        self.space = vi.Parameters({"u": torch.zeros(self.P, dtype=torch.float64)})
        reference = json.loads((folder / name / "summary.json").read_text())
        self.mean = torch.tensor(reference["unconstrained_mean"], dtype=torch.float64)
        self.sd = torch.tensor(np.array(reference["unconstrained_cov"]).diagonal().copy()).sqrt()

    def log_joint(self, theta: Tensor, batch=None) -> Tensor:
        return self.log_density(theta)
