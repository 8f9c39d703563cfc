"""Evaluation at S weights: the loop is the truth, vmap is used where it is proven equal, and the choice is recorded."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.func import jvp, vmap

from structvi import BayesianModel, LogDensity, Parameters, likelihoods
from structvi.models.priors import NormalPrior
from structvi.networks import vmap_or_loop as module
from structvi.networks.plain_kernels import PlainKernels
from structvi.networks.vmap_or_loop import Evaluation

X, T = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), torch.zeros(6, 1)


def regression(net: nn.Module, **options) -> BayesianModel:
    return BayesianModel(net, likelihoods.Gaussian(0.5), NormalPrior(), num_data=60, **options)


def draws(model: BayesianModel, S: int = 5) -> torch.Tensor:
    noise = torch.randn(S, model.space.size, generator=torch.Generator().manual_seed(2))
    return (model.space.initial + 0.3 * noise.to(model.space.dtype)).requires_grad_()


def value_and_gradient(model: BayesianModel, theta: torch.Tensor, batch) -> tuple[torch.Tensor, torch.Tensor]:
    value = model.log_joint(theta, batch)
    (gradient,) = torch.autograd.grad(value.sum(), theta)
    return value.detach(), gradient


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def batch_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 4, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.lstm(x.unsqueeze(-1))[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.layer(self.embed(x.unsqueeze(-1))).mean(1))


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x):
        y = self.linear(x)
        return y if y.sum() > 0 else 2 * y


class WrongRule(torch.autograd.Function):
    """x, with a batching rule that shifts it by a part of its size."""

    shift = 0.5

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0]

    @staticmethod
    def vmap(info, in_dims, x):
        return x * (1 + WrongRule.shift), in_dims[0]


class WrongGradient(WrongRule):
    """x, with a batching rule that has the right value and loses the gradient."""

    @staticmethod
    def vmap(info, in_dims, x):
        return x.detach().clone(), in_dims[0]


class NoRule(torch.autograd.Function):
    """A custom function in the older style."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(1, 8), nn.Linear(8, 1)

    def forward(self, x):
        x = self.embed(x.unsqueeze(-1)).unsqueeze(1)  # one head
        return self.head(nn.functional.scaled_dot_product_attention(x, x, x).squeeze(1).mean(1))


class Custom(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.function = function

    def forward(self, x):
        return self.function.apply(self.linear(x))


class TestChoice:
    @pytest.mark.parametrize(
        ("make", "choice", "reason"),
        [
            (mlp, "vmap", "proven equal to the loop"),
            (lambda: batch_norm().eval(), "vmap", "proven equal to the loop"),
            (batch_norm, "loop", "vmap cannot run it: Batch norm"),
            (Branch, "loop", "vmap cannot run it: .*data-dependent"),
            (lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)), "loop", "draws random numbers"),
            (lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).eval(), "vmap", "proven equal"),
            (lambda: Custom(WrongRule), "loop", "gives other values"),
            (lambda: Custom(WrongGradient), "loop", "gives other values"),
        ],
        ids=[
            "mlp",
            "batch norm, eval",
            "batch norm, train",
            "branch",
            "dropout, train",
            "dropout, eval",
            "wrong value",
            "wrong gradient",
        ],
    )
    def test_of_auto(self, make, choice, reason):
        model = regression(make())
        assert (model.evaluation.choice, model.evaluation.reason) == (None, None)
        model.log_joint(draws(model), (X, T))
        assert model.evaluation.choice == choice
        assert re.search(reason, model.evaluation.reason or "")

    @pytest.mark.parametrize("make", [mlp, Recurrent, Attention, batch_norm, Branch, lambda: Custom(WrongRule)])
    @pytest.mark.parametrize("training", [True, False])
    def test_auto_equals_the_loop(self, make, training):
        net = make().double().train(training)
        auto, loop = regression(net), regression(net, evaluation="loop")
        theta, batch = draws(auto), (X.double(), T.double())
        for got, expected in zip(
            value_and_gradient(auto, theta, batch), value_and_gradient(loop, theta, batch), strict=True
        ):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
        assert (loop.evaluation.choice, loop.evaluation.reason) == ("loop", "as asked")

    def test_an_operation_without_batching_rule_is_looped_without_a_warning(self):
        model = regression(Custom(NoRule))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.log_joint(draws(model), (X, T))
        assert model.evaluation.choice == "loop"
        assert "vmap cannot run it" in (model.evaluation.reason or "")

    @pytest.mark.parametrize("grad", [True, False])
    @pytest.mark.parametrize("make", [lambda: Attention().eval(), lambda: Attention().train(), Scaled])
    def test_attention_goes_by_vmap_with_plain_kernels_and_switches_nothing(self, make, grad):
        """torch's fused attention for a CPU has no batching rule."""
        net = make()
        before, seen = torch.backends.cuda.flash_sdp_enabled(), []
        net.register_forward_hook(lambda *_: seen.append(torch.backends.cuda.flash_sdp_enabled()))
        model, loop = regression(net), regression(net, evaluation="loop")
        theta = draws(model)
        with torch.set_grad_enabled(grad), warnings.catch_warnings():
            warnings.simplefilter("error")
            got, expected = model.log_joint(theta, (X, T)), loop.log_joint(theta, (X, T))
        assert model.evaluation.choice == "vmap"
        assert set(seen) == {before}
        torch.testing.assert_close(got, expected)

    @pytest.mark.parametrize(
        "how",
        [
            {},
            {"is_causal": True},
            {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()},
            {"attn_mask": torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(0))},
            {"scale": 0.1},
            {"attn_mask": torch.zeros(5, 5, dtype=torch.bool)},
        ],
    )
    def test_plain_attention_is_torchs_own(self, how):
        """Values and the derivatives of forward mode under vmap, for causal, boolean, additive and empty masks."""
        q, k, v, dq = torch.randn(4, 2, 3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        how = {name: x.to(q) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in how.items()}

        def attention(q):
            return nn.functional.scaled_dot_product_attention(q, k, v, **how)

        step = 1e-6
        slope = (attention(q + step * dq) - attention(q - step * dq)) / (2 * step)
        with PlainKernels(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own rules of forward mode are deprecated
            warnings.simplefilter("error", UserWarning)  # no batching rule
            values, slopes = vmap(lambda dq: jvp(attention, (q,), (dq,)))(torch.stack([dq, 2 * dq]))
        for i in range(2):
            torch.testing.assert_close(values[i], attention(q))
            torch.testing.assert_close(slopes[i], (1 + i) * slope, rtol=1e-4, atol=1e-8)

    def test_outputs_whose_sum_has_no_gradient_are_proven_equal_all_the_same(self):
        model = regression(nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1)))
        model.outputs(draws(model), X)
        assert model.evaluation.choice == "vmap"

    @pytest.mark.parametrize(("dtype", "choice"), [(torch.float64, "loop"), (torch.float32, "vmap")])
    def test_tolerance_follows_the_dtype(self, dtype, choice, monkeypatch):
        monkeypatch.setattr(WrongRule, "shift", 1e-6)  # a bug in float64, rounding in float32
        model = regression(Custom(WrongRule).to(dtype))
        model.log_joint(draws(model), (X.to(dtype), T.to(dtype)))
        assert model.evaluation.choice == choice

    def test_one_draw_is_evaluated_directly(self):
        model = regression(Branch())
        assert model.log_joint(draws(model, 1), (X, T)).shape == (1,)
        assert model.evaluation.choice is None

    def test_probed_once_and_again_when_the_network_goes_to_train_and_back(self):
        calls = []

        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = batch_norm()

            def forward(self, x):
                calls.append(None)
                return self.body(x)

        net = Counting().eval()
        model, history = regression(net), []
        for training in (False, False, True, True, False):
            net.train(training)
            calls.clear()
            model.log_joint(draws(model, 4), (X, T))
            history.append((model.evaluation.choice, len(calls)))
        # a proof is two calls of the loop and one of vmap; two more of vmap measure what a draw takes
        assert history == [("vmap", 5 + 1), ("vmap", 1), ("loop", 3 + 4), ("loop", 4), ("vmap", 1)]


def conv() -> nn.Sequential:
    return nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(4, 1))


class TestRule:
    """Of the present batch: neither a clock nor what came before has a say."""

    def test_a_kernel_for_each_draw_is_looped(self):
        model = regression(conv())
        model.log_joint(draws(model), (X, T))
        assert model.evaluation.choice == "loop"
        assert "kernel for each draw" in (model.evaluation.reason or "")

    @pytest.mark.parametrize("held", [True, False])
    def test_one_kernel_for_all_draws_is_not(self, held):
        net = conv()
        head = Parameters.of(net, "3.*")
        model = regression(net, parameters=head) if held else regression(net)
        theta = (head.initial + torch.randn(5, head.size)).requires_grad_()
        fixed = {} if held else {name: p for name, p in net.named_parameters() if name.startswith("1.")}
        model.log_joint(theta, (X, T), fixed)
        assert model.evaluation.choice == "vmap"

    def test_a_large_draw_is_looped_and_what_draws_share_does_not_count(self, monkeypatch):
        x = torch.randn(256, 3)
        monkeypatch.setattr(module, "MEMORY", 4e6)
        # for the gradient 256·2000 numbers are kept
        net = nn.Sequential(nn.Linear(3, 2000), nn.Tanh(), nn.Linear(2000, 1))
        whole = regression(net)
        whole.outputs(draws(whole, 2), x)
        assert whole.evaluation.choice == "loop"
        assert "a draw takes 2.09 MB" in (whole.evaluation.reason or "")
        head = regression(net, parameters=Parameters.of(net, "2.*"))
        head.outputs(draws(head, 2), x)
        assert head.evaluation.choice == "vmap"

    def test_the_first_batch_does_not_decide_for_the_others(self):
        """For the gradient 8 kB of a row are kept: two rows go by vmap, a thousand do not."""
        few, many = torch.randn(2, 3), torch.randn(1000, 3)
        seen = []
        for batches in ((few, many, few), (many, few, many)):
            model = regression(nn.Sequential(nn.Linear(3, 2000), nn.Tanh(), nn.Linear(2000, 1)))
            for x in batches:
                model.outputs(draws(model, 2), x)
                seen.append((len(x), model.evaluation.choice, model.evaluation.reason))
        assert {(rows, choice) for rows, choice, _ in seen} == {(2, "vmap"), (1000, "loop")}
        assert len(set(seen)) == 2

    def test_a_larger_batch_has_smaller_chunks(self, monkeypatch):
        monkeypatch.setattr(module, "MEMORY", 2**18)
        model = regression(nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 1)))
        said = []
        for rows in (100, 10, 100):
            model.outputs(draws(model, 2), torch.randn(rows, 3))
            said.append(str(model.evaluation).split(", ")[-1])
        assert said == ["at most 12 at once", "at most 87 at once", said[0]]

    def test_checkpointed_activations_are_looped(self):
        model = regression(mlp(), checkpoint_activations=True)
        model.log_joint(draws(model), (X, T))
        assert (model.evaluation.choice, model.evaluation.reason) == (
            "loop",
            "activations are checkpointed",
        )


class TestChunk:
    def test_as_many_draws_as_memory_allows(self, monkeypatch, peak_bytes):
        x = torch.randn(100, 3)
        peaks, values = [], []
        for memory in (2**30, 2**18):
            monkeypatch.setattr(module, "MEMORY", memory)
            model = regression(nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 1)))
            with torch.no_grad():
                model.outputs(draws(model, 2), x)  # the choice
                with peak_bytes() as tracker:
                    values.append(model.outputs(draws(model, 64) * 0 + 0.1, x))
            peaks.append(tracker.peak)
            assert model.evaluation.choice == "vmap"
        # product, bias and tanh make 3·100·50 numbers a draw, 60 kB: four draws at once of 64
        assert peaks[0] > 64 * 20_000
        assert peaks[1] < 3 * 2**18
        torch.testing.assert_close(values[0], values[1])
        assert "at most 12 at once" in str(model.evaluation)


class TestForced:
    def test_vmap_and_loop_are_equal_in_value_and_gradient(self):
        net = mlp().double()
        batch = X.double(), T.double()
        models = [regression(net, evaluation=mode) for mode in ("vmap", "loop")]
        theta = draws(models[0])
        (value, gradient), (expected, expected_gradient) = (value_and_gradient(m, theta, batch) for m in models)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)
        assert [m.evaluation.choice for m in models] == ["vmap", "loop"]

    def test_vmap_that_cannot_is_an_error(self):
        model = regression(batch_norm(), evaluation="vmap")
        with pytest.raises(RuntimeError, match="Batch norm got a batched tensor"):
            model.log_joint(draws(model), (X, T))

    def test_forced_vmap_is_not_probed(self):
        model = regression(Custom(WrongRule), evaluation="vmap")
        model.log_joint(draws(model), (X, T))
        assert (model.evaluation.choice, model.evaluation.reason) == ("vmap", "as asked")

    @pytest.mark.parametrize("chunk", [1, 2, 3, 5, 100])
    def test_chunks(self, chunk):
        seen = []
        evaluation = Evaluation("vmap", chunk)
        theta = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

        def function(row):
            seen.append(None)
            return {"y": row.sin(), "sum": (row.sum(),)}

        outputs = evaluation(function, theta)
        torch.testing.assert_close(outputs["y"], theta.sin())
        torch.testing.assert_close(outputs["sum"][0], theta.sum(-1))
        (gradient,) = torch.autograd.grad(outputs["y"].sum(), theta)
        torch.testing.assert_close(gradient, theta.cos())
        assert len(seen) == -(-5 // chunk)  # one call of the function to a chunk


def test_log_density_takes_the_same_way():
    space = Parameters({"z": torch.zeros(2)})
    theta = torch.randn(4, 2)
    smooth = LogDensity(lambda p: -p["z"].square().sum(), space)
    branch = LogDensity(lambda p: -p["z"].square().sum() if p["z"][0] > 0 else -p["z"].abs().sum(), space)
    torch.testing.assert_close(smooth.log_joint(theta), -theta.square().sum(-1))
    expected = torch.where(theta[:, 0] > 0, -theta.square().sum(-1), -theta.abs().sum(-1))
    torch.testing.assert_close(branch.log_joint(theta), expected)
    assert (smooth.evaluation.choice, branch.evaluation.choice) == ("vmap", "loop")


def test_an_error_of_the_users_own_is_not_swallowed():
    def fn(p):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        LogDensity(fn, Parameters({"z": torch.zeros(2)})).log_joint(torch.zeros(3, 2))
