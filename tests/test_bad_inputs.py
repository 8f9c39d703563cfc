"""One table of bad inputs: what is called, the exception it must raise, and what the message must say.

A message says what was expected, what came, and, where it is not plain, what to do.
"""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal

import structvi as vi
from structvi import diagnostics, likelihoods, plots
from structvi.families.family import MAX_DENSE

SPACE = vi.Parameters({"a": torch.zeros(2), "b": torch.zeros(1)})
OTHER = vi.Parameters({"a": torch.zeros(5)})
LARGE = vi.Parameters({"a": torch.zeros(MAX_DENSE), "b": torch.zeros(1)})
TARGET = vi.LogDensity(lambda p: -p["a"].square().sum() - p["b"].square().sum(), SPACE)
X, T = torch.zeros(6, 3), torch.zeros(6, 2)
LABELS = torch.zeros(6, dtype=torch.long)
GENERATOR = torch.Generator()


def net(**options) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, **options))


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


class WideLogProb(Own):
    def log_prob(self, theta):
        return theta.sum(-1, keepdim=True)


class TensorDraws(OnlyLogProb):
    def draw(self, groups=1, coupling=vi.couplings.naive, generator=None):
        return torch.zeros(groups, 3)


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
    "parameters: empty": (lambda: vi.Parameters({}), ValueError, r"at least one tensor"),
    "parameters: integers": (
        lambda: vi.Parameters({"z": torch.arange(3)}),
        TypeError,
        r"must be floating, but .*'z': torch\.int64",
    ),
    "parameters: NaN": (lambda: vi.Parameters({"z": torch.tensor([0.0, torch.nan])}), ValueError, r"z hold non-finite"),
    "parameters: mixed dtypes": (
        lambda: vi.Parameters({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2).double()}),
        ValueError,
        r"share one dtype and device, got .*torch\.float64 on cpu': 'c'",
    ),
    "parameters: nothing trainable": (lambda: vi.Parameters.of(frozen()), ValueError, r"no trainable parameter"),
    "select: no match": (
        lambda: vi.Parameters.of(net(), "head.*"),
        ValueError,
        r"select: the pattern 'head\.\*' matches none of the trainable tensors 0\.weight, 0\.bias, 2\.weight",
    ),
    "exclude: no match": (lambda: vi.Parameters.of(net(), "*", "head.*"), ValueError, r"exclude: the pattern 'head"),
    "select: nothing left": (lambda: vi.Parameters.of(net(), "*", "*"), ValueError, r"leaves no tensor; the trainable"),
    "select: None": (lambda: vi.Parameters.of(net(), None), TypeError, r"select takes glob patterns.*got None"),
    "unravel: wrong P": (lambda: SPACE.unravel(torch.zeros(4)), ValueError, r"P = 3, got \(4,\)"),
    "ravel: missing and extra": (
        lambda: SPACE.ravel({"a": torch.zeros(2), "c": torch.zeros(1)}),
        ValueError,
        r"expected the tensors a, b, got a, c",
    ),
    "ravel: wrong shape": (
        lambda: SPACE.ravel({"a": torch.zeros(3), "b": torch.zeros(1)}),
        ValueError,
        r"a: expected shape \(\.\., 2,\), got \(3,\)",
    ),
    "slice: unknown name": (lambda: SPACE.slice("c"), ValueError, r"no tensor named 'c'; the random ones are a, b"),
    "fresh: a seed": (lambda: vi.Parameters.of(net()).fresh(0), TypeError, r"must be a torch\.Generator.*, got int"),
    # --- recipes and binding
    "rank: negative": (lambda: vi.LowRankNormal(rank=-1), ValueError, r"rank must be an integer ≥ 0, got -1"),
    "rank: more than P": (
        lambda: vi.LowRankNormal(rank=4).bind(SPACE),
        ValueError,
        r"rank 4 is larger than the number of weights P = 3",
    ),
    "initial_mean": (lambda: vi.MeanField("prior"), ValueError, r"one of .'current', 'fresh', 'zero'., got 'prior'"),
    "initial_scale: zero": (lambda: vi.FullNormal(initial_scale=0), ValueError, r"initial_scale must be a positive"),
    "initial_factor: negative": (
        lambda: vi.LowRankNormal(2, initial_factor=-0.1),
        ValueError,
        r"initial_factor must be a positive number, or 0, got -0\.1",
    ),
    "bind: a dict": (
        lambda: vi.MeanField().bind({"z": torch.zeros(2)}),
        TypeError,
        r"bind expects Parameters, such as Parameters\.of\(net\), got dict",
    ),
    "bind: twice": (lambda: family().bind(SPACE), ValueError, r"LowRankNormal is bound already: bind a recipe"),
    "call: a recipe": (lambda: vi.MeanField()(), ValueError, r"MeanField is a recipe.*call \.bind\(parameters\) first"),
    "call: FullNormal too large": (
        lambda: vi.FullNormal().bind(LARGE),
        ValueError,
        rf"refuses P = {MAX_DENSE + 1} beyond {MAX_DENSE}: use LowRankNormal",
    ),
    # --- a family of the user's own
    "forward: junk": (lambda: Returns("junk")(), TypeError, r"Returns\.forward must return a Density.*got .junk"),
    "forward: the wrong size": (
        lambda: Returns(Independent(Normal(torch.zeros(4), 1.0), 1)).bind(SPACE)(),
        ValueError,
        r"gave P = 4, expected 3",
    ),
    "distribution: a batch shape": (
        lambda: Returns(Normal(torch.zeros(3), 1.0))(),
        ValueError,
        r"event shape \[P\] and no batch shape, got event \(\) and batch \(3,\); wrap it: .*Independent\(d, 1\)",
    ),
    # --- draws and couplings
    "groups: zero": (lambda: density().draw(groups=0), ValueError, r"groups must be an integer ≥ 1, got 0"),
    "coupling: wrong P": (
        lambda: density().draw(1, coupling((4, 2), (4, 2))),
        ValueError,
        r"\(4, 2\).*\(4, 2\).*; expected \[S, 3\] and \[S, 2\]",
    ),
    "coupling: S no multiple of groups": (
        lambda: density().draw(3, coupling((4, 3), (4, 2))),
        ValueError,
        r"S a multiple of groups = 3",
    ),
    "coupling: another dtype": (
        lambda: density().draw(1, coupling((2, 3), (2, 2), dtype=torch.float64)),
        ValueError,
        r"torch\.float64.*of `dtype` torch\.float32 on `device` cpu",
    ),
    "unscented: more than the rank": (
        lambda: density().draw(1, vi.couplings.unscented(directions=3)),
        ValueError,
        r"directions=3 but the family has rank 2; take at most 2, or None for all",
    ),
    "generator: a seed": (lambda: density().draw(generator=0), TypeError, r"must be a torch\.Generator.*, got int"),
    # --- densities
    "log_prob: one point": (
        lambda: density().log_prob(torch.zeros(3)),
        ValueError,
        r"\[S, P\] with S ≥ 1 and P = 3, got \(3,\)",
    ),
    "entropy: of a point mass": (
        lambda: density(vi.MAP()).entropy(),
        NotImplementedError,
        r"no density, and so no entropy",
    ),
    "covariance: unknown name": (lambda: density().covariance("c"), ValueError, r"no tensor named 'c'.*a, b"),
    "covariance: too large": (
        lambda: density(vi.MeanField(), LARGE).covariance(),
        ValueError,
        rf"P = {MAX_DENSE + 1} is beyond {MAX_DENSE}; ask for the block",
    ),
    "kl: different sizes": (
        lambda: vi.kl(density(), density(vi.MeanField(), OTHER)),
        ValueError,
        r"q is over 3 numbers and p over 5",
    ),
    "kl: families": (
        lambda: vi.kl(family(), family()),
        TypeError,
        r"q = family\(\), got LowRankNormal",
    ),
    # --- the objective
    "elbo: a density": (
        lambda: vi.elbo(density(), TARGET),
        TypeError,
        r"expected a family, not the density it builds, got LowRankDensity",
    ),
    "elbo: a function as target": (
        lambda: vi.elbo(family(), lambda p: p["a"].sum()),
        TypeError,
        r"must have `space` and `log_joint`, got function: .*LogDensity\(fn, parameters\)",
    ),
    "elbo: another space": (
        lambda: vi.elbo(family(space=OTHER), TARGET),
        ValueError,
        r"different parameters: P = 5 and P = 3; bind the family to target\.space",
    ),
    "elbo: unknown estimator": (
        lambda: vi.elbo(family(), TARGET, estimator=vi.Estimator("reinforce")),
        ValueError,
        r'"path", "log_q" or "entropy", got \'reinforce\'',
    ),
    "elbo: can only draw": (
        lambda: vi.elbo(Returns(Own()), TARGET),
        ValueError,
        r'Estimator\("path"\) needs `log_prob`, which Own does not offer: write it',
    ),
    "elbo: log_prob of the wrong shape": (
        lambda: vi.elbo(Returns(WideLogProb()), TARGET, estimator=vi.Estimator("log_q", groups=2)),
        ValueError,
        r"WideLogProb\.log_prob must return \[S\] = \[2\].*got shape \(2, 1\)",
    ),
    "elbo: draws without weights": (
        lambda: vi.elbo(Returns(TensorDraws()), TARGET),
        TypeError,
        r"TensorDraws\.draw must return Draws\(theta \[S, P\], weight \[S\]\), got Tensor",
    ),
    "fit: a network": (
        lambda: vi.fit_density(model(), vi.MeanField()),
        TypeError,
        r"log densities.*variationalize\(net",
    ),
    "fit: no family": (lambda: vi.fit_density(TARGET, "full"), TypeError, r"expects a family, got str.*FullNormal\(\)"),
    "load: a number": (lambda: vi.load("a.safetensors", 3), TypeError, r"a list of networks or a log density; got int"),
    "fit: a point mass": (lambda: vi.fit_density(TARGET, vi.MAP()), ValueError, r"has no density"),
    "fit: few draws": (
        lambda: vi.fit_density(TARGET, vi.LowRankNormal(2), draws=8),
        ValueError,
        r"2\(P \+ K\) = 10, got 8",
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
    "elbo: without a batch": (
        lambda: vi.elbo(family(space=(m := model()).space), m),
        TypeError,
        r"\(input, target\) or a dict, got NoneType",
    ),
    # --- log densities
    "log density: no function": (lambda: vi.LogDensity(T, SPACE), TypeError, r"expects a function.*got Tensor"),
    "log density: not a scalar": (
        lambda: fitted(lambda p: -p["a"].square()),
        ValueError,
        r"must return a floating scalar for one draw, got \(2,\) of torch\.float32; sum over its elements",
    ),
    "log density: NaN": (
        lambda: fitted(lambda p: p["a"].sum() * torch.nan, groups=2),
        vi.NonFiniteError,
        r"not finite at 4 of 4 draws \(first: nan\); look for",
    ),
    "log density: evaluation": (
        lambda: vi.LogDensity(torch.sum, SPACE, evaluation="fast"),
        ValueError,
        r"evaluation must be one of \('auto', 'vmap', 'loop'\), got 'fast'",
    ),
    "log density: one point": (
        lambda: TARGET.log_joint(torch.zeros(3)),
        ValueError,
        r"\[S, P\] with S ≥ 1 and P = 3, got \(3,\)",
    ),
    "target: the wrong shape": (
        lambda: vi.elbo(family(), WrongTarget(torch.zeros(3))),
        ValueError,
        r"log_joint must return \[S\] = \[2\] for theta \[S, P\], got shape \(3,\)",
    ),
    # --- models
    "model: no module": (
        lambda: vi.BayesianModel(torch.tanh, likelihoods.Categorical(), vi.priors.NormalPrior(), 10),
        TypeError,
        r"expects an nn\.Module, got",
    ),
    "model: likelihood class": (
        lambda: model(likelihoods.Categorical),
        TypeError,
        r"likelihood must be a callable object, got <class.*write likelihoods\.Categorical\(\)",
    ),
    "model: a loss as likelihood": (
        lambda: model(nn.CrossEntropyLoss(reduction="none")),
        TypeError,
        r"CrossEntropyLoss is a loss, .*likelihoods\.Categorical\(\)",
    ),
    "model: a Dice loss as likelihood": (
        lambda: log_joint(
            (X, LABELS), model(lambda y, t: 1 - 2 * y.softmax(1)[:, 1].dot(t.to(y)) / (len(t) + t.sum()))
        ),
        ValueError,
        r"each observation, \[.*got \(\); one number for the batch is a loss, and Dice losses.*Categorical\(\)",
    ),
    "model: a distribution as prior": (
        lambda: model(prior=Normal(0.0, 1.0)),
        TypeError,
        r"prior must be a callable object, got Normal.* NormalPrior\(1\.0\) or DistributionPrior",
    ),
    "model: num_data zero": (lambda: model(num_data=0), ValueError, r"number of observations.*got 0"),
    "model: num_data not set": (
        lambda: model(num_data=None).log_joint(torch.zeros(2, model().space.size), (X, T)),
        ValueError,
        r"num_data.* is not known yet: set it, give num_data= to variationalize, or fit first",
    ),
    "model: parameters a dict": (
        lambda: model(parameters={"0.weight": T}),
        TypeError,
        r"write parameters=Parameters\.of\(net, select\), without constraints, got \{",
    ),
    "model: parameters of another network": (
        lambda: model(parameters=vi.Parameters.of(nn.Linear(3, 2))),
        ValueError,
        r"the network has no tensor 'weight' of shape \(2, 3\)",
    ),
    "model: chunk zero": (lambda: model(chunk=0), ValueError, r"chunk must be None or an integer ≥ 1, got 0"),
    "model: checkpointed vmap": (
        lambda: model(evaluation="vmap", checkpoint_activations=True),
        ValueError,
        r'checkpoint_activations=True takes one draw at a time: use evaluation="auto" or "loop"',
    ),
    "model: wrong P": (lambda: model().log_prior(torch.zeros(2, 25)), ValueError, r"P = 26, got \(2, 25\)"),
    "prior: a scalar": (
        lambda: log_joint((X, T), model(prior=lambda space, theta: -theta.square().sum())),
        ValueError,
        r"the prior must return \[S\] = \[3\], got \(\)",
    ),
    "prior: scale zero": (lambda: vi.priors.NormalPrior(0), ValueError, r"scale.*positive.*got 0"),
    # --- batches
    "batch: three": (lambda: log_joint((X, T, T)), TypeError, r"\(input, target\) or a dict, got tuple of 3.*forward="),
    "batch: a tensor": (lambda: log_joint(X), TypeError, r"\(input, target\) or a dict, got Tensor"),
    "batch: dict without target": (
        lambda: log_joint({"x": X, "truth": T}),
        ValueError,
        r"exactly one of the keys \('target',.*got \['truth', 'x'\]",
    ),
    "batch: empty": (
        lambda: log_joint((X[:0], T[:0]), model(network=nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))),
        ValueError,
        r"target must be a tensor \[B, \.\.\] with B ≥ 1, got \(0, 2\)",
    ),
    "batch: target a list": (lambda: log_joint((X, [0.0] * 6)), ValueError, r"must be a tensor \[B, \.\.\].*got list"),
    "batch: more than num_data": (
        lambda: log_joint((X, T), model(num_data=5)),
        ValueError,
        r"batch has 6 observations, more than num_data = 5",
    ),
    "keys: no pair": (lambda: model(keys=((), "label")), TypeError, r"keys must be \(input, target\)"),
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
    "gaussian: shapes": (
        lambda: log_joint((X, torch.zeros(6))),
        ValueError,
        r"output has shape \(6, 2\) and the target \(6,\); they must be equal \(broadcasting",
    ),
    "gaussian: NaN in the data": (
        lambda: vi.elbo(family(space=(m := model()).space), m, (X, T * torch.nan)),
        vi.NonFiniteError,
        r"not finite at 2 of 2 draws.*data that are not finite",
    ),
    "categorical: label too large": (lambda: classes(LABELS + 2), ValueError, r"must lie in 0 … 1"),
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
    "mixture: no component": (lambda: vi.Mixture(vi.MeanField(), 0), ValueError, r"integer ≥ 1, got 0"),
    "mixture: not a family": (lambda: vi.Mixture(3), TypeError, r"a family or a list of families, got 3"),
    "mixture: bound part": (lambda: vi.Mixture(family(), 2), ValueError, r"bound already.*copies would coincide"),
    "mixture: points and densities": (
        lambda: density(vi.Mixture([vi.MAP(), vi.MeanField()])),
        ValueError,
        r"must have a density over all weights, or none .* PointMass: False, LowRankDensity: True",
    ),
    "mixture: partial point masses": (
        lambda: density(vi.Mixture(vi.PerLayer({"a": vi.MAP(), "b": vi.MeanField()}))),
        ValueError,
        r"must have a density over all weights.*PerLayerDensity: False",
    ),
    "mixture: an empty list": (lambda: vi.Mixture([]), TypeError, r"a family or a list of families, got \[\]"),
    "mixture: another number": (
        lambda: vi.Mixture([vi.MeanField()], components=2),
        ValueError,
        r"components=2 but the list has 1",
    ),
    "mixture: some bound": (
        lambda: vi.Mixture([vi.MeanField(), family()]),
        ValueError,
        r"all recipes or all bound",
    ),
    "blocks: unmatched": (lambda: family(vi.PerLayer({"a": vi.MAP()})), ValueError, r"matches b; add one"),
    "blocks: overlapping": (
        lambda: family(vi.PerLayer({"a": vi.MAP(), "[ab]": vi.MeanField()})),
        ValueError,
        r"matches \['a', '\[ab\]'\]",
    ),
    "blocks: unused": (
        lambda: family(vi.PerLayer({"c": vi.MAP(), "*": vi.MeanField()})),
        ValueError,
        r"\['c'\] are left without a tensor",
    ),
    "blocks: a mixture inside": (
        lambda: density(vi.PerLayer({"a": vi.Mixture(vi.MeanField(), 2), "*": vi.MAP()})),
        TypeError,
        r"Gaussian families and MAP",
    ),
    "dropout: keep above 1": (lambda: vi.MCDropout(keep=1.5), ValueError, r"in \[0, 1\].*, got 1\.5"),
    "dropout: per layer": (lambda: vi.MCDropout(per="layer"), ValueError, r"'weight', 'input', 'output'"),
    "dropout: too many states": (
        lambda: density(vi.MCDropout(), vi.Parameters({"z": torch.zeros(30)})).support(),
        ValueError,
        r"2\^30 states",
    ),
    "prior: pattern without tensor": (
        lambda: model(prior=vi.priors.NormalPrior({"head.*": 1.0, "*": 1.0})),
        ValueError,
        r"left without a tensor",
    ),
    "prior: Student-t per layer": (
        lambda: vi.priors.StudentTPrior(df=3.0, scale=1.0, per="layer"),
        ValueError,
        r'"weight" or "tensor"',
    ),
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
        r"knows no norm of the layer '0' \(LSTM",
    ),
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
    "class weights: too few": (
        lambda: log_joint((X, LABELS), model(likelihoods.Categorical(class_weights=[1.0]))),
        ValueError,
        r"1 class_weights for 2 classes",
    ),
    "counts: negative": (lambda: log_joint((X, T - 1), model(likelihoods.Poisson())), ValueError, r"counts 0, 1, 2"),
    "Bernoulli: labels of 2": (
        lambda: log_joint((X, T + 2), model(likelihoods.Bernoulli())),
        ValueError,
        r"labels must lie in 0 … 1",
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
    "save: no such directory": (
        lambda: posterior().save("no such directory/a.safetensors"),
        FileNotFoundError,
        r"cannot write no such directory/a\.safetensors: there is no directory no such directory; make it first",
    ),
    "fit: a tensor": (lambda: posterior().fit(X, epochs=1), TypeError, r"got a tensor; wrap it: DataLoader"),
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
    "diagnose: a density": (lambda: diagnostics.diagnose(density(), TARGET), TypeError, r"got LowRankDensity"),
    "diagnose: a family and batches": (
        lambda: diagnostics.diagnose(family(), [(X, T)]),
        TypeError,
        r"such as LogDensity",
    ),
    "diagnose: a posterior and a target": (lambda: posterior().diagnose(TARGET), TypeError, r"give the loader"),
    "importance: no draws": (lambda: diagnostics.importance(family(), TARGET, 0), ValueError, r"integer ≥ 1, got 0"),
    "arviz: a network": (
        lambda: diagnostics.to_arviz(net()),
        TypeError,
        r"posterior from variationalize or a bound family",
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


@pytest.mark.parametrize("case", TABLE)
def test_bad_input(case):
    call, exception, message = TABLE[case]
    with pytest.raises(exception) as caught:
        call()
    assert type(caught.value) is exception or (exception is ValueError and caught.type is vi.NonFiniteError)
    assert re.search(message, str(caught.value), flags=re.DOTALL), str(caught.value)


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
