"""The Triton kernels, run by Triton's interpreter on the CPU, against the plain path."""

import os
import subprocess
import sys

import pytest

from structvi.families.numerics import has_triton

# the interpreter has to be asked for before Triton is imported
CHECK = """
import torch, structvi as vi
from structvi.families.numerics import _kernels
from tests.families.test_numerics import close, family, gradients

for form in (vi.LowRankNormal, vi.LowRankPrecision):
    for rank, groups in ((1, 1), (3, 2), (36, 1)):
        q = family(form(rank), torch.float32)
        if rank == 3:
            q.factor.data = q.factor.data.contiguous()  # row by row, as on a GPU
        assert _kernels(q.factor) is not None
        # the test's function has derivatives of about a hundred: that many roundings of float32
        both = (gradients(q, fused, vi.couplings.paired, groups) for fused in (True, False))
        for got, expected in zip(*both, strict=True):
            close(got, expected, 1e-4)
q = family(vi.MeanField(), torch.float32)
both = (gradients(q, fused, vi.couplings.paired, 2) for fused in (True, False))
for got, expected in zip(*both, strict=True):
    close(got, expected, 1e-4)
print("checked")
"""


@pytest.mark.skipif(not has_triton(), reason="this build of torch has no Triton")
def test_kernels_by_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.stdout.strip() == "checked", run.stderr
