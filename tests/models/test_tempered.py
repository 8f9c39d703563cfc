"""Tempered targets and the cooling of `annealed`."""

import pytest
import torch

import structvi as vi


def target():
    return vi.LogDensity(lambda p: -0.5 * p["z"].square().sum(), vi.Parameters({"z": torch.zeros(2)}))


def test_the_log_joint_is_divided_by_the_temperature():
    theta = torch.randn(5, 2)
    torch.testing.assert_close(vi.Tempered(target(), 4.0).log_joint(theta), target().log_joint(theta) / 4)


def test_a_hot_standard_normal_has_variance_T():
    """The optimum of the ELBO of N(0, I)^(1/T) is N(0, T·I)."""
    hot, q = vi.Tempered(target(), 9.0), vi.MeanField().bind(target().space)
    with torch.no_grad():
        q.log_scale.fill_(torch.tensor(3.0).log())
    gradients = torch.autograd.grad(vi.elbo(q, hot, estimator=vi.Estimator(groups=4)), list(q.parameters()))
    assert max(g.abs().max().item() for g in gradients) < 1e-5


def test_batches_and_point_blocks_are_passed_on():
    net = torch.nn.Linear(3, 1)
    model = vi.BayesianModel(net, vi.likelihoods.Gaussian(noise=0.1), vi.priors.NormalPrior(1.0), num_data=8)
    batch = (torch.randn(4, 3), torch.randn(4, 1))
    q = vi.PerLayer({"weight": vi.MAP(), "bias": vi.MeanField()}).bind(model.space)
    draws = q().draw(2)
    cold = model.log_joint(draws.theta, batch, draws.fixed)
    theta = model.space.join(draws.theta, draws.fixed)
    torch.testing.assert_close(vi.Tempered(model, 2.0).log_joint(theta, batch), cold / 2)
    assert torch.isfinite(vi.elbo(q, vi.annealed(model, 0.1), batch))


def test_annealed_cools_in_the_first_half():
    temperatures = [vi.annealed(target(), progress).temperature for progress in (0.0, 0.25, 0.4)]
    assert temperatures == pytest.approx([11.0, 6.0, 3.0])
    one = target()
    assert vi.annealed(one, 0.5) is one
    assert vi.annealed(one, 1.0) is one
    assert vi.annealed(one, 0.0, hottest=1.0) is one


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vi.Tempered(target(), 0.0), "positive number, got 0.0"),
        (lambda: vi.Tempered(target(), "hot"), "positive number, got 'hot'"),
        (lambda: vi.annealed(target(), 1.5), "from 0 to 1, got 1.5"),
        (lambda: vi.annealed(target(), 0.0, hottest=0.5), "≥ 1, got 0.5"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
