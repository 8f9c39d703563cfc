"""Several processes: NCCL with one rank, gloo with two on one device; data parallel, shards and DDP."""

import sys
from pathlib import Path

import pytest
import torch

import structvi as vi
from tests.gpu.gpu_cases import N, data, fitted, loader, make, values
from tests.gpu.gpu_device import DEVICE

sys.path.append(str(Path(__file__).parents[1] / "distributed"))
from tests.distributed.launching import launch

pytestmark = pytest.mark.gpu

STEPS = {"steps": 9, "progress": False, "seed": 3, "schedule": vi.Schedule(staged=False, stop=False)}
NAMES = ("mean field", "covariance", "precision")


def fits(rank, size, device, names):
    """Data parallel, sharded; and a loop with DDP."""
    from torch.nn.parallel import DistributedDataParallel

    from structvi.distributed import LossModule, gather, shard

    torch.manual_seed(rank)
    out = {}
    for name in names:
        own = data(torch.float64)
        bayes = make(name, torch.float64).to(device)
        result = bayes.fit(loader(own, size), **STEPS)
        out[name, "data"] = values(bayes), result.history["elbo"], result.notes
        bayes = shard(make(name, torch.float64).to(device))
        history = bayes.fit(loader(own, size), **STEPS).history
        out[name, "sharded"] = values(gather(bayes)), history["elbo"], None
        bayes = make(name, torch.float64).to(device)
        x, t = (tensor.to(device) for tensor in own.tensors)
        module = DistributedDataParallel(LossModule(bayes))
        part = slice(rank * (N // size), (rank + 1) * (N // size))
        module((x[part], t[part]), generator=torch.Generator(device).manual_seed(3)).backward()
        out[name, "ddp"] = {key: p.grad.cpu() for key, p in bayes.named_parameters()}
    return out


def expected(name, device):
    bayes = make(name, torch.float64).to(device)
    return bayes, fitted(
        bayes, device, data(torch.float64), capture=False, schedule=vi.Schedule(staged=False, stop=False)
    )


def check_close(one, other, tolerance):
    assert one.keys() == other.keys()
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def one_rank():
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    return launch(fits, 1, 1, str(DEVICE), NAMES, backend=backend)


@pytest.fixture(scope="module")
def two_ranks():
    return launch(fits, 2, 2, str(DEVICE), NAMES, backend="gloo")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["data", "sharded"])
def test_ranks_compute_what_one_process_does(name, how, one_rank, two_ranks, device):
    """To 1e-6 in float64: Adam divides by the size of small gradients, and sums are in another order."""
    bayes, result = expected(name, device)
    for out in (*one_rank, *two_ranks):
        got, elbo, _ = out[name, how]
        torch.testing.assert_close(elbo, result.history["elbo"], rtol=1e-6, atol=1e-6)
        check_close(got, values(bayes), 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_ddp_has_the_gradient_of_the_union(name, one_rank, two_ranks, device):
    for ranks in (one_rank, two_ranks):
        used = N // len(ranks) * len(ranks)
        bayes = make(name, torch.float64).to(device)
        x, t = (tensor[:used].to(device) for tensor in data(torch.float64).tensors)
        bayes.loss((x, t), generator=torch.Generator(device).manual_seed(3)).backward()
        for out in ranks:
            check_close(out[name, "ddp"], {key: p.grad.cpu() for key, p in bayes.named_parameters()}, 1e-9)
