"""Families of a user's own are first class: everything that fits ask of a family, by the defaults and by overriding."""

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Laplace, MultivariateNormal, Normal

import structvi as vi
from structvi.families.gaussian import Gaussian, LowRank
from structvi.testing import check_family


class ByTorch(vi.Family):
    """`mean`, `log_scale` and nothing else, as a torch distribution."""

    def initialise(self, parameters, generator):
        self.mean = nn.Parameter(parameters.initial.clone())
        self.log_scale = nn.Parameter((0.1 * parameters.scale).log())

    def forward(self):
        return Independent(Normal(self.mean, self.log_scale.exp()), 1)


class OwnDensity(Gaussian):
    """A shape of covariance of one's own: a location and six methods."""

    def __init__(self, mean, log_scale):
        self.location, self.log_scale = mean, log_scale

    def transform(self, diagonal, low_rank):
        return self.log_scale.exp() * diagonal

    def precision_product(self, x):
        return x * (-2 * self.log_scale).exp()

    def quadratic(self, x):
        return (x.double() * (-self.log_scale.double()).exp()).square().sum(-1)

    def half_log_det(self):
        return self.log_scale.double().sum()

    def low_rank(self):
        return LowRank((2 * self.log_scale).exp(), self.location.new_zeros(self.P, 0), self.location.new_zeros(0, 0))

    def precision_diagonal(self):
        return (-2 * self.log_scale).exp()


class ByDensity(ByTorch):
    """The same parameters with a Gaussian density of one's own: draws are coupled, entropies exact."""

    def forward(self):
        return OwnDensity(self.mean, self.log_scale)


class Waiting(ByTorch):
    """A third parameter, one more scale for each weight, that waits for stage two; it says so itself."""

    def initialise(self, parameters, generator):
        super().initialise(parameters, generator)
        self.more = nn.Parameter(torch.full_like(parameters.initial, -1.0))
        self.seen = []

    def forward(self):
        return OwnDensity(self.mean, self.log_scale + self.more)

    def place_at(self, mean, scale):
        self.mean.copy_(mean)
        self.log_scale.copy_(scale.log())
        self.more.zero_()

    def move_to(self, theta):
        with torch.no_grad():
            self.mean.copy_(theta)

    @property
    def has_stages(self):
        return True

    def is_untouched(self):
        return not self.seen

    def first_stage(self):
        self.seen.append("first")
        self.more.requires_grad_(False)

    def second_stage(self, generator=None):
        self.seen.append("second")
        self.more.requires_grad_(True)

    def learn_all(self):
        self.more.requires_grad_(True)


def loader(n=64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    t = x.sum(1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, t), batch_size=16, shuffle=True)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def posterior(family, likelihood=None):
    generator = torch.Generator().manual_seed(2)
    return vi.variationalize(network(), likelihood or vi.likelihoods.Gaussian(0.3), family, generator=generator)


def values(bayes):
    return {name: tensor.detach().clone() for name, tensor in bayes.learned().items()}


def target():
    """A correlated normal in four dimensions, with scales from 0.1 to 10."""
    A = torch.tensor([[1.0, 0, 0, 0], [0.5, 1, 0, 0], [0, 0.3, 1, 0], [0, 0, 0.7, 1]], dtype=torch.float64)
    scale = torch.tensor([0.1, 1.0, 3.0, 10.0], dtype=torch.float64)
    root = scale.unsqueeze(-1) * A
    precision = torch.linalg.inv(root @ root.mT)
    space = vi.Parameters({"z": torch.zeros(4, dtype=torch.float64)})
    fn = lambda p: -0.5 * (p["z"] - 5) @ precision @ (p["z"] - 5)  # noqa: E731
    return vi.LogDensity(fn, space), precision


@pytest.mark.parametrize("family", [ByTorch, ByDensity])
def test_vi_fit_takes_the_way_of_gaussian_families(family):
    """Coordinates and curvature are used: mean field's optimum, 1/√Λ_ii, is found, not only improved on."""
    density, precision = target()
    result = vi.fit_density(density, family(), seed=0, progress=False)
    assert {step.stage for step in result.trace} == {"start", "family"}
    assert result.status is vi.Status.CONVERGED
    assert result.converged
    scale = precision.diagonal().rsqrt()
    # the ELBO of a quadratic is exact on the fixed draws: what is left is the search's tolerance of 1e-3 nats
    assert ((result.family().mean - 5).abs() / scale).max() < 0.02
    assert (result.family().variance.sqrt() / scale - 1).abs().max() < 0.02


def test_vi_fit_searches_for_others_where_they_stand():
    density, _ = target()
    result = vi.fit_density(density, Waiting(), seed=0, progress=False)
    assert "starts" in {step.stage for step in result.trace}


def test_stages_are_the_familys_own():
    bayes = posterior(Waiting())
    start = bayes.family.more.detach().clone()
    moved = []
    bayes.fit(
        loader(), steps=40, progress=False, callback=lambda history: moved.append(not torch.equal(bayes.family.more, start)),
    )  # fmt: skip
    assert bayes.family.seen == ["first", "second"]
    assert moved == [False] * 16 + [True] * 24  # stage two begins after 40 % of the steps
    bayes.fit(loader(), steps=20, progress=False)  # touched by now
    assert bayes.family.seen == ["first", "second"]
    assert all(p.requires_grad for p in bayes.family.parameters())


@pytest.mark.parametrize("family", [ByTorch, ByDensity])
def test_a_normal_without_stages_is_fitted_in_one(family):
    result = posterior(family()).fit(loader(), steps=20, schedule=vi.Schedule(staged=True), progress=False)
    assert set(result.history["stage"].tolist()) == {2.0}


@pytest.mark.parametrize("family", [ByTorch, ByDensity])
def test_grow_by_rank_and_by_components(family):
    bayes = posterior(family())
    bayes.fit(loader(), steps=60, progress=False)
    before = bayes.family
    result = bayes.grow(loader(), rank=2, steps=40, progress=False)
    assert result.candidates["grown"].value >= result.candidates["before"].value or bayes.family is before
    grown = bayes.family
    if result.kept == "grown":
        assert isinstance(grown, vi.LowRankNormal)
        assert grown.rank == 2
    bayes = posterior(family())
    bayes.fit(loader(), steps=60, progress=False)
    bayes.grow(loader(), components=2, steps=40, progress=False)
    assert isinstance(bayes.family, vi.Mixture | family)


@pytest.mark.parametrize("family", [ByTorch, ByDensity, Waiting])
def test_save_and_load(family, tmp_path):
    bayes = posterior(family())
    bayes.fit(loader(), steps=20, progress=False)
    bayes.save(tmp_path / "own.safetensors")
    with pytest.raises(ValueError, match=f"the family \\({family.__name__}\\)"):
        vi.load(tmp_path / "own.safetensors", network())
    again = vi.load(tmp_path / "own.safetensors", network(), family=family())
    assert isinstance(again, vi.Posterior)
    for name, tensor in values(bayes).items():
        assert torch.equal(tensor, values(again)[name])


@pytest.mark.parametrize("family", [ByTorch, ByDensity, Waiting])
def test_a_fit_that_was_stopped_goes_on_bit_for_bit(family, tmp_path):
    options = {"steps": 40, "progress": False}

    def stop(history):
        if len(history) == 25:
            raise KeyboardInterrupt

    whole = posterior(family())
    whole.fit(loader(), **options)
    posterior(family()).fit(loader(), **options, checkpoint=vi.Checkpoint(tmp_path, every=10), callback=stop)
    resumed = posterior(family())
    result = resumed.fit(loader(), **options, checkpoint=vi.Checkpoint(tmp_path, resume=True))
    assert any("resumed at step 25" in note for note in result.notes)
    for name, tensor in values(whole).items():
        assert torch.equal(tensor, values(resumed)[name])


@pytest.mark.parametrize("family", [ByTorch, ByDensity])
def test_the_laws_hold(family):
    held = {law for law, verdict in check_family(family()).items() if verdict == "held"}
    assert {"placed", "moved", "coordinates", "unbiased", "path_zero"} <= held


class Wide(ByTorch):
    """The same names for other things: `log_scale` is not the logarithm of the standard deviation."""

    def forward(self):
        return Independent(Laplace(self.mean, self.log_scale.exp()), 1)


class Peaked(ByTorch):
    """Mean and standard deviation are as named, but it is no normal."""

    def forward(self):
        return Independent(Laplace(self.mean, self.log_scale.exp() / 2**0.5), 1)


class Dense(vi.Family):
    def initialise(self, parameters, generator):
        self.mean = nn.Parameter(parameters.initial.clone())
        self.root = nn.Parameter(torch.eye(parameters.size, dtype=parameters.dtype) - 3)

    def forward(self):
        root = self.root.tril(-1) + torch.diag(self.root.diagonal().exp())
        return MultivariateNormal(self.mean, scale_tril=root)


@pytest.mark.parametrize("family", [Wide, Peaked, Dense])
def test_what_does_not_apply_is_refused_with_what_to_write(family):
    bayes = posterior(family())
    before = values(bayes)
    with pytest.raises(TypeError, match=f"`mean` and `log_scale` alone, not for {family.__name__}"):
        bayes.grow(loader(), rank=2, steps=1, progress=False)
    bayes.model.num_data = 64
    with pytest.raises(TypeError, match=f"not for {family.__name__}; a family of your own writes `move_to"):
        bayes.grow(loader(), components=2, steps=1, progress=False)
    for name, tensor in before.items():
        assert torch.equal(tensor, values(bayes)[name])
    density, _ = target()
    assert vi.fit_density(density, family(), progress=False, max_evaluations=20_000).family().mean.shape == (4,)
