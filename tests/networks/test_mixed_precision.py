"""bfloat16 and float16 for the network alone: the ELBO and its gradient are those of float32 up to their noise."""

import pytest
import torch
from torch import nn

import structvi as vi
from structvi.objective import Estimate
from structvi.train.step import LossFactor, Step

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
    """A gradient of 1e-8 at the output is zero in float16; that of c times the loss, divided by c, is that of float32.

    The norm, and what the optimizer takes, are those of the loss itself.
    """
    x, t = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 1)
    gradients, norms = [], []
    for precision, c in ((None, 1.0), (torch.float16, 2.0**16), (torch.float16, 1.0)):
        torch.manual_seed(0)
        likelihood = vi.likelihoods.Gaussian(noise=2e4)
        bayes = vi.variationalize(nn.Linear(3, 1), likelihood, vi.MAP(), num_data=8, evaluation=evaluation)
        bayes.model.precision = precision
        bayes.model.prior = vi.priors.NormalPrior(1e8)
        sgd = torch.optim.SGD(bayes.parameters(), lr=0.0)
        step = Step(bayes, sgd, torch.Generator().manual_seed(0), estimator=vi.Estimator(groups=2))
        step.factor.set(c)
        norms.append(step([(x, t)]).norm)
        gradients.append(torch.cat([p.grad.flatten() for p in bayes.parameters()]))
    full, scaled, unscaled = (1e9 * gradient for gradient in gradients)
    assert cosine(scaled, full) > 0.999
    torch.testing.assert_close(scaled.norm(), full.norm(), rtol=1e-2, atol=0)
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)
    assert unscaled[:3].norm() < 0.5 * full[:3].norm()  # under vmap the bias is added in float32


def test_a_step_in_float16_is_clipped_as_one_in_float32():
    moved = []
    for precision in (None, torch.float16):
        torch.manual_seed(0)
        bayes = vi.variationalize(nn.Linear(3, 1), vi.likelihoods.Gaussian(noise=1.0), vi.MeanField(), num_data=8)
        bayes.model.precision = precision
        before = torch.cat([p.detach().flatten() for p in bayes.parameters()])
        sgd = torch.optim.SGD(bayes.parameters(), lr=1.0)
        Step(bayes, sgd, torch.Generator().manual_seed(0), clip=0.5)([(torch.ones(8, 3), torch.zeros(8, 1))])
        moved.append(torch.cat([p.detach().flatten() for p in bayes.parameters()]) - before)
    assert moved[0].norm().item() == pytest.approx(0.5, rel=1e-3)
    torch.testing.assert_close(moved[1], moved[0], rtol=0, atol=5e-3)


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


def test_the_factor_grows_after_finite_steps_and_ends_at_its_lowest():
    factor = LossFactor(torch.device("cpu"))
    factor.set(4.0)
    for _ in range(LossFactor.GROWTH):
        assert factor.value == factor.tensor.item() == 4.0
        factor.count()
    assert (factor.value, factor.tensor.item(), factor.finite) == (8.0, 8.0, 0)
    factor.count()
    assert factor.halve()
    assert (factor.value, factor.tensor.item(), factor.finite) == (4.0, 4.0, 0)
    factor.set(LossFactor.LOWEST)
    assert not factor.halve()


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
        options = {"steps": 40, "compute": vi.Compute(precision=torch.float16), "progress": False, "clip": None}

        def watch(history):
            if len(history) == 2:
                assert all(torch.equal(p, start[name]) for name, p in posterior.named_parameters())

        result = posterior.fit(self.batches(), callback=watch, **options)
        left_out = len(result.skipped)
        assert 5 < left_out < 30  # more than the five failures that would end a fit
        reasons = [float(one.reason.rpartition(" ")[2]) for one in result.skipped]
        assert reasons == [2.0 ** (15 - k) for k in range(left_out)]
        assert "float16 overflowed in the gradient; the loss is now times 32768" in result.skipped[0].reason
        assert f"{left_out} steps left out" in result.details
        assert result.history["elbo"].isfinite().sum() == 40 - left_out

        def stop(history):
            if len(history) == 10:
                raise KeyboardInterrupt

        broken = self.posterior(noise=1e-3)
        broken.fit(self.batches(), callback=stop, checkpoint=vi.Checkpoint(tmp_path), **options)
        resumed = self.posterior(noise=1e-3)
        resumed.fit(self.batches(), checkpoint=vi.Checkpoint(tmp_path, resume=True), **options)
        assert all(torch.equal(p, q) for p, q in zip(resumed.parameters(), posterior.parameters(), strict=True))

    def test_a_gradient_that_no_factor_makes_finite_ends_the_fit(self, monkeypatch):
        posterior = self.posterior()
        monkeypatch.setattr(LossFactor, "LOWEST", 2.0**16)
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
