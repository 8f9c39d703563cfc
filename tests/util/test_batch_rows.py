"""Rows of a batch, as far as they are known."""

import pytest
import torch

from structvi.util.batch_rows import rows_of

x = torch.zeros(8, 3)


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (x, 8),
        ([x, (x[:, 0], {"mask": x})], 8),
        ([x, x[:4]], None),
        ([x, torch.tensor(1.0)], None),
        ([x, "name"], None),
        ([], None),
    ],
)
def test_rows(batch, rows):
    assert rows_of(batch) == rows
