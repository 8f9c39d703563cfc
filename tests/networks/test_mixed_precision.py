"""bfloat16 and float16 for the network alone: the ELBO and its gradient are those of float32 up to their noise."""

import pytest
import torch
from torch import nn

import structvi as vi
from structvi.networks.mixed_precision import GradientScale
from structvi.objective import Estimate

HALF = [torch.bfloat16, torch.float16]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.embed(x)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return self.head((x + self.out((q @ k.mT / 4).softmax(-1) @ v)).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 9, 4),
    ).eval()  # fmt: skip


NETWORKS = {
    "mlp": (mlp, lambda: torch.randn(64, 10)),
    "conv": (conv, lambda: torch.randn(64, 1, 12, 12)),
    "attention": (Attention, lambda: torch.randint(20, (64, 6))),
}


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def regression(**options) -> vi.BayesianModel:
    likelihood = options.pop("likelihood", vi.likelihoods.Gaussian(0.5))
    return vi.BayesianModel(nn.Linear(3, 1), likelihood, vi.priors.NormalPrior(), 8, **options)


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("evaluation", ["loop", "vmap"])
@pytest.mark.parametrize("network", NETWORKS)
def test_elbo_and_gradient_on_common_draws(network, evaluation, precision):
    make, inputs = NETWORKS[network]
    net, x = make(), inputs()
    batch = x, torch.randint(4, (64,))
    model = vi.BayesianModel(net, vi.likelihoods.Categorical(), vi.priors.NormalPrior(0.3), 640, evaluation=evaluation)
    q = vi.LowRankNormal(rank=2).bind(model.space)
    estimates, gradients = [], []
    for model.precision in (None, precision):
        q.zero_grad()
        values = vi.objective.elbo_terms(
            q, model, batch, estimator=vi.Estimator(groups=16), generator=torch.Generator().manual_seed(1)
        ).objective()
        assert values.dtype == torch.float32
        (-values.mean() / 640).backward()
        estimates.append(Estimate.of(values))
        gradients.append({name: p.grad.clone() for name, p in q.named_parameters()})
    difference = estimates[1].value - estimates[0].value
    assert 0 < abs(difference) < estimates[0].standard_error  # common draws: all of the difference is rounding
    for name, gradient in gradients[0].items():
        assert cosine(gradients[1][name].flatten(), gradient.flatten()) > 0.99
        assert gradients[1][name].dtype == torch.float32


@pytest.mark.parametrize("evaluation", ["loop", "vmap"])
def test_small_gradients_survive_float16(evaluation):
    """1e-8 at the output is zero in float16; inside the network it is 1e-8·c, and outside it is 1e-8 again."""
    x, t = torch.randn(8, 3), torch.randn(8, 1)
    model = regression(evaluation=evaluation)
    theta = torch.randn(3, 4, requires_grad=True)
    gradients = []
    for model.precision, c in ((None, 1.0), (torch.float16, 2.0**16), (torch.float16, 1.0)):
        model.scale = GradientScale(c)
        gradients.append(torch.autograd.grad(1e-9 * model.log_likelihood(theta, (x, t)).sum(), theta)[0])
    full, scaled, unscaled = gradients
    assert cosine(scaled.flatten(), full.flatten()) > 0.999
    torch.testing.assert_close(scaled.norm(), full.norm(), rtol=1e-2, atol=0)
    assert unscaled.norm() < 0.5 * full.norm()


def test_nothing_outside_the_network_is_scaled():
    """A learned noise, weights shared by all draws, and inputs that a forward of the user's own makes of weights."""

    def forward(net, batch):
        return net(net(batch[0]).expand(-1, 3)), batch[1]

    x, t = torch.randn(8, 3), torch.randn(8, 1)
    model = regression(forward=forward, likelihood=vi.likelihoods.Gaussian("point", initial=0.5), evaluation="loop")
    shared = torch.randn(1, 3, requires_grad=True)
    theta = torch.randn(3, 1, requires_grad=True)
    model.scale = GradientScale(64.0)
    wanted, gradients = [theta, shared, *model.likelihood.parameters()], []
    for model.precision in (None, torch.float16):
        value = model.log_likelihood(theta, (x, t), {"weight": shared}).mean()
        gradients.append(torch.autograd.grad(value, wanted))
    for full, half in zip(*gradients, strict=True):
        torch.testing.assert_close(half, full, rtol=1e-2, atol=1e-2 * full.norm().item())


def test_vmap_is_proven_in_full_precision():
    """In half precision its rounding differs from the loop's by more than the proof allows."""
    net, x, seen = nn.Linear(3, 1, bias=False), torch.randn(8, 3), []
    net.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model = vi.BayesianModel(net, vi.likelihoods.Gaussian(0.5), vi.priors.NormalPrior(), 8)
    model.precision = torch.bfloat16
    model.log_joint(torch.randn(4, 3), (x, torch.zeros(8, 1)))
    assert model.evaluation.choice == "vmap"
    assert set(seen[:3]) == {torch.float32}  # two calls of the loop, one of vmap
    assert set(seen[3:]) == {torch.bfloat16}
    assert model.precision == torch.bfloat16


def test_scale_grows_after_finite_steps_and_ends_at_its_bounds():
    scale = GradientScale(4.0)
    for _ in range(GradientScale.GROWTH):
        assert scale.value == 4.0
        scale.count()
    assert (scale.value, scale.finite) == (8.0, 0)
    scale.count()
    assert scale.halve()
    assert (scale.value, scale.finite) == (4.0, 0)
    assert not GradientScale(GradientScale.LOWEST).halve()
    top = GradientScale(GradientScale.HIGHEST, GradientScale.GROWTH - 1)
    top.count()
    assert top.value == GradientScale.HIGHEST


class TestFit:
    def posterior(self, noise=0.3):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        return vi.variationalize(net, vi.likelihoods.Gaussian(noise), vi.MeanField(), num_data=32)

    def batches(self):
        g = torch.Generator().manual_seed(1)
        x = torch.randn(32, 3, generator=g)
        return [(x, x.sum(-1, keepdim=True))]

    def test_steps_that_overflow_are_left_out_and_halve_the_scale(self, tmp_path):
        # residual / noise² / (B·S) = 1e6/64 at the output: times 65536 far above 65504
        posterior = self.posterior(noise=1e-3)
        start = {name: p.detach().clone() for name, p in posterior.named_parameters()}
        seen = []
        options = {"steps": 40, "compute": vi.Compute(precision=torch.float16), "progress": False, "clip": None}

        def watch(history):
            seen.append(posterior.model.scale.value)
            if len(seen) == 2:
                assert all(torch.equal(p, start[name]) for name, p in posterior.named_parameters())

        result = posterior.fit(self.batches(), callback=watch, **options)
        left_out = len(result.skipped)
        assert 5 < left_out < 30  # more than the five failures that would end a fit
        assert seen[:3] == [2.0**15, 2.0**14, 2.0**13]
        assert seen[-1] == 2.0 ** (16 - left_out)
        assert "float16 overflowed in the gradient; its scale is now 32768" in result.skipped[0].reason
        assert f"{left_out} steps left out" in result.details
        assert result.history["elbo"].isfinite().sum() == 40 - left_out

        def stop(history):
            if len(history) == 10:
                raise KeyboardInterrupt

        broken = self.posterior(noise=1e-3)
        broken.fit(self.batches(), callback=stop, checkpoint=vi.Checkpoint(tmp_path), **options)
        resumed = self.posterior(noise=1e-3)
        resumed.fit(self.batches(), checkpoint=vi.Checkpoint(tmp_path, resume=True), **options)
        assert resumed.model.scale.value == posterior.model.scale.value
        assert all(torch.equal(p, q) for p, q in zip(resumed.parameters(), posterior.parameters(), strict=True))

    def test_a_gradient_that_no_scale_makes_finite_ends_the_fit(self):
        posterior = self.posterior()
        posterior.model.scale = GradientScale(GradientScale.LOWEST)
        x, t = self.batches()[0]

        class Broken(torch.autograd.Function):
            @staticmethod
            def forward(ctx, y):
                return y.clone()

            @staticmethod
            def backward(ctx, *gradients):
                return gradients[0] * torch.inf

        posterior.model.user_forward = lambda net, batch: (Broken.apply(net(batch[0])), batch[1])
        with pytest.raises(vi.NonFiniteError, match="5 batches in a row"):
            posterior.fit([(x, t)], steps=10, compute=vi.Compute(precision=torch.float16), progress=False)


REFUSED = {
    "no precision": (regression, torch.int8, r"None, torch\.bfloat16 or torch\.float16, got torch\.int8"),
    "LSTM": (
        lambda: vi.BayesianModel(nn.LSTM(3, 1), lambda y, t: -(y[0] - t).square(), vi.priors.NormalPrior(), 8),
        torch.float16,
        "LSTMs in half precision on few CPUs",
    ),
    "float64": (
        lambda: vi.BayesianModel(nn.Linear(3, 1).double(), vi.likelihoods.Gaussian(1.0), vi.priors.NormalPrior(), 8),
        torch.bfloat16,
        "mixed with float32, and the weights are",
    ),
    "meta": (lambda: regression().to("meta"), torch.bfloat16, "torch has no mixed precision on 'meta'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    make, precision, message = REFUSED[case]
    model = make()
    with pytest.raises(ValueError, match=message):
        model.precision = precision
    assert model.precision is None
