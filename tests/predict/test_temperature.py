"""The temperature of held-out cases: the maximum of the likelihood, and cross-fitted against a loop over folds."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from structvi.predict.temperature import GRID, cross_fitted_losses, each_temperature, fit_temperature


def losses_of(true, n):
    generator = torch.Generator().manual_seed(int(10 * true))
    logits = 2 * torch.randn(n, 5, generator=generator, dtype=torch.float64)
    t = torch.multinomial((logits / true).softmax(-1), 1, generator=generator).squeeze(-1)
    return logits, t, torch.stack(list(each_temperature(logits.log_softmax(-1), t)), -1)


@pytest.mark.parametrize("true", [0.3, 1.0, 5.0])
def test_the_temperature_is_the_maximum_of_the_likelihood(true):
    logits, t, losses = losses_of(true, 2000)
    torch.testing.assert_close(losses[:, 70], cross_entropy(logits / GRID[70].exp(), t, reduction="none"))
    log_t = torch.tensor(fit_temperature(losses), dtype=torch.float64).log().requires_grad_()
    (slope,) = torch.autograd.grad(cross_entropy(logits / log_t.exp(), t), log_t, create_graph=True)
    (bend,) = torch.autograd.grad(slope, log_t)
    assert abs(slope / bend) < 0.002  # Newton's step to the optimum, relative in T


def test_no_case_is_judged_by_a_temperature_that_saw_it():
    *_, losses = losses_of(2.0, 43)
    found = cross_fitted_losses(losses)
    for i in range(43):
        others = torch.tensor([j for j in range(43) if j % 5 != i % 5])
        assert found[i] == losses[i, losses[others].sum(0).argmin()]


def test_data_that_set_no_bound_end_at_the_bound():
    log_p = torch.tensor([[0.9, 0.1]]).log().expand(20, 2)
    for label, end in ((torch.zeros(20), GRID[0]), (torch.ones(20), GRID[-1])):
        losses = torch.stack(list(each_temperature(log_p, label)), -1)
        assert fit_temperature(losses) == pytest.approx(end.exp().item(), rel=0.05)
