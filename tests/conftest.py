"""What every test shares: one thread, and a global stream and checks of distributions that start the same in each."""

# ruff: noqa: E402 (what must be set before torch and numpy are imported)

import fcntl
import gc
import os
import pickle
import weakref

gc.disable()  # what imports and collection make stays: a third of their time would go into looking through it
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for numpy and scikit-learn too, and for processes that tests start

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

torch.set_num_threads(1)


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def validated():
    """The checks of distributions are on, which the first torch.compile switches off for the whole process."""
    torch.distributions.Distribution.set_default_validate_args(True)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory, request):
    """`made_once(name, make)`: what `make()` returns, computed by the first worker that asks and read by the others."""
    folder = tmp_path_factory.getbasetemp()
    if "workerinput" in dir(request.config):  # of pytest-xdist: workers have folders of their own in one folder
        folder = folder.parent

    def get(name, make):
        with open(folder / f"{name}.pickle", "ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # others wait here
            if file.tell() == 0:
                pickle.dump(make(), file)
                file.flush()
            file.seek(0)
            return pickle.load(file)

    return get


class PeakBytes(TorchDispatchMode):
    """Live bytes of storages made inside, and their peak."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.sizes = 0, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in before or key in self.sizes:
                continue
            self.sizes[key] = storage.nbytes()
            self.live += self.sizes[key]
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, key)
        return result

    def _free(self, key):
        self.live -= self.sizes.pop(key, 0)


@pytest.fixture
def peak_bytes():
    """The tracker, for tests of memory."""
    return PeakBytes
