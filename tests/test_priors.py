"""Priors: values and gradients against torch's distributions, in float32 at many weights too."""

from math import log, pi

import pytest
import torch
from torch.distributions import Normal

from structvi import NormalPrior, Parameters


@pytest.mark.parametrize("scale", [1.0, 0.25, 3])
def test_normal_equals_the_normal_density(scale):
    space = Parameters({"a": torch.zeros(2, 3).double(), "b": torch.zeros(4).double()})
    theta = torch.randn(5, 10, dtype=torch.float64, requires_grad=True)
    value = NormalPrior(scale)(space, theta)
    zero = torch.zeros((), dtype=torch.float64)  # a number would make a float32 normal
    torch.testing.assert_close(value, Normal(zero, zero + scale).log_prob(theta).sum(-1), rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(value.sum(), theta)
    torch.testing.assert_close(gradient, -theta / scale**2, rtol=1e-12, atol=1e-12)


def test_normal_keeps_float32_and_is_exact_over_a_million_weights():
    space = Parameters({"z": torch.zeros(1_000_000)})
    theta = torch.full((1, 1_000_000), 0.1)
    value = NormalPrior(1.0)(space, theta)
    assert value.dtype == torch.float32
    exact = -1_000_000 * (0.5 * float(theta[0, 0]) ** 2 + 0.5 * log(2 * pi))
    assert value.item() == pytest.approx(exact, rel=1e-6)  # summed naively in float32 it is off by 1e-4 and more


def test_repr():
    assert "2.0" in repr(NormalPrior(2.0))
