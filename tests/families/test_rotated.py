"""Gaussians in coordinates of their own, against dense matrices; the laws are in test_laws.py."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.families import LowRank, NormalForm
from structvi.families.basis import LONGEST, Basis
from structvi.families.full import FullNormalDensity
from structvi.objective import log_q_at
from structvi.predict.linearised import jacobians


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def space(dtype=torch.float64):
    shapes = {"w": (3, 2), "b": (3,), "conv": (2, 3, 2, 2), "one": (1, 4)}
    return vi.Parameters(
        {name: torch.randn(shape, generator=generator(1), dtype=dtype) for name, shape in shapes.items()}
    )


def orthogonal(basis, seed=0):
    g = generator(seed)
    return {
        axis.name: torch.linalg.qr(torch.randn(axis.size, axis.size, generator=g, dtype=torch.float64)).Q
        for axis in basis.axes()
    }


def dense(basis, P):
    """Q: its columns are the images of the unit vectors."""
    return basis(torch.eye(P, dtype=torch.float64)).mT


def test_the_basis_is_a_kronecker_product_of_its_axes():
    where = space()
    basis = Basis(where)
    assert [(axis.name, axis.size) for axis in basis.axes()] == [
        ("q0_0", 3), ("q0_1", 2), ("q2_0", 2), ("q2_1", 3), ("q2_2", 4), ("q3_1", 4),
    ]  # fmt: skip
    Q = orthogonal(basis)
    basis.set(Q)
    expected = torch.block_diag(
        torch.kron(Q["q0_0"], Q["q0_1"]),
        torch.eye(3, dtype=torch.float64),
        torch.kron(torch.kron(Q["q2_0"], Q["q2_1"]), Q["q2_2"]),
        Q["q3_1"],
    )
    torch.testing.assert_close(dense(basis, where.size), expected)
    x = torch.randn(5, where.size, generator=generator(), dtype=torch.float64)
    torch.testing.assert_close(basis(x), x @ expected.mT)
    torch.testing.assert_close(basis(x, back=True), x @ expected)
    torch.testing.assert_close(basis(x, back=True, squared=True), x @ expected.square())


def test_long_axes_and_vectors_stay_as_they_are():
    shapes = {"table": (LONGEST + 1, 2), "bias": (7,), "single": (1, 1)}
    basis = Basis(vi.Parameters({name: torch.zeros(shape) for name, shape in shapes.items()}))
    assert [axis.size for axis in basis.axes()] == [2]


def of_theta(family):
    """Q, the columns of the factor in θ (of the covariance or of the precision), and the rest of the precision in θ."""
    Q, root = dense(family.basis, family.space.size), family.part.normal().root
    factor, sign = (
        getattr(root, "factor", torch.zeros(len(Q), 0).double()),
        -1 if getattr(root, "of_precision", 0) else 1,
    )
    columns = Q @ (factor * root.scale.unsqueeze(-1) ** sign)
    return Q, columns, Q @ torch.diag(root.scale**-2) @ Q.mT


@pytest.mark.parametrize("part", [vi.MeanField(), vi.LowRankNormal(2), vi.LowRankPrecision(2)])
def test_other_coordinates_keep_mean_factor_and_the_precisions_diagonal(part):
    family = vi.Rotated(part).bind(space(), generator())
    family.turn(orthogonal(family.basis, 1))
    mean, (_, columns, precision) = family().mean.detach(), of_theta(family)
    family.turn(orthogonal(family.basis, 2))
    Q, turned, _ = of_theta(family)
    torch.testing.assert_close(family().mean, mean)
    torch.testing.assert_close(turned, columns)
    torch.testing.assert_close(family.part.normal().root.scale ** -2, (Q.mT @ precision @ Q).diagonal())


def test_a_normal_chooses_the_axes_by_its_columns():
    """The columns of a rank-one precision w wᵀ, w = a ⊗ b, are one direction along the axes: nothing is left out."""
    where = vi.Parameters({"w": torch.zeros(3, 4, dtype=torch.float64)})
    a, b = (torch.randn(n, generator=generator(n), dtype=torch.float64) for n in (3, 4))
    root = LowRank(torch.ones(12, dtype=torch.float64), torch.kron(a, b).unsqueeze(-1), True)
    family = vi.Rotated(vi.MeanField()).bind(where)
    form = NormalForm(torch.arange(12.0, dtype=torch.float64), root)
    family.set_normal(form)
    torch.testing.assert_close(family().mean, form.mean)
    torch.testing.assert_close(family().covariance(), form.triangle() @ form.triangle().mT)


def test_a_matrix_normal_is_met_exactly():
    """N(M, (A ⊗ B)⁻¹): in the eigenvectors of A and B its precision is diagonal. KL ≤ 1e-6 from a search."""
    where = vi.Parameters({"w": torch.zeros(3, 4, dtype=torch.float64)})
    roots = [torch.randn(n, n + 2, generator=generator(n), dtype=torch.float64) for n in (3, 4)]
    A, B = (root @ root.mT for root in roots)
    precision, centre = torch.kron(A, B), torch.linspace(-1, 1, 12, dtype=torch.float64)
    target = vi.LogDensity(
        lambda p: -0.5 * (p["w"].flatten() - centre) @ precision @ (p["w"].flatten() - centre), where
    )
    truth = FullNormalDensity(centre, torch.linalg.cholesky(torch.linalg.inv(precision)))
    plain = vi.fit_density(target, vi.MeanField(), progress=False).family
    assert vi.kl(plain(), truth) > 1
    family = vi.Rotated(vi.MeanField()).bind(where)
    gradients = torch.randn(4000, 12, generator=generator(), dtype=torch.float64) @ torch.linalg.cholesky(precision).mT
    estimated = family.basis.of_gradients(gradients)
    exact = {"q0_0": torch.linalg.eigh(A).eigenvectors.flip(1), "q0_1": torch.linalg.eigh(B).eigenvectors.flip(1)}
    for name, Q in exact.items():  # 4000 gradients: angles of a few hundredths
        assert (Q * estimated[name]).sum(0).abs().min() > 0.99
    family.turn(exact)
    result = vi.fit_density(target, family, tolerance=1e-8, progress=False)
    assert vi.kl(result.family(), truth) < 1e-6


def network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = torch.randn(60, 3).double()
    return net, DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=20)


def test_around_a_network_the_axes_are_those_of_its_gradients():
    net, loader = network()
    bayes = vi.variationalize(
        net, vi.likelihoods.Categorical(), vi.Rotated(vi.LowRankPrecision(3)), vi.priors.NormalPrior(1.0)
    )
    bayes.laplace(loader, progress=False)
    Q = dense(bayes.family.basis, bayes.family.space.size)
    assert not torch.allclose(Q, torch.eye(len(Q), dtype=torch.float64))
    torch.testing.assert_close(bayes.family().mean, bayes.space.initial)
    assert bool((bayes.family().variance < 1.001).all())  # no wider than the prior


def test_outputs_have_the_covariance_of_the_dense_one():
    net, loader = network()
    bayes = vi.variationalize(net, vi.likelihoods.Categorical(), vi.Rotated(vi.LowRankPrecision(2)), linearise=True)
    bayes.laplace(loader, progress=False)
    x = torch.randn(4, 3, generator=generator()).double()
    _, found = bayes.output_moments(x)
    ((_, J),) = list(jacobians(bayes, bayes.family().mean.detach(), x))
    torch.testing.assert_close(found, J @ bayes.family().covariance() @ J.mT, rtol=1e-8, atol=1e-12)


def test_fitted_saved_and_loaded(tmp_path):
    net, loader = network()
    bayes = vi.variationalize(net, vi.likelihoods.Categorical(), vi.Rotated(vi.LowRankPrecision(2)))
    bayes.fit(loader, steps=20, progress=False)
    bayes.save(tmp_path / "posterior.safetensors")
    again = vi.load(tmp_path / "posterior.safetensors", net)
    x = torch.randn(4, 3, generator=generator()).double()
    assert torch.equal(again.predict(x, generator=generator()).mean, bayes.predict(x, generator=generator()).mean)
    assert torch.equal(again.family.basis.q0_0, bayes.family.basis.q0_0)


def test_what_it_is_not_for():
    with pytest.raises(TypeError, match="expects a family"):
        vi.Rotated(nn.Linear(2, 1))
    with pytest.raises(ValueError, match="give a recipe"):
        vi.Rotated(vi.MeanField().bind(space()))
    with pytest.raises(TypeError, match="for Gaussian families"):
        vi.Rotated(vi.Mixture(vi.MeanField(), 2)).bind(space())
    family = vi.Rotated(vi.MeanField()).bind(space())
    with pytest.raises(ValueError, match="expected matrices"):
        family.basis.set({"q0_0": torch.eye(2)})


@pytest.mark.parametrize("part", [vi.MeanField(), vi.LowRankPrecision(2), vi.LowRankNormal(2)], ids=repr)
def test_draws_with_log_q_have_the_gradients_of_the_plain_path(part):
    """Of f = Σ θ³ a + b log q, with log q through θ alone."""
    family = vi.Rotated(part).bind(space(), generator())
    family.turn(orthogonal(family.basis, 3))
    a, b = torch.randn(2, family.space.size, generator=generator(1), dtype=torch.float64), torch.tensor([0.3, -2.0])
    gradients = []
    for scored in (True, False):
        family.zero_grad()
        density = family()
        draws, log_q = density.draw_scored(2, generator=generator(2))
        if not scored:
            draws = density.draw(2, generator=generator(2))
            log_q = log_q_at(density, draws.theta, path=True)
        ((draws.theta**3 * a).sum() + (b * log_q).sum()).backward()
        gradients.append([log_q.detach(), *(p.grad for p in family.parameters())])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
