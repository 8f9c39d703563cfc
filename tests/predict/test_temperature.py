"""The temperature of held-out cases: against a fine search, and cross-fitted against a loop over folds."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from structvi.predict.temperature import (
    GRID,
    ONE,
    cross_fitted_losses,
    fit_temperature,
    losses_at,
    temperature_losses,
)


def cases(true: float, n: int = 2000):
    generator = torch.Generator().manual_seed(int(10 * true))
    logits = 2 * torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return logits, torch.multinomial((logits / true).softmax(-1), 1, generator=generator).squeeze(-1)


@pytest.mark.parametrize("true", [0.3, 0.6, 1.0, 2.0, 5.0])
def test_the_temperature_is_the_maximum_of_the_likelihood(true):
    logits, t = cases(true)
    found = fit_temperature(losses := temperature_losses(logits.log_softmax(-1), t))
    log_t = torch.tensor(found, dtype=torch.float64).log().requires_grad_()
    loss = cross_entropy(logits / log_t.exp(), t)
    (slope,) = torch.autograd.grad(loss, log_t, create_graph=True)
    (bend,) = torch.autograd.grad(slope, log_t)
    assert abs(slope / bend) < 0.002  # Newton's step to the optimum, relative in T
    assert losses_at(losses, found).mean() == pytest.approx(loss.item(), abs=1e-5)


def test_a_table_holds_every_temperature():
    logits, t = cases(2.0, 50)
    losses = temperature_losses(logits.log_softmax(-1), t)
    for place in (0, ONE, 100):
        expected = cross_entropy(logits / GRID[place].exp(), t, reduction="none")
        assert torch.allclose(losses[:, place], expected)
        assert torch.allclose(losses_at(losses, GRID[place].exp().item()), expected)


def test_no_case_is_judged_by_a_temperature_that_saw_it():
    logits, t = cases(2.0, 43)
    losses = temperature_losses(logits.log_softmax(-1), t)
    found = cross_fitted_losses(losses, folds=4)
    for i in range(43):
        others = torch.tensor([j for j in range(43) if j % 4 != i % 4])
        assert found[i] == pytest.approx(losses_at(losses[i : i + 1], fit_temperature(losses[others])).item())
    assert found.mean() > losses_at(losses, fit_temperature(losses)).mean()


def test_data_that_set_no_bound_end_at_the_bound():
    log_p = torch.tensor([[0.9, 0.1]]).log().expand(20, 2)
    assert fit_temperature(temperature_losses(log_p, torch.zeros(20))) == pytest.approx(GRID[0].exp().item(), rel=0.05)
    assert fit_temperature(temperature_losses(log_p, torch.ones(20))) == pytest.approx(GRID[-1].exp().item(), rel=0.05)
