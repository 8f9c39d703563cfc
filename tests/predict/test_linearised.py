"""The linearised network in function space, the default of linearised posteriors: against dense truth and draws."""

from math import pi

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, Normal
from torch.func import functional_call, jacrev

import structvi as vi
from structvi.families.mixture import weighted_normals
from structvi.predict.linearised import jacobians

lk = vi.likelihoods
NETS = {
    "dense": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), (4, 3)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 2)).eval(),
        (4, 1, 5, 5),
    ),
}
FAMILIES = [vi.MeanField(), vi.LowRankNormal(2), vi.LowRankPrecision(2), vi.FullNormal()]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def network(inputs=3, outputs=2):
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.LayerNorm(6)]
    net = nn.Sequential(nn.Linear(inputs, 6), *middle, nn.Linear(6, outputs))
    net[1].running_mean.normal_()
    net[1].running_var.uniform_(0.5, 2.0)
    return net.double().eval()


def fitted(net, likelihood=None, family=None, scale=0.3, **options):
    bayes = vi.variationalize(
        net, likelihood or lk.Categorical(), family or vi.LowRankPrecision(3), num_data=10, linearise=True, **options
    )
    with torch.no_grad():  # away from θ₀, with columns
        generator = seeded(1)
        for name, parameter in bayes.family.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if "log_scale" in name:
                parameter.copy_(torch.tensor(scale).log() + 0.2 * noise)
            else:
                parameter.add_(0.1 * noise)
    return bayes


X = torch.randn(7, 3, generator=seeded(5), dtype=torch.float64)


def close(a, b):
    """To rounding, and to that of the parameter of a learned noise, which is of single precision."""
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: type(family).__name__)
@pytest.mark.parametrize("linearise", [True, False])
def test_mean_and_covariance(name, family, linearise):
    make, shape = NETS[name]
    net, x = make().double(), torch.randn(shape, dtype=torch.float64)
    bayes = vi.variationalize(net, lk.Gaussian(1.0), family, num_data=9, linearise=linearise)
    with torch.no_grad():
        for parameter in bayes.family.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    density, space = bayes.family(), bayes.space
    at = space.initial if linearise else density.mean.detach()
    J = jacrev(lambda theta: functional_call(net, space.unravel(theta), (x,)))(at)
    y = functional_call(net, space.unravel(at), (x,)).detach()
    dense = J.flatten(1, -2)  # [B, O, P]
    mean, covariance = bayes.output_moments(x)
    expected = y + (J @ (density.mean.detach() - at))
    assert mean.shape == y.shape
    assert torch.allclose(mean, expected, rtol=1e-8, atol=1e-8)
    assert torch.allclose(covariance, dense @ density.covariance().detach() @ dense.mT, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
def test_density_of_gaussian_noise_is_that_of_the_closed_form(family):
    noise = 0.005  # far below the spread of the outputs: at points a density would be grainy
    bayes = fitted(network(outputs=1), lk.Gaussian(noise), family)
    pred = bayes.predict(X, generator=seeded())
    assert (pred.draws, pred.note) == (1, "in function space")
    mean, covariance = bayes.output_moments(X)
    exact = Normal(mean, (covariance[:, 0] + noise**2).sqrt())
    assert exact.scale.min() > 10 * noise
    t = mean + 0.7
    close(pred.mean, mean)
    close(pred.function_mean, mean)
    close(pred.epistemic, covariance[:, 0])
    close(pred.function_variance, covariance[:, 0])
    close(pred.std, exact.scale)
    close(pred.log_prob(t), exact.log_prob(t))
    close(pred.cdf(t), exact.cdf(t))
    close(pred.quantile(0.9), exact.icdf(torch.tensor(0.9, dtype=torch.float64)))
    z = (t - mean) / exact.scale
    unit = Normal(0.0, 1.0)
    close(pred.crps(t), exact.scale * (z * (2 * unit.cdf(z) - 1) + 2 * unit.log_prob(z).exp() - pi**-0.5))
    # 64 draws of weights are far off
    assert (bayes.predict(X, 64, generator=seeded()).log_prob(t) - exact.log_prob(t)).abs().max() > 0.1


def mixture_of(family):
    """A posterior, and under each of its normals weight, mean and variance of the output, by dense Jacobians."""
    bayes = fitted(network(outputs=1), lk.Gaussian(0.05), family)
    theta = bayes.model.linearised_at
    J = torch.cat([one for _, one in jacobians(bayes, theta, X)]).squeeze(1)  # [B, P]
    moments = []
    for weight, normal in weighted_normals(bayes.family()):
        mean = bayes.net(X).flatten() + J @ (normal.mean - theta)
        moments.append((weight, mean.detach(), (J @ normal.covariance() @ J.mT).diagonal().detach()))
    return bayes, moments


@pytest.mark.parametrize(
    "family", [vi.Mixture(vi.LowRankPrecision(1), 2), vi.Mixture(vi.LowRankNormal(2), 3)], ids=repr
)
def test_mixtures_of_normals_are_mixtures_in_function_space(family):
    bayes, moments = mixture_of(family)
    pred = bayes.predict(X, generator=seeded())
    assert pred.note == "in function space"
    assert pred.by_input
    weights, means, variances = (torch.as_tensor([*own]) if k == 0 else torch.stack(own)
                                 for k, own in enumerate(zip(*moments, strict=True)))  # fmt: skip
    mean = weights.double() @ means
    variance = weights.double() @ (variances + (means - mean).square())
    close(pred.mean.flatten(), mean)
    close(pred.epistemic.flatten(), variance)
    t = mean + 0.3
    exact = [w * Normal(m, (v + 0.05**2).sqrt()).log_prob(t).exp() for w, m, v in moments]
    close(pred.log_prob(t.unsqueeze(1)).flatten(), sum(exact).log())
    found = bayes.output_moments(X)
    close(found.mean.flatten(), mean)
    close(found.covariance.flatten(), variance)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_input_that_is_not_finite_spoils_no_other(bad):
    bayes, x = fitted(network(outputs=5)), X.clone()
    x[3, 0] = bad
    pred, expected = (bayes.predict(one, generator=seeded()) for one in (x, X))
    assert pred.note == "in function space"
    assert pred.mean[3].isnan().all()
    others = [0, 1, 2, 4, 5, 6]
    torch.testing.assert_close(pred.mean[others], expected.mean[others], rtol=1e-9, atol=1e-12)


def test_classes_are_those_of_many_draws():
    bayes = fitted(network(outputs=4))
    mean, covariance = bayes.output_moments(X)
    logits = MultivariateNormal(mean, covariance).expand((len(X),)).sample((100_000,))
    expected = logits.softmax(-1).mean(0)  # its standard error is at most .5/√100,000 = .0016
    pred = bayes.predict(X, generator=seeded())
    error = (pred.mean - expected).abs().max()
    assert error < 0.01  # 256 Sobol points of four dimensions; independent draws have .5/√256 = .03
    weights = bayes.predict(X, 20_000, generator=seeded()).mean
    assert (pred.mean - weights).abs().max() < 0.02  # of drawn weights three standard errors are .5·3/√20,000 = .011


class Wide(nn.Linear):
    def forward(self, x):
        return super().forward(x).repeat(1, 40)


class Mixing(nn.Linear):
    """Rows depend on each other."""

    def forward(self, x):
        y = super().forward(x)
        return y - y.mean(0)


class Hidden(nn.Module):
    """No derivative of its first layer is seen backwards, and draws of it change the output."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        with torch.no_grad():
            inner = torch.tanh(self.layer(x))
        return self.head(inner)


def by_hand(net, batch):
    return net(batch["x"]), batch.get("t")


def dropping():
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double()


WITHOUT = {
    "drawn weights": lambda: (vi.variationalize(network(), lk.Categorical(), vi.MeanField(), num_data=9), X, {}),
    "asked not to": lambda: (fitted(network()), X, {"linearise": False}),
    "many outputs": lambda: (fitted(Wide(3, 2).double()), X, {}),
    "rows together": lambda: (fitted(Mixing(3, 2).double()), X, {}),
    "no_grad": lambda: (fitted(Hidden().double()), X, {}),
    "forward=": lambda: (fitted(network(), forward=by_hand), {"x": X}, {}),
    "reestimated": lambda: (fitted(network(), batch_norm="reestimated"), X, {"reference": X}),
    "dropout": lambda: (fitted(dropping(), dropout="on"), X, {}),
    "random noise": lambda: (fitted(network(outputs=1), lk.Gaussian("random")), X, {}),
    "no normal": lambda: (fitted(network(), family=vi.MCDropout(0.5)), X, {}),
}


@pytest.mark.parametrize("case", WITHOUT)
def test_elsewhere_weights_are_drawn_as_before(case):
    bayes, x, options = WITHOUT[case]()
    pred, expected = (bayes.predict(x, draws, generator=seeded(), **options) for draws in (None, 64))
    assert not pred.by_input
    assert "function space" not in pred.note
    torch.testing.assert_close(pred.outputs, expected.outputs, rtol=0.0, atol=0.0)
    assert pred.draws == expected.draws


def test_a_dict_batch_is_predicted_as_its_tensor_is():
    """With paths, labels and headers beside the image, as loaders of medical images give it."""
    batch = {"image": X, "label": torch.zeros(7), "path": ["a"] * 7, "header": {"spacing": [1.0] * 7}}
    bayes = fitted(network(), keys=("image", "label"))
    pred, expected = bayes.predict(batch), fitted(network()).predict(X)
    assert pred.note == expected.note == "in function space"
    assert torch.equal(pred.mean, expected.mean)
