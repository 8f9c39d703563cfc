"""Gaussians in coordinates of their own, against dense matrices; the laws are in test_laws.py."""

import pytest
import torch

import structvi as vi
from structvi.families import LowRank, NormalForm
from structvi.families.basis import Basis
from structvi.objective import log_q_at


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
