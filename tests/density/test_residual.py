"""log (p − Σ m N): the other parts alone, with their gradient."""

from math import log

import torch
from torch.distributions import MultivariateNormal

from structvi.density.peaks import Peak
from structvi.density.residual import Masses, residual


def normals():
    generator = torch.Generator().manual_seed(0)
    made = []
    for c in range(3):
        root = torch.randn(2, 2, generator=generator, dtype=torch.float64).tril(-1) + torch.eye(2) * (1 + c / 2)
        made.append(MultivariateNormal(3.0 * torch.randn(2, generator=generator, dtype=torch.float64), scale_tril=root))
    return made, torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()


def at(z):
    parts, weights = normals()
    z = z.detach().requires_grad_()
    value = torch.stack([w + part.log_prob(z) for w, part in zip(weights, parts, strict=True)]).logsumexp(0)
    (gradient,) = torch.autograd.grad(value.sum(), z)
    return value.detach(), gradient


def peak(index):
    parts, weights = normals()
    mean, root = parts[index].mean, parts[index].scale_tril
    return Peak(mean, (weights[index] + parts[index].log_prob(mean)).item(), root)


def test_masses_are_the_mixture():
    z = torch.randn(20, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    value, gradient, rounding = Masses([peak(c) for c in range(3)])(z)
    torch.testing.assert_close((value, gradient), at(z))
    assert ((value - at(z)[0]).abs() <= rounding).all()


def test_what_is_left_is_the_other_part():
    parts, weights = normals()
    z = parts[2].mean + torch.randn(20, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    value, gradient = residual(at, [peak(0), peak(1)])(z)
    torch.testing.assert_close(value, weights[2] + parts[2].log_prob(z), atol=1e-6, rtol=0)
    score = -torch.linalg.solve(parts[2].covariance_matrix, (z - parts[2].mean).mT).mT
    torch.testing.assert_close(gradient, score, atol=1e-5, rtol=0)


def test_nothing_is_left_of_what_is_known():
    z = torch.randn(20, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    value, gradient = residual(at, [peak(c) for c in range(3)], least=1e-9)(z)
    assert (value == -torch.inf).all()
    assert (gradient == 0).all()


def test_least_is_in_nats_over_the_known():
    parts, _ = normals()
    z = parts[0].mean.unsqueeze(0)
    over = (at(z)[0] - Masses([peak(0)])(z)[0]).item()
    assert 0 < over < log(2)
    assert residual(at, [peak(0)], least=2 * over)(z)[0].item() == -torch.inf
    assert residual(at, [peak(0)], least=over / 2)(z)[0].isfinite().all()
