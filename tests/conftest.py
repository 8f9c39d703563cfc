"""What every test shares: one thread, and a global stream that starts the same in each."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
