"""Newton's steps in the space of normals."""

import pytest
import torch

import structvi as vi
from structvi.density.fixed_draws import FixedDraws
from structvi.density.gaussian import Normal, is_far, is_singular, normal_of, triangular
from structvi.density.newton import Local, aligned, ascend_normals, full, local, part_of_the_way, stepped
from structvi.families.normal import Diagonal, LowRank, NormalForm


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def noise(S, P, seed=0):
    return FixedDraws(S, seed)(1, P, 0, dtype=torch.float64).diagonal


def seen(*args) -> Local:
    at = local(*args)
    assert at is not None
    return at


class Quadratic:
    def __init__(self, P=4):
        root = numbers(P, P, seed=1)
        self.precision, self.mean = root @ root.mT + 0.1 * torch.eye(P, dtype=torch.float64), numbers(P, seed=2)
        self.space = vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)})

    def log_joint(self, theta, batch=None):
        x = theta - self.mean
        return -0.5 * (x @ self.precision * x).sum(-1)


def wide(P=4):
    return Normal(numbers(P, seed=3), numbers(P, P, seed=4) + 3 * torch.eye(P, dtype=torch.float64))


def test_one_step_is_enough_on_a_quadratic():
    p = Quadratic()
    at = seen(p, wide(), noise(8, 4))
    new = stepped(at, full)
    torch.testing.assert_close(new.mean, p.mean)
    torch.testing.assert_close(new.root @ new.root.mT, torch.linalg.inv(p.precision))
    # what it promises is what it brings
    assert abs(at.elbo + at.promise(new) - seen(p, new, noise(8, 4)).elbo) < 1e-9


def test_a_share_of_a_step_goes_part_of_the_way():
    at = seen(Quadratic(), wide(), noise(8, 4))
    some, whole = (stepped(at, full, share=share) for share in (0.5, 1.0))
    torch.testing.assert_close(some.mean, (at.normal.mean + whole.mean) / 2)
    assert 0 < at.promise(some) < at.promise(whole)


def test_an_aligned_root_is_of_the_same_normal_and_symmetric_to_the_other():
    a, b = wide().root, numbers(4, 4, seed=6)
    new = aligned(Normal(numbers(4), b), a)
    torch.testing.assert_close(new.root @ new.root.mT, b @ b.mT)
    between = torch.linalg.solve(a, new.root)
    torch.testing.assert_close(between, between.mT)
    lower = triangular(b)
    torch.testing.assert_close(lower @ lower.mT, b @ b.mT)
    assert (lower.triu(1) == 0).all()
    assert (lower.diagonal() > 0).all()


def test_steps_climb_to_where_nothing_is_promised():
    space = vi.Parameters({"z": torch.zeros(3, dtype=torch.float64)})
    X = numbers(30, 3)
    p = vi.LogDensity(lambda q: torch.nn.functional.logsigmoid(X @ q["z"]).sum() - 0.5 * q["z"].square().sum(), space)
    z, elbos = noise(64, 3), []
    start = seen(p, Normal(numbers(3, seed=5), 3 * torch.eye(3, dtype=torch.float64)), z)
    ended = ascend_normals(p, start, z, full, 1e-8, lambda at: elbos.append(at.elbo))
    assert ended.settled
    assert elbos == sorted(elbos)
    # stationary on these draws: E g = 0 and −E g zᵀ = I but for what is not symmetric
    torch.testing.assert_close(ended.at.slope, torch.zeros(3, dtype=torch.float64), atol=1e-3, rtol=0)
    torch.testing.assert_close(ended.at.curvature, torch.eye(3, dtype=torch.float64), atol=1e-3, rtol=0)


def test_what_is_not_finite_is_no_place_and_what_grows_is_far():
    edge = vi.LogDensity(lambda q: q["z"].log().sum(), vi.Parameters({"z": torch.ones(2, dtype=torch.float64)}))
    assert (
        local(edge, Normal(torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)), noise(8, 2)) is None
    )
    ones = torch.ones(2, dtype=torch.float64)
    assert not is_far(Normal(1e6 * ones, torch.diag(ones)), edge.space)
    assert is_far(Normal(ones, 1e9 * torch.diag(ones)), edge.space)
    assert is_far(Normal(ones * torch.nan, torch.diag(ones)), edge.space)


def test_units_of_numbers_do_not_make_a_normal_singular_and_lost_directions_do():
    root = wide().root
    units = torch.tensor([1e-30, 1.0, 1e8, 1e30], dtype=torch.float64)
    assert not is_singular(units.unsqueeze(-1) * root)
    flat = root.clone()
    flat[1] = (1 + 1e-16) * flat[0]
    for lost in (flat, 0 * root, torch.full_like(root, torch.inf)):
        assert is_singular(lost)
        assert local(Quadratic(), Normal(numbers(4), lost), noise(8, 4)) is None


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8, 1.0])
def test_a_part_of_the_way_leaves_the_optimum_of_a_smaller_family_where_it_is(share):
    # the best mean field has 1/s² = Λ_ii: in its units the curvature has ones on the diagonal, whatever else it has
    A = torch.tensor([[1.0, 0.8, 0.3], [0.8, 1.0, 0.5], [0.3, 0.5, 1.0]], dtype=torch.float64)

    def mean_field(normal):
        return normal_of(NormalForm(normal.mean, Diagonal(normal.precision().diagonal().rsqrt())))

    best = mean_field(Normal(torch.zeros(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)))
    at = Local(best, 0.0, 0.0, best.mean, A)
    torch.testing.assert_close(part_of_the_way(at, mean_field, 1e-8, share).root, best.root)


@pytest.mark.parametrize("of_precision", [False, True])
def test_roots_of_low_rank_normals_are_exact_also_where_they_are_nearly_singular(of_precision):
    scale, factor = numbers(5).exp(), 1e6 * numbers(5, 2, seed=1)
    form = NormalForm(numbers(5), LowRank(scale, factor, of_precision))
    root = normal_of(form).root / scale.unsqueeze(-1)
    matrix = torch.eye(5, dtype=torch.float64) + factor @ factor.mT
    product = root.mT @ matrix @ root if of_precision else torch.linalg.solve(matrix, root @ root.mT)
    torch.testing.assert_close(product, torch.eye(5, dtype=torch.float64), atol=1e-3, rtol=0)
