"""A step that does not fit: a message with its sizes, and nothing lost."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from tests.gpu.gpu_cases import check_same_bits, values

pytestmark = pytest.mark.gpu


@contextmanager
def at_most(megabytes):
    """Inside, this process can have so much more than it has now."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    before = torch.cuda.get_per_process_memory_fraction()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + megabytes * 2**20) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before)
        torch.cuda.empty_cache()


def loader(n, width, batch):
    g = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(n, width, generator=g), torch.zeros(n, 1)), batch_size=batch)


def make(width, hidden, rank, device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    likelihood = vi.likelihoods.Gaussian(noise=1.0)
    return vi.variationalize(net, likelihood, vi.LowRankNormal(rank), evaluation="loop").to(device)


def test_a_posterior_that_is_too_large(gpu, tmp_path):
    """Four million weights at rank 16: 288 MB of parameters, about a gigabyte of a step."""
    bayes = make(2000, 2000, 16, gpu)
    before, data = values(bayes), loader(32, 2000, 8)
    with at_most(300), pytest.raises(torch.OutOfMemoryError, match="a step does not fit into memory") as caught:
        bayes.fit(data, steps=3, progress=False, checkpoint=vi.Checkpoint(tmp_path), schedule=vi.Schedule(staged=False))
    assert any("P = 4004001 weights" in note for note in caught.value.__notes__)
    assert any("after step 0" in note for note in caught.value.__notes__)
    check_same_bits(before, values(bayes))
    # with the memory there it goes on from the checkpoint
    result = bayes.fit(
        data,
        steps=3,
        progress=False,
        checkpoint=vi.Checkpoint(tmp_path, resume=True),
        schedule=vi.Schedule(staged=False),
    )
    assert result.steps == 3
    assert torch.isfinite(result.history["elbo"]).all()
