"""Soap: Adam in coordinates, which are eigenvectors; steps left out change nothing; resumed fits equal whole ones."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.families.basis import Basis, layout
from structvi.train.kronecker import alike, eigenvectors, iterated, spread_precision, turned

BETAS = (0.9, 0.99)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def orthogonal(n, seed, dtype=torch.float64):
    return torch.linalg.qr(torch.randn(n, n, generator=generator(seed), dtype=dtype)).Q


def space():
    shapes = {"a": (3, 2), "b": (4,), "conv": (5, 2, 3, 3), "c": (3, 2)}
    return vi.Parameters({name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()})


def test_tensors_of_one_shape_are_turned_as_each_by_itself():
    basis = Basis(space())
    basis.set({axis.name: orthogonal(axis.size, seed) for seed, axis in enumerate(basis.axes())})
    groups = alike(basis.tensors)
    assert [group.starts for group in groups] == [(0, 100), (10,)]
    matrices = {
        axis.name: torch.stack([getattr(basis, name) for name in axis.members])
        for group in groups
        for axis in group.axes
    }
    x = torch.randn(106, generator=generator(), dtype=torch.float64)
    for back in (False, True):
        for squared in (False, True):
            ours = turned(x, groups, matrices, back=back, squared=squared)
            torch.testing.assert_close(ours, basis(x, back=back, squared=squared))


def test_subspace_iteration_finds_eigenvectors():
    Q = torch.stack([orthogonal(6, seed) for seed in (1, 2)])
    moments = Q @ torch.diag(torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5, 0.0], dtype=torch.float64)) @ Q.mT
    torch.testing.assert_close((eigenvectors(moments).mT @ Q).abs(), torch.eye(6).double().repeat(2, 1, 1))
    found = torch.eye(6, dtype=torch.float64).repeat(2, 1, 1)
    for _ in range(60):  # errors halve with every step: 2⁻⁶⁰
        found = iterated(moments, found)
    torch.testing.assert_close(found.mT @ found, torch.eye(6).double().repeat(2, 1, 1))
    torch.testing.assert_close((found.mT @ Q).abs(), torch.eye(6).double().repeat(2, 1, 1), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("size", "rank"), [(6, 0), (6, 2), (6, 6), (64, 1), (64, 3), (200, 5)])
def test_moments_of_low_rank_leave_a_basis_orthonormal(size, rank):
    """In float32, from the identity and from eigenvectors of other moments, with one large eigenvalue."""
    eye = torch.eye(size).unsqueeze(0)
    columns = torch.randn(1, size, rank, generator=generator())
    if rank:
        columns[:, :, 0] *= 100
    moments = columns @ columns.mT
    for start in (eye, orthogonal(size, 3, torch.float32).unsqueeze(0)):
        found = start
        for _ in range(5):
            found = iterated(moments, found)
            torch.testing.assert_close(found.mT @ found, eye, rtol=0, atol=1e-5)
        if rank:
            assert not torch.equal(found, start)
            first = (columns[0, :, 0] / columns[0, :, 0].norm()) @ found[0, :, 0]
            assert first.abs() > 0.99


def optimizer(family, **options):
    recipe = vi.Soap(lr=0.1, scale_lr=0.1, betas=BETAS, **options)
    return recipe.make(list(family.parameters()), family, 1.0)


def test_is_adam_in_the_coordinates():
    """With a fixed basis Q: the steps of torch's Adam on ξ, θ = Qξ."""
    family = vi.MAP().bind(space())
    ours = optimizer(family, refresh=1000)
    basis = Basis(space())
    basis.set({axis.name: orthogonal(axis.size, seed) for seed, axis in enumerate(basis.axes())})
    xi = nn.Parameter(torch.zeros(106, dtype=torch.float64))
    adam = torch.optim.Adam([xi], lr=0.1, betas=BETAS)
    noise = generator(3)
    for step in range(4):
        gradient = torch.randn(106, generator=noise, dtype=torch.float64)
        family.point.grad, xi.grad = gradient.clone(), basis(gradient, back=True)
        if step == 0:
            ours._moments(family.point)
            for group in ours.means[family.point]:
                for axis in group.axes:
                    matrices = torch.stack([getattr(basis, name) for name in axis.members])
                    ours.state[family.point][f"basis{axis.name}"].copy_(matrices)
        ours.step()
        ours.after_step()
        adam.step()
    # the rate is rounded to float32, as that of a captured step
    torch.testing.assert_close(family.point.detach(), basis(xi.detach()), rtol=1e-6, atol=1e-7)


def test_natural_steps_in_the_coordinates():
    """With a fixed basis Q: Q s z, z = nats · s Qᵀg cut to ±radius, by dense matrices of one tensor."""
    family = vi.MeanField().bind(vi.Parameters({"w": torch.zeros(4, 3, dtype=torch.float64)}))
    with torch.no_grad():
        family.log_scale.copy_(torch.randn(12, generator=generator(5), dtype=torch.float64))
    recipe = vi.Soap(lr=0.5, betas=BETAS, natural=True, radius=0.4)
    ours = recipe.make(list(family.parameters()), family, 7.0)
    Q = {axis.name: orthogonal(axis.size, axis.index) for group in ours.means[family.mean] for axis in group.axes}
    ours._moments(family.mean)
    for name, one in Q.items():
        ours.state[family.mean][f"basis{name}"].copy_(one.unsqueeze(0))
    before, gradient = family.mean.detach().clone(), torch.randn(12, generator=generator(6), dtype=torch.float64)
    family.mean.grad = 0.1 * gradient
    ours.step()
    dense = torch.kron(*Q.values())
    inside, s = dense.mT @ (0.1 * gradient), family.log_scale.detach().exp()
    least = 1 / s.square().mean()
    precision = least + ((1 / s.square()).mean() - least) * inside.square() / inside.square().mean()
    z = (7.0 * precision.rsqrt() * inside).clamp(-0.4, 0.4)
    assert 0 < int((z.abs() < 0.4).sum()) < 12  # some are cut, some are not
    torch.testing.assert_close(family.mean.detach(), before - 0.5 * dense @ (precision.rsqrt() * z))


def test_precisions_are_spread_and_keep_their_mean():
    groups = alike(layout(space()))
    scale = torch.randn(106, generator=generator(1), dtype=torch.float64).exp()
    squares = torch.rand(106, generator=generator(2), dtype=torch.float64)
    found = spread_precision(scale, squares, groups)
    for group in groups:
        for own, given in zip(group.of(found), group.of(scale.pow(-2)), strict=True):
            torch.testing.assert_close(own.mean(), given.mean())
    torch.testing.assert_close(found[6:10], scale[6:10].pow(-2))  # "b" has one axis
    # without a gradient every coordinate has the mean variance
    none = spread_precision(scale, torch.zeros_like(scale), groups)
    torch.testing.assert_close(none[:6], (1 / scale[:6].square().mean()).expand(6))


def test_a_refresh_changes_coordinates_and_not_the_momentum():
    """After it the average of gradients, in θ, is what it was, and the moments are diagonal in the basis."""
    family = vi.MAP().bind(space())
    ours = optimizer(family, refresh=5)
    point, noise = family.point, generator(3)
    for _ in range(5):
        point.grad = torch.randn(106, generator=noise, dtype=torch.float64)
        ours.step()
    before = turned(ours.state[point]["exp_avg"], ours.means[point], ours.basis(point), back=False)
    for _ in range(5):
        ours.after_step()
    basis = ours.basis(point)
    after = turned(ours.state[point]["exp_avg"], ours.means[point], basis, back=False)
    torch.testing.assert_close(before, after)
    for name, Q in basis.items():
        inside = Q.mT @ ours.state[point][f"gram{name}"] @ Q
        torch.testing.assert_close(inside, torch.diag_embed(inside.diagonal(dim1=-2, dim2=-1)))
        assert not torch.allclose(Q.abs(), torch.eye(Q.shape[-1], dtype=Q.dtype))


def test_a_step_that_is_left_out_changes_nothing():
    family = vi.MeanField().bind(space())
    ours = optimizer(family)
    for value, make in ((1.0, 1.0), (float("nan"), 0.0)):
        for parameter in family.parameters():
            parameter.grad = torch.full_like(parameter, value)
        before = [family.mean.clone()] + [
            x.clone() for x in ours.state.get(family.mean, {}).values() if isinstance(x, torch.Tensor)
        ]
        ours._moments(family.mean)
        with torch.no_grad():
            ours._move(family.mean, ours.param_groups[0], torch.ones(()), torch.tensor(make))
    after = [family.mean] + [x for x in ours.state[family.mean].values() if isinstance(x, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def data():
    x = torch.randn(40, 4, generator=generator(1))
    return TensorDataset(x, (x @ torch.randn(4, 1, generator=generator(2))).tanh())


def posterior(family):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    return vi.variationalize(net, vi.likelihoods.Gaussian(noise=0.1), family, generator=generator())


FAMILIES = {
    "MAP": vi.MAP,
    "mean field": vi.MeanField,
    "precision": lambda: vi.LowRankPrecision(2),
    "rotated": lambda: vi.Rotated(vi.MeanField()),
    "rotated precision": lambda: vi.Rotated(vi.LowRankPrecision(2)),
    "mixture": lambda: vi.Mixture(vi.MeanField(), 2),
    "blocks": lambda: vi.PerLayer({"0.*": vi.MeanField(), "2.*": vi.MAP()}),
}


@pytest.mark.parametrize(
    ("name", "natural"), [*((name, False) for name in FAMILIES), ("precision", True), ("rotated", True)]
)
def test_a_resumed_fit_has_the_same_bits(name, natural, tmp_path):
    """Cut off between two refreshes, and after a turn of the family."""
    loader = DataLoader(data(), batch_size=10, shuffle=True)
    recipe = vi.Soap(0.02, refresh=3, turn=2, natural=natural)
    options = {"steps": 24, "optimizer": recipe, "progress": False, "stop": False}
    whole, cut = posterior(FAMILIES[name]()), posterior(FAMILIES[name]())
    whole.fit(loader, **options)

    def at_eleven(history):
        if len(history) == 11:
            raise KeyboardInterrupt

    cut.fit(loader, **options, checkpoint=tmp_path, callback=at_eleven)
    again = posterior(FAMILIES[name]())
    result = again.fit(loader, **options, checkpoint=tmp_path, resume=tmp_path)
    assert any("resumed at step 11" in note for note in result.notes)
    for name, value in whole.learned().items():
        assert torch.equal(value, again.learned()[name]), name


def test_another_recipe_is_not_resumed(tmp_path):
    loader = DataLoader(data(), batch_size=10, shuffle=True)
    posterior(vi.MeanField()).fit(loader, steps=4, optimizer=vi.Soap(), checkpoint=tmp_path, progress=False)
    with pytest.raises(ValueError, match="other settings"):
        posterior(vi.MeanField()).fit(
            loader, steps=4, optimizer=vi.Soap(refresh=7), checkpoint=tmp_path, resume=tmp_path, progress=False
        )


def test_a_rotated_family_takes_the_coordinates_until_iterates_are_averaged():
    bayes = posterior(vi.Rotated(vi.MeanField()))
    loader = DataLoader(data(), batch_size=10, shuffle=True)
    seen = []

    def look(history):
        seen.append(bayes.family.basis.matrix(bayes.family.basis.axes()[0]).clone())

    bayes.fit(loader, steps=40, optimizer=vi.Soap(refresh=2, turn=2), progress=False, stop=False, callback=look)
    changes = [step for step in range(1, 40) if not torch.equal(seen[step], seen[step - 1])]
    assert changes == [3, 7, 11, 15, 19, 23, 27]  # the last quarter has none
    Q = seen[-1]
    torch.testing.assert_close(Q @ Q.mT, torch.eye(5))


@pytest.mark.parametrize("recipe", [vi.Soap(0.05, 0.05), vi.Soap(0.2, 0.05, natural=True)])
def test_reaches_the_closed_form(recipe):
    """A linear model: the same optimum as any optimizer's, mean field of a Gaussian posterior."""
    generator_ = generator(4)
    x = torch.randn(60, 3, generator=generator_)
    x[:, 1] += 2 * x[:, 0]
    t = x @ torch.tensor([[1.0], [-1.0], [0.5]]) + 0.5 * torch.randn(60, 1, generator=generator_)
    bayes = vi.variationalize(
        nn.Linear(3, 1, bias=False), vi.likelihoods.Gaussian(noise=0.5), vi.MeanField(), vi.priors.NormalPrior(1.0)
    )
    loader = DataLoader(TensorDataset(x, t), batch_size=60)
    bayes.fit(loader, steps=600, optimizer=recipe, progress=False, stop=False, groups=4)
    precision = (x.mT @ x / 0.25 + torch.eye(3)).double()
    mean = torch.linalg.solve(precision, (x.mT @ t).double() / 0.25)[:, 0]
    density = bayes.family()
    # the noise of 4 pairs at a rate that falls to zero, averaged over 150 steps: far below a tenth of a scale
    assert ((density.mean.double() - mean).abs() < 0.1 * precision.diagonal().rsqrt()).all()
    torch.testing.assert_close(density.variance.double(), 1 / precision.diagonal(), rtol=0.1, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0}, "lr must be"),
        ({"refresh": 0}, "refresh must be"),
        ({"betas": (0.9, 1.0)}, "betas must be inside"),
        ({"gram_beta": -0.1}, "gram_beta must be inside"),
        ({"radius": 0.0}, "radius must be"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        vi.Soap(**options)


def test_families_without_means_are_refused():
    bayes = posterior(vi.FullNormal())
    with pytest.raises(TypeError, match="this family has none"):
        bayes.fit(DataLoader(data(), batch_size=10), steps=2, optimizer=vi.Soap(), progress=False)
    with pytest.raises(TypeError, match="leave natural out"):
        posterior(vi.MAP()).fit(DataLoader(data(), batch_size=10), steps=2, optimizer=vi.Soap(natural=True))
    with pytest.raises(ValueError, match="belongs to the default optimizer"):
        posterior(vi.MAP()).fit(DataLoader(data(), batch_size=10), steps=2, optimizer=vi.Soap(), lr=0.1)
