"""Plots show the numbers they are given."""

import matplotlib as mpl
import numpy as np
import pytest
import torch
from torch import nn

import structvi as vi
from structvi import likelihoods as lk
from structvi import plots
from structvi.predict.predictive import Predictive

mpl.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def regression(B=20):
    outputs = torch.randn(16, B, 1, generator=seeded())
    return Predictive(outputs, torch.full((16,), 1 / 16), lk.Gaussian(0.3))


def test_predictive_band():
    pred, x = regression(), torch.randperm(20, generator=seeded()).float().unsqueeze(-1)
    _, own = plt.subplots()
    ax = plots.predictive_band(x, pred, data=(x, pred.mean), level=0.9, ax=own)
    assert ax is own
    order = x.squeeze().argsort()
    np.testing.assert_allclose(ax.lines[0].get_ydata(), pred.mean.squeeze()[order], rtol=1e-6)
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    low, high = pred.interval(0.9)
    assert band.min() == pytest.approx(low.min().item(), rel=1e-5)
    assert band.max() == pytest.approx(high.max().item(), rel=1e-5)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["90 % of observations", "function, ±2 std", "mean", "data"]


def classifier_metrics():
    bayes = vi.variationalize(nn.Linear(2, 3), lk.Categorical(), vi.MeanField(), num_data=9)
    x = 4 * torch.randn(200, 2, generator=seeded())
    return bayes.evaluate([(x, torch.randint(3, (200,), generator=seeded()))], draws=8, generator=seeded())


def number_metrics():
    bayes = vi.variationalize(nn.Linear(2, 1), lk.Gaussian(1.0), vi.MeanField(), num_data=9)
    x = torch.randn(50, 2, generator=seeded())
    return bayes.evaluate([(x, x[:, :1])], draws=8, generator=seeded())


def test_reliability_diagram():
    metrics = classifier_metrics()
    ax = plots.reliability_diagram(metrics)
    np.testing.assert_allclose(ax.lines[1].get_xdata(), metrics.reliability.confidence)
    np.testing.assert_allclose(ax.lines[1].get_ydata(), metrics.reliability.accuracy)


@pytest.mark.parametrize(("make", "label"), [(classifier_metrics, "error rate"), (number_metrics, "mean squared")])
def test_risk_coverage(make, label):
    metrics = make()
    ax = plots.risk_coverage(metrics)
    assert ax.get_ylabel().startswith(label)
    assert ax.lines[0].get_ydata()[-1] == pytest.approx(metrics.risk_coverage.risk[-1].item())


@pytest.mark.parametrize(("channels", "likelihood"), [(1, lk.Categorical()), (3, lk.Gaussian(1.0))])
def test_uncertainty_map(channels, likelihood):
    outputs = torch.randn(8, 2, 4, 5, 6, generator=seeded())
    pred = Predictive(outputs, torch.full((8,), 1 / 8), likelihood)
    image = torch.rand(2, channels, 5, 6, generator=seeded())
    axes = plots.uncertainty_map(image, pred, index=1)
    whole, epistemic = (np.asarray(ax.images[0].get_array()) for ax in axes[1:])
    if isinstance(likelihood, lk.Categorical):
        np.testing.assert_allclose(whole, pred.entropy[1], rtol=1e-6)
        np.testing.assert_allclose(epistemic, pred.mutual_information[1], rtol=1e-6)
    else:
        np.testing.assert_allclose(whole, pred.variance[1].mean(0).sqrt(), rtol=1e-6)
        np.testing.assert_allclose(epistemic, pred.epistemic[1].mean(0).sqrt(), rtol=1e-6)
    of_maps = plots.uncertainty_map(image[1], vi.imaging.Maps.each(pred)[1])
    for one, other in zip(axes, of_maps, strict=True):
        np.testing.assert_allclose(one.images[0].get_array(), other.images[0].get_array(), rtol=1e-6)
        assert one.get_title() == other.get_title()


def volume_predictive():
    outputs = torch.randn(8, 2, 3, 6, 7, 5, generator=seeded())
    return torch.rand(2, 1, 6, 7, 5, generator=seeded()), Predictive(outputs, torch.full((8,), 1 / 8), lk.Categorical())


def test_uncertainty_map_of_a_volume_shows_three_planes():
    image, pred = volume_predictive()
    image[1, 0, 0, 0, 0], image[1, 0, 0, 0, 1] = 0.0, 1.0  # its darkest and lightest
    axes = plots.uncertainty_map(image, pred, index=1, at=(1, 2, 3))
    assert len(axes) == 9
    maps = (image[1, 0], pred.entropy[1], pred.mutual_information[1])
    shown = [np.asarray(ax.images[0].get_array()) for ax in axes]
    for column, values in enumerate(maps):
        for axis, plane in enumerate((values[1], values[:, 2], values[:, :, 3])):
            np.testing.assert_allclose(shown[3 * axis + column], plane.T.flip(0), rtol=1e-5, atol=1e-7)


def test_referral_curve_of_labels_and_of_cases():
    metrics = classifier_metrics()
    ax = plots.referral_curve(metrics)
    assert ax.get_ylabel() == "accuracy on the rest"
    at_none = ax.lines[0].get_ydata()[np.argmin(ax.lines[0].get_xdata())]
    assert at_none == pytest.approx(metrics.accuracy)
    _, pred = volume_predictive()
    found = vi.imaging.by_structure([(pred, pred.mean.argmax(1))], ["liver", "spleen"])
    _, own = plt.subplots()
    assert plots.referral_curve(found, own) is own
    assert own.lines[0].get_ydata().tolist() == [1.0, 1.0]
    ax = plots.reliability_diagram(found)
    np.testing.assert_allclose(ax.lines[1].get_xdata(), found.reliability[0].confidence)
    assert [text.get_text() for text in ax.get_legend().get_texts()][1:] == [
        f"{name}, ECE {value:.3f}" for name, value in zip(found.names, found.ece, strict=True)
    ]
    ax = plots.dice_by_structure(found)
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["liver", "spleen"]
    assert ax.lines[0].get_ydata().tolist() == [1.0, 1.0]
