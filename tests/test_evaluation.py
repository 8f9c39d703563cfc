"""Evaluation at S weights: the loop is the truth, vmap is used where it is proven equal, and the choice is recorded."""

import re

import pytest
import torch
from torch import nn

from structvi import BayesianModel, LogDensity, NormalPrior, Parameters, likelihoods
from structvi.evaluation import Evaluation

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
            (lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)), "loop", "gives other values"),
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
        model = regression(Attention().train())
        model.log_joint(draws(model), (X, T))
        assert model.evaluation.choice == "loop"
        assert "batching rule for aten::_scaled_dot_product" in (model.evaluation.reason or "")

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

    def test_equal_first_rows_do_not_fool_the_probe(self):
        # the rows of a point mass are all the same; a rule that mixes them up would go unnoticed
        class Swap(WrongRule):
            @staticmethod
            def vmap(info, in_dims, x):
                return x + (x.flip(in_dims[0]) - x).detach(), in_dims[0]  # values of another row, gradients of this

        model = regression(Custom(Swap))
        model.log_joint(model.space.initial.expand(4, -1), (X, T))
        assert model.evaluation.choice == "loop"

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
        # a probe is two calls of the loop and one of vmap
        assert history == [("vmap", 3 + 1), ("vmap", 1), ("loop", 3 + 4), ("loop", 4), ("vmap", 1)]

    def test_a_part_that_trains_inside_a_network_in_eval_mode(self):
        net = batch_norm().eval()
        model = regression(net)
        model.log_joint(draws(model), (X, T))
        net[1].train()
        model.log_joint(draws(model), (X, T))
        assert model.evaluation.choice == "loop"

    def test_repr_has_the_record(self):
        model = regression(mlp())
        model.log_joint(draws(model), (X, T))
        assert "choice='vmap', reason='proven equal to the loop'" in repr(model.evaluation)


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


class TestNothingIsTouched:
    @pytest.mark.parametrize("make", [mlp, batch_norm, Recurrent])
    def test_probe_leaves_the_global_stream(self, make):
        model = regression(make())
        theta = draws(model)
        state = torch.get_rng_state()
        model.log_joint(theta, (X, T))
        assert torch.equal(torch.get_rng_state(), state)

    def test_dropout_costs_the_stream_no_more_than_the_loop_itself(self):
        net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        values = []
        for mode in ("loop", "auto"):
            model = regression(net, evaluation=mode)
            torch.manual_seed(5)
            values.append((model.log_joint(draws(model), (X, T)), torch.get_rng_state()))
        assert torch.equal(values[0][0], values[1][0])
        assert torch.equal(values[0][1], values[1][1])

    @pytest.mark.parametrize("part", [False, True])
    def test_train_mode_changes_neither_buffers_nor_parameters(self, part):
        net = batch_norm().train(not part)
        net[1].train()
        before = {name: t.clone() for name, t in net.state_dict().items()}
        flags = [p.requires_grad for p in net.parameters()]
        model = regression(net)
        value_and_gradient(model, draws(model), (X, T))
        model.outputs(draws(model), X)
        assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
        assert [p.requires_grad for p in net.parameters()] == flags
        assert all(p.grad is None for p in net.parameters())


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
