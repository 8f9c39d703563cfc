"""Likelihoods: values and gradients against torch's distributions, over outputs of any trailing shape."""

import pytest
import torch
from torch.distributions import Normal

from structvi.likelihoods import Categorical, Gaussian


class TestKnownNoise:
    @pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 2, 3), (2, 1, 4, 4, 4)])
    @pytest.mark.parametrize("noise", [0.25, 3])
    def test_equals_the_normal_density(self, shape, noise):
        output = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        target = torch.randn(shape, dtype=torch.float64)
        value = Gaussian(noise)(output, target)
        expected = Normal(output, noise).log_prob(target)
        assert value.shape == shape
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
        (gradient,) = torch.autograd.grad(value.sum(), output)
        torch.testing.assert_close(gradient, (target - output) / noise**2, rtol=1e-12, atol=1e-12)

    def test_keeps_float32(self):
        assert Gaussian(0.1)(torch.zeros(3, 1), torch.zeros(3, 1)).dtype == torch.float32


class TestCategorical:
    @pytest.mark.parametrize("trailing", [(), (4,), (2, 3), (2, 2, 2)])
    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
    def test_equals_log_softmax_at_the_label(self, trailing, dtype):
        logits = torch.randn(5, 3, *trailing, dtype=torch.float64, requires_grad=True)
        labels = torch.randint(3, (5, *trailing))
        value = Categorical()(logits, labels.to(dtype))
        expected = torch.distributions.Categorical(logits=logits.movedim(1, -1)).log_prob(labels)
        assert value.shape == labels.shape
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        one_hot = torch.nn.functional.one_hot(labels, 3).movedim(-1, 1)
        torch.testing.assert_close(gradient, one_hot - logits.softmax(1), rtol=1e-12, atol=1e-12)

    def test_probabilities_of_all_labels_sum_to_one(self):
        logits = 10 * torch.randn(5, 4, dtype=torch.float64)
        total = sum(Categorical()(logits, torch.full((5,), label)).exp() for label in range(4))
        torch.testing.assert_close(total, torch.ones(5, dtype=torch.float64), rtol=1e-12, atol=1e-12)

    def test_under_vmap_over_logits(self):
        logits, labels = torch.randn(6, 5, 3), torch.tensor([0, 2, 1, 0, 2])
        mapped = torch.func.vmap(lambda y: Categorical()(y, labels))(logits)
        torch.testing.assert_close(mapped, torch.stack([Categorical()(y, labels) for y in logits]))
