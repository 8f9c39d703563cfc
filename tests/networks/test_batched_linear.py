"""Linear layers at S weights as batched products: vmap's own values and gradients, laid out as the weights are."""

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn.functional import linear

import structvi as vi
from structvi.networks import vmap_or_loop
from structvi.networks.batched_linear import BatchedLinear

S, B, IN, OUT = 3, 5, 4, 2


def tensors(shared, shape):
    """x, W and b in float64; of each the draws' own, unless all share it."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"x": (*shape, IN), "W": (OUT, IN), "b": (OUT,)}
    made = {}
    for name, size in sizes.items():
        own = size if name in shared else (S, *size)
        made[name] = torch.randn(own, generator=generator, dtype=torch.float64).requires_grad_()
    return made


def run(shared, shape, biased, way):
    """The output and all gradients, by a batched way of linear."""
    made = tensors(shared, shape)
    used = made if biased else {name: x for name, x in made.items() if name != "b"}
    dims = tuple(None if name in shared else 0 for name in used)
    function = vmap(lambda *rows: linear(*rows).sin(), in_dims=dims)
    with way():
        output = function(*used.values())
    uneven = torch.arange(output.numel(), dtype=output.dtype).cos().view(output.shape)
    return output, torch.autograd.grad((output * uneven).sum(), list(used.values()))


class Nothing:
    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(B,), (B, 2), (1,)])
@pytest.mark.parametrize("shared", ["", "x", "b", "xb", "W", "Wb"])
def test_values_and_gradients_are_those_of_vmap(shared, shape, biased):
    output, gradients = run(shared, shape, biased, BatchedLinear)
    expected, expected_gradients = run(shared, shape, biased, Nothing)
    torch.testing.assert_close(output, expected)
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("shape", [(B,), (S,), (B, 2), (1,)])
def test_a_bias_alone_that_is_drawn(shape):
    (output, gradients), (expected, wanted) = (run("xW", shape, True, way) for way in (BatchedLinear, Nothing))
    assert output.shape == (S, *shape, OUT)
    for a, b in zip((output, *gradients), (expected, *wanted), strict=True):
        torch.testing.assert_close(a, b)


def test_weight_gradients_lie_as_the_weights_do():
    """That is what the copies were for."""
    _, (_, to_weight, _) = run("x", (B,), True, BatchedLinear)
    assert to_weight.is_contiguous()


def test_without_vmap_it_is_linear():
    x, W, b = torch.randn(B, IN), torch.randn(OUT, IN, requires_grad=True), torch.randn(OUT)
    with BatchedLinear():
        output = linear(x, W, b)
    assert torch.equal(output, linear(x, W, b))
    (gradient,) = torch.autograd.grad(output.square().sum(), W)
    torch.testing.assert_close(gradient, torch.autograd.grad(linear(x, W, b).square().sum(), W)[0])


def test_half_precision_stays_autocasts():
    x, W = torch.randn(B, IN), torch.randn(S, OUT, IN)
    with torch.autocast("cpu", torch.bfloat16), BatchedLinear():
        assert vmap(lambda w: linear(x, w))(W).dtype == torch.bfloat16


@pytest.mark.parametrize("linearise", [False, True])
def test_a_network_under_vmap_gives_what_the_loop_gives(linearise, monkeypatch):
    """As on a GPU: all draws of a step at once."""
    monkeypatch.setattr(vmap_or_loop, "pays_batched", lambda theta: True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)).double()
    batch = torch.randn(7, 3, dtype=torch.float64), torch.randint(2, (7,))
    gradients = []
    for evaluation in ("vmap", "loop"):
        bayes = vi.variationalize(
            net, vi.likelihoods.Categorical(), vi.MeanField(), num_data=7, evaluation=evaluation, linearise=linearise,
            generator=torch.Generator().manual_seed(1),
        )  # fmt: skip
        bayes.loss(batch, estimator=vi.Estimator(groups=2), generator=torch.Generator().manual_seed(2)).backward()
        gradients.append([p.grad for p in bayes.parameters()])
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("shared", [True, False])
def test_many_fits_of_many_draws(shared):
    """A gradient inside a second vmap, as fits at once take it, against a loop over fits and draws, in float64."""
    g = torch.Generator().manual_seed(0)
    W, x = torch.randn(4, 3, 2, 5, generator=g).double(), torch.randn(4, 7, 5, generator=g).double()
    b = torch.randn(4, 3, 2, generator=g).double()

    def loss(W, b, x):
        at = (0, 0, None) if shared else (0, 0, 0)
        inputs = x if shared else x.expand(3, 7, 5) * torch.arange(1.0, 4.0).view(3, 1, 1)
        return vmap(lambda w, c, own: linear(own, w, c).sin().sum(), in_dims=at)(W, b, inputs).sum()

    expected = [torch.func.grad(loss, (0, 1))(*one) for one in zip(W, b, x, strict=True)]
    with BatchedLinear():
        found = vmap(torch.func.grad(loss, (0, 1)))(W, b, x)
    for one, parts in zip(found, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(parts), rtol=1e-12, atol=1e-12)
