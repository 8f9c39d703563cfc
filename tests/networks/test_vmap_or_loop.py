"""Evaluation at S weights: the loop is the truth, vmap is used where it is proven equal, and the choice is recorded."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.func import jvp, vmap

from structvi import BayesianModel, Parameters, likelihoods
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


def mlp(width=4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))


def batch_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def dropout() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def conv() -> nn.Sequential:
    return nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(4, 1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.lstm(x.unsqueeze(-1))[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(1, 8), nn.Linear(8, 1)
        self.layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=8, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.head(self.layer(self.embed(x.unsqueeze(-1))).mean(1))


class Branch(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
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
        self.linear, self.function = nn.Linear(3, 1), function

    def forward(self, x):
        return self.function.apply(self.linear(x))


CASES = {
    "mlp": (mlp, "vmap", "proven equal to the loop"),
    "softmax, whose sum has no gradient": (lambda: nn.Sequential(mlp(), nn.Softmax(-1)), "vmap", "proven equal"),
    "batch norm, eval": (lambda: batch_norm().eval(), "vmap", "proven equal"),
    "batch norm, train": (batch_norm, "loop", "vmap cannot run it: Batch norm"),
    "dropout, eval": (lambda: dropout().eval(), "vmap", "proven equal"),
    "dropout, train": (dropout, "loop", "draws random numbers"),
    "branch": (lambda: Branch(3, 1), "loop", "vmap cannot run it: .*data-dependent"),
    "wrong value": (lambda: Custom(WrongRule), "loop", "gives other values"),
    "wrong gradient": (lambda: Custom(WrongGradient), "loop", "gives other values"),
    "a kernel for each draw": (conv, "loop", "kernel for each draw"),
    "attention": (lambda: Attention().eval(), "vmap", "proven equal"),
    "recurrent": (Recurrent, "loop", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_the_choice_and_values_are_those_of_the_loop_without_a_warning(case):
    make, choice, reason = CASES[case]
    net = make().double()
    auto, loop = regression(net), regression(net, evaluation="loop")
    theta, batch = draws(auto), (X.double(), T.double())
    assert auto.log_joint(theta[:1], batch).shape == (1,)
    assert auto.evaluation.choice is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(0)
        got = value_and_gradient(auto, theta, batch)
    assert auto.evaluation.choice == choice
    assert re.search(reason, auto.evaluation.reason or "")
    if case != "dropout, train":
        for one, expected in zip(got, value_and_gradient(loop, theta, batch), strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"is_causal": True},
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()},
        {"attn_mask": torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(0))},
        {"attn_mask": torch.zeros(5, 5, dtype=torch.bool)},
    ],
)
def test_plain_attention_is_torchs_own(how):
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


@pytest.mark.parametrize(("dtype", "choice"), [(torch.float64, "loop"), (torch.float32, "vmap")])
def test_tolerance_follows_the_dtype(dtype, choice, monkeypatch):
    monkeypatch.setattr(WrongRule, "shift", 1e-6)  # a bug in float64, rounding in float32
    model = regression(Custom(WrongRule).to(dtype))
    model.log_joint(draws(model), (X.to(dtype), T.to(dtype)))
    assert model.evaluation.choice == choice


def test_proven_once_and_again_when_the_network_goes_to_train_and_back():
    net, calls, history = nn.Sequential(batch_norm()).eval(), [], []
    net.register_forward_pre_hook(lambda *_: calls.append(None))
    model = regression(net)
    for training in (False, False, True, True, False):
        net.train(training)
        calls.clear()
        model.log_joint(draws(model, 4), (X, T))
        history.append((model.evaluation.choice, len(calls)))
    # a proof is two calls of the loop and one of vmap; two more of vmap measure what a draw takes
    assert history == [("vmap", 5 + 1), ("vmap", 1), ("loop", 3 + 4), ("loop", 4), ("vmap", 1)]


@pytest.mark.parametrize("held", [True, False])
def test_one_kernel_for_all_draws_goes_by_vmap(held):
    net = conv()
    head = Parameters.of(net, "3.*")
    model = regression(net, parameters=head) if held else regression(net)
    theta = (head.initial + torch.randn(5, head.size)).requires_grad_()
    fixed = {} if held else {name: p for name, p in net.named_parameters() if name.startswith("1.")}
    model.log_joint(theta, (X, T), fixed)
    assert model.evaluation.choice == "vmap"


def test_a_large_draw_is_looped_and_what_draws_share_does_not_count(monkeypatch):
    monkeypatch.setattr(module, "MEMORY", 4e6)
    net, x = mlp(2000), torch.randn(256, 3)  # for the gradient 256·2000 numbers are kept
    whole, head = regression(net), regression(net, parameters=Parameters.of(net, "2.*"))
    for model in (whole, head):
        model.outputs(draws(model, 2), x)
    assert (whole.evaluation.choice, head.evaluation.choice) == ("loop", "vmap")
    assert "a draw takes 2.09 MB" in (whole.evaluation.reason or "")


def test_the_first_batch_does_not_decide_for_the_others():
    """For the gradient 8 kB of a row are kept: two rows go by vmap, a thousand do not."""
    few, many, seen = torch.randn(2, 3), torch.randn(1000, 3), []
    for batches in ((few, many, few), (many, few, many)):
        model = regression(mlp(2000))
        for x in batches:
            model.outputs(draws(model, 2), x)
            seen.append((len(x), model.evaluation.choice, model.evaluation.reason))
    assert {(rows, choice) for rows, choice, _ in seen} == {(2, "vmap"), (1000, "loop")}
    assert len(set(seen)) == 2


def test_as_many_draws_at_once_as_memory_allows(monkeypatch, peak_bytes):
    x = torch.randn(100, 3)
    peaks, values = [], []
    for memory in (2**30, 2**18):
        monkeypatch.setattr(module, "MEMORY", memory)
        model = regression(mlp(50))
        with torch.no_grad():
            model.outputs(draws(model, 2), x)  # the choice
            with peak_bytes() as tracker:
                values.append(model.outputs(draws(model, 64) * 0 + 0.1, x))
        peaks.append(tracker.peak)
        assert model.evaluation.choice == "vmap"
    # 100·50 numbers of a draw are kept: twelve draws at once of 64
    assert peaks[0] > 64 * 20_000
    assert peaks[1] < 3 * 2**18
    torch.testing.assert_close(values[0], values[1])
    assert "at most 12 at once" in str(model.evaluation)


def test_forced_vmap_that_cannot_is_an_error():
    model = regression(batch_norm(), evaluation="vmap")
    with pytest.raises(RuntimeError, match="Batch norm got a batched tensor"):
        model.log_joint(draws(model), (X, T))


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_chunks(chunk):
    seen, evaluation = [], Evaluation("vmap", chunk)
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
