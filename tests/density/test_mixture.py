"""`vi.fit_density` of a mixture: parts at all modes, as many as pay, and a verdict that says what is missing."""

from math import log, pi

import pytest
import torch
from torch import nn
from torch.distributions import Independent, StudentT

import structvi as vi


def space(P=2):
    return vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)})


class Normals:
    """Σ w_c N(mean_c, sd_c²): its evidence is one."""

    def __init__(self, means, sds, weights):
        self.means, self.sds = (torch.as_tensor(x, dtype=torch.float64) for x in (means, sds))
        self.weights = torch.as_tensor(weights, dtype=torch.float64)
        self.space = space(self.means.shape[-1])

    def log_joint(self, theta, batch=None):
        P = self.means.shape[-1]
        squares = (theta.unsqueeze(1) - self.means).square().sum(-1) / self.sds.square()
        return (self.weights.log() - squares / 2 - P * self.sds.log() - P / 2 * log(2 * pi)).logsumexp(-1)


class Unlabelled:
    """The posterior of the two means of a mixture of normals: the same under exchange."""

    space = space()
    data = torch.tensor([-2.4, -1.9, -1.5, -2.2, 1.6, 2.1, 2.5, 1.8], dtype=torch.float64)

    def log_joint(self, theta, batch=None):
        each = (-(self.data.view(-1, 1, 1) - theta).square() / 2).logsumexp(-1)
        return each.sum(0) - theta.square().sum(-1) / 50


class Bent:
    """A banana, z₂ = ε + z₁²/2, normalised: no normal holds it."""

    space = space()

    def log_joint(self, theta, batch=None):
        first, second = theta.unbind(-1)
        return -first.square() / 2 - (second - first.square() / 2).square() / 2 - log(2 * pi)


def three():
    means = torch.zeros(3, 4, dtype=torch.float64)
    means[1, 0], means[2, 1] = 7.0, -6.0
    return Normals(means, [1.0, 0.5, 1.5], [0.5, 0.4, 0.1])


def shares(result):
    """Return the parts' proportions, in order."""
    assert isinstance(result.family, vi.Mixture)
    return sorted(result.family.proportions.tolist())


def fit(target, family, **options):
    return vi.fit_density(target, family, progress=False, **options)


@pytest.mark.parametrize("components", [3, "auto"])
def test_a_mixture_of_normals_is_found(components):
    result = fit(three(), vi.Mixture(vi.FullNormal(), components))
    assert result.converged
    assert abs(result.elbo.value) < 0.01
    assert shares(result) == pytest.approx([0.1, 0.4, 0.5], abs=0.01)
    assert len(result.modes) == 3
    assert result.family.space is not None
    assert all(part.space is result.family.space for part in result.family.parts())


def test_both_labellings_are_found():
    result = fit(Unlabelled(), vi.Mixture(vi.FullNormal(), 2))
    assert result.converged
    assert shares(result) == pytest.approx([0.5, 0.5], abs=0.02)
    first, second = (mode.theta for mode in result.modes)
    torch.testing.assert_close(first, second.flip(0), atol=1e-3, rtol=0)


def test_fewer_parts_than_modes_are_said():
    result = fit(three(), vi.Mixture(vi.FullNormal(), 2))
    assert result.status is vi.Status.MISSED_MODES
    assert "10 % of the mass" in result.verdict
    assert "3 that the searches saw" in result.verdict
    assert "raise components=" in result.verdict
    assert result.elbo.value == pytest.approx(log(0.9), abs=0.02)


def test_more_parts_than_modes_lose_nothing():
    result = fit(three(), vi.Mixture(vi.MeanField(), 4))
    assert abs(result.elbo.value) < 0.02
    assert result.notes == ["modes found: 3, for 4 parts; if there are more, no search reached them"]


def test_auto_adds_parts_while_they_gain():
    single = fit(Bent(), vi.FullNormal()).elbo.value
    result = fit(Bent(), vi.Mixture(vi.FullNormal(), "auto"))
    assert len(result.family.parts()) > 1
    assert result.elbo.value > single + 0.05
    assert len(result.modes) == 1


def test_auto_of_one_normal_is_one_part():
    result = fit(Normals([[1.0, 2.0]], [0.3], [1.0]), vi.Mixture(vi.FullNormal(), "auto"))
    assert len(result.family.parts()) == 1
    assert abs(result.elbo.value) < 1e-3


class Heavy(vi.Family):
    """A part that is no normal and makes its own draws."""

    def initialise(self, parameters, generator):
        self.loc = nn.Parameter(parameters.initial.clone())
        self.log_scale = nn.Parameter((0.1 * parameters.scale).log())

    def forward(self):
        return Independent(StudentT(5.0, self.loc, self.log_scale.exp()), 1)


def test_parts_of_ones_own():
    target = Normals([[-3.0, -3.0], [3.0, 3.0]], [1.0, 0.7], [0.7, 0.3])
    result = fit(target, vi.Mixture(Heavy(), 2))
    assert result.converged
    assert shares(result) == pytest.approx([0.3, 0.7], abs=0.03)


def test_auto_is_refused_where_no_modes_are_looked_for():
    with pytest.raises(ValueError, match=r'components="auto" takes as many parts as there are modes'):
        vi.Mixture(vi.MeanField(), "auto").bind(space())
    with pytest.raises(ValueError, match=r"components must be an integer ≥ 1, got 'many'"):
        vi.Mixture(vi.MeanField(), "many")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"components='auto' but the list has 2 parts"):
        vi.Mixture([vi.MeanField(), vi.FullNormal()], "auto")


def test_a_limit_too_low_to_look_for_modes_is_said():
    result = fit(three(), vi.Mixture(vi.MeanField(), 2), max_evaluations=20_000)
    assert result.modes == []
    assert any("no modes were looked for" in note for note in result.notes)
    with pytest.raises(
        ValueError, match=r'components="auto" needs modes, and modes are looked for with normal parts, P ≤ 512'
    ):
        fit(three(), vi.Mixture(vi.MeanField(), "auto"), max_evaluations=20_000)


@pytest.mark.parametrize("components", [2, "auto"])
def test_more_modes_than_a_limit_has_evaluations_for(components):
    """2¹² modes: the limit ends the searches and the fits, and what there is comes back."""
    space = vi.Parameters({"z": torch.zeros(12, dtype=torch.float64)})
    target = vi.LogDensity(lambda p: -4.0 * (p["z"].square() - 1).square().sum(), space)
    result = vi.fit_density(target, vi.Mixture(vi.FullNormal(), components), max_evaluations=36_000, progress=False)
    assert result.status is vi.Status.STOPPED
    assert result.evaluations <= 36_000
    assert result.elbo.value > -12.0  # each number at one of its two modes: about −0.9 nats


@pytest.mark.parametrize("seed", range(2))
def test_a_wide_part_without_a_maximum_that_draws_never_reach_has_a_part(seed):
    """0.83 N(0, 2.2²) + 0.17 N(c, 2.9²), |c| = 10, twenty numbers: draws of the first part know nothing of the second.

    Without it the ELBO is 0.19 nats below the evidence, which is one; 0.02 is what a mixture of normals must reach.
    """
    centres = torch.stack([torch.zeros(20), torch.full((20,), 10 / 20**0.5)])
    target = Normals(centres, [2.2, 2.9], [0.83, 0.17])
    result = vi.fit_density(target, vi.Mixture(vi.FullNormal(), components="auto"), seed=seed, progress=False)
    assert result.converged
    assert len(result.family.parts()) == 2
    assert result.elbo.value > -0.02


def test_a_part_around_another_has_no_mode_and_is_found():
    """½ N(0, 1) + ½ N(0, 3²) in five numbers: one mode, and what is left is a shell. One normal is 0.5 nats short."""
    target = Normals(torch.zeros(2, 5), [1.0, 3.0], [0.5, 0.5])
    result = vi.fit_density(target, vi.Mixture(vi.FullNormal(), components="auto"), progress=False)
    assert result.converged
    assert result.elbo.value > -0.02


def test_a_mode_with_heavy_tails_that_has_a_part_is_not_missed():
    """Two Student-t modes, six degrees of freedom, ten numbers: at the modes p is over seven times a normal's."""
    P, at = 10, torch.full((10,), 3.0, dtype=torch.float64)

    def log_density(p):
        each = [-0.5 * (6 + P) * torch.log1p((p["z"] - c).square().sum() / 6) for c in (at, -at)]
        return torch.stack(each).logsumexp(0)

    result = vi.fit_density(vi.LogDensity(log_density, space(P)), vi.Mixture(vi.FullNormal(), 2), progress=False)
    assert len(result.modes) == 2
    assert result.converged, result.verdict


def test_the_mode_of_a_skewed_posterior_is_its_parts():
    """A logistic regression of twenty columns has one mode, two standard deviations from the mean of its normal."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 20, generator=generator, dtype=torch.float64)
    y = (torch.rand(60, generator=generator) < (2 * x[:, 0]).sigmoid()).double()

    class Logistic:
        space = space(20)

        def log_joint(self, theta, batch=None):
            logits = theta @ x.mT
            return logits @ y - torch.nn.functional.softplus(logits).sum(-1) - theta.square().sum(-1) / 8

    result = vi.fit_density(Logistic(), vi.Mixture(vi.FullNormal(), 1), progress=False)
    assert len(result.modes) == 1
    assert result.converged, result.verdict
