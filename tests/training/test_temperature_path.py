"""λ as a dial: what a path records, keeps and says, around a trained network and in fits of many steps."""

import pytest
import torch
from test_validation import T, X, loader, network, trained
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.training.temperature_path import PATH
from structvi.training.validation import MARGIN


@pytest.mark.parametrize("linearise", [True, False])
def test_around_a_network(linearise):
    bayes = vi.variationalize(trained(), vi.likelihoods.Categorical(), linearise=linearise)
    result = bayes.fit(loader(), validation=loader(80, 160), temperature="validated", progress=False)
    assert [point.temperature for point in result.path] == list(PATH)
    best = max(result.path, key=lambda point: point.held_out)
    assert result.network < best.held_out  # else it would be kept
    assert result.temperature >= best.temperature
    assert result.held_out[result.kept] >= max(best.held_out, result.network) - MARGIN
    assert "λ was chosen by held-out density" in result.details
    # wider at every λ, and at λ = 1 it is the posterior
    at_one = result.at_one().variance
    kept = bayes.family().variance
    assert result.temperature <= 1
    assert bool((kept <= at_one * (1 + 1e-5)).all())
    axes = vi.plots.temperature_path(result)
    assert axes.get_xlabel() == "λ (1 is the posterior)"


def test_in_fits_of_many_steps_each_from_the_one_before():
    bayes = vi.variationalize(network(), vi.likelihoods.Categorical(), vi.MeanField(), vi.NormalPrior(1.0))
    result = bayes.fit(loader(), epochs=4, validation=loader(80, 160), temperature="validated", progress=False)
    assert [point.temperature for point in result.path] == list(PATH)
    assert result.kept == f"λ = {result.temperature:g}"
    assert result.held_out[result.kept] >= max(result.held_out.values()) - MARGIN
    assert bayes.last_fit is result
    again = bayes.evaluate(loader(80, 160), draws=400).nlpd
    assert -again == pytest.approx(result.held_out[result.kept], abs=0.02)
    other = bayes.with_family(result.at_one)
    assert torch.equal(other.family().mean, result.at_one().mean)


def test_pixels_that_say_the_same_let_it_go_beyond_one():
    torch.manual_seed(0)
    x = X[:, :1, None, None].expand(-1, -1, 4, 4).contiguous()
    t = T[:, None, None, None].expand(-1, 1, 4, 4).float().contiguous()
    net = nn.Conv2d(1, 1, 1)

    def images(start, stop):
        return DataLoader(TensorDataset(x[start:stop], t[start:stop]), batch_size=40)

    bayes = vi.variationalize(net, vi.likelihoods.Bernoulli(), vi.MeanField(), vi.NormalPrior(1.0), linearise=True)
    result = bayes.fit(images(0, 80), validation=images(80, 160), temperature="validated", progress=False)
    assert [point.temperature for point in result.path] == [*PATH, 4.0, 16.0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 1}, "chosen on held-out data: give validation="),
        ({"epochs": 1, "validation": [(X, T)], "checkpoint": "x"}, "a path of fits"),
    ],
)
def test_bad_input_is_named(options, words):
    bayes = vi.variationalize(network(), vi.likelihoods.Categorical(), vi.MeanField())
    with pytest.raises(ValueError, match=words):
        bayes.fit(loader(), temperature="validated", progress=False, **options)


def test_a_plot_without_a_path():
    bayes = vi.variationalize(network(), vi.likelihoods.Categorical(), vi.MeanField())
    with pytest.raises(ValueError, match="the fit has no path"):
        vi.plots.temperature_path(bayes.fit(loader(), steps=2, progress=False))
