"""Targets: the log joint against a computation by hand, batches of every form, outputs of every form."""

from math import log, pi

import pytest
import torch
from torch import nn

from structvi import BayesianModel, likelihoods
from structvi.models.priors import NormalPrior

NOISE, PRIOR, N, B = 0.3, 0.7, 12, 6


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data(rows: int = B) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 3, dtype=torch.float64), torch.randn(rows, 2, dtype=torch.float64)


def regression(net: nn.Module | None = None, **options) -> BayesianModel:
    return BayesianModel(net or mlp(), likelihoods.Gaussian(NOISE), NormalPrior(PRIOR), num_data=N, **options)


def draws(model: BayesianModel, S: int = 4) -> torch.Tensor:
    return torch.randn(S, model.space.size, dtype=torch.float64, requires_grad=True)


def mlp_by_hand(row: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    W, b, V, c = row.split([12, 4, 8, 2])
    return (x @ W.view(4, 3).T + b).tanh() @ V.view(2, 4).T + c


def normal(x: torch.Tensor, scale: float) -> torch.Tensor:
    return -0.5 * (x / scale).square() - log(scale) - 0.5 * log(2 * pi)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("evaluation", ["auto", "vmap", "loop"])
class TestByHand:
    def check(self, model, theta, batch, by_hand):
        value = model.log_joint(theta, batch)
        expected = torch.stack([by_hand(row) for row in theta])
        close(value, expected)
        (gradient,) = torch.autograd.grad(value.sum(), theta)
        (expected_gradient,) = torch.autograd.grad(expected.sum(), theta)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-10)

    def test_gaussian(self, evaluation):
        model = regression(evaluation=evaluation)
        x, t = data()

        def by_hand(row):
            return N / B * normal(t - mlp_by_hand(row, x), NOISE).sum() + normal(row, PRIOR).sum()

        self.check(model, draws(model), (x, t), by_hand)

    def test_categorical(self, evaluation):
        model = BayesianModel(mlp(), likelihoods.Categorical(), NormalPrior(PRIOR), num_data=N, evaluation=evaluation)
        x, labels = data()[0], torch.tensor([0, 1, 1, 0, 1, 0])

        def by_hand(row):
            logits = mlp_by_hand(row, x)
            log_prob = logits[torch.arange(B), labels] - logits.exp().sum(-1).log()
            return N / B * log_prob.sum() + normal(row, PRIOR).sum()

        self.check(model, draws(model), (x, labels), by_hand)


class TestMinibatches:
    def test_mean_over_a_partition_is_the_full_data(self):
        model = regression()
        x, t = data(N)
        theta = draws(model)
        full = model.log_joint(theta, (x, t))
        parts = [model.log_joint(theta, (x[i : i + 4], t[i : i + 4])) for i in range(0, N, 4)]
        close(torch.stack(parts).mean(0), full)
        (gradient,) = torch.autograd.grad(torch.stack(parts).mean(0).sum(), theta)
        close(gradient, torch.autograd.grad(full.sum(), theta)[0])


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x, gain):
        return gain * self.linear(x)


class TestBatches:
    def test_several_inputs_by_position_and_by_name(self):
        model = regression(TwoInputs())
        x, t = data()
        gain = torch.rand(B, 1, dtype=torch.float64)
        theta = draws(model)
        W, b = (model.space.unravel(theta)[name] for name in ("linear.weight", "linear.bias"))
        y = gain * (x @ W.mT + b.unsqueeze(1))
        expected = N / B * normal(t - y, NOISE).sum((1, 2)) + normal(theta, PRIOR).sum(-1)
        for batch in (((x, gain), t), [[x, gain], t], {"gain": gain, "x": x, "target": t}, ({"gain": gain, "x": x}, t)):
            close(model.log_joint(theta, batch), expected)
        for inputs in ((x, gain), [x, gain], {"gain": gain, "x": x}):
            close(model.outputs(theta, inputs), y)

    @pytest.mark.parametrize("evaluation", ["vmap", "loop"])
    def test_forward_of_the_users_own(self, evaluation):
        seen = []

        def forward(net, batch):
            seen.append(type(batch))
            return net(batch["pixels"] / 2), batch["extra"]["truth"]

        net = mlp()
        model = regression(net, forward=forward, evaluation=evaluation)
        x, t = data()
        theta = draws(model)
        close(
            model.log_joint(theta, {"pixels": 2 * x, "extra": {"truth": t}}), regression(net).log_joint(theta, (x, t))
        )
        assert set(seen) == {dict}


class TestFixed:
    """Tensors that every draw shares: apart from theta, with a gradient of their own."""

    def test_log_joint_with_fixed_tensors_equals_that_of_the_whole(self):
        model = regression()
        x, t = data()
        theta = draws(model)
        shared = {name: tensor[0].detach().requires_grad_() for name, tensor in model.space.unravel(theta).items()}
        fixed = {name: shared[name] for name in ("0.weight", "0.bias")}
        rest = model.space.without(fixed)
        small = rest.ravel({name: model.space.unravel(theta)[name] for name in rest.names})
        whole = model.space.join(small, fixed)
        value, expected = model.log_joint(small, (x, t), fixed), model.log_joint(whole, (x, t))
        close(value, expected)
        got = torch.autograd.grad(value.sum(), [theta, *fixed.values()], retain_graph=True)
        for a, b in zip(got, torch.autograd.grad(expected.sum(), [theta, *fixed.values()]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        close(model.outputs(small, x, fixed), model.outputs(whole, x))


class TestCheckpointedActivations:
    """The backward pass calls the network again: the same gradients from less memory."""

    def gradients(self, net, batch, mode=None, **options):
        model = regression(net, evaluation="loop", **options)
        theta = draws(model)
        torch.manual_seed(3)
        value = model.log_joint(theta, batch).sum()
        torch.manual_seed(4)  # what the stream is later on is not to matter
        if mode is not None:
            net.train(mode)
        before = torch.get_rng_state()
        (gradient,) = torch.autograd.grad(value, theta, retain_graph=True)
        (again,) = torch.autograd.grad(value, theta)
        assert torch.equal(gradient, again)
        assert torch.equal(torch.get_rng_state(), before)
        return value, gradient

    @pytest.mark.parametrize("training", [True, False])
    def test_the_same_bits_with_dropout_and_batch_norm(self, training):
        net = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)
        ).double()  # fmt: skip
        batch, results = data(), []
        for checkpointed in (False, True):
            torch.manual_seed(2)
            net.train(training)
            # as after `Posterior.terms`, the network's mode has changed by the time of the backward pass
            results.append(self.gradients(net, batch, mode=not training, checkpoint_activations=checkpointed))
            assert all(module.training != training for module in net.modules())
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])

    def test_less_memory(self, peak_bytes):
        net = nn.Sequential(nn.Linear(3, 40), *[nn.Sequential(nn.Linear(40, 40), nn.Tanh()) for _ in range(6)])
        batch, peaks = (torch.randn(200, 3), torch.randn(200, 40)), []
        for checkpointed in (False, True):
            model = BayesianModel(
                net, likelihoods.Gaussian(NOISE), NormalPrior(), 200, evaluation="loop",
                checkpoint_activations=checkpointed,
            )  # fmt: skip
            theta = (0.1 * torch.randn(8, model.space.size)).requires_grad_()
            with peak_bytes() as tracker:
                value = model.log_likelihood(theta, batch).sum()
                torch.autograd.grad(value, theta)
            peaks.append(tracker.peak)
        # eight draws of activations against one, and the [8, P] gradient in both
        assert peaks[1] < 0.5 * peaks[0]
