"""`fit(mean="held")`: the covariance alone is fitted, and predictions lie around the network's own."""

import pytest
import torch
from test_validation import X, loader, trained

import structvi as vi

FAMILIES = [
    vi.MeanField(),
    vi.LowRankNormal(2),
    vi.LowRankPrecision(2),
    vi.FullNormal(),
    vi.PerLayer({"0.*": vi.MeanField(), "*": vi.LowRankNormal(1)}),
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: type(family).__name__)
def test_the_mean_stays_and_the_rest_learns(family):
    net = trained()
    bayes = vi.variationalize(net, vi.likelihoods.Categorical(), family, vi.priors.NormalPrior(1.0), linearise=True)
    before = bayes.family().variance.detach().clone()
    result = bayes.fit(loader(), epochs=8, mean="held", progress=False)
    assert torch.equal(bayes.family().mean.detach(), bayes.space.initial)
    assert not torch.allclose(bayes.family().variance.detach(), before)
    assert result.elbo.value > -1e5
    assert all(parameter.requires_grad for parameter in bayes.family.parameters())
    mean = bayes.predict(X, 4000, generator=torch.Generator().manual_seed(0)).function_mean
    spread = bayes.output_moments(X).covariance.diagonal(dim1=1, dim2=2)
    with torch.no_grad():
        assert bool(((mean - net(X)).abs() < 6 * (spread / 4000).sqrt() + 1e-5).all())


def test_the_optimum_is_the_fixed_point_of_the_curvature():
    """Of a linear model with known noise: 1/s² = Σ x²/σ² + 1/prior², whatever the mean."""
    torch.manual_seed(0)
    x, t = torch.randn(50, 3, dtype=torch.float64), torch.randn(50, 1, dtype=torch.float64)
    net = torch.nn.Linear(3, 1).double()
    bayes = vi.variationalize(
        net, vi.likelihoods.Gaussian(0.5), vi.MeanField(), vi.priors.NormalPrior(1.0), num_data=50, linearise=True
    )
    bayes.fit([(x, t)], steps=800, groups=4, mean="held", progress=False)
    expected = 1 / (torch.cat([x.square().sum(0), torch.tensor([50.0]).double()]) * 4 + 1)
    assert torch.allclose(bayes.family().variance.detach(), expected, rtol=0.03)  # where Adam ends


def test_scales_of_the_prior_are_those_of_a_free_mean():
    """Learned in a first half in which the mean is free, and fixed in the second."""
    net = trained()
    scales = []
    for options in ({"epochs": 30, "mean": "held"}, {"epochs": 15}):
        prior = vi.priors.NormalPrior({"0.*": 1.0, "*": 1.0}, learn=True)
        bayes = vi.variationalize(net, vi.likelihoods.Categorical(), vi.MeanField(), prior, linearise=True)
        result = bayes.fit(loader(), progress=False, **options)
        scales.append(prior.log_scale.detach().clone())
        assert prior.log_scale.requires_grad
        if "mean" in options:
            assert torch.equal(bayes.family().mean.detach(), bayes.space.initial)
            assert "learned in 15 epochs with a free mean, then held" in result.details
    assert torch.equal(*scales)
    assert not torch.equal(scales[0], torch.zeros(2))


def test_resume_asks_for_the_same(tmp_path):
    net = trained()

    def begun():
        return vi.variationalize(
            net, vi.likelihoods.Categorical(), vi.MeanField(), vi.priors.NormalPrior(1.0), linearise=True
        )

    begun().fit(loader(), steps=5, mean="held", checkpoint=tmp_path, progress=False)
    again = begun()
    again.fit(loader(), steps=9, mean="held", resume=tmp_path, progress=False)
    assert torch.equal(again.family().mean.detach(), again.space.initial)
    with pytest.raises(ValueError, match="mean: 'held' then, 'learned' now"):
        begun().fit(loader(), steps=5, resume=tmp_path, progress=False)


def test_families_without_a_normal_are_refused():
    bayes = vi.variationalize(trained(), vi.likelihoods.Categorical(), vi.MAP(), vi.priors.NormalPrior(1.0))
    with pytest.raises(TypeError, match='mean="held" is for normal families'):
        bayes.fit(loader(), steps=2, mean="held", progress=False)
