"""One table of bad inputs: what is called, the exception it must raise, and what the message must say.

A message says what was expected, what came, and, where it is not plain, what to do.
"""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Independent, MultivariateNormal, Normal

import structvi as vi
from structvi import diagnostics, likelihoods, plots
from structvi.families.density import MAX_DENSE
from structvi.families.mean_field import DiagonalNormal

SPACE = vi.Parameters({"a": torch.zeros(2), "b": torch.zeros(1)})
OTHER = vi.Parameters({"a": torch.zeros(5)})
LARGE = vi.Parameters({"a": torch.zeros(MAX_DENSE), "b": torch.zeros(1)})
TARGET = vi.LogDensity(lambda p: -p["a"].square().sum() - p["b"].square().sum(), SPACE)
X, T = torch.zeros(6, 3), torch.zeros(6, 2)
LABELS = torch.zeros(6, dtype=torch.long)
GENERATOR = torch.Generator()


def net(**options) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, **options))


def spoiled(value: float) -> nn.Module:
    result = net()
    with torch.no_grad():
        result[2].bias[0] = value
    return result


def frozen() -> nn.Module:
    return net().requires_grad_(False)


def family(recipe: vi.Family | None = None, space: vi.Parameters = SPACE) -> vi.Family:
    return (recipe or vi.LowRankNormal(rank=2)).bind(space)


def density(recipe: vi.Family | None = None, space: vi.Parameters = SPACE) -> vi.Density:
    return family(recipe, space)()


def model(likelihood=None, prior=None, num_data=60, network=None, **options) -> vi.BayesianModel:
    likelihood = likelihoods.Gaussian(0.5) if likelihood is None else likelihood
    prior = vi.priors.NormalPrior() if prior is None else prior
    return vi.BayesianModel(network or net(), likelihood, prior, num_data, **options)


def posterior(likelihood=None) -> vi.Posterior:
    return vi.variationalize(net(), likelihood or likelihoods.Gaussian(0.5), vi.MeanField(), num_data=6)


def log_joint(batch, target: vi.BayesianModel | None = None):
    """Of a batch, at one draw (a plain call) and at several (the probe of vmap): both must say the same."""
    target = target or model()
    messages = set()
    for S in (1, 3):
        with pytest.raises((ValueError, TypeError)) as caught:
            target.log_joint(torch.zeros(S, target.space.size), batch)
        messages.add(str(caught.value).replace(f"[{S}]", "[S]"))
    assert len(messages) == 1
    raise caught.value


def classes(target, network=None):
    return log_joint((X, target), model(likelihoods.Categorical(), network=network))


def fitted(fn, groups=1):
    """The elbo of a log density whose function is `fn`."""
    return vi.elbo(family(), vi.LogDensity(fn, SPACE), estimator=vi.Estimator(groups=groups))


class Returns(vi.Family):
    """A family whose forward returns what it is given."""

    def __init__(self, result):
        super().__init__()
        self.result = result

    def forward(self):
        return self.result


class Own(vi.Density):
    """A density of the user's own, complete but for what a test takes away or spoils."""

    mean = torch.zeros(3)

    def draw(self, groups=1, coupling=vi.couplings.naive, generator=None):
        return vi.Draws(torch.zeros(groups, 3), torch.full((groups,), 1 / groups))


class OnlyLogProb(Own):
    def log_prob(self, theta):
        return theta.sum(-1)


class OnlyEntropy(Own):
    def entropy(self):
        return torch.zeros(())


class WideLogProb(Own):
    def log_prob(self, theta):
        return theta.sum(-1, keepdim=True)


class WideEntropy(Own):
    def entropy(self):
        return torch.zeros(3)


class WideScore(OnlyLogProb):
    def score(self, theta):
        return theta.sum(-1)


class TensorDraws(OnlyLogProb):
    def draw(self, groups=1, coupling=vi.couplings.naive, generator=None):
        return torch.zeros(groups, 3)


class WrongWeights(OnlyLogProb):
    def draw(self, groups=1, coupling=vi.couplings.naive, generator=None):
        return vi.Draws(torch.zeros(groups, 3), torch.ones(groups, 1))


class WrongTarget:
    """A target of the user's own with a log_joint that returns what it is given."""

    space = SPACE

    def __init__(self, result):
        self.result = result

    def log_joint(self, theta, batch=None):
        return self.result


def coupling(diagonal, low_rank, **options):
    return lambda groups, P, K, generator, dtype, device: vi.couplings.Noise(
        torch.zeros(*diagonal, **options), torch.zeros(*low_rank, **options)
    )


TABLE = {
    # --- Parameters
    "parameters: a list": (lambda: vi.Parameters([torch.zeros(2)]), TypeError, r"mapping of names.*got list"),
    "parameters: a module": (lambda: vi.Parameters(net()), TypeError, r"got Sequential.*Parameters\.of\(net\)"),
    "parameters: empty": (lambda: vi.Parameters({}), ValueError, r"at least one tensor"),
    "parameters: a word": (
        lambda: vi.Parameters({"z": "1.0"}),
        TypeError,
        r"z: expected a tensor, .*, got str",
    ),
    "parameters: name no string": (lambda: vi.Parameters({0: torch.zeros(2)}), TypeError, r"names must be strings.*0"),
    "parameters: integers": (
        lambda: vi.Parameters({"z": torch.arange(3)}),
        TypeError,
        r"must be floating, but .*'z': torch\.int64",
    ),
    "parameters: complex": (
        lambda: vi.Parameters({"z": torch.zeros(2, dtype=torch.complex64)}),
        TypeError,
        r"must be floating, but .*'z': torch\.complex64",
    ),
    "parameters: no elements": (
        lambda: vi.Parameters({"z": torch.zeros(0), "w": torch.zeros(1)}),
        ValueError,
        r"\['z'\] have no elements",
    ),
    "parameters: NaN": (lambda: vi.Parameters({"z": torch.tensor([0.0, torch.nan])}), ValueError, r"z hold non-finite"),
    "parameters: mixed dtypes": (
        lambda: vi.Parameters({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2).double()}),
        ValueError,
        r"share one dtype; most are like 'a', but \{'torch\.float64': 'c'\}",
    ),
    "parameters: mixed devices": (
        lambda: vi.Parameters({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2, device="meta")}),
        ValueError,
        r"share one device; most are like 'a', but \{'meta': 'c'\}",
    ),
    "parameters: without values": (
        lambda: vi.Parameters({"a": torch.zeros(2, device="meta")}),
        ValueError,
        r"on the meta device and hold no values; materialise",
    ),
    "parameters: of a function": (lambda: vi.Parameters.of(torch.tanh), TypeError, r"expects an nn\.Module, got"),
    "parameters: of a dict": (lambda: vi.Parameters.of({"a": T}), TypeError, r"expects an nn\.Module, got dict"),
    "parameters: nothing trainable": (lambda: vi.Parameters.of(frozen()), ValueError, r"no trainable parameter"),
    "parameters: without parameters": (lambda: vi.Parameters.of(nn.ReLU()), ValueError, r"ReLU has no trainable"),
    "parameters: lazy": (
        lambda: vi.Parameters.of(nn.LazyLinear(2)),
        ValueError,
        r"uninitialised lazy parameters \['weight', 'bias'\]: run one forward pass",
    ),
    "parameters: infinite weight": (lambda: vi.Parameters.of(spoiled(torch.inf)), ValueError, r"2\.bias hold non-fin"),
    "parameters: network of mixed dtypes": (
        lambda: vi.Parameters.of(net(dtype=torch.float64)),
        ValueError,
        r"share one dtype.*2\.weight, 2\.bias",
    ),
    "parameters: network on mixed devices": (
        lambda: vi.Parameters.of(net(device="meta")),
        ValueError,
        r"share one device.*2\.weight, 2\.bias",
    ),
    "select: no match": (
        lambda: vi.Parameters.of(net(), "head.*"),
        ValueError,
        r"select: the pattern 'head\.\*' matches none of the trainable tensors 0\.weight, 0\.bias, 2\.weight",
    ),
    "select: one of two has no match": (
        lambda: vi.Parameters.of(net(), ["0.*", "1.*"]),
        ValueError,
        r"the pattern '1\.\*' matches none",
    ),
    "exclude: no match": (lambda: vi.Parameters.of(net(), "*", "head.*"), ValueError, r"exclude: the pattern 'head"),
    "select: nothing left": (lambda: vi.Parameters.of(net(), "*", "*"), ValueError, r"leaves no tensor; the trainable"),
    "select: empty": (lambda: vi.Parameters.of(net(), ()), ValueError, r"select=\(\).*leaves no tensor"),
    "select: predicate never true": (
        lambda: vi.Parameters.of(net(), lambda name, tensor: False),
        ValueError,
        r"leaves no tensor",
    ),
    "select: None": (lambda: vi.Parameters.of(net(), None), TypeError, r"select takes glob patterns.*got None"),
    "select: a number": (lambda: vi.Parameters.of(net(), [0]), TypeError, r"select takes glob patterns.*got 0"),
    "unravel: wrong P": (lambda: SPACE.unravel(torch.zeros(4)), ValueError, r"P = 3, got \(4,\)"),
    "unravel: a number": (lambda: SPACE.unravel(torch.zeros(())), ValueError, r"P = 3, got \(\)"),
    "unravel: a list": (lambda: SPACE.unravel([0.0] * 3), TypeError, r"expects a tensor \[\.\., 3\], got list"),
    "ravel: missing and extra": (
        lambda: SPACE.ravel({"a": torch.zeros(2), "c": torch.zeros(1)}),
        ValueError,
        r"missing \['b'\], extra \['c'\]",
    ),
    "ravel: wrong shape": (
        lambda: SPACE.ravel({"a": torch.zeros(3), "b": torch.zeros(1)}),
        ValueError,
        r"a: expected shape \[\.\., 2\], got \(3,\)",
    ),
    "ravel: different leading shapes": (
        lambda: SPACE.ravel({"a": torch.zeros(4, 2), "b": torch.zeros(5, 1)}),
        ValueError,
        r"b: leading shape \(5,\) differs from \(4,\)",
    ),
    "ravel: a list": (lambda: SPACE.ravel({"a": [0.0, 0.0], "b": [0.0]}), TypeError, r"a: expected a tensor, got list"),
    "append: a name that is taken": (
        lambda: SPACE.append({"a": torch.zeros(2)}),
        ValueError,
        r"names \['a'\] are taken already",
    ),
    "slice: unknown name": (lambda: SPACE.slice("c"), ValueError, r"no tensor named 'c'; the random ones are a, b"),
    "subset: unknown name": (lambda: SPACE.subset(["a", "c"]), ValueError, r"no tensor named 'c'"),
    "fresh: a seed": (lambda: vi.Parameters.of(net()).fresh(0), TypeError, r"must be a torch\.Generator, got int"),
    # --- recipes and binding
    "rank: negative": (lambda: vi.LowRankNormal(rank=-1), ValueError, r"rank must be an integer ≥ 0, got -1"),
    "rank: float": (lambda: vi.LowRankNormal(rank=2.0), ValueError, r"rank must be an integer ≥ 0, got 2\.0"),
    "rank: bool": (lambda: vi.LowRankPrecision(rank=True), ValueError, r"rank must be an integer ≥ 0, got True"),
    "rank: more than P": (
        lambda: vi.LowRankNormal(rank=4).bind(SPACE),
        ValueError,
        r"rank 4 is larger than the number of weights P = 3; take at most 3",
    ),
    "rank: more than P, precision": (
        lambda: vi.LowRankPrecision(rank=4).bind(SPACE),
        ValueError,
        r"rank 4 is larger",
    ),
    "initial_mean": (lambda: vi.MeanField("prior"), ValueError, r'"current", "fresh" or "zero", got \'prior\''),
    "initial_mean: of MAP": (lambda: vi.MAP("prior"), ValueError, r'"current", "fresh" or "zero", got \'prior\''),
    "initial_scale: zero": (lambda: vi.FullNormal(initial_scale=0), ValueError, r"initial_scale must be a positive"),
    "initial_scale: NaN": (lambda: vi.MeanField(initial_scale=torch.nan), ValueError, r"positive number.*got nan"),
    "initial_scale: bool": (lambda: vi.MeanField(initial_scale=True), ValueError, r"positive number.*got True"),
    "initial_factor: negative": (
        lambda: vi.LowRankNormal(2, initial_factor=-0.1),
        ValueError,
        r"initial_factor must be a number ≥ 0, got -0\.1",
    ),
    "initial_factor: a string": (
        lambda: vi.LowRankPrecision(2, initial_factor="small"),
        ValueError,
        r"initial_factor must be a number ≥ 0, got 'small'",
    ),
    "bind: a dict": (
        lambda: vi.MeanField().bind({"z": torch.zeros(2)}),
        TypeError,
        r"bind expects Parameters, got dict; write Parameters\.of",
    ),
    "bind: a network": (lambda: vi.MeanField().bind(net()), TypeError, r"bind expects Parameters, got Sequential"),
    "bind: twice": (lambda: family().bind(SPACE), ValueError, r"LowRankNormal is bound already; bind a recipe"),
    "bind: a seed": (lambda: vi.MAP().bind(SPACE, 0), TypeError, r"generator must be a torch\.Generator, got int"),
    "call: a recipe": (lambda: vi.MeanField()(), ValueError, r"MeanField is a recipe.*call \.bind\(parameters\) first"),
    "call: FullNormal too large": (
        lambda: vi.FullNormal().bind(LARGE),
        ValueError,
        rf"needs {MAX_DENSE + 1}² numbers and refuses beyond P = {MAX_DENSE}; use LowRankNormal",
    ),
    # --- a family of the user's own
    "forward: junk": (lambda: Returns("junk")(), TypeError, r"Returns\.forward must return a Density.*got str"),
    "forward: a tensor": (lambda: Returns(torch.zeros(3))(), TypeError, r"must return a Density.*got Tensor"),
    "forward: the wrong size": (
        lambda: Returns(Independent(Normal(torch.zeros(4), 1.0), 1)).bind(SPACE)(),
        ValueError,
        r"density over 4 numbers; its parameters have P = 3",
    ),
    "distribution: a batch shape": (
        lambda: Returns(Normal(torch.zeros(3), 1.0))(),
        ValueError,
        r"event shape \[P\] and no batch shape, got event \(\) and batch \(3,\); wrap it: .*Independent\(d, 1\)",
    ),
    "distribution: a batch of vectors": (
        lambda: Returns(MultivariateNormal(torch.zeros(2, 3), torch.eye(3)))(),
        ValueError,
        r"got event \(3,\) and batch \(2,\)",
    ),
    "distribution: no rsample": (
        lambda: Returns(Independent(Bernoulli(torch.full((3,), 0.5)), 1))(),
        ValueError,
        r"no rsample: gradients cannot pass",
    ),
    "distribution: a seed": (
        lambda: Returns(Independent(Normal(torch.zeros(3), 1.0), 1))().draw(generator=1),
        TypeError,
        r"generator must be a torch\.Generator, got int",
    ),
    "density: abstract": (lambda: vi.Density(), TypeError, r"abstract"),
    # --- draws and couplings
    "groups: zero": (lambda: density().draw(groups=0), ValueError, r"groups must be an integer ≥ 1, got 0"),
    "groups: negative": (lambda: density(vi.MAP()).draw(groups=-1), ValueError, r"integer ≥ 1, got -1"),
    "groups: float": (lambda: density().draw(groups=1.5), ValueError, r"integer ≥ 1, got 1\.5"),
    "groups: bool": (lambda: density().draw(groups=True), ValueError, r"integer ≥ 1, got True"),
    "coupling: a string": (lambda: density().draw(1, "paired"), TypeError, r"callable such as naive.*got 'paired'"),
    "coupling: returns nothing": (
        lambda: density().draw(1, lambda *args: None),
        TypeError,
        r"must return Noise\(diagonal \[S, P\], low_rank \[S, K\]\), got NoneType",
    ),
    "coupling: returns one tensor": (
        lambda: density().draw(1, lambda *args: torch.zeros(2, 3)),
        TypeError,
        r"must return Noise.*got Tensor",
    ),
    "coupling: wrong P": (
        lambda: density().draw(1, coupling((4, 2), (4, 2))),
        ValueError,
        r"noise of shapes \(\(4, 2\), \(4, 2\)\); expected \[S, 3\] and \[S, 2\]",
    ),
    "coupling: wrong K": (lambda: density().draw(1, coupling((4, 3), (4, 3))), ValueError, r"\[S, 3\] and \[S, 2\]"),
    "coupling: different S": (lambda: density().draw(1, coupling((4, 3), (2, 2))), ValueError, r"noise of shapes"),
    "coupling: S no multiple of groups": (
        lambda: density().draw(3, coupling((4, 3), (4, 2))),
        ValueError,
        r"S a multiple of groups = 3",
    ),
    "coupling: no draws": (lambda: density().draw(1, coupling((0, 3), (0, 2))), ValueError, r"noise of shapes"),
    "coupling: another dtype": (
        lambda: density().draw(1, coupling((2, 3), (2, 2), dtype=torch.float64)),
        ValueError,
        r"noise of torch\.float64 on cpu.*weights are torch\.float32 on cpu: pass on `dtype` and `device`",
    ),
    "coupling: another device": (
        lambda: density().draw(1, coupling((2, 3), (2, 2), device="meta")),
        ValueError,
        r"noise of torch\.float32 on meta.*the weights are torch\.float32 on cpu",
    ),
    "unscented: no directions": (lambda: vi.couplings.unscented(directions=0), ValueError, r"an integer ≥ 1, got 0"),
    "unscented: float": (lambda: vi.couplings.unscented(directions=1.5), ValueError, r"an integer ≥ 1, got 1\.5"),
    "unscented: bool": (lambda: vi.couplings.unscented(directions=True), ValueError, r"an integer ≥ 1, got True"),
    "unscented: more than the rank": (
        lambda: density().draw(1, vi.couplings.unscented(directions=3)),
        ValueError,
        r"directions=3 but the family has rank 2; take at most 2, or None for all",
    ),
    "generator: a seed": (lambda: density().draw(generator=0), TypeError, r"must be a torch\.Generator, got int"),
    "generator: on another device": (
        lambda: DiagonalNormal(*torch.ones(2, 3, device="meta")).draw(generator=GENERATOR),
        ValueError,
        r"generator is on cpu, the weights on meta; make one there: torch\.Generator\(\"meta\"\)",
    ),
    # --- densities
    "log_prob: one point": (
        lambda: density().log_prob(torch.zeros(3)),
        ValueError,
        r"\[S, P\] with P = 3, got \(3,\); for one point add a row axis",
    ),
    "log_prob: wrong P": (lambda: density(vi.MAP()).log_prob(torch.zeros(2, 4)), ValueError, r"P = 3, got \(2, 4\)"),
    "log_prob: a list": (lambda: density().log_prob([[0.0] * 3]), ValueError, r"\[S, P\] with P = 3, got list"),
    "log_prob: of a distribution": (
        lambda: Returns(Independent(Normal(torch.zeros(3), 1.0), 1))().log_prob(torch.zeros(3)),
        ValueError,
        r"P = 3, got \(3,\)",
    ),
    "score: wrong P": (lambda: density().score(torch.zeros(2, 4)), ValueError, r"P = 3, got \(2, 4\)"),
    "score: of a point mass": (lambda: density(vi.MAP()).score(torch.zeros(1, 3)), NotImplementedError, r"no score"),
    "entropy: of a point mass": (
        lambda: density(vi.MAP()).entropy(),
        NotImplementedError,
        r"no finite differential entropy",
    ),
    "log_prob: not written": (lambda: OnlyEntropy().log_prob(torch.zeros(1, 3)), NotImplementedError, r"write `log_pr"),
    "covariance: unknown name": (lambda: density().covariance("c"), ValueError, r"no tensor named 'c'.*a, b"),
    "covariance: three names": (
        lambda: density().covariance("a", "b", "a"),
        ValueError,
        r"no name, one or two, got \('a', 'b', 'a'\)",
    ),
    "covariance: too large": (
        lambda: density(vi.MeanField(), LARGE).covariance(),
        ValueError,
        rf"P = {MAX_DENSE + 1} is beyond {MAX_DENSE}; ask for the block",
    ),
    "covariance: names without a space": (lambda: OnlyEntropy().covariance("a"), ValueError, r"no named tensors"),
    "to_distribution: of a point mass": (
        lambda: density(vi.MAP()).to_distribution(),
        NotImplementedError,
        r"no torch distribution equals PointMass",
    ),
    "kl: different sizes": (
        lambda: vi.kl(density(), density(vi.MeanField(), OTHER)),
        ValueError,
        r"q is over 3 numbers and p over 5",
    ),
    "kl: a point mass": (lambda: vi.kl(density(vi.MAP()), density()), TypeError, r"Gaussians; q is PointMass"),
    "kl: families": (
        lambda: vi.kl(family(), family()),
        TypeError,
        r"q is LowRankNormal\. Call the families \(q = family\(\)\)",
    ),
    # --- the objective
    "elbo: a density": (
        lambda: vi.elbo(density(), TARGET),
        TypeError,
        r"expects a family, got LowRankNormalDensity; pass the family, not the density",
    ),
    "elbo: a recipe": (lambda: vi.elbo(vi.MeanField(), TARGET), ValueError, r"MeanField is a recipe"),
    "elbo: a function as target": (
        lambda: vi.elbo(family(), lambda p: p["a"].sum()),
        TypeError,
        r"must have `space` and `log_joint`, got function; .*LogDensity\(fn, parameters\)",
    ),
    "elbo: a network as target": (
        lambda: vi.elbo(family(), net()),
        TypeError,
        r"got Sequential; write BayesianModel\(net, likelihood, prior, num_data\)",
    ),
    "elbo: another space": (
        lambda: vi.elbo(family(space=OTHER), TARGET),
        ValueError,
        r"different parameters: P = 5 .* and P = 3 .*; bind the family to target\.space",
    ),
    "elbo: other names": (
        lambda: vi.elbo(family(space=vi.Parameters({"c": torch.zeros(3)})), TARGET),
        ValueError,
        r"different parameters: P = 3 \(c, \.\.\) and P = 3 \(a, b, \.\.\); bind the family",
    ),
    "elbo: unknown estimator": (
        lambda: vi.elbo(family(), TARGET, estimator=vi.Estimator("reinforce")),
        ValueError,
        r'"path", "log_q" or "entropy", got \'reinforce\'',
    ),
    "elbo: unknown estimator, point mass": (
        lambda: vi.elbo(family(vi.MAP()), TARGET, estimator=vi.Estimator("pathwise")),
        ValueError,
        r'"path", "log_q" or "entropy", got \'pathwise\'',
    ),
    "elbo: can only draw": (
        lambda: vi.elbo(Returns(Own()), TARGET),
        ValueError,
        r"Own can only draw.*Write its `log_prob` or its `entropy`",
    ),
    "elbo: path without log_prob": (
        lambda: vi.elbo(Returns(OnlyEntropy()), TARGET, estimator=vi.Estimator("path")),
        ValueError,
        r'Estimator\("path"\) needs `log_prob`, which OnlyEntropy does not offer; use "entropy"',
    ),
    "elbo: log_q without log_prob": (
        lambda: vi.elbo(Returns(OnlyEntropy()), TARGET, estimator=vi.Estimator("log_q")),
        ValueError,
        r'Estimator\("log_q"\) needs `log_prob`.*use "entropy"',
    ),
    "elbo: entropy without entropy": (
        lambda: vi.elbo(Returns(OnlyLogProb()), TARGET, estimator=vi.Estimator("entropy")),
        ValueError,
        r'Estimator\("entropy"\) needs `entropy`.*use "path" or "log_q"',
    ),
    "elbo: log_prob of the wrong shape": (
        lambda: vi.elbo(Returns(WideLogProb()), TARGET, estimator=vi.Estimator("log_q", groups=2)),
        ValueError,
        r"WideLogProb\.log_prob must return \[S\] = \[2\].*got shape \(2, 1\)",
    ),
    "elbo: score of the wrong shape": (
        lambda: vi.elbo(Returns(WideScore()), TARGET, estimator=vi.Estimator(groups=2)),
        ValueError,
        r"WideScore\.score must return \[S, P\], got shape \(2,\)",
    ),
    "elbo: entropy of the wrong shape": (
        lambda: vi.elbo(Returns(WideEntropy()), TARGET, estimator=vi.Estimator("entropy", groups=3)),
        ValueError,
        r"WideEntropy\.entropy\(\) must return a scalar, got shape \(3,\)",
    ),
    "elbo: draws without weights": (
        lambda: vi.elbo(Returns(TensorDraws()), TARGET),
        TypeError,
        r"TensorDraws\.draw must return Draws\(theta \[S, P\], weight \[S\]\), got Tensor",
    ),
    "elbo: weights of the wrong shape": (
        lambda: vi.elbo(Returns(WrongWeights()), TARGET, estimator=vi.Estimator(groups=2)),
        ValueError,
        r"draw gave theta \(2, 3\) and weight \(2, 1\); expected \[S, P\] and \[S\]",
    ),
    "fit: a network": (
        lambda: vi.fit_density(model(), vi.MeanField()),
        TypeError,
        r"log densities.*variationalize\(net",
    ),
    "fit: a function": (
        lambda: vi.fit_density(lambda p: p["a"].sum(), vi.MeanField()),
        TypeError,
        r"LogDensity\(fn, parameters",
    ),
    "fit: no family": (lambda: vi.fit_density(TARGET, "full"), TypeError, r"expects a family, got str.*FullNormal\(\)"),
    "fit: a class": (
        lambda: vi.fit_density(TARGET, vi.FullNormal),
        TypeError,
        r"got the class FullNormal; write FullNormal\(\)",
    ),
    "load: a log density": (lambda: vi.load("a.safetensors", TARGET), TypeError, r"got LogDensity.*vi\.load_fit\(path"),
    "fit: a density": (
        lambda: vi.fit_density(TARGET, density()),
        TypeError,
        r"expects a family, got LowRankNormalDensity",
    ),
    "fit: a point mass": (lambda: vi.fit_density(TARGET, vi.MAP()), ValueError, r"has no density"),
    "fit: few draws": (
        lambda: vi.fit_density(TARGET, vi.LowRankNormal(2), draws=8),
        ValueError,
        r"2\(P \+ K\) = 10, got 8",
    ),
    "fit: odd draws": (lambda: vi.fit_density(TARGET, vi.MeanField(), draws=33), ValueError, r"draws must be even"),
    "fit: draws": (
        lambda: vi.fit_density(TARGET, vi.MeanField(), draws=8.0),
        ValueError,
        r"draws must be None or an integer",
    ),
    "fit: starts": (
        lambda: vi.fit_density(TARGET, vi.MeanField(), starts=0),
        ValueError,
        r"starts must be .* ≥ 1, got 0",
    ),
    "fit: bound, starts": (
        lambda: vi.fit_density(TARGET, family(), starts=3),
        ValueError,
        r"goes on from where it is, got st",
    ),
    "fit: few evaluations": (
        lambda: vi.fit_density(TARGET, vi.MeanField(), max_evaluations=100),
        ValueError,
        r"max_evaluations must be None or an integer ≥ 1280, got 100",
    ),
    "fit: tolerance": (
        lambda: vi.fit_density(TARGET, vi.MeanField(), tolerance=0),
        ValueError,
        r"positive number of nats, got 0",
    ),
    "fit: other space": (lambda: vi.fit_density(TARGET, family(space=OTHER)), ValueError, r"over different parameters"),
    "fit: too large": (
        lambda: vi.fit_density(vi.LogDensity(lambda p: p["a"].sum(), LARGE), vi.MeanField(), draws=64),
        ValueError,
        r"beyond 8192: take a diagonal plus low rank without draws=, or maximise `elbo`",
    ),
    "fit: a dict with more than the network takes": (
        lambda: vi.variationalize(nn.Linear(2, 1), likelihoods.Gaussian(1.0), num_data=4).fit(
            [{"image": torch.zeros(4, 2), "label": torch.zeros(4, 1), "age": torch.zeros(4)}],
            steps=1,
            progress=False,
        ),
        ValueError,
        r"forward\(input\) does not take \['image', 'age'\]: tell which.*keys=.*or give it a function forward=",
    ),
    "elbo: groups": (
        lambda: vi.elbo(Returns(OnlyLogProb()), TARGET, estimator=vi.Estimator(groups=0)),
        ValueError,
        r"integer ≥ 1, got 0",
    ),
    "elbo: coupling": (
        lambda: vi.elbo(family(), TARGET, estimator=vi.Estimator(coupling="naive")),
        TypeError,
        r"callable.*got 'naive'",
    ),
    "elbo: a seed": (lambda: vi.elbo(family(), TARGET, generator=0), TypeError, r"torch\.Generator, got int"),
    "elbo: without a batch": (
        lambda: vi.elbo(family(space=(m := model()).space), m),
        ValueError,
        r"needs a batch: \(input, target\), or a dict",
    ),
    # --- log densities
    "log density: no function": (lambda: vi.LogDensity(T, SPACE), TypeError, r"expects a function.*got Tensor"),
    "log density: a dict as space": (
        lambda: vi.LogDensity(torch.sum, {"z": T}),
        TypeError,
        r"expects Parameters, got dict",
    ),
    "log density: not a scalar": (
        lambda: fitted(lambda p: -p["a"].square()),
        ValueError,
        r"must return a floating scalar for one draw, got \(2,\) of torch\.float32; sum over its elements",
    ),
    "log density: an integer": (
        lambda: fitted(lambda p: (p["a"] > 0).sum()),
        ValueError,
        r"floating scalar for one draw, got \(\) of torch\.int64",
    ),
    "log density: a number": (lambda: fitted(lambda p: 0.0), ValueError, r"floating scalar for one draw, got float"),
    "log density: nothing": (lambda: fitted(lambda p: None), ValueError, r"floating scalar.*got NoneType"),
    "log density: NaN": (
        lambda: fitted(lambda p: p["a"].sum() * torch.nan, groups=2),
        vi.NonFiniteError,
        r"not finite at 4 of 4 draws \(first: nan\); look for",
    ),
    "log density: −∞": (
        lambda: fitted(lambda p: p["a"].sum() - torch.inf),
        ValueError,
        r"not finite at 2 of 2 draws \(first: -inf\)",
    ),
    "log density: evaluation": (
        lambda: vi.LogDensity(torch.sum, SPACE, evaluation="fast"),
        ValueError,
        r'"auto", "vmap" or "loop", got \'fast\'',
    ),
    "log density: one point": (
        lambda: TARGET.log_joint(torch.zeros(3)),
        ValueError,
        r"\[S, P\] with S ≥ 1 and P = 3, got \(3,\); for one point add a row axis",
    ),
    "log density: no draws": (lambda: TARGET.log_joint(torch.zeros(0, 3)), ValueError, r"S ≥ 1 and P = 3, got \(0, 3"),
    "log density: wrong P": (lambda: TARGET.log_joint(torch.zeros(2, 4)), ValueError, r"P = 3, got \(2, 4\)"),
    "target: the wrong shape": (
        lambda: vi.elbo(family(), WrongTarget(torch.zeros(3))),
        ValueError,
        r"log_joint must return \[S\] = \[2\] for theta \[S, P\], got shape \(3,\)",
    ),
    "target: a number": (lambda: vi.elbo(family(), WrongTarget(0.0)), ValueError, r"\[S\] = \[2\].*got float"),
    # --- models
    "model: no module": (
        lambda: vi.BayesianModel(torch.tanh, likelihoods.Categorical(), vi.priors.NormalPrior(), 10),
        TypeError,
        r"expects an nn\.Module, got",
    ),
    "model: DataParallel": (
        lambda: model(network=nn.DataParallel(net())),
        TypeError,
        r"DataParallel cannot be called with drawn weights; give the network inside it, net\.module",
    ),
    "model: likelihood class": (
        lambda: model(likelihoods.Categorical),
        TypeError,
        r"must be objects, not classes: write NormalPrior\(1\.0\), Categorical\(\)",
    ),
    "model: likelihood by name": (lambda: model("gaussian"), TypeError, r"likelihood must be callable, got 'gaussian'"),
    "model: a loss as likelihood": (
        lambda: model(nn.CrossEntropyLoss(reduction="none")),
        TypeError,
        r"CrossEntropyLoss is a loss, to be made small; .*Categorical\(\)",
    ),
    "model: a Dice loss as likelihood": (
        lambda: log_joint(
            (X, LABELS), model(lambda y, t: 1 - 2 * y.softmax(1)[:, 1].dot(t.to(y)) / (len(t) + t.sum()))
        ),
        ValueError,
        r"each observation, \[.*got \(\); one number for the batch is a loss, and Dice losses.*Categorical\(\)",
    ),
    "model: a loss function as likelihood": (
        lambda: model(nn.functional.cross_entropy),
        TypeError,
        r"cross_entropy is a loss, to be made small; .*Categorical\(\)",
    ),
    "model: a distribution as prior": (
        lambda: model(prior=Normal(0.0, 1.0)),
        TypeError,
        r"prior must be callable, got Normal.*write NormalPrior\(1\.0\) or DistributionPrior",
    ),
    "model: prior class": (lambda: model(prior=vi.priors.NormalPrior), TypeError, r"must be objects, not classes"),
    "model: prior a number": (lambda: model(prior=1.0), TypeError, r"prior must be callable, got 1\.0"),
    "model: num_data zero": (lambda: model(num_data=0), ValueError, r"number of observations.*got 0"),
    "model: num_data negative": (lambda: model(num_data=-5), ValueError, r"number of observations.*got -5"),
    "model: num_data float": (lambda: model(num_data=60.0), ValueError, r"number of observations.*got 60\.0"),
    "model: num_data not set": (
        lambda: model(num_data=None).log_joint(torch.zeros(2, model().space.size), (X, T)),
        ValueError,
        r"num_data.* is not known yet: set it, give num_data= to variationalize, or fit first",
    ),
    "model: num_data bool": (lambda: model(num_data=True), ValueError, r"number of observations.*got True"),
    "model: parameters a dict": (
        lambda: model(parameters={"0.weight": T}),
        TypeError,
        r"parameters= expects Parameters, got dict; write Parameters\.of\(net, select\)",
    ),
    "model: parameters of another network": (
        lambda: model(parameters=vi.Parameters.of(nn.Linear(3, 2))),
        ValueError,
        r"the network has no tensor 'weight' of shape \(2, 3\)",
    ),
    "model: parameters of another shape": (
        lambda: model(parameters=vi.Parameters.of(nn.Sequential(nn.Linear(9, 4)))),
        ValueError,
        r"the network has no tensor '0\.weight' of shape \(4, 9\)",
    ),
    "model: forward no function": (lambda: model(forward="net"), TypeError, r"forward= must be a function.*got 'net'"),
    "model: evaluation": (lambda: model(evaluation="fast"), ValueError, r'"auto", "vmap" or "loop", got \'fast\''),
    "model: chunk zero": (lambda: model(chunk=0), ValueError, r"chunk must be None or an integer ≥ 1, got 0"),
    "model: chunk bool": (lambda: model(chunk=True), ValueError, r"chunk must be None or an integer ≥ 1, got True"),
    "model: checkpointed vmap": (
        lambda: model(evaluation="vmap", checkpoint_activations=True),
        ValueError,
        r'checkpoint_activations=True takes one draw at a time: use evaluation="auto" or "loop"',
    ),
    "model: precision": (
        lambda: setattr(model(), "precision", torch.float32),
        ValueError,
        r"precision must be None, torch\.bfloat16 or torch\.float16, got torch\.float32",
    ),
    "model: one point": (
        lambda: model().log_joint(torch.zeros(26), (X, T)),
        ValueError,
        r"\[S, P\] with S ≥ 1 and P = 26, got \(26,\)",
    ),
    "model: wrong P": (lambda: model().log_prior(torch.zeros(2, 25)), ValueError, r"P = 26, got \(2, 25\)"),
    "model: outputs at one point": (lambda: model().outputs(torch.zeros(26), X), ValueError, r"P = 26, got \(26,\)"),
    "model: outputs that are no tensors": (
        lambda: model(network=Words(net()), evaluation="loop").outputs(torch.zeros(2, 26), X),
        TypeError,
        r"expected a tensor, or tensors in tuples, lists and dicts, got str",
    ),
    "prior: a scalar": (
        lambda: log_joint((X, T), model(prior=lambda space, theta: -theta.square().sum())),
        ValueError,
        r"the prior must return \[S\] = \[3\], got \(\)",
    ),
    "prior: per weight": (
        lambda: model(prior=lambda space, theta: -theta.square()).log_prior(torch.zeros(2, 26)),
        ValueError,
        r"the prior must return \[S\] = \[2\], got \(2, 26\)",
    ),
    "prior: scale zero": (lambda: vi.priors.NormalPrior(0), ValueError, r"scale.*positive.*got 0"),
    "prior: scale negative": (lambda: vi.priors.NormalPrior(-1.0), ValueError, r"scale.*positive.*got -1\.0"),
    "prior: scale infinite": (lambda: vi.priors.NormalPrior(torch.inf), ValueError, r"scale.*positive.*got inf"),
    # --- batches
    "batch: None": (lambda: log_joint(None), ValueError, r"needs a batch: \(input, target\), or a dict"),
    "batch: three": (lambda: log_joint((X, T, T)), TypeError, r"\(input, target\) or a dict, got tuple of 3.*forward="),
    "batch: one": (lambda: log_joint((X,)), TypeError, r"\(input, target\) or a dict, got tuple of 1"),
    "batch: a tensor": (lambda: log_joint(X), TypeError, r"\(input, target\) or a dict, got Tensor"),
    "batch: dict without target": (
        lambda: log_joint({"x": X, "truth": T}),
        ValueError,
        r"exactly one of the keys \('target',.*got \['truth', 'x'\]",
    ),
    "batch: dict with two targets": (
        lambda: log_joint({"x": X, "y": T, "label": T}),
        ValueError,
        r"exactly one of the keys.*got \['label', 'x', 'y'\]",
    ),
    "batch: dict without input": (lambda: log_joint({"y": T}), ValueError, r"has a target 'y' but no input"),
    "batch: empty": (
        lambda: log_joint((X[:0], T[:0]), model(network=nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))),
        ValueError,
        r"target must be a tensor \[B, \.\.\] with B ≥ 1, got \(0, 2\)",
    ),
    "batch: target a list": (lambda: log_joint((X, [0.0] * 6)), ValueError, r"must be a tensor \[B, \.\.\].*got list"),
    "batch: target a number": (lambda: log_joint((X, torch.zeros(()))), ValueError, r"B ≥ 1, got \(\)"),
    "batch: more than num_data": (
        lambda: log_joint((X, T), model(num_data=5)),
        ValueError,
        r"batch has 6 observations, more than num_data = 5",
    ),
    "forward: no pair": (
        lambda: log_joint((X, T), model(forward=lambda net, batch: net(batch[0]))),
        TypeError,
        r"forward= must return a pair \(output, target\)",
    ),
    # --- likelihoods
    "likelihood: a scalar": (
        lambda: log_joint((X, T), model(lambda output, target: -(output - target).square().sum())),
        ValueError,
        r"log p\(t \| y\) of each observation, \[6, \.\.\], got \(\)",
    ),
    "likelihood: no tensor": (
        lambda: log_joint((X, T), model(lambda output, target: 0.0)),
        ValueError,
        r"of each observation, \[6, \.\.\], got float",
    ),
    "gaussian: noise zero": (lambda: likelihoods.Gaussian(0.0), ValueError, r"noise must be a positive.*got 0\.0"),
    "gaussian: noise negative": (
        lambda: likelihoods.Gaussian(-0.1),
        ValueError,
        r"noise must be a positive.*got -0\.1",
    ),
    "gaussian: noise NaN": (lambda: likelihoods.Gaussian(torch.nan), ValueError, r"noise must be a positive.*got nan"),
    "gaussian: noise bool": (lambda: likelihoods.Gaussian(True), ValueError, r"noise must be a positive.*got True"),
    "gaussian: shapes": (
        lambda: log_joint((X, torch.zeros(6))),
        ValueError,
        r"output has shape \(6, 2\) and the target \(6,\); they must be equal \(broadcasting",
    ),
    "gaussian: labels": (lambda: log_joint((X, T.long())), TypeError, r"target must be floating, got torch\.int64"),
    "gaussian: output no tensor": (
        lambda: log_joint((X, T), model(network=Pair(net()))),
        TypeError,
        r"output must be a tensor, got tuple",
    ),
    "gaussian: NaN in the data": (
        lambda: vi.elbo(family(space=(m := model()).space), m, (X, T * torch.nan)),
        vi.NonFiniteError,
        r"not finite at 2 of 2 draws.*data that are not finite",
    ),
    "categorical: label too large": (lambda: classes(LABELS + 2), ValueError, r"must lie in 0 … 1"),
    "categorical: label negative": (lambda: classes(LABELS - 1), ValueError, r"must lie in 0 … 1"),
    "categorical: floating labels": (
        lambda: classes(LABELS.float()),
        TypeError,
        r"labels must be integers, got torch\.float32; convert them",
    ),
    "categorical: one-hot labels": (
        lambda: classes(torch.zeros(6, 2, dtype=torch.long)),
        ValueError,
        r"logits \[B, C, \.\.\] and labels \[B, \.\.\], got \(6, 2\) and \(6, 2\)",
    ),
    "categorical: one logit": (
        lambda: likelihoods.Categorical()(torch.zeros(6, 1, 4, 4), torch.zeros(6, 4, 4, dtype=torch.long)),
        ValueError,
        r"a logit for each class.*got \(6, 1, 4, 4\).*likelihoods\.Bernoulli\(\)",
    ),
    "bernoulli: masks without the channel": (
        lambda: likelihoods.Bernoulli()(torch.zeros(6, 1, 4, 4), torch.zeros(6, 4, 4)),
        ValueError,
        r"\(6, 1, 4, 4\) and the target \(6, 4, 4\).*t\.unsqueeze\(1\)",
    ),
    "categorical: logits without classes": (
        lambda: classes(LABELS, nn.Sequential(net(), nn.Flatten(0))),
        ValueError,
        r"logits \[B, C, \.\.\].*got \(12,\) and \(6,\)",
    ),
    "categorical: output no tensor": (
        lambda: classes(LABELS, Pair(net())),
        TypeError,
        r"output must be a tensor, got tuple",
    ),
}


MENU = {
    "mixture: no component": (lambda: vi.Mixture(vi.MeanField(), 0), ValueError, r"integer ≥ 1, got 0"),
    "mixture: no part": (lambda: vi.Mixture([]), ValueError, r"at least one part"),
    "mixture: not a family": (lambda: vi.Mixture(3), TypeError, r"a family or a list of families, got 3"),
    "mixture: bound part": (lambda: vi.Mixture(family(), 2), ValueError, r"bound already.*copies would coincide"),
    "mixture: bound and unbound": (lambda: vi.Mixture([family(), vi.MAP()]), ValueError, r"all recipes or all bound"),
    "mixture: same part twice": (lambda: vi.Mixture([(q := family()), q]), ValueError, r"in the list twice"),
    "mixture: other spaces": (
        lambda: vi.Mixture([family(vi.MAP()), family(vi.MAP(), OTHER)]),
        ValueError,
        r"must share their tensors",
    ),
    "mixture: points and densities": (
        lambda: density(vi.Mixture([vi.MAP(), vi.MeanField()])),
        ValueError,
        r"all parts of a mixture must have a density, or none",
    ),
    "mixture: closed-form entropy": (
        lambda: vi.elbo(family(vi.Mixture(vi.MeanField(), 2)), TARGET, estimator=vi.Estimator("entropy")),
        ValueError,
        r'use "path" or "log_q"',
    ),
    "blocks: no dict": (lambda: vi.PerLayer([vi.MAP()]), TypeError, r"a dict of patterns and families, got list"),
    "blocks: empty": (lambda: vi.PerLayer({}), ValueError, r"at least one pattern"),
    "blocks: not a family": (lambda: vi.PerLayer({"*": "MAP"}), TypeError, r"needs a family such as MAP\(\)"),
    "blocks: nested": (lambda: vi.PerLayer({"*": vi.PerLayer({"*": vi.MAP()})}), ValueError, r"one dict"),
    "blocks: unmatched": (lambda: family(vi.PerLayer({"a": vi.MAP()})), ValueError, r"matches b; add one"),
    "blocks: overlapping": (
        lambda: family(vi.PerLayer({"a": vi.MAP(), "[ab]": vi.MeanField()})),
        ValueError,
        r"match several",
    ),
    "blocks: unused": (
        lambda: family(vi.PerLayer({"c": vi.MAP(), "*": vi.MeanField()})),
        ValueError,
        r"\['c'\] are left without a tensor",
    ),
    "blocks: a mixture inside": (
        lambda: density(vi.PerLayer({"a": vi.Mixture(vi.MeanField(), 2), "*": vi.MAP()})).draw(2),
        ValueError,
        r"weights its own draws",
    ),
    "dropout: keep above 1": (lambda: vi.MCDropout(keep=1.5), ValueError, r"in \[0, 1\], got 1\.5"),
    "dropout: per layer": (lambda: vi.MCDropout(per="layer"), ValueError, r'"weight", "input" or "output"'),
    "dropout: everything exempt": (
        lambda: vi.MCDropout().bind(vi.Parameters.of(net(), "*.bias")),
        ValueError,
        r"exempt from dropout",
    ),
    "dropout: too many states": (
        lambda: density(vi.MCDropout(), vi.Parameters({"z": torch.zeros(21)})).support(),
        ValueError,
        r"2\^21 states.*at most 20",
    ),
    "prior: pattern without tensor": (
        lambda: model(prior=vi.priors.NormalPrior({"head.*": 1.0, "*": 1.0})),
        ValueError,
        r"left without a tensor",
    ),
    "prior: negative scale by pattern": (lambda: vi.priors.NormalPrior({"*": -1.0}), ValueError, r"positive number"),
    "prior: Student-t without freedom": (
        lambda: vi.priors.StudentTPrior(df=0.0, scale=1.0),
        ValueError,
        r"positive number",
    ),
    "prior: Student-t per layer": (
        lambda: vi.priors.StudentTPrior(df=3.0, scale=1.0, per="layer"),
        ValueError,
        r'"weight" or "tensor"',
    ),
    "prior: Laplace of zero": (lambda: vi.priors.LaplacePrior(0.0), ValueError, r"positive number"),
    "prior: sum of nothing": (lambda: vi.priors.SumPrior([]), ValueError, r"list of priors"),
    "prior: sum with a learned one": (
        lambda: vi.priors.SumPrior([vi.priors.NormalPrior(1.0, learn=True), vi.priors.LaplacePrior(1.0)]),
        ValueError,
        r"fit it alone",
    ),
    "prior: distribution of another shape": (
        lambda: model(prior=vi.priors.DistributionPrior({"*": Normal(torch.zeros(7), 1.0)})),
        ValueError,
        r"scalar distribution or one of the tensor's shape",
    ),
    "prior: learned under MAP": (
        lambda: vi.elbo(
            (m := model(prior=vi.priors.NormalPrior(1.0, learn=True))) and vi.MAP().bind(m.space), m, (X, T)
        ),
        ValueError,
        r"learn",
    ),
    "Lipschitz: a recurrent layer": (
        lambda: vi.priors.LipschitzPrior(nn.Sequential(nn.LSTM(3, 4)), X, 1.0),
        ValueError,
        r"cannot bound the layer '0' \(LSTM\)",
    ),
    "Lipschitz: no batch": (
        lambda: vi.priors.LipschitzPrior(net(), torch.zeros(()), 1.0),
        ValueError,
        r"batch of inputs",
    ),
    "Lipschitz: negative strength": (lambda: vi.priors.LipschitzPrior(net(), X, -1.0), ValueError, r"positive number"),
    "noise: unknown word": (lambda: likelihoods.Gaussian("learned"), ValueError, r'"point", "random" or "head"'),
    "noise: prior without randomness": (
        lambda: likelihoods.Gaussian("point", noise_prior=torch.distributions.Gamma(1.0, 1.0)),
        ValueError,
        r'needs noise="random"',
    ),
    "noise: prior over all numbers": (
        lambda: likelihoods.Gaussian("random", noise_prior=Normal(0.0, 1.0)),
        ValueError,
        r"variance σ².*positive",
    ),
    "noise: odd number of channels": (
        lambda: log_joint((X, torch.zeros(6, 1)), model(likelihoods.Gaussian("head"), network=nn.Linear(3, 3))),
        ValueError,
        r"even number of channels",
    ),
    "mask: not boolean": (lambda: log_joint((X, (T, torch.ones(6, 2)))), ValueError, r"a mask must be boolean"),
    "mask: other shape": (
        lambda: log_joint((X, (T, torch.ones(6, dtype=torch.bool)))),
        ValueError,
        r"of the target's shape \(6, 2\)",
    ),
    "class weights: too few": (
        lambda: log_joint((X, LABELS), model(likelihoods.Categorical(class_weights=[1.0]))),
        ValueError,
        r"1 class_weights for 2 classes",
    ),
    "counts: negative": (
        lambda: log_joint((X, T - 1), model(likelihoods.Poisson())),
        ValueError,
        r"counts 0, 1, 2",
    ),
    "Bernoulli: labels of 2": (
        lambda: log_joint((X, T + 2), model(likelihoods.Bernoulli())),
        ValueError,
        r"labels must lie in 0 … 1",
    ),
    "batch: three parts": (
        lambda: log_joint((X, X, T)),
        TypeError,
        r"got tuple of 3; for others give variationalize a function forward=, such as lambda net, batch",
    ),
    "evaluate: a data set": (
        lambda: posterior().evaluate(torch.utils.data.TensorDataset(X, T)),
        TypeError,
        r"expected a DataLoader.*got TensorDataset",
    ),
    "evaluate: x and t": (
        lambda: posterior().evaluate(X, T),
        TypeError,
        r"got a tensor: write evaluate\(\[\(x, t\)\]\)",
    ),
    "predict: an array": (lambda: posterior().predict(X.numpy()), TypeError, r"got ndarray; .*torch\.as_tensor"),
    "predict: a loader": (
        lambda: posterior().predict(torch.utils.data.DataLoader(X)),
        TypeError,
        r"inputs as tensors, got DataLoader; .*or use evaluate",
    ),
    "predict: one input without its batch axis": (
        lambda: posterior(likelihoods.Categorical()).predict(X[0]),
        ValueError,
        r"\[S, B, C, \.\.\] of S draws, got .*add a batch axis: x\.unsqueeze\(0\)",
    ),
    "reliability_diagram: a prediction": (
        lambda: plots.reliability_diagram(posterior(likelihoods.Categorical()).predict(X)),
        TypeError,
        r"expects Metrics, got Predictive; .*posterior\.evaluate\(loader\)",
    ),
    "risk_coverage: a posterior": (
        lambda: plots.risk_coverage(posterior()),
        TypeError,
        r"expects Metrics, got Posterior; .*posterior\.evaluate\(loader\)",
    ),
    "save: no such directory": (
        lambda: posterior().save("no such directory/a.safetensors"),
        FileNotFoundError,
        r"cannot write no such directory/a\.safetensors: there is no directory no such directory; make it first",
    ),
    "save: a directory": (lambda: posterior().save("."), IsADirectoryError, r"it is a directory; give the name of"),
    "fit: without gradients": (
        lambda: torch.no_grad()(posterior().fit)([(X, T)], steps=1),
        ValueError,
        r"needs gradients: call it outside torch\.no_grad\(\) and torch\.inference_mode\(\)",
    ),
    "psis: too few draws": (
        lambda: diagnostics.psis(torch.zeros(10)),
        ValueError,
        r"\[S\] of S ≥ 25 draws, got \(10,\)",
    ),
    "psis: impossible everywhere": (
        lambda: diagnostics.psis(torch.full((30,), -torch.inf)),
        ValueError,
        r"maximum of -inf",
    ),
    "diagnose: a density": (lambda: diagnostics.diagnose(density(), TARGET), TypeError, r"got LowRankNormalDensity"),
    "diagnose: a family and batches": (
        lambda: diagnostics.diagnose(family(), [(X, T)]),
        TypeError,
        r"such as LogDensity",
    ),
    "diagnose: a family and a network": (lambda: diagnostics.diagnose(family(), model()), TypeError, r"needs its data"),
    "diagnose: a posterior and a target": (lambda: posterior().diagnose(TARGET), TypeError, r"give the loader"),
    "importance: no draws": (lambda: diagnostics.importance(family(), TARGET, 0), ValueError, r"integer ≥ 1, got 0"),
    "gradient noise: one gradient": (
        lambda: diagnostics.gradient_noise(family(), TARGET, repeats=1),
        ValueError,
        r"repeats must be an integer ≥ 2, got 1",
    ),
    "sbc: few replications": (
        lambda: diagnostics.sbc(lambda g: (T, T), lambda t: t, replications=5),
        ValueError,
        r"replications must be an integer ≥ 20",
    ),
    "spectrum: of mean field": (
        lambda: diagnostics.spectrum(family(vi.MeanField())),
        TypeError,
        r"DiagonalNormal has none: give a LowRankNormal",
    ),
    "arviz: a network": (
        lambda: diagnostics.to_arviz(net()),
        TypeError,
        r"posterior from variationalize or a bound family",
    ),
    "arviz: a family with data": (
        lambda: diagnostics.to_arviz(family(), [(X, T)]),
        TypeError,
        r"a loader goes with a posterior",
    ),
    "predictive check: a function as likelihood": (
        lambda: diagnostics.predictive_check(posterior(lambda y, t: -(y - t).square()), [(X, T)], draws=2),
        TypeError,
        r"the likelihood is a plain function",
    ),
    "variationalize: unknown dropout": (
        lambda: vi.variationalize(net(), likelihoods.Gaussian(1.0), dropout="yes"),
        ValueError,
        r"dropout must be one of",
    ),
    "variationalize: a family's name": (
        lambda: vi.variationalize(net(), likelihoods.Gaussian(1.0), "mean field"),
        TypeError,
        r"a recipe such as LowRankNormal\(rank=8\)",
    ),
}
TABLE |= MENU


class Pair(nn.Sequential):
    def forward(self, x):
        y = super().forward(x)
        return y, y


class Words(nn.Sequential):
    def forward(self, x):
        return {"y": super().forward(x), "note": "no tensor"}


@pytest.mark.parametrize("case", TABLE)
def test_bad_input(case):
    call, exception, message = TABLE[case]
    with pytest.raises(exception) as caught:
        call()
    assert type(caught.value) is exception or (exception is ValueError and caught.type is vi.NonFiniteError)
    assert re.search(message, str(caught.value), flags=re.DOTALL), str(caught.value)


@pytest.mark.parametrize("act", ["fit", "predict"])
@pytest.mark.parametrize(
    ("weights", "x", "note"),
    [
        (torch.float32, X.double(), r"\(6, 3\) of torch\.float64; convert them: x\.float\(\)$"),
        (torch.float64, X, r"\(6, 3\) of torch\.float32; convert them: x\.to\(torch\.float64\)$"),
        (torch.float32, torch.zeros(6, 4), r"\(6, 4\) of torch\.float32$"),
    ],
    ids=["float64", "float32", "width"],
)
def test_inputs_that_the_network_cannot_take_are_named(act, weights, x, note):
    bayes = vi.variationalize(net().to(weights), likelihoods.Gaussian(0.5), vi.MeanField(), num_data=6)
    with pytest.raises(RuntimeError) as caught:
        bayes.predict(x) if act == "predict" else bayes.fit([(x, T)], steps=1, progress=False)
    first, *others = caught.value.__notes__
    assert re.search(f"with weights of {weights}, was called with inputs {note}", first), first
    assert others == (["in batch 0 of epoch 0"] if act == "fit" else [])


@pytest.mark.parametrize("last", [nn.Softmax(1), nn.LogSoftmax(1), nn.Sigmoid(), nn.Identity()])
@pytest.mark.parametrize("likelihood", [likelihoods.Categorical(), likelihoods.Bernoulli(), likelihoods.Gaussian(0.5)])
def test_probabilities_in_place_of_logits_are_warned_of(last, likelihood):
    harmless = {"Categorical": (nn.LogSoftmax, nn.Identity), "Bernoulli": nn.Identity, "Gaussian": nn.Module}
    network = nn.Sequential(nn.Linear(3, 2), last, nn.Linear(2, 2), last)  # one layer in two places
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vi.variationalize(network, likelihood, vi.MeanField(), num_data=6)
    if isinstance(last, harmless[type(likelihood).__name__]):
        assert caught == []
        return
    (warning,) = caught
    assert warning.category is UserWarning
    assert warning.filename == __file__
    message = rf"ends in {type(last).__name__} \('3'\), but likelihoods\.{type(likelihood).__name__} expects logits"
    assert re.search(f"{message}.*remove that layer", str(warning.message)), warning.message


def test_a_name_that_is_no_parameter_is_told():
    target = vi.LogDensity(lambda p: -p["c"].square().sum(), SPACE)
    with pytest.raises(KeyError) as caught:
        vi.fit_density(target, vi.MeanField(), progress=False)
    assert "a dict of the parameters a, b" in caught.value.__notes__[0]


def test_the_table_is_long_enough():
    assert len(TABLE) >= 80
