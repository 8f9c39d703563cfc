"""The tests of a GPU: asked for by `-m gpu` (`make test-gpu`), skipped where there is none."""

import os
from pathlib import Path

import pytest
import torch

from tests.gpu.gpu_device import DEVICE

#: cuBLAS sums in the same order in every run only with a workspace of fixed size
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

HERE = Path(__file__).parent
MISSING = "no CUDA device here: these tests run on a GPU (make test-gpu)"


def is_there() -> bool:
    return DEVICE.type != "cuda" or torch.cuda.is_available()


def pytest_ignore_collect(collection_path, config):
    """`make test` does not even import them."""
    asked = "gpu" in (config.getoption("markexpr", "") or "")
    return True if collection_path.name.startswith("test_gpu") and not asked else None


def pytest_collection_modifyitems(items):
    if is_there():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(autouse=True)
def same_bits():
    """Convolutions by the same algorithm in every run; no TF32."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture
def device():
    return DEVICE


@pytest.fixture
def gpu(device):
    """The device, for what only a GPU has."""
    if device.type != "cuda":
        pytest.skip("for a GPU alone")
    return device
