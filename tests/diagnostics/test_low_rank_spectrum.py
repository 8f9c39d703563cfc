"""The low-rank part's eigenvalues against dense ones."""

import pytest
import torch

import structvi as vi
from structvi.diagnostics import spectrum


def family(recipe, K=3):
    space = vi.Parameters({"a": torch.zeros(4, 2, dtype=torch.float64), "b": torch.zeros(5, dtype=torch.float64)})
    q = recipe(rank=K).bind(space, torch.Generator().manual_seed(0))
    with torch.no_grad():
        q.log_scale.add_(0.3 * torch.randn(13, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
        q.factor.mul_(torch.tensor([10.0, 3.0, 0.1][:K]))
    return q


@pytest.mark.parametrize(("recipe", "of"), [(vi.LowRankNormal, "variance"), (vi.LowRankPrecision, "precision")])
def test_eigenvalues_are_those_of_the_dense_matrix(recipe, of):
    q = family(recipe)
    found = spectrum(q)
    scale = q.log_scale.exp().detach()
    dense = q().covariance().detach()
    if of == "precision":
        relative = scale.unsqueeze(-1) * torch.linalg.inv(dense) * scale
    else:
        relative = dense / scale / scale.unsqueeze(-1)
    values = torch.linalg.eigvalsh(relative)
    torch.testing.assert_close(found.eigenvalues, values.flip(0)[:3] - 1, rtol=1e-8, atol=1e-10)
    assert found.of == of


def test_how_many_directions_matter():
    q = family(vi.LowRankNormal)
    assert spectrum(q).matter == 2
    assert spectrum(q).verdict == "2 of 3 directions matter: a rank of 2 would do"
    with torch.no_grad():
        q.factor[:, 2] *= 100
    assert spectrum(q).verdict == "all 3 directions matter: a higher rank may pay"
    assert spectrum(vi.LowRankNormal(rank=0).bind(q.space)).verdict == "rank 0: there is no low-rank part"
    assert "variance added" in str(spectrum(q))


def test_of_a_posterior():
    bayes = vi.variationalize(torch.nn.Linear(3, 1), vi.likelihoods.Gaussian(1.0), vi.LowRankNormal(2), num_data=3)
    assert len(spectrum(bayes).eigenvalues) == 2
