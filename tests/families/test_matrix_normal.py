"""The matrix normal: its Kronecker algebra is the dense one, values and gradients."""

import pytest
import torch
from torch.distributions import MultivariateNormal

import structvi as vi
from structvi.testing import dense_moments

F64 = torch.float64


def family(C=3, D=4, dtype=F64):
    generator = torch.Generator().manual_seed(0)

    def normals(*shape):
        return torch.randn(*shape, generator=generator, dtype=F64)

    space = vi.Parameters({"weight": normals(C, D).to(dtype), "bias": normals(C).to(dtype)})
    q = vi.MatrixNormal().bind(space)
    left, right = torch.linalg.qr(normals(C, C))[0], torch.linalg.qr(normals(D + 1, D + 1))[0]
    q.set_axes(left, right, normals(D + 1).exp(), normals(C, D + 1).exp())
    return q


def dense(q):
    """The covariance as the formula says, in the order of θ: weights row by row, then biases."""
    C, D = len(q.left), len(q.right)
    axes = torch.kron(q.left, q.unit.unsqueeze(-1) * q.right)
    covariance = axes @ torch.diag((2 * q.log_scale).exp()) @ axes.mT
    places = torch.arange(C * D).view(C, D)
    order = torch.cat([places[:, :-1].flatten(), places[:, -1]])
    return covariance[order][:, order]


def test_algebra_is_the_dense_one_with_its_gradients():
    q = family()
    density, truth = q(), MultivariateNormal(q.mean, dense(q))
    torch.testing.assert_close(dense_moments(density), (q.mean.detach(), truth.covariance_matrix.detach()))
    torch.testing.assert_close(density.variance, truth.covariance_matrix.diagonal())
    torch.testing.assert_close(density.covariance("weight", "bias"), truth.covariance_matrix[:12, 12:])
    x = torch.randn(5, 15, generator=torch.Generator().manual_seed(1), dtype=F64)
    torch.testing.assert_close(density.covariance_product(x), x @ truth.covariance_matrix)
    torch.testing.assert_close(density.between(x, x[:2]), x @ truth.covariance_matrix @ x[:2].mT)
    torch.testing.assert_close(density.precision_product(x), x @ torch.linalg.inv(truth.covariance_matrix))
    for ours, theirs in ((density.log_prob(x), truth.log_prob(x)), (density.entropy(), truth.entropy())):
        torch.testing.assert_close(ours, theirs)
        wanted = torch.autograd.grad(theirs.sum(), q.log_scale, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(ours.sum(), q.log_scale, retain_graph=True), wanted)


def test_it_takes_a_diagonal_and_refuses_what_is_no_layer():
    q = family()
    q.set_normal(
        vi.families.NormalForm(torch.zeros(15, dtype=F64), vi.families.Diagonal(torch.arange(1.0, 16, dtype=F64)))
    )
    torch.testing.assert_close(q().variance, torch.arange(1.0, 16, dtype=F64).square())
    with pytest.raises(ValueError, match="keeps 1² and 10000² numbers"):
        vi.MatrixNormal().bind(vi.Parameters({"a": torch.zeros(50, 100), "b": torch.zeros(5000)}))
