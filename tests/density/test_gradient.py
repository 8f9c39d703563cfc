"""Log densities without a gradient are refused at the first draws, and so are wrong shapes."""

import numpy as np
import pytest
import torch

import structvi as vi

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
    "a numpy number": (lambda z: -np.square(z.detach().numpy()).sum(), "it returns a float64"),
    "item": (lambda z: -z.square().sum().item(), "it returns a float"),
    "integers": (lambda z: (z > 0).sum(), "it returns a tensor of torch.int64"),
    "constant": (lambda z: torch.zeros((), dtype=torch.float64), "does not follow θ"),
}


@pytest.mark.parametrize("family", [vi.FullNormal(), vi.Mixture(vi.MeanField(), 2)], ids=["full", "mixture"])
@pytest.mark.parametrize("name", NO_GRADIENT)
def test_no_gradient(name, family):
    function, why = NO_GRADIENT[name]
    target = vi.LogDensity(lambda p: function(p["z"]), SPACE)
    with pytest.raises(
        TypeError, match=rf"^the log density has no gradient: .*{why}; write it with operations of torch"
    ):
        vi.fit_density(target, family, progress=False)


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda theta: -theta.detach().square().sum(-1), TypeError, "has no gradient: .* does not follow θ"),
        (lambda theta: (theta > 0).sum(-1), TypeError, "has no gradient: it returns a tensor of torch.int64"),
        (lambda theta: 1.0, TypeError, "has no gradient: it returns a float"),
        (lambda theta: -theta.square(), ValueError, r"one value for each of 4 draws, \[4\], got \[4, 2\]; sum over"),
        (lambda theta: -theta.square().sum(), ValueError, r"one value for each of 4 draws, \[4\], got \[\]"),
        (lambda theta: -theta.square().sum(-1, keepdim=True), ValueError, r"got \[4, 1\]"),
    ],
)
def test_targets_of_ones_own(function, error, words):
    target = Own(function)
    with pytest.raises(error, match=words):
        vi.fit_density(target, vi.MeanField(), progress=False)
    assert target.calls == 1


def test_wrong_shapes_of_a_log_density():
    target = vi.LogDensity(lambda p: -p["z"].square(), SPACE)
    with pytest.raises(ValueError, match=r"must return a floating scalar for one draw, got \(2,\) .*sum over"):
        vi.fit_density(target, vi.MeanField(), progress=False)


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


def test_a_random_log_density_is_told():
    space = vi.Parameters({"z": torch.zeros(2, dtype=torch.float64)})
    generator = torch.Generator().manual_seed(0)

    class Noisy:
        """Monte Carlo inside: N(0, 1) and noise of a nat."""

        def __init__(self, noise):
            self.space, self.noise = space, noise

        def log_joint(self, theta, batch=None):
            return -0.5 * theta.square().sum(-1) + self.noise * torch.randn((), generator=generator)

    assert any("is random" in note for note in vi.fit_density(Noisy(1.0), vi.FullNormal(), progress=False).notes)
    assert vi.fit_density(Noisy(0.0), vi.FullNormal(), progress=False).notes == []


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
