"""A log density in units of its own curvature."""

import torch

import structvi as vi
from structvi.density.units import View, curved, moments, place


def setup(P=4):
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(P, P, generator=generator, dtype=torch.float64)
    covariance = root @ root.mT + 0.1 * torch.eye(P, dtype=torch.float64)
    precision = torch.linalg.inv(covariance)
    space = vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)})
    return vi.LogDensity(lambda p: -0.5 * p["z"] @ precision @ p["z"], space), covariance


def test_units_are_those_of_the_log_density_whatever_the_fit():
    target, covariance = setup()
    view = curved(View(target, target.space.initial, torch.full((4,), 0.3, dtype=torch.float64)))[0]
    torch.testing.assert_close(view.root @ view.root.mT, covariance)
    torch.testing.assert_close(view.scale, covariance.diagonal().sqrt())
    # one standard deviation along Σe_i: half a nat, for every number
    unit = view.normals(torch.arange(4))
    torch.testing.assert_close(view.values(view.theta(unit)), torch.full((4,), -0.5, dtype=torch.float64))
    step = view.theta(unit[:1])[0] - view.centre
    torch.testing.assert_close(view.z(step), unit[0])


def test_planes_keep_their_number_and_are_standard():
    target, covariance = setup()
    view = curved(View(target, target.space.initial, torch.ones(4, dtype=torch.float64)))[0]
    steps = view.plane(1)
    assert (steps[1] == 0).all()
    others = [0, 2, 3]
    conditional = torch.linalg.inv(torch.linalg.inv(covariance)[others][:, others])
    torch.testing.assert_close((steps @ steps.mT)[others][:, others], conditional)


def test_moments_of_normals_are_exact():
    target, _ = setup()
    q = vi.fit_density(target, vi.FullNormal(), progress=False).family
    mean, root = moments(q, target.space)
    torch.testing.assert_close(mean, q().mean)
    torch.testing.assert_close(root @ root.mT, q().covariance())


def test_of_a_mixture_the_highest_part():
    space = vi.Parameters({"z": torch.zeros(2, dtype=torch.float64)})
    target = vi.LogDensity(lambda p: -0.5 * (p["z"] - 3).square().sum(), space)
    q = vi.Mixture(vi.MeanField(), 2).bind(space, torch.Generator().manual_seed(0))
    high, low = [part for part in q.families() if isinstance(part, vi.MeanField)]
    with torch.no_grad():
        high.mean.fill_(3.0)
        low.mean.fill_(-5.0)
    torch.testing.assert_close(place(q, target)[0], torch.full((2,), 3.0, dtype=torch.float64))


def test_errors_and_what_is_no_number_are_seen():
    space = vi.Parameters({"z": torch.zeros(1, dtype=torch.float64)})
    target = vi.LogDensity(lambda p: torch.distributions.Gamma(2.0, 1.0).log_prob(p["z"]).sum(), space)
    view = View(target, torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    values = view.values(torch.tensor([[1.0], [-1.0]], dtype=torch.float64))
    assert values[0].isfinite()
    assert values[1] == -torch.inf
    assert curved(View(target, torch.full((1,), torch.nan, dtype=torch.float64), view.root)) == []
