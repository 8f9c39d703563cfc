"""Simulation-based calibration on a conjugate Gaussian: the exact posterior passes, what is wrong is caught."""

import pytest
import torch

import structvi as vi
from structvi.diagnostics import sbc


def simulate(generator):
    """θ ~ N(0, I_2), three observations t ~ N(θ, 1): the posterior is N(Σt/4, ¼)."""
    theta = torch.randn(2, generator=generator)
    return theta, theta + torch.randn(3, 2, generator=generator)


def method(bias=0.0, variance=1.0):
    """The exact posterior's draws, moved by `bias` standard deviations, with its variance times `variance`."""
    generator = torch.Generator().manual_seed(1)

    def fit(t):
        return t.sum(0) / 4 + 0.5 * (bias + variance**0.5 * torch.randn(99, 2, generator=generator))

    return fit


def test_the_exact_posterior_passes():
    result = sbc(simulate, method(), replications=300)
    assert result.ranks.shape == (300, 2)
    assert result.names == ("theta[0]", "theta[1]")
    assert result.passed
    assert result.verdict.startswith("no miscalibration seen in 300 replications")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"variance": 0.5}, "too narrow"),
        ({"variance": 2.0}, "too wide"),
        ({"bias": 0.5}, "too high"),
        ({"bias": -0.5}, "too low"),
    ],
)
def test_a_method_broken_on_purpose_is_caught(wrong, words):
    result = sbc(simulate, method(**wrong), replications=300)
    assert not result.passed
    assert result.verdict.startswith("not calibrated: theta[0] is " + words)


def test_p_values_of_a_right_method_are_not_too_small():
    # of 60 p-values with at most a chance p of being below p, at 5 % at most 3 ± 1.7 are: 9 is beyond three and a half
    def many(generator):
        theta = torch.randn(60, generator=generator)
        return theta, theta + torch.randn(60, generator=generator)

    exact = torch.Generator().manual_seed(2)
    result = sbc(many, lambda t: t / 2 + 0.5**0.5 * torch.randn(99, 60, generator=exact), replications=100)
    assert (result.p_values < 0.05).sum() <= 8


def test_named_tensors_families_and_densities_are_drawn_from():
    def named(generator):
        theta, t = simulate(generator)
        return {"b": theta[1:], "a": theta[:1]}, t  # in another order than the family's

    def fit(t):
        q = vi.MeanField().bind(vi.Parameters({"a": t[0, :1], "b": t[0, 1:]}))
        with torch.no_grad():
            q.mean.copy_(t.sum(0) / 4)
            q.log_scale.fill_(0.5).log_()
        return q

    result = sbc(named, fit, replications=100)
    assert result.names == ("b", "a")
    assert result.passed
    flat = sbc(simulate, lambda t: fit(t)(), replications=100)
    assert torch.equal(result.ranks.flip(-1), flat.ranks)


def test_equal_draws_fall_to_either_side():
    def coin(generator):
        theta = torch.randint(2, (1,), generator=generator).double()
        return theta, None

    prior = torch.Generator().manual_seed(1)
    assert sbc(coin, lambda _: torch.randint(2, (99, 1), generator=prior), replications=300).passed


def test_the_plot_shows_the_ranks_and_their_band():
    result = sbc(simulate, method(variance=0.5), replications=200)
    ax = result.plot("theta[1]")
    u = torch.arange(1, 100, dtype=torch.float64) / 100
    expected = torch.stack([(result.ranks[:, 1] < i).double().mean() for i in range(1, 100)]) - u
    torch.testing.assert_close(torch.as_tensor(ax.lines[0].get_ydata()), expected, atol=1e-12, rtol=0)
    band = ax.collections[0].get_paths()[0].vertices
    at_half = band[abs(band[:, 0] - 0.5) < 1e-9, 1].max()
    # the largest deviation of 99 correlated points is, 95 times of 100, between 2 and 4 standard deviations
    assert 2 < at_half / (0.25 / 200) ** 0.5 < 4
    width = at_half * 2 * (u * (1 - u)).sqrt()
    assert (expected.abs() > width).any()  # it leaves the band


def test_draws_that_do_not_fit_are_said():
    with pytest.raises(ValueError, match=r"expected 99 draws of 2 numbers from fit, got \(50, 2\)"):
        sbc(simulate, lambda t: torch.zeros(50, 2))
    with pytest.raises(TypeError, match="fit must return a posterior"):
        sbc(simulate, lambda t: "draws")
    with pytest.raises(ValueError, match="θ has the tensors"):
        sbc(lambda g: ({"a": torch.zeros(1)}, None), lambda t: {"b": torch.zeros(99, 1)})


def test_a_family_is_ranked_by_values():
    """σ is above zero where its logarithm is 0 or less: the ranks of values are not those of free numbers."""
    space = vi.Parameters({"sigma": vi.constraints.positive(1.0)})
    q = vi.MeanField(initial_scale=1 / 3).bind(space)  # log σ ~ N(0, 1)

    def simulate(generator):
        return {"sigma": torch.randn((), generator=generator, dtype=torch.float64).exp()}, None

    assert sbc(simulate, lambda _: q, replications=100).passed


def test_all_fits_together():
    """θ ~ N(0, 1), t = θx + noise: mean field over one weight has the exact posterior, fitted as one computation."""
    x = torch.linspace(-1, 1, 8).unsqueeze(-1)

    def simulated(generator):
        theta = torch.randn(1, 1, generator=generator)
        return {"weight": theta}, x @ theta + 0.5 * torch.randn(8, 1, generator=generator)

    def fit_all(every):
        posteriors = []
        for _ in every:
            net = torch.nn.Linear(1, 1, bias=False)
            likelihood = vi.likelihoods.Gaussian(0.5)
            posteriors.append(
                vi.variationalize(net, likelihood, vi.MeanField(), vi.priors.NormalPrior(1.0), num_data=8)
            )
        data = [[(x, t)] for t in every]
        vi.fit_many(posteriors, data, steps=150, lr=0.1, progress=False)
        return posteriors

    result = sbc(simulated, fit_all, replications=40, together=True)
    assert result.names == ("weight",)
    assert result.passed
    with pytest.raises(ValueError, match="a posterior for each of the 40"):
        sbc(simulated, lambda every: every[:3], replications=40, together=True)
