"""One value for a normal: its moments against dense truth, and families set to it."""

import pytest
import torch
from torch import Tensor

from structvi import (
    MAP,
    FullNormal,
    LowRankNormal,
    LowRankPrecision,
    MeanField,
    Parameters,
    PerLayer,
    Rotated,
)
from structvi.families.low_rank import precision_rank
from structvi.families.normal import Diagonal, LowRank, NormalForm, Triangle

P, K = 5, 2
FAMILIES = {
    "mean field": MeanField(),
    "low rank": LowRankNormal(rank=K),
    "low-rank precision": LowRankPrecision(rank=K),
    "full": FullNormal(),
    "blocks": PerLayer({"a": LowRankPrecision(rank=K), "b": MeanField()}),
    "low-rank blocks": PerLayer({"a": LowRankPrecision(rank=1), "b": LowRankPrecision(rank=2)}),
    "full block": PerLayer({"a": FullNormal(), "b": MeanField()}),
}


def space() -> Parameters:
    return Parameters({"a": torch.zeros(3, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)})


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def forms() -> dict[str, NormalForm]:
    mean, scale, factor = noise(P), (0.3 * noise(P, seed=1)).exp(), noise(P, K, seed=2)
    lower = noise(P, P, seed=3).tril(-1) + torch.diag(scale)
    return {
        "diagonal": NormalForm(mean, Diagonal(scale)),
        "covariance": NormalForm(mean, LowRank(scale, factor, False)),
        "precision": NormalForm(mean, LowRank(scale, factor, True)),
        "triangle": NormalForm(mean, Triangle(lower)),
    }


def covariance(form: NormalForm) -> Tensor:
    root = form.root
    if isinstance(root, Diagonal):
        return torch.diag(root.scale**2)
    if isinstance(root, Triangle):
        return root.lower @ root.lower.mT
    S, inner = torch.diag(root.scale), torch.eye(P, dtype=torch.float64) + root.factor @ root.factor.mT
    return S @ (torch.linalg.inv(inner) if root.of_precision else inner) @ S


@pytest.mark.parametrize("name", forms())
def test_moments_are_those_of_the_dense_matrix(name):
    form = forms()[name]
    dense = covariance(form)
    torch.testing.assert_close(form.variance, dense.diagonal())
    torch.testing.assert_close(form.precision_diagonal, torch.linalg.inv(dense).diagonal())
    torch.testing.assert_close(form.triangle() @ form.triangle().mT, dense)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", forms())
def test_a_family_set_to_a_normal_has_its_mean_and_the_diagonal_of_its_precision(family, name):
    form, q = forms()[name], FAMILIES[family].bind(space(), seeded())
    q.set_normal(form)
    torch.testing.assert_close(q().mean, form.mean)
    own = torch.linalg.inv(q().covariance().detach())
    truth = torch.linalg.inv(covariance(form))
    if "block" not in family or name in ("diagonal", "precision"):
        torch.testing.assert_close(own.diagonal(), truth.diagonal())
    if (family, name) in {("low rank", "covariance"), ("low-rank precision", "precision")} or family == "full":
        torch.testing.assert_close(own, truth)
    if family == "blocks" and name == "precision":
        torch.testing.assert_close(own[:3, :3], truth[:3, :3])


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "full block"])
def test_a_family_set_to_its_own_normal_is_the_same(family):
    one, other = (FAMILIES[family].bind(space(), seeded(seed)) for seed in (0, 1))
    with torch.no_grad():
        for number, parameter in enumerate(one.parameters()):
            parameter.add_(0.3 * noise(*parameter.shape, seed=number))
    form = one.normal()
    assert form is not None
    other.set_normal(form)
    torch.testing.assert_close(covariance(form), one().covariance())
    torch.testing.assert_close(other().mean, one().mean)
    torch.testing.assert_close(other().covariance(), one().covariance())


@pytest.mark.parametrize("name", forms())
def test_affine_is_the_law_of_a_mapped_variable(name):
    form, shift, scale = forms()[name], noise(P, seed=5), noise(P, seed=6).exp()
    lower = noise(P, P, seed=7).tril(-1) + torch.diag(scale)
    for root, matrix in ((scale, torch.diag(scale)), (lower, lower)):
        moved = form.affine(shift, root)
        torch.testing.assert_close(moved.mean, shift + matrix @ form.mean)
        torch.testing.assert_close(covariance(moved), matrix @ covariance(form) @ matrix.mT)
    assert type(form.affine(shift, scale).root) is type(form.root)
    standard = form.standard()
    assert not standard.mean.any()
    assert torch.equal(covariance(standard), torch.eye(P, dtype=torch.float64))
    assert type(standard.root) is type(form.root)


def test_a_family_says_how_many_columns_it_keeps():
    recipes = (
        MeanField(),
        LowRankNormal(2),
        LowRankPrecision(2),
        FullNormal(),
        Rotated(LowRankPrecision(2)),
    )
    bound = [recipe.bind(space(), seeded()) for recipe in (*recipes, PerLayer({"a": LowRankPrecision(1), "b": MAP()}))]
    assert [precision_rank(family) for family in bound] == [0, 0, 2, P, 2, 1]
