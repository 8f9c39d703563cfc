"""λ as a dial: what a path records, keeps and says, around a trained network and in fits of many steps."""

import pytest
import torch
from test_validation import T, X, loader, network

import structvi as vi
from structvi.train.temperature_path import PATH
from structvi.train.validation import MARGIN


def test_in_fits_of_many_steps_each_from_the_one_before():
    bayes = vi.variationalize(network(), vi.likelihoods.Categorical(), vi.MeanField(), vi.priors.NormalPrior(1.0))
    result = bayes.fit(loader(), epochs=4, validation=loader(80, 160), temperature="validated", progress=False)
    assert [point.temperature for point in result.path] == list(PATH)
    assert result.kept == f"λ = {result.temperature:g}"
    assert result.held_out[result.kept] >= max(result.held_out.values()) - MARGIN
    assert bayes.last_fit is result
    again = bayes.evaluate(loader(80, 160), draws=400).nlpd
    assert -again == pytest.approx(result.held_out[result.kept], abs=0.02)
    other = bayes.with_family(result.at_one)
    assert torch.equal(other.family().mean, result.at_one().mean)


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
