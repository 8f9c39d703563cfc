"""bfloat16 and float16 for the network alone: the ELBO and its gradient are those of float32 up to their noise."""

import pytest
import torch
from torch import nn

import structvi as vi
from structvi.objective import Estimate

HALF = [torch.bfloat16, torch.float16]


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


@pytest.mark.parametrize(
    ("precision", "dtype", "message"),
    [
        (torch.int8, torch.float32, r"None, torch\.bfloat16 or torch\.float16, got torch\.int8"),
        (torch.bfloat16, torch.float64, "mixed with float32, and the weights are"),
    ],
)
def test_what_is_refused(precision, dtype, message):
    bayes = vi.variationalize(nn.Linear(3, 1).to(dtype), vi.likelihoods.Gaussian(1.0), num_data=8)
    with pytest.raises(ValueError, match=message):
        bayes.fit([(torch.zeros(8, 3), torch.zeros(8, 1))], steps=1, compute=vi.Compute(precision=precision))
