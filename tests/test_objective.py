"""The objective: values of the three estimators, point masses, refusals. Unbiasedness is in families/test_laws."""

import pytest
import torch
from torch import nn

import structvi as vi

SPACE = vi.Parameters({"z": torch.zeros(3, dtype=torch.float64)})
PRECISION = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, 0.2], [0.0, 0.2, 3.0]], dtype=torch.float64)
TARGET = vi.LogDensity(lambda p: -0.5 * p["z"] @ PRECISION @ p["z"], SPACE)
LOG_EVIDENCE = 0.5 * (3 * torch.log(torch.tensor(2 * torch.pi, dtype=torch.float64)) - torch.logdet(PRECISION))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def exact_elbo(q):
    normal = torch.distributions.MultivariateNormal
    target = normal(torch.zeros(3, dtype=torch.float64), precision_matrix=PRECISION)
    return LOG_EVIDENCE - torch.distributions.kl_divergence(normal(q().mean, q().covariance()), target)


@pytest.mark.parametrize("estimator", ["path", "log_q", "entropy"])
@pytest.mark.parametrize("recipe", [vi.MeanField(), vi.LowRankPrecision(1), vi.FullNormal()])
def test_the_value_is_the_elbo_in_nats(recipe, estimator):
    """4000 groups, five standard errors over groups."""
    q = recipe.bind(SPACE, seeded())
    values = (
        vi.objective.elbo_terms(q, TARGET, estimator=vi.Estimator(estimator, groups=4000), generator=seeded())
        .objective()
        .detach()
    )
    error = values.std() / 4000**0.5
    assert abs(values.mean() - exact_elbo(q)) < 5 * error + 1e-9


def test_path_and_log_q_have_the_same_value_on_the_same_draws():
    q = vi.LowRankNormal(2).bind(SPACE, seeded())
    path, log_q = (
        vi.elbo(q, TARGET, estimator=vi.Estimator(e, groups=5), generator=seeded()) for e in ("path", "log_q")
    )
    torch.testing.assert_close(path, log_q, rtol=1e-12, atol=0)


@pytest.mark.parametrize("estimator", ["path", "log_q", "entropy"])
def test_a_point_mass_maximises_the_log_joint(estimator):
    q = vi.MAP().bind(vi.Parameters({"z": torch.ones(3, dtype=torch.float64)}))
    value = vi.elbo(q, TARGET, estimator=vi.Estimator(estimator))
    point = torch.ones(3, dtype=torch.float64)
    assert value.item() == pytest.approx((-0.5 * point @ PRECISION @ point).item())
    (gradient,) = torch.autograd.grad(value, q.point)
    torch.testing.assert_close(gradient, -PRECISION @ point)


def test_a_network_and_a_log_density_of_the_same_model_agree():
    torch.manual_seed(0)
    net = nn.Linear(2, 1).double()
    x, t = torch.randn(20, 2).double(), torch.randn(20, 1).double()
    model = vi.BayesianModel(net, vi.likelihoods.Gaussian(noise=0.5), vi.priors.NormalPrior(2.0), num_data=20)

    def log_joint(p):
        y = x @ p["weight"].mT + p["bias"]
        prior = sum(torch.distributions.Normal(0.0, 2.0).log_prob(v).sum() for v in p.values())
        return torch.distributions.Normal(y, 0.5).log_prob(t).sum() + prior

    density = vi.LogDensity(log_joint, model.space)
    q = vi.LowRankNormal(1).bind(model.space, seeded())
    torch.testing.assert_close(
        vi.elbo(q, model, (x, t), estimator=vi.Estimator(groups=4), generator=seeded()),
        vi.elbo(q, density, estimator=vi.Estimator(groups=4), generator=seeded()),
    )


class Counted(nn.Linear):
    rows = 0

    def forward(self, x):
        self.rows += len(x)
        return super().forward(x)


def test_draws_that_share_rows_cost_one_pass_and_give_the_same_elbo_and_gradient():
    """2000 pairs on a fixed batch of 7 rows: five standard errors of the difference, value and gradient."""
    torch.manual_seed(0)
    net = Counted(2, 1).double()
    batch = torch.randn(7, 2).double(), torch.randn(7, 1).double()
    model = vi.BayesianModel(net, vi.likelihoods.Gaussian(noise=0.5), vi.priors.NormalPrior(2.0), num_data=20)
    q = vi.LowRankNormal(1, initial_scale=0.5).bind(model.space, seeded())
    exact = vi.elbo(q, model, batch, estimator=vi.Estimator(groups=20_000), generator=seeded(1))
    expected = torch.autograd.grad(exact, list(q.parameters()))
    found = []
    for seed in range(2000):
        net.rows = 0
        value = vi.elbo(q, model, batch, estimator=vi.Estimator(share_rows=True), generator=seeded(seed))
        assert net.rows == 7
        found.append([value.detach().reshape(1), *(g.reshape(-1) for g in torch.autograd.grad(value, q.parameters()))])
    for each, known in zip(zip(*found, strict=True), [exact.detach(), *expected], strict=True):
        each = torch.stack(each)
        error = each.std(0) * (1 / 2000 + 1 / 20_000) ** 0.5  # both are means of draws
        assert ((each.mean(0) - known.reshape(-1)).abs() < 5 * error + 1e-12).all()


def test_rows_that_cannot_be_shared_are_refused():
    model = vi.BayesianModel(nn.Linear(2, 1), vi.likelihoods.Gaussian(0.5), vi.priors.NormalPrior(), num_data=20)
    q = vi.MeanField().bind(model.space)
    with pytest.raises(ValueError, match=r"batches of 2 rows or more"):
        vi.elbo(q, model, (torch.zeros(1, 2), torch.zeros(1, 1)), estimator=vi.Estimator(share_rows=True))
