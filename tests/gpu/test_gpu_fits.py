"""Fits of every kind on the device: half precision, resumed, around a trained network, grown; and files of them."""

import pytest
import torch
from torch.utils.data import DataLoader, Subset

import structvi as vi
from structvi.couplings import Noise
from tests.gpu.gpu_cases import CASES, N, check_same_bits, data, data_of, fitted, loader, make, values

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_a_fit_learns_and_predicts(name, precision, device):
    bayes = make(name)
    if precision is not None and name.startswith("linearised") and device.type == "cpu":
        pytest.skip("forward derivatives in half precision are for a GPU")
    before = values(bayes)
    result = fitted(bayes, device, data_of(name), precision=precision)
    assert torch.isfinite(result.history["elbo"]).all()
    assert any(not torch.equal(before[key], value) for key, value in values(bayes).items())
    assert all(p.device.type == device.type and p.dtype == torch.float32 for p in bayes.parameters())
    pred = bayes.predict(data_of(name).tensors[0], draws=4, generator=torch.Generator(device).manual_seed(0))
    assert pred.mean.device.type == device.type
    torch.testing.assert_close(pred.mean.sum(1), torch.ones(N, device=device))


@pytest.mark.parametrize("name", ["mean field", "covariance", "precision", "mixture", "rotated", "dropout layers"])
def test_a_resumed_fit_ends_in_the_bits_of_one_never_stopped(name, device, tmp_path):
    whole, first, again = make(name), make(name), make(name)
    fitted(whole, device, data_of(name), steps=12)

    def interrupt(history):
        if len(history) == 7:
            raise KeyboardInterrupt

    fitted(first, device, data_of(name), steps=12, checkpoint=vi.Checkpoint(tmp_path), callback=interrupt)
    result = fitted(again, device, data_of(name), steps=12, checkpoint=vi.Checkpoint(tmp_path, resume=True))
    assert any("resumed at step 7" in note for note in result.notes)
    check_same_bits(values(whole), values(again))


def test_a_fit_goes_on_on_another_device(gpu, tmp_path):
    """From the GPU to the CPU and back: the posterior is carried on, the draws come from another stream."""
    fitted(make("covariance"), gpu, data(), steps=9, checkpoint=vi.Checkpoint(tmp_path))
    for steps, where in ((15, "cpu"), (21, gpu)):
        again = make("covariance")
        result = fitted(again, where, data(), steps=steps, checkpoint=vi.Checkpoint(tmp_path, resume=True))
        assert any("another kind of device" in note for note in result.notes)
        assert result.steps == steps
        assert torch.isfinite(result.history["elbo"]).all()


@pytest.mark.parametrize("name", CASES)
def test_a_file_goes_from_device_to_cpu_and_back(name, device, tmp_path):
    bayes = make(name)
    fitted(bayes, device, data_of(name), steps=4)
    expected = values(bayes)
    for index, where in enumerate(("cpu", device)):
        bayes.save(tmp_path / f"{index}.safetensors")
        bayes = vi.load(tmp_path / f"{index}.safetensors", CASES[name][0](), device=where)
        check_same_bits(expected, values(bayes))
        assert all(p.device.type == torch.device(where).type for p in bayes.parameters())
        x = data_of(name).tensors[0]
        pred = bayes.predict(x, draws=4, generator=torch.Generator(where).manual_seed(0))
        assert bool(torch.isfinite(pred.mean).all())


@pytest.mark.parametrize("family", [vi.MeanField(), vi.LowRankNormal(3), vi.Rotated(vi.MeanField())], ids=repr)
def test_around_a_trained_network(family, device):
    torch.manual_seed(0)
    net = CASES["mean field"][0]().to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    x, t = (tensor.to(device) for tensor in data().tensors)
    for _ in range(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), t).backward()
        optimizer.step()
    bayes = vi.variationalize(net, vi.likelihoods.Categorical(), family)
    result = bayes.fit(loader(), steps=9, progress=False)
    assert torch.isfinite(result.history["elbo"]).all()
    around = vi.variationalize(net, vi.likelihoods.Categorical())
    train, held_out = (DataLoader(Subset(data(), part), 16) for part in (range(N // 2), range(N // 2, N)))
    kept = around.laplace(train, validation=held_out, progress=False)
    assert bool(torch.isfinite(torch.tensor(kept.elbo.value)))
    assert around.device.type == device.type


def test_what_is_around_a_fit(device):
    """evaluate, calibrate, diagnose, elbo, grow, sample, the head in closed form."""
    bayes = make("covariance")
    fitted(bayes, device, data(), steps=60)
    assert str(bayes.evaluate(loader(), draws=8))
    bayes.calibrate(loader(), draws=8)
    assert bayes.predict(data().tensors[0], draws=8).mean.device.type == device.type
    assert str(bayes.diagnose(loader()))
    assert bayes.sample(3)["head.weight"].device.type == device.type
    before = bayes.elbo(loader(), groups=64, generator=torch.Generator(device).manual_seed(0))
    bayes.grow(loader(), rank=5, steps=30, progress=False)
    after = bayes.elbo(loader(), groups=64, generator=torch.Generator(device).manual_seed(0))
    assert after.value >= before.value - 3 * (before.standard_error + after.standard_error)
    head = vi.variationalize_head(make("mean field").net.to(device), vi.likelihoods.Categorical())
    assert head.fit_head(loader()).elbo.value < 0


def test_log_densities(device):
    """A correlated normal in eight dimensions by vi.fit_density: the factor and the mean are found."""
    g = torch.Generator().manual_seed(0)
    U = torch.randn(8, 1, generator=g, dtype=torch.float64)
    covariance = (U @ U.mT + 0.3 * torch.eye(8, dtype=torch.float64)).to(device)
    target = torch.distributions.MultivariateNormal(torch.ones(8, dtype=torch.float64, device=device), covariance)
    space = vi.Parameters({"z": torch.zeros(8, dtype=torch.float64, device=device)})
    result = vi.fit_density(
        vi.LogDensity(lambda p: target.log_prob(p["z"]), space), vi.LowRankNormal(1), progress=False
    )
    assert abs(result.elbo.value) < 1e-3


def test_a_log_density_of_two_modes(device):
    """Modes are looked for on the device; draws by a generator of the CPU, and the fit that a CPU finds."""
    pytest.importorskip("arviz_stats", reason="corrected draws need it")

    def log_p(p):
        return torch.logaddexp(-0.5 * (p["z"] - 4).square().sum(), -0.5 * (p["z"] + 4).square().sum())

    results = []
    for where in ("cpu", device):
        space = vi.Parameters({"z": torch.zeros(2, dtype=torch.float64, device=where)})
        results.append(vi.fit_density(vi.LogDensity(log_p, space), vi.Mixture(vi.FullNormal(), 2), progress=False))
    there, here = results
    assert abs(here.elbo.value - there.elbo.value) < 1e-6
    drawn = here.sample(200, corrected=True, generator=torch.Generator().manual_seed(0))["z"]
    assert drawn.device.type == device.type
    assert 40 < int((drawn[:, 0] > 0).sum()) < 160


@pytest.mark.parametrize("name", ["mean field", "covariance", "precision"])
def test_hundreds_of_draws_at_once(name, device):
    """Loss and gradients at 600 draws in one call: those in float64, where there are no kernels, to 1e-3."""

    def same(groups, P, K, generator, dtype, device):
        noise = vi.couplings.paired(groups, P, K, torch.Generator().manual_seed(5), torch.float64)
        return Noise(*(x.to(device, dtype) for x in noise))

    results = []
    for dtype in (torch.float32, torch.float64):
        bayes = make(name).to(dtype).to(device)
        batch = tuple(tensor.to(device) for tensor in data(dtype).tensors)
        value = bayes.loss(batch, estimator=vi.Estimator(groups=300, coupling=same))
        value.backward()
        results.append([value.detach().double(), *(p.grad.double() for p in bayes.parameters())])
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() <= 1e-3 * other.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_a_predictor_serves_on_the_device(name, device):
    """The bits of predict."""
    bayes, x = make(name).to(device), data_of(name).tensors[0]
    expected = bayes.predict(x, draws=4, generator=torch.Generator().manual_seed(0))
    served = bayes.predictor(draws=4, generator=torch.Generator().manual_seed(0))
    outputs = served(x).outputs
    assert outputs.device.type == device.type
    assert torch.equal(outputs, expected.outputs)
