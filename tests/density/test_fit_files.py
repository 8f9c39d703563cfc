"""A fit of a log density in a file: it comes back as it was, goes on, and a file or a target that is another one is
refused with a reason.
"""

import contextlib
import json
import struct

import pytest
import torch
from torch import distributions as td
from torch import nn

import structvi as vi
from structvi.families.family import Family
from structvi.files.file import CheckpointError

#: so many that draws can be corrected
DATA = torch.linspace(-1, 3, 40, dtype=torch.float64)


def log_joint(p):
    noise = td.Normal(p["mu"], p["sigma"], validate_args=False).log_prob(DATA).sum()
    return noise - 0.5 * p["mu"].square() / 100 - p["sigma"]


def target(shift=0.0, **parameters):
    space = vi.Parameters({"mu": torch.zeros(()), "sigma": vi.constraints.positive(1.0)} | parameters)
    return vi.LogDensity(lambda p: log_joint(p) + shift, space)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("fits") / "fit.safetensors"
    result = vi.fit_density(target(), vi.FullNormal(), progress=False)
    result.save(path)
    return result, path


def test_a_fit_comes_back_as_it_was(saved):
    result, path = saved
    again = vi.load(path, target())
    assert str(again) == str(result)
    assert again.trace == result.trace
    assert torch.equal(again.elbo.per_group, result.elbo.per_group)
    before, after = (
        fit.sample(50, corrected=True, generator=torch.Generator().manual_seed(3)) for fit in (result, again)
    )
    assert all(torch.equal(before[name], after[name]) for name in ("mu", "sigma"))
    assert str(again.summary()) == str(result.summary())


def test_it_goes_on_bit_by_bit(saved):
    result, path = saved
    first, second = (vi.fit_density(target(), fit.family, progress=False) for fit in (result, vi.load(path, target())))
    assert torch.equal(first.family().mean, second.family().mean)
    assert first.elbo.value == second.elbo.value


@pytest.mark.parametrize(
    "family",
    [vi.MeanField(), vi.LowRankNormal(rank=1), vi.LowRankPrecision(rank=1), vi.Mixture(vi.FullNormal())],
    ids=lambda family: type(family).__name__,
)
def test_every_family_that_is_fitted_comes_back(family, tmp_path):
    two = vi.LogDensity(  # two modes, so that a mixture has parts and modes
        lambda p: torch.logaddexp(-0.5 * (p["z"] - 4).square().sum(), -0.5 * (p["z"] + 4).square().sum()),
        vi.Parameters({"z": torch.zeros(2, dtype=torch.float64)}),
    )
    result = vi.fit_density(two, family, progress=False)
    result.save(tmp_path / "fit")
    again = vi.load(tmp_path / "fit", two)
    assert torch.equal(again.family().mean, result.family().mean)
    assert torch.equal(
        again.family().log_prob(torch.ones(3, 2).double()), result.family().log_prob(torch.ones(3, 2).double())
    )
    assert all(torch.equal(a.theta, b.theta) for a, b in zip(again.modes, result.modes, strict=True))


class Shifted(Family):
    """A family of a user's own."""

    def initialise(self, space, generator):
        self.mean = nn.Parameter(space.initial.clone())

    def forward(self):
        return td.Independent(td.Normal(self.mean, torch.ones_like(self.mean)), 1)


def test_a_family_of_ones_own_is_asked_for(tmp_path):
    space = vi.Parameters({"z": torch.zeros(2, dtype=torch.float64)})
    aim = vi.LogDensity(lambda p: -0.5 * (p["z"] - 1).square().sum(), space)
    result = vi.fit_density(aim, Shifted(), progress=False)
    result.save(tmp_path / "fit")
    with pytest.raises(ValueError, match=r"family of your own, 'Shifted'.*family=\.\."):
        vi.load(tmp_path / "fit", aim)
    again = vi.load(tmp_path / "fit", aim, family=Shifted())
    assert torch.equal(again.family().mean, result.family().mean)
    with pytest.raises(ValueError, match="is not the one that was saved"):
        vi.load(tmp_path / "fit", aim, family=vi.MeanField())


def test_minibatches_need_their_loader(tmp_path):
    batches = list(DATA.split(2))
    space = vi.Parameters({"mu": torch.zeros((), dtype=torch.float64)})
    aim = vi.LogDensity(lambda p, batch: -0.5 * len(DATA) * (batch - p["mu"]).square().mean(), space)
    result = vi.fit_density(aim, vi.MeanField(), batches, steps=20, progress=False)
    result.save(tmp_path / "fit")
    with pytest.raises(TypeError, match="batch"):
        vi.load(tmp_path / "fit", aim)
    again = vi.load(tmp_path / "fit", aim, loader=batches)
    assert str(again) == str(result)
    assert torch.equal(
        again.target.log_joint(torch.zeros(1, 1).double()), result.target.log_joint(torch.zeros(1, 1).double())
    )
    with pytest.raises(ValueError, match="fit of another log density: at the mean of q it was"):
        vi.load(tmp_path / "fit", aim, loader=[batch + 1 for batch in batches])


def test_batches_that_differ_from_pass_to_pass_are_not_compared(tmp_path):
    class Noisy:
        def __iter__(self):
            return iter([x + torch.randn_like(x) for x in DATA.split(2)])

    space = vi.Parameters({"mu": torch.zeros((), dtype=torch.float64)})
    aim = vi.LogDensity(lambda p, batch: -0.5 * len(DATA) * (batch - p["mu"]).square().mean(), space)
    vi.fit_density(aim, vi.MeanField(), Noisy(), steps=8, progress=False).save(tmp_path / "fit")
    assert vi.load(tmp_path / "fit", aim, loader=Noisy()).family is not None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: target(shift=1.0), "another log density"),
        (lambda: target(tau=torch.zeros(2)), r"(?s)other parameters.*tau.: no such tensor in the file"),
        (lambda: target(sigma=torch.ones(())), "(?s)other parameters.*sigma.: .*positive in the file"),
        (
            lambda: vi.LogDensity(log_joint, vi.Parameters({"sigma": vi.constraints.positive(1.0), "mu": 0.0})),
            "other parameters",
        ),
        (
            lambda: vi.LogDensity(
                log_joint, vi.Parameters({"mu": 0.0, "sigma": vi.constraints.positive(1.0)}, dtype=torch.float32)
            ),
            "other parameters",
        ),
    ],
    ids=["shifted", "one more", "unconstrained", "order", "float32"],
)
def test_another_target_is_refused(saved, other, words):
    with pytest.raises(ValueError, match=words) as error:
        vi.load(saved[1], other())
    assert not isinstance(error.value, CheckpointError)  # the file is not to blame


def test_other_kinds_of_files_are_named(saved, tmp_path):
    net = nn.Linear(2, 1)
    with pytest.raises(CheckpointError, match="no posterior of a network, but 'density fit'"):
        vi.load(saved[1], net)
    bayes = vi.variationalize(net, vi.likelihoods.Gaussian("point"), vi.MeanField(), num_data=5)
    bayes.save(tmp_path / "net")
    with pytest.raises(CheckpointError, match="no fit of a log density"):
        vi.load(tmp_path / "net", target())
    with pytest.raises(FileNotFoundError):
        vi.load(tmp_path / "gone", target())
    with pytest.raises(TypeError, match=r"a network .*, a list of networks or a log density"):
        vi.load(saved[1], 3)  # type: ignore


def test_damage_anywhere_is_seen(saved, tmp_path):
    raw = saved[1].read_bytes()
    for place in range(0, len(raw), 97):
        (tmp_path / "fit").write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        with contextlib.suppress(CheckpointError, ValueError):  # a name that was hit makes other parameters
            # the last digit of a number may be another, and the number the same
            assert vi.load(tmp_path / "fit", target()).trace == saved[0].trace
    (tmp_path / "fit").write_bytes(raw[:-3])
    with pytest.raises(CheckpointError, match="damaged"):
        vi.load(tmp_path / "fit", target())


@pytest.mark.parametrize(
    "change",
    [
        {"status": "glorious"},
        {"elbo": ["much", 0.0, True]},
        {"elbo": [10**309, 0.0, True]},
        {"log_joint": 10**309},
        {"modes": [[0.0, 0.0, 1]]},
        {"family": {"value": {"structvi": ["NormalPrior", {}]}}},
        {"family": {"value": {"structvi": ["LowRankNormal", {"rank": 1_000_000}]}}},
        {"family": {"value": {"structvi": ["MeanField", {"initial_mean": "current"}]}}},
        {"space": 3},
    ],
    ids=str,
)
def test_a_made_up_description_with_the_right_hash_is_refused(saved, change, tmp_path):
    from structvi.files.file import read, write

    tensors, description = read(saved[1])
    write(tmp_path / "fit", tensors, description | change)
    with pytest.raises(CheckpointError):
        vi.load(tmp_path / "fit", target())


def test_no_code_is_in_the_file(saved):
    raw = saved[1].read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert set(header) - {"__metadata__"} == {
        "elbo.per_group", "modes.theta", "family.mean", "family.log_scale", "family.lower", "family.unit",
    }  # fmt: skip
