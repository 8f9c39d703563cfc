"""One rule for randomness: what draws takes `generator=`, what fits and judges takes `seed=`, nothing takes both."""

import copy
import inspect
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import structvi as vi
from structvi import likelihoods as lk
from structvi.integrations.export import export_predictive

SPACE = vi.Parameters({"z": torch.zeros(2, dtype=torch.float64)})
TARGET = vi.LogDensity(lambda p: -0.5 * p["z"].square().sum(), SPACE)
X = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
DATA = [(X, X[:, :1])]


def public():
    """Name and function of all that is public, with methods and constructors."""
    todo = [(name, getattr(module, name)) for module in (vi, vi.diagnostics) for name in module.__all__]
    while todo:
        name, value = todo.pop()
        if inspect.ismodule(value):
            listed = getattr(value, "__all__", [key for key in vars(value) if not key.startswith("_")])
            own = [(key, getattr(value, key)) for key in listed]
            todo += [one for one in own if getattr(one[1], "__module__", "").startswith(value.__name__)]
        elif inspect.isclass(value):
            members = inspect.getmembers(value, inspect.isfunction)
            yield from ((f"{name}.{key}", one) for key, one in members if not key.startswith("_"))
            yield f"{name}.__init__", value.__init__
        elif inspect.isfunction(value):
            yield name, value


def test_names_and_defaults():
    for name, function in public():
        if not getattr(function, "__module__", "").startswith("structvi"):
            continue
        own = inspect.signature(function).parameters
        assert not {"rng", "random_state", "random_seed", "manual_seed"} & set(own), name
        assert not {"seed", "generator"} <= set(own), f"{name} has both"
        if "seed" in own and own["seed"].default is not inspect.Parameter.empty:
            assert own["seed"].default == 0, name
            assert own["seed"].kind is inspect.Parameter.KEYWORD_ONLY, name
        if "generator" in own and own["generator"].default is not inspect.Parameter.empty:
            assert own["generator"].default is None, name


def g(seed=0):
    return torch.Generator().manual_seed(seed)


@cache
def net():
    return nn.Linear(2, 1)


@cache
def posterior():
    return vi.variationalize(net(), lk.Gaussian(1.0), vi.LowRankNormal(1), num_data=12, generator=g())


@cache
def pixels():
    return vi.variationalize(nn.Conv2d(1, 2, 1), lk.Categorical(), vi.MeanField(), num_data=5)


@cache
def mixture():
    return vi.Ensemble.of([nn.Linear(2, 1), nn.Linear(2, 1)], lk.Gaussian(1.0), vi.MeanField(), num_data=12)


@cache
def density_fit():
    return vi.fit_density(TARGET, vi.FullNormal(), progress=False)


def wide():
    return vi.MeanField().bind(SPACE)


def fresh():
    """A copy, to be fitted."""
    return copy.deepcopy(posterior())


#: what draws, called with a generator; two of one name have a word behind it
DRAWS = {
    "variationalize": lambda g: (
        vi.variationalize(net(), lk.Gaussian(1.0), vi.Mixture(vi.MeanField(), 2), generator=g).family().mean
    ),
    "predict": lambda g: posterior().predict(X, 4, generator=g).mean,
    "predictor": lambda g: posterior().predictor(4, generator=g)(X).mean,
    "sample": lambda g: posterior().sample(3, generator=g)["weight"],
    "sample log density": lambda g: density_fit().sample(5, generator=g)["z"],
    "sample predictive": lambda g: (
        posterior().predict(X, 4, generator=torch.Generator().manual_seed(1)).sample(2, generator=g)
    ),
    "sample_network": lambda g: posterior().sample_network(generator=g).weight,
    "evaluate": lambda g: torch.tensor(posterior().evaluate(DATA, 4, generator=g).nlpd),
    "ood_auroc": lambda g: torch.tensor(
        vi.metrics.ood_auroc(posterior(), DATA, [(3 * X, X[:, :1])], score="variance", draws=4, generator=g)
    ),
    "elbo": lambda g: vi.elbo(wide(), TARGET, generator=g),
    "elbo posterior": lambda g: torch.tensor(posterior().elbo(DATA, groups=2, generator=g).value),
    "loss": lambda g: posterior().loss(DATA[0], generator=g),
    "bind": lambda g: vi.Mixture(vi.MeanField(), 2).bind(vi.Parameters.of(net()), generator=g)().mean,
    "draw": lambda g: wide()().draw(generator=g).theta,
    "naive": lambda g: vi.couplings.naive(1, 2, 0, generator=g).diagonal,
    "paired": lambda g: vi.couplings.paired(1, 2, 0, generator=g).diagonal,
    "predict_tiles": lambda g: (
        next(iter(vi.predict_tiles(pixels(), X.reshape(1, 4, 6), (2, 3), draws=2, generator=g)))[1].outputs
    ),
    "export_predictive": lambda g: export_predictive(posterior(), X, draws=2, generator=g).module()(X)[0],
}
#: what fits and judges, called with a seed
SEEDED = {
    "fit": lambda s: fresh().fit(DATA, steps=2, progress=False, seed=s).elbo.value,
    "fit log density": lambda s: vi.fit_density(TARGET, vi.MeanField(), progress=False, seed=s).elbo.value,
    "fit_head": lambda s: (
        vi.variationalize_head(net(), lk.Gaussian(1.0)).fit_head(DATA, seed=s, progress=False).elbo.value
    ),
    "grow": lambda s: fresh().grow(DATA, rank=2, steps=2, seed=s, progress=False).elbo.value,
    "stepper": lambda s: fresh().stepper(seed=s)(DATA[0]),
    "calibrate": lambda s: str(fresh().calibrate(DATA, seed=s)),
    "diagnose": lambda s: fresh().diagnose(DATA, seed=s).verdict,
    "summary": lambda s: density_fit().summary(corrected=False, draws=200, seed=s).mean["z"],
    "to_arviz": lambda s: density_fit().to_arviz(5, seed=s).posterior["z"].values,
    "to_arviz posterior": lambda s: posterior().to_arviz(draws=5, seed=s).posterior["weight"].values,
    "importance": lambda s: vi.diagnostics.importance(wide(), TARGET, draws=200, seed=s).k,
    "learned": lambda s: str(vi.diagnostics.learned(posterior(), DATA, seed=s)),
    "predictive_check": lambda s: str(vi.diagnostics.predictive_check(posterior(), DATA, seed=s)),
    "sbc": lambda s: str(
        vi.diagnostics.sbc(
            lambda generator: ({"z": torch.randn(2, generator=generator).double()}, None),
            lambda data: wide(),
            replications=20,
            seed=s,
        )
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_draws_takes_a_generator(name):
    call = DRAWS[name]
    net(), posterior(), mixture(), density_fit(), pixels()
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first, again = call(g(5)), call(g(5))
    assert torch.equal(torch.random.get_rng_state(), before), "the global stream is left alone"
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first, call(g(6)))
    torch.manual_seed(3)
    own = call(None)
    torch.manual_seed(3)
    torch.testing.assert_close(own, call(None), rtol=0, atol=0)
    with pytest.raises(TypeError, match="generator"):
        call(5)
    if name not in ("naive", "paired"):  # torch's own words
        with pytest.raises(TypeError, match=r"must be a torch\.Generator\(\)\.manual_seed"):
            call(5)


@pytest.mark.parametrize("name", SEEDED)
def test_what_fits_and_judges_takes_a_seed(name):
    call = SEEDED[name]
    net(), posterior(), mixture(), density_fit()
    torch.manual_seed(7)
    first = call(0)
    torch.manual_seed(8)
    again = call(0)
    np.testing.assert_array_equal(np.asarray(first, dtype=object), np.asarray(again, dtype=object))
    for wrong in (torch.Generator(), 1.5, -1, True, "0", None):
        with pytest.raises(ValueError, match="seed must be an integer ≥ 0"):
            call(wrong)
