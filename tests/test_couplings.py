"""How draws share noise: the algebra within a group. That draws are right in distribution is in families/test_laws."""

import pytest
import torch

import structvi as vi
from structvi.couplings import _rotations

G, P, K = 50, 5, 3


def noise(coupling, groups=G, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return coupling(groups, P, K, generator, torch.float64, torch.device("cpu"), **options)


@pytest.mark.parametrize(
    "coupling", [vi.couplings.paired, vi.couplings.unscented, vi.couplings.unscented(crossed=False)]
)
def test_a_group_holds_its_own_mirror_image(coupling):
    joint = torch.cat(noise(coupling), dim=-1).reshape(G, -1, P + K)
    for group in joint:
        distance = torch.cdist(group, -group)
        assert distance.min(-1).values.max() < 1e-12


def test_directions_are_orthogonal_and_signs_are_crossed():
    epsilon, z = (x.reshape(G, 4, K, -1) for x in noise(vi.couplings.unscented))
    gram = z[:, 0] @ z[:, 0].mT
    assert (gram - torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-12
    for block, (sign_epsilon, sign_z) in enumerate([(1, 1), (-1, 1), (-1, -1), (1, -1)]):
        torch.testing.assert_close(epsilon[:, block], sign_epsilon * epsilon[:, 0])
        torch.testing.assert_close(z[:, block], sign_z * z[:, 0])
    # crossing makes the two kinds of noise exactly uncorrelated within a group
    assert torch.einsum("gbdp,gbdk->gpk", epsilon, z).abs().max() < 1e-12


def test_shared_diagonal():
    epsilon = noise(vi.couplings.unscented(shared_diagonal=True, crossed=False)).diagonal.reshape(G, 2, K, P)
    assert (epsilon[:, 0] - epsilon[:, 0, :1]).abs().max() == 0
    independent = noise(vi.couplings.unscented(crossed=False)).diagonal.reshape(G, 2, K, P)
    assert (independent[:, 0, 0] - independent[:, 0, 1]).abs().min() > 0


def test_rotations_are_uniform_and_not_only_orthogonal():
    """Without the signs of R's diagonal the first row of Q has a mean of about −0.5 in its first entry; with them each
    entry has mean 0 and variance 1/K: 20,000 draws give a standard error of 0.004."""
    q = _rotations(20_000, K, {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64})
    torch.testing.assert_close(q @ q.mT, torch.eye(K, dtype=q.dtype).expand_as(q), atol=1e-12, rtol=0)
    assert q.mean(0).abs().max() < 5.5 * 0.0041
    assert (q.var(0) - 1 / K).abs().max() < 0.02


def test_couplings_lower_the_variance_they_are_meant_to_lower():
    """A quadratic target at 32 evaluations, 150 gradients each: their variances are known to about a seventh."""
    space = vi.Parameters({"z": torch.zeros(8, dtype=torch.float64)})
    q = vi.LowRankNormal(8, initial_factor=1.0).bind(space, torch.Generator().manual_seed(0))
    A = torch.randn(8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    target = vi.LogDensity(lambda p: -0.5 * (A @ p["z"]).square().sum(), space)

    def variances(coupling, groups):
        generator = torch.Generator().manual_seed(1)
        parameters = {"mean": q.mean, "scale": q.log_scale, "factor": q.factor}
        samples = []
        for _ in range(150):
            value = vi.elbo(q, target, estimator=vi.Estimator(groups=groups, coupling=coupling), generator=generator)
            samples.append(torch.autograd.grad(value, list(parameters.values())))
        return {name: torch.stack([s[i] for s in samples]).var(0).sum().item() for i, name in enumerate(parameters)}

    independent = variances(vi.couplings.naive, 32)
    mirrored = variances(vi.couplings.paired, 16)
    crossed = variances(vi.couplings.unscented, 1)
    orthogonal = variances(vi.couplings.unscented(crossed=False), 2)
    assert mirrored["mean"] < 1e-20 * independent["mean"]  # the mean's gradient is odd in the noise: pairs cancel it
    assert crossed["mean"] < 1e-20 * independent["mean"]
    assert crossed["scale"] < 0.6 * independent["scale"]  # the cross terms ε z cancel
    assert orthogonal["factor"] < 0.7 * independent["factor"]  # directions do not overlap
