"""Log densities without a gradient are refused at the first draws, and so are wrong shapes."""

import numpy as np
import pytest
import torch

import structvi as vi
from structvi.density.lowrank import LowRankMatrix
from structvi.density.targets import Counted, View

SPACE = vi.Parameters({"z": torch.zeros(2, dtype=torch.float64)})


class Own:
    """A target that is no `LogDensity`."""

    space = SPACE

    def __init__(self, function):
        self.function, self.calls = function, 0

    def log_joint(self, theta, batch=None):
        self.calls += 1
        return self.function(theta)


NO_GRADIENT = {
    "detached": (lambda z: -z.detach().square().sum(), "does not follow θ"),
    "numpy": (lambda z: torch.tensor(-np.square(z.numpy()).sum()), "it calls numpy"),
    "numpy, detached": (lambda z: torch.tensor(-np.square(z.detach().numpy()).sum()), "does not follow θ"),
    "constant": (lambda z: torch.zeros((), dtype=torch.float64), "does not follow θ"),
}


@pytest.mark.parametrize("name", NO_GRADIENT)
def test_no_gradient(name):
    function, why = NO_GRADIENT[name]
    target = vi.LogDensity(lambda p: function(p["z"]), SPACE)
    with pytest.raises(
        TypeError, match=rf"^the log density has no gradient: .*{why}; write it with operations of torch"
    ):
        vi.fit_density(target, vi.FullNormal(), progress=False)


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda theta: -theta.detach().square().sum(-1), TypeError, "has no gradient: .* does not follow θ"),
        (lambda theta: (theta > 0).sum(-1), TypeError, "has no gradient: it returns a tensor of torch.int64"),
        (lambda theta: 1.0, TypeError, "has no gradient: it returns a float"),
        (lambda theta: -theta.square(), TypeError, r"one value for each of 4 draws, \[4\], got \[4, 2\]; sum over"),
    ],
)
def test_targets_of_ones_own(function, error, words):
    target = Own(function)
    with pytest.raises(error, match=words):
        vi.fit_density(target, vi.MeanField(), progress=False)
    assert target.calls == 1


def test_errors_of_the_function_itself_come_through():
    target = vi.LogDensity(lambda p: p["z"].sum() @ p["z"], SPACE)
    with pytest.raises(RuntimeError, match="1D"):
        vi.fit_density(target, vi.MeanField(), progress=False)


def test_data_of_another_precision_are_told():
    design = torch.ones(3, 2)
    space = vi.Parameters({"b": torch.zeros(2), "s": vi.constraints.positive(1.0)})
    target = vi.LogDensity(lambda p: -(design @ p["b"]).square().sum() - p["s"], space)
    with pytest.raises(TypeError, match=r"mixes precisions: .* the parameters are torch.float64, give the data"):
        vi.fit_density(target, vi.MeanField(), progress=False)


class Masked:
    """Dropout: at zeros masks change nothing, and of eight masks one comes twice now and then."""

    space = vi.Parameters({"z": torch.zeros(3, dtype=torch.float64)})

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def log_joint(self, theta, batch=None):
        masked = theta * (torch.rand(theta.shape, generator=self.generator) > 0.5)
        return -0.5 * (masked - 1).square().sum(-1) - 0.5 * theta.square().sum(-1)


@pytest.mark.parametrize("seed", range(3))
def test_a_log_density_that_is_random_but_not_at_the_start_is_noted(seed):
    result = vi.fit_density(Masked(seed), vi.MeanField(), max_evaluations=3000, progress=False)
    assert any("is random" in note for note in result.notes)
    fixed = vi.LogDensity(lambda p: -0.5 * p["z"].square().sum(), SPACE)
    assert vi.fit_density(fixed, vi.MeanField(), progress=False).notes == []


def gamma(z):
    return torch.distributions.Gamma(2.0, 1.0).log_prob(z).sum()


def not_positive(z):
    matrix = torch.stack([torch.stack([z[0], z[1]]), torch.stack([z[1], torch.ones_like(z[0])])])
    return -0.5 * z.square().sum() + torch.linalg.cholesky(matrix).diagonal().log().sum()


@pytest.mark.parametrize("function", [gamma, not_positive])
def test_points_at_which_a_log_density_raises_have_no_density_and_are_counted(function):
    """An argument check of torch.distributions, or a matrix that is not positive: such a fit ended with a traceback."""
    space = vi.Parameters({"z": torch.tensor([2.0, 0.5], dtype=torch.float64)})
    target = vi.LogDensity(lambda p: function(p["z"]), space)
    result = vi.fit_density(target, vi.MeanField(), max_evaluations=1400, progress=False)
    assert result.refused > 0
    assert any(f"raised an error at {result.refused} points" in note for note in result.notes)
    counted = Counted(target)
    theta = torch.tensor([[2.0, 0.5], [-1.0, -0.5], [1.0, 0.3]], dtype=torch.float64)
    values = counted.log_joint(theta)
    assert values.isfinite().tolist() == [True, False, True]
    assert (values[1].item(), counted.refused) == (-torch.inf, 1)


def test_what_raises_everywhere_is_raised():
    target = vi.LogDensity(lambda p: gamma(p["z"] - 1e9), SPACE)
    with pytest.raises(ValueError, match="to be within the support"):
        vi.fit_density(target, vi.MeanField(), progress=False)


@pytest.mark.parametrize("at_call", [1, 3])
def test_a_lack_of_memory_is_no_zero_density(at_call):
    """It was bisected into 16,383 calls, each of which counted as −∞ without a word."""
    target = Own(lambda theta: -theta.square().sum(-1))

    def log_joint(theta, batch=None):
        target.calls += 1
        if target.calls >= at_call:
            raise torch.OutOfMemoryError("out of memory")
        return target.function(theta)

    target.log_joint = log_joint
    with pytest.raises(torch.OutOfMemoryError):
        vi.fit_density(target, vi.FullNormal(), progress=False)
    assert target.calls == at_call


@pytest.mark.parametrize("kind", ["dense", "diagonal", "low rank"])
def test_a_view_is_the_target_in_other_coordinates(kind):
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    centre, z = root[0], torch.randn(5, 3, generator=generator, dtype=torch.float64)
    made = {
        "dense": root,
        "diagonal": root[1].abs(),
        "low rank": LowRankMatrix.of(root[1].abs(), root[:, :1], torch.ones(1, 1, dtype=torch.float64), 1),
    }[kind]
    space = vi.Parameters({"z": torch.zeros(3, dtype=torch.float64)})
    exact = torch.distributions.MultivariateNormal(centre, root @ root.mT + torch.eye(3))
    view = View(vi.LogDensity(lambda p: exact.log_prob(p["z"]), space), centre, made)
    theta = view.theta(z)
    torch.testing.assert_close(view.z(theta), z)
    covariance = view.steps(torch.eye(3, dtype=torch.float64)).mT
    covariance = covariance @ covariance.mT
    torch.testing.assert_close(view.scale, covariance.diagonal().sqrt())
    z = z.requires_grad_()
    log_q = torch.distributions.MultivariateNormal(torch.zeros(3).double(), torch.eye(3).double()).log_prob(z)
    log_q_theta = torch.distributions.MultivariateNormal(centre, covariance).log_prob(view.theta(z))
    # log p − log q does not depend on coordinates
    torch.testing.assert_close(view.log_joint(z) - log_q, exact.log_prob(view.theta(z)) - log_q_theta)
    value, gradient = view(z.detach())
    (slope,) = torch.autograd.grad(exact.log_prob(view.theta(z)).sum(), z)
    torch.testing.assert_close(gradient, slope)
    torch.testing.assert_close(value, view.values(z.detach()))
