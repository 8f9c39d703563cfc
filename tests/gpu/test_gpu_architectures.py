"""Every architecture with every family the whole way.

Cells run in another process: after some errors, a misaligned address for one, a process can do nothing more on its
GPU. Then the next cell has a new one.
"""

import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from tests.works import ARCHITECTURES, FAMILIES, FEATURES, run

pytestmark = pytest.mark.gpu


def prepare():
    """As the tests here: algorithms that are the same in every run, and warnings that are errors."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    warnings.simplefilter("error")


class Worker:
    """A process that runs cells one after the other, as long as its GPU answers."""

    pool: ProcessPoolExecutor | None = None

    def run(self, *cell: str) -> dict[str, str]:
        if self.pool is None:
            self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), prepare)
        try:
            result = self.pool.submit(run, *cell).result()
        except BrokenProcessPool:
            result = dict.fromkeys(FEATURES, "the process ended")
        if any("CUDA error" in reason or "process ended" in reason for reason in result.values()):
            self.close()
        return result

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
        self.pool = None


@pytest.fixture(scope="module")
def worker():
    worker = Worker()
    yield worker
    worker.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cell(architecture, family, device, worker):
    assert worker.run(architecture, family, str(device)) == {}
