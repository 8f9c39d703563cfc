"""Soap and NaturalGradient: their formulas in float64, their optima, exact resume, and `Rotated` families."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.families.basis import Basis
from structvi.optim.coordinates import Coordinates, eigenvectors, iterated

SHAPES = {"a": (3, 2), "b": (4,), "conv": (5, 2, 3, 3), "c": (3, 2)}
N = 10


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def orthogonal(n, seed, dtype=torch.float64):
    return torch.linalg.qr(torch.randn(n, n, generator=generator(seed), dtype=dtype)).Q


def bare(family, shapes=SHAPES):
    """A posterior over tensors of zeros, which no test calls."""
    net = nn.ParameterDict({name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()})
    return vi.variationalize(net, vi.likelihoods.Gaussian(noise=1.0), family, num_data=N)


def some_basis():
    """A basis, and the same as an optimizer's state."""
    space = bare(vi.MAP()).space
    basis, coordinates = Basis(space), Coordinates(space)
    basis.set({axis.name: orthogonal(axis.size, seed) for seed, axis in enumerate(basis.axes())})
    return basis, coordinates, {f"basis{axis.name}": getattr(basis, axis.name).clone() for axis in basis.axes()}


# ------------------------------------------------------------------------------------------------------- coordinates


def test_subspace_iteration_finds_eigenvectors():
    Q, eye = orthogonal(6, 1), torch.eye(6).double()
    moments = Q @ torch.diag(torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5, 0.0], dtype=torch.float64)) @ Q.mT
    torch.testing.assert_close((eigenvectors(moments).mT @ Q).abs(), eye)
    found = eye
    for _ in range(60):  # errors halve with every step: 2⁻⁶⁰
        found = iterated(moments, found)
    torch.testing.assert_close(found.mT @ found, eye)
    torch.testing.assert_close((found.mT @ Q).abs(), eye, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("size", "rank"), [(6, 0), (6, 2), (64, 3)])
def test_moments_of_low_rank_leave_a_basis_orthonormal(size, rank):
    """In float32, from the identity and from eigenvectors of other moments, with one large eigenvalue."""
    eye = torch.eye(size)
    columns = torch.randn(size, rank, generator=generator())
    columns[:, :1] *= 100
    for start in (eye, orthogonal(size, 3, torch.float32)):
        found = start
        for _ in range(5):
            found = iterated(columns @ columns.mT, found)
            torch.testing.assert_close(found.mT @ found, eye, rtol=0, atol=1e-5)
        if rank:
            first = (columns[:, 0] / columns[:, 0].norm()) @ found[:, 0]
            assert first.abs() > 0.99


# ------------------------------------------------------------------------------------------------------------- Soap


def test_soap_is_adam_in_its_coordinates():
    """With a fixed basis Q: the steps of torch's Adam on ξ, θ = Qξ."""
    bayes = bare(vi.MAP())
    ours = vi.optim.Soap(bayes, lr=0.1, betas=(0.9, 0.99), refresh=1000)
    basis, coordinates, state = some_basis()
    point, xi = bayes.family.point, nn.Parameter(torch.zeros(106, dtype=torch.float64))
    adam, noise = torch.optim.Adam([xi], lr=0.1, betas=(0.9, 0.99)), generator(3)
    zeros = {key: torch.zeros(106, dtype=torch.float64) for key in ("exp_avg", "exp_avg_sq")}
    ours.state[point] = {"step": torch.zeros(()), **zeros, **coordinates.initial(point), **state}
    for _ in range(4):
        gradient = torch.randn(106, generator=noise, dtype=torch.float64)
        point.grad, xi.grad = gradient.clone(), basis(gradient, back=True)
        ours.step()
        adam.step()
        assert torch.equal(point.grad, gradient)
    torch.testing.assert_close(point.detach(), basis(xi.detach()))


def test_a_refresh_changes_coordinates_and_not_the_momentum():
    """The average of gradients, in θ, follows its recursion through a refresh, and the basis diagonalises moments."""
    bayes, noise = bare(vi.MAP()), generator(3)
    ours, point = vi.optim.Soap(bayes, refresh=5, betas=(0.9, 0.9)), bayes.family.point
    expected = torch.zeros(106, dtype=torch.float64)
    for _ in range(5):
        point.grad = torch.randn(106, generator=noise, dtype=torch.float64)
        expected.lerp_(point.grad, 0.1)
        ours.step()
    state, coordinates = ours.state[point], ours.coordinates[point]
    torch.testing.assert_close(coordinates.turned(state["exp_avg"], state, back=False), expected)
    for axis in coordinates.axes():
        Q = state[f"basis{axis.name}"]
        inside = Q.mT @ state[f"gram{axis.name}"] @ Q
        torch.testing.assert_close(inside, torch.diag_embed(inside.diagonal(dim1=-2, dim2=-1)))
        assert not torch.allclose(Q.abs(), torch.eye(axis.size, dtype=Q.dtype))


# -------------------------------------------------------------------------------------------------- natural gradients


def natural(**options):
    bayes = bare(vi.MeanField(), {"w": (3,)})
    with torch.no_grad():
        bayes.family.mean.fill_(1.0)
    return bayes.family, vi.optim.NaturalGradient(bayes, **options)


def test_two_natural_steps_by_hand():
    q, optimizer = natural(lr=0.3, scale_lr=0.2, beta=0.5)
    mean, log_scale = q.mean.detach().clone(), q.log_scale.detach().clone()
    slopes = torch.tensor([[0.1, -0.2, 0.3], [0.2, 0.1, -0.4]], dtype=torch.float64)
    spreads = torch.tensor([[0.5, -0.09, 0.01], [-0.05, 0.2, 0.3]], dtype=torch.float64)
    for slope, spread, average in zip(slopes, spreads, (slopes[0], (slopes[0] / 2 + slopes[1]) / 1.5), strict=True):
        q.mean.grad, q.log_scale.grad = slope.clone(), spread.clone()
        optimizer.step()
        variance, u = (2 * log_scale).exp(), 0.2 * N * spread
        mean = mean - 0.3 * N * variance * average
        log_scale = -0.5 * ((1 + u + u**2 / 2) * (-2 * log_scale).exp()).log()
        torch.testing.assert_close(q.mean.detach(), mean)
        torch.testing.assert_close(q.log_scale.detach(), log_scale)


def test_the_fixed_point_of_natural_steps_is_the_posterior():
    """L = Σ Λ (m² + s²)/2 − (1/N) log s: m = 0 and s² = 1/(NΛ), from scales far too wide and far too narrow."""
    (q, optimizer), precision = natural(scale_lr=0.2, beta=0.5), torch.tensor([0.01, 1.0, 40.0], dtype=torch.float64)
    for _ in range(300):
        optimizer.zero_grad()
        variance = (2 * q.log_scale).exp()
        (0.5 * (precision * (q.mean.square() + variance)).sum() - q.log_scale.sum() / N).backward()
        optimizer.step()
    torch.testing.assert_close((2 * q.log_scale).exp().detach(), 1 / (N * precision))
    torch.testing.assert_close(q.mean.detach(), torch.zeros(3, dtype=torch.float64), atol=1e-8, rtol=0)


# ------------------------------------------------------------------------------------------------------------- in fits


FAMILIES = {
    "rotated": lambda: vi.Rotated(vi.MeanField()),
    "rotated precision": lambda: vi.Rotated(vi.LowRankPrecision(2)),
    "mixture": lambda: vi.Mixture(vi.MeanField(), 2),
    "blocks": lambda: vi.PerLayer({"0.*": vi.MeanField(), "2.*": vi.MAP()}),
}


def soap(bayes, refresh=3):
    return vi.optim.Soap(bayes, 0.02, refresh=refresh, turn=2)


def newton(bayes):
    return vi.optim.NaturalGradient(bayes, 0.3, 0.2, beta=0.5, refresh=2)


def data():
    x = torch.randn(40, 4, generator=generator(1))
    return DataLoader(TensorDataset(x, (x @ torch.randn(4, 1, generator=generator(2))).tanh()), 10, shuffle=True)


def posterior(family):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    prior = vi.priors.NormalPrior(1.0)
    return vi.variationalize(net, vi.likelihoods.Gaussian(noise=0.1), family, prior, generator=generator())


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*((name, soap) for name in FAMILIES), ("rotated", newton), ("mixture", newton)],
)
def test_a_resumed_fit_has_the_same_bits(name, optimizer, tmp_path):
    """Cut off between two refreshes, and after a `Rotated` family took the coordinates."""
    options = {"steps": 24, "progress": False}
    whole, cut, again = (posterior(FAMILIES[name]()) for _ in range(3))
    whole.fit(data(), optimizer=optimizer(whole), **options)

    def at_eleven(history):
        if len(history) == 11:
            raise KeyboardInterrupt

    cut.fit(data(), optimizer=optimizer(cut), **options, checkpoint=vi.Checkpoint(tmp_path), callback=at_eleven)
    again.fit(data(), optimizer=optimizer(again), **options, checkpoint=vi.Checkpoint(tmp_path, resume=True))
    for key, value in whole.learned().items():
        assert torch.equal(value, again.learned()[key]), key


def test_a_rotated_family_takes_the_coordinates_until_iterates_are_averaged():
    bayes = posterior(vi.Rotated(vi.MeanField()))
    seen = []

    def look(history):
        seen.append(next(bayes.family.basis.buffers()).clone())

    bayes.fit(data(), steps=40, optimizer=soap(bayes, refresh=2), progress=False, callback=look)
    changes = [step for step in range(1, 40) if not torch.equal(seen[step], seen[step - 1])]
    assert changes == [3, 7, 11, 15, 19, 23, 27]  # the last quarter has none
    torch.testing.assert_close(seen[-1] @ seen[-1].mT, torch.eye(5))


def test_bad_options_and_families_are_refused():
    bayes = posterior(vi.MeanField())
    for bad in ({"lr": 0.0}, {"scale_lr": -1.0}, {"refresh": 0}, {"gram_beta": 1.0}, {"betas": (0.9, 1.0)}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            vi.optim.Soap(bayes, **bad)
    with pytest.raises(TypeError, match="this family has none"):
        vi.optim.Soap(posterior(vi.MCDropout()))
    with pytest.raises(TypeError, match="normals without a factor"):
        vi.optim.NaturalGradient(posterior(vi.LowRankNormal(rank=1)))
