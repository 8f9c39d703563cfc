"""Products of linear layers at S weights on tensor cores: float32's precision, and the bits of a captured step."""

import pytest
import torch
from torch import nn

import structvi as vi
from structvi.networks import batched_products

pytestmark = pytest.mark.gpu
#: S, M, K, N: the three products of a large and of a narrow layer, and sizes that divide by nothing
SIZES = ((8, 128, 784, 1024), (8, 128, 1024, 10), (8, 10, 128, 1024), (3, 128, 10, 1024), (3, 65, 33, 67), (2, 5, 3, 2))


def apart(x, how):
    """The same numbers, otherwise in memory: transposed, or further from one draw to the next, at any place."""
    if how == "transposed":
        return x.mT.contiguous().mT
    wide = x.new_zeros(len(x), x[0].numel() + 3)
    wide[:, : x[0].numel()] = x.flatten(1)
    return wide[:, : x[0].numel()].unflatten(1, x.shape[1:])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_have_the_precision_of_float32(sizes, device):
    if device.type != "cuda":
        pytest.skip("the kernel is one for a GPU")
    from structvi.networks.triton_products import product

    S, M, K, N = sizes
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(S, *rest, generator=generator).to(device) for rest in ((M, K), (K, N)))
    exact = x.double() @ y.double()
    # sums of K products in float32; a product of TF32 alone is off by 1e-3
    allowed = 3e-6 * exact.abs().max().item()
    for a in (x, apart(x, "transposed"), apart(x, "wide"), x[:1].expand_as(x)):
        for b in (y, apart(y, "transposed"), apart(y, "wide")):
            expected = exact if a.stride(0) else a.double() @ b.double()
            assert (product(a, b).double() - expected).abs().max().item() <= allowed
    bias = apart(torch.randn(S, 1, N, generator=generator).to(device), "wide").squeeze(1)
    room = x.new_zeros(S, M * N + 5)
    found = product(x, y, out=room[:, 2 : 2 + M * N].unflatten(1, (M, N)), bias=bias)
    assert (found.double() - exact - bias.unsqueeze(1).double()).abs().max().item() <= 2 * allowed
    assert room[:, :2].abs().max() == 0 and room[:, 2 + M * N :].abs().max() == 0  # noqa: PT018


def stepped(capture, device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(100, 256), nn.ReLU(), nn.Linear(256, 10))
    bayes = vi.variationalize(
        net, vi.likelihoods.Categorical(), vi.LowRankNormal(16), num_data=640, evaluation="vmap"
    ).to(device)
    step = bayes.stepper(lr=0.01, estimator=vi.Estimator(groups=2), compute=vi.Compute(capture=capture))
    batch = torch.randn(64, 100, device=device), torch.randint(10, (64,), device=device)
    losses = [step(batch) for _ in range(4)]
    return losses, [p.detach().clone() for p in bayes.parameters()], step.captured


def test_a_captured_step_has_their_bits(device, monkeypatch):
    used = []
    own = batched_products._on_tensor_cores
    monkeypatch.setattr(batched_products, "SMALL", 2**16)
    monkeypatch.setattr(batched_products, "_on_tensor_cores", lambda x: used.append(own(x)) or used[-1])
    (losses, parameters, captured), (others, eager, _) = (stepped(capture, device) for capture in (True, False))
    assert captured == (device.type == "cuda")
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    assert bool(used) == (device.type == "cuda")
    assert all(one == hopper for one in used)
    assert losses == others
    assert all(torch.equal(a, b) for a, b in zip(parameters, eager, strict=True))


def test_a_step_on_tensor_cores_is_that_of_plain_units(device, monkeypatch):
    """Gradients of all weights of all draws, to the rounding of float32."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, 1024), nn.Tanh(), nn.Linear(1024, 10)).to(device)
    bayes = vi.variationalize(net, vi.likelihoods.Categorical(), vi.MeanField(), num_data=128, evaluation="vmap")
    bayes = bayes.to(device)
    batch = torch.randn(128, 784, device=device), torch.randint(10, (128,), device=device)
    found = []
    for small in (0, 2**60):
        monkeypatch.setattr(batched_products, "SMALL", small)
        theta = bayes.family().draw(4, generator=torch.Generator(device).manual_seed(0)).theta.detach()
        theta.requires_grad_()
        bayes.model.log_likelihood(theta, batch).sum().backward()
        found.append(theta.grad)
    error = (found[0] - found[1]).abs().max() / found[1].abs().max()
    assert error.item() <= 1e-5
