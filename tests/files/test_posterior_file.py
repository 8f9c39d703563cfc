"""A posterior that was saved and loaded predicts the same bits; what does not fit is refused by name."""

import contextlib
import copy
import os
import pickle

import pytest
import torch
from torch import distributions as td
from torch import nn

import structvi as vi
from structvi.files import file as checkpoint
from structvi.files.describe import FAMILIES as MOST_FAMILIES
from structvi.files.describe import decode, encode
from structvi.predict.predict import predict

FAMILIES = {
    "MAP": lambda: vi.MAP(),
    "MeanField": lambda: vi.MeanField(initial_scale=0.2),
    "LowRankNormal": lambda: vi.LowRankNormal(rank=3),
    "LowRankPrecision": lambda: vi.LowRankPrecision(rank=2, initial_factor=0.5),
    "FullNormal": lambda: vi.FullNormal(),
    "Mixture": lambda: vi.Mixture(vi.LowRankNormal(rank=1), components=3),
    "Mixture of several": lambda: vi.Mixture([vi.MAP(), vi.MAP(initial_mean="zero")]),
    "PerLayer": lambda: vi.PerLayer({"*": vi.MAP(), "0.*": vi.LowRankNormal(rank=2)}),
    "PerLayer with a point": lambda: vi.PerLayer({"2.*": vi.MAP(), "0.*": vi.FullNormal()}),
    "Mixture of mixtures": lambda: vi.Mixture(vi.Mixture(vi.MeanField()), components=3),
    "Mixture of blocks": lambda: vi.Mixture(vi.PerLayer({"2.*": vi.MeanField(), "0.*": vi.LowRankPrecision(rank=1)})),
    "MCDropout": lambda: vi.MCDropout(keep={"0.weight": 0.7}, per="input"),
}
#: name, and what a posterior needs besides
NOISE_PRIORS = {
    "default": None,
    "inverse gamma": td.InverseGamma(2.0, 1.5),
    "gamma": td.Gamma(torch.tensor(2.0, dtype=torch.float64), 1 / 3),
}
PRIORS = {
    "normal": vi.priors.NormalPrior(0.7),
    "learned by pattern": vi.priors.NormalPrior({"2.*": 0.1, "0.*": 1.0}, learn=True),
    "laplace": vi.priors.LaplacePrior(0.5, by_fan_in=True),
    "student": vi.priors.StudentTPrior(df=3.0, per="tensor"),
    "sum": vi.priors.NormalPrior(1.0) + vi.priors.LaplacePrior(0.5),
    "distributions": vi.priors.DistributionPrior(
        {"*weight": td.Cauchy(0.0, 1 / 3), "0.bias": td.Normal(torch.zeros(5), 0.1), "*": td.StudentT(4.0)}
    ),
}
LIKELIHOODS = {
    "number": vi.likelihoods.Gaussian(0.3),
    "point": vi.likelihoods.Gaussian("point", initial=0.5),
    **{f"random, {k}": vi.likelihoods.Gaussian("random", 0.5, prior) for k, prior in NOISE_PRIORS.items()},
    "head": vi.likelihoods.Gaussian("head"),
    "categorical": vi.likelihoods.Categorical(ignore_index=9, class_weights=[1.0, 0.5]),
    "bernoulli": vi.likelihoods.Bernoulli(),
    "poisson": vi.likelihoods.Poisson(),
}


def network(dtype=torch.float32, seed=0, hidden=5):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 2)).to(dtype)


def data(dtype=torch.float32, classes=False):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(12, 3, generator=g, dtype=torch.float64).to(dtype)
    return x, (x[:, 0] > 0).long() if classes else x[:, :2].sin()


def scatter(module, seed=0):
    """Other values for all parameters, as after a fit."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=g, dtype=torch.float64).to(parameter))
    return module


def outputs(posterior, x, **settings):
    pred = predict(posterior, x, draws=6, generator=torch.Generator().manual_seed(5), **settings)
    return [pred.outputs, pred.weights, *pred.values.values()]


def assert_same_bits(a, b):
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def loss(posterior, batch):
    return posterior.loss(batch, estimator=vi.Estimator(groups=2), generator=torch.Generator().manual_seed(7)).detach()


# The round trip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_predicts_the_same_bits_after_the_round_trip(tmp_path, name, dtype):
    batch = data(dtype, classes=True)
    posterior = vi.variationalize(network(dtype), vi.likelihoods.Categorical(), FAMILIES[name](), num_data=12)
    scatter(posterior)
    before = outputs(posterior, batch[0])
    posterior.save(tmp_path / "q")
    other = network(dtype, seed=9)
    stream = torch.get_rng_state()
    loaded = vi.load(tmp_path / "q", other)
    assert torch.equal(stream, torch.get_rng_state())  # loading draws nothing
    assert_same_bits(outputs(loaded, batch[0]), before)
    assert type(loaded.family) is type(posterior.family)
    assert encode(loaded.family) == encode(posterior.family)
    assert torch.equal(loss(loaded, batch), loss(posterior, batch))
    assert [n for n, _ in loaded.named_parameters()] == [n for n, _ in posterior.named_parameters()]
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "q").read_bytes()


@pytest.mark.parametrize("name", [*PRIORS, *LIKELIHOODS])
def test_every_prior_and_likelihood_is_rebuilt(tmp_path, name):
    """In float64: what is learned has another precision than in a new likelihood."""
    likelihood = copy.deepcopy(LIKELIHOODS.get(name, vi.likelihoods.Gaussian("point")))
    x, t = data(torch.float64, classes=name == "categorical")
    t = {"head": t[..., :1], "bernoulli": (t > 0).double(), "poisson": (t > 0).long()}.get(name, t)
    net, prior = network(torch.float64), copy.deepcopy(PRIORS.get(name))
    posterior = scatter(vi.variationalize(net, likelihood, vi.MeanField(), prior, num_data=12).double())
    posterior.save(tmp_path / "q")
    loaded = vi.load(tmp_path / "q", network(torch.float64, seed=9))
    assert type(loaded.model.likelihood) is type(likelihood)
    assert type(loaded.model.prior) is type(posterior.model.prior)
    assert loaded.space.names == posterior.space.names
    assert_same_bits([*loaded.parameters()], [*posterior.parameters()])
    assert_same_bits(outputs(loaded, x), outputs(posterior, x))
    assert_same_bits([loss(loaded, (x, t))], [loss(posterior, (x, t))])


def test_the_settings_come_back(tmp_path):
    posterior = vi.variationalize(
        nn.Sequential(network(), nn.BatchNorm1d(2), nn.Dropout(0.5)), vi.likelihoods.Categorical(), exclude="0.0.*",
        evaluation="loop", chunk=3, checkpoint_activations=True, dropout="on", batch_norm="deterministic",
    )  # fmt: skip
    posterior.save(tmp_path / "q")
    loaded = vi.load(tmp_path / "q", nn.Sequential(network(), nn.BatchNorm1d(2), nn.Dropout(0.5)))
    assert (loaded.dropout, loaded.batch_norm) == ("on", "deterministic")
    evaluation = loaded.model.evaluation
    assert (evaluation.mode, evaluation.chunk) == ("loop", 3)
    assert loaded.model.checkpoint_activations
    assert loaded.space.names == ("0.2.weight", "0.2.bias")


def test_files_hold_no_rows_of_the_users_data(tmp_path):
    """Neither a posterior's, with its calibration, nor a checkpoint's."""
    torch.manual_seed(0)
    x, t = 10 + torch.randn(200, 3), torch.randint(2, (200,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, t), batch_size=50, shuffle=True)
    posterior = vi.variationalize(normalised(), vi.likelihoods.Categorical(), vi.LowRankNormal(rank=1))
    posterior.fit(loader, epochs=1, checkpoint=vi.Checkpoint(tmp_path), progress=False)
    posterior.calibrate([(x[:50], t[:50])], conformal=[(x[50:100], t[50:100])])
    posterior.save(tmp_path / "q.safetensors")
    for path in tmp_path.iterdir():
        stored = path.read_bytes()
        assert not any(row.numpy().tobytes() in stored for row in x), path.name


# The network's own tensors


def normalised(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    net[1].running_mean.normal_()
    net[1].num_batches_tracked.fill_(seed + 3)
    net[0].weight.requires_grad_(False)
    return net


def test_held_tensors_and_buffers_are_stored_and_set_and_nothing_else(tmp_path):
    net = normalised()
    posterior = vi.variationalize(net, vi.likelihoods.Categorical(), vi.MeanField(), exclude="1.*", num_data=12)
    posterior.save(tmp_path / "q")
    other = normalised(seed=1)
    start = copy.deepcopy(other.state_dict())
    loaded = vi.load(tmp_path / "q", other)
    assert loaded.net is other
    assert_same_bits(outputs(loaded, data()[0]), outputs(posterior, data()[0]))
    random_names = {"0.bias", "2.weight", "2.bias"}
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, start[name] if name in random_names else net.state_dict()[name]), name
    assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in net.parameters()]


def test_a_hash_instead_of_tensors(tmp_path):
    net = normalised()
    posterior = vi.variationalize(net, vi.likelihoods.Categorical(), vi.MeanField(), num_data=12)
    posterior.save(tmp_path / "q", network="hash")
    assert not [name for name in checkpoint.read(tmp_path / "q")[0] if name.startswith("network.")]
    same = copy.deepcopy(net)
    with torch.no_grad():
        same[2].weight.zero_()  # a random one: its value here does not matter
    assert_same_bits(outputs(vi.load(tmp_path / "q", same), data()[0]), outputs(posterior, data()[0]))
    other = copy.deepcopy(net)
    other[1].running_var[2] += 1e-6
    with pytest.raises(ValueError, match="have other values: give the network as it was"):
        vi.load(tmp_path / "q", other)


def test_the_wrong_network_is_told_which_tensors_differ(tmp_path):
    vi.variationalize(network(), vi.likelihoods.Categorical(), num_data=12).save(tmp_path / "q")
    for net, message in [
        (network(hidden=6), r"'0.weight': \(5, 3\) torch.float32 in the file, \(6, 3\) torch.float32 here"),
        (network(torch.float64), r"'2.bias': \(2,\) torch.float32 in the file, \(2,\) torch.float64 here"),
        (nn.Sequential(nn.Linear(3, 5)), r"'2.bias': \(2,\) torch.float32 in the file, no such tensor here"),
        (nn.Sequential(*network(), nn.BatchNorm1d(2)), r"'3.weight': no such tensor in the file"),
    ]:
        with pytest.raises(ValueError, match=f"another network(.|\n)*{message}"):
            vi.load(tmp_path / "q", net)


# What users write themselves


class Heavy(vi.Family):
    def __init__(self, df=5.0):
        super().__init__()
        self.df = df

    def initialise(self, parameters, generator):
        self.loc = nn.Parameter(parameters.initial.clone())
        self.log_scale = nn.Parameter((0.1 * parameters.scale).log())

    def forward(self):
        return td.Independent(td.StudentT(self.df, self.loc, self.log_scale.exp()), 1)


class OwnPrior(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, parameters, theta):
        return td.Normal(0.0, self.log_scale.exp()).log_prob(theta).sum(-1)


def own_likelihood(output, target):
    return -(output - target).square().sum(-1)


def own_forward(net, batch):
    return net(batch["x"]), batch["t"]


OWN = {
    "family": Heavy,
    "prior": OwnPrior,
    "likelihood": lambda: own_likelihood,
    "forward": lambda: own_forward,
}


@pytest.mark.parametrize("parts", [["family"], ["prior"], ["likelihood"], ["forward"], list(OWN)])
def test_what_is_your_own_is_asked_for_by_name(tmp_path, parts):
    theirs = {"likelihood": vi.likelihoods.Gaussian(0.3), "family": vi.MeanField()}
    posterior = vi.variationalize(network(), **{**theirs, **{part: OWN[part]() for part in parts}}, num_data=12)
    scatter(posterior)
    posterior.save(tmp_path / "q")
    with pytest.raises(ValueError, match="is not in the file") as caught:
        vi.load(tmp_path / "q", network())
    assert {part for part in OWN if f"{part}=<" in str(caught.value)} == set(parts)
    loaded = vi.load(tmp_path / "q", network(seed=9), **{part: OWN[part]() for part in parts})
    x, t = data()
    batch = {"x": x, "t": t} if "forward" in parts else (x, t)
    assert_same_bits([loss(loaded, batch)], [loss(posterior, batch)])
    assert_same_bits([*loaded.learned().values()], [*posterior.learned().values()])


# Descriptions


def nested(depth, components=1):
    value = encode(vi.MeanField())
    for _ in range(depth - 1):
        value = {"structvi": ["Mixture", {"part": value, "components": components}]}
    return value


def test_what_describes_nothing_is_refused():
    """Malformed nests, other classes and kinds, numbers without bound, and more families than a posterior needs."""
    decode(nested(2, MOST_FAMILIES), "family")
    shapes = {"loc": encode(torch.zeros(2, 1)), "scale": encode(torch.ones(2))}
    for kind, value in [
        *((None, value) for value in ([1], {"a": 1, "b": 2}, {"list": 1}, {"dict": [[1]]}, {"__class__": ["x", {}]})),
        *((None, {"distribution": value}) for value in (["Chi2", {"df": 1.0}], ["Normal", {"loc": 0.0}])),
        (None, {"distribution": ["Normal", {"loc": 0.0, "scale": -1.0, "validate_args": False}]}),
        (None, {"distribution": ["Normal", shapes]}),
        *((None, {"tensor": value}) for value in (["torch.float8", 1.0], ["torch.float32", {"list": ["x"]}])),
        *(("family", {"structvi": value}) for value in (["MeanField"], ["os.system", {}], ["MeanField", {"x": 1}])),
        *(("family", value) for value in (3, encode(vi.priors.NormalPrior()))),
        *((None, value) for value in (encode(vi.MAP()), {"dict": [[{"list": []}, 1]]})),
        ("family", {"structvi": ["Mixture", {"part": encode(vi.priors.NormalPrior())}]}),
        ("prior", {"structvi": ["SumPrior", {"priors": {"list": [encode(vi.likelihoods.Poisson())]}}]}),
        ("prior", {"structvi": ["NormalPrior", {"scale": float("inf")}]}),
        ("family", {"structvi": ["LowRankNormal", {"rank": 10**400}]}),
        *(("family", value) for value in (nested(2, MOST_FAMILIES + 1), nested(3, 10**9), nested(6, 10))),
    ]:
        with pytest.raises(ValueError, match=r"."):
            decode(value, kind)


# Refusals


class Trap:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def hostile(tensors, description):
    """A hundred files with the right hash whose content is another: as a forger might write them."""
    values = (None, 7, "x", [], {}, [[1]], {"own": 1}, {"value": {"structvi": ["os.system", {}]}})
    allowed = {
        **{key: [None] for key in ("calibration", "fit_status", "hash")},
        "chosen_on": [None, "x"],
        "forward": values,  # no function is read from it
    }
    for field in description:
        yield f"without {field}", tensors, {k: v for k, v in description.items() if k != field}
        for value in values:
            if value != description[field] and value not in allowed.get(field, []):
                yield f"{field} = {value}", tensors, {**description, field: value}
    for arguments in ({"rank": 10**12}, {"rank": 99}, {"rank": -1}, {}, {"rank": 2, "more": 1}, {"rank": 1}):
        family = {"value": {"structvi": ["LowRankNormal", arguments]}}
        yield f"{arguments}", tensors, {**description, "family": family}
    for family in (vi.FullNormal(), vi.Mixture(vi.MAP(), components=4), vi.PerLayer({"zzz": vi.MAP()})):
        yield f"{family}", tensors, {**description, "family": {"value": encode(family)}}
    options = {
        "num_data": (10**400, 2**63, -1, 0, True, 12.0, float("nan"), "x"), "chunk": (0, -1, 1.5, "x"),
        "evaluation": (None, 7, "x"), "keys": (7, "x", ("a",), ("a", 7)), "checkpoint_activations": ("x", 7, None),
        "parameters": (None, 7), "net": (None,), "more": (None,), "linearise": (True,),
    }  # fmt: skip
    for option, wrong in options.items():
        for value in wrong:
            model = encode({**decode(description["model"]), option: value})
            yield f"{option} = {value}", tensors, {**description, "model": model}
    for value in ("x", 7, None):
        for modes in ({"dropout": value}, {"batch_norm": value}, {"more": value}):
            yield f"{modes}", tensors, {**description, "modes": encode(modes)}
    for name, tensor in tensors.items():
        yield f"without {name}", {k: v for k, v in tensors.items() if k != name}, description
        yield f"{name} renamed", {**{k: v for k, v in tensors.items() if k != name}, "other": tensor}, description
        yield f"{name} longer", {**tensors, name: torch.cat([tensor.reshape(-1), torch.ones(1)])}, description
        yield f"{name} flat", {**tensors, name: tensor.reshape(1, -1)}, description
        yield f"{name} in int64", {**tensors, name: tensor.float().long().short()}, description
        if name.split(".")[0] in ("family", "likelihood"):
            yield f"{name} of NaN", {**tensors, name: torch.full_like(tensor, torch.nan)}, description
    for name in ("family.more", "stray", "network.more", "linearised.more", "calibration.scores"):
        yield name, {**tensors, name: torch.ones(1)}, description


def test_hostile_files_are_refused_and_leave_the_network_alone(tmp_path):
    posterior = vi.variationalize(normalised(), vi.likelihoods.Gaussian("point"), vi.LowRankNormal(2), num_data=12)
    path, damaged, trap = tmp_path / "q", tmp_path / "damaged", tmp_path / "trap"
    posterior.save(path)
    net = normalised(seed=1)
    before = copy.deepcopy(net.state_dict())
    accepted, cases = [], list(hostile(*checkpoint.read(path)))
    assert len(cases) >= 100
    for name, tensors, description in cases:
        checkpoint.write(damaged, tensors, description)
        with contextlib.suppress(ValueError):
            vi.load(damaged, net)
            accepted.append(name)
    for content in (b"", pickle.dumps(Trap(trap)), path.read_bytes()[:-1]):
        damaged.write_bytes(content)
        with pytest.raises(vi.CheckpointError):
            vi.load(damaged, net)
    assert accepted == []
    assert not trap.exists()
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    vi.load(path, net)  # the whole one still loads
